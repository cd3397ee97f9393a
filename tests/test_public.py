"""The public surface: frozen, documented with examples, and light to import."""

import inspect
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import mirrored as mr
from mirrored import testing

DOCS = Path(mr.__file__).parents[2] / "docs"


PUBLIC = {
    "AutoShardPolicy", "Checkpoint", "CheckpointError", "ClusterConfigError", "ClusterResolver", "ClusterSpec",
    "ClusterStartError", "CollectiveCommunication", "CollectiveHangError", "CommunicationImplementation",
    "CommunicationOptions", "ContextError", "DeviceError", "FactorOfReplicasError", "FactorOfReplicasWarning", "InputContext",
    "HierarchicalCopyAllReduce", "InputOptions", "KubernetesClusterResolver", "MirroredStrategy", "MultiWorkerMirroredStrategy",
    "NcclAllReduce", "OneDeviceStrategy",
    "OneProgramError", "Optimizer", "PerReplica", "PerReplicaError", "Plan", "PlanError", "PreemptionHandler",
    "ProgramMismatchError",
    "RecompilationWarning", "ReduceOp", "ReductionToOneDevice", "ReplicaContext", "ReplicasDivergeError",
    "ReplicasDivergeWarning", "SameNoiseWarning", "SimpleClusterResolver",
    "SlurmClusterResolver", "Storage", "Strategy", "StrategyMismatchError", "TFConfigClusterResolver", "UnevenReplicasError",
    "UnevenReplicasWarning",
    "ValueContext", "Variable", "VariableAggregation", "VariableLostError", "VariableSynchronization", "VariableTree",
    "WorkerLostError",
    "cond", "data", "eager", "export",
    "fori_loop", "function", "get_replica_context", "get_strategy", "grad", "has_strategy", "in_cross_replica_context",
    "losses", "plan", "profile", "progress", "report", "scan", "topology", "value_and_grad",
}  # fmt: skip
TESTING = {
    "InputOfWorkers", "ProgramCount", "assert_compiles", "assert_equal_copies", "assert_same_on_any_replicas", "copies",
    "count_programs", "input_of_workers",
}  # fmt: skip
MODULES = {"launch", "checkpoint", "optimizer", "preemption", "testing"}


def test_public_names_are_frozen() -> None:
    assert {name for name in vars(mr) if not name.startswith("_")} - MODULES == PUBLIC
    assert {name for name in vars(testing) if not name.startswith("_")} == TESTING


def test_all_public_names_are_there_whoever_asks_first() -> None:
    taken: dict[str, object] = {}
    exec("from mirrored import *", taken)
    assert set(mr.__all__) == set(taken) - {"__builtins__"} == PUBLIC <= set(dir(mr))


def test_public_names_and_methods_are_documented_with_examples() -> None:
    api = "\n".join(page.read_text() for page in sorted(DOCS.glob("api/*.md")))
    for name in PUBLIC - {"data", "losses"}:
        thing = getattr(mr, name)
        assert f"mirrored.{name}" in api and inspect.getdoc(thing), name
        if not (inspect.isclass(thing) and issubclass(thing, Exception)) and thing is not mr.Strategy:
            assert ">>>" in inspect.getdoc(thing), f"{name} has no example"
            page = re.search(r"^In TensorFlow: https://www\.tensorflow\.org/\S+$", inspect.getdoc(thing), re.MULTILINE)
            assert page or name not in TENSORFLOW_NAMES, f"{name} does not name TensorFlow's page"
    for name in TESTING:
        thing = getattr(testing, name)
        assert f"mirrored.testing.{name}" in api, name
        assert ">>>" in inspect.getdoc(thing) or inspect.isclass(thing), f"{name} has no example"  # the classes are results
    inputs, saved = (mr.data.NumpyDataset, mr.data.DistributedIterator, mr.InputContext), (mr.Checkpoint, mr.PreemptionHandler)
    for owner in (mr.Strategy, mr.ReplicaContext, mr.Variable, mr.Optimizer, mr.PerReplica, *inputs, *saved):
        for name, member in vars(owner).items():
            is_public = not name.startswith(("_", "experimental_")) and (callable(member) or isinstance(member, property))
            assert not is_public or (inspect.getdoc(member) and re.search(rf"\b{name}\b", api)), f"{owner.__name__}.{name}"


TENSORFLOW_NAMES = {
    "MirroredStrategy", "OneDeviceStrategy", "ReduceOp", "ReplicaContext", "ValueContext", "Variable", "VariableAggregation",
    "VariableSynchronization", "get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context", "function",
    "AutoShardPolicy", "InputContext", "InputOptions", "PerReplica", "Optimizer", "MultiWorkerMirroredStrategy",
    "CommunicationOptions", "CommunicationImplementation", "ClusterResolver", "ClusterSpec", "TFConfigClusterResolver",
    "SimpleClusterResolver", "SlurmClusterResolver", "KubernetesClusterResolver", "Checkpoint", "PreemptionHandler",
    "NcclAllReduce", "HierarchicalCopyAllReduce", "ReductionToOneDevice",
}  # fmt: skip


IMPORTS = """
import sys
import mirrored as mr
assert "jax" not in sys.modules, "until a name is asked for, here by several threads at once"
from concurrent.futures import ThreadPoolExecutor
questions = [dir, *[lambda m, n=n: getattr(m, n) for n in ("Variable", "data", "scan", "optimizer")]]
with ThreadPoolExecutor(8) as pool:
    found = [future.result() for future in [pool.submit(question, mr) for question in questions]]
assert "Variable" in found[0] and found[1] is mr.Variable and found[2] is mr.data
import jax
jax.config.update("jax_num_cpu_devices", 3)
optional = "grain orbax tensorflow torch flax keras matplotlib sklearn mirrored.testing google.protobuf google_crc32c".split()
assert not set(optional) & set(sys.modules) and jax.device_count() == 3

def missing(package, use):
    sys.modules[package] = None
    try:
        use()
    except ImportError as error:
        assert str(error) == f"mr.data needs {package}, which is not installed: pip install grain google-crc32c protobuf.", error
    else:
        raise AssertionError(package)
    del sys.modules[package]

import numpy as np
strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
list(strategy.distribute_dataset(strategy.make_numpy_dataset(np.arange(5)).batch(2)))
assert not set(optional) & set(sys.modules), "nothing is loaded that is not used"
missing("google.protobuf", lambda: mr.data.make_example({"x": 1}))
missing("google_crc32c", lambda: mr.data.write_tfrecords(sys.argv[1], [b"x"]))
missing("grain", lambda: mr.data.tfrecord_dataset(sys.executable))
mr.data.make_example({"x": 1})
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindMessageTypeByName("tensorflow.Example")
except KeyError:
    print("the default pool is as TensorFlow wants it")
"""


def test_importing_wakes_no_backend_and_packages_are_loaded_when_they_are_used_and_named_when_missing(tmp_path: Path) -> None:
    """Nor JAX, which may still be configured then. Nothing warns."""
    command = [sys.executable, "-W", "error", "-c", IMPORTS, tmp_path / "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "the default pool is as TensorFlow wants it\n", done.stderr


def test_errors_are_shown_under_the_name_to_catch() -> None:
    things = [getattr(mr, name) for name in PUBLIC]
    errors = [thing for thing in things if isinstance(thing, type) and issubclass(thing, Exception)]
    assert len(errors) > 12
    for error in (*errors, mr.data.TFRecordError):
        home = mr.data if error is mr.data.TFRecordError else mr
        assert (error.__module__, getattr(home, error.__name__)) == (home.__name__, error)
        assert pickle.loads(pickle.dumps(error)) is error  # noqa: S301
    assert traceback.format_exception_only(mr.PerReplicaError("x")) == ["mirrored.PerReplicaError: x\n"]

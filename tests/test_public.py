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
    "OneProgramError", "Optimizer", "PerReplica", "PerReplicaError", "PreemptionHandler", "ProgramMismatchError",
    "RecompilationWarning", "ReduceOp", "ReductionToOneDevice", "ReplicaContext", "ReplicasDivergeError",
    "ReplicasDivergeWarning", "SimpleClusterResolver",
    "SlurmClusterResolver", "Strategy", "StrategyMismatchError", "TFConfigClusterResolver", "UnevenReplicasError",
    "ValueContext", "Variable", "VariableAggregation", "VariableLostError", "VariableSynchronization", "VariableTree",
    "WorkerLostError",
    "cond", "data", "eager", "export",
    "fori_loop", "function", "get_replica_context", "get_strategy", "grad", "has_strategy", "in_cross_replica_context",
    "losses", "profile", "progress", "report", "scan", "value_and_grad",
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
            assert "Source: " in inspect.getdoc(thing) or name not in TENSORFLOW_NAMES, f"{name} names no source"
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


def test_importing_wakes_no_backend_and_loads_no_optional_package() -> None:
    """Nor JAX, until a name is asked for, here by several threads at once; JAX may still be configured then. Nothing warns."""
    code = (
        "import sys, mirrored; from concurrent.futures import ThreadPoolExecutor as Pool; assert 'jax' not in sys.modules; "
        "questions = [dir, *[lambda m, n=n: getattr(m, n) for n in ('Variable', 'data', 'scan', 'optimizer')]]; "
        "found = [f.result() for f in [Pool(8).submit(q, mirrored) for q in questions]]; "
        "assert 'Variable' in found[0] and found[1] is mirrored.Variable and found[2] is mirrored.data; "
        "import jax; jax.config.update('jax_num_cpu_devices', 3); "
        "optional = ('grain', 'orbax', 'tensorflow', 'torch', 'flax', 'keras', 'matplotlib', 'sklearn', "
        "'mirrored.testing'); "
        "print([name for name in optional if name in sys.modules], jax.device_count())"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.split() == ["[]", "3"]


def test_errors_are_shown_under_the_name_to_catch() -> None:
    things = [getattr(mr, name) for name in PUBLIC]
    errors = [thing for thing in things if isinstance(thing, type) and issubclass(thing, Exception)]
    assert len(errors) > 12
    for error in (*errors, mr.data.TFRecordError):
        home = mr.data if error is mr.data.TFRecordError else mr
        assert (error.__module__, getattr(home, error.__name__)) == (home.__name__, error)
        assert pickle.loads(pickle.dumps(error)) is error  # noqa: S301
    assert traceback.format_exception_only(mr.PerReplicaError("x")) == ["mirrored.PerReplicaError: x\n"]

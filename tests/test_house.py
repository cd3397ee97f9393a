"""The house stands: floors, no cycles, sizes, a jax-free ground, a frozen and documented public surface."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mirrored as mr

PACKAGE = Path(mr.__file__).parent
DOCS = PACKAGE.parent.parent / "docs"

#: A file imports only from floors above it in this list, or from its own.
FLOORS = (
    ("_typing", "_exit_codes", "_errors", "_env", "_escape", "_process", "_progress", "_shutdown"),
    ("_cluster_spec", "_launchers", "_cluster", "_wire", "_gathering", "_preflight"),
    ("_launch_ending", "_launch_keeper", "_launch_output", "_launch_signals"),
    ("_launch_group", "_env_command"),
    ("launch", "__main__"),
    ("_coordination", "_verdict", "_stall"),
    ("_agreement", "_uncaught", "_guard"),
    ("_jax.primitives", "_jax.versions"),
    ("_jax.marks",),
    ("_jax.jaxprs", "_jax.user_code"),
    ("_jax", "_jax.tracing", "_jax.distributed", "_reduce_op", "_options", "_conversion", "_checksum"),
    ("_mesh", "_pace", "_collectives", "_home"),
    ("_runtime",),
    ("_joint",),
    ("_placing",),
    ("_values",),
    ("_stacked", "_context", "_distributed_values"),
    ("_variables", "_mirror_proof"),
    ("_divergence",),
    ("_lift", "_signature"),
    ("_guards", "_programs", "_alike", "_slots"),
    ("_merge", "_step"),
    ("_uneven",),
    ("_replicate",),
    ("_explain",),
    ("_function",),
    ("_loops", "_gradients"),
    ("data._feed", "data._grain", "data._input_context", "data._position", "data._rebatch", "data._workers"),
    ("data._source", "data._steps"),
    ("data._auto_shard",),
    ("data._iterator",),
    ("data._dataset",),
    ("data._record_reader", "data._layout"),
    ("data._feature", "data._tfrecord"),
    ("data._example",),
    ("data",),
    ("_strategy",),
    ("_strategies",),
    ("losses", "optimizer", "_check_command"),
    ("_integrity", "_checkpoint_state"),
    ("_checkpoint_files", "_checkpoint_agreement"),
    ("_checkpoint_writer",),
    ("checkpoint",),
    ("preemption",),
    ("__init__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MAX_LINES = 400
#: Files that may be longer, and why.
LONGER = {
    "_strategy": 610,  # the public verbs: half of it is their documentation
    "_variables": 600,  # one class with the operators and conversions of an array
    "_mirror_proof": 520,  # one table and one walk
}
MAX_BODY = 60

PUBLIC = {
    "AutoShardPolicy", "Checkpoint", "CheckpointError", "ClusterConfigError", "ClusterResolver", "ClusterSpec",
    "ClusterStartError", "CollectiveCommunication", "CollectiveHangError", "CommunicationImplementation",
    "CommunicationOptions", "ContextError", "DeviceError", "FactorOfReplicasError", "FactorOfReplicasWarning", "InputContext",
    "InputOptions", "KubernetesClusterResolver", "MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy",
    "OneProgramError", "Optimizer", "PerReplica", "PerReplicaError", "PreemptionHandler", "ProgramMismatchError",
    "RecompilationWarning", "ReduceOp", "ReplicaContext", "ReplicasDivergeError", "SimpleClusterResolver",
    "SlurmClusterResolver", "Strategy", "StrategyMismatchError", "TFConfigClusterResolver", "UnevenReplicasError",
    "ValueContext", "Variable", "VariableAggregation", "VariableSynchronization", "WorkerLostError", "cond", "data", "eager",
    "fori_loop", "function", "get_replica_context", "get_strategy", "grad", "has_strategy", "in_cross_replica_context",
    "losses", "scan", "value_and_grad",
}  # fmt: skip


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts)
        yield (name.removesuffix(".__init__") if len(parts) > 1 else name), path


MODULES = dict(_modules())


def _imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield the modules of ours that a file imports, with the import statement."""
    package = ["mirrored", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1]
        names = [node.module] if node.module else [alias.name for alias in node.names]
        for name in names:
            yield ".".join([*base[1:], name]), node


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_the_floors(name: str) -> None:
    for imported, _ in _imports(MODULES[name]):
        target = imported if imported in FLOOR_OF else imported.split(".")[0]
        assert FLOOR_OF[target] <= FLOOR_OF[name], f"{name} imports {imported}"


def test_no_cycles_also_within_a_floor() -> None:
    graph = {name: {i for i, _ in _imports(path) if i in MODULES} for name, path in MODULES.items()}
    done: set[str] = set()
    while ready := [name for name in graph if name not in done and graph[name] <= done | {name}]:
        done.update(ready)
    assert done == set(graph), f"cycle among {set(graph) - done}"


@pytest.mark.parametrize("name", MODULES)
def test_no_import_of_ours_inside_a_function(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    inside = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f) if isinstance(n, ast.ImportFrom)]
    assert not [node.lineno for node in inside if node.level], name


def test_the_ground_names_no_jax() -> None:
    ground = ("_env", "_exit_codes", "_errors", "_cluster_spec", "_launchers", "_cluster", "_wire", "_gathering", "_preflight")
    watch = (
        "_escape",
        "_process",
        "_progress",
        "_shutdown",
        "_coordination",
        "_verdict",
        "_stall",
        "_agreement",
        "_uncaught",
        "_guard",
    )
    launcher = ("_launch_ending", "_launch_keeper", "_launch_output", "_launch_signals", "_launch_group", "launch")
    for name in (*ground, *watch, *launcher):
        assert "import jax" not in MODULES[name].read_text()


@pytest.mark.parametrize("name", MODULES)
def test_sizes(name: str) -> None:
    source = MODULES[name].read_text()
    assert len(source.splitlines()) <= LONGER.get(name, MAX_LINES)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring else node.body
            assert not body or body[-1].end_lineno - body[0].lineno < MAX_BODY, f"{name}.{node.name}"
            assert len(node.args.posonlyargs) + len(node.args.args) <= 7, f"{name}.{node.name}"


@pytest.mark.parametrize("name", MODULES)
def test_functions_are_annotated(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not missing and node.returns is not None, f"{name}.{node.name}: {missing or 'the result'}"


def test_no_placeholder_is_left() -> None:
    for name, path in MODULES.items():
        assert not re.search(r"TODO|FIXME|XXX|NotImplementedError", path.read_text()), name


def test_public_names_are_frozen() -> None:
    assert {name for name in vars(mr) if not name.startswith("_")} - {"launch", "checkpoint", "optimizer", "preemption"} == PUBLIC


def test_public_names_are_documented_with_examples() -> None:
    api = (DOCS / "api.md").read_text()
    for name in PUBLIC - {"data", "losses"}:
        thing = getattr(mr, name)
        assert f"mirrored.{name}" in api, f"{name} is not in docs/api.md"
        assert inspect.getdoc(thing), name
        is_error = inspect.isclass(thing) and issubclass(thing, Exception)
        if not is_error and thing is not mr.Strategy:
            assert ">>>" in inspect.getdoc(thing), f"{name} has no example"
            assert "Source: " in inspect.getdoc(thing) or name not in _TENSORFLOW_NAMES, f"{name} names no source"


_TENSORFLOW_NAMES = {
    "MirroredStrategy", "OneDeviceStrategy", "ReduceOp", "ReplicaContext", "ValueContext", "Variable", "VariableAggregation",
    "VariableSynchronization", "get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context", "function",
    "AutoShardPolicy", "InputContext", "InputOptions", "PerReplica", "Optimizer", "MultiWorkerMirroredStrategy",
    "CommunicationOptions", "CommunicationImplementation", "ClusterResolver", "ClusterSpec", "TFConfigClusterResolver",
    "SimpleClusterResolver", "SlurmClusterResolver", "KubernetesClusterResolver", "Checkpoint", "PreemptionHandler",
}  # fmt: skip


def test_public_methods_are_documented() -> None:
    api = (DOCS / "api.md").read_text()
    state = (mr.Checkpoint, mr.PreemptionHandler)
    inputs = (mr.data.NumpyDataset, mr.data.DistributedIterator, mr.InputContext)
    for owner in (mr.Strategy, mr.ReplicaContext, mr.Variable, mr.Optimizer, mr.PerReplica, *inputs, *state):
        for name, member in vars(owner).items():
            if name.startswith(("_", "experimental_")) or not (callable(member) or isinstance(member, property)):
                continue
            assert inspect.getdoc(member), f"{owner.__name__}.{name}"
            assert re.search(rf"\b{name}\b", api), f"{owner.__name__}.{name} is not in docs/api.md"


def test_docstrings_begin_with_one_sentence() -> None:
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                first = text.split("\n\n")[0].strip()
                assert first.endswith((".", ":", "?")), f"{name}.{getattr(node, 'name', '')}: {first}"


def test_importing_wakes_no_backend_and_loads_no_optional_package() -> None:
    code = (
        "import sys, jax, mirrored; jax.config.update('jax_num_cpu_devices', 3); "
        "optional = ('grain', 'orbax', 'tensorflow', 'torch', 'flax', 'keras', 'matplotlib', 'sklearn'); "
        "print([name for name in optional if name in sys.modules], jax.device_count())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.split() == ["[]", "3"]


@pytest.mark.parametrize("num_variables", [2, 200])
def test_a_warm_run_stays_in_few_files(num_variables: int, strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        variables = [mr.Variable(0.0) for _ in range(num_variables)]

    def step() -> None:
        for variable in variables:
            variable.assign(variable + 1.0)

    strategy2.run(step)
    files, calls = set(), 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(Path(frame.f_code.co_filename).name)
            calls += 1

    sys.setprofile(count)
    try:
        strategy2.run(step)
    finally:
        sys.setprofile(None)
    hot = {"_strategy.py", "_replicate.py", "_home.py", "_signature.py", "_pace.py"}
    glue = {"_context.py", "tracing.py", "_programs.py", "_lift.py"}  # one-line look-ups
    assert files <= hot | glue
    assert calls <= 33, calls  # and none per variable

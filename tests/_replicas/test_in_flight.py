"""Programs on virtual CPU devices: their number in flight is bounded, and so they never wait for each other for ever.

A deadlock needs a fresh process with few pool threads, and shows as an abort of XLA: docs/design/cpu-rendezvous.md.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import run_program
from strategies import numbers, variable

import mirrored as mr
from mirrored import _process
from mirrored._replicas import in_flight
from mirrored._workers.progress import Progress

#: XLA aborts the process when replicas have waited so long for each other.
SHORT_PATIENCE = {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=20"}
#: The user starts JAX, whose pool then has no thread more than there are devices.
STARTED_BY_USER = "jax.config.update('jax_num_cpu_devices', 8); jax.devices()"

PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
{start}
import mirrored as mr
from mirrored._replicas import in_flight

def strategy_of(count):
    return mr.MirroredStrategy([f"cpu:{{i}}" for i in range(count)])

def training(strategy, num_collectives):
    with strategy.scope():
        w = mr.Variable(np.zeros((16, 16), "float32"))

    def step(x):
        all_reduce = mr.get_replica_context().all_reduce
        total = sum(all_reduce("mean", jnp.tanh(x * i)) for i in range(num_collectives))
        for _ in range(num_collectives):
            x = jnp.tanh(all_reduce("mean", x + w))
        w.assign(0.5 * w + total + x)

    x = strategy.distribute_values_from_function(lambda ctx: np.full((16, 16), ctx.replica_id_in_sync_group, "float32"))
    return w, lambda: strategy.run(step, args=(x,))

def run(num_steps, *trainings):
    for _ in range(num_steps):
        for _, step in trainings:
            step()
    for w, _ in trainings:
        assert np.isfinite(w.numpy()).all() and w.numpy().any()

def two_threads(strategy, num_steps):
    trainings = [training(strategy, 3) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: run(num_steps, one), trainings))

def verbs(strategy, num_steps):
    w, step = training(strategy, 3)
    with strategy.scope():
        seen = mr.Variable(0, synchronization="on_read", aggregation="sum")
        mean = mr.Variable(np.zeros(4, "float32"), aggregation="mean")
    x = strategy.distribute_values_from_function(lambda ctx: np.full(4, ctx.replica_id_in_sync_group, "float32"))
    steps = mr.function(lambda: (step(), step(), strategy.reduce("sum", w)))
    for _ in range(num_steps):
        step()
        strategy.reduce("mean", x, axis=0)
        strategy.gather(x, axis=0)
        mean.assign_add(x)
        seen.assign_add(1)
        w.assign_sub(np.ones((16, 16), "float32"))
        steps()
    assert int(seen) == num_steps, seen

s = strategy_of({count})
run(150, training(s, 1))
run(25, training(s, 20))
run(50, training(s, 3), training(strategy_of(2), 3))
two_threads(s, 50)
verbs(s, 10)
print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("count", "start"), [(8, STARTED_BY_USER), (16, "")], ids=["pool of JAX", "own pool"])
def test_programs_of_all_kinds(count: int, start: str) -> None:
    """Many steps that nobody waits for, long and short ones, strategies of different sizes in turns, two threads, all verbs."""
    done = run_program(PROGRAM.format(start=start, count=count), env=SHORT_PATIENCE, timeout=115)
    assert done.stdout.strip() == "done", done.stderr[-3000:]


# -- the bound itself


@dataclasses.dataclass(eq=False)
class Witness:
    """A result that is computed when somebody waits for it."""

    number: int
    waited: list[int]
    is_gone: bool = False
    dtype = np.dtype("float32")  # no field

    def is_deleted(self) -> bool:
        return self.is_gone

    def block_until_ready(self) -> None:
        assert not self.is_gone
        self.waited.append(self.number)


@pytest.fixture(autouse=True)
def _empty_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("in_flight", "joint_in_flight"):
        monkeypatch.setattr(_process, name, type(getattr(_process, name))())


def test_older_programs_are_waited_for_before_there_are_too_many() -> None:
    waited: list[int] = []
    for number in range(100):
        in_flight.started(Witness(number, waited))
        assert number - (waited[-1] if waited else -1) <= in_flight.MAX_IN_FLIGHT
        assert len(_process.in_flight) < in_flight.MAX_IN_FLIGHT
    assert waited == list(range(in_flight.WAIT_FOR - 1, waited[-1] + 1, in_flight.WAIT_FOR))
    assert in_flight.MAX_IN_FLIGHT < 32, "XLA's own limit, at which it blocks"
    waited.clear()
    _process.in_flight.clear()
    last = in_flight.WAIT_FOR - 1
    for number in range(in_flight.MAX_IN_FLIGHT):
        in_flight.started(Witness(number, waited, is_gone=number == last))
    assert waited == [last - 1], "a result that was deleted is not waited for"


def test_two_programs_of_several_workers_are_in_flight_and_older_ones_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    checked: list[int] = []
    progress = Progress()
    monkeypatch.setattr(in_flight, "progress", progress)
    for number in range(10):
        witness = Witness(number, waited, is_gone=number == 5)
        in_flight.joined(witness, lambda witness: checked.append(witness.number))
        assert progress.witness is witness
        assert len(_process.joint_in_flight) <= 2 and len(waited) >= number - 2
    expected = [number for number in range(10) if number != 5]
    assert waited == checked == expected[:-2] and progress.finished == len(waited)
    in_flight.finish()
    assert waited == checked == expected and progress.finished == 9
    in_flight.joined(jax.random.key(0))
    assert progress.witness.is_ready() in (True, False), "what the guard asks; a key cannot tell, and its data can"
    in_flight.finish()


# -- what is paced


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """The results of the programs that were paced."""
    witnesses: list[jax.Array] = []
    original = in_flight.started
    monkeypatch.setattr(in_flight, "started", lambda witness: (witnesses.append(witness), original(witness)))
    return witnesses


VERB_CALLS = {
    "run": lambda s: s.run(lambda: mr.get_replica_context().all_reduce("sum", 1.0)),
    "run with a variable": lambda s: s.run(lambda w: [w.assign(w + 1)][1:], args=(variable(1.0, s),)),
    "reduce": lambda s: s.reduce("sum", numbers(s)),
    "gather": lambda s: s.gather(numbers(s, np.zeros(1)), axis=0),
    "function": lambda s: mr.function(lambda x: s.reduce("mean", x))(numbers(s)),
    "read of a sync-on-read variable": lambda s: variable(1.0, s, synchronization="on_read", aggregation="sum").value,
    "assignment of a PerReplica": lambda s: variable(1.0, s, aggregation="mean").assign(numbers(s)),
}


def test_every_verb_that_crosses_replicas_is_paced(strategy2: mr.MirroredStrategy, started: list[jax.Array]) -> None:
    for name, call in VERB_CALLS.items():
        started.clear()
        call(strategy2)
        assert started, name
        assert all(isinstance(witness, jax.Array) and not witness.is_deleted() for witness in started), name
    started.clear()
    one = mr.MirroredStrategy(["cpu:0"])
    for call in VERB_CALLS.values():
        call(one)
    mr.scan(lambda carry, x: (carry + x, None), 0.0, np.ones(2, "float32"))
    assert started == [], "one replica waits for nobody"
    jax.jit(lambda x: strategy2.reduce("sum", x))(jnp.ones(3))
    assert started == [], "a traced program is not in flight"
    step = VERB_CALLS["run"]
    mr.scan(lambda carry, _: (carry, step(strategy2)), 0.0, length=5)
    assert len(started) == 1, "a scan of steps is one program"
    array = jax.device_put(jnp.ones(3), strategy2._mesh.mirrored)
    assert in_flight.dispatch(strategy2._mesh.mirrored, lambda x: x, array) is array is started[-1]


def test_a_forked_child_is_told_to_be_spawned() -> None:
    code = """
import os, warnings
import mirrored as mr
warnings.simplefilter("ignore")
strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    v = mr.Variable(1.0)
step = lambda: [v.assign(v + 1.0)] and None
strategy.run(step)
child = os.fork()
if not child:
    refused = 0
    uses = lambda: strategy.run(step), lambda: strategy.reduce("sum", 1.0), mr.function(step), v.numpy, lambda: v.assign(3.0)
    for use in uses:
        try:
            use()
        except mr.ContextError as error:
            refused += "'spawn'" in str(error)
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
strategy.run(step)
assert float(v) == 3.0
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr


def test_a_program_that_has_failed_raises_in_no_call_that_only_waits_for_its_turn():
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    failed = SimpleNamespace(is_deleted=lambda: False, block_until_ready=fail)
    for _ in range(in_flight.MAX_IN_FLIGHT):
        in_flight.started(failed)
    assert len(_process.in_flight) == in_flight.MAX_IN_FLIGHT - in_flight.WAIT_FOR

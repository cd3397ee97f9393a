"""What differs between workers, and must not, ends in an error on every worker that shows both sides; no number is wrong."""

import re
from pathlib import Path

import pytest
from processes import run_workers

SCRIPT = Path(__file__).parent / "mistakes.py"
DIFFERENT = r"ProgramMismatchError: the workers have come to different programs"
ORDER = r"ProgramMismatchError: the workers have run known programs in different orders, or with other variables, .*done:"

MISTAKES = {
    "argument": r"ReplicasDivergeError: the argument `x`, a plain array, is not the same on all workers: worker 1 gave other",
    "closed-over array": r"ReplicasDivergeError: an array that the step closes over .*is not the same on all workers: worker 1 m",
    "array in an inner jit": DIFFERENT + r".*inner functions close over \[\d+\].*inner functions close over \[\d+\]",
    "numpy table in an inner jit": DIFFERENT,
    "settings": DIFFERENT + r".*jax_threefry_partitionable=False.*jax_threefry_partitionable=True",
    "another variable": DIFFERENT + r".*writes variables \['1: mirrored.*writes variables \['0: mirrored",
    "another variable read": DIFFERENT + r".*reads variables \['1: mirrored.*reads variables \['0: mirrored",
    "another variable assigned": ORDER + r" worker 0: .*, assign to variable 1; worker 1: .*, assign to variable 0\.",
    "another variable reduced": ORDER + r" worker 0: .*, reduce variable 1; worker 1: .*, reduce variable 0\.",
    "another variable aggregated": ORDER + r" worker 0: .*, read variable 2; worker 1: .*, read variable 3\.",
    "order of known programs": ORDER + r" worker 0: .*add, average, add, average.*; worker 1: .*average, add, average, add",
    "order before a barrier": ORDER + r" worker 0: .*, average, add; worker 1: .*, add, average\.",
    "reduced number": r"ReplicasDivergeError: what strategy.reduce was given, no PerReplica, is not the same on all workers",
    "shape of a variable": DIFFERENT,
    "kind of an argument": DIFFERENT + r".*arguments by replica: \[False\].*arguments by replica: \[True\]",
    "python number": DIFFERENT,
    "extra program": DIFFERENT,
    "order": DIFFERENT,
    "shape": DIFFERENT,
    "dtype": DIFFERENT,
    "operation": DIFFERENT,
    "shapes of values": r"ValueError: value_fn returned arrays of different ranks, shapes \(2,\), \(2, 2\)",
    "flipped bit": r"ReplicasDivergeError: the copies of variable 'variable' differ: replicas \[1\] \(worker 1\) from replica 0",
    "flipped bit of a frozen variable": r"ReplicasDivergeError: the copies of variable 'frozen' differ: replicas \[1\]",
    "eager": r"ContextError: mr\.eager\(\) runs each operation by itself, which works with one worker only",
    "batch of the chief": r"ProgramMismatchError: the workers have taken different numbers of .*: worker 0: 2; worker 1: 1\.",
    "later batch of the chief": r"ProgramMismatchError: the workers have taken different numbers of .*next\(iterator\)",
    "barriers": r"WorkerLostError: the workers are at different barriers: worker 0 'after the work of 0', worker 1 'after",
}
ENDED = {
    "more steps": (75, 75, r"worker 0 waits at .*reduce_stack.* and worker 1 waits in step \d+ \(program 'add'\)"),
    "evaluation of the chief": (
        *(75, 75),
        r"worker 0 waits for the next batch .*, and worker 1 waits at .*reduce_stack.* They wait for each other.*is_chief",
    ),
    "one ends": (75, 75, r"worker 1 has ended its program after step \d+"),
    "one fails": (75, 1, r"worker 1 failed at step \d+ with ValueError: the data is gone"),
}


def check(name: str, message: str, codes: tuple[int, ...]) -> None:
    ended = run_workers(SCRIPT, 2, name, 20, timeout=60)
    for worker, code in zip(ended, codes, strict=True):
        assert worker.code == code, worker.output
        flat = " ".join(worker.output.split())
        assert re.search(message, flat), worker.output
        assert "RESULT" not in worker.output
        assert worker.seconds < 30


@pytest.mark.parametrize("name", ["argument", "operation"])
def test_the_first_mistakes_end_in_an_error_on_every_worker(name: str) -> None:
    check(name, MISTAKES[name], (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in ("argument", "operation")])
def test_every_mistake_ends_in_an_error_on_every_worker(name: str) -> None:
    codes = (75, 75) if name == "barriers" else (1, 1)
    check(name, MISTAKES[name], codes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
def test_workers_that_part_end_with_a_message(name: str) -> None:
    *codes, message = ENDED[name]
    check(name, message, tuple(codes))


@pytest.mark.slow
def test_the_same_job_without_a_mistake_goes_through() -> None:
    for worker in run_workers(SCRIPT, 2, "none", 20, timeout=60):
        assert worker.code == 0 and "RESULT [2. 2. 2.] 0.0" in worker.output, worker.output

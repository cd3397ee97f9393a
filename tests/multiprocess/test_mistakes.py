"""What differs between workers, and must not, ends in an error on every worker that shows both sides; no number is wrong."""

import re
from pathlib import Path

import pytest
from parameters import nightly
from processes import run_workers

SCRIPT = Path(__file__).parent / "mistakes.py"
DIFFERENT = r"ProgramMismatchError: the workers have come to different programs"
ORDER = (
    r"ProgramMismatchError: the workers have run programs in different orders, or with other variables, so that results "
    r"are wrong since step \d+ \(worker 0: .*\(.*mistakes\.py:\d+\).*; worker 1: .*\)\. .*done:"
)

OTHERWISE = "ReplicasDivergeError: {}.*worker 1 computed other values than worker 0"

#: After these the workers can go on together.
REFUSED = {
    "argument": r"ReplicasDivergeError: the argument `x`, a plain array, is not the same on all workers: worker 1 gave other",
    "closed-over array": r"ReplicasDivergeError: an array that the step closes over .*is not the same on all workers: worker 1 m",
    "array in an inner jit": DIFFERENT + r".*inner functions close over \[\d+\].*inner functions close over \[\d+\]",
    "numpy table in an inner jit": DIFFERENT,
    "another variable": DIFFERENT + r".*writes variables \['1 frozen: mirrored.*writes variables \['0 variable: m",
    "another variable read": DIFFERENT + r".*reads variables \['1 frozen: mirrored.*reads variables \['0 variable: mi",
    "reduced number": r"ReplicasDivergeError: what strategy.reduce was given, no PerReplica, is not the same on all workers",
    "shape of a variable": DIFFERENT,
    "names of variables": r"ProgramMismatchError: the workers create different variables at .*: worker 0: 'a'; worker 1: 'b'",
    "kind of an argument": DIFFERENT + r".*arguments by replica: \[False\].*arguments by replica: \[True\]",
    "python number": DIFFERENT,
    "settings": DIFFERENT + r".*jax_threefry_partitionable=False.*jax_threefry_partitionable=True",
    "ways of combining": DIFFERENT + ".*all_gather.*psum",
    "shapes of values": r"ValueError: value_fn returned arrays of different ranks, shapes \(2,\), \(2, 2\)",
    "computed initial value": OTHERWISE.format("the initial value of variable"),
    "computed array closed over": OTHERWISE.format("an array that "),
    "computed array closed over by a function": OTHERWISE.format("an array that closed_over_by_a_function.<locals>"),
    "computed argument": OTHERWISE.format(r"the argument `by\[1\]`"),
    "computed argument of another placement": OTHERWISE.format("the argument `y`"),
    "computed argument of a function": OTHERWISE.format("the argument `a`"),
    "computed and assigned": OTHERWISE.format("what variable 'frozen' was given by assign"),
    "eager": r"ContextError: mr\.eager\(\) runs each operation by itself, which works with one worker only",
    "another thread": r"ContextError: 'add' was called in the thread .*; expected 'MainThread', which starts what several",
}
#: After these they cannot, and so the job ends: with 1 on every worker.
FINAL = {
    "another variable assigned and reduced": ORDER
    + r" worker 0: .*assign to variable 'frozen'.*; worker 1: .*assign to variable 'variable'.*\.",
    "assign mirrored alone": ORDER + r" worker 0: .*, add, comparing an array of all workers; worker 1: .*, add, add\.",
    "order of known programs": ORDER + r" worker 0: .*, average, add; worker 1: .*, average, average\.",
    "order before the end": ORDER + r" worker 0: .*, average, average; worker 1: .*, average, add\.",
    "more steps": ORDER + r" worker 0: .*, add, reduce_stack; worker 1: .*, add, add\.",
    "a number that changes": ORDER + r" worker 0: ",
    "read on_read alone": ORDER + r" worker 0: .*, add, read variable 'variable_0', aggregate_stack; worker 1: .*, add, add\.",
    "flipped bit": r"ReplicasDivergeError: the copies of variable 'variable' differ: replicas \[1\] \(worker 1\) from replica 0",
    "batch of the chief": r"ProgramMismatchError: the workers have taken different numbers of .*: worker 0: 2; worker 1: 1\.",
    "other data later": r"ProgramMismatchError: the workers have read different batches, so that results are wrong since step ",
    "shorter data of the chief": r"ValueError: the data of worker 0 has ended, and worker 1 has more\. Under AutoShardPolicy\.",
}
#: Of two workers that wait for each other.
#: Those of the slow suite: an order, a value and an input that differ, and a wait.
SOME = ("order of known programs", "flipped bit", "more steps", "evaluation of the chief")
PARTED = {
    "evaluation of the chief": r"worker 0 waits for the next batch .*, and worker 1 waits at .*reduce_stack.*is_chief",
}


def test_workers_that_do_not_do_the_same_are_told_and_can_go_on_together() -> None:
    for worker in run_workers(SCRIPT, 2, 20, *REFUSED, "alone"):
        assert ("DID ALL" in worker.output) == (worker.index == 0), worker.output
        assert worker.code == 0 and "RESULT [2. 2. 2.] 0.0 3.0" in worker.output, worker.output
        said = dict(re.findall(r"(?m)^REFUSED (.*?): (.*)$", worker.output))
        wrong = {name: said.get(name) for name, message in REFUSED.items() if not re.match(message, said.get(name, ""))}
        assert not wrong, worker.output


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *nightly(*(name for name in (*FINAL, *PARTED) if name not in SOME))])
def test_mistakes_end_in_an_error_on_every_worker(name: str) -> None:
    for worker in run_workers(SCRIPT, 2, 5, name):
        assert worker.code == (1 if name in FINAL else 75) and worker.seconds < 30, worker.output
        assert re.search((FINAL | PARTED)[name], " ".join(worker.output.split())), worker.output
        assert "RESULT" not in worker.output

"""The exit code, the cause and the restart follow from how the workers ended."""

import dataclasses
import signal

from mirrored._command.ending import Attempt, Budget, Ending, describe_code, summarize

TERM, INT, KILL, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP


def attempt(*codes: int, signals: tuple[int, ...] = (), step: int | None = None, asked: tuple[int, ...] = ()) -> Attempt:
    """An attempt whose workers ended in the order of their indices; those in `asked` because the launcher asked them to."""
    endings = [Ending(i, 100 + i, code, 1.0 + i, 0.0, i in asked, []) for i, code in enumerate(codes)]
    return Attempt(endings, signals, {} if step is None else {"progress": step})


def together(*codes: int, apart: float = 0.3) -> Attempt:
    """An attempt whose workers ended the last first."""
    endings = [Ending(i, 100 + i, code, 9 - apart * i, 0.0, False, []) for i, code in enumerate(codes)]
    return Attempt(endings[::-1], (), {})


def test_exit_codes() -> None:
    cases = [
        (attempt(0, 0), 0),
        (attempt(0, 0, signals=(TERM,)), 0),
        (attempt(0, 0, signals=(INT, INT)), 0),
        (attempt(75, 3), 3),
        (attempt(75, 3, 4), 3),
        (attempt(75, 75), 75),
        (attempt(75, 76), 76),
        (attempt(0, -11), 139),
        (attempt(75, -KILL, asked=(1,)), 75),
        (attempt(75, -KILL), 137),
        (attempt(75, 143, asked=(1,)), 75),
        (attempt(-KILL, asked=(0,)), 137),
        (attempt(143, 143), 143),
        (attempt(143, 143, signals=(TERM,)), 143),
        (attempt(143, 75, 0, -TERM, signals=(TERM,)), 143),
        (attempt(143, 1, signals=(TERM,)), 1),
        (attempt(143, -KILL, signals=(TERM,), asked=(0, 1)), 137),
        (attempt(143, -KILL, signals=(TERM, TERM), asked=(0, 1)), 143),
        (attempt(143, -KILL, signals=(TERM, INT), asked=(0, 1)), 130),
        (attempt(1, -INT, signals=(INT,)), 130),
        (attempt(143, signals=(HUP,)), 129),
        (attempt(5, signals=(HUP,)), 5),
    ]
    assert [it for it, code in cases if it.exit_code() != code] == []


def test_the_culprit() -> None:
    cases = [
        (attempt(0, 75, 3, 4), 2),
        (attempt(75, 75), 0),
        (attempt(0, 75, 75), 1),
        (attempt(75, -KILL, asked=(1,)), 0),
        (attempt(0, -KILL, asked=(1,)), 1),
        (together(75, 75), 0),
        (together(75, 75, 75, apart=2.0), 2),
        (together(3, 75), 0),
        (together(3, 3), 1),
    ]
    assert [it for it, index in cases if it.culprit().index != index] == []


def test_the_budget_counts_restarts_without_a_new_checkpoint() -> None:
    budget = Budget(2)
    steps = [None, None, 10, 10, 5, None]
    assert [budget.allows(attempt(1, step=step)) for step in steps] == [True, True, True, True, False, False]
    assert "since the checkpoint of step 10" in str(budget)
    assert str(Budget(2, used=1)) == "restart 1 of 2 without a checkpoint"


def test_a_new_checkpoint_renews_the_budget_and_each_folder_has_steps_of_its_own() -> None:
    """Such as one by step and one, of the best model, by epoch."""
    budget = Budget(1)
    for steps in ({"step": 40, "best": 4}, {"step": 80, "best": 4}, {"step": 90}, {"best": 5}):
        assert budget.allows(dataclasses.replace(attempt(1), steps=steps)) and budget.used == 1
    assert not budget.allows(dataclasses.replace(attempt(1), steps={"step": 90, "best": 5}))
    budget = Budget(2)
    allowed = [budget.allows(dataclasses.replace(attempt(1), steps={f"run-{number}": 10})) for number in range(5)]
    assert allowed == [True, True, False, False, False], "a folder of each attempt's own is no progress"


def test_preemption_with_a_new_checkpoint_is_free() -> None:
    budget = Budget(1)
    assert all(budget.allows(attempt(143, 143, step=step)) for step in range(5))
    assert budget.used == 0 and str(budget) == "not counted: a new checkpoint, of step 4"
    assert budget.allows(attempt(143, step=4))
    assert not budget.allows(attempt(143, step=4))
    assert not Budget(0).allows(attempt(143, step=1))


def test_what_is_never_restarted() -> None:
    for it in (attempt(76, step=1), attempt(3, 76), attempt(1, signals=(TERM,), step=1)):
        assert not Budget(9).allows(it)
    verdict = "worker 1 leaves with code 1: {}ProgramMismatchError: the workers have run programs in different orders"
    for text in (verdict.format(""), verdict.format("worker 1 failed at step 5 with ")):
        for code, is_allowed in ((1, False), (75, True)):
            (ending,) = (it := attempt(code)).endings
            told = dataclasses.replace(it, endings=[dataclasses.replace(ending, tail=["a line", text])])
            assert Budget(9).allows(told) is is_allowed, "the workers would do the same again"


def test_codes_in_words() -> None:
    asks, useless = "exit code 75, asks to be started again", "exit code 76, starting again would not help"
    for code, says in {0: "exit code 0", 75: asks, 76: useless, -11: "SIGSEGV", -40: "signal 40"}.items():
        assert describe_code(code) == says


def test_summaries() -> None:
    assert summarize(attempt(0, 0), 0, 9.0, None) == []
    assert summarize(attempt(0), 2, 9.04, "/logs") == ["done: 2 restarts, 9.0 s in all, logs in /logs"]
    stopped = summarize(attempt(143, 143, 143, -KILL, 143, signals=(TERM, INT, INT), asked=(0, 1, 2, 3, 4)), 0, 9.0, None)
    assert stopped == [
        "ended by SIGTERM and SIGINT: workers 0-2, 4: exit code 143, preempted; "
        "worker 3: SIGKILL, did not leave and was killed by the launcher",
        "0 restarts, 9.0 s in all",
    ]
    first, total = summarize(attempt(-6), 1, 3.0, None)
    assert first.startswith("worker 0 (pid 100) failed first: SIGABRT, 1.0 s after the start, at 19")
    assert total == "1 restart, 3.0 s in all"
    first, others, _ = summarize(together(1, 1, 75, 1), 0, 3.0, None)
    assert first.startswith("workers 0-1, 3 failed together: exit code 1, 8.1 s after the start, at ")
    assert others == "the others: worker 2: exit code 75, asks to be started again"
    for apart in (together(1, 1, apart=1.1), together(1, 2), together(1, 75)):
        assert "failed first" in summarize(apart, 0, 3.0, None)[0]
    tails = [dataclasses.replace(ending, tail=[f"of {ending.index}"]) for ending in together(1, 1).endings]
    assert summarize(Attempt(tails, (), {}), 0, 3.0, None)[1:3] == ["the last lines of worker 1:", "  | of 1"]
    first, others, _ = summarize(attempt(143, 75), 0, 3.0, None)
    assert first.startswith("worker 0 (pid 100) was preempted: exit code 143, 1.0 s after the start, at ")
    assert others == "the others: worker 1: exit code 75, asks to be started again"

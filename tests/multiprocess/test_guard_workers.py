"""Jobs of real processes in which something goes wrong: all workers end in time, with the right code and the reason."""

import re
import signal
import time
from pathlib import Path

import pytest
from processes import Ended, run_workers, wait_for_line, workers

SCRIPT = Path(__file__).with_name("guard_worker.py")
#: Seconds within which all have left; measured values are a third of it, this machine may be busy.
SOON = 3.0
#: What JAX itself does when worker 0 is gone: nothing that Python can catch.
ABORTED = -6
SIZES = pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.slow)])
SLOW_SIZES = pytest.mark.parametrize("num_workers", [2, 4])
WORKER_OR_CHIEF = pytest.mark.parametrize("culprit", [1, 0], ids=["worker", "chief"])


def run(fault: str, num_workers: int, stall_seconds: float = 0, num_steps: int = 20) -> list[Ended]:
    return run_workers(SCRIPT, num_workers, fault, num_steps, stall_seconds, timeout=60)


def seconds_after_fault(ended: list[Ended]) -> list[float]:
    moments = [float(match[1]) for one in ended if (match := re.search(r"FAULT \S+ ([\d.]+)", one.output))]
    assert moments, ended
    return [one.time - min(moments) for one in ended]


def require(ended: list[Ended], codes: list[int], message: str, within: float = SOON) -> None:
    """Check the codes, the time since the fault, and that every worker that could write has the message in its log."""
    shown = "\n".join(f"--- worker {one.index}, code {one.code}\n{one.output}" for one in ended)
    assert [one.code for one in ended] == codes, shown
    assert max(seconds_after_fault(ended)) < within, shown
    for one in ended:
        if one.code in (1, 3, 75, 130, 143):
            assert re.search(message, one.output), f"not in the log of worker {one.index}: {message}\n{shown}"
            assert "\x1b" not in re.sub(r"(?m)^\w+: injected.*$", "", one.output)


@SIZES
def test_a_job_without_a_fault_ends_as_if_there_were_no_guard(num_workers: int) -> None:
    for one in run("none", num_workers):
        assert one.code == 0 and one.output.endswith("END\n"), one.output
        assert "WARNING" not in one.output and "CRITICAL" not in one.output


@SIZES
def test_an_exception_ends_all_workers(num_workers: int) -> None:
    ended = run("ValueError@5:1", num_workers)
    require(ended, [75, 1] + [75] * (num_workers - 2), r"worker 1 failed at step 5 with ValueError: injected\\x1b\[2J")
    for one in ended:
        assert "line 1" in one.output and 'raise {"ValueError"' in one.output, "the traceback is in every log"


@SIZES
def test_a_killed_worker_is_named_by_the_others(num_workers: int) -> None:
    ended = run("sigkill@5:1", num_workers)
    require(ended, [75, -9] + [75] * (num_workers - 2), "lost worker 1 at step 6: the process is gone")


@pytest.mark.slow
@SLOW_SIZES
@WORKER_OR_CHIEF
@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("ValueError", 1, r"worker {} failed at step 5 with ValueError: injected\\x1b"),
        ("MemoryError", 1, "worker {} failed at step 5 with MemoryError"),
        ("KeyboardInterrupt", 130, "worker {} failed at step 5 with KeyboardInterrupt"),
        ("sys.exit3", 3, r"worker {} has ended its program after step 5 .* by sys.exit\(3\), and .* waits in step 6"),
        ("sys.exit143", 143, "worker {} has ended its program after step 5 .* waits in step 6"),
        ("sys.exit0", 75, "worker {} has ended its program after step 5 .* waits in step 6"),
        ("SystemExit", 75, "worker {} has ended its program after step 5 .* waits in step 6"),
        ("return", 75, "worker {} has ended its program after step 5 .* waits in step 6"),
        ("extra", 75, r"worker {} waits at the comparison of new program 2 \('evaluate'\), after step 5"),
    ],
    ids=lambda value: "" if "worker" in str(value) else str(value),
)
def test_whatever_ends_one_worker_ends_all(num_workers: int, culprit: int, kind: str, code: int, message: str) -> None:
    codes = [code if worker == culprit else 75 for worker in range(num_workers)]
    require(run(f"{kind}@5:{culprit}", num_workers), codes, message.format(culprit), within=2 * SOON)


@pytest.mark.slow
@SLOW_SIZES
@pytest.mark.parametrize("kind", ["shape", "dtype", "operation", "order", "additional"])
def test_different_programs_raise_on_all_workers_before_they_run(num_workers: int, kind: str) -> None:
    ended = run(f"{kind}@5:all", num_workers)
    require(
        ended, [1] * num_workers, "ProgramMismatchError: the workers have come to different programs, as their new program 2:"
    )
    assert not any(re.search(r"(?m)^RAN \d", one.output) for one in ended), "no wrong value"


@pytest.mark.slow
@SLOW_SIZES
def test_an_exception_of_all_workers_is_its_own_on_each(num_workers: int) -> None:
    require(run("ValueError@5:all", num_workers), [1] * num_workers, r"worker \d failed at step 5 with ValueError")


@pytest.mark.slow
@SLOW_SIZES
@pytest.mark.parametrize("kind", ["os._exit", "sigkill"])
def test_a_worker_that_dies_silently_is_named(num_workers: int, kind: str) -> None:
    last = num_workers - 1
    code = {"os._exit": 9, "sigkill": -9}[kind]
    require(run(f"{kind}@5:{last}", num_workers), [75] * last + [code], f"lost worker {last} at step 6")


@pytest.mark.slow
@SLOW_SIZES
def test_a_killed_chief_takes_all_with_it(num_workers: int) -> None:
    ended = run("sigkill@5:0", num_workers)
    assert ended[0].code == -9 and all(one.code in (ABORTED, 75) for one in ended[1:])
    assert max(seconds_after_fault(ended)) < SOON


@pytest.mark.slow
@SLOW_SIZES
@WORKER_OR_CHIEF
def test_a_hang_is_named_after_the_limit_with_all_stacks(num_workers: int, culprit: int) -> None:
    ended = run(f"hang@5:{culprit}", num_workers, stall_seconds=3)
    message = rf"worker {culprit} has not entered step 6 \(program 'train'\) for \d s, which is the limit"
    require(ended, [75] * num_workers, message, within=3 + SOON)
    assert min(seconds_after_fault(ended)) > 2.5
    for one in ended:
        assert f"worker {culprit}: in its own code after step 5" in one.output
        assert ("time.sleep(1000)" if one.index == culprit else "program(argument)") in one.output


@pytest.mark.slow
def test_compiling_is_not_a_stall() -> None:
    ended = run("slow_compile@5:1", 2, stall_seconds=2)
    assert [one.code for one in ended] == [0, 0], ended


@pytest.mark.slow
def test_a_program_may_shut_jax_down_itself() -> None:
    ended = run("shutdown@20:all", 2, num_steps=21)
    assert [one.code for one in ended] == [0, 0], ended
    assert not any("CRITICAL" in one.output for one in ended)


@pytest.mark.slow
@SLOW_SIZES
@WORKER_OR_CHIEF
def test_a_stopped_worker_is_named(num_workers: int, culprit: int) -> None:
    with workers(SCRIPT, num_workers, "none", 100_000, 3) as running:
        wait_for_line(running[culprit], "STEP 2")
        running[culprit].signal(signal.SIGSTOP)
        stopped = time.time()
        for worker in running:
            if worker.index == culprit:
                continue
            one = worker.wait(30)
            if culprit:
                assert one.code == 75 and one.time - stopped < 3 + SOON, one
                assert re.search(f"worker {culprit} has not entered step \\d+", one.output), one.output
            else:  # the service does not answer, and JAX may be faster
                assert one.code in (75, ABORTED) and one.time - stopped < 11 + SOON, one
                assert "worker 0, which hosts the coordination service, has not answered" in one.output, one.output


@pytest.mark.slow
@WORKER_OR_CHIEF
def test_a_short_stop_costs_only_time(culprit: int) -> None:
    with workers(SCRIPT, 2, "none", 300, 0) as running:
        wait_for_line(running[culprit], "STEP 2")
        running[culprit].signal(signal.SIGSTOP)
        time.sleep(4.0)  # the stop is what is tested
        running[culprit].signal(signal.SIGCONT)
        for worker in running:
            one = worker.wait(30)
            assert one.code == 0 and one.output.endswith("END\n"), one.output


@pytest.mark.slow
def test_a_worker_that_dies_while_the_others_are_outside_of_steps_is_named() -> None:
    with workers(SCRIPT, 2, "hang@5:0", 20, 0) as running:
        wait_for_line(running[0], "FAULT")
        running[1].signal(signal.SIGKILL)
        killed = time.time()
        one = running[0].wait(30)
        assert one.code == 75 and one.time - killed < SOON, one
        assert re.search(r"lost worker 1 at step \d: the process is gone", one.output), one.output

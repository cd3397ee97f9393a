"""The real library under real faults: all workers have left in time, with the right code, and each log says what happened."""

import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from parameters import nightly
from processes import Ended, Worker, run_workers, wait_for_line, workers

SCRIPT = Path(__file__).with_name("faults.py")
#: Seconds within which all have left: measured values are below 1, and JAX by itself would need its heartbeat's 10.
SOON = 6.0
#: Seconds within which JAX's heartbeat says that a process is gone.
HEARTBEAT = 11.0
ABORTED = -signal.SIGABRT
KILLED = -signal.SIGKILL
#: Programs in flight when a worker is lost: steps that are reported although they never finished.
RUN_AHEAD = 2
slow = pytest.mark.slow


def run(fault: str, num_workers: int = 2, *args: str, devices: int = 1, steps: int = 2000, who: int | str = 1) -> list[Ended]:
    given = (f"fault={fault}", f"steps={steps}", f"who={who}", *args)
    return run_workers(SCRIPT, num_workers, *given, devices=devices, timeout=90)


def moment_of_fault(ended: Sequence[Ended | Worker]) -> float:
    moments = [float(match[1]) for one in ended if (match := re.search(r"(?m)^FAULT .* ([\d.]+)$", one.output))]
    assert moments, ended
    return min(moments)


def require(ended: Sequence[Ended], codes: Sequence[int], message: str, within: float = SOON, run_ahead: int = RUN_AHEAD) -> None:
    """Check codes and seconds, that each worker which lives to tell has the message in its log, and how far they ran ahead."""
    shown = "\n".join(f"--- worker {one.index}, code {one.code}\n{one.output[-5000:]}" for one in ended)
    fault = moment_of_fault(ended)
    for one, code in zip(ended, codes, strict=True):
        assert one.code == code, shown
        assert one.time - fault < within, shown
        if one.code != KILLED:
            assert re.search(message, one.output), f"not in the log of worker {one.index}: {message}\n{shown}"
        reported = [float(moment) for moment in re.findall(r"(?m)^STEP \d+ ([\d.]+)$", one.output)]
        assert sum(moment > fault for moment in reported) <= run_ahead, shown


def others(num_workers: int, culprit: int, code: int) -> list[int]:
    return [code if worker == culprit else 75 for worker in range(num_workers)]


# ---- what ends one worker ends all


FAILED, ENDED_ITSELF = "worker {} failed at step 5 with ", "worker {} has ended its program after step 7 .*"
LOST = "leaves with code 75: lost worker {} at step \\d+: "
#: The fault and its arguments, workers, devices of each, the culprit, its code, and what all that can have in their logs.
ENDS = {
    "killed": ([], 2, 2, 1, KILLED, LOST + "the process is gone"),
    "raise hostile": ([], 2, 1, 1, 1, FAILED + r"ValueError: \\x1b\[2J\\x1b\]0;owned\\x07 \\r$"),
    "exit": (["code=3"], 2, 1, 1, 3, ENDED_ITSELF + r"by sys.exit\(3\), and .* waits in step 8"),
    "return": ([], 2, 1, 0, 75, ENDED_ITSELF + "waits in step 8"),
    "extra": (
        [],
        2,
        1,
        0,
        1,
        r"ProgramMismatchError: .* orders, .* since step 8 \(worker {}: .*<lambda> \(faults\.py:\d+\); worker 1: ",
    ),
    "killed while compiling": ([], 3, 1, 2, KILLED, LOST),
    "input is killed": (["policy=data"], 2, 1, 1, KILLED, LOST),
    "outside": ([], 2, 1, 1, KILLED, LOST),
}
#: The default suite takes two of these; `make nightly` kills at other moments.
FAST, MOMENTS = ("killed", "raise hostile"), ("killed while compiling", "input is killed", "outside")


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=slow) for name in ENDS if name not in (*FAST, *MOMENTS)), *nightly(*MOMENTS)]
)
def test_whatever_ends_one_worker_ends_all_at_once(name: str) -> None:
    args, num_workers, devices, culprit, code, message = ENDS[name]
    ended = run(name, num_workers, *args, devices=devices, who=culprit)
    codes = [1, 1] if name == "extra" else others(num_workers, culprit, code)
    require(ended, codes, f"(?m){message.format(culprit)}")
    if name == "raise hostile":
        other = ended[1 - culprit].output
        told = other[other.index("CRITICAL") :]
        assert len(told) < 20_000 and told.replace("\n", "").isprintable(), "nothing of another worker's text acts on a terminal"
        assert all(line.startswith("  | ") for line in told.splitlines()[1:]), "a line of ours, from another worker"


@slow
@pytest.mark.parametrize(("fault", "num_workers", "devices"), [("killed in step", 3, 2), *nightly(("killed while saving", 2, 1))])
def test_a_dead_chief_is_named_at_once(fault: str, num_workers: int, devices: int, tmp_path: Path) -> None:
    """JAX would abort the others 30 to 80 ms later, and names nobody: a busy machine gets a second try."""
    for folder in ("first", "second"):
        ended = run(fault, num_workers, f"folder={tmp_path / folder}", devices=devices, who=0)
        if ABORTED not in [one.code for one in ended]:
            break
    require(ended, others(num_workers, 0, KILLED), r"leaves with code 75: lost worker 0, which hosts the coordination service, ")


@slow
def test_a_program_that_catches_errors_does_not_go_on_alone() -> None:
    ended = run("killed", 2, "catch=1")
    require(ended, others(2, 1, KILLED), r"lost worker 1 at step \d+: the process is gone", run_ahead=200)


@slow
@pytest.mark.parametrize(
    ("host", "within", "how"), [("", SOON, "the process is gone"), ("each", 17.0, "its heartbeats have ceased")]
)
def test_a_worker_that_dies_while_the_others_are_outside_of_steps_is_named(host: str, within: float, how: str) -> None:
    with workers(SCRIPT, 2, "fault=hang", "who=0", f"host={host}") as running:
        wait_for_line(running[0], "FAULT")
        running[1].signal(signal.SIGKILL)
        killed = time.time()
        one = running[0].wait(30)
        assert one.code == 75 and one.time - killed < within, one
        assert re.search(rf"lost worker 1 at step \d: {how}", one.output), one.output


# ---- what takes too long


@slow
def test_a_hang_is_named_after_the_limit_with_all_stacks() -> None:
    ended = run("hang", 2, "limit=3")
    require(ended, [75] * 2, r"worker 1 has not entered step 8 \(program 'step'\) for \d s, which is the limit", within=3 + SOON)
    assert min(one.time for one in ended) - moment_of_fault(ended) > 2.5
    for one in ended:
        assert "worker 1: in its own code after step 7" in one.output
        assert ("time.sleep(1000)" if one.index == 1 else "strategy.run(step") in one.output


@slow
def test_the_worker_whose_input_is_stuck_is_named() -> None:
    ended = run("input hangs", 2, "policy=data", "limit=3")
    require(ended, [75] * 2, r"the input of worker 1 has given no batch for \d s, which is the limit\.", within=3 + SOON)
    assert min(one.time for one in ended) - moment_of_fault(ended) > 2.5
    assert "wait_for_ever" in ended[1].output, "the stack of the pipeline"


@slow
@pytest.mark.parametrize("culprit", [1, *nightly(0)])
def test_a_stopped_worker_is_named(culprit: int) -> None:
    with workers(SCRIPT, 2, "steps=100000", "limit=3") as running:
        wait_for_line(running[culprit], "STEP 2")
        running[culprit].signal(signal.SIGSTOP)
        stopped = time.time()
        one = running[1 - culprit].wait(30)
        if culprit:
            assert one.code == 75 and one.time - stopped < 3 + SOON, one
            assert re.search(f"worker {culprit} has not entered step \\d+", one.output), one.output
        else:  # the service does not answer, and JAX may be faster
            assert one.code in (75, ABORTED) and one.time - stopped < 11 + SOON, one
            assert "worker 0, which hosts the coordination service, has not answered" in one.output, one.output


@slow
def test_a_chief_in_a_call_that_lets_no_other_python_run_is_named() -> None:
    with workers(SCRIPT, 2, "fault=hold the lock", "who=0", "limit=3") as running:
        one = running[1].wait(30)
        assert one.code == 75 and "leaves with code 75: worker 0 has not entered step 8" in one.output, one.output
        assert one.time - moment_of_fault([running[0]]) < 3 + SOON


# ---- what ends nothing


@slow
@pytest.mark.parametrize("who", [1, *nightly(0)])
def test_a_short_stop_costs_only_time(who: int) -> None:
    with workers(SCRIPT, 2, "steps=200") as running:
        wait_for_line(running[who], "STEP 2")
        running[who].signal(signal.SIGSTOP)
        # The stop is what is tested; worker 0 asks for the heartbeats of a silent one.
        time.sleep(4.0) if who == 0 else wait_for_line(running[0], "worker 1 has been silent for 4 s")
        running[who].signal(signal.SIGCONT)
        for worker in running:
            one = worker.wait(60)
            assert one.code == 0 and "END 200.0" in one.output, one.output


@slow
def test_a_shutdown_of_jax_on_all_workers_ends_well() -> None:
    for one in run("shutdown", 2, "at=9", who="all", steps=10):
        assert one.code == 0 and "CRITICAL" not in one.output, one.output


@slow
def test_what_ends_no_program_ends_no_job() -> None:
    """Errors in another thread and at exit; a compilation beyond the limit, and an evaluation within it."""
    for one in run("slow", 2, "limit=3", steps=10):
        assert one.code == 0 and "END" in one.output and not re.search("WARNING|CRITICAL", one.output), one.output
        assert one.output.count("ValueError: the data is gone") == 2 * one.index, "Python shows them"
        share = re.search(r"GUARD ([\d.]+)", one.output)
        assert share and float(share[1]) < 0.01, "of a core, for the guard"


@slow
def test_the_end_of_a_forked_child_ends_no_job() -> None:
    """By `sys.exit`, and by an exception: JAX's own end in a child would close the connections of its parent, 4 s later."""
    for one in run("fork", 2, who="all", steps=600):
        assert one.code == 0 and "END 600.0" in one.output and "CRITICAL" not in one.output, one.output
        assert one.output.count("CHILD True") == 2, one.output


# ---- who listens


def listeners(output: str) -> set[tuple[str, int]]:
    return {(address.removeprefix("::ffff:"), int(port)) for address, port in re.findall(r"LISTENS (\S+) (\d+)", output)}


@slow
def test_strangers_at_its_ports_leave_a_job_unharmed(tmp_path: Path) -> None:
    with workers(SCRIPT, 2, "fault=until told", f"folder={tmp_path}", "steps=20") as first:
        for worker in first:
            wait_for_line(worker, "STEP 1 ")
        addresses = [listeners(worker.output) for worker in first]
        assert [len(found) for found in addresses] == [2, 1], "gloo on both, the coordination service on worker 0"
        assert {host for found in addresses for host, _ in found} == {"127.0.0.1"}, "all are local, so none else can reach them"
        for host, port in addresses[0] | addresses[1]:
            for text in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 4096, b"\x00" * 64, b""):
                with socket.create_connection((host, port), timeout=5) as stranger:
                    stranger.sendall(text)
        (tmp_path / "go").touch()
        for one in [worker.wait(60) for worker in first]:
            assert one.code == 0 and "END 20.0" in one.output and "CRITICAL" not in one.output, one.output[-3000:]


# ---- roles


@slow
def test_an_evaluator_runs_alone_beside_chief_and_workers() -> None:
    chief, worker, evaluator = run("none", 3, "roles=chief,worker,evaluator", steps=5)
    for one, said in ((chief, "END 5.0 2 True"), (worker, "END 5.0 2 False"), (evaluator, "END 5.0 1 True")):
        assert one.code == 0 and said in one.output, one.output
    assert not listeners(evaluator.output), "it needs nobody"

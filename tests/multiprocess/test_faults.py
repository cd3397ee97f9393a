"""The real library under real faults: all workers have left in time, with the right code, and each log says what happened."""

import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import Ended, run_workers, wait_for_line, workers

import mirrored as mr

SCRIPT = Path(__file__).with_name("faults.py")
#: Seconds within which all have left; measured values are a third of it, this machine may be busy.
SOON = 3.0
ABORTED = -signal.SIGABRT
KILLED = -signal.SIGKILL
#: Programs in flight when a worker is lost: steps that are reported although they never finished.
RUN_AHEAD = 2
slow = pytest.mark.slow


def run(fault: str, num_workers: int = 2, *args: str, devices: int = 1, steps: int = 2000, who: int = 1) -> list[Ended]:
    given = (f"fault={fault}", f"steps={steps}", f"who={who}", *args)
    return run_workers(SCRIPT, num_workers, *given, devices=devices, timeout=90)


def moment_of_fault(ended: Sequence[Ended]) -> float:
    moments = [float(match[1]) for one in ended if (match := re.search(r"(?m)^FAULT .* ([\d.]+)$", one.output))]
    assert moments, ended
    return min(moments)


def require(
    ended: Sequence[Ended],
    codes: Sequence[int | tuple[int, ...]],
    message: str,
    within: float = SOON,
    run_ahead: int = RUN_AHEAD,
) -> None:
    """Check codes and seconds, that each worker which lives to tell has the message in its log, and how far they ran ahead."""
    shown = "\n".join(f"--- worker {one.index}, code {one.code}\n{one.output[-5000:]}" for one in ended)
    fault = moment_of_fault(ended)
    for one, code in zip(ended, codes, strict=True):
        assert one.code in (code if isinstance(code, tuple) else (code,)), shown
        assert one.time - fault < within, shown
        if one.code != KILLED:
            assert re.search(message, one.output), f"not in the log of worker {one.index}: {message}\n{shown}"
        reported = [float(moment) for moment in re.findall(r"(?m)^STEP \d+ ([\d.]+)$", one.output)]
        assert sum(moment > fault for moment in reported) <= run_ahead, shown


def others(num_workers: int, culprit: int, code: int, rest: int | tuple[int, ...] = 75) -> list[int | tuple[int, ...]]:
    return [code if worker == culprit else rest for worker in range(num_workers)]


# ---- deaths


KILLS = [
    # what the dying worker did, workers, devices of each, which
    ("killed", 2, 2, 1),
    pytest.param("killed while compiling", 2, 2, 1, marks=slow),
    pytest.param("killed while compiling", 4, 1, 2, marks=slow),
    pytest.param("killed while saving", 2, 1, 1, marks=slow),
    pytest.param("killed while saving", 4, 1, 3, marks=slow),
    pytest.param("input is killed", 4, 1, 3, marks=slow),
    pytest.param("outside", 2, 1, 1, marks=slow),
]


@pytest.mark.parametrize(("fault", "num_workers", "devices", "culprit"), KILLS)
def test_a_dead_worker_is_named_at_once(fault: str, num_workers: int, devices: int, culprit: int, tmp_path: Path) -> None:
    policy = "policy=data" if fault.startswith("input") else "policy=none"
    ended = run(fault, num_workers, policy, f"folder={tmp_path}", devices=devices, who=culprit)
    require(ended, others(num_workers, culprit, KILLED), rf"leaves with code 75: lost worker {culprit} at step \d+: ")


@slow
@pytest.mark.parametrize(
    ("fault", "num_workers", "devices"),
    [("killed in step", 2, 2), ("input is killed", 4, 1), ("killed while compiling", 2, 1), ("killed while saving", 2, 1)],
)
def test_a_dead_chief_is_named_at_once(fault: str, num_workers: int, devices: int, tmp_path: Path) -> None:
    """Where JAX is faster it aborts, and its text says the same."""
    policy = "policy=file" if fault.startswith("input") else "policy=none"
    ended = run(fault, num_workers, policy, f"folder={tmp_path}", devices=devices, who=0)
    message = r"leaves with code 75: lost worker 0|UNAVAILABLE: Failed to send RPC to coordination service"
    require(ended, others(num_workers, 0, KILLED, (75, ABORTED)), message)


@slow
def test_a_program_that_catches_errors_does_not_go_on_alone() -> None:
    ended = run("killed", 4, "catch=1")
    require(ended, others(4, 1, KILLED), r"lost worker 1 at step \d+: the process is gone", run_ahead=200)


# ---- input


@slow
@pytest.mark.parametrize(
    ("num_workers", "policy", "prefetch", "culprit"), [(2, "data", 2, 1), (4, "file", 2, 0), (2, "off", 0, 1)]
)
def test_the_worker_whose_input_is_stuck_is_named(num_workers: int, policy: str, prefetch: int, culprit: int) -> None:
    ended = run("input hangs", num_workers, f"policy={policy}", f"prefetch={prefetch}", "limit=4", who=culprit)
    message = rf"the input of worker {culprit} has given no batch for \d s, which is the limit\."
    require(ended, [75] * num_workers, message, within=4 + SOON)
    assert min(one.time for one in ended) - moment_of_fault(ended) > 3.5
    assert "wait_for_ever" in ended[culprit].output, "the stack of the pipeline"


@slow
def test_a_slow_input_is_waited_for() -> None:
    for one in run("input is slow", 2, "policy=file", "limit=8", steps=8):
        assert one.code == 0 and "CRITICAL" not in one.output, one.output


@slow
def test_an_error_of_one_input_is_told_to_all() -> None:
    ended = run("input fails", 2, "policy=data")
    require(ended, [75, 1], r"leaves with code \d+: worker 1 failed at step \d+ with ValueError: the data is gone")


# ---- errors of the program


ERRORS = [
    ("raise hostile", 1, 1, r"worker 1 failed at step 7 with ValueError: \\x1b\[2J\\x1b\]0;owned\\x07 \\r$"),
    ("raise unpicklable", 0, 1, r"worker 0 failed at step 7 with Unpicklable: \(which has no text\)$"),
    ("raise ParserExit", 1, 75, r"worker 1 has ended its program after step 7 .*, and worker 0 waits in step 8"),
    ("tracing fails", 1, 1, r"worker 1 failed at step 7 with ValueError: the data is gone$"),
]


@slow
@pytest.mark.parametrize(("fault", "culprit", "code", "message"), ERRORS, ids=[error[0] for error in ERRORS])
def test_an_error_on_one_worker_is_told_to_all(fault: str, culprit: int, code: int, message: str) -> None:
    ended = run(fault, 2, who=culprit)
    require(ended, others(2, culprit, code), f"(?m){message}")
    other = ended[1 - culprit].output
    told = other[other.index("CRITICAL") :]
    assert len(told) < 20_000 and told.replace("\n", "").isprintable(), "nothing of another worker's text acts on a terminal"
    for line in told.splitlines()[1:]:
        assert line.startswith("  | ") or "was here" in other, f"a line of ours, from another worker: {line}"


@slow
def test_errors_that_end_no_python_program_end_no_job() -> None:
    """In another thread, and at exit."""
    for one in run("aside", 2, steps=10):
        assert one.code == 0 and "END" in one.output and "CRITICAL" not in one.output, one.output
    assert one.output.count("ValueError: the data is gone") == 2, "and Python shows them"


@slow
def test_a_long_evaluation_on_the_chief_is_waited_for() -> None:
    """Longer than the heartbeat, shorter than the limit; the others wait in the next step."""
    for one in run("evaluation", 2, "seconds=12", "limit=30", who=0, steps=10):
        assert one.code == 0 and "END" in one.output and not re.search("WARNING|CRITICAL", one.output), one.output
        share = re.search(r"GUARD ([\d.]+)", one.output)
        assert share and float(share[1]) < 0.01, "of a core, for the guard"


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
        port = int(re.search(r"coordinator 127.0.0.1:(\d+)", first[0].output)[1])  # type: ignore[index]
        for second in run_workers(SCRIPT, 2, "steps=3", "limit=5", env={"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}):
            assert second.code == 75, second.output
            assert re.search(rf"port {port} on 127.0.0.1 is taken|a job runs there, an earlier run of this one or", second.output)
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


MALFORMED = [
    "", "{", "[]", "null", "3", '{"cluster": {}}', '{"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}',
    '{"cluster": {"worker": ["h:1", "h:1"]}, "task": {"type": "worker", "index": 0}}',
    '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "worker", "index": 2}}',
    '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "worker", "index": "0"}}',
    '{"cluster": {"worker": ["h:1", "h:99999"]}, "task": {"type": "worker", "index": 0}}',
    '{"cluster": {"worker": ["h:1", "$(reboot):2"]}, "task": {"type": "worker", "index": 0}}',
    '{"cluster": {"worker": ["h", "h:2"]}, "task": {"type": "worker", "index": 0}}',
    '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "boss", "index": 0}}',
    '{"cluster": {"worker": ["h:1", "h:2"]}}', '{"cluster": ' + "[" * 100_000, "x" * 2**20,
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_tf_config_is_refused_by_the_strategy_before_anything_starts(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    begin = time.monotonic()
    with pytest.raises(mr.ClusterConfigError, match="TF_CONFIG") as caught:
        mr.MultiWorkerMirroredStrategy()
    assert time.monotonic() - begin < 0.3 and caught.value.exit_code == 76
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()

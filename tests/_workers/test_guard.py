"""The guard of one worker, whose fellow workers are entries in a store: what it says, what it does, and what it leaves alone."""

import contextlib
import dataclasses
import json
import os
import queue
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from fake_service import FakeClient
from processes import wait_until

from mirrored._errors import ProgramMismatchError, ReplicasDivergeError, VariableLostError, WorkerLostError
from mirrored._text import escape, escape_lines
from mirrored._workers.coordination import Coordination
from mirrored._workers.guard import Guard, seconds_of_round
from mirrored._workers.neighbours import Process
from mirrored._workers.progress import COMPARISON, NEXT_BATCH, UNKNOWN, Progress
from mirrored._workers.stall import Position, decode
from mirrored._workers.verdict import MAX_TEXT, Verdict

Log, Patch = pytest.LogCaptureFixture, pytest.MonkeyPatch
HOST = Process.own().host.replace(" ", "-")
OWN_CODE = Position(1, 12, "train", "", "", False, False, False, 400.0, -1, 0, [], [])


@dataclasses.dataclass
class Guarded:
    guard: Guard
    service: FakeClient
    progress: Progress
    codes: "queue.Queue[int]"
    printed: list[BaseException]

    def fails(self, error: BaseException) -> int:
        """Raise an exception that nobody catches; return the exit code."""
        try:
            raise error
        except BaseException:
            sys.excepthook(*sys.exc_info())
        return self.codes.get(timeout=10)

    def of_key(self, name: str) -> str | None:
        return self.service.values.get(f"mirrored/guard/{name}")

    def says(self, name: str, text: object = "1") -> None:
        """Let another worker write something."""
        text = text.encode() if isinstance(text, Verdict | Position) else str(text)
        self.service.key_value_set(f"mirrored/guard/{name}", text, allow_overwrite=True)

    def verdict(self) -> Verdict:
        return Verdict.decode(self.of_key("verdict") or "")

    def called(self, why: Verdict | None) -> None:
        """Let another worker end the job."""
        if why is not None:
            self.says("verdict", why)
        self.says("call", "leave")

    def enter(self, *names: str) -> None:
        for name in names:
            self.progress.enter(name, name.encode())

    def other_ends(self, worker: int, history: list[str] | None = None) -> None:
        """Let another worker come to its end, and wait there for the others."""
        self.says(f"ended/{worker}")
        there = Coordination(self.service, worker, self.guard._num_workers)

        def wait() -> None:
            with contextlib.suppress(WorkerLostError):
                there.exchange("end", history or ["0", "00000000"], timeout_seconds=10)

        threading.Thread(target=wait, daemon=True).start()


Make = Callable[..., Guarded]


@pytest.fixture
def make(monkeypatch: Patch) -> Iterator[Make]:
    made: list[Guarded] = []
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))

    def make(worker: int = 0, num_workers: int = 2, stall_seconds: float | None = None, is_started: bool = True) -> Guarded:
        service, progress, codes = FakeClient(), Progress(), queue.Queue()
        guard = Guard(Coordination(service, worker, num_workers), progress, stall_seconds=stall_seconds, exit=codes.put)
        made.append(Guarded(guard, service, progress, codes, printed))
        if is_started:
            guard.start()
        return made[-1]

    hook, exit_function = sys.excepthook, sys.exit
    yield make
    for guarded in reversed(made):
        threads = guarded.guard._threads
        guarded.guard.stop(wait=False)
        assert not any(thread.is_alive() for thread in threads)
        guarded.service.die(*range(guarded.guard._num_workers))  # ends the threads that wait for it
    assert (sys.excepthook, sys.exit) == (hook, exit_function)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Patch) -> None:
    """Wait for nobody who leaves."""
    monkeypatch.setattr("mirrored._workers.shutdown._LEAVE_SECONDS", 0.0)
    monkeypatch.setattr("mirrored._workers.shutdown._LAST_LEAVE_SECONDS", 0.0)
    monkeypatch.setattr("mirrored._workers.shutdown._ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("mirrored._workers.guard._GRACE_SECONDS", 0.02)
    monkeypatch.setattr("mirrored._workers.guard.ROUND_SECONDS", 0.02)


# ---- an error of its own


def test_what_others_read_is_escaped_and_cut() -> None:
    evil = "done\x1b[2J\r\nCRITICAL all is well\x00\u202e\udc80" + "x" * 100_000
    assert "\n" not in escape(evil, 50) and escape(evil, 50).isprintable() and len(escape(evil, 50)) < 600
    title, *lines = str(Verdict.decode(Verdict(evil, evil + "\nfake", lost=(1,)).encode())).split("\n")
    assert title.startswith("done\\x1b[2J\\r\\nCRITICAL") and title.isprintable() and len(title) + len(lines[0]) < 3 * MAX_TEXT
    assert all(line.startswith("  | ") and line.isprintable() for line in lines)
    assert escape_lines("a\n\n  b\tc\n", 100) == "  | a\n  |   b\\tc"
    assert escape_lines("the first\nthe last", 9) == "  | the last", "the end says why"
    ours = Verdict.decode(Verdict("why" + " so" * 10**5, "x" * 10**6 + "the end").encode())
    assert ours.title.startswith("why") and ours.detail.endswith("the end"), "one of ours is cut before it is sent"
    assert len(ours.title) == len(ours.detail) == MAX_TEXT
    text = json.dumps({"title": "x" * 10**6, "detail": "", "lost": [], "wants_stacks": False})
    assert "another process has written" in Verdict.decode(text).title
    assert Verdict.decode(Verdict("x", code=1).encode()).code == 1
    for code in (0, 130, None, "1"):
        assert Verdict.decode(json.dumps({**dataclasses.asdict(Verdict("x")), "code": code})).code == 75, code


@pytest.mark.parametrize(("kind", "code"), [(ProgramMismatchError, 1), (ReplicasDivergeError, 1), (ValueError, 75)])
def test_what_a_comparison_has_found_is_an_error_of_all_workers(make: Make, kind: type[Exception], code: int) -> None:
    """Each worker raises it, but the verdict of the first may come to the others earlier."""
    first = make()
    first.says("left/1")
    assert first.fails(kind("they differ")) == 1
    other = make(worker=1)
    other.called(first.verdict())
    assert other.codes.get(timeout=10) == code


TRACEBACK = "Traceback (most recent call last):\n  File 'labels.py', line 3, in wait\n"


class OddError(Exception):
    exit_code = None

    def __str__(self) -> str:
        raise RuntimeError


def with_code(code: object) -> Exception:
    error = ValueError("x")
    error.exit_code = code  # type: ignore[attr-defined]
    return error


def test_the_code_of_an_exception_says_what_it_was(make: Make) -> None:
    errors = {KeyboardInterrupt(): 130, MemoryError(): 1, AssertionError("x" * 10**6): 1, OddError(): 1}
    codes = {with_code(76): 76} | {with_code(code): 1 for code in (0, None, "3", 256, -1, True)}
    for error, code in (errors | codes).items():
        guarded = make()
        assert guarded.fails(error) == code, error
        assert len(guarded.of_key("verdict") or "") < 3 * MAX_TEXT
        if isinstance(error, OddError):
            assert guarded.verdict().title == "worker 0 failed at step 0 with OddError: (which has no text)"
        guarded.guard.stop(wait=False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Timed out waiting for the label server"),
        ValueError("NCCL is not installed, Gloo is"),
        ConnectionResetError(104, "Connection reset by peer"),
        ValueError("UNAVAILABLE: Google Cloud Storage: Connection reset by peer"),  # tensorstore's
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while NCCL was started"),
        RuntimeError(f"INTERNAL: CpuCallback error calling callback: {TRACEBACK}RuntimeError: Timed out waiting for NCCL"),
    ],
)
def test_an_error_of_the_program_is_no_loss_whatever_it_speaks_of(make: Make, caplog: Log, error: Exception) -> None:
    guarded = make(worker=1)
    assert guarded.fails(error) == 1
    assert guarded.verdict().title.startswith(f"worker 1 failed at step 0 with {type(error).__name__}: ")
    assert guarded.printed == [error] and "  | " not in caplog.text, "its traceback is printed once"


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("length", [0, 2 * MAX_TEXT])
def test_a_traceback_that_all_workers_print_is_printed_once(make: Make, caplog: Log, is_alike: bool, length: int) -> None:
    guarded, error = make(worker=1), ValueError("x" * length + "all alike")
    with contextlib.suppress(ValueError):
        raise error
    text = "".join(traceback.format_exception(error))
    detail = text if is_alike else text.replace("alike", "but one")
    guarded.says("verdict", Verdict("worker 0 failed at step 0 with ValueError", detail))
    guarded.says("left/0")
    guarded.guard._fail_with(error)
    assert guarded.codes.get(timeout=5) == 1
    assert "worker 1 leaves with code 1: worker 0 failed at step 0 with ValueError" in caplog.text
    assert ("  | " in caplog.text) == ("but one" in caplog.text) == (not is_alike)
    assert guarded.verdict().detail == detail[-MAX_TEXT:], "the first counts"


def at_the_top(error: BaseException) -> BaseException:
    """Return an error that nobody has caught: its traceback begins at the outermost frame."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return error.with_traceback(types.TracebackType(None, frame, 0, 1))


def test_an_error_is_told_although_the_program_has_a_hook_of_its_own(make: Make, monkeypatch: Patch) -> None:
    for error, code, title in [
        (ValueError("in the hook's program"), 1, "worker 0 failed at step 0 with ValueError: in the hook's program"),
        (RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), 75, "lost worker 1 at step 0"),
    ]:
        guarded = make()
        monkeypatch.setattr(sys, "last_value", at_the_top(error), raising=False)  # as Python does before it calls any hook
        guarded.guard.stop()
        assert guarded.codes.get(timeout=5) == code and title in str(guarded.verdict())


def test_what_is_no_end_of_this_program_ends_nothing(make: Make, monkeypatch: Patch) -> None:
    """pytest, for one, keeps in `sys.last_value` what a test raised."""
    monkeypatch.setattr(sys, "last_value", at_the_top(ValueError("from before the start")), raising=False)
    guarded = make()
    guarded.other_ends(1)
    guarded.guard.stop()
    monkeypatch.delattr(sys, "last_value")
    another = make()
    try:
        raise ValueError("expected")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    another.other_ends(1)
    another.guard.stop()
    monkeypatch.delattr(sys, "last_value")
    child, prompt, error = make(), make(), ValueError("a slip")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # as after a fork
        child.guard._on_exception(ValueError, error, None)
        child.guard.stop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "ps1", ">>> ", raising=False)
        prompt.guard._on_exception(ValueError, error, None)
    assert error in child.printed and error in prompt.printed, "Python shows it"
    for one in (guarded, another, child, prompt):
        assert one.codes.empty() and one.of_key("verdict") is None


# ---- another worker is lost


LOSSES = [
    WorkerLostError("worker 2 did not come"),
    ValueError("UNKNOWN: Gloo all-reduce failed: [external/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:42652"),
    VariableLostError("the value of 'w' is lost: the program that was to compute it failed (JaxRuntimeError: UNKNOWN: Gloo ...)"),
    RuntimeError("UNAVAILABLE: ... remote target coordination_service while calling"),
]


def test_who_does_not_answer_the_roll_is_the_lost_worker(make: Make, caplog: Log) -> None:
    for error in LOSSES:
        guarded = make(worker=1, num_workers=4)
        guarded.progress.started = guarded.progress.updates = 12
        for name in ("here/0", "here/3", "left/0", "left/3"):
            guarded.says(name)
        caplog.clear()
        assert guarded.fails(error) == 75 and guarded.printed[-1] is error
        assert "lost worker 2 at step 12: a collective failed on worker 1, and worker 2 has not answered" in caplog.text
        assert guarded.verdict().lost == (2,) and type(error).__name__ in caplog.text
        guarded.guard.stop(wait=False)


def met_by(guarded: Guarded, child) -> Guarded:
    guarded.says(f"process/{HOST}/1", child.process.encode())
    assert guarded.guard._round(0.5) is False and guarded.codes.empty(), "it lives"
    return guarded


def test_a_worker_of_this_host_that_dies_is_named_at_once_wherever_this_one_is(make: Make, child, caplog: Log) -> None:
    there = [met_by(make(is_started=False), child) for _ in range(5)]
    there[1].enter("train")
    there[2].progress.phase(NEXT_BATCH).__enter__()
    there[3].progress.phase("saving step 3", is_patient=True).__enter__()
    there[4].guard._has_ended = True
    there[4].says("ended/1")
    child.die()
    assert there[4].guard._is_left_alone() is False and there[4].codes.empty(), "after both ends, it may go"
    there[4].service.values.pop("mirrored/guard/ended/1")
    for guarded in there:
        caplog.clear()
        guarded.guard._watch_host()
        assert guarded.codes.get(timeout=5) == 75
        assert re.search(r"worker 0 leaves with code 75: lost worker 1 at step \d: the process is gone", caplog.text)


def test_a_worker_that_died_after_it_said_why_is_believed(make: Make, child, caplog: Log, monkeypatch: Patch) -> None:
    guarded, failing = (met_by(make(is_started=False), child) for _ in range(2))
    guarded.called(None)  # to say that it is here, before the reason is known
    threading.Timer(0.05, guarded.says, ("verdict", Verdict("worker 1 failed at step 3 with ValueError: x", lost=(1,)))).start()
    failing.says("verdict", Verdict("worker 1 failed at step 3 with ValueError: x"))
    child.die()
    guarded.guard._watch_host()
    assert guarded.codes.get(timeout=5) == 75
    slow = RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
    monkeypatch.setattr(failing.service, "blocking_key_value_get", MagicMock(side_effect=slow))
    failing.guard._fail_with(LOSSES[1])
    assert failing.codes.get(timeout=5) == 75
    assert caplog.text.count("worker 0 leaves with code 75: worker 1 failed at step 3") == 2 and "is gone" not in caplog.text


def test_a_loss_is_explained_by_who_is_gone_or_by_what_the_first_to_ask_has_found(make: Make, child) -> None:
    guarded = met_by(make(is_started=False, num_workers=3), child)
    child.die()
    assert guarded.guard._shutdown.lost("Gloo").title == "lost worker 1 at step 0: the process is gone"
    assert guarded.of_key("call") is None, "without a roll"
    guarded = make(is_started=False)
    guarded.says("verdict", Verdict("worker 1 failed at step 5 with ValueError: x"))
    assert guarded.guard._shutdown.lost("Gloo").title == "worker 1 failed at step 5 with ValueError: x"
    for verdict, title in ((Verdict("lost worker 3"), "lost worker 3"), (None, "lost workers 0, 2, 3 at step 0")):
        guarded = make(worker=1, num_workers=4, is_started=False)
        guarded.service.key_value_increment("mirrored/guard/callers", 1)
        telling = threading.Timer(0.03, lambda to=guarded, verdict=verdict: verdict and to.says("verdict", verdict))
        telling.start()
        assert guarded.guard._shutdown.lost("Gloo").title.startswith(title) and guarded.of_key("call") is None
        telling.join()


# ---- what others say


def test_a_verdict_of_another_worker_is_followed(make: Make, caplog: Log) -> None:
    guarded = make(worker=1)
    guarded.called(Verdict("worker 0 failed at step 3 with ValueError: bad\x1b", "Traceback\x07\n  line", wants_stacks=True))
    assert guarded.codes.get(timeout=10) == 75
    assert guarded.of_key("here/1") and guarded.of_key("left/1")
    shown = "worker 0 failed at step 3 with ValueError: bad\\x1b\n  | Traceback\\x07\n  |   line"
    assert f"worker 1 leaves with code 75: {shown}" in caplog.text
    assert "worker 1 was here:\nMainThread:\n" in caplog.text and "test_a_verdict_of_another" in caplog.text
    assert "mirrored-guard" not in caplog.text, "its own threads' stacks help nobody"


def test_an_error_of_the_same_moment_is_shown_as_its_own(make: Make, monkeypatch: Patch) -> None:
    """The hook says that an error is on its way, and then prints it, before it looks for a verdict."""
    guarded = make(worker=1)
    guarded.says("left/0")
    fail = guarded.guard._fail

    def slowly(*arguments: object, **more: object) -> None:
        guarded.called(Verdict("worker 0 failed"))
        with pytest.raises(queue.Empty):
            guarded.codes.get(timeout=0.1)
        fail(*arguments, **more)

    monkeypatch.setattr(guarded.guard, "_fail", slowly)
    assert guarded.fails(ValueError("of this worker")) == 1


def test_a_call_without_a_verdict_ends_too(make: Make, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard.LAST_RESORT_SECONDS", 0.3)
    guarded = make(worker=1)
    guarded.called(None)
    assert guarded.codes.get(timeout=10) == 75
    assert "gone before it said why" in caplog.text


# ---- others have done other things


def done(*names: str) -> Progress:
    progress = Progress()
    for name in names:
        progress.enter(name, name.encode())
    return progress


def says_what_it_did(guarded: Guarded, worker: int, *names: str) -> None:
    """Let another worker be where it is after programs of these names, and let it tell them as it leaves."""
    number, checksum, *_ = done(*names).trail.last
    guarded.says(f"position/{worker}", OWN_CODE._replace(started=number, done=number, trail=checksum))
    guarded.says(f"trail/{worker}", done(*names).tell())


@pytest.mark.parametrize(("worker", "other"), [(0, 1), (2, 0)])
def test_programs_in_another_order_end_the_job_with_one_wherever_the_workers_are(
    make: Make, caplog: Log, worker: int, other: int
) -> None:
    """Each compares with worker 0, and worker 0 with all; who is ahead knows what the other should have done."""
    guarded = make(worker, 3, is_started=False)
    guarded.enter("train", "evaluate", "train", "train")
    says_what_it_did(guarded, other, "train", "evaluate", "train")
    says_what_it_did(guarded, 1 if worker else 2, "train", "evaluate", "train", "train", "train")
    assert guarded.guard._round(0.5) is False and guarded.codes.empty(), "some are only ahead"
    says_what_it_did(guarded, other, "train", "train", "evaluate")
    assert guarded.guard._round(0.5) is True and guarded.codes.get(timeout=5) == 1
    odd, fellow = (f"worker {other}", f"worker{'s' * (worker != 1)} {', '.join(map(str, sorted({0, 1, 2} - {other})))}")
    assert f"worker {worker} leaves with code 1: ProgramMismatchError: the workers have run programs in" in caplog.text
    for side in (f"{odd}: train, then evaluate", f"{fellow}: evaluate, then train"):
        assert side in caplog.text and "wrong since step 2 (" in caplog.text
    assert guarded.verdict().code == 1 and guarded.verdict().wants_stacks and guarded.of_key("call")
    assert "MIRRORED_DEBUG=detail" in caplog.text


@pytest.mark.parametrize(("phase", "code"), [("", 1), (COMPARISON, None)])
def test_a_comparison_that_all_have_come_to_is_left_to_the_program(make: Make, phase: str, code: int | None) -> None:
    guarded = make(is_started=False)
    guarded.enter("train", "evaluate")
    says_what_it_did(guarded, 1, "train", "train")
    there = decode(guarded.of_key("position/1") or "")
    assert there is not None
    guarded.says("position/1", there._replace(phase=phase, waits=True))
    with guarded.progress.phase(COMPARISON, "'evaluate'", waits=True):
        assert guarded.guard._round(0.5) is (code is not None)
    assert guarded.codes.empty() if code is None else guarded.codes.get(timeout=5) == code


def test_a_collective_that_fails_because_different_programs_met_says_so(make: Make, caplog: Log) -> None:
    order = r"ProgramMismatchError: the workers have run programs .* \(worker 0: train; worker 1: evaluate"
    lost = "lost a connection at step 0: a collective failed on worker 0, and all workers answered"
    for names, code, said in [(("train", "evaluate"), 1, order), (("train",), 75, lost)]:
        guarded = make(is_started=False)
        guarded.enter("train", "train")
        guarded.says("here/1")
        guarded.says("left/1")
        guarded.says("trail/1", done(*names).tell())
        guarded.guard._fail_with(LOSSES[1])
        assert guarded.codes.get(timeout=5) == code and re.search(f"leaves with code {code}: {said}", caplog.text)
        assert guarded.of_key("trail/0") == guarded.progress.tell()


def test_a_worker_that_is_asked_tells_its_history_where_it_differs_and_leaves_with_the_code_of_the_verdict(make: Make) -> None:
    guarded = make(worker=1, is_started=False)
    guarded.enter("train")
    guarded.says("verdict", Verdict("ProgramMismatchError: the workers", code=1))
    guarded.says("call", "tell")
    assert guarded.guard._round(0.5) is True and guarded.codes.get(timeout=5) == 1
    assert guarded.of_key("trail/1") == done("train").tell()
    for names, told in ((("train",), None), (("train", "train"), None), (("evaluate",), "evaluate")):
        guarded = make(worker=1, num_workers=3, is_started=False)
        guarded.enter(*names)
        guarded.says("trail/2", done("train").tell())
        guarded.guard._shutdown.answer("tell")
        assert guarded.of_key("here/1") and guarded.of_key("trail/1") == (told and guarded.progress.tell())


def test_no_job_ends_well_whose_workers_have_done_different_things(make: Make, caplog: Log) -> None:
    for exit_code, history, names, said in [
        (0, ["0", "00000000"], (), r"different orders.*since step 1 \(worker 0: train; worker 1: nothing more\)"),
        (3, ["0", "00000000"], (), "different orders"),
        (0, ["1", UNKNOWN], (), "different numbers of batches.*worker 0: 0; worker 1: 1"),
        (None, ["0", UNKNOWN], (), ""),
        (None, ["no history"], (), ""),
        (None, done("train").history(), ("train",), ""),
    ]:
        guarded = make(is_started=False)
        guarded.enter("train")
        guarded.guard._sys_exit_code = exit_code or 0
        guarded.other_ends(1, history)
        guarded.says("trail/1", done(*names).tell())
        caplog.clear()
        guarded.guard._end()
        if exit_code is None:
            assert guarded.codes.empty() and guarded.of_key("call") == "done"
        else:
            assert guarded.codes.get(timeout=5) == (exit_code or 1)
            assert re.search(f"leaves with code .: ProgramMismatchError: the workers have .*{said}", caplog.text), caplog.text


def test_what_the_last_programs_find_wrong_is_an_error_of_the_end(make: Make) -> None:
    def finish() -> None:
        raise ValueError("the argument `x` is not the same on all workers")

    for order, is_found in ((done("train").history(), True), ([UNKNOWN] * 2, False)):
        guarded = make()
        guarded.progress.finish = finish
        guarded.enter("train")
        guarded.other_ends(1, order)
        guarded.guard._end()
        if is_found:
            assert guarded.codes.get(timeout=5) == 1 and isinstance(guarded.printed[-1], ValueError)
            assert guarded.verdict().title.endswith("with ValueError: the argument `x` is not the same on all workers")
        else:  # the programs of other threads may wait for ever
            assert guarded.codes.empty() and guarded.of_key("call") == "done"


# ---- the end


def ending(guarded: Guarded) -> threading.Thread:
    """Let the program come to its end, where it waits for the others."""
    thread = threading.Thread(target=guarded.guard.stop)
    thread.start()
    wait_until(lambda: guarded.of_key(f"ended/{guarded.guard._worker}"))
    assert thread.is_alive()
    return thread


def test_waiting_at_the_end_is_told(make: Make, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard._END_WARNING_SECONDS", 0.1)
    guarded = make()
    thread = ending(guarded)
    wait_until(lambda: caplog.messages)
    guarded.other_ends(1)
    thread.join(10)
    assert not thread.is_alive() and guarded.codes.empty()
    assert caplog.messages[0].startswith("worker 0 has come to the end of its program, and has waited for worker 1 for 0 s")


def test_an_end_waits_for_the_others_and_says_how_it_came(make: Make) -> None:
    for argument, code in [(3, 3), ("a message", 1), (2.5, 1), (256 + 7, 7), (None, 0), (False, 0)]:
        guarded = make(num_workers=3)
        with pytest.raises(SystemExit) as caught:
            sys.exit(argument)
        assert caught.value.code == argument
        thread, position = ending(guarded), decode(guarded.of_key("position/0") or "")
        assert position is not None and position.has_ended
        assert str(position).endswith(f", by sys.exit({code})" if code else "before its first step")
        for worker in (1, 2):
            guarded.other_ends(worker)
        thread.join(10)
        assert not thread.is_alive()
        guarded.guard.stop()
        assert guarded.codes.empty() and guarded.of_key("call") == "done"


def test_the_code_of_sys_exit_is_kept_when_others_still_need_this_worker_and_a_caught_one_is_no_end(make: Make) -> None:
    guarded = make(worker=1)
    with pytest.raises(SystemExit):
        sys.exit(3)
    thread = ending(guarded)
    guarded.called(Verdict("worker 1 has ended its program"))
    assert guarded.codes.get(timeout=10) == 3
    guarded.other_ends(0)
    thread.join(10)
    guarded = make(worker=1)
    with pytest.raises(SystemExit):
        sys.exit(2)  # as a parser of arguments does, and its caller catches
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(sys.exit, 3).exception(), SystemExit)
    assert guarded.guard._sys_exit_code == 2, "the end of a thread is none of the program"
    guarded.called(Verdict("worker 0 failed"))
    assert guarded.codes.get(timeout=10) == 75
    for code, expected in ((3, 3), (0, 75)):  # also where this worker finds that others wait in vain
        guarded = make(is_started=False)
        guarded.guard._sys_exit_code, guarded.guard._has_ended = code, True
        guarded.guard._fail(Verdict("worker 0 has ended its program, and worker 1 waits"))
        assert guarded.codes.get(timeout=10) == expected


# ---- who is late or silent


@pytest.mark.parametrize("end", [None, "done"])
def test_a_silent_worker_whose_heartbeats_cease_is_lost_unless_all_have_come_to_their_ends(
    make: Make, caplog: Log, end: str | None
) -> None:
    """JAX's heartbeats know; the kernel knows nothing of another host's processes. After the end, workers disconnect."""
    guarded = make(num_workers=3, is_started=False)
    for worker in (1, 2):
        guarded.says(f"position/{worker}", OWN_CODE)
    for _ in range(8):
        guarded.guard._round(1.0)
    assert set(guarded.guard._listening) == {frozenset({1}), frozenset({2})} and guarded.codes.empty()
    assert caplog.text.count("has been silent for 4 s: it is stopped, cut off, dead, or in one long call") == 2
    assert caplog.text.count("it was last seen so") == 2, "once for each"
    if end:
        guarded.says("call", end)
    guarded.service.die(2)
    guarded.guard._listening[frozenset({2})].join(10)
    assert ("lost worker 2 at step 0: its heartbeats have ceased" in caplog.text) == (not end)
    if end:
        assert guarded.codes.empty() and guarded.of_key("verdict") is None
    else:
        assert guarded.codes.get() == 75 and guarded.verdict().lost == (2,) and guarded.of_key("call") == "leave"


def test_worker_0_ends_its_service_after_the_others_have_left_it_or_at_the_limit(make: Make, monkeypatch: Patch) -> None:
    """Python 3.12 starts no thread at its end."""
    for worker, dies, seconds in ((0, True, 30.0), (0, False, 0.05), (1, False, 30.0)):
        guarded = make(worker, num_workers=3)
        guarded.guard.stop(wait=False)
        others = frozenset({0, 1, 2}) - {worker}
        leaving = threading.Timer(0.03, guarded.service.die, others if dies else ())
        leaving.start()
        with monkeypatch.context() as m:
            m.setattr(
                threading.Thread, "start", MagicMock(side_effect=RuntimeError("can't create new thread at interpreter shutdown"))
            )
            guarded.guard.outlive_others(seconds)
            guarded.guard._listen_to(frozenset({2}))
            guarded.guard._shutdown.arm_last_resort(75)
        assert any(thread.is_alive() for thread in guarded.guard._listening.values()) == (worker == 0 and not dies)
        assert guarded.codes.empty() and guarded.of_key("verdict") is None
        leaving.join()


UNREACHED = "worker 0 cannot reach worker 1 at 10.0.0.1:41234"


def test_a_cut_ends_a_step_that_waits_and_the_limit_says_who_reaches_whom_not(make: Make, monkeypatch: Patch) -> None:
    """And a worker that goes on takes back what it has said of its connections."""
    for limit, found, title in ((None, Verdict("lost a cable"), "lost a cable"), (2.0, None, f"seconds=...). {UNREACHED}")):
        guarded = make(is_started=False, stall_seconds=limit)
        links = SimpleNamespace(check=MagicMock(return_value=found), describe=lambda: UNREACHED, rest=MagicMock(), warning="")
        monkeypatch.setattr(guarded.guard, "_links", links)
        assert guarded.guard._round(0.9) is False and links.rest.call_count == 1
        guarded.says("position/1", OWN_CODE._replace(beat=2))
        guarded.enter("train")
        assert [guarded.guard._round(0.9) for _ in range(4)] == [False] * 3 + [True] and links.rest.call_count == 1
        assert guarded.codes.get(timeout=5) == 75 and title in guarded.verdict().title


@pytest.mark.parametrize(
    ("answers", "warning", "end"),
    [
        (True, UNREACHED, f"all workers answered. {UNREACHED}"),
        (True, "", "all workers answered"),
        (False, UNREACHED, "worker 1 has not answered"),  # it is dead, and so does not answer
    ],
)
def test_a_connection_that_the_kernel_has_given_up_is_named(make: Make, answers: bool, warning: str, end: str) -> None:
    guarded = make(is_started=False)
    if answers:
        guarded.says("here/1")
    guarded.guard._links.warning = warning
    guarded.guard._fail_with(RuntimeError("INTERNAL: Gloo context initialization failed"))
    assert guarded.codes.get(timeout=5) == 75
    assert guarded.verdict().title.endswith(end)


def test_a_service_that_is_silent_is_told_once_and_ends_a_worker_that_waits_for_longer_than_the_limit(
    make: Make, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr("mirrored._workers.guard.ROUND_SECONDS", 0.5)
    guarded = make(worker=1, is_started=False, stall_seconds=8.0)
    guard, looks = guarded.guard, []
    monkeypatch.setattr(guard._neighbours, "await_death", looks.append)
    monkeypatch.setattr(guard, "_stopped", SimpleNamespace(is_set=lambda: len(looks) > 40))
    for in_service in (0, 1):
        guard._looks_in_call = in_service
        guard._watch_host()
        assert guarded.codes.empty(), "it does not wait"
        assert caplog.text.count("has not answered worker 1 for 4 s: it is stopped, cut off, or dead") == in_service
        looks.clear()
    guarded.enter("train")
    guard._looks_in_call = 1
    guard._watch_host()
    assert guarded.codes.get(timeout=5) == 75 and looks == [0.5] * 16
    assert "leaves with code 75: worker 0, which hosts the coordination service, has not answered for 8 s" in caplog.text


def test_a_service_that_is_gone_ends_this_worker_before_jax_does(make: Make, monkeypatch: Patch, caplog: Log) -> None:
    gone, late = RuntimeError("UNAVAILABLE: Socket closed"), RuntimeError("DEADLINE_EXCEEDED")
    for answers in ([gone, gone], [gone, late]):
        guarded = make(worker=1, is_started=False)
        monkeypatch.setattr(guarded.service, "blocking_key_value_get", MagicMock(side_effect=answers))
        guarded.guard._watch()
        assert guarded.codes.get(timeout=5) == 75
    assert caplog.text.count("lost worker 0, which hosts the coordination service, at step 0") == 2
    assert "error of its own" not in caplog.text


@pytest.mark.parametrize(("num_workers", "waits"), [(2, False), (100, True)])
def test_a_round_of_a_healthy_job_is_three_calls_whatever_the_number_of_workers(
    make: Make, num_workers: int, waits: bool
) -> None:
    assert [seconds_of_round(count) for count in (2, 128, 512, 10**6)] == [0.02, 0.02, 0.08, 4.0], "worker 0 has the time for all"
    for worker in (1, 0):  # worker 0 looks at all, the others at worker 0
        guarded = make(worker, num_workers, is_started=False)
        guarded.says(f"process/{HOST}/{1 - worker}", Process.own().encode())
        for other in range(num_workers):
            guarded.says(f"position/{other}", OWN_CODE._replace(started=2, waits=waits, still=1.0))
        assert guarded.guard._round(0.5) is False  # in which it meets the other
        guarded.guard._neighbours._num_meetings = 20
        for _ in range(5):
            guarded.service.counted.clear()
            guarded.enter("train")
            assert guarded.guard._round(0.5) is False
            assert guarded.service.counted.total() == 3


def test_a_chief_that_does_not_speak_while_its_service_answers_is_named_to_all(make: Make, caplog: Log) -> None:
    """One call that holds Python's lock is enough; who leaves first is not to be taken for the lost one."""
    guarded = make(worker=1, num_workers=3, stall_seconds=4.0, is_started=False)
    guarded.says("position/0", OWN_CODE)
    guarded.enter("train")
    rounds = 0
    while not guarded.guard._round(1.0):
        rounds += 1
        guarded.says("position/2", OWN_CODE._replace(beat=rounds, waits=True))
    assert rounds == 4 and guarded.codes.get(timeout=5) == 75
    assert "worker 0 has not entered step 1 (program 'train') for 4 s" in guarded.verdict().title
    assert "it has been silent for 4 s" in caplog.text and guarded.verdict().lost == (), "the others are told, and waited for"
    assert "worker 0: in its own code after step 12" in caplog.text and "worker 1 was here:\nMainThread" in caplog.text


def test_worker_0_finds_who_waits_in_vain_for_another(make: Make, caplog: Log) -> None:
    guarded = make(num_workers=4, is_started=False)
    guarded.says("position/1", OWN_CODE._replace(started=13, waits=True, still=0.3))
    guarded.says("position/2", OWN_CODE._replace(has_ended=True, still=0.0))
    guarded.says("position/3", OWN_CODE)
    assert guarded.guard._round(0.02) is True and guarded.codes.get(timeout=5) == 75
    assert "worker 2 has ended its program after step 12 (program 'train'), and worker 1 waits in step 13" in caplog.text


def test_the_others_name_worker_0_and_leave_the_rest_to_it(make: Make, caplog: Log) -> None:
    for of_chief, code in ((OWN_CODE, 75), (OWN_CODE._replace(started=13, waits=True), None)):
        guarded = make(worker=1, num_workers=3, stall_seconds=1.0, is_started=False)
        guarded.enter(*["train"] * 13)
        guarded.says("position/0", of_chief)
        guarded.says("position/2", OWN_CODE)
        assert [guarded.guard._round(0.5) for _ in range(3)] == [False, False, code is not None]
        if code is not None:
            assert guarded.codes.get(timeout=5) == 75
            assert "workers 0, 2 have not entered step 13 (program 'train') for 1 s, which is the limit" in caplog.text


def test_whatever_blocks_while_a_worker_leaves_does_not_keep_it(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.shutdown.LAST_RESORT_SECONDS", 0.2)
    guarded, is_over = make(worker=1, is_started=False), threading.Event()
    monkeypatch.setattr(guarded.service, "key_value_set", lambda *_, **__: is_over.wait(20))
    leaving = threading.Thread(target=guarded.guard._leave, args=(Verdict("lost worker 2", lost=(2,)), False))
    leaving.start()
    try:
        assert guarded.codes.get(timeout=5) == 75 and leaving.is_alive()
    finally:
        is_over.set()
        leaving.join(10)


def test_the_time_of_a_pause_does_not_count_and_a_worker_looks_first_at_what_has_come(make: Make, monkeypatch: Patch) -> None:
    guard, elapsed = make(is_started=False).guard, []
    monkeypatch.setattr(guard, "_round", lambda seconds: elapsed.append(seconds) or len(elapsed) == 4)
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=iter([10.0, 10.0, 10.02, 40.02, 40.04]).__next__)
        patch.setattr("mirrored._workers.guard.time", clock)
        guard._watch()
    assert elapsed == pytest.approx([0.0, 0.02, 0.04, 0.02])
    guarded = make(is_started=False)
    guarded.says(f"process/{HOST}/1", Process.own().encode())
    guarded.says("position/1", OWN_CODE._replace(has_ended=True))
    with guarded.progress.phase("the barrier 'epoch'", waits=True):
        assert [guarded.guard._round(elapsed) for elapsed in (0.02, 0.02)] == [False, False]
        assert guarded.guard._round(5.0) is False, "the barrier may be passed in this moment"
        assert guarded.guard._round(0.5) is True and guarded.codes.get(timeout=5) == 75

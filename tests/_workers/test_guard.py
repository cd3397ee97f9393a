"""The guard of one worker, whose fellow workers are entries in a store: what it says, what it does, and what it leaves alone."""

import dataclasses
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest
from fake_service import FakeClient

from mirrored._errors import WorkerLostError
from mirrored._text import escape, escape_lines
from mirrored._workers.coordination import Coordination
from mirrored._workers.guard import Guard
from mirrored._workers.neighbours import Process
from mirrored._workers.progress import NEXT_BATCH, OTHERS_INPUT, UNKNOWN, Progress
from mirrored._workers.stall import MIN_STALL_SECONDS, Others, Own, Position, decode, judge
from mirrored._workers.verdict import MAX_TEXT, Verdict

Log, Patch = pytest.LogCaptureFixture, pytest.MonkeyPatch
OWN_CODE = Position(
    beat=1, started=12, program="train", phase="", detail="", waits=False, is_patient=False, has_ended=False, still=400.0
)
IN_STEP = dataclasses.replace(OWN_CODE, started=13, waits=True)
AT_BARRIER = dataclasses.replace(OWN_CODE, phase="the barrier 'epoch'", waits=True)
ENDED = dataclasses.replace(OWN_CODE, has_ended=True)
INPUT = dataclasses.replace(OWN_CODE, phase=NEXT_BATCH, detail="its own pipeline works on it")
OTHERS = dataclasses.replace(INPUT, detail=OTHERS_INPUT)
SAVING = dataclasses.replace(OWN_CODE, phase="saving step 12", is_patient=True)


def judged(here: Position, there: Position, limit: float = 300.0, silent: float = 0.0) -> str | None:
    return judge(0, limit, {0: here, 1: there}, {0: 0.0, 1: silent})


# ---- who waits in vain


@pytest.mark.parametrize(
    ("here", "there", "parts"),
    [
        (
            IN_STEP,
            ENDED,
            ["worker 1 has ended its program after step 12 (program 'train')", "worker 0 waits in step 13", "number"],
        ),
        (AT_BARRIER, ENDED, ["worker 1 has ended its program", "worker 0 waits at the barrier 'epoch'"]),
        (
            IN_STEP,
            AT_BARRIER,
            ["worker 1 waits at the barrier 'epoch', after step 12", "worker 0 waits in step 13", "for each other"],
        ),
        (AT_BARRIER, IN_STEP, ["worker 1 waits in step 13", "They wait for each other"]),
        (AT_BARRIER, dataclasses.replace(AT_BARRIER, phase="the end"), ["worker 1 waits at the end", "They wait for each other"]),
        (AT_BARRIER, OTHERS, ["worker 0 waits at the barrier 'epoch'", "worker 1 waits for the next batch (its own is", "other"]),
        (OTHERS, dataclasses.replace(IN_STEP, started=13), ["worker 0 waits for the next batch", "worker 1 waits in step 13"]),
        (OTHERS, ENDED, ["worker 1 has ended its program", "worker 0 waits for the next batch", "steps and batches"]),
        (IN_STEP, OWN_CODE, ["worker 1 has not entered step 13 (program 'train') for 400 s, which is the limit"]),
        (AT_BARRIER, OWN_CODE, ["worker 1 has not entered the barrier 'epoch' for 400 s"]),
        (IN_STEP, dataclasses.replace(IN_STEP, started=12), ["worker 1 has not entered step 13"]),
        (IN_STEP, IN_STEP, ["no worker has finished step 13"]),
    ],
)
def test_who_waits_in_vain_is_told_for_whom(here: Position, there: Position, parts: list[str]) -> None:
    text = judged(here, there)
    assert text is not None
    title, *lines = text.split("\n")
    assert all(part in title for part in parts), title
    assert [line.partition(":")[0] for line in lines] == ["  worker 0", "  worker 1"]


@pytest.mark.parametrize(
    ("here", "there", "limit"),
    [
        (IN_STEP, OWN_CODE, 500.0),  # the limit has not come
        (IN_STEP, SAVING, 300.0),  # saving may take its time
        (IN_STEP, dataclasses.replace(ENDED, started=13), 500.0),  # it has started all that this one waits for
        (OTHERS, dataclasses.replace(IN_STEP, started=12), 500.0),  # a step that this one has started too
        (OTHERS, INPUT, 500.0),  # whose pipeline works
        (AT_BARRIER, INPUT, 500.0),  # it may come to it
        (OTHERS, dataclasses.replace(ENDED, still=1.0), 500.0),
        (AT_BARRIER, dataclasses.replace(ENDED, still=0.1), 500.0),  # the last it gave may be on its way
        (dataclasses.replace(AT_BARRIER, still=0.1), ENDED, 500.0),
        (AT_BARRIER, dataclasses.replace(IN_STEP, started=12), 500.0),  # a step that this one has started too
        (IN_STEP, dataclasses.replace(IN_STEP, started=15), 500.0),  # it only runs ahead
        (IN_STEP, dataclasses.replace(AT_BARRIER, still=0.2), 500.0),  # it may have come this moment
        (dataclasses.replace(IN_STEP, still=0.2), AT_BARRIER, 500.0),
        (AT_BARRIER, AT_BARRIER, 500.0),
    ],
)
def test_who_may_only_be_slow_is_waited_for(here: Position, there: Position, limit: float) -> None:
    assert judged(here, there, limit) is None


def test_both_sides_say_the_same() -> None:
    for pair in [(IN_STEP, AT_BARRIER), (AT_BARRIER, IN_STEP), (AT_BARRIER, ENDED), (IN_STEP, ENDED)]:
        title = str(judge(0, 300.0, dict(enumerate(pair)), {})).partition("\n")[0]
        if pair[1].has_ended:
            assert title.startswith("worker 1 has ended") and ", and worker 0 waits" in title
        else:
            assert title.startswith("worker 0 waits") and ", and worker 1 waits" in title
            assert title == str(judge(1, 300.0, dict(enumerate(pair)), {})).partition("\n")[0]


def test_a_stopped_worker_is_late_wherever_it_was() -> None:
    for there in (SAVING, IN_STEP):
        text = judged(IN_STEP, there, silent=20.0)
        assert text is not None and "worker 1 has not entered step 13" in text and "silent for 20 s" in text


@pytest.mark.parametrize(
    ("own", "positions", "title"),
    [
        (0, [OTHERS, INPUT], "the input of worker 1 has given no batch for 400 s, which is the limit"),
        (0, [INPUT, OTHERS], "the input of worker 0 has given no batch"),  # seen by the culprit's own guard
        (1, [OTHERS, OTHERS, INPUT, OTHERS], "the input of worker 2 has given no batch"),
        (1, [INPUT, OTHERS, INPUT, OTHERS], "the input of workers 0, 2 has given no batch"),
        (0, [INPUT, INPUT], "the input of workers 0, 1 has given no batch"),
        (0, [OTHERS, OWN_CODE], "worker 1 has not entered the next batch for 400 s"),  # its thread may not read further ahead
        (0, [IN_STEP, INPUT], "worker 1 has not entered step 13 (program 'train') for 400 s"),
        (0, [OTHERS, OTHERS], "no worker has finished the next batch"),
    ],
)
def test_whose_input_is_stuck_is_named(own: int, positions: list[Position], title: str) -> None:
    text = judge(own, 300.0, dict(enumerate(positions)), {})
    assert text is not None and text.startswith(title), text
    assert "If it only needs longer: mr.CommunicationOptions(timeout_seconds=...)" in text
    assert judge(own, 500.0, dict(enumerate(positions)), {}) is None, "before the limit, nothing"


def test_an_input_is_waited_for_while_a_worker_saves_and_a_stopped_one_is_named() -> None:
    assert judge(0, 300.0, {0: OTHERS, 1: SAVING}, {}) is None
    text = judge(0, 300.0, {0: OTHERS, 1: OTHERS}, {1: 20.0})
    assert text is not None and text.startswith("the input of worker 1 has given no batch") and "silent for 20 s" in text
    ended = judge(0, 300.0, {0: dataclasses.replace(IN_STEP, still=0.0), 1: dataclasses.replace(ENDED, still=0.0)}, {})
    assert ended is not None and ended.startswith("worker 1 has ended its program")


def test_what_was_said_long_ago_may_be_over() -> None:
    """A call that holds Python's lock for long keeps a worker from saying that it goes on."""
    assert judged(AT_BARRIER, OTHERS, limit=500.0, silent=1.5) is None
    assert judged(AT_BARRIER, OTHERS, limit=500.0, silent=0.5) is not None
    assert judged(IN_STEP, ENDED, limit=500.0, silent=1.5) is not None, "but an end is for ever"


def test_all_late_workers_are_named() -> None:
    text = judge(2, 300.0, {0: OWN_CODE, 1: IN_STEP, 2: IN_STEP, 3: OWN_CODE}, {})
    assert text is not None and text.startswith("workers 0, 3 have not entered step 13")


def test_the_limit_is_twenty_steps_when_those_are_long() -> None:
    progress = Progress()
    own = Own(progress, None)
    for _ in range(9):
        progress.started += 4
        own.look(0.5, False)
    assert own.limit == MIN_STALL_SECONDS
    for _ in range(40):
        progress.started += 1
        own.look(20.0, False)
        own.look(20.0, False)
    assert own.limit == pytest.approx(20 * 40.0)
    assert Own(progress, 5.0).limit == 5.0


def test_time_counts_while_nothing_changes() -> None:
    progress = Progress()
    own = Own(progress, None)
    assert [own.look(0.5, False).still for _ in range(3)] == [0.0, 0.5, 1.0]
    progress.enter("train", b"train")
    position = own.look(0.5, False)
    assert (position.still, position.started, position.waits, position.beat) == (0.0, 1, True, 4)
    with progress.phase("the barrier 'b'", "of the data", waits=True):
        assert str(own.look(0.5, False)) == "waits at the barrier 'b' (of the data), after step 1 (program 'train'), for 0 s"
    assert own.look(0.5, True).has_ended


def test_threads_leave_no_phase_behind() -> None:
    progress = Progress()

    def work() -> None:
        for _ in range(20_000):
            with progress.phase("the next batch"):
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.phases == ()


def test_batches_that_another_thread_takes_are_not_counted() -> None:
    progress = Progress()
    progress.took_batch()
    seen: list[list[str]] = []
    thread = threading.Thread(target=lambda: [progress.took_batch(), seen.append(progress.history())])
    thread.start()
    thread.join()
    assert progress.history()[0] == "1" and seen == [[UNKNOWN] * 3]


def test_a_witness_that_is_deleted_meanwhile_is_not_waited_for() -> None:
    class Witness:
        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            raise RuntimeError("Array has been deleted.")

    progress = Progress()
    progress.enter("train", b"train")
    progress.witness = Witness()
    assert not progress.is_waiting()


def test_a_worker_that_speaks_is_not_silent() -> None:
    others = Others()
    for beat in (1, 1, 1, 2):
        others.look({1: dataclasses.replace(OWN_CODE, beat=beat).encode()}, 0.5)
        seen = others.silent[1]
    assert seen == 0.0
    others.look({1: "garbage"}, 0.5)
    others.look({1: dataclasses.replace(OWN_CODE, beat=2).encode()}, 0.5)
    assert others.silent == {1: 0.5}


def test_a_position_survives_the_way() -> None:
    for position in (OWN_CODE, IN_STEP, AT_BARRIER, ENDED, SAVING):
        assert decode(position.encode()) == position


@hypothesis.settings(derandomize=True, deadline=None)
@hypothesis.given(st.one_of(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)))
def test_what_is_no_position_and_no_verdict_does_no_harm(text: str) -> None:
    assert decode(text) is None
    assert "another process has written" in str(Verdict.decode(text))


def test_wrong_types_and_deep_nesting_are_no_position() -> None:
    fields = json.loads(OWN_CODE.encode())
    for name, value in {"beat": "1", "started": None, "program": 3, "waits": 1, "still": "long"}.items():
        assert decode(json.dumps({**fields, name: value})) is None
    assert decode("[" * 100_000) is None
    assert "another process" in Verdict.decode("[" * 100_000).title


def test_log_injection() -> None:
    evil = "done\x1b[2J\r\nCRITICAL all is well\x00\u202e\udc80" + "x" * 100_000
    assert "\n" not in escape(evil, 50) and escape(evil, 50).isprintable() and len(escape(evil, 50)) < 600
    shown = str(Verdict.decode(Verdict(evil, evil + "\nfake", lost=(1,)).encode()))
    title, *lines = shown.split("\n")
    assert title.startswith("done\\x1b[2J\\r\\nCRITICAL") and title.isprintable() and len(shown) < 3 * MAX_TEXT
    assert lines and all(line.startswith("  | ") and line.isprintable() for line in lines)
    assert escape_lines("a\n\n  b\tc\n", 100) == "  | a\n  |   b\\tc"


# ---- one guard


class Service(FakeClient):
    """One that counts its calls, and may go down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.reason = 0, ""

    def go_down(self, reason: str) -> None:
        self.reason = reason

    def _call(self) -> None:
        self.calls += 1
        if self.reason:
            raise RuntimeError(self.reason)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._call()
        super().key_value_set(key, value, allow_overwrite)

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        self._call()
        return super().blocking_key_value_get(key, timeout_ms)

    def key_value_try_get(self, key: str) -> str:
        self._call()
        return super().key_value_try_get(key)

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        self._call()
        return super().key_value_dir_get(prefix)


@dataclasses.dataclass
class Guarded:
    guard: Guard
    service: Service
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

    def says(self, name: str, text: str) -> None:
        FakeClient.key_value_set(self.service, f"mirrored/guard/{name}", text, allow_overwrite=True)


Make = Callable[..., Guarded]


@pytest.fixture
def make(monkeypatch: Patch) -> Iterator[Make]:
    made: list[Guarded] = []
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))

    def make(worker: int = 0, num_workers: int = 2, stall_seconds: float | None = None, is_started: bool = True) -> Guarded:
        service, progress, codes = Service(), Progress(), queue.Queue()
        guard = Guard(Coordination(service, worker, num_workers), progress, stall_seconds=stall_seconds, exit=codes.put)
        guarded = Guarded(guard, service, progress, codes, printed)
        if is_started:
            made.append(guarded)
            guard.start()
        return guarded

    hook, exit_function = sys.excepthook, sys.exit
    yield make
    for guarded in reversed(made):
        threads = guarded.guard._threads
        guarded.guard.stop(wait=False)
        assert not any(thread.is_alive() for thread in threads)
    assert (sys.excepthook, sys.exit) == (hook, exit_function)


def test_an_exception_is_printed_published_and_ends_with_one(make: Make, caplog: Log) -> None:
    guarded = make(worker=1, num_workers=3)
    guarded.progress.started = 12
    for worker in (0, 2):
        guarded.says(f"left/{worker}", "1")
    error = ValueError("no such\x1b file\nsecond line")
    assert guarded.fails(error) == 1
    assert guarded.printed == [error]
    verdict = Verdict.decode(guarded.of_key("verdict") or "")
    assert verdict.title == "worker 1 failed at step 12 with ValueError: no such\\x1b file"
    assert "raise error" in verdict.detail and not verdict.wants_stacks
    assert guarded.of_key("call") and guarded.of_key("left/1")
    assert "worker 1 leaves with code 1: worker 1 failed at step 12 with ValueError" in caplog.text
    assert "raise error" not in caplog.text, "the traceback has been printed already"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 1), (AssertionError("x" * 10**6), 1)])
def test_the_code_of_an_exception(make: Make, error: BaseException, code: int) -> None:
    guarded = make()
    guarded.says("left/1", "1")
    assert guarded.fails(error) == code
    assert len(guarded.of_key("verdict") or "") < 3 * MAX_TEXT


def test_the_first_verdict_counts(make: Make, caplog: Log) -> None:
    guarded = make(worker=1)
    guarded.says("verdict", Verdict("worker 0 failed first").encode())
    guarded.says("left/0", "1")
    assert guarded.fails(ValueError("then this one")) == 1, "its own error is still an error"
    assert "worker 0 failed first" in (guarded.of_key("verdict") or "") and "worker 0 failed first" in caplog.text


LOSSES = [
    WorkerLostError("worker 2 did not come"),
    ValueError("UNKNOWN: Gloo all-reduce failed: [external/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:42652"),
    RuntimeError("UNAVAILABLE: ... remote target coordination_service while calling"),
]


@pytest.mark.parametrize("error", LOSSES, ids=["ours", "gloo", "service"])
def test_who_does_not_answer_the_roll_is_the_lost_worker(make: Make, error: Exception, caplog: Log) -> None:
    guarded = make(worker=1, num_workers=4)
    guarded.progress.started = 12
    for name in ("here/0", "here/3", "left/0", "left/3"):
        guarded.says(name, "1")
    assert guarded.fails(error) == 75
    assert guarded.printed == [error]
    assert "lost worker 2 at step 12: a collective failed on worker 1, and worker 2 has not answered" in caplog.text
    assert Verdict.decode(guarded.of_key("verdict") or "").lost == (2,)
    assert type(error).__name__ in caplog.text


def test_a_collective_may_fail_while_all_live(make: Make, caplog: Log) -> None:
    guarded = make()
    guarded.says("here/1", "1")
    guarded.says("left/1", "1")
    assert guarded.fails(LOSSES[1]) == 75
    assert "lost a connection at step 0: a collective failed on worker 0, and all workers answered" in caplog.text


def test_a_value_error_of_the_user_is_no_loss(make: Make) -> None:
    class PeerError(Exception):
        pass

    guarded = make()
    guarded.says("left/1", "1")
    assert guarded.fails(PeerError("Connection closed by peer: my database")) == 1


def test_a_verdict_of_another_worker_is_followed(make: Make, caplog: Log) -> None:
    guarded = make(worker=1)
    guarded.says(
        "verdict",
        Verdict("worker 0 failed at step 3 with ValueError: bad\x1b", "Traceback\x07\n  line", wants_stacks=True).encode(),
    )
    guarded.says("call", "leave")
    assert guarded.codes.get(timeout=10) == 75
    assert guarded.of_key("here/1") and guarded.of_key("left/1")
    assert (
        "worker 1 leaves with code 75: worker 0 failed at step 3 with ValueError: bad\\x1b\n  | Traceback\\x07\n  |   line"
        in caplog.text
    )
    assert "worker 1 was here:\nMainThread:\n" in caplog.text and "test_a_verdict_of_another" in caplog.text


def test_an_error_of_the_same_moment_is_shown_as_its_own(make: Make) -> None:
    guarded = make(worker=1)
    guarded.says("verdict", Verdict("worker 0 failed").encode())
    guarded.guard._failing.set()  # as the hook does before it prints
    guarded.says("call", "leave")
    with pytest.raises(queue.Empty):
        guarded.codes.get(timeout=0.5)
    guarded.says("left/0", "1")
    assert guarded.fails(ValueError("the same here")) == 1


def test_a_call_without_a_verdict_ends_too(make: Make, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard._LAST_RESORT_SECONDS", 0.3)
    guarded = make(worker=1)
    guarded.says("call", "leave")
    assert guarded.codes.get(timeout=10) == 75
    assert "gone before it said why" in caplog.text


@pytest.mark.parametrize(
    ("argument", "code"), [(3, 3), ("a message", 1), (2.5, 1), (256 + 7, 7), (143, 143), (None, 0), (0, 0), (False, 0)]
)
def test_an_end_waits_for_the_others_and_says_how_it_came(make: Make, argument: object, code: int) -> None:
    guarded = make(num_workers=3)
    with pytest.raises(SystemExit) as caught:
        sys.exit(argument)
    assert caught.value.code == argument
    thread = threading.Thread(target=guarded.guard.stop)
    thread.start()
    deadline = time.monotonic() + 10
    while not (position := decode(guarded.of_key("position/0") or "")) or not position.has_ended:
        assert time.monotonic() < deadline
    assert thread.is_alive() and str(position).endswith(f", by sys.exit({code})" if code else "before its first step")
    for worker in (1, 2):
        guarded.says(f"ended/{worker}", "1")
    thread.join(10)
    assert not thread.is_alive()
    guarded.guard.stop()
    assert guarded.codes.empty() and guarded.of_key("ended/0") and guarded.of_key("call") == "done"


def test_the_code_of_sys_exit_is_kept_when_others_still_need_this_worker(make: Make) -> None:
    guarded = make(worker=1)
    with pytest.raises(SystemExit):
        sys.exit(3)
    thread = threading.Thread(target=guarded.guard.stop)
    thread.start()
    deadline = time.monotonic() + 10
    while not guarded.of_key("ended/1"):
        assert time.monotonic() < deadline
    guarded.says("verdict", Verdict("worker 1 has ended its program").encode())
    guarded.says("call", "leave")
    assert guarded.codes.get(timeout=10) == 3
    guarded.says("ended/0", "1")
    thread.join(10)


def test_a_caught_sys_exit_is_no_end(make: Make) -> None:
    guarded = make(worker=1)
    with pytest.raises(SystemExit):
        sys.exit(2)  # as a parser of arguments does, and its caller catches
    guarded.says("verdict", Verdict("worker 0 failed").encode())
    guarded.says("call", "leave")
    assert guarded.codes.get(timeout=10) == 75


def test_waiting_at_the_end_is_told(make: Make, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard._END_WARNING_SECONDS", 0.5)
    guarded = make()

    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            guarded.says("ended/1", "1")

    handler = Ends()
    logging.getLogger("mirrored").addHandler(handler)
    try:
        guarded.guard.stop()
    finally:
        logging.getLogger("mirrored").removeHandler(handler)
    assert "worker 0 has come to the end of its program, and has waited for worker 1" in caplog.text and guarded.codes.empty()


def test_a_stalled_worker_is_named_after_the_limit(make: Make, caplog: Log) -> None:
    guarded = make(worker=0, stall_seconds=1.0)
    guarded.says("position/1", dataclasses.replace(OWN_CODE, started=4).encode())
    guarded.progress.started = 4
    guarded.says("left/1", "1")
    start = time.monotonic()
    guarded.progress.enter("train", b"train")
    assert guarded.codes.get(timeout=20) == 75
    assert 0.9 < time.monotonic() - start < 6.0
    assert "worker 1 has not entered step 5 (program 'train') for 1 s, which is the limit" in caplog.text
    assert "worker 1: in its own code after step 4" in caplog.text and "worker 0 was here:\nMainThread" in caplog.text


def test_a_silent_worker_is_told_once_and_not_ended(make: Make, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard.ROUND_SECONDS", 0.01)
    guarded = make(is_started=False)
    guarded.says("position/1", OWN_CODE.encode())
    for _ in range(8):
        assert guarded.guard._round(1.0) is False
    assert caplog.text.count("worker 1 has been silent for 4 s: it is stopped, cut off, dead, or in one long call") == 1
    guarded.says("position/1", dataclasses.replace(OWN_CODE, beat=2).encode())
    for _ in range(4):
        guarded.guard._round(1.0)
    assert caplog.text.count("it was last seen so") == 1 and guarded.codes.empty()


def test_a_lost_service_ends_the_worker_with_its_name(make: Make, caplog: Log) -> None:
    guarded = make(worker=1)
    guarded.service.go_down("UNAVAILABLE: failed to connect to all addresses")
    assert guarded.codes.get(timeout=10) == 75
    assert "lost worker 0, which hosts the coordination service, at step 0" in caplog.text
    guarded.guard.stop()


def test_after_jax_was_shut_down_the_guard_is_quiet(make: Make, caplog: Log) -> None:
    guarded = make(worker=1)
    guarded.service.go_down("CANCELLED: GetKeyValueAsync() was cancelled.")
    guarded.guard._threads[0].join(10)
    guarded.guard.stop()
    assert guarded.codes.empty() and not caplog.records


def test_a_child_process_is_not_this_worker(make: Make, monkeypatch: Patch) -> None:
    guarded = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # as after a fork
        error = ValueError("in a child")
        sys.excepthook(ValueError, error, None)
        guarded.guard.stop()
    assert guarded.printed == [error] and guarded.codes.empty() and guarded.of_key("verdict") is None


def at_the_top(error: BaseException) -> BaseException:
    """Return an error that nobody has caught: its traceback begins at the outermost frame."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return error.with_traceback(types.TracebackType(None, frame, 0, 1))


@pytest.mark.parametrize(
    ("error", "code", "title"),
    [
        (ValueError("in the hook's program"), 1, "worker 0 failed at step 0 with ValueError: in the hook's program"),
        (RuntimeError("Gloo all-reduce failed: Connection closed by peer"), 75, "lost worker 1 at step 0"),
    ],
)
def test_an_error_is_told_although_the_program_has_a_hook_of_its_own(
    error: BaseException, code: int, title: str, make: Make, monkeypatch: Patch
) -> None:
    guarded = make()
    monkeypatch.setattr(sys, "last_value", at_the_top(error), raising=False)  # as Python does before it calls any hook
    guarded.guard.stop()
    assert guarded.codes.get(timeout=5) == code
    assert title in str(Verdict.decode(guarded.of_key("verdict") or ""))


def test_an_error_that_was_caught_is_no_end(make: Make, monkeypatch: Patch) -> None:
    """pytest, for one, keeps in `sys.last_value` what a test raised."""
    guarded = make()
    try:
        raise ValueError("expected")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    guarded.says("ended/1", "1")
    guarded.guard.stop()
    assert guarded.codes.empty()


def test_an_error_from_before_the_start_is_no_end(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "last_value", at_the_top(ValueError("an old one")), raising=False)
    guarded = make()
    guarded.says("ended/1", "1")
    guarded.guard.stop()
    assert guarded.codes.empty()


def test_an_error_at_a_prompt_ends_nothing(make: Make, monkeypatch: Patch) -> None:
    guarded = make()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(ValueError, ValueError("a slip"), None)
    assert guarded.codes.empty() and guarded.of_key("verdict") is None


def test_a_round_of_a_healthy_job_is_three_calls(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard.ROUND_SECONDS", 0.01)
    for worker, calls in ((1, 3), (0, 4)):  # worker 0, which has the service, looks who is silent
        guarded = make(worker, is_started=False)
        guarded.says(f"process/{1 - worker}", Process.own().encode())
        assert guarded.guard._round(0.5) is False  # in which it meets the other
        guarded.service.calls = 0
        for _ in range(5):
            guarded.progress.enter("train", b"train")
            assert guarded.guard._round(0.5) is False
        assert guarded.service.calls == 5 * calls


class HasNoText(Exception):
    exit_code = None

    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_without_a_text_ends_the_job_too(make: Make) -> None:
    guarded = make(worker=1)
    guarded.says("left/0", "1")
    assert guarded.fails(HasNoText()) == 1
    assert (
        Verdict.decode(guarded.of_key("verdict") or "").title == "worker 1 failed at step 0 with HasNoText: (which has no text)"
    )


@pytest.mark.parametrize(("given", "code"), [(76, 76), (0, 1), (None, 1), ("3", 1), (256, 1), (-1, 1), (True, 1)])
def test_the_exit_code_of_an_exception_is_kept_when_it_is_one_of_an_error(make: Make, given: object, code: int) -> None:
    guarded = make(worker=1)
    guarded.says("left/0", "1")
    error = ValueError("x")
    error.exit_code = given  # type: ignore[attr-defined]
    assert guarded.fails(error) == code


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def introduced(child: subprocess.Popen) -> str:
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return Process(Process.own().host, child.pid, fields[19]).encode()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
@pytest.mark.parametrize("where", ["own code", "saving", "step", "input"])
def test_a_worker_of_this_host_that_dies_is_named_at_once_wherever_this_one_is(
    make: Make, neighbour: subprocess.Popen, where: str, caplog: Log
) -> None:
    guarded = make(is_started=False)
    guarded.says("process/1", introduced(neighbour))
    if where == "step":
        guarded.progress.enter("train", b"train")
    elif where != "own code":
        guarded.progress.phase(NEXT_BATCH if where == "input" else "saving step 3", is_patient=where == "saving").__enter__()
    assert guarded.guard._round(0.5) is False and guarded.codes.empty(), "it lives"
    neighbour.kill()
    neighbour.wait()
    assert guarded.guard._round(0.5) is True
    assert guarded.codes.get(timeout=5) == 75
    assert re.search(r"worker 0 leaves with code 75: lost worker 1 at step \d: the process is gone", caplog.text)


def test_a_worker_that_died_after_it_said_why_is_believed(make: Make, neighbour: subprocess.Popen, caplog: Log) -> None:
    guarded = make(is_started=False)
    guarded.says("process/1", introduced(neighbour))
    guarded.says("verdict", Verdict("worker 1 failed at step 3 with ValueError: x", lost=(1,)).encode())
    guarded.says("call", "leave")
    neighbour.kill()
    neighbour.wait()
    assert guarded.guard._round(0.5) is True and guarded.codes.get(timeout=5) == 75
    assert "worker 0 leaves with code 75: worker 1 failed at step 3" in caplog.text and "is gone" not in caplog.text


def test_after_its_own_end_a_worker_lets_the_others_go(make: Make, neighbour: subprocess.Popen) -> None:
    guarded = make(is_started=False)
    guarded.says("process/1", introduced(neighbour))
    assert guarded.guard._round(0.5) is False
    guarded.guard._has_ended = True
    guarded.says("ended/1", "1")
    neighbour.kill()
    neighbour.wait()
    assert guarded.guard._round(0.5) is False and guarded.codes.empty()


def test_after_its_own_end_a_worker_hears_of_one_that_died_before_its_own(
    make: Make, neighbour: subprocess.Popen, caplog: Log
) -> None:
    guarded = make(is_started=False)
    guarded.says("process/1", introduced(neighbour))
    assert guarded.guard._round(0.5) is False
    guarded.guard._has_ended = True
    neighbour.kill()
    neighbour.wait()
    assert guarded.guard._round(0.5) is True and guarded.codes.get(timeout=5) == 75
    assert "worker 0 leaves with code 75: lost worker 1" in caplog.text


def test_a_lost_collective_is_explained_by_a_dead_neighbour_without_a_roll(make: Make, neighbour: subprocess.Popen) -> None:
    guarded = make(is_started=False, num_workers=3)
    guarded.says("process/1", introduced(neighbour))
    guarded.guard._round(0.5)
    neighbour.kill()
    neighbour.wait()
    assert guarded.guard._lost("Gloo").title == "lost worker 1 at step 0: the process is gone"
    assert guarded.of_key("call") is None


def test_the_reason_that_a_gone_worker_gave_is_told_also_when_the_service_is_slow(
    make: Make, monkeypatch: Patch, caplog: Log
) -> None:
    guarded = make(worker=0, is_started=False)
    guarded.says("verdict", Verdict("worker 1 failed at step 5 with ValueError: x").encode())

    def get(key: str, timeout_ms: int) -> str:
        raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")

    monkeypatch.setattr(guarded.service, "blocking_key_value_get", get)
    monkeypatch.setattr(guarded.guard._neighbours, "dead", lambda: (1,))
    guarded.guard._fail_with(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    assert guarded.codes.get(timeout=10) == 75
    assert "worker 1 failed at step 5 with ValueError: x" in caplog.text and "the process is gone" not in caplog.text


@pytest.mark.parametrize("then", ["silence", "the same"])
def test_a_service_that_is_gone_ends_this_worker_before_jax_does(make: Make, monkeypatch: Patch, caplog: Log, then: str) -> None:
    guarded = make(worker=1, is_started=False)
    answers = iter([RuntimeError("UNAVAILABLE: Socket closed")] * (99 if then == "the same" else 1))

    def get(key: str, timeout_ms: int) -> str:
        raise next(answers, RuntimeError("DEADLINE_EXCEEDED"))

    monkeypatch.setattr(guarded.service, "blocking_key_value_get", get)
    begin = time.monotonic()
    guarded.guard._watch()
    assert guarded.codes.get(timeout=5) == 75 and time.monotonic() - begin < 1.0
    assert (
        "lost worker 0, which hosts the coordination service, at step 0" in caplog.text and "error of its own" not in caplog.text
    )


def test_the_traceback_of_an_exception_is_cut(make: Make) -> None:
    guarded = make(worker=1)
    guarded.says("left/0", "1")

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("the end matters")

    try:
        deep(500)
    except ValueError as error:
        assert len("".join(traceback.format_exception(error))) < 10**6
        sys.excepthook(*sys.exc_info())
    assert guarded.codes.get(timeout=10) == 1
    assert "the end matters" in Verdict.decode(guarded.of_key("verdict") or "").detail


def test_whatever_blocks_while_a_worker_leaves_does_not_keep_it(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard._LAST_RESORT_SECONDS", 0.2)
    guarded, is_over = make(worker=1, is_started=False), threading.Event()
    monkeypatch.setattr(guarded.service, "key_value_set", lambda *_, **__: is_over.wait(20))
    leaving = threading.Thread(target=guarded.guard._leave, args=(Verdict("lost worker 2", lost=(2,)), 75, False))
    leaving.start()
    try:
        assert guarded.codes.get(timeout=5) == 75 and leaving.is_alive()
    finally:
        is_over.set()
        leaving.join(10)


def test_an_end_is_told_before_the_others_are_waited_for(make: Make, monkeypatch: Patch) -> None:
    guarded = make(worker=1, is_started=False)
    guarded.says("ended/0", "1")
    guarded.guard._sys_exit_code = 3
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(guarded.service, "key_value_set", lambda key, value, **_: told.append((key, value)))
    guarded.guard._end()
    assert [key.removeprefix("mirrored/guard/") for key, _ in told] == ["position/1", "ended/1", "call"]
    position = decode(told[0][1])
    assert position is not None and position.has_ended and position.phase == "sys.exit(3)"


def test_an_error_that_is_on_its_way_is_not_overtaken_by_the_verdict_of_another(make: Make, monkeypatch: Patch) -> None:
    guarded = make(worker=1)
    guarded.says("left/0", "1")
    fail = guarded.guard._fail

    def slowly(*arguments: object, **more: object) -> None:
        guarded.says("verdict", Verdict("worker 0 failed").encode())
        guarded.says("call", "leave")
        with pytest.raises(queue.Empty):
            guarded.codes.get(timeout=0.6)
        fail(*arguments, **more)

    monkeypatch.setattr(guarded.guard, "_fail", slowly)
    assert guarded.fails(ValueError("of this worker")) == 1


def test_a_process_that_was_stopped_has_not_waited_in_that_time(make: Make, monkeypatch: Patch) -> None:
    guard, elapsed = make(is_started=False).guard, []
    monkeypatch.setattr(guard, "_round", lambda seconds: elapsed.append(seconds) or len(elapsed) == 4)
    monkeypatch.setattr("mirrored._workers.guard.time", SimpleNamespace(monotonic=iter([10.0, 10.0, 10.5, 40.5, 41.0]).__next__))
    guard._watch()
    assert elapsed == [0.0, 0.5, 1.0, 0.5]


def test_a_verdict_that_is_too_long_is_not_read() -> None:
    ours = Verdict.decode(Verdict("why" + " so" * 10**5, "x" * 10**6 + "the end").encode())
    assert ours.title.startswith("why") and ours.detail.endswith("the end"), "one of ours is cut before it is sent"
    assert len(ours.title) == len(ours.detail) == MAX_TEXT
    text = json.dumps({"title": "x" * 10**6, "detail": "", "lost": [], "wants_stacks": False})
    assert "another process has written" in Verdict.decode(text).title


def test_after_a_pause_a_worker_looks_first_at_what_has_come(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mirrored._workers.guard.ROUND_SECONDS", 0.01)
    guarded = make(is_started=False)
    guarded.says("process/1", Process.own().encode())
    guarded.says("position/1", ENDED.encode())
    with guarded.progress.phase("the barrier 'epoch'", waits=True):
        assert [guarded.guard._round(elapsed) for elapsed in (0.009, 0.009)] == [False, False]
        assert guarded.guard._round(5.0) is False, "the barrier may be passed in this moment"
        assert guarded.guard._round(0.5) is True and guarded.codes.get(timeout=5) == 75

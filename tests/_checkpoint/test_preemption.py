"""SIGTERM: all workers save one common step and leave; nothing is repeated, lost, or waited for in vain."""

import functools
import os
import random
import re
import signal
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeClient
from processes import Worker, program, run_program, wait_for_line, wait_until

import mirrored as mr
from mirrored._checkpoint import files, preemption, state
from mirrored._checkpoint.checkpoint import Checkpoint
from mirrored._checkpoint.preemption import PreemptionHandler
from mirrored._errors import CheckpointError
from mirrored._workers import coordination
from mirrored._workers.coordination import Coordination


@pytest.fixture(autouse=True)
def _signals_are_as_before(monkeypatch):
    monkeypatch.setattr(preemption, "NOTICE_SECONDS", 0.05)
    for module in (preemption, coordination):
        monkeypatch.setattr(module, "SLICE_SECONDS", 0.02)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert after == before and not catches("self")


def catches(process: int | str) -> bool:
    """Tell whether a process has a handler of SIGTERM; Python's own table may say otherwise."""
    mask = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# -- one worker


def test_a_signal_in_the_last_step_is_heeded_at_the_end_and_before_the_first_nothing_is_saved(caplog) -> None:
    for num_steps, saved in ((3, [3]), (0, [])):
        recorder = Recorder()
        with pytest.raises(SystemExit) as left, PreemptionHandler(recorder, strategy=ALONE) as handler:
            for step in range(num_steps):
                handler.after_step(step + 1)
            preempt()
        assert (left.value.code, recorder.saved) == (143, saved)
    assert "before the first handler.after_step(step), so nothing is saved" in caplog.text


def test_a_signal_saves_the_step_and_leaves_also_while_it_is_compiled(tmp_path: Path, strategy2: mr.Strategy, caplog) -> None:
    with strategy2.scope():
        w, sent = mr.Variable(0.0), []

        def step(number: int) -> None:
            if number == 3 and not sent:  # while it is traced, which happens more than once
                sent.append(preempt())
            w.assign(w + 1)

        with pytest.raises(SystemExit) as left, Checkpoint(tmp_path, w=w) as checkpoint, PreemptionHandler(checkpoint) as handler:
            for number in range(1, 9):
                strategy2.run(functools.partial(step, number))
                handler.after_step(number)
        assert left.value.code == 143 and float(w) == 3.0
        assert "step 3 is saved, leaving with exit code 143" in caplog.text
        assert "SIGTERM: saving at the next handler.after_step(step)" in caplog.text
        with Checkpoint(tmp_path, w=w.assign(0.0)) as checkpoint:
            assert checkpoint.restore_latest() == 3 and float(w) == 3.0 and checkpoint.steps() == [3]


def test_a_signal_while_saving_is_heeded_after_it_and_a_save_that_fails_is_no_orderly_end(tmp_path: Path, monkeypatch) -> None:
    take = state.take_snapshot

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        preempt()
        return take(*args, **kwargs)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with Checkpoint(tmp_path, w=mr.Variable(0.0)) as checkpoint:
        with monkeypatch.context() as patch, pytest.raises(SystemExit), PreemptionHandler(checkpoint) as handler:
            patch.setattr(state, "take_snapshot", interrupted)
            checkpoint.save(7)
            handler.after_step(7)  # which is saved already
        assert checkpoint.steps() == [7]
        with monkeypatch.context() as patch:
            patch.setattr(files, "_synced", full)
            message = r"preempted, and step 8 could not be saved.*The last step on disk is 7"
            with pytest.raises(CheckpointError, match=message), PreemptionHandler(checkpoint) as handler:
                preempt()
                handler.after_step(8)
        checkpoint.save(9)


def test_an_error_in_the_loop_comes_through() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError, match="mine"), PreemptionHandler(recorder, strategy=ALONE):
        preempt()
        raise KeyError("mine")
    assert recorder.saved == []


def test_it_is_made_in_the_main_thread_and_leaves_ctrl_c_alone_without_a_signal() -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(mr.ContextError, match="another thread than the main one"):
        pool.submit(PreemptionHandler, Recorder(), strategy=ALONE).result()
    own = lambda number, frame: None  # noqa: E731
    before = signal.getsignal(signal.SIGINT)
    try:
        with PreemptionHandler(Recorder(), strategy=ALONE) as handler:
            signal.signal(signal.SIGINT, own)
            with pytest.raises(TypeError, match="expected an int of at least 0"):
                handler.after_step(True)
            handler.close()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def script(directory: Path, body: str) -> AbstractContextManager[Worker]:
    """Run a program that has a handler; `body` is what it does."""
    head = """
import logging, os, signal, sys, threading, time, warnings
from mirrored._checkpoint import preemption
from mirrored._checkpoint.checkpoint import Checkpoint
from mirrored._checkpoint.preemption import PreemptionHandler
warnings.simplefilter("ignore")
preemption.NOTICE_SECONDS = 0.4
with Checkpoint(sys.argv[1], state={"a": 1}) as checkpoint, PreemptionHandler(checkpoint) as handler:
"""
    return program(head + textwrap.indent(textwrap.dedent(body), "    "), directory)


class Recorder(Checkpoint):
    """Notes what is saved."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, step: int) -> None:
        self.saved.append(step)

    def wait(self) -> int:
        return self.saved[-1]


ALONE = types.SimpleNamespace(_coordination=Coordination())

STUCK = """
    import ctypes
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted", flush=True)
    mutex = ctypes.create_string_buffer(256)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)  # native code which waits for itself, and which no signal interrupts
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_after_the_notice_or_ctrl_c_ends_at_once_also_in_native_code(tmp_path: Path, number: int) -> None:
    with script(tmp_path, STUCK) as worker:
        wait_for_line(worker, "noted")
        with suppress(FileNotFoundError, ProcessLookupError):  # of a process that the last one has ended, just after the notice
            while number == signal.SIGTERM and catches(worker.pid):
                worker.signal(number)  # these are ignored
                time.sleep(0.005)
            worker.signal(number)
        assert worker.wait(10).code == -number


def test_signals_close_together_are_one_notice_that_is_said_while_the_program_runs(tmp_path: Path) -> None:
    """As from systemd or Slurm to all processes, of which the launcher passes its own on; a late one while the program leaves."""
    body = """
        said = threading.Event()
        class Hears(logging.Handler):
            def emit(self, record):
                print(record.getMessage(), threading.current_thread() is threading.main_thread(), flush=True)
                said.set()
        logging.getLogger("mirrored").addHandler(Hears())
        os.kill(os.getpid(), signal.SIGTERM)
        assert said.wait(20)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # Python waits for it before it ends
        os.kill(os.getpid(), signal.SIGTERM)
        handler.after_step(2)
    """
    with script(tmp_path, body) as worker:
        assert worker.wait().code == 143
        assert worker.output.startswith("SIGTERM: saving at the next handler.after_step(step), or at handler.close() False\n")
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.fixture
def unhandled() -> Iterator[list[int]]:
    """The signals that come while no handler of ours takes them."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_signal_while_all_agree_that_there_is_none_has_its_own_effect(unhandled: list[int]) -> None:
    with PreemptionHandler(Recorder(), strategy=ALONE) as handler:
        handler._watch = types.SimpleNamespace(stop=lambda: None)
        handler._coordination = types.SimpleNamespace(exchange=lambda channel, value: [value, preempt()])
    assert unhandled == [signal.SIGTERM]


def test_a_signal_while_the_last_step_is_saved_does_not_end_it(unhandled: list[int]) -> None:
    """Another worker has told of the notice; this one gets its own only when it is saving at the end."""

    class Slow(Recorder):
        def save(self, step: int) -> None:
            preempt()
            super().save(step)

    recorder = Slow()
    with pytest.raises(SystemExit) as left, PreemptionHandler(recorder, strategy=ALONE) as handler:
        handler.after_step(3)
        handler._watch = types.SimpleNamespace(stop=lambda: None)
        handler._coordination = types.SimpleNamespace(exchange=lambda channel, value: [value, True])
    assert (left.value.code, recorder.saved, unhandled) == (143, [3], [])


def test_the_notice_of_one_handler_does_not_end_in_the_next() -> None:
    with pytest.raises(SystemExit), PreemptionHandler(Recorder(), strategy=ALONE) as first:
        preempt()
    with PreemptionHandler(Recorder(), strategy=ALONE) as second:
        first._end_notice()  # as of a thread that comes late
        assert catches("self")
        preempt()
        wait_until(lambda: not catches("self"))
        with pytest.raises(SystemExit):
            second.close()


def test_handlers_that_are_closed_in_any_order_leave_the_signal_as_it_was() -> None:
    """The first to be made is closed first: it must not be what the second one gives the signal back to."""
    before = signal.getsignal(signal.SIGTERM)
    first, second, third = (PreemptionHandler(Checkpoint("unused", w=mr.Variable(0.0))) for _ in range(3))
    second.close()
    assert signal.getsignal(signal.SIGTERM) == third._on_signal
    first.close()
    assert signal.getsignal(signal.SIGTERM) == third._on_signal
    third.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_threads_a_second_signal_ends_the_program(monkeypatch) -> None:
    def none_left(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(SystemExit), PreemptionHandler(Recorder(), strategy=ALONE):
        with monkeypatch.context() as patch:
            patch.setattr(preemption._thread, "start_new_thread", none_left)
            preempt()
        assert not catches("self")


def test_sigterm_has_its_own_effect_in_every_forked_child(tmp_path: Path) -> None:
    """A handler written in Python would only take note of it when the child waits in C, as children of a pool do."""
    code = """
import os, signal, subprocess, sys, time, warnings
import mirrored as mr
from mirrored._checkpoint import preemption
warnings.simplefilter("ignore")
preemption.NOTICE_SECONDS = 0.05
checkpoint = mr.Checkpoint(sys.argv[1], w=mr.Variable(0.0))
def of_child(work=lambda: os._exit(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL), to_child=lambda child: None):
    child = os.fork()
    if not child:
        work()
    to_child(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
listen, say = os.pipe()  # Python forgets the signals that come while it forks
for _ in range(2):
    with mr.PreemptionHandler(checkpoint):
        assert of_child() == 1
        assert of_child(lambda: (os.write(say, b"!"), time.sleep(60)),
                        lambda child: (os.read(listen, 1), os.kill(child, signal.SIGTERM))) == -15
try:
    with mr.PreemptionHandler(checkpoint):
        os.kill(os.getpid(), signal.SIGTERM)
        assert of_child() == 1
        program = "import signal; assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
        subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)
except SystemExit:
    pass
signal.signal(signal.SIGTERM, lambda *_: None)
assert of_child() == 0, "without a handler of ours it stays what the program made it"
"""
    done = run_program(code, tmp_path)
    assert done.returncode == 0, done.stderr


# -- several workers, as threads over one key-value store


def simulate(
    monkeypatch, num_workers: int, num_steps: int, stride: int, signals: dict[int, int], delays: random.Random,
    store: FakeClient | None = None, number: int = 0,
) -> tuple[list[list[int]], list[int], list[int]]:  # fmt: skip
    """Run loops in threads that meet in every step, as in a collective; `signals` says in which step a worker gets one."""
    monkeypatch.setattr(preemption, "signal", types.SimpleNamespace(
        SIGTERM=15, SIGINT=2, SIG_DFL=None, getsignal=lambda number: None, signal=lambda number, handler: None
    ))  # fmt: skip
    monkeypatch.setattr(preemption.threading, "main_thread", threading.current_thread)
    monkeypatch.setattr(preemption, "_numbers", iter([number] * num_workers))
    store, meet = store or FakeClient(), threading.Barrier(num_workers)
    recorders, codes, taken = [Recorder() for _ in range(num_workers)], [0] * num_workers, [0] * num_workers

    def work(worker: int, pauses: list[float]) -> None:
        strategy = types.SimpleNamespace(_coordination=Coordination(store, worker, num_workers))
        try:
            with PreemptionHandler(recorders[worker], strategy=strategy) as handler:
                for step in range(1, num_steps + 1):
                    if signals.get(worker) == step:
                        handler._on_signal(15, None)
                    meet.wait(30)
                    time.sleep(pauses[step])
                    taken[worker] = step
                    if step % stride == 0:
                        handler.after_step(step)
                if signals.get(worker) == num_steps + 1:
                    handler._on_signal(15, None)
        except SystemExit as left:
            codes[worker] = left.code
        except threading.BrokenBarrierError:
            codes[worker] = -1
            raise

    threads = [
        threading.Thread(target=work, args=(worker, [delays.choice([0, 0, 0.001, 0.01]) for _ in range(num_steps + 1)]))
        for worker in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a worker waits for ever"
    return [recorder.saved for recorder in recorders], codes, taken


@pytest.mark.parametrize("seed", [0, 5, 9])
def test_all_workers_leave_at_one_step_that_none_has_passed(monkeypatch, seed: int) -> None:
    rng = random.Random(seed)
    num_workers, num_steps, stride = rng.choice([2, 3, 5]), rng.choice([1, 2, 30, 200]), rng.choice([1, 1, 7])
    signals = {worker: rng.randint(1, num_steps + 1) for worker in range(num_workers) if rng.random() < 0.5} or {0: 1}
    saved, codes, taken = simulate(monkeypatch, num_workers, num_steps, stride, signals, rng)
    assert codes == [143] * num_workers, (codes, signals, num_steps, stride)
    assert len(set(taken)) == 1 and len({tuple(steps) for steps in saved}) == 1, (saved, taken)
    last = taken[0] - taken[0] % stride
    assert saved[0] == ([last] if last else [])


def test_a_worker_hears_of_the_signal_of_another_and_without_one_all_end_together(monkeypatch, caplog) -> None:
    assert simulate(monkeypatch, 3, 20, 1, {}, random.Random(0)) == ([[], [], []], [0] * 3, [20] * 3)
    simulate(monkeypatch, 2, 1000, 1, {1: 3}, random.Random(0))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("SIGTERM")]
    assert [text.split(":")[0] for text in sorted(said)] == ["SIGTERM on worker 1", "SIGTERM"]


def test_a_worker_that_ends_without_closing_is_not_waited_for(monkeypatch) -> None:
    said: list[str] = []
    store = FakeClient()
    monkeypatch.setattr(preemption, "_numbers", iter([0, 0]))
    handlers = [
        types.SimpleNamespace(
            _is_signalled=False, _last_step=5, _notice=lambda: 4, _say_signal=lambda where="": said.append(where)
        )
        for _ in range(2)
    ]
    watches = [preemption._SignalWatch(handler, Coordination(store, worker, 2)) for worker, handler in enumerate(handlers)]
    watches[1].stop()  # as at the interpreter's end
    handlers[0]._is_signalled = True
    assert watches[0].target() == 6
    watches[0].stop()
    assert said == [""]


def test_a_service_that_is_gone_is_an_error_and_no_hang(monkeypatch) -> None:
    class Gone(FakeClient):
        def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
            raise RuntimeError("UNAVAILABLE: Socket closed")

    watch = preemption._SignalWatch(types.SimpleNamespace(_is_signalled=False), Coordination(Gone(), 0, 2))
    with pytest.raises(RuntimeError, match="Socket closed"):
        watch.target()
    watch.stop()


def test_what_one_handler_said_is_not_heard_by_the_next(monkeypatch) -> None:
    """The keys of an ended handler stay in the service; they must not stop the next one, nor tell it a step."""
    store = FakeClient()
    assert simulate(monkeypatch, 2, 500, 1, {0: 3}, random.Random(0), store)[1] == [143] * 2
    assert simulate(monkeypatch, 2, 30, 1, {}, random.Random(0), store, number=1) == ([[], []], [0] * 2, [30] * 2)

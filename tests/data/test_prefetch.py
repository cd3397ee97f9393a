"""The feed: ahead of the loop, in a thread that no way of leaving the loop leaves behind."""

import contextlib
import contextvars
import gc
import itertools
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from pipelines import STATE, WITHOUT_THREAD, Reiterable, batches_of, rows_of
from processes import run_program
from strategies import in_threads

import mirrored as mr
from mirrored.data import _iterator, _prefetch

X = np.arange(4, dtype="int32")


def feeding() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mirrored input"]


class Endless:
    """Yields batches for ever, counts them, and notes in which thread it ran and that it was closed."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.changed = threading.Condition()
        self.threads: set[int] = set()
        self.num_closed = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            while True:
                with self.changed:
                    self.threads.add(threading.get_ident())
                    self.num_taken += 1
                    self.changed.notify_all()
                yield X + self.num_taken - 1
        finally:
            with self.changed:
                self.num_closed += 1
                self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=30)


def test_so_many_batches_are_made_ahead_and_never_more(strategy2: mr.MirroredStrategy) -> None:
    for prefetch in (0, 1, 2, 5):
        source = Endless()
        most = 0
        with iter(strategy2.distribute_dataset(source, mr.InputOptions(prefetch=prefetch))) as iterator:
            for position in range(6):
                batch = next(iterator)
                source.wait_until(lambda source=source, enough=position + 1 + prefetch: source.num_taken >= enough)
                most = max(most, source.num_taken - position - 1)
                assert int(batch.values[0][0]) == position
        assert most == prefetch
        assert source.num_taken == 6 + prefetch
        assert (source.threads == {threading.get_ident()}) == (prefetch == 0), "in the caller's thread only without prefetch"


setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="none")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_pipeline_sees_the_callers_context(prefetch: int, strategy2: mr.MirroredStrategy) -> None:
    def batches() -> Iterator[Any]:
        yield np.full(2, len(setting.get()), "int64") + mr.get_strategy().num_replicas_in_sync * 2**40

    token = setting.set("twelve chars")
    try:
        with jax.enable_x64(True), strategy2.scope():
            [batch] = strategy2.distribute_dataset(Reiterable(batches), mr.InputOptions(prefetch=prefetch))
    finally:
        setting.reset(token)
    assert batch.dtype == "int64" and rows_of(batch) == [12 + 2 * 2**40] * 2


class BrokenError(Exception):
    """A pipeline's own exception."""


def raise_in_the_loop(distributed: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in distributed:
            1 / 0


def close(distributed: Any) -> None:
    with iter(distributed) as iterator:
        next(iterator)
        iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)


def make_garbage_of_a_cycle(distributed: Any) -> None:
    iterator = iter(distributed)
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()


def only_ask_for_the_state(distributed: Any) -> None:
    iterator = iter(distributed)
    with pytest.raises(TypeError):
        iterator.get_state()
    iterator.close()


@pytest.mark.parametrize("leave", [raise_in_the_loop, close, make_garbage_of_a_cycle, only_ask_for_the_state])
def test_no_way_out_of_a_loop_leaves_a_thread_or_an_open_source(leave, strategy2) -> None:
    for prefetch in (0, 1, 2):
        source = Endless()
        leave(strategy2.distribute_dataset(source, mr.InputOptions(prefetch=prefetch)))
        assert not feeding()
        assert source.num_closed == (leave is not only_ask_for_the_state)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("error", [BrokenError("disk"), SystemExit(3), GeneratorExit("odd"), MemoryError()], ids=repr)
def test_an_exception_arrives_as_it_was_after_the_batches_before_it_and_ends_the_thread(error, prefetch, strategy2) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield X
        yield X + 4
        raise error

    iterator = iter(strategy2.distribute_dataset(Reiterable(broken), mr.InputOptions(prefetch=prefetch)))
    assert batches_of(iterator, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error and caught.value.__cause__ is None
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "raise error"
    assert not feeding()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"the input failed before, with {re.escape(repr(error))}, .* would be lost"):
            next(iterator)
    iterator.close()
    assert next(iterator, None) is None


class BrokenEnd:
    """No batch, and a source that cannot be closed."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise StopIteration

    def close(self) -> None:
        raise BrokenError("cannot close")


def test_a_source_that_cannot_be_closed_says_so(strategy2: mr.MirroredStrategy) -> None:
    with pytest.raises(BrokenError, match="cannot close"):
        list(strategy2.distribute_dataset(Reiterable(BrokenEnd)))


def test_ctrl_c_while_waiting_for_a_batch_loses_none(strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with iter(strategy2.distribute_dataset(Reiterable(lambda: iter([X, X + 4])))) as iterator:
        next(iterator)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(iterator, "_next", interrupted)
            next(iterator)
        assert next(iterator).values[0].tolist() == [4, 5]
        assert next(iterator, None) is None and not feeding(), "the end of the data ends the thread while the iterator lives"


def interrupted() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_in_a_pipeline_that_nobody_reads_ahead_loses_none_or_says_so(strategy2: mr.MirroredStrategy) -> None:
    calls: list[int] = []

    def once_interrupted(x: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 3:
            interrupted()
        return x

    rows = strategy2.make_numpy_dataset(np.arange(12)).shuffle(seed=1).batch(2)
    iterator, seen = iter(strategy2.distribute_dataset(rows, WITHOUT_THREAD).map(once_interrupted).repeat(2)), []
    while len(seen) < 12:
        try:
            seen.append(rows_of(next(iterator)))
        except KeyboardInterrupt:  # it goes on after the last batch that it gave
            assert len(seen) == 2
    assert len(calls) == 13 and next(iterator, None) is None and seen[:6] != seen[6:]
    assert np.sort(seen[:6], axis=None).tolist() == np.sort(seen[6:], axis=None).tolist() == list(range(12))

    calls.clear()
    iterator = iter(strategy2.distribute_dataset(Reiterable(lambda: map(once_interrupted, iter([X] * 4))), WITHOUT_THREAD))
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the input failed before, .* or begin anew: iter\(dataset\)"):
            next(iterator)


def test_no_batch_is_kept_by_an_exception_or_a_closed_iterator(strategy2: mr.MirroredStrategy) -> None:
    unread = Reiterable(lambda: iter([X]))
    iter(strategy2.distribute_dataset(unread))
    assert unread.num_passes == 0, "nothing is read before it is asked for"
    iterator = iter(strategy2.distribute_dataset(Endless(), mr.InputOptions(prefetch=1)))
    batch = weakref.ref(next(iterator))
    gc.collect()
    assert batch() is None
    iterator.close()
    source = Endless()
    ahead = _prefetch.Ahead(source, iter(source), lambda: None, 2, lambda: None)
    batch = weakref.ref(next(ahead))
    source.wait_until(lambda: source.num_taken == 3)
    waiting = weakref.ref(ahead._ready[0])
    ahead.close()
    gc.collect()
    assert batch() is None and waiting() is None


def test_garbage_collected_in_the_thread_itself_ends_it(strategy2: mr.MirroredStrategy) -> None:
    """The last reference can go in any thread, at any line, also while the thread holds its lock."""
    holder: list[Any] = []
    ended = threading.Event()

    may_drop = threading.Event()

    def batches() -> Iterator[Any]:
        try:
            yield X
            may_drop.wait(30)
            holder.clear()
            while True:
                yield X
        finally:
            ended.set()

    holder.append(iter(strategy2.distribute_dataset(Reiterable(batches))))
    next(holder[0])
    [thread] = feeding()
    may_drop.set()
    assert ended.wait(30)
    thread.join(30)
    assert not feeding()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_whatever_threads_ask_each_batch_comes_once_and_the_position_goes_on(prefetch, strategy2) -> None:
    gate, is_over, resume_at = threading.Barrier(2), threading.Event(), 10

    def wait_for_another(batch: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            gate.wait(0.2)  # for another thread that reads; none comes
        return batch

    rows = strategy2.make_numpy_dataset(np.arange(120)).batch(4)
    iterator = iter(strategy2.distribute_dataset(rows, mr.InputOptions(prefetch=prefetch)).map(wait_for_another))
    iterator.set_state({**STATE, "source": {"pass": 0, "epoch": 0, "row": 4 * resume_at, "num_rows": 120, "seed": None}})

    def read() -> list[list[int]]:
        try:
            return [rows_of(batch) for batch in iterator]
        finally:
            is_over.set()

    def watch() -> list[int]:
        places = [4 * resume_at]
        while not is_over.is_set():
            places.append(iterator.get_state()["source"]["row"])
        return places

    *read_by, places = in_threads(read, read, read, watch)
    assert sorted(itertools.chain(*read_by)) == [batch.tolist() for batch in rows][resume_at:]
    assert places == sorted(places) and not feeding()


class StuckAtSecond:
    """An iterator with a position that waits for its second batch."""

    def __init__(self) -> None:
        self.next, self.is_stuck, self.may_go_on, self.is_closed = 0, *(threading.Event() for _ in range(3))

    def __iter__(self) -> "StuckAtSecond":
        return self

    def __next__(self) -> np.ndarray:
        if self.next == 1:
            self.is_stuck.set()
            assert self.may_go_on.wait(30)
        self.next += 1
        return X

    def get_state(self) -> int:
        return self.next

    def close(self) -> None:
        self.is_closed.set()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_thread_that_waits_for_a_batch_keeps_no_other_from_closing_or_asking(prefetch, strategy2, monkeypatch) -> None:
    for module in (_prefetch, _iterator):
        monkeypatch.setattr(module, "MAX_WAIT_SECONDS", 0.05)
    source = StuckAtSecond()
    iterator = iter(strategy2.distribute_dataset(Reiterable(lambda: source), mr.InputOptions(prefetch=prefetch)))
    next(iterator)

    def close() -> None:
        assert source.is_stuck.wait(30)
        assert iterator.get_state()["source"] == 1
        iterator.close()
        assert iterator.get_state()["source"] == 1 and not source.is_closed.is_set()
        source.may_go_on.set()
        assert source.is_closed.wait(30), "by the thread that read"

    found, _ = in_threads(lambda: len(list(iterator)), close)
    assert found == (prefetch == 0) and next(iterator, None) is None


EXIT = """
import atexit, sys, threading, weakref
import numpy as np, jax.numpy as jnp
import mirrored as mr
from mirrored.data import _prefetch
_prefetch.MAX_WAIT_SECONDS = 0.2
strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
weakref.finalize(sys, object)  # as tempfile does: what finalizers do at the end comes after what is registered from here on
atexit.register(lambda: print("left open" if is_open else "closed", flush=True))  # as JAX ends its backends
is_open, is_stuck = False, threading.Event()

class Source:
    def __iter__(self):
        global is_open
        is_open = True
        try:
            for k in range(10**9):
                if k == {stuck_at}:
                    is_stuck.set()
                    threading.Event().wait()
                yield np.full((64, 4096), k, "float32")
        finally:
            is_open = False

iterator = iter(strategy.distribute_dataset(Source(), mr.InputOptions(prefetch=3)))
for _ in range({num_taken}):
    batch = next(iterator)
    strategy.run(lambda x: x.sum(), args=(batch,))
{end}
"""


@pytest.mark.slow
def test_the_interpreter_exits_with_an_open_feed() -> None:
    for num_taken, stuck_at, end, code, found in (
        (3, -1, "sys.exit(7)", 7, "closed\n"),
        (2, 3, "is_stuck.wait()", 0, "left open\n"),
        (0, -1, "", 0, "closed\n"),  # not started
    ):
        done = run_program(EXIT.format(num_taken=num_taken, stuck_at=stuck_at, end=end))
        assert (done.returncode, done.stdout, done.stderr) == (code, found, ""), (num_taken, stuck_at)


def test_what_the_thread_waits_for_is_ended_when_the_feed_is_closed() -> None:
    """As the exchange with other workers is, which may not come any more."""
    came, ended = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        came.set()
        assert ended.wait(30)

    feed = _prefetch.Ahead(ended, items(), lambda: None, 2, ended.set)
    assert next(feed) == 1 and came.wait(30)
    feed.close()
    assert not feeding()

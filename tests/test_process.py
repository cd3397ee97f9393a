"""A Ctrl-C at any moment leaves our locks free."""

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mirrored._process import Lock


def block(lock):
    with lock:
        pass


def operator(lock):
    _ = True in lock.taking
    try:
        pass
    finally:
        lock.release()


def num_left_held(work, new_lock):
    """Interrupt `work` again and again for a tenth of a second; return how often its lock was held afterwards."""
    held, end, other = 0, time.monotonic() + 0.1, ThreadPoolExecutor(1)
    former = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        while time.monotonic() < end:
            lock = new_lock()
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-5)
                while True:
                    work(lock)
            held += not other.submit(lock.acquire, False).result()
    finally:
        other.shutdown()
        signal.signal(signal.SIGVTALRM, former)
    return held


@pytest.mark.parametrize("work", [block, operator])
def test_a_ctrl_c_at_any_moment_leaves_a_lock_free(work):
    assert num_left_held(work, Lock) == 0


@pytest.mark.skipif(sys.version_info[:2] != (3, 14), reason="Python 3.14 alone leaves a lock held")
def test_pythons_own_lock_stays_held():
    assert num_left_held(block, threading.RLock) > 0


def test_a_lock_is_reentrant_and_keeps_other_threads_out():
    lock, order = Lock(), []
    with lock:
        thread = threading.Thread(target=lambda: [block(lock), order.append("other")])
        thread.start()
        with lock:
            thread.join(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]

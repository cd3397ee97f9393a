"""Ctrl-C ends a program also when it comes while garbage is collected."""

import gc
import inspect
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from processes import program, wait_for_line

from mirrored._jax import interrupts

#: Nearly all of its time is in the collector, so that is where the signal comes.
PROGRAM = """
import gc, time
import mirrored as mr
mr.MirroredStrategy(["cpu:0"])
objects = [[] for _ in range(300_000)]
print("ready", flush=True)
end = time.monotonic() + 40
while time.monotonic() < end:
    gc.collect()
"""


def test_ctrl_c_during_a_garbage_collection_ends_the_program() -> None:
    with program(PROGRAM) as process:
        wait_for_line(process, "ready")
        process.signal(signal.SIGINT)
        ended, errors = process.wait(50), (process.log.parent / "errors").read_text()
    assert ended.code == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt"), errors


def test_jax_has_a_callback_in_python() -> None:
    """Where it has none any more, this file can go."""
    theirs = [callback for callback in gc.callbacks if getattr(callback, "__module__", "").startswith("jax")]
    assert any(inspect.isfunction(callback) for callback in theirs)


def ignored(error: BaseException, callback: Any = None) -> SimpleNamespace:
    traceback = callback and SimpleNamespace(tb_frame=SimpleNamespace(f_code=callback.__code__))
    return SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=traceback, err_msg=None, object=None)


def test_only_ctrl_c_in_the_main_thread_is_sent_again_and_the_hook_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    interrupts.send_ignored_again()
    hook = sys.unraisablehook
    interrupts.send_ignored_again()
    assert sys.unraisablehook is hook
    others = [ignored(ValueError("of a finalizer")), ignored(KeyboardInterrupt())]
    hook(others[0])
    thread = threading.Thread(target=hook, args=(others[1],))
    thread.start()
    thread.join()
    assert told == others
    before = list(gc.callbacks)
    with pytest.raises(KeyboardInterrupt):
        interrupt(hook, gc.callbacks[0])
    assert told == others
    while len(gc.callbacks) < len(before):
        time.sleep(0.001)
    assert sorted(map(id, gc.callbacks)) == sorted(map(id, before))


def test_who_ignores_ctrl_c_is_not_interrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # which would end this process
    try:
        interrupts._hook(print, ignored(KeyboardInterrupt()))
        for thread in threading.enumerate():
            if thread.name == "mirrored: Ctrl-C again":
                thread.join()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(hook: Any, callback: Any) -> None:
    start = time.monotonic()
    hook(ignored(KeyboardInterrupt(), callback))
    time.sleep(20)
    pytest.fail(f"not interrupted within {time.monotonic() - start} s")

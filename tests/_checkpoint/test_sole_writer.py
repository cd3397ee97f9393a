"""One program writes into a directory: another one is told so, and a holder that has gone is in nobody's way."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import program, wait_for_line

import mirrored as mr
from mirrored._checkpoint import files, sole_writer
from mirrored._checkpoint.sole_writer import LOCK
from mirrored._errors import CheckpointError

OTHER = {"host": "there", "process": 4711, "since": "2026-11-22T10:00:00Z"}


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole_writer, "_HERE_SECONDS", 0.0)
    monkeypatch.setattr(sole_writer, "_ELSEWHERE_SECONDS", 0.0)


@contextlib.contextmanager
def other_program(directory: Path, text: str = json.dumps(OTHER)) -> Iterator[Path]:
    """Hold the lock as another process does: a file that is opened again has a lock of its own."""
    directory.mkdir(exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    try:
        yield directory / LOCK
    finally:
        os.close(descriptor)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_second_program_is_told_so_changes_nothing_and_may_read(tmp_path: Path) -> None:
    w = mr.Variable(1.0)
    with mr.Checkpoint(tmp_path, w=w) as checkpoint:
        checkpoint.save(1)
    (tmp_path / ".saving-2-4711-abcd").mkdir()  # that the other one is writing
    with other_program(tmp_path):
        before = names(tmp_path)
        with mr.Checkpoint(tmp_path, w=w) as checkpoint:
            assert checkpoint.restore_latest() == 1
            with pytest.raises(CheckpointError) as caught:
                checkpoint.save(2)
            assert checkpoint.wait() == 1 and names(tmp_path) == before
        text = str(caught.value)
        assert f"another program writes checkpoints to {tmp_path}: process 4711 on there, since 2026-11-22T10:00:00Z, has" in text
        assert f"mr.Checkpoint('{tmp_path}-2', ...)" in text and f"rm {tmp_path / LOCK}" in text
    hostile = json.dumps({"host": "\x1b[2K" + "h" * 300, "process": [1], "since": None})
    for note, shown in (("", "another process has"), ("[" * 9000, "another process has"), (hostile, r"on \x1b[2Khhh")):
        with other_program(tmp_path, note), pytest.raises(CheckpointError) as caught:
            sole_writer.sole_writer(tmp_path)
        assert shown in str(caught.value) and "\x1b" not in str(caught.value) and len(str(caught.value)) < 900
    with mr.Checkpoint(tmp_path, w=w) as checkpoint:  # it has ended
        checkpoint.save(2)
    assert names(tmp_path) == ["1", "2"], "what it left is gone, and so is the lock"


def test_checkpoints_of_one_process_share_the_right_until_the_last_of_them_ends(tmp_path: Path) -> None:
    pair = [mr.Checkpoint(tmp_path, w=mr.Variable(0.0)) for _ in range(2)]
    for step, checkpoint in enumerate(pair):
        checkpoint.restore_latest()
        checkpoint.save(step)
        checkpoint.wait()
    for checkpoint in pair:
        with open(tmp_path / LOCK, "rb+") as another:
            assert json.loads(another.read())["process"] == os.getpid()
            with pytest.raises(BlockingIOError):
                fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        checkpoint.close()
    assert names(tmp_path) == ["0", "1"]
    dropped = mr.Checkpoint(tmp_path, w=mr.Variable(0.0))  # by a program that never closes it
    dropped.restore_latest()
    dropped.save(2)
    dropped.wait()
    del dropped
    gc.collect()
    assert names(tmp_path) == ["0", "1", "2"]


def test_a_right_is_kept_while_a_save_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in `close` ends the checkpoint, and not what its thread writes."""
    go_on, write = threading.Event(), files.StepFiles.write
    monkeypatch.setattr(files.StepFiles, "write", lambda *args: (go_on.wait(), write(*args))[1])
    checkpoint = mr.Checkpoint(tmp_path, w=mr.Variable(0.0))
    checkpoint.save(1)
    finish = checkpoint._writer.finish
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint._writer, "finish", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        checkpoint.close()
    assert LOCK in names(tmp_path)
    go_on.set()
    finish()
    assert checkpoint.steps() == [1]


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    """As with `rm -r` of a directory that a program still writes to: another one may write there by now."""
    first = sole_writer.sole_writer(tmp_path)
    assert first is not None and sole_writer.sole_writer(tmp_path) is first
    (tmp_path / LOCK).unlink()
    second = sole_writer.sole_writer(tmp_path)
    assert second is not None and second is not first
    del first
    gc.collect()
    assert second.stands(), "the end of the old one removes nothing"
    (tmp_path / LOCK).unlink()
    with other_program(tmp_path), pytest.raises(CheckpointError, match="another program"):
        sole_writer.sole_writer(tmp_path)


def test_a_lock_that_its_holder_removes_while_we_open_it_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole_writer, "_HERE_SECONDS", 9.0)
    flock, removed = fcntl.flock, []

    def locked_late(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", locked_late)
    held = sole_writer.sole_writer(tmp_path)
    assert held is not None and held.stands() and removed


def test_who_is_lost_on_another_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(sole_writer, "_ELSEWHERE_SECONDS", 100.0)
    slept: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(other_program(tmp_path))
        monkeypatch.setattr(sole_writer.time, "sleep", lambda seconds: (slept.append(seconds), len(slept) > 3 and stack.close()))
        assert sole_writer.sole_writer(tmp_path) is not None
    assert slept == [1.0] * 4
    assert [r.levelname for r in caplog.records if "until process 4711 on there" in r.message] == ["WARNING"]


def test_where_there_are_no_locks_it_saves_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    (tmp_path / ".saving-1-99").mkdir()  # maybe another program's
    (tmp_path / ".saving-2-99").mkdir()
    os.utime(tmp_path / ".saving-2-99", (0, 0))

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with mr.Checkpoint(tmp_path, w=mr.Variable(0.0)) as checkpoint:
            checkpoint.save(3)
    assert "cannot be found out: [Errno 37] No locks" in caplog.text
    assert {"3", ".saving-1-99"} <= set(names(tmp_path)) and ".saving-2-99" not in names(tmp_path)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        (tmp_path / LOCK).unlink(missing_ok=True)
        make(tmp_path / LOCK)
        assert sole_writer.sole_writer(tmp_path) is None
    descriptors = os.listdir("/proc/self/fd")
    assert sole_writer.sole_writer(tmp_path) is None and len(os.listdir("/proc/self/fd")) == len(descriptors)


PROGRAM = """
import os, signal, sys
import mirrored as mr
checkpoint = mr.Checkpoint(sys.argv[1], w=mr.Variable(0.0))
checkpoint.save(1)
checkpoint.wait()
if not (child := os.fork()):  # as a loader's worker, which outlives this process
    try:
        checkpoint.save(2)
    except mr.CheckpointError as error:
        print(error, flush=True)
    signal.pause()
print("CHILD", child, flush=True)
signal.pause()
"""


def test_a_killed_program_is_in_nobodys_way_also_when_a_forked_child_lives_on(tmp_path: Path) -> None:
    w = mr.Variable(np.zeros((), np.float32))
    with program(PROGRAM, tmp_path) as other, mr.Checkpoint(tmp_path, w=w) as checkpoint:
        wait_for_line(other, "another program")
        child = int(wait_for_line(other, r"CHILD (\d+)\n")[1])
        try:
            assert checkpoint.restore_latest() == 1
            refused = rf"process {other.pid} on .*has the lock"
            assert re.search(refused, other.output), "the child is another program"
            with pytest.raises(CheckpointError, match=refused):
                checkpoint.save(2)
            other.signal(signal.SIGKILL)
            assert other.wait().code == -9 and (tmp_path / LOCK).exists()
            os.kill(child, 0)
            checkpoint.save(2)
            assert checkpoint.wait() == 2
        finally:
            os.kill(child, signal.SIGKILL)
    assert names(tmp_path) == ["1", "2"]

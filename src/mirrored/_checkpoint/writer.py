"""Writes checkpoints in a thread while training goes on, and counts failed writes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import os
import queue
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from .. import _env
from .._errors import CheckpointError
from .._workers.coordination import SLICE_SECONDS, Coordination
from .._workers.progress import progress
from . import files
from .array_files import Pieces
from .files import StepFiles
from .state import Snapshot

_logger = logging.getLogger("mirrored")

#: The prefix of the keys by which workers report the parts that they have written.
_PARTS = "checkpoint/parts"

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _finish_all() -> None:
    for writer in list(_writers):
        writer.finish_at_exit()


class Writer:
    """The chief's writer of steps, one at a time in a thread; on other workers, a copy of the chief's record.

    Attributes:
        latest: the last step that is complete on disk; None when there is none.
        failures: the errors of the saves since then, in words.
        damaged: steps on disk that could not be restored. They do not count, and are removed when a new step is complete.
    """

    def __init__(
        self, files: StepFiles, max_to_keep: int | None, max_failed_saves: int, coordination: Coordination | None = None
    ) -> None:
        self._files = files
        self._coordination = coordination or Coordination()
        self._max_to_keep = max_to_keep
        self._max_failed_saves = max_failed_saves
        self._thread: threading.Thread | None = None
        self._step = -1  # the one being written, or written last
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()  # gets an element when it is written
        self.latest: int | None = None
        self.failures: list[str] = []
        self.damaged: set[int] = set()
        _writers.add(self)

    def start(self, step: int, folder: str, about: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Start a thread that writes a snapshot and a record with `about`; other workers than the chief only write parts."""
        assert not self.is_writing()
        # A queue, which waits in C: Ctrl-C in an Event may leave its lock held for ever, and an interrupted `join` makes
        # Python 3.12 believe that the thread has ended.
        self._step, self._end = step, queue.SimpleQueue()

        def work() -> None:
            try:
                if self._coordination.worker == 0:
                    self._write(step, folder, about, snapshot)
                else:
                    self._write_parts_for_chief(folder, snapshot)
            finally:
                if snapshot.pieces is not None:
                    snapshot.pieces.abandon()
                self._end.put(None)

        atexit.unregister(_finish_all)
        atexit.register(_finish_all)  # registered last, called first: before the lock ends, and before this worker leaves its job
        # A daemon, because Python would wait for another thread without telling the guard of the workers.
        self._thread = threading.Thread(target=work, name=f"mirrored-save-{step}", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """If the program is ending, wait for the write: Python may not call exit functions that are registered so late."""
        if not threading.main_thread().is_alive():
            self.finish()

    def is_writing(self) -> bool:
        """Tell whether this process is writing a step; in a forked child, the parent's write does not count."""
        return self._thread is not None and self._end.empty() and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all writers of this process to this directory: another Checkpoint's step may become the latest."""
        for writer in list(_writers):
            writer.finish_in(self._files.root)

    def finish_in(self, root: Path) -> None:
        """Wait for this writer, if it writes to this directory."""
        if self.is_writing() and self._files.root == root:
            end = self._end  # held, because another thread may start the next write
            end.get()
            end.put(None)  # for other waiting threads

    def finish_at_exit(self) -> None:
        """Wait at the end of the program; a forked child returns at once, because it may have inherited a held lock."""
        if not self.is_writing():
            return
        try:
            with progress.phase("waiting for the checkpoint", is_patient=True):
                self.finish()
        except KeyboardInterrupt as error:
            _logger.error(
                "step %d is lost: the program had ended before it was saved to %s, where the last step is %s. End the "
                "main thread with checkpoint.close(), after the last save.",
                self._step, self._files.root, self.latest,
            )  # fmt: skip
            sys.excepthook(type(error), error, error.__traceback__)  # if it were raised here, Python would report it as ignored

    def find_latest(self) -> None:
        """Find the latest step on disk."""
        self.latest = max(self._good_steps(), default=None)

    def take_record(self, latest: int | None, failures: list[str]) -> None:
        """Take over the chief's record; on the chief this changes nothing."""
        if latest is not None and latest != self.latest:
            self._note_progress(latest)
        self.latest, self.failures = latest, failures

    def go_on_from(self, step: int, damaged: Set[int]) -> None:
        """Note that a step was restored, and that later ones are damaged."""
        self.latest, self.damaged = step, self.damaged | damaged
        self._note_progress(step)

    def require_success(self, max_failed_saves: int | None = None) -> None:
        """Raise a CheckpointError when too many saves have failed in a row, and reset their count."""
        if len(self.failures) < (max_failed_saves or self._max_failed_saves):
            return
        failures, self.failures = self.failures, []
        times = f"{len(failures)} times in a row" if len(failures) > 1 else "and no later save has made up for it"
        where = " on worker 0" if self._coordination.num_workers > 1 else ""
        raise CheckpointError(
            f"saving to {self._files.root}{where} failed {times}: {'; '.join(failures)}. The last step there is {self.latest}. "
            "Free space on the disk, or choose another directory; max_failed_saves says how many may fail while training goes on."
        )

    def _good_steps(self) -> list[int]:
        return [step for step in self._files.scan()[0] if step not in self.damaged]

    def _write(self, step: int, folder: str, about: Mapping[str, Any], snapshot: Snapshot) -> None:
        started, write_parts = time.monotonic(), None
        if snapshot.pieces is not None:
            write_parts = functools.partial(self._write_parts_of_all, snapshot.pieces)
        try:
            record = {**about, "leaves": snapshot.leaves}
            num_bytes = self._files.write(step, snapshot.arrays, record, write_parts, folder)
        except Exception as error:  # such as a full disk: training is worth more than this save
            self._coordination.put(f"{_PARTS}/{folder}/failed", "1")
            self.failures.append(f"step {step}: {type(error).__name__}: {error}")
            _logger.error(
                "saving step %d to %s failed with %s: %s. This is failure %d in a row, and training ends at %d; the last step "
                "there is %s.",
                step, self._files.root, type(error).__name__, error, len(self.failures), self._max_failed_saves, self.latest,
            )  # fmt: skip
            return
        self.latest, self.failures = step, []
        self.damaged.discard(step)
        _logger.info("saved step %d to %s: %d bytes, %.2f s", step, self._files.root, num_bytes, time.monotonic() - started)
        self._note_progress(step)
        self._remove_old()

    def _write_parts_of_all(self, pieces: Pieces, folder: Path) -> dict[str, Any]:
        """Write the chief's parts, wait until the other workers have written theirs, and return the entries of all parts."""
        coordination = self._coordination
        coordination.put(f"{_PARTS}/{folder.name}/begun", "1")
        described: dict[str, Any] = {}
        try:
            described = files.write_parts(folder, 0, pieces)
        finally:  # also after an error: they write into the folder
            told = coordination.await_workers(f"{_PARTS}/{folder.name}/of", coordination.others, math.inf)
            coordination.delete(f"{_PARTS}/{folder.name}")
        for worker, text in told.items():
            of_worker = json.loads(text)
            if isinstance(of_worker, str):
                raise OSError(f"worker {worker}: {of_worker}")
            described |= of_worker
        return described

    def _write_parts_for_chief(self, folder: str, snapshot: Snapshot) -> None:
        """Write this worker's parts, and report their entries, or the error, to the chief."""
        coordination = self._coordination
        assert snapshot.pieces is not None
        try:
            while coordination.get(f"{_PARTS}/{folder}/begun", SLICE_SECONDS) is None:
                if coordination.peek(f"{_PARTS}/{folder}/failed"):
                    return
            told: object = files.write_parts(self._files.root / folder, coordination.worker, snapshot.pieces)
        except Exception as error:  # such as a full disk: the chief raises it
            told = f"{type(error).__name__}: {error}"
            _logger.error("the parts of worker %d could not be written: %s", coordination.worker, told)
        coordination.say(f"{_PARTS}/{folder}/of", json.dumps(told))

    def _remove_old(self) -> None:
        """Remove old and damaged steps, now that a newer one is complete."""
        steps = self._good_steps()
        old = [] if self._max_to_keep is None else steps[: -self._max_to_keep]
        for step in [*old, *sorted(self.damaged)]:
            try:
                with contextlib.suppress(FileNotFoundError):  # another program has removed it
                    self._files.remove(step)
                self.damaged.discard(step)
            except OSError as error:
                _logger.warning("step %d in %s could not be removed: %s", step, self._files.root, error)

    def _note_progress(self, step: int) -> None:
        """Write the last step for the launcher, if there is one: into one file for each directory of checkpoints."""
        target = _env.MIRRORED_PROGRESS_FILE.get()
        if not target:
            return
        target = f"{target}-{zlib.crc32(os.fsencode(self._files.root)):08x}"
        try:
            temporary = Path(f"{target}.{os.getpid()}")
            temporary.write_text(str(step))
            temporary.replace(target)
        except OSError as error:
            _logger.warning("the step of the checkpoint could not be written to %s: %s", target, error)

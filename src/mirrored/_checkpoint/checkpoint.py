"""Saves the state of a program while it trains, and restores it."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

from .._errors import CheckpointError, ContextError, StrategyMismatchError
from .._options import check_int
from .._replicas import frames, in_flight, mesh
from .._strategy.current import DefaultStrategy, get_strategy, has_strategy
from .._strategy.strategy import coordination_of, joint_strategy
from .._typing import PyTree
from .._variables import equal_copies
from .._variables.variable import spec_of
from .._workers import runtime
from .._workers.progress import progress
from .._workers.same_program import require_same_history
from . import files, same_on_workers, state
from . import leaves as values
from .files import StepFiles
from .leaves import Leaves
from .state import Snapshot
from .verify import DamagedStep
from .writer import Writer

_logger = logging.getLogger("mirrored")

#: Names for `of_chief`. The workers must exchange between two calls with one name, so calls without an exchange differ in name.
_CHANNEL, _MARK, _POSITIONS, _FOLDER = "checkpoint", "checkpoint/mark", "checkpoint/positions", "checkpoint/folder"


class Checkpoint:
    """The variables, optimizers and position in the data of a program, saved for any number of replicas and workers.

    A save copies the state to the host and returns; a thread writes the files while training goes on. A step on disk is
    complete or absent, whenever the process is killed. Checksums verify all that is read; a damaged step is reported, and the
    step before it is used. All workers call the same methods and share the directory; worker 0 writes all but others' parts.

    Args:
        directory: a directory for this object alone; made when it is missing.
        max_to_keep: the number of steps to keep; older ones are removed when a new one is complete. None: all.
        max_failed_saves: after so many failed saves in a row (a full disk), CheckpointError ends the training; fewer are
            logged as errors.
        named: the objects to save, each under a name of letters, digits, `_`, `.` and `-`: variables, optimizers, iterators
            of distributed datasets, and nests of them, of arrays and of numbers. Arrays and numbers that are replaced while
            training belong in a dict or a list, so that restored ones can take their place.

    Raises:
        TypeError: for an object that cannot be saved or restored.
        ValueError: for a wrong name, number or directory.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with strategy.scope():
    ...     w = mr.Variable(0.0, name="w")
    ...     state = {"epoch": 0}
    ...     checkpoint = mr.Checkpoint(folder.name, w=w, state=state)
    >>> step = checkpoint.restore_latest() or 0
    >>> while step < 30:
    ...     step += 1
    ...     _ = w.assign_add(1.0)
    ...     if step % 10 == 0:
    ...         checkpoint.save(step)
    >>> checkpoint.close()

    Another run, on another number of replicas:

    >>> with mr.OneDeviceStrategy().scope():
    ...     w = mr.Variable(0.0, name="w")
    ...     with mr.Checkpoint(folder.name, w=w, state={"epoch": 0}) as checkpoint:
    ...         print(checkpoint.restore_latest(), w.numpy(), checkpoint.steps())
    30 30.0 [10, 20, 30]
    >>> folder.cleanup()

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/train/CheckpointManager
    """

    def __init__(
        self, directory: str | PathLike[str] = "", /, *, max_to_keep: int | None = 3, max_failed_saves: int = 3, **named: PyTree
    ) -> None:
        self._named = named
        if max_to_keep is not None:
            check_int("mr.Checkpoint: max_to_keep", max_to_keep, 1, "steps")
        check_int("mr.Checkpoint: max_failed_saves", max_failed_saves, 1, "failed saves in a row")
        self._files = StepFiles(files.checked_directory(directory))
        self._strategy = get_strategy()
        if not has_strategy() and values.joint_among(values.leaves_of(self._named)):
            self._strategy = joint_strategy() or self._strategy  # made outside the scope, with state of all workers
        state.require_positions(self._leaves())
        self._writer = Writer(self._files, max_to_keep, max_failed_saves, coordination_of(self._strategy))
        self._last: int | None = None  # the step that this program saved or restored last
        self._known = max(self.steps(), default=-1)  # the last step on disk that this program knows
        self._is_closed = False
        self._is_planned = isinstance(mesh.replicas_of(self._strategy.mesh), mesh.PlannedMesh)  # nothing is saved or restored
        self._is_shared = self._strategy.num_workers == 1  # whether the workers are known to share the directory

    # -- saving

    def save(self, step: int) -> None:
        """Save the state under a step number, in the background.

        The call first waits until the previous save is written. When it returns, the state may change again. A failed save
        is logged as an error, and training goes on.

        Args:
            step: the number of the step, larger than all on disk; the call does nothing for the step saved or restored last.

        Raises:
            CheckpointError: (a RuntimeError) after `max_failed_saves` failed saves in a row, when workers save different
                objects, when they do not share the directory, and when another program writes there.
            ReplicasDivergeError: (a ValueError) when the copies of a mirrored variable differ; nothing is written.
            ValueError: when the directory has a later step that this program has not restored.
            ContextError: (a RuntimeError) inside a step.
        """
        step, call = files.checked_step(step, "checkpoint.save"), f"save({step})"
        self._require_usable("save")
        if self._is_planned:
            return
        with progress.phase(f"saving step {step}", is_patient=True):
            self._writer.finish()
            self._require_shared(call)
            leaves, positions, report, error = self._prepare_save(step)
            reports = self._exchange(report, call)
            every_position = coordination_of(self._strategy).for_chief(_POSITIONS, positions)
            self._take_chiefs_record(call)
            if error is not None:  # raised after the exchanges, in which the other workers wait for this one
                raise error
            same_on_workers.require_no_error(reports, "save")
            if len({report["digest"] for report in reports}) > 1:
                same_on_workers.require_same_kinds(self._exchange(values.kinds_of(leaves), call))
            if self._writer.latest == step:
                _logger.info("step %d is saved already, in %s", step, self._files.root)
                return
            self._require_mirrored(leaves)
            self._last = self._known = step
            about = {"num_replicas": self._strategy.num_replicas_in_sync, "num_workers": self._strategy.num_workers}
            folder = self._of_chief(self._files.new_folder(step), call, _FOLDER)
            start = functools.partial(self._writer.start, step, folder, about)
            state.take_snapshot(leaves, every_position, self._strategy.is_chief, start)
            self._writer.settle()

    def _prepare_save(self, step: int) -> tuple[Leaves, dict[str, Any], dict[str, Any], Exception | None]:
        """Tell the chief this worker's positions; return the leaves, the positions, a report to all workers, and the error."""
        leaves: Leaves = {}
        positions, report, error = dict[str, Any](), dict[str, Any](), None
        try:
            leaves = self._leaves()
            report["digest"] = files.digest(values.kinds_of(leaves))
            positions = state.positions_of(leaves)
            coordination_of(self._strategy).tell_chief(_POSITIONS, positions)
            if self._strategy.is_chief:
                self._files.claim()
                self._writer.find_latest()
                self._refuse_older(step)
        except Exception as problem:
            error, report["error"] = problem, f"{type(problem).__name__}: {problem}"
        return leaves, positions, report, error

    def _refuse_older(self, step: int) -> None:
        latest = self._writer.latest
        if latest is not None and latest > self._known:
            raise ValueError(
                f"save({step}), but another mr.Checkpoint has saved step {latest} in {self._files.root} since this one was made. "
                "They would remove each other's steps: give each a directory, mr.Checkpoint("
                f"{str(self._files.root) + '-2'!r}, ...), or go on from the other's step, checkpoint.restore_latest()."
            )
        if latest is not None and (step < latest or (step == latest and step != self._last)):
            raise ValueError(
                f"save({step}), but {self._files.root} holds step {latest}, which this program has not come from. Call "
                "checkpoint.restore_latest() before training, or start anew in another directory."
            )

    def _require_mirrored(self, leaves: Leaves) -> None:
        in_flight.finish()  # when the last step has ended, its arguments have been checked
        variables = values.variables_of(leaves)
        for devices in dict.fromkeys(spec_of(variable).mesh for variable in variables):
            equal_copies.check(devices, [variable for variable in variables if spec_of(variable).mesh == devices])

    def wait(self) -> int | None:
        """Wait until all saves are on disk; return the last step there, or None.

        Raises:
            CheckpointError: (a RuntimeError) after `max_failed_saves` failed saves in a row.
        """
        self._require_usable("wait")
        with progress.phase("waiting for the checkpoint", is_patient=True):
            self._writer.finish()
            if self._strategy.is_chief:
                self._writer.find_latest()
            self._exchange({}, "wait()")
            self._take_chiefs_record("wait()")
        return self._writer.latest

    def _take_chiefs_record(self, where: str) -> None:
        """Take over worker 0's record of the saves; too many failures end the training on all workers."""
        self._writer.take_record(*self._of_chief([self._writer.latest, self._writer.failures], where))
        self._writer.require_success()

    def close(self) -> None:
        """Wait until all saves are on disk; a `with` block calls it. Further calls do nothing.

        Raises:
            CheckpointError: (a RuntimeError) when the last save failed.
        """
        if self._is_closed:
            return
        try:
            self.wait()
            self._writer.require_success(max_failed_saves=1)
        finally:
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        if not self._writer.is_writing():
            self._files.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # do not wait for the other workers: they may go on
            self._writer.finish()
            self._end()

    def steps(self) -> list[int]:
        """Return the steps on disk, in order; nothing verifies them here."""
        return self._files.scan()[0]

    # -- restoring

    def restore_latest(self, *, partial: bool = False) -> int | None:
        """Restore the newest undamaged step and return its number, or None when there is no step.

        The whole step is verified before anything changes. A damaged step is logged as an error, and the step before it is
        tried; the next save removes damaged steps.

        A mirrored variable gets its value. A sync-on-read variable gets its saved copies on the same number of replicas, else
        its aggregated value, as by `assign`. Either kind can be restored from the other, and from plain arrays. Iterators go
        on at their positions. If each worker reads its own batches (`AutoShardPolicy.OFF`, or from a function), this needs
        the same number of workers.

        Args:
            partial: ignore saved values that this object does not name, for example to restore only weights for inference.
                Values that it names must be there. An iterator that is left out starts at its beginning.

        Raises:
            CheckpointError: (a RuntimeError) when every step is damaged, when a step cannot be read for another reason, such
                as too many open files, when the saved values do not fit (all differences are listed), and when the workers
                do not share the directory. Nothing has changed then.
            OSError: when a disk fails later. Variables in parts that had been restored are lost then; all else is as it was.
            ContextError: (a RuntimeError) inside a step.
        """
        if not isinstance(partial, bool):
            raise TypeError(f"checkpoint.restore_latest: partial is {partial!r}; expected True or False.")
        self._require_usable("restore_latest")
        with progress.phase("restoring the checkpoint", is_patient=True):
            self._writer.finish()
            self._require_shared("restore_latest()")
            damaged: dict[int, str] = {}
            for step in reversed(self._agreed_steps()):
                with contextlib.ExitStack() as opened:
                    saved, problem = self._read(step, opened)
                    if saved is not None:
                        self._restore(step, saved, partial)
                        self._writer.go_on_from(step, set(damaged))
                        self._last = self._known = step
                        _logger.info("restored step %d from %s", step, self._files.root)
                        return step
                damaged[step] = problem
                _logger.error("step %d in %s is damaged and is not used: %s", step, self._files.root, problem)
        if damaged:
            listed = "\n".join(f"  step {step}: {problem}" for step, problem in damaged.items())
            raise CheckpointError(f"no step in {self._files.root} is undamaged:\n{listed}")
        return None

    def _agreed_steps(self) -> list[int]:
        """Return the steps; raise CheckpointError when the workers see different ones."""
        if self._is_planned:
            return []
        report: dict[str, Any] = {"steps": [], "error": None}
        try:
            self._leaves()
            report["steps"], strays = self._files.scan()
            for stray in strays:
                _logger.warning("%s: %s; it is ignored", self._files.root, stray)
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
        reports = self._exchange(report, "restore_latest()")
        same_on_workers.require_no_error(reports, "restore_latest")
        self._require_same(reports, "steps", lambda steps: f"holds the steps {steps}" if steps else "holds none")
        return report["steps"]

    def _require_same(self, reports: same_on_workers.Reports, field: str, describe: Callable[[Any], str]) -> None:
        """Raise CheckpointError when a field differs between workers; the message has their directories."""
        if any(report[field] != reports[0][field] for report in reports):
            same_on_workers.require_shared(self._with_places(reports, "restore_latest()"), field, describe)

    def _read(self, step: int, opened: contextlib.ExitStack) -> tuple[Snapshot | None, str]:
        """Read a step on all workers; when any of them finds damage, return None and the damage in words."""
        report: dict[str, Any] = {"problems": [], "error": None, "id": None}
        saved = None
        try:
            record, arrays = self._files.read(step, opened, coordination_of(self._strategy).worker, self._strategy.num_workers)
            saved = Snapshot(record["leaves"], arrays)
            state.require_readable(saved)
            report["id"] = [record.get("time"), files.digest(record)]
        except DamagedStep as damage:
            report["problems"] = list(damage.args)
        except Exception as error:  # such as a disk that does not answer on one worker
            report["error"] = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        reports = self._exchange(report, f"restore_latest(), step {step}")
        same_on_workers.require_no_error(reports, "restore_latest")
        if problems := same_on_workers.by_first_worker([report["problems"] for report in reports]):
            return None, "; ".join(problems)
        self._require_same(reports, "id", lambda saved: f"holds a step {step} of {saved[0]}")
        return saved, ""

    def _restore(self, step: int, saved: Snapshot, is_partial: bool) -> None:
        leaves, worker, num_workers = self._leaves(), coordination_of(self._strategy).worker, self._strategy.num_workers
        named = Snapshot({path: entry for path, entry in saved.leaves.items() if path in leaves}, saved.arrays)
        wanted = named if is_partial else saved
        problems = state.find_differences(leaves, wanted, saved.leaves)
        partial_fits = not (problems and state.find_differences(leaves, named, saved.leaves))
        moved: list[tuple[Any, Any]] = []
        if not problems:
            try:
                moved = state.restore_positions(leaves, wanted, worker, num_workers)
            except Exception as error:
                problems = [f"an iterator does not take its position: {type(error).__name__}: {error}"]
        reports = self._exchange({"problems": problems, "partial_fits": partial_fits}, f"restore_latest(), step {step}")
        try:
            same_on_workers.require_fit(reports, f"step {step} in {self._files.root}")
            state.restore_values(self._named, leaves, wanted)
        except BaseException:
            state.undo_positions(moved)
            raise

    # -- with the other workers

    def _leaves(self) -> Leaves:
        leaves = values.leaves_of(self._named)
        joint, is_default = values.joint_among(leaves), isinstance(self._strategy, DefaultStrategy)
        if (joint and self._strategy.num_workers == 1) or (is_default and runtime.current() is not None):
            what = repr(joint) if joint else "this worker"
            raise StrategyMismatchError(
                f"mr.Checkpoint was made outside the scope of the strategy to which {what} belongs, so each worker would write "
                "for itself. Make it in `with strategy.scope():`; what one worker saves alone, in "
                "`with mr.OneDeviceStrategy().scope():`."
            )
        return leaves

    def _require_shared(self, where: str) -> None:
        """Raise CheckpointError unless all workers see worker 0's directory; checked once, before the first save or restore."""
        if self._is_shared:
            return
        with self._files.mark() if self._strategy.is_chief else contextlib.nullcontext() as mark:
            mark = self._of_chief(mark, where, _MARK)
            if mark is None:  # worker 0 cannot write there; to restore, it is enough that all see the same steps
                return
            reports = self._exchange({"sees": self._files.sees(mark)}, where)
        if not all(report["sees"] for report in reports):
            same_on_workers.refuse_unseen_mark(self._with_places(reports, where))
        self._is_shared = True

    def _with_places(self, reports: same_on_workers.Reports, where: str) -> same_on_workers.Reports:
        """Add each worker's directory and host to its report."""
        places = self._exchange({"where": f"{self._files.root} on {socket.gethostname()}"}, where)
        return [{**report, **place} for report, place in zip(reports, places, strict=True)]

    def _of_chief(self, value: Any, where: str, name: str = _CHANNEL) -> Any:
        with progress.phase(f"checkpoint.{where}", waits=True):
            return coordination_of(self._strategy).of_chief(name, value)

    def _exchange(self, value: dict[str, Any], where: str) -> Sequence[dict[str, Any]]:
        """Return the workers' values, in worker order; raise when their calls or histories differ."""
        with progress.phase(f"checkpoint.{where}", waits=True):
            exchange = functools.partial(coordination_of(self._strategy).exchange, _CHANNEL)
            seen = exchange([where, value, progress.history()])
            same_on_workers.require_same_call([call for call, _, _ in seen])
            require_same_history([history for _, _, history in seen], lambda: exchange(progress.tell()))
        return [reported for _, reported, _ in seen]

    def _require_usable(self, verb: str) -> None:
        if frames.is_traced():
            raise ContextError(f"checkpoint.{verb} was called inside a step or another traced function; call it between steps.")
        if self._is_closed:
            raise ValueError(f"checkpoint.{verb} was called after close(); make a new mr.Checkpoint.")

    def __repr__(self) -> str:
        return f"mr.Checkpoint({str(self._files.root)!r}, {', '.join(sorted(self._named))})"

"""Where is each worker, and can this job still go on? Decided from the positions that workers publish. No jax here.

Two verdicts are certain, and come at once: a worker waits for one that has ended, or two wait for different things. A worker that
may only be slow has the stall limit: docs/design/failures.md.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from .._text import escape, named, numbered
from .messages import read
from .progress import NEXT_BATCH, OTHERS_INPUT, Progress

#: The default limit: the longer of so many seconds and so many steps.
MIN_STALL_SECONDS = 300.0
STALL_STEPS = 20
#: The age of a position from which its worker is shown as silent; workers write theirs twice a second.
SILENT_SECONDS = 3.0
#: How long two workers must have waited for different things until the verdict is certain.
SETTLED_SECONDS = 2.0
#: How long the last messages of an ended worker may take to reach the others.
_ARRIVED_SECONDS = 0.4
#: The age from which a position may be outdated; only an end is for ever.
_OLD_SECONDS = 1.0
_MAX_WORD = 200


class Position(NamedTuple):
    """A worker's position in its program."""

    beat: int  # counts up while its guard lives
    started: int  # number of programs of several workers that it has started; "step" in messages
    program: str  # the name of the last one
    phase: str  # `Phase.text` of what it does between programs, or how it has ended; "" for nothing special
    detail: str  # `Phase.detail`
    waits: bool  # whether it can go on only with other workers
    is_patient: bool  # `Phase.is_patient`
    has_ended: bool  # whether its program has come to its end
    still: float  # seconds without a change
    done: int  # length of its history of programs, batches and variables
    trail: int  # the checksum of that history
    batch: list[int]  # the last batch of a dataset that all workers read: the first numbers of a `BatchPlace`, or empty
    ends: list[list[int]]  # the last batches of ended data, while the other workers are asked about theirs

    @property
    def waits_in_program(self) -> bool:
        return self.waits and not self.phase

    @property
    def waits_between(self) -> bool:
        """Whether it waits for other workers outside of a program: in a phase to which all must come, or for their input."""
        return (self.waits and bool(self.phase)) or (self.phase == NEXT_BATCH and self.detail == OTHERS_INPUT)

    def encode(self) -> str:
        """Return the text that `decode` takes."""
        return json.dumps(self)

    def __str__(self) -> str:
        program = escape(self.program, _MAX_WORD)
        step = f"after step {self.started} (program {program!r})" if self.started else "before its first step"
        phase = escape(self.phase, _MAX_WORD) + f" ({escape(self.detail, _MAX_WORD)})" * bool(self.detail)
        if self.has_ended:
            return f"has ended its program {step}" + f", by {phase}" * bool(phase)
        if self.waits_in_program:
            where = f"waits in {step.removeprefix('after ')}"
        elif self.waits:
            where = f"waits at {phase}, {step}"
        elif self.phase == NEXT_BATCH:
            where = f"waits for {phase}, {step}"
        else:
            where = f"{phase}, {step}" if phase else f"in its own code {step}"
        return f"{where}, for {self.still:.0f} s"


def decode(text: str) -> Position | None:
    """Return the position in a text of another worker; None if there is none."""
    position = read(Position, text)
    if position is None or not all(map(_is_place, [position.batch, *position.ends])):
        return None
    return position


def _is_place(value: object) -> bool:
    return isinstance(value, list) and len(value) in (0, 3) and all(type(number) is int for number in value)


class Own:
    """This worker's position, measured in each round."""

    def __init__(self, progress: Progress, stall_seconds: float | None) -> None:
        self._progress, self._stall_seconds = progress, stall_seconds
        self._state: object = None
        self._beat, self._started, self._still, self._since_step = 0, 0, 0.0, 0.0
        self._step_times: collections.deque[float] = collections.deque(maxlen=101)

    def measure(self, elapsed: float, has_ended: bool) -> Position:
        """Return the position, `elapsed` seconds after the last call."""
        progress = self._progress
        last = progress.trail.last  # read before the phase, which says whether others may yet refuse this entry
        phases, started, waits = progress.phases, progress.started, progress.is_waiting()
        state = (started, progress.finished, phases, waits, has_ended)
        self._beat += 1
        self._still = self._still + elapsed if state == self._state else 0.0
        self._state = state
        self._since_step += elapsed
        if started > self._started:
            self._step_times.append(self._since_step / (started - self._started))
            self._started, self._since_step = started, 0.0
        phase, detail = (phases[-1].text, phases[-1].detail) if phases else ("", "")
        if callable(detail):
            detail = detail()
        return Position(
            beat=self._beat,
            started=started,
            program=progress.program,
            phase=phase,
            detail=detail,
            waits=waits,
            is_patient=any(phase.is_patient for phase in phases),
            has_ended=has_ended,
            still=self._still,
            done=last.number,
            trail=last.checksum,
            batch=list((progress.batch or ())[:3]),
            ends=[list(place[:3]) for place in list(progress.data_ends.values())],
        )

    @property
    def limit(self) -> float:
        """How long a worker may wait for another."""
        if self._stall_seconds is not None:
            return self._stall_seconds
        return max(MIN_STALL_SECONDS, STALL_STEPS * statistics.median(self._step_times or (0.0,)))


class JobView(NamedTuple):
    """What one worker knows of the job at one moment."""

    positions: Mapping[int, Position]
    silent: Mapping[int, float]  # worker -> seconds since its position was due

    def silence(self, worker: int) -> float:
        return self.silent.get(worker, 0.0)

    def __str__(self) -> str:
        """Return a line of text for each worker."""
        lines = []
        for worker, position in sorted(self.positions.items()):
            seconds = self.silence(worker)
            note = f"; it has been silent for {seconds:.0f} s: stopped, cut off, or dead" * (seconds >= SILENT_SECONDS)
            lines.append(f"  worker {worker}: {position}{note}")
        return "\n".join(lines)


class Others:
    """The positions of the workers, and when each was last heard; a new one is due after `pause` seconds."""

    def __init__(self, pause: float = 0.0) -> None:
        self._pause, self._positions, self._unheard = pause, dict[int, Position](), dict[int, float]()

    def hear(self, texts: Mapping[int, str], elapsed: float) -> JobView:
        """Take the positions that workers have written, `elapsed` seconds after the last call."""
        for worker, text in texts.items():
            if position := decode(text):
                before = self._positions.get(worker)
                speaks = before is None or position.beat != before.beat
                self._unheard[worker] = 0.0 if speaks else self._unheard[worker] + elapsed
                self._positions[worker] = position
        silent = {worker: max(0.0, seconds - self._pause) for worker, seconds in self._unheard.items()}
        return JobView(dict(self._positions), silent)


def shorter_data(positions: Mapping[int, Position]) -> tuple[int, int] | None:
    """Return a worker whose data has ended, and a worker with a later batch of the same pass; old positions count too."""
    ends = ((worker, end) for worker, position in positions.items() for end in position.ends)
    for worker, (channel, of_pass, count) in ends:
        for ahead, position in positions.items():
            if position.batch[:2] == [channel, of_pass] and position.batch[2] > count:
                return worker, ahead
    return None


def judge_all(view: JobView, limit: float) -> str | None:
    """Say why some worker will wait for ever, or has waited too long; None while all may go on."""
    # Of the workers in one place only the one that has waited longest is judged: with a thousand workers, all would take long.
    longest: dict[object, int] = {}
    for worker, here in sorted(view.positions.items()):
        if view.silence(worker) < _OLD_SECONDS and not here.has_ended:
            place = (here.started, here.phase, here.detail, here.waits)
            if here.still > view.positions[longest.setdefault(place, worker)].still:
                longest[place] = worker
    reasons = (judge(worker, view, limit) for worker in sorted(longest.values()))
    return next(filter(None, reasons), None)


def judge(waiting: int, view: JobView, limit: float, sees_all: bool = True) -> str | None:
    """Say why a waiting worker will wait for ever, or has waited for longer than the limit; None while it may go on."""
    here = view.positions[waiting]
    if not here.waits and (here.phase != NEXT_BATCH or here.still < SETTLED_SECONDS):  # for a batch it may wait
        return None
    reason = _in_vain(waiting, view)
    if not reason and here.still >= limit:
        reason = _too_long(waiting, view, sees_all)
    return reason


def _in_vain(waiting: int, view: JobView) -> str | None:
    """Say why a worker will wait for ever: the other has ended, or waits for this one in turn."""
    for worker, position in sorted(view.positions.items()):
        is_old = view.silence(worker) >= _OLD_SECONDS and not position.has_ended
        if worker != waiting and not is_old and (reason := _never_meet(view.positions[waiting], position)):
            # In the same order on all workers: first the one that has ended, else the lower number.
            first, second = sorted((worker, waiting), key=lambda worker: (not view.positions[worker].has_ended, worker))
            pair = f"worker {first} {view.positions[first]}, and worker {second} {view.positions[second]}"
            return f"{pair}. {reason}\n{view}"
    return None


def _too_long(waiting: int, view: JobView, sees_all: bool) -> str | None:
    """Say for whom a worker has waited for longer than the limit; None while one of these may take its time."""
    here = view.positions[waiting]
    others = {worker: position for worker, position in view.positions.items() if worker != waiting}
    silent = {worker for worker in others if view.silence(worker) >= SILENT_SECONDS}
    late = sorted({worker for worker, position in others.items() if _is_late(here, position)} | silent)
    if here.phase == NEXT_BATCH and here.detail != OTHERS_INPUT:  # its own input has given nothing
        late = sorted([*late, waiting])
    # If nobody in view is late, a verdict needs a view of all workers.
    if not (late or sees_all) or any(view.positions[worker].is_patient and worker not in silent for worker in late):
        return None
    place = escape(here.phase or f"step {here.started} (program {here.program!r})", _MAX_WORD)
    who = f"{named(late)} not entered {place}" if late else f"no worker has finished {place}"
    if late and all(view.positions[worker].phase == NEXT_BATCH for worker in late):
        who = f"the input of {numbered(late)} has given no batch"
    longer = "If it only needs longer: mr.CommunicationOptions(timeout_seconds=...)."
    return f"{who} for {here.still:.0f} s, which is the limit. {longer}\n{view}"


def _never_meet(here: Position, there: Position) -> str | None:
    """Say why a worker waits in vain for one other worker: that has ended, or waits for this one in turn."""
    still = min(here.still, there.still)
    if there.has_ended:
        delay = _ARRIVED_SECONDS if here.waits else SETTLED_SECONDS
        if here.started > there.started or (here.waits_between and still >= delay):
            return "All workers must take the same number of steps and batches, and come to the same barriers."
        return None
    between, other = (here, there) if here.waits_between else (there, here)
    if still < SETTLED_SECONDS or not between.waits_between:
        return None
    # A worker that waits in a program has passed all earlier phases, and has taken its batch: one that waits between programs
    # needs only to start the same program.
    if other.waits_between:
        is_elsewhere = other.phase != between.phase
    else:
        is_elsewhere = other.waits_in_program and other.started > between.started
    if not is_elsewhere:
        return None
    return (
        "They wait for each other. Every worker must run the same programs and barriers, and take the same batches, in the same "
        "order: let no `if` that differs by worker, such as `if strategy.is_chief:`, stand around them."
    )


def _is_late(here: Position, there: Position) -> bool:
    """Tell whether the worker `there` has not yet come to the place where the worker `here` waits."""
    if here.phase != NEXT_BATCH:
        return not there.waits or there.started < here.started
    if there.waits_in_program and there.started > here.started:  # with the batch that this one wants
        return False
    return there.phase != NEXT_BATCH or there.detail != OTHERS_INPUT

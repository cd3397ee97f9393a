"""Where is each worker, and can this job still go on? Decided from what the workers say of themselves. No jax here.

What is certain is said at once: a worker waits for one that has ended, or two wait for different things. What may be
only slow is given the stall limit: docs/design/failures.md.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from .._text import escape, named, numbered
from .messages import parse, read
from .progress import NEXT_BATCH, OTHERS_INPUT, Progress

#: The default of the limit: at least so many seconds, and so many steps.
MIN_STALL_SECONDS = 300.0
STALL_STEPS = 20
#: A worker whose position is as old as this is told from one that speaks; they speak twice a second.
SILENT_SECONDS = 3.0
#: For so long two workers must have waited for different things before that is called certain.
SETTLED_SECONDS = 2.0
#: A worker that has waited for so long may be stuck.
_SUSPICIOUS_SECONDS = 0.5
#: What a worker gave before it ended may take so long to reach the others.
_ARRIVED_SECONDS = 0.4
#: What a worker said so long ago may be over; only an end is for ever.
_OLD_SECONDS = 1.0
_MAX_WORD = 200
_LONGER = "If it only needs longer: mr.CommunicationOptions(timeout_seconds=...)."


class Position(NamedTuple):
    """A worker's position in its program."""

    beat: int  # counts up while its guard lives
    started: int  # how many programs of several workers it has started; "step" in messages
    program: str  # the name of the one started last
    phase: str  # what it does between programs, or how it has ended; empty when nothing special
    detail: str  # more about that
    waits: bool  # whether it can go on only with other workers
    is_patient: bool  # whether what it does may take as long as it likes
    has_ended: bool  # whether its program has come to its end
    still: float  # for how many seconds nothing of this has changed
    done: int  # how many things it has done that all workers do alike and in the same order; -1 where that cannot be compared
    trail: int  # the checksum of them
    batch: list[int]  # which of those that all workers read was taken last: the first numbers of a `BatchPlace`; empty before
    ends: list[list[int]]  # the same of those after which data has ended here, while the others are asked whether theirs has

    @property
    def waits_in_phase(self) -> bool:
        return self.waits and bool(self.phase)

    @property
    def waits_in_program(self) -> bool:
        return self.waits and not self.phase

    @property
    def waits_between(self) -> bool:
        """Whether it waits for other workers, and not for a program: in a phase that they must come to, or for their input."""
        return self.waits_in_phase or (self.phase == NEXT_BATCH and self.detail == OTHERS_INPUT)

    def encode(self) -> str:
        """Return it as what `decode` takes."""
        return json.dumps(self)

    def __str__(self) -> str:
        step = (
            f"after step {self.started} (program {escape(self.program, _MAX_WORD)!r})"
            if self.started
            else "before its first step"
        )
        phase = escape(self.phase, _MAX_WORD) + (f" ({escape(self.detail, _MAX_WORD)})" if self.detail else "")
        if self.has_ended:
            return f"has ended its program {step}" + (f", by {phase}" if phase else "")
        if self.waits_in_program:
            where = f"waits in {step.removeprefix('after ')}"
        elif self.waits:
            where = f"waits at {phase}, {step}"
        elif self.phase == NEXT_BATCH:
            where = f"waits for {phase}, {step}"
        else:
            where = f"{phase or 'in its own code'}{',' if phase else ''} {step}"
        return f"{where}, for {self.still:.0f} s"


def decode(text: str) -> Position | None:
    """Return the position in a text of another worker, None when it is none."""
    position = read(Position, parse(text))
    return position if position and all(map(_is_place, [position.batch, *position.ends])) else None


def _is_place(value: object) -> bool:
    return isinstance(value, list) and len(value) in (0, 3) and all(type(number) is int for number in value)


class Own:
    """This worker's own position, from one look to the next."""

    def __init__(self, progress: Progress, stall_seconds: float | None) -> None:
        self._progress, self._stall_seconds = progress, stall_seconds
        self._state: object = None
        self._beat, self._started, self._still, self._since_step = 0, 0, 0.0, 0.0
        self._step_times: collections.deque[float] = collections.deque(maxlen=101)

    def look(self, elapsed: float, has_ended: bool) -> Position:
        """Return the position, `elapsed` seconds after the last look."""
        progress = self._progress
        phases, started, waits = progress.phases, progress.started, progress.is_waiting()
        state = (started, progress.finished, phases, waits, has_ended)
        self._beat += 1
        self._still += elapsed
        self._since_step += elapsed
        if started > self._started:
            self._step_times.append(self._since_step / (started - self._started))
            self._started, self._since_step = started, 0.0
        if state != self._state:
            self._state, self._still = state, 0.0
        phase, detail = (phases[-1].text, phases[-1].detail) if phases else ("", "")
        detail = detail() if callable(detail) else detail
        is_patient = any(phase.is_patient for phase in phases)
        done, trail = progress.trail.so_far()
        return Position(
            beat=self._beat,
            started=started,
            program=progress.program,
            phase=phase,
            detail=detail,
            waits=waits,
            is_patient=is_patient,
            has_ended=has_ended,
            still=self._still,
            done=done,
            trail=trail,
            batch=list((progress.batch or ())[:3]),
            ends=[list(place[:3]) for place in list(progress.data_ends.values())],
        )

    @property
    def limit(self) -> float:
        """How long a worker may wait for another."""
        if self._stall_seconds is not None:
            return self._stall_seconds
        return max(MIN_STALL_SECONDS, STALL_STEPS * statistics.median(self._step_times or (0.0,)))


class Others:
    """The positions of all workers, and for how long each has been silent; for `pause` nobody is expected to speak again."""

    def __init__(self, pause: float = 0.0) -> None:
        self.positions: dict[int, Position] = {}
        self.silent: dict[int, float] = {}
        self._pause, self._unheard = pause, dict[int, float]()

    def look(self, texts: Mapping[int, str], elapsed: float) -> None:
        """Take the positions as of `elapsed` seconds after the last look."""
        for worker, text in texts.items():
            position, before = decode(text), self.positions.get(worker)
            if position is None:
                continue
            is_new = before is None or position.beat != before.beat
            self._unheard[worker] = 0.0 if is_new else self._unheard[worker] + elapsed
            self.silent[worker] = max(0.0, self._unheard[worker] - self._pause)
            self.positions[worker] = position


def shorter_data(positions: Mapping[int, Position]) -> tuple[int, int] | None:
    """Return a worker whose data has ended, and one that has taken a later batch of the same pass; true, however old it is."""
    for worker, there in positions.items():
        for channel, of_pass, count in there.ends:
            for other, position in positions.items():
                if position.batch[:2] == [channel, of_pass] and position.batch[2] > count:
                    return worker, other
    return None


def may_be_stuck(position: Position, positions: Mapping[int, Position]) -> bool:
    """Tell whether a worker has waited for so long, or while another has ended, that `judge` should be asked."""
    if position.phase == NEXT_BATCH and position.still >= SETTLED_SECONDS:
        return True
    return position.waits and (position.still >= _SUSPICIOUS_SECONDS or any(there.has_ended for there in positions.values()))


def judge_all(limit: float, positions: Mapping[int, Position], silent: Mapping[int, float]) -> str | None:
    """Say why one of the workers that wait will wait for ever, or has waited too long; None while there is hope.

    Workers that wait in the same place are one question, of the one that has waited there for the longest time.
    """
    places: dict[object, int] = {}
    for worker, position in sorted(positions.items()):
        is_heard = silent.get(worker, 0.0) < _OLD_SECONDS
        if is_heard and not position.has_ended and may_be_stuck(position, positions):
            place = (position.started, position.phase, position.detail, position.waits)
            longest = places.setdefault(place, worker)
            if position.still > positions[longest].still:
                places[place] = worker
    reasons = (judge(worker, limit, positions, silent) for worker in sorted(places.values()))
    return next(filter(None, reasons), None)


def judge(
    own: int, limit: float, positions: Mapping[int, Position], silent: Mapping[int, float], sees_all: bool = True
) -> str | None:
    """Say why a worker that waits will wait for ever, or has waited for longer than the limit; None while there is hope.

    Knows the positions of those that have spoken, and for how long each has been silent. Says nothing of nobody, unless it
    `sees_all` that matter.
    """
    here = positions[own]
    others = {worker: position for worker, position in sorted(positions.items()) if worker != own}
    for worker, there in others.items():
        is_old = silent.get(worker, 0.0) >= _OLD_SECONDS and not there.has_ended
        if not is_old and (reason := _cannot_meet(here, there)):
            # Whoever says it first says it alike: one that has ended comes first, else the lower number.
            first, second = sorted((worker, own), key=lambda one: (not positions[one].has_ended, one))
            pair = f"worker {first} {positions[first]}, and worker {second} {positions[second]}"
            return f"{pair}. {reason}\n{listed(positions, silent)}"
    if here.still < limit:
        return None
    quiet = [worker for worker in others if silent.get(worker, 0.0) >= SILENT_SECONDS]
    if here.phase == NEXT_BATCH:
        late = [worker for worker, there in others.items() if _has_no_batch(here, there)]
        late = sorted({*late, *quiet, *([] if here.detail == OTHERS_INPUT else [own])})
        others = {**others, own: here}
    else:
        late = [worker for worker, there in others.items() if _is_late(here, there) or worker in quiet]
    if not (late or sees_all) or any(others[worker].is_patient and worker not in quiet for worker in late):
        return None
    is_between = here.waits_in_phase or here.phase == NEXT_BATCH
    place = escape(here.phase if is_between else f"step {here.started} (program {here.program!r})", _MAX_WORD)
    who = f"{named(late)} not entered {place}" if late else f"no worker has finished {place}"
    if late and all(others[worker].phase == NEXT_BATCH for worker in late):
        who = f"the input of {numbered(late)} has given no batch"
    return f"{who} for {here.still:.0f} s, which is the limit. {_LONGER}\n{listed(positions, silent)}"


def listed(positions: Mapping[int, Position], silent: Mapping[int, float]) -> str:
    """Return a line for each worker."""
    lines = []
    for worker, position in sorted(positions.items()):
        seconds = silent.get(worker, 0.0)
        note = f"; it has been silent for {seconds:.0f} s: stopped, cut off, or dead" if seconds >= SILENT_SECONDS else ""
        lines.append(f"  worker {worker}: {position}{note}")
    return "\n".join(lines)


def _cannot_meet(here: Position, there: Position) -> str | None:
    still = min(here.still, there.still)
    if there.has_ended:
        has_arrived = still >= (_ARRIVED_SECONDS if here.waits_in_phase else SETTLED_SECONDS)
        stuck = here.started > there.started or (here.waits_between and has_arrived)
        return "All workers must take the same number of steps and batches, and come to the same barriers." if stuck else None
    if still < SETTLED_SECONDS:
        return None
    # One that waits in a program has met all phases before it; so one in a phase must have started that program too. And all
    # workers' batches are ready for one that has come past the next one.
    differ = (
        (here.waits_between and there.waits_between and here.phase != there.phase)
        or (here.waits_between and there.waits_in_program and there.started > here.started)
        or (there.waits_between and here.waits_in_program and here.started > there.started)
    )
    if not differ:
        return None
    return (
        "They wait for each other. Every worker must run the same programs and barriers, and take the same batches, in the same "
        "order: let no `if` that differs by worker, such as `if strategy.is_chief:`, stand around them."
    )


def _has_no_batch(here: Position, there: Position) -> bool:
    if there.waits_in_program and there.started > here.started:  # with the batch that this one wants
        return False
    return there.phase != NEXT_BATCH or there.detail != OTHERS_INPUT


def _is_late(here: Position, there: Position) -> bool:
    return not there.waits or there.started < here.started

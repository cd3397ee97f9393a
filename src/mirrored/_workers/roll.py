"""Who is still there, and who has done something else? One worker asks all others before the job ends. No jax here.

The first to ask asks for all: the others wait for what it finds. Who answers compares what it has done with what was told, and
tells it only where it was something else, so that an answer has one length whatever the number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .._errors import FAILED, ProgramMismatchError
from .._text import named, numbered
from .coordination import Coordination
from .leaving import HERE
from .neighbours import Neighbours
from .progress import Progress
from .same_program import is_other_order, other_order
from .verdict import Verdict

#: What wakes the guards, and why the job ends.
CALL, VERDICT = "guard/call", "guard/verdict"
#: What a call says: leave; leave, and answer first; all have come to the end.
LEAVE, TELL, DONE = "leave", "tell", "done"
_CALLERS, _TRAIL, _PROCESS = "guard/callers", "guard/trail", "guard/process"
#: How long the others have to answer, and who asks later to hear what the first has found.
_ANSWER_SECONDS = 0.6


class Roll:
    """The roll call of all workers."""

    def __init__(self, coordination: Coordination, neighbours: Neighbours, progress: Progress) -> None:
        self._coordination, self._neighbours, self._progress = coordination, neighbours, progress
        self._worker, self._num_workers = coordination.worker, coordination.num_workers
        self._num_meetings = 0

    def introduce(self) -> None:
        """Tell the others of this host which process this is."""
        self._coordination.put(f"{self._of_host}/{self._worker}", self._neighbours.introduce())

    def meet(self) -> None:
        """Take note of the others of this host, soon after the start and then now and then: some come late."""
        self._num_meetings += 1
        if not self._neighbours.are_known and (self._num_meetings <= 20 or self._num_meetings % 16 == 0):
            self._neighbours.meet(self._coordination.by_worker(self._of_host))

    @property
    def _of_host(self) -> str:
        return f"{_PROCESS}/{self._neighbours.host}"

    def lost(self, title: str) -> Verdict:
        """Find out after an error of a collective who was lost: who does not answer."""
        step, others = self._progress.step, set(range(self._num_workers)) - {self._worker}
        present: set[int] = set()
        try:
            if not self._neighbours.dead():
                self.meet()
                if known := self._known(0.0):
                    return known
                if not self._call() and (known := self._known(2 * _ANSWER_SECONDS)):
                    return known
            deadline = time.monotonic() + _ANSWER_SECONDS
            while len(present) < len(others) and time.monotonic() < deadline:
                if dead := self._neighbours.dead():
                    return self.gone(dead)
                time.sleep(0.01)
                present = self._coordination.by_worker(HERE).keys() & others
            if is_other_order(trails := self._told()):  # so collectives of different programs have met
                return told_apart(other_order(trails), wants_stacks=True)
        except Exception:  # jaxlib's errors have no classes of their own
            return Verdict(f"lost worker 0, which hosts the coordination service, at step {step}", title, (0,))
        missing = sorted(others - present)
        who, why = "lost a connection", "all workers answered"
        if missing:
            who, why = f"lost {numbered(missing)}", f"{named(missing)} not answered"
        return Verdict(f"{who} at step {step}: a collective failed on worker {self._worker}, and {why}", title, tuple(missing))

    def gone(self, dead: Sequence[int]) -> Verdict:
        """Return the verdict on workers of this host that have ended."""
        # When worker 0 is gone the others follow at once, so it is the one to name.
        who = "worker 0, which hosts the coordination service," if 0 in dead else numbered(dead)
        return Verdict(f"lost {who} at step {self._progress.step}: the process is gone", lost=tuple(dead))

    def trails(self) -> list[str]:
        """Call all workers to say what they have done last where it is something else, before they leave."""
        if not self._call():
            self._known(2 * _ANSWER_SECONDS)  # of which all are told
        others = set(range(self._num_workers)) - {self._worker}
        self._coordination.await_workers(HERE, others, time.monotonic() + _ANSWER_SECONDS)
        return self._told()

    def answer(self, call: str) -> None:
        """Answer the call of another worker."""
        if call == TELL:
            own, told = self._progress.tell(), self._told()
            told[self._worker] = own
            if not any(others for index, others in enumerate(told) if index != self._worker) or is_other_order(told):
                self._coordination.put(f"{_TRAIL}/{self._worker}", own)
        self._coordination.put(f"{HERE}/{self._worker}", "1")

    def _call(self) -> bool:
        """Call all workers, unless another has; tell whether this one has."""
        self._coordination.put(f"{_TRAIL}/{self._worker}", self._progress.tell())
        is_first = self._coordination.count(_CALLERS) == 1
        if is_first:
            self._coordination.put(CALL, TELL)
        return is_first

    def _known(self, seconds: float) -> Verdict | None:
        """Return what another worker has found, if it has found it so soon."""
        text = self._coordination.get(VERDICT, seconds) if seconds else self._coordination.peek(VERDICT)
        return None if text is None else Verdict.decode(text)

    def _told(self) -> list[str]:
        """Return what each worker has done last; empty of one that has not said it."""
        told = self._coordination.by_worker(_TRAIL)
        return [told.get(worker, "") for worker in range(self._num_workers)]


def told_apart(text: str, wants_stacks: bool = False) -> Verdict:
    """Return the verdict on workers that have done different things, so that starting again would not help."""
    title, _, detail = text.partition("\n")
    return Verdict(f"{ProgramMismatchError.__name__}: {title}", detail, wants_stacks=wants_stacks, code=FAILED)

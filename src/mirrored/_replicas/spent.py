"""Where a loop of steps spends its time, as seen by its thread, and how the devices spend theirs, as seen in a profile."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterator

from .._process import last_profiles, times
from .._process import waited as waited
from .._text import counted
from .mesh import ReplicaMesh

#: The fewest steps for which shares are shown.
MIN_STEPS = 20
#: How many of the last steps are remembered.
LAST_STEPS = 1000
#: The key of the time outside collectives.
COMPUTATION = "computation"


def forget_pause() -> None:
    """Restart the timers, because since the last step the loop did something that belongs to no step, such as a profile."""
    for spent in list(times):
        spent.last = None


@dataclasses.dataclass(eq=False)
class Spent:
    """The seconds of a strategy's compilations, and of its last warm steps; each step counts from the end of the one before."""

    # A program's first run is a compilation: it is no step, and neither is the next run. Steps of one thread count, the first's.

    num_compiled: int = 0
    compiling: float = 0.0  # of all compilations, with tracing, proof and the first run
    #: Of each step: from end to end; waiting for input and devices (`_process.Waited`); inside `strategy.run`, without waiting.
    steps: deque[tuple[float, float, float, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    #: `_process.waited` and the clock at the end of the last step; None if the next step begins a series.
    last: tuple[float, float, float] | None = None
    thread: int = 0  # the thread that takes the steps; 0 before the first
    since: float = dataclasses.field(default_factory=time.time)  # when the strategy was made

    def __post_init__(self) -> None:
        times.add(self)

    def wall(self) -> float:
        """Return the seconds of the steps."""
        return sum(wall for wall, *_ in self.steps)

    def median(self) -> float:
        """Return the seconds of a steady step; 0 before the first."""
        return statistics.median([wall for wall, *_ in self.steps] or [0.0])

    def shares(self) -> dict[str, float]:
        """Return the shares of the steps' time, by what it was spent on; {} after too few steps."""
        wall = self.wall()
        if len(self.steps) < MIN_STEPS or wall <= 0:
            return {}
        input, devices, python = (sum(step[part] for step in self.steps) for part in (1, 2, 3))
        parts = {"waiting for input": input, "waiting for devices": devices, "Python and dispatch": python}
        parts["between the steps"] = max(wall - sum(parts.values()), 0.0)
        return {name: seconds / wall for name, seconds in parts.items()}

    def in_words(self) -> Iterator[str]:
        """Yield a line about compilations, one about the steps' shares, and one about likely causes of time between steps."""
        if self.num_compiled:
            yield f"time of {counted(self.num_compiled, 'compilation')}: {self.compiling:.3g} s, which no step below has"
        if shares := self.shares():
            listed = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
            median = f"with a median of {1e3 * self.median():.3g} ms"
            yield f"time of the last {len(self.steps)} steps, {self.wall():.3g} s {median}: {listed}"
            if shares["between the steps"] > 0.5:
                yield "  between the steps: your own code, and its wait for each result that it reads, as float(loss) does"


# -- the devices, in the last profile: computing, or in collectives


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """The working time of this process's devices while a profile was recorded."""

    folder: str  # of the profile
    ended: float  # when the profile ended, as of time.time()
    num_steps: int  # how many program runs it has
    num_devices: int
    seconds: dict[str, float]  # summed over the devices, by `COMPUTATION` or a collective's kind
    reason: str = ""  # why `seconds` is empty

    def shares(self) -> dict[str, float]:
        """Return the shares of computation and communication; {} if they are unknown."""
        if (total := sum(self.seconds.values())) <= 0:
            return {}
        computation = self.seconds.get(COMPUTATION, 0.0) / total
        return {COMPUTATION: computation, "communication": 1 - computation}

    def kinds(self) -> dict[str, float]:
        """Return each collective kind's share of the time, the longest first."""
        kinds = {kind: seconds for kind, seconds in self.seconds.items() if kind != COMPUTATION}
        return {kind: kinds[kind] / sum(self.seconds.values()) for kind in sorted(kinds, key=lambda kind: -kinds[kind])}

    def in_words(self) -> str:
        """Return the shares as a line of text."""
        source = f"(profile of {counted(self.num_steps, 'step')} in {self.folder!r})"
        if not (shares := self.shares()):
            return f"the devices' time {source} is unknown: {self.reason}"
        both, kinds = ", ".join(f"{share:.0%} {name}" for name, share in shares.items()), self.kinds()
        listed = ", ".join(f"{share:.0%} {kind}" if len(kinds) > 1 else kind for kind, share in kinds.items())
        return f"time of the devices {source}: {both}" + f" ({listed})" * bool(kinds)


def last_profile(mesh: ReplicaMesh, since: float) -> DeviceTime | None:
    """Return the last profile of a mesh, or None if it ended before `since`, as of time.time()."""
    found = last_profiles.get(mesh)
    return None if found is None or found.ended < since else found

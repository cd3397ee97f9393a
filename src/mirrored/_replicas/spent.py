"""Where a loop of steps spends its time, as seen by its thread, and how the devices spend theirs, as seen in a profile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from .._process import last_profiles, times
from .._process import waited as waited
from .._text import counted
from .mesh import ReplicaMesh

#: The fewest steps for which shares are shown.
MIN_STEPS = 20
#: The key of the time outside collectives.
COMPUTATION = "computation"


def forget_pause() -> None:
    """Restart the timers, because since the last step the loop did something that belongs to no step, such as a profile."""
    for spent in list(times):
        spent.last = None


@dataclasses.dataclass(eq=False)
class Spent:
    """The seconds of a strategy's warm steps; each step counts from the end of the one before.

    A step that compiles does not count, nor does the next one. Only the first thread that takes steps counts.
    """

    num_steps: int = 0
    wall: float = 0.0  # of all steps, from end to end
    input: float = 0.0  # see `_process.Waited`
    devices: float = 0.0
    python: float = 0.0  # inside `strategy.run`, without waiting
    #: `_process.waited` and the clock at the end of the last step; None if the next step begins a series.
    last: tuple[float, float, float] | None = None
    thread: int = 0  # the thread that takes the steps; 0 before the first
    since: float = dataclasses.field(default_factory=time.time)  # when the strategy was made

    def __post_init__(self) -> None:
        times.add(self)

    def shares(self) -> dict[str, float]:
        """Return the shares of the time, by what it was spent on; {} after too few steps."""
        if self.num_steps < MIN_STEPS or self.wall <= 0:
            return {}
        parts = {"waiting for input": self.input, "waiting for devices": self.devices, "Python and dispatch": self.python}
        parts["between the steps"] = max(self.wall - sum(parts.values()), 0.0)
        return {name: seconds / self.wall for name, seconds in parts.items()}

    def in_words(self) -> Iterator[str]:
        """Yield a line about the shares, and if most time passes between steps, what it may be; nothing after too few steps."""
        if shares := self.shares():
            listed = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
            yield f"time of {self.num_steps} steps, {1e3 * self.wall / self.num_steps:.3g} ms each: {listed}"
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

"""Where the time of a loop of steps goes, as its thread sees it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from .._process import times
from .._process import waited as waited

#: So many steps are looked at before anything is said of them.
MIN_STEPS = 20


def forget_pause() -> None:
    """Leave the time since the last steps out: the loop did something that belongs to no step."""
    for spent in list(times):
        spent.last = None


@dataclasses.dataclass(eq=False)
class Spent:
    """The seconds of a strategy's warm steps, each from the end of the one before to its own.

    A step that was compiled, and the time until the next one has come back, are left out. Of several threads that take steps the
    first one counts.
    """

    num_steps: int = 0
    wall: float = 0.0  # what they took
    input: float = 0.0  # see `_process.Waited`
    devices: float = 0.0
    python: float = 0.0  # inside `strategy.run`, without waiting
    #: What `_process.waited` and the clock were at the end of the last step; None when the next one begins a row of steps.
    last: tuple[float, float, float] | None = None
    thread: int = 0  # that takes the steps; 0 before the first
    since: float = dataclasses.field(default_factory=time.time)  # when the strategy was made

    def __post_init__(self) -> None:
        times.add(self)

    def shares(self) -> dict[str, float]:
        """Return which part of the time went where; nothing after too few steps."""
        if self.num_steps < MIN_STEPS or self.wall <= 0:
            return {}
        parts = {"waiting for input": self.input, "waiting for devices": self.devices, "Python and dispatch": self.python}
        parts["between the steps"] = max(self.wall - sum(parts.values()), 0.0)
        return {name: seconds / self.wall for name, seconds in parts.items()}

    def in_words(self) -> Iterator[str]:
        """Say it in a line; in none after too few steps."""
        if shares := self.shares():
            listed = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
            yield f"time of {self.num_steps} steps, {1e3 * self.wall / self.num_steps:.3g} ms each: {listed}"

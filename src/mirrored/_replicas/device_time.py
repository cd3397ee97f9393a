"""Says how the devices spent their time in the last profile: computing, or in collectives."""

from __future__ import annotations

import dataclasses

from .._process import last_profiles
from .._text import counted
from .mesh import ReplicaMesh

#: The key of the time outside collectives.
COMPUTATION = "computation"


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

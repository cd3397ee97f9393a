"""Do the workers' machines compute the same last bits? What decides it, and how they differ. No jax here."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import _env
from .._text import escape, numbered

_logger = logging.getLogger("mirrored")

#: What to do when machines differ.
REMEDY = (
    "Use machines of one kind, and the same XLA_FLAGS on all workers; with CPUs of several kinds write "
    "XLA_FLAGS=--xla_cpu_max_isa=AVX2 for all, or what else each of them has"
)
#: The CPU instructions for which XLA compiles arithmetic, on x86 and ARM.
_INSTRUCTIONS = re.compile(r"s?sse\w*|avx\w*|fma\w*|f16c|amx\w*|asimd\w*|sve\w*|bf16|i8mm")
#: Flags of XLA that change no number, and may differ by worker.
_HARMLESS = ("--xla_dump", "--xla_force_host_platform_device_count")
_MAX_SHOWN, _MAX_GROUPS = 300, 3


def words(kinds: Iterable[str], cpu_info: str = "/proc/cpuinfo") -> list[str]:
    """Return the words that decide this worker's last bits: kinds of devices, CPU instructions, XLA's flags."""
    flags = (flag for flag in (_env.XLA_FLAGS.get() or "").split() if not flag.startswith(_HARMLESS))
    found = {*kinds, *flags}
    if "cpu" in found:
        found |= _instructions(Path(cpu_info))
    return sorted(found)


def _instructions(cpu_info: Path) -> set[str]:
    try:
        text = cpu_info.read_text(errors="replace")
    except OSError:  # not Linux
        return set()
    first = re.search(r"(?m)^(?:flags|Features)\s*:(.*)", text)
    return {word for word in first[1].split() if _INSTRUCTIONS.fullmatch(word)} if first else set()


def difference(of_workers: Sequence[object]) -> str:
    """Say how the `words` of workers differ from worker 0's; "" when all are alike."""
    first, *rest = map(_checked, of_workers)
    groups: dict[str, list[int]] = {}
    for worker, found in enumerate(rest, 1):
        parts = {"without": first - found, "with": found - first}
        what = " and ".join(f"{how} {escape(' '.join(sorted(part)), _MAX_SHOWN)}" for how, part in parts.items() if part)
        if what:
            groups.setdefault(what, []).append(worker)
    return "; ".join(f"{numbered(workers)} {text}" for text, workers in list(groups.items())[:_MAX_GROUPS])


def _checked(given: object) -> set[str]:
    return {word for word in given if isinstance(word, str)} if isinstance(given, list) else set()


@functools.cache
def warn_once(of_workers: str) -> None:
    """Warn of a `difference`."""
    _logger.warning(
        "the machines of the workers differ from worker 0's: %s. So results may differ in the last bit; then the copies of "
        "variables drift apart, and the next comparison of them, at the latest before a save, ends the job. %s",
        of_workers, REMEDY,
    )  # fmt: skip

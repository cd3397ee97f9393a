"""Checks of a checkpoint's arguments: names, counts, numbers of steps. No jax here."""

from __future__ import annotations

import re
from typing import Any

from .._typing import PyTree

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_MAX_STEP = 10**18 - 1


def checked_names(named: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the objects to save, or raise an error that names a wrong name."""
    if not named:
        raise TypeError("mr.Checkpoint got nothing to save; expected for example mr.Checkpoint(directory, model=variables).")
    for name in named:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"mr.Checkpoint: the name {name!r} will not do; expected 1 to 128 of the characters A-Z, a-z, 0-9, '_', '.' and "
                "'-', the first not a '.'."
            )
    return named


def checked_step(step: Any, verb: str) -> int:
    """Return a step number as an int, or raise TypeError."""
    try:
        number = int(step.__index__())
    except (AttributeError, TypeError):
        number = -1
    if isinstance(step, bool) or not 0 <= number <= _MAX_STEP:
        raise TypeError(f"{verb}: step is {step!r}; expected an int of at least 0.")
    return number

"""The versions of JAX with which the library was tried; parts that JAX does not promise change between versions."""

from __future__ import annotations

import warnings

import jax

#: The oldest version, which the package's metadata allows, and the newest; CI runs both.
OLDEST, NEWEST = (0, 12, 0), (0, 12, 0, 1)


def warn_if_untried() -> None:
    """Warn when this JAX is older or newer than the tried versions."""
    if OLDEST <= jax.__version_info__ <= NEWEST:
        return
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    warnings.warn(
        f"this is jax {jax.__version__}; this version of mirrored was tried with jax {oldest} to {newest}. It should work, or "
        f"fail with an error, but its guarantees were not tested here. Install a tried one with `pip install jax=={newest}`, "
        "or look for a newer mirrored",
        stacklevel=6,  # the line that uses a public name: above it are this file, _public, importlib, _load, __getattr__
    )

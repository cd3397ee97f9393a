"""What JAX remembers of host callbacks that have raised."""

from __future__ import annotations

import contextlib

import jax
from jax._src import dispatch


def forget_failed() -> None:
    """Let JAX forget an error, which it keeps for the next program with an ordered callback, whosever that is.

    `jax.effects_barrier` alone does so since jax 0.11 only.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError, ExceptionGroup):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()

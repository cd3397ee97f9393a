"""Clears the errors that JAX keeps from failed host callbacks."""

from __future__ import annotations

import contextlib

import jax
from jax._src import dispatch


def forget_failed() -> None:
    """Let JAX forget an error, which would else reach the next program with an ordered callback, anybody's.

    Since jax 0.11, `jax.effects_barrier` alone does so.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError, ExceptionGroup):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()

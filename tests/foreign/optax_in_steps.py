"""A plugin of pytest that runs Optax' own tests with each `jax.jit` as a step of a strategy: nothing may become different.

Optax' package has its tests. See run.py.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import optax  # noqa: F401  # before `jax.jit` is another: its own functions stay as they are

import mirrored as mr
from mirrored._jax import tracing

_jit = jax.jit
_strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(int(os.environ.get("REPLICAS", "3")))])


class _Step:
    """What `jax.jit` returns in these tests: in no trace it runs on all replicas, in one it is a `jax.jit`."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function = function
        self._jitted = _jit(function, **options)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = tracing.current_trace() is tracing.NO_TRACE and mr.in_cross_replica_context()
        return _strategy.run(self._function, args, kwargs) if is_plain else self._jitted(*args, **kwargs)

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def _jit_as_step(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return functools.partial(_Step, **options) if function is None else _Step(function, **options)


jax.jit = _jit_as_step

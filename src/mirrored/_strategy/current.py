"""Tells which strategy, and which replica, the program is in."""

from __future__ import annotations

import functools

from .._replicas import frames
from .._replicas.collectives import ReplicaAxis
from .._replicas.context import ReplicaContext
from .._replicas.mesh import default_mesh
from .strategies import look_for_others
from .strategy import Strategy


class DefaultStrategy(Strategy):
    """The strategy outside every scope: one replica on the first device."""


@functools.cache
def _default_strategy() -> DefaultStrategy:
    look_for_others("the default strategy")
    return DefaultStrategy(default_mesh())


def get_strategy() -> Strategy:
    """Return the strategy of the innermost scope or step; outside all, the default strategy with one replica.

    >>> mr.get_strategy().num_replicas_in_sync
    1
    >>> with strategy.scope():
    ...     mr.get_strategy().num_replicas_in_sync
    2

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/get_strategy
    """
    frame = frames.current()
    if frame is not None and frame.strategy is not None:
        return frame.strategy
    return _default_strategy()


def has_strategy() -> bool:
    """Tell whether the program is inside a strategy's scope or step.

    >>> mr.has_strategy()
    False

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/has_strategy
    """
    frame = frames.current()
    return frame is not None and frame.strategy is not None


def get_replica_context() -> ReplicaContext:
    """Return the replica context inside a step, and None in cross-replica context.

    Outside every scope, return the context of the default strategy: one replica, number 0.

    >>> strategy.run(lambda: mr.get_replica_context().num_replicas_in_sync)
    2
    >>> with strategy.scope():
    ...     print(mr.get_replica_context())
    None

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/get_replica_context
    """
    frame = frames.current()
    if frame is None or (frame.strategy is None and frame.axis is None):
        return ReplicaContext(_default_strategy(), ReplicaAxis(1, bound=False))
    # The type leaves None out, because type checkers would refuse `ctx.all_reduce` in every step.
    return frame.replica  # type: ignore[return-value]

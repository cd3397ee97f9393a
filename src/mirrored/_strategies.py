"""The strategies, which differ only in their devices, and which of them is current."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax

from . import _context, _env, _mesh
from ._collectives import ReplicaAxis
from ._context import ReplicaContext
from ._strategy import Strategy

_logger = logging.getLogger("mirrored")


class MirroredStrategy(Strategy):
    """Train on several devices of one machine, with one copy of every variable on each.

    Args:
        devices: `jax.Device` objects or names such as `"gpu:0"`, `"/gpu:0"`, `"GPU:0"`, `"cpu:3"`, one for
            each replica. None: all local accelerators, or the CPU devices when there are none. Asking for
            `["cpu:0", ..., "cpu:7"]` before JAX has started makes eight virtual CPU devices.
        cross_device_ops: None or `"auto"`: XLA chooses the collective for the devices. TensorFlow's classes
            have no counterpart yet.

    Raises:
        DeviceError: (a ValueError) for a device that does not exist, is named twice, or an empty list.
        TypeError: for an entry that is neither a name nor a `jax.Device`.
        ValueError: for another `cross_device_ops`.

    >>> strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """

    def __init__(self, devices: Sequence[str | jax.Device] | None = None, *, cross_device_ops: Any = None) -> None:
        if cross_device_ops is not None and not (isinstance(cross_device_ops, str) and cross_device_ops == "auto"):
            raise ValueError(
                f"cross_device_ops is {cross_device_ops!r}; expected None or 'auto'. XLA chooses the collective for the devices "
                "(NCCL between GPUs); leave the argument out."
            )
        if _env.TF_CONFIG.get() is not None:
            _logger.info("TF_CONFIG is set, but MirroredStrategy is for one machine and ignores it")
        super().__init__(_mesh.make_mesh(_mesh.resolve_devices(devices)))


class OneDeviceStrategy(Strategy):
    """Run on one device: the same program and the same types as on several.

    Args:
        device: a `jax.Device` or a name such as `"gpu:0"`. None: the first accelerator, or the CPU.

    Raises:
        DeviceError: (a ValueError) for a device that does not exist.
        TypeError: for anything else, such as a list.

    >>> mr.OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """

    def __init__(self, device: str | jax.Device | None = None) -> None:
        if device is not None and not isinstance(device, str | jax.Device):
            raise TypeError(f"device is {device!r}; expected one device, for example 'gpu:0' or jax.devices()[0].")
        devices = None if device is None else [device]
        super().__init__(_mesh.make_mesh(_mesh.resolve_devices(devices)[:1]))


class DefaultStrategy(Strategy):
    """Be the strategy outside every scope: one replica on the first device."""


@functools.cache
def _default_strategy() -> DefaultStrategy:
    return DefaultStrategy(_mesh.default_mesh())


def get_strategy() -> Strategy:
    """Return the strategy of the innermost scope or step; outside of all, the default one with one replica.

    >>> mr.get_strategy().num_replicas_in_sync
    1
    >>> with strategy.scope():
    ...     mr.get_strategy().num_replicas_in_sync
    2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/get_strategy
    """
    frame = _context.current()
    return frame.strategy if frame is not None and frame.strategy is not None else _default_strategy()


def has_strategy() -> bool:
    """Tell whether this is inside a strategy's scope or step.

    >>> mr.has_strategy()
    False

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/has_strategy
    """
    frame = _context.current()
    return frame is not None and frame.strategy is not None


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context inside a step, and None in cross-replica context.

    Outside every scope it is that of the default strategy: one replica, number 0.

    >>> strategy.run(lambda: mr.get_replica_context().num_replicas_in_sync)
    2
    >>> with strategy.scope():
    ...     print(mr.get_replica_context())
    None

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/get_replica_context
    """
    frame = _context.current()
    if frame is None or (frame.strategy is None and frame.axis is None):
        return ReplicaContext(_default_strategy(), ReplicaAxis(1, bound=False))
    return frame.replica

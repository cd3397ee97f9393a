"""A strategy's `cross_device_ops`: TensorFlow's names, refused where they make no sense on its devices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from .._options import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
from .._replicas.mesh import ReplicaMesh

#: The options with the function that takes the place of sums; None where the user has given a strategy none.
ops_of: Callable[[Any], ReductionToOneDevice | None] = operator.attrgetter("_ops")

_KINDS = (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice)


def parse_ops(given: object) -> CrossDeviceOps | None:
    """Return the user's `cross_device_ops`, None for "auto"; refuse anything else, such as a class that is not called."""
    if given is None or isinstance(given, _KINDS):
        return given
    if isinstance(given, str) and given == "auto":
        return None
    if isinstance(given, type) and given in _KINDS:
        name = given.__name__
        raise TypeError(f"cross_device_ops is the class mr.{name}; expected an object. Write cross_device_ops=mr.{name}().")
    error = ValueError if isinstance(given, str) else TypeError
    raise error(
        f"cross_device_ops is {given!r}; expected None or 'auto', with which XLA chooses the collective for the devices, or "
        "mr.NcclAllReduce(), mr.HierarchicalCopyAllReduce() or mr.ReductionToOneDevice()."
    )


def select_accumulation(ops: CrossDeviceOps | None, mesh: ReplicaMesh) -> ReductionToOneDevice | None:
    """Return the options if they have a function in place of sums, else None: XLA chooses. Refuse what the devices cannot do."""
    if isinstance(ops, NcclAllReduce) and mesh.devices[0].platform == "cpu":
        raise ValueError(
            f"cross_device_ops is {ops}, which connects GPUs, but the devices are {mesh}. Leave the argument out: XLA "
            "chooses the collective for the devices."
        )
    return ops if isinstance(ops, ReductionToOneDevice) and ops.accumulation_fn is not None else None

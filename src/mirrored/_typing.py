"""Type aliases that several wings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

#: The name of the only mesh axis. Inside `strategy.run`, every `jax.lax` collective takes it.
REPLICA_AXIS = "replica"
#: With this the axis' name begins where each device has several replicas: a collective over the devices has it.
DEVICE_AXIS = "device_of_"

#: A nest of dicts, lists, tuples and registered classes.
PyTree: TypeAlias = Any

#: An operand for JAX: an array on devices or on the host, or a Python number.
ArrayLike: TypeAlias = jax.Array | np.ndarray | np.generic | bool | int | float | complex

#: The shape of one replica's value, without the replica axis.
Shape: TypeAlias = tuple[int, ...]

UserFunction: TypeAlias = Callable[..., Any]

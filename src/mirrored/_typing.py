"""Type aliases that several wings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

#: The name of the only mesh axis. Inside `strategy.run` it works with every `jax.lax` collective.
REPLICA_AXIS = "replica"

#: A nest of dicts, lists, tuples and registered classes.
PyTree: TypeAlias = Any

#: An operand of JAX: an array on devices or on the host, or a Python number.
ArrayLike: TypeAlias = jax.Array | np.ndarray | np.generic | bool | int | float | complex

#: The shape of one replica's value; no leading replica axis.
Shape: TypeAlias = tuple[int, ...]

UserFunction: TypeAlias = Callable[..., Any]

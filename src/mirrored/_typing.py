"""The words of the house: aliases that several floors share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

#: The name of the only mesh axis. Inside `strategy.run` it works with every `jax.lax` collective.
REPLICA_AXIS = "replica"

#: A nest of dicts, lists, tuples and registered classes; the leaves are described where it is used.
PyTree: TypeAlias = Any

#: What JAX computes with: an array on devices, one on the host, or a Python number.
ArrayLike: TypeAlias = jax.Array | np.ndarray | np.generic | bool | int | float | complex

#: The shape of one replica's value; no leading replica axis.
Shape: TypeAlias = tuple[int, ...]

UserFunction: TypeAlias = Callable[..., Any]

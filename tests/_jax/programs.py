"""Small traced programs, for the tests of what we know about JAX."""

import jax
import numpy as np

from mirrored._jax import jaxprs
from mirrored._typing import REPLICA_AXIS as AXIS

VECTOR = np.ones(3, "float32")


def equations(function, *arguments):
    """Return the equations of a function of per-replica vectors, also those inside others."""
    closed = jax.make_jaxpr(function, axis_env=[(AXIS, 3)])(*(arguments or (VECTOR,)))
    return list(jaxprs.all_equations(closed.jaxpr))


def only(name, function, *arguments):
    [equation] = [equation for equation in equations(function, *arguments) if equation.primitive.name == name]
    return equation

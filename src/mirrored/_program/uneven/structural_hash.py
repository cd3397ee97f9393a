"""When do two equations, or two constants, of different traces mean the same?"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Literal
from ..._jax.primitives import CUSTOM_DERIVATIVE, SAID_TWICE

#: Device arrays up to this many bytes are compared by content, larger ones, which are not worth the transfer, by identity.
_COMPARED_BYTES = 1 << 20


def equation_key(equation: Equation) -> Any:
    """Return a hashable that is equal for equations that compute the same from equal operands."""
    name, params = equation.primitive.name, equation.params
    if name in CUSTOM_DERIVATIVE:
        params = {"call_jaxpr": params["call_jaxpr"]}
    compared = sorted([key for key in params if (name, key) not in SAID_TWICE])
    return (name, tuple([(key, param_key(params[key])) for key in compared]))


def param_key(value: Any) -> Any:
    """Return a hashable that is equal for parameters that mean the same; in doubt, only for one object."""
    if isinstance(value, ClosedJaxpr):
        return (_jaxpr_key(value.jaxpr), tuple(content_key(c, jax.typeof(c)) for c in value.consts))
    if isinstance(value, Jaxpr):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(map(param_key, value)))
    if isinstance(value, np.ndarray | np.generic):
        return content_key(value, jax.typeof(value))
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 and -0.0 differ
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value), value)


def _jaxpr_key(jaxpr: Jaxpr) -> Any:
    numbers: dict[Any, int] = {}

    def name(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return content_key(atom.val, atom.aval)
        return (numbers.setdefault(atom, len(numbers)), str(atom.aval))

    first = tuple(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (equation_key(equation), tuple(map(name, equation.invars)), tuple(map(name, equation.outvars))) for equation in jaxpr.eqns
    )
    return (len(jaxpr.constvars), first, equations, tuple(map(name, jaxpr.outvars)))


def content_key(content: Any, aval: Any) -> Any:
    """Return a hashable that is equal for constants of equal type and bits."""
    if isinstance(content, jax.Array):
        is_here = not isinstance(content, jax.core.Tracer) and content.is_fully_addressable
        if not is_here or content.nbytes > _COMPARED_BYTES:
            return ("array", id(content))
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        content = jax.random.key_data(content)
    array = np.asarray(content)
    return ("content", str(aval), array.dtype, array.shape, hashlib.sha256(array.tobytes()).digest())

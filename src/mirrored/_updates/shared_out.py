"""The sharded update of variables: each replica updates its part of them, and holds that part of the optimizer's state.

Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training" (https://arxiv.org/abs/2004.13336);
the first stage of ZeRO, Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import tracing, user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import ReduceOp
from .._replicas import parts
from .._replicas.collectives import ReplicaAxis, all_reduce
from .._variables import access
from .._variables.sharded import ShardedVariable
from .._variables.variable import Variable, spec_of
from .partwise import OwnPart, Partwise, Value

#: Computes the new values and the new state from gradients, values and state.
Compute = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]


def state_variable(value: jax.Array, name: str) -> Variable:
    """Make a variable for a leaf of the state: sharded, unless it is a scalar, a random key or an empty array."""
    is_divided = _is_divided(value) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return ShardedVariable(value, name=name) if is_divided else Variable(value, name=name, trainable=False)


def _is_divided(value: jax.Array) -> bool:
    """Tell whether the replicas divide an array into parts."""
    return value.ndim > 0 and value.size > 0


def check_variables(variables: Sequence[Variable]) -> None:
    """Refuse complex variables, whose gradients XLA on CPU cannot scatter, and several replicas on a device."""
    if spec_of(variables[0]).mesh.per_device > 1:
        raise ValueError(
            f"shard_state=True on {spec_of(variables[0]).mesh}: replicas of one device share one copy of the state already. "
            "Leave shard_state=True out, or num_replicas out of mr.MirroredStrategy."
        )
    for variable in variables:
        if jnp.issubdtype(variable.dtype, jnp.complexfloating):
            raise TypeError(
                f"variable {variable.name!r} has dtype {variable.dtype}; mr.Optimizer(..., shard_state=True) takes real numbers "
                "only, which all backends add up and scatter. Leave shard_state=True out, or keep the real and the imaginary "
                "part in two variables."
            )


def combined(op: ReduceOp, gradients: Sequence[jax.Array], axis: ReplicaAxis) -> list[Any]:
    """Combine gradients over the replicas: each replica gets its part of a divided gradient, and all of any other."""
    if axis.ops is not None:
        raise ValueError(
            f"mr.Optimizer(..., shard_state=True) adds gradients up where they are shared out, so {axis.ops} has no place for "
            "its accumulation_fn. Leave shard_state=True out, or accumulation_fn."
        )
    divided = iter(parts.reduce_scatter(op, [gradient for gradient in gradients if _is_divided(gradient)], axis))
    whole = iter(all_reduce(op, [gradient for gradient in gradients if not _is_divided(gradient)], axis))
    return [OwnPart(next(divided), g.shape) if _is_divided(g) else next(whole) for g in gradients]


def update(
    compute: Compute, gradients: Sequence[Any], variables: Sequence[Variable], state: Sequence[Variable], axis: ReplicaAxis
) -> tuple[list[Any], list[Any]]:
    """Return the variables' new values and the new state; for sharded variables, this replica's parts.

    The update is traced with whole arrays, so that it may ask for shapes, and runs on parts.
    """
    where = user_code.user_line()
    names = {id(gradient): variable.name for gradient, variable in zip(gradients, variables, strict=True)}
    unknown = variables[0].name + (" (or another that the optimizer trains)" if len(variables) > 1 else "")

    def same(value: jax.Array) -> jax.Array:
        return mark(value, Mark(Purpose.ASSIGN, names.get(id(value), unknown), where))

    held = [OwnPart(access.load(v), v.shape) if isinstance(v, ShardedVariable) else v.value for v in state]
    arguments = [*gradients, *(variable.value for variable in variables), *held]
    first, end = len(gradients), len(gradients) + len(variables)

    def flat(*arrays: jax.Array) -> list[Any]:
        changed, kept = compute(list(arrays[:first]), list(arrays[first:end]), list(arrays[end:]))
        return [*changed, *kept]

    partwise = Partwise(axis, same)
    results = partwise.run_closed(tracing.trace(flat, list(map(_aval, arguments)), axis, compute), arguments)
    new_values, new_state = results[: len(variables)], results[len(variables) :]
    divided = [value for value in new_values if isinstance(value, OwnPart)]
    wholes = iter(parts.all_gather_parts([v.array for v in divided], [v.shape for v in divided], axis))  # small ones together
    return [next(wholes) if isinstance(value, OwnPart) else partwise.whole(value) for value in new_values], [
        partwise.part(new, v.shape) if isinstance(v, ShardedVariable) else partwise.whole(new)
        for v, new in zip(state, new_state, strict=True)
    ]


def store(variable: Variable, value: jax.Array) -> None:
    """Assign a value that `update` returned to its variable."""
    if isinstance(variable, ShardedVariable):
        access.store(variable, value.astype(variable.dtype))
    else:
        variable.assign(value)


def _aval(value: Value) -> jax.ShapeDtypeStruct:
    """Return a value's whole shape, and its dtype."""
    aval = jax.typeof(value.array if isinstance(value, OwnPart) else value)
    return jax.ShapeDtypeStruct(value.shape if isinstance(value, OwnPart) else aval.shape, aval.dtype, weak_type=aval.weak_type)

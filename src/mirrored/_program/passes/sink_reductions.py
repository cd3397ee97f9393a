"""Sums over the replicas of a device, sunk to where the values were made.

A gradient of a weight is a product over the rows of a batch. Made for each replica and then added up, it is written R times.
Its sum over the replicas is one product over the rows of all: the replicas' axis is summed over like the rows'. So a sum
sinks through what is linear, down to a product, a convolution, a scatter or another sum, and is made there. XLA removes the
products of single replicas, which nobody uses.

If a value is in bfloat16 and its sum in float32, the product of all rows is rounded once, as on one device, instead of once for
each replica. Other operations that round still do so on each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import primitives, tracing
from ..uneven.nodes import Node, Value


def _add_rows(stack: jax.Array) -> jax.Array:
    """Add up the rows of an array by halves: `jnp.sum(axis=0)` is ten times slower on CPU."""
    rest = None
    while (count := stack.shape[0]) > 1:
        if count % 2:
            last = stack[-1]
            rest = last if rest is None else rest + last
        stack = stack[: count // 2] + stack[count // 2 : count - count % 2]
    return stack[0] if rest is None else stack[0] + rest


def sum_over_replicas(value: Value, read: Callable[[Value], Any], totals: dict[Value, jax.Array], dtype: np.dtype) -> jax.Array:
    """Return the sum of a per-replica value over the replicas of a device.

    `read` returns a value's array, `[v, ...]` for a per-replica value; None before it is computed. `totals` are sums that were
    made before. `dtype` is the sum's: the value's own dtype, or the wider one to which the program converts the value.
    """
    if (total := _sunk(value, read, totals, dtype)) is not None:
        return total
    return _add_rows(read(value).astype(dtype))


def _sunk(value: Value, read: Callable[[Value], Any], totals: dict[Value, jax.Array], dtype: np.dtype) -> jax.Array | None:
    """Return a value's sum over the replicas, made from sums of its operands; None if the value itself must be added up."""
    node = value.maker
    if value in totals and totals[value].dtype.itemsize >= dtype.itemsize:
        return totals[value].astype(dtype)
    if node is None or not node.is_own or any(read(part) is None for part in node.inputs):
        return None
    operands, name, position = list(map(read, node.inputs)), node.equation.primitive.name, node.outputs.index(value)
    if (rule := _rule_of(node, dtype)) is not None:
        return rule(node, operands, dtype).astype(dtype)
    if name in primitives.ONE_TO_ONE:
        if _sunk(node.inputs[position], read, totals, dtype) is None:
            return None
        held = [k for k, part in enumerate(node.inputs) if part.is_own and is_of_floats(part)]
        types = [jnp.promote_types(dtype, wide_type(node.inputs[k])) for k in held]
        sums = [sum_over_replicas(node.inputs[k], read, totals, wide) for k, wide in zip(held, types, strict=True)]
        totals.update(zip([node.outputs[k] for k in held], jax.lax.optimization_barrier(sums), strict=True))
        return totals[value].astype(dtype)
    if not _sinks(node, is_wider=dtype != value.aval.dtype):
        return None
    for k, part in enumerate(node.inputs):
        wide = max(part.aval.dtype, dtype, key=lambda kind: kind.itemsize)
        if part.is_own:
            operands[k] = sum_over_replicas(part, read, totals, wide)
        elif name in primitives.MOVES | primitives.DERIVATIVE_SUMS:
            operands[k] = jnp.asarray(operands[k], wide) * jnp.asarray(read(value).shape[0], wide)
    if name in primitives.CONVERSIONS:
        return operands[0].astype(dtype)
    return tracing.bind(node.equation, operands)[position]


def wide_type(value: Value) -> np.dtype:
    """Return the dtype of a sum whose use is not known: one with 32 bits or more."""
    return jnp.promote_types(value.aval.dtype, jnp.float32)


def is_of_floats(*values: Value) -> bool:
    return all(jnp.issubdtype(value.aval.dtype, jnp.floating) for value in values)


def _sinks(node: Node, is_wider: bool) -> bool:
    """Tell whether a node is linear, so that it can run on sums of its operands; on wider sums only if it does not round."""
    name, are_own = node.equation.primitive.name, [value.is_own for value in node.inputs]
    avals: list[Any] = [atom.aval for atom in (*node.equation.invars, *node.equation.outvars)]
    if not is_of_floats(*node.inputs, *node.outputs):
        return False  # the sum of integers may be made in another type
    if name in primitives.MOVES | primitives.DERIVATIVE_SUMS | primitives.AXIS_SUMS:
        return True
    if is_wider:
        return False
    if name in primitives.ADDITIVE:
        return all(are_own)
    if name in primitives.CONVERSIONS:  # between float16 and bfloat16, neither has the other's numbers
        own_dtype, dtype = (aval.dtype for aval in avals)
        return jnp.promote_types(own_dtype, dtype) in (own_dtype, dtype)
    if name in primitives.DIVISIONS or (name in primitives.PADS and _is_zero(node.inputs[1])):
        return are_own == [True, False]
    return name in primitives.BILINEAR and sum(are_own) == 1 and len({aval.dtype for aval in avals}) == 1


def _rule_of(node: Node, dtype: np.dtype) -> Callable[[Node, Sequence[jax.Array], np.dtype], jax.Array] | None:
    """Return the function that makes the sum over the replicas of a product or sum, given the operands of all replicas."""
    name, are_own, params = node.equation.primitive.name, [value.is_own for value in node.inputs], node.equation.params
    if not is_of_floats(*node.outputs):
        return None
    if name in primitives.DOT_PRODUCTS and all(are_own) and params.get("out_sharding") is None:
        return _dot
    if name in primitives.CONVOLUTIONS and all(are_own) and params["feature_group_count"] == 1 and not _overflows(node, dtype):
        return _convolution
    if name in primitives.SCATTER_SUMS and are_own[2] and _is_zero(node.inputs[0]):
        return None if params["dimension_numbers"].operand_batching_dims else _scatter
    if name in primitives.AXIS_SUMS and node.inputs[0].aval.size > node.outputs[0].aval.size:  # else only the shape changes
        return _reduction
    return None


def _overflows(node: Node, dtype: np.dtype) -> bool:
    """Tell whether a sum over the replicas may overflow where no replica's value does, as in float16."""
    return bool(jnp.finfo(node.outputs[0].aval.dtype).maxexp < jnp.finfo(dtype).maxexp)


def _is_zero(value: Value) -> bool:
    if value.maker is not None and value.maker.equation.primitive.name in primitives.BROADCASTS:
        [value, *_] = value.maker.inputs
    content = value.content
    return content is not None and not isinstance(content, jax.Array) and not np.any(content)  # the number of a literal


def _dot(node: Node, operands: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    params = dict(node.equation.params)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    if _overflows(node, dtype):
        params["preferred_element_type"] = dtype
    if (0, 0) in zip(left, right, strict=True):  # the rows of all replicas lie together: XLA need not transpose them
        operands = [merge(operand, 0) for operand in operands]
    else:
        contracted = ((0, *_shift(left)), (0, *_shift(right)))
        params["dimension_numbers"] = (contracted, (_shift(left_batch), _shift(right_batch)))
    return tracing.bind(node.equation.replace(params=params), operands)[0]


def _convolution(node: Node, operands: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """Convolve with the replicas as further input features, which are summed over."""
    numbers = node.equation.params["dimension_numbers"]
    features = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    return tracing.bind(node.equation, list(map(merge, operands, features)))[0]


def merge(stack: jax.Array, axis: int) -> jax.Array:
    moved = jnp.moveaxis(stack, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])


def _scatter(node: Node, operands: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    zeros, indices, updates = operands
    zeros, updates = jnp.asarray(zeros, dtype), updates.astype(dtype)
    if not node.inputs[1].is_own:
        indices = jnp.broadcast_to(indices, (updates.shape[0], *indices.shape))
    numbers = node.equation.params["dimension_numbers"]
    shifted = jax.lax.ScatterDimensionNumbers(
        _shift(numbers.update_window_dims), numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    )
    return jax.lax.scatter_add(zeros, indices, updates, shifted, mode=node.equation.params["mode"])


def _reduction(node: Node, operands: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    [stack] = operands
    return jnp.sum(stack, axis=(0, *_shift(node.equation.params["axes"])), dtype=dtype)


def _shift(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)

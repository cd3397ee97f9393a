"""Sums over the replicas of a device, sunk to where the values were made.

A gradient of a weight is a product over the rows of a batch. Made for each replica and then added up, it is written R times.
Its sum over the replicas is one product over the rows of all: the replicas' axis is summed over like the rows'. So a sum
sinks through what is linear, down to a product, a convolution, a scatter or another sum, and is made there. XLA removes the
products of single replicas, which nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import jaxprs, tracing
from .._jax.primitives import (
    AXIS_SUMS,
    BILINEAR,
    BROADCASTS,
    CONVERSIONS,
    CONVOLUTIONS,
    DIVISIONS,
    DOT_PRODUCTS,
    LINEAR,
    SCATTER_SUMS,
)
from .uneven.nodes import Node, Value


def _add_rows(stack: jax.Array) -> jax.Array:
    """Add up the rows of an array by halves: `jnp.sum(axis=0)` is ten times slower on CPU."""
    rest = None
    while (count := stack.shape[0]) > 1:
        if count % 2:
            last = stack[-1]
            rest = last if rest is None else rest + last
        stack = stack[: count // 2] + stack[count // 2 : count - count % 2]
    return stack[0] if rest is None else stack[0] + rest


def sum_over_replicas(value: Value, read: Callable[[Value], Any]) -> jax.Array:
    """Return the sum of a per-replica value over the replicas of a device.

    `read` returns the array of a value, `[v, ...]` if it is one for each replica; None while it is unknown.
    """
    node = value.maker
    if node is None or not node.is_own:
        return _add_rows(read(value))
    operands = list(map(read, node.inputs))
    if any(operand is None for operand in operands):
        return _add_rows(read(value))
    if (rule := _rule_of(node)) is not None:
        return rule(node, operands)
    if not _is_linear(node):
        return _add_rows(read(value))
    for position, part in enumerate(node.inputs):
        if part.is_own:  # a value of an earlier level was computed for each replica anyway
            sinks = part.stage == value.stage
            operands[position] = sum_over_replicas(part, read) if sinks else _add_rows(operands[position])
    return tracing.bind(node.equation, operands)[0]


def _is_linear(node: Node) -> bool:
    name, own = node.equation.primitive.name, [value.is_own for value in node.inputs]
    avals: list[Any] = [atom.aval for atom in (*node.equation.invars, *node.equation.outvars)]
    if not _is_of_floats(avals):
        return False  # the sum of integers may be made in another type
    if name in LINEAR:
        return all(own)
    if name in CONVERSIONS:  # a sum in a narrower type would be less exact
        return avals[0].dtype.itemsize >= avals[1].dtype.itemsize
    if name in DIVISIONS:
        return own == [True, False]
    return name in BILINEAR and sum(own) == 1


def _rule_of(node: Node) -> Callable[[Node, Sequence[jax.Array]], jax.Array] | None:
    """Return the function that makes the sum over the replicas of a product or sum, given the operands of all replicas."""
    name, own, params = node.equation.primitive.name, [value.is_own for value in node.inputs], node.equation.params
    if not _is_of_floats([variable.aval for variable in node.equation.outvars]):
        return None
    if name in DOT_PRODUCTS and all(own) and params.get("out_sharding") is None:
        return _dot
    if name in CONVOLUTIONS and all(own) and params["feature_group_count"] == params["batch_group_count"] == 1:
        return _convolution
    if name in SCATTER_SUMS and own[2] and _is_zero(node.inputs[0]) and not params["dimension_numbers"].operand_batching_dims:
        return _scatter
    return _reduction if name in AXIS_SUMS else None


def _is_of_floats(avals: Sequence[Any]) -> bool:
    return all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)


def _is_zero(value: Value) -> bool:
    maker = value.maker
    if value.is_own or maker is None or maker.equation.primitive.name not in BROADCASTS:
        return False
    atom = maker.equation.invars[0]
    return isinstance(atom, jaxprs.Literal) and bool(np.asarray(atom.val) == 0)


def _dot(node: Node, operands: Sequence[jax.Array]) -> jax.Array:
    (left, right), (left_batch, right_batch) = node.equation.params["dimension_numbers"]
    if (0, 0) in zip(left, right, strict=True):  # the rows of all replicas lie together: XLA need not transpose them
        return tracing.bind(node.equation, [_merge(operand, 0) for operand in operands])[0]
    contracted = ((0, *_shift(left)), (0, *_shift(right)))
    numbers = (contracted, (_shift(left_batch), _shift(right_batch)))
    params = {**node.equation.params, "dimension_numbers": numbers}
    return tracing.bind(node.equation.replace(params=params), operands)[0]


def _convolution(node: Node, operands: Sequence[jax.Array]) -> jax.Array:
    """Convolve with the replicas as further input features, which are summed over."""
    numbers = node.equation.params["dimension_numbers"]
    features = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    return tracing.bind(node.equation, list(map(_merge, operands, features)))[0]


def _merge(stack: jax.Array, axis: int) -> jax.Array:
    moved = jnp.moveaxis(stack, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])


def _scatter(node: Node, operands: Sequence[jax.Array]) -> jax.Array:
    zeros, indices, updates = operands
    if not node.inputs[1].is_own:
        indices = jnp.broadcast_to(indices, (updates.shape[0], *indices.shape))
    numbers = node.equation.params["dimension_numbers"]
    shifted = jax.lax.ScatterDimensionNumbers(
        _shift(numbers.update_window_dims), numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    )
    return jax.lax.scatter_add(zeros, indices, updates, shifted, mode=node.equation.params["mode"])


def _reduction(node: Node, operands: Sequence[jax.Array]) -> jax.Array:
    [stack] = operands
    return jnp.sum(stack, axis=(0, *_shift(node.equation.params["axes"])), dtype=stack.dtype)


def _shift(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)

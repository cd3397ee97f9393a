"""Sums over the replicas of a device, pushed back to where the values were made.

A gradient of a weight is a product over the rows of a batch. Made for each replica and then added up, it is written R times.
Its sum over the replicas is one product over the rows of all: the replicas' axis is summed over like the rows'. So a sum is
pushed back through what is linear, up to a product, a convolution, a scatter or another sum, and is made there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import jaxprs, tracing
from .._jax.primitives import BILINEAR, LINEAR
from .levels import Kind, Operation, Quantity


def sum_of_rows(stack: jax.Array) -> jax.Array:
    """Add up the rows of an array by halves: `jnp.sum(axis=0)` is ten times slower on CPU."""
    rest = None
    while (count := stack.shape[0]) > 1:
        if count % 2:
            last = stack[-1]
            rest = last if rest is None else rest + last
        stack = stack[: count // 2] + stack[count // 2 : count - count % 2]
    return stack[0] if rest is None else stack[0] + rest


@dataclasses.dataclass(frozen=True)
class Push:
    """How the sum over the replicas of a value is made.

    Attributes:
        value: which.
        node: what makes it, to be run on sums; None when the replicas' values are added up as they are.
        parts: for each operand of the node, how its sum is made; None for an operand that is the same on all replicas, and of
            a product, which takes the operands of all replicas.
    """

    value: Quantity
    node: Operation | None = None
    parts: tuple[Push | None, ...] = ()

    @property
    def is_product(self) -> bool:
        return self.node is not None and not any(self.parts)

    def operands(self) -> Iterator[Quantity]:
        """Yield the values that must be known for all replicas."""
        if self.node is None:
            yield self.value
        elif self.is_product:
            yield from (value for value in self.node.inputs if value.is_own)
        for part in self.parts:
            if part is not None:
                yield from part.operands()


def plan_sum(value: Quantity, nodes: Collection[Operation]) -> Push:
    """Find how the sum of a value is made, among nodes that each replica runs."""
    node = value.maker
    if node is None or node not in nodes or node.kind is not Kind.OWN:
        return Push(value)
    if _is_product(node):
        return Push(value, node, (None,) * len(node.inputs))
    if _is_linear(node):
        return Push(value, node, tuple(plan_sum(operand, nodes) if operand.is_own else None for operand in node.inputs))
    return Push(value)


def _is_linear(node: Operation) -> bool:
    name, own = node.equation.primitive.name, [value.is_own for value in node.inputs]
    dtypes: list[Any] = [atom.aval.dtype for atom in (*node.equation.invars, *node.equation.outvars)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return False  # the sum of integers may be made in another type
    if name in LINEAR:
        return all(own)
    if name == "convert_element_type":  # a sum in a narrower type would be less exact
        return dtypes[0].itemsize >= dtypes[1].itemsize
    if name == "div":
        return own == [True, False]
    return name in BILINEAR and sum(own) == 1


def _is_product(node: Operation) -> bool:
    name, own, params = node.equation.primitive.name, [value.is_own for value in node.inputs], node.equation.params
    if not jnp.issubdtype(node.equation.outvars[0].aval.dtype, jnp.floating):
        return False
    if name == "dot_general":
        return all(own) and params.get("out_sharding") is None
    if name == "conv_general_dilated":
        return all(own) and params["feature_group_count"] == params["batch_group_count"] == 1
    if name in ("scatter-add", "scatter_add"):
        return own[2] and _is_zero(node.inputs[0]) and not params["dimension_numbers"].operand_batching_dims
    return name == "reduce_sum"


def _is_zero(value: Quantity) -> bool:
    maker = value.maker
    if value.is_own or maker is None or maker.equation.primitive.name != "broadcast_in_dim":
        return False
    atom = maker.equation.invars[0]
    return isinstance(atom, jaxprs.Literal) and bool(np.asarray(atom.val) == 0)


def compute(way: Push, read: Callable[[Quantity], Any]) -> Any:
    """Make the sum over the replicas of a device.

    Args:
        way: of `plan_sum`.
        read: returns a value: of all replicas, `[v, ...]`, if each has its own.
    """
    if way.node is None:
        return sum_of_rows(read(way.value))
    equation = way.node.equation
    if way.is_product:
        return _PRODUCTS[equation.primitive.name](equation, way.node.inputs, [read(value) for value in way.node.inputs])
    operands = [
        read(value) if part is None else compute(part, read) for part, value in zip(way.parts, way.node.inputs, strict=True)
    ]
    return tracing.bind(equation, operands)[0]


def _dot(equation: Any, _: Any, operands: Sequence[jax.Array]) -> jax.Array:
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    options = {name: equation.params[name] for name in ("precision", "preferred_element_type")}
    if (0, 0) in zip(left, right, strict=True):  # the rows of all replicas lie together: XLA need not transpose them
        merged = [_merged(operand, 0) for operand in operands]
        return jax.lax.dot_general(merged[0], merged[1], equation.params["dimension_numbers"], **options)
    contracted = ((0, *_shifted(left)), (0, *_shifted(right)))
    numbers = (contracted, (_shifted(left_batch), _shifted(right_batch)))
    return jax.lax.dot_general(operands[0], operands[1], numbers, **options)


def _convolution(equation: Any, _: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """Convolve with the replicas as further input features, which are summed over."""
    params = equation.params
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "precision")
    options = {name: params[name] for name in (*names, "preferred_element_type")}
    numbers = params["dimension_numbers"]
    left, right = _merged(operands[0], numbers.lhs_spec[1]), _merged(operands[1], numbers.rhs_spec[1])
    return jax.lax.conv_general_dilated(left, right, **options)


def _merged(stack: jax.Array, axis: int) -> jax.Array:
    moved = jnp.moveaxis(stack, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])


def _scatter(equation: Any, inputs: Sequence[Quantity], operands: Sequence[jax.Array]) -> jax.Array:
    zeros, indices, updates = operands
    if not inputs[1].is_own:
        indices = jnp.broadcast_to(indices, (updates.shape[0], *indices.shape))
    numbers = equation.params["dimension_numbers"]
    shifted = jax.lax.ScatterDimensionNumbers(
        _shifted(numbers.update_window_dims), numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    )
    return jax.lax.scatter_add(zeros, indices, updates, shifted, mode=equation.params["mode"])


def _reduction(equation: Any, _: Any, operands: Sequence[jax.Array]) -> jax.Array:
    [stack] = operands
    return jnp.sum(stack, axis=(0, *_shifted(equation.params["axes"])), dtype=stack.dtype)


def _shifted(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)


_PRODUCTS: dict[str, Callable[[Any, Sequence[Quantity], Sequence[jax.Array]], jax.Array]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "reduce_sum": _reduction,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
}

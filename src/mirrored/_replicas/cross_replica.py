"""The operations of cross-replica code on values with a replica axis: reduce, gather, split.

These are functions of the stacked array `[R, ...]`. Outside a trace they run as one compiled program, in which XLA's partitioner
inserts the collectives; in `mr.function` and `merge_call` they are traced in place. Small values of a tree travel together, with
the same bits as alone: each element's additions keep their order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._errors import UnevenReplicasError
from .._jax import tracing
from .._options import ReduceOp, ReductionToOneDevice, VariableAggregation
from .._typing import Shape
from .._workers import joint_programs
from . import in_flight
from .collectives import accumulate, bits_of, groups_of, join_rows, move_packed
from .per_replica import PerReplica, uneven_shapes
from .planned import is_for_plan, shapes_of
from .platforms import platform_of
from .reductions import REDUCTIONS, Arrays, Axes, Reduction, accumulator_dtype, padded, run_with_derivative

#: The most arrays in one buffer. More of them compile longer and run no faster (benchmarks/all_reduce.py).
MAX_ARRAYS_TOGETHER = 25


def reduce_stack(
    stack: jax.Array, op: ReduceOp, axes: Axes, shapes: tuple[Shape, ...] | None, ops: ReductionToOneDevice | None = None
) -> jax.Array:
    """Reduce the real rows over `axes` of each replica's value, then over the replicas, by the user's function if any."""
    reduction, own_axes = REDUCTIONS[op], tuple(axis + 1 for axis in axes)
    if ops is None or not reduction.adds:
        run = functools.partial(_over_stack, shapes, _count_of(stack, axes, shapes))
        return run_with_derivative(run, reduction, [stack], [(0, *own_axes)])[0]
    [part] = reduction.parts(stack, own_axes, 0, shapes)
    return reduction.finish([accumulate(ops, part)], _count_of(stack, axes, shapes), stack.dtype)


def _over_stack(
    shapes: tuple[Shape, ...] | None, count: int, reduction: Reduction, stacks: Arrays, axes: Sequence[Axes]
) -> list[jax.Array]:
    parts = [reduction.parts(stack, own_axes, count, shapes) for stack, own_axes in zip(stacks, axes, strict=True)]
    return [reduction.finish(of_stack, count, stack.dtype) for of_stack, stack in zip(parts, stacks, strict=True)]


def _count_of(stack: jax.Array, axes: Axes, shapes: tuple[Shape, ...] | None) -> int:
    """Return the number of elements that each element of the result combines."""
    true_shapes = shapes or (stack.shape[1:],) * stack.shape[0]
    return sum(math.prod(shape[a] for a in axes) for shape in true_shapes)


def reduce_mirrored(value: jax.Array, op: ReduceOp, axes: Axes, num_replicas: int, ops: ReductionToOneDevice | None) -> jax.Array:
    """Reduce a value that is the same on each replica: the SUM is R times the value, all others the value, bit for bit."""
    reduction = REDUCTIONS[op]
    if ops is not None and reduction.adds:
        return reduce_stack(broadcast_stack(value, num_replicas), op, axes, None, ops)
    run = functools.partial(_over_stack, None, math.prod(value.shape[a] for a in axes))
    return reduction.repeated(run_with_derivative(run, reduction, [value], [axes])[0], num_replicas)


def gather_stack(stack: jax.Array, axis: int, shapes: tuple[Shape, ...] | None, whole: NamedSharding | None) -> jax.Array:
    """Concatenate the replicas' values along `axis`, in replica order; with `whole`, bring the stack to all devices first."""
    if whole is not None:  # XLA takes a row out of a split array by adding zeros, which turns -0.0 into 0.0
        stack = jax.lax.with_sharding_constraint(stack, whole)
    true_shapes = shapes or (stack.shape[1:],) * stack.shape[0]
    return join_rows(stack, axis, [shape[axis] for shape in true_shapes])


def gather_mirrored(value: jax.Array, axis: int, num_replicas: int) -> jax.Array:
    """Concatenate a value that is the same on each replica."""
    return jnp.concatenate([value] * num_replicas, axis=axis)


def aggregate_stack(stack: jax.Array, mode: VariableAggregation) -> jax.Array:
    """Combine a variable's copies by its aggregation, and keep their dtype."""
    if mode is not VariableAggregation.MEAN and jnp.iscomplexobj(stack):
        return jax.lax.complex(aggregate_stack(stack.real, mode), aggregate_stack(stack.imag, mode))
    is_floating = jnp.issubdtype(stack.dtype, jnp.floating)
    if mode is VariableAggregation.ONLY_FIRST_REPLICA:
        return _first_bits(stack) if is_floating else stack[0]
    if mode is VariableAggregation.SUM and is_floating:
        return _sum_by_bits(stack)
    return reduce_stack(stack, ReduceOp[mode.name], (), None).astype(stack.dtype)


@jax.custom_jvp
def _first_bits(stack: jax.Array) -> jax.Array:
    """Take the first copy as bits: XLA takes a row out of a split array by adding zeros, which makes -0.0 and subnormals 0.0."""
    return jax.lax.bitcast_convert_type(bits_of(stack)[0], stack.dtype)


_first_bits.defjvps(lambda tangent, *_: tangent[0])


@jax.custom_jvp
def _sum_by_bits(stack: jax.Array) -> jax.Array:
    """Add up copies. If only one is not zero, take its bits: XLA's addition on CPU turns subnormals into zero."""
    bits = bits_of(stack)
    is_zero = (bits << 1) == 0
    alone = jax.lax.bitcast_convert_type(jnp.sum(jnp.where(is_zero, 0, bits), axis=0, dtype=bits.dtype), stack.dtype)
    return jnp.where(jnp.sum(~is_zero, axis=0) == 1, alone, reduce_stack(stack, ReduceOp.SUM, (), None))


_sum_by_bits.defjvps(lambda tangent, *_: reduce_stack(tangent, ReduceOp.SUM, (), None))


def broadcast_stack(value: jax.Array, num_replicas: int) -> jax.Array:
    """Give every replica the same value."""
    return jnp.broadcast_to(value, (num_replicas, *value.shape))


def split_stack(value: jax.Array, num_replicas: int) -> jax.Array:
    """Give every replica a part of `value`, so that the parts add up to exactly `value` in any order.

    All parts are multiples of the spacing of floating point numbers at `value` (of 1 for integers), and no partial sum is
    larger than `value`, so no addition rounds. 7 over 2 replicas is 4 and 3. A subnormal goes whole to the first replica,
    because XLA on CPU would compute with zero instead.
    """
    if value.dtype == jnp.bool_ or not jnp.issubdtype(value.dtype, jnp.number):
        raise TypeError(f"a value of dtype {value.dtype} cannot be split into a sum over replicas.")
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jax.lax.complex(split_stack(value.real, num_replicas), split_stack(value.imag, num_replicas))
    if jnp.issubdtype(value.dtype, jnp.integer):
        part = jax.lax.div(value, jnp.full_like(value, num_replicas))  # rounds towards zero
    else:
        magnitude = jnp.abs(value)
        spacing = magnitude - jnp.nextafter(magnitude, jnp.zeros_like(magnitude))
        part = jnp.trunc(value / num_replicas / spacing) * spacing
        part = jnp.where(jnp.isfinite(value) & (magnitude > 0) & jnp.isfinite(part), part, 0).astype(value.dtype)
    first = jnp.where(part == 0, value, value - part * (num_replicas - 1))
    return jnp.concatenate([first[None], jnp.broadcast_to(part, (num_replicas - 1, *value.shape))])


def require_equal_except(axes: Axes, value: PerReplica, verb: str) -> None:
    """Refuse a PerReplica whose shapes differ along an axis that is not in `axes`."""
    shapes = uneven_shapes(value)
    if shapes is None or len({tuple(size for a, size in enumerate(shape) if a not in axes) for shape in shapes}) == 1:
        return
    different = [a for a, size in enumerate(value.shape) if size is None]
    remedy = f"Name the axis along which they differ: strategy.{verb}(..., {_in_words(different)})"
    if verb == "reduce":
        remedy += ", which also counts the true number of rows."
    elif len(different) == 1:
        remedy += "."
    else:
        remedy = "gather joins along one axis only; use strategy.local_results for the separate values."
    raise UnevenReplicasError(
        f"{verb} with {_in_words(axes)} needs equal shapes on all replicas apart from that axis, but they are "
        f"{', '.join(map(str, shapes))}. {remedy}"
    )


def _in_words(axes: Sequence[int]) -> str:
    if not axes:
        return "axis=None"
    return f"axis={axes[0]}" if len(axes) == 1 else f"axis={tuple(axes)}"


def compiled(function: Callable[..., Any], placement: NamedSharding, *static: Any) -> Callable[..., Any]:
    """Return a compiled program for `function(array, *static)`, or for a list of arrays; its results get the placement."""
    return functools.partial(in_flight.dispatch, placement, _compile(function, placement, static))


@functools.lru_cache(maxsize=1024)
def _compile(function: Callable[..., Any], placement: NamedSharding, static: tuple[Any, ...]) -> Any:
    if is_for_plan(placement):
        return shapes_of(lambda array: function(array, *static), placement)
    program = jax.jit(lambda array: function(array, *static), out_shardings=placement)
    return joint_programs.agreed(function.__name__, str(static), program) if in_flight.is_joint(placement) else program


# -- many values at once


class Task(NamedTuple):
    """A call of one of this module's functions on an array."""

    function: Callable[..., jax.Array]
    static: tuple[Any, ...]  # the arguments after the array

    def __repr__(self) -> str:
        return f"{self.function.__name__}{self.static}"  # equal on all workers


def run_tasks(
    arrays: list[jax.Array], tasks: Sequence[Task], placement: NamedSharding, what: str = "strategy.reduce: a sum"
) -> list[jax.Array]:
    """Run each array's task, all in one compiled program; the results get the placement. Refuse sums that wrap around."""
    if not arrays:
        return []
    if (doubtful := _doubtful_sums(arrays, tasks)) and not _is_unseen(placement, *arrays):
        *results, fit = compiled(_compute_checked, placement, tuple(tasks), placement)(arrays)
        for fits, (array, *_) in zip(np.asarray(fit), doubtful, strict=True):
            _require_fit(fits, accumulator_dtype(ReduceOp.SUM, array.dtype), what)
        return results
    if len(arrays) == 1:
        [(function, static)] = tasks
        return [compiled(function, placement, *static)(arrays[0])]
    return compiled(compute_all, placement, tuple(tasks), placement)(arrays)


def compute_all(arrays: Sequence[jax.Array], tasks: Sequence[Task], whole: NamedSharding) -> list[jax.Array]:
    """Run each array's task, with few collectives; `whole` is the placement of a mirrored value."""
    results: dict[int, jax.Array] = {}
    packed: dict[Callable[..., jax.Array], list[int]] = {reduce_stack: [], gather_stack: []}
    for i, (array, task) in enumerate(zip(arrays, tasks, strict=True)):
        if _may_travel(array, task, whole):
            packed[task.function].append(i)
        else:
            results[i] = task.function(array, *task.static)
    sums, gathers = packed.values()
    results |= zip(sums, _reduce_packed([arrays[i] for i in sums], [tasks[i].static for i in sums]), strict=True)
    everywhere = _move_small([arrays[i] for i in gathers], lambda stack: jax.lax.with_sharding_constraint(stack, whole))
    for i, stack in zip(gathers, everywhere, strict=True):
        axis, shapes, _ = tasks[i].static
        results[i] = gather_stack(stack, axis, shapes, None)
    return [results[i] for i in range(len(arrays))]


def _may_travel(array: jax.Array, task: Task, whole: NamedSharding) -> bool:
    """Tell whether a task's array may share a buffer with others."""
    packs = whole.num_devices > 1 and platform_of(whole.mesh).packs
    if not packs or task.function not in (reduce_stack, gather_stack):
        return False
    if task.function is gather_stack:
        return not jnp.issubdtype(array.dtype, jax.dtypes.extended)
    op, axes, _, ops = task.static
    keeps_order = array.shape[0] == whole.num_devices or not axes  # of the additions
    return ops is None and REDUCTIONS[op].adds and keeps_order


def _reduce_packed(stacks: Sequence[jax.Array], static: Sequence[tuple[Any, ...]]) -> list[jax.Array]:
    """Reduce each stack as `reduce_stack` does, with the sums over the replicas in few buffers."""
    counts, parts = [], []
    for stack, (op, axes, shapes, _) in zip(stacks, static, strict=True):
        counts.append(_count_of(stack, axes, shapes))
        parts.append(REDUCTIONS[op].parts(stack, tuple(axis + 1 for axis in axes), counts[-1], shapes))
    flat = list(itertools.chain.from_iterable(parts))
    totals = iter(_move_small(flat, lambda stack: jnp.sum(stack, axis=0, dtype=stack.dtype)))
    return [
        REDUCTIONS[op].finish([next(totals) for _ in of_stack], count, stack.dtype)
        for stack, of_stack, count, (op, *_) in zip(stacks, parts, counts, static, strict=True)
    ]


def _move_small(stacks: Sequence[jax.Array], move: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Apply a function of `[R, n]` that keeps the last axis to each stack; put small stacks side by side in one."""
    rows = [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype) for stack in stacks]
    groups = groups_of(rows, 0, MAX_ARRAYS_TOGETHER)
    return move_packed(stacks, groups, lambda packs: list(map(move, packs)), num_kept=1)


# -- sums of integers, outside of a trace: `_Sum` is an array, the axes, the shapes if they differ, the copies if it is mirrored

_Sum: TypeAlias = tuple[jax.Array, Axes, tuple[Shape, ...] | None, int]


def aggregated(stack: jax.Array, mode: VariableAggregation, placement: NamedSharding, name: str) -> jax.Array:
    """Combine the copies of a variable of this name in a program of its own; refuse a sum that their dtype does not hold."""
    make, what = compiled(aggregate_stack, placement, mode), f"variable {name!r}: a sum"
    if mode is not VariableAggregation.SUM or not jnp.issubdtype(stack.dtype, jnp.integer) or _is_unseen(placement, stack):
        return make(stack)
    [total] = run_tasks([stack], [Task(reduce_stack, (ReduceOp.SUM, (), None, None))], placement, what)
    if total.dtype == stack.dtype:
        return total
    _require_fit(np.array_equal(np.asarray(value := make(stack)), np.asarray(total)), stack.dtype, what)
    return value


def _is_unseen(placement: NamedSharding, *arrays: jax.Array) -> bool:
    """Tell whether nobody can look at values now: in a trace, or on devices that are planned."""
    return tracing.is_staging() or is_for_plan(placement) or any(isinstance(array, jax.core.Tracer) for array in arrays)


def _require_fit(fits: bool, dtype: np.dtype, what: str) -> None:
    if not fits:
        raise ValueError(
            f"{what} over the replicas does not fit {dtype}, which holds up to {jnp.iinfo(dtype).max}, and would wrap around. "
            "Python holds any number: sum(map(int, strategy.local_results(counts))). Or count in floats, "
            "count.astype('float32'); from 0 in each epoch; or in 64 bits, at the start of the program: "
            "jax.config.update('jax_enable_x64', True)."
        )


def _compute_checked(arrays: Sequence[jax.Array], tasks: Sequence[Task], whole: NamedSharding) -> list[jax.Array]:
    """Run each array's task; the last result says which of the doubtful sums fit."""
    return [*compute_all(arrays, tasks, whole), _sums_fit(_doubtful_sums(arrays, tasks))]


def _doubtful_sums(arrays: Sequence[jax.Array], tasks: Sequence[Task]) -> list[_Sum]:
    """Return the SUMs that may overflow: of so many integers that the result's dtype may not hold their sum."""
    found: list[_Sum] = []
    for array, (function, static) in zip(arrays, tasks, strict=True):
        if function not in (reduce_stack, reduce_mirrored) or jnp.issubdtype(array.dtype, jnp.inexact):
            continue
        op, axes, about, ops = static
        if op is not ReduceOp.SUM or ops is not None:
            continue
        shapes, copies, shape = about, 0, array.shape
        if function is reduce_mirrored:
            shapes, copies, shape = None, about, (about, *array.shape)
        count = shape[0] * math.prod(shape[axis + 1] for axis in axes)
        held = 8 * accumulator_dtype(ReduceOp.SUM, array.dtype).itemsize
        if 8 * array.dtype.itemsize + max(count - 1, 0).bit_length() > held:
            found.append((array, axes, shapes, copies))
    return found


def _sums_fit(sums: Sequence[_Sum]) -> jax.Array:
    """Tell for each SUM whether its dtype holds it: sum the digits separately, because no such sum wraps around."""
    parts, digits = list[jax.Array](), list[range]()
    for array, axes, shapes, copies in sums:
        stack = broadcast_stack(array, copies) if copies else array
        count = _count_of(stack, axes, shapes)
        wide = padded(stack, shapes, 0).astype(accumulator_dtype(ReduceOp.SUM, stack.dtype))
        bits = jnp.iinfo(wide.dtype).bits
        digits.append(shifts := range(0, bits, max(bits - 1 - max(count - 1, 0).bit_length(), 1)))
        for shift in shifts:
            digit = wide >> shift
            if shift != shifts[-1]:  # the last one keeps the sign
                digit &= 2**shifts.step - 1
            parts.append(jnp.sum(digit, axis=tuple(axis + 1 for axis in axes), dtype=wide.dtype))
    totals = iter(_move_small(parts, lambda stack: jnp.sum(stack, axis=0, dtype=stack.dtype)))
    fit = []
    for shifts in digits:
        total: Any = 0
        for _ in shifts:
            total = next(totals) + (total >> shifts.step)  # with what the digits below carry
        limits, last = jnp.iinfo(total.dtype), shifts[-1]
        fit.append(jnp.all((total >= limits.min >> last) & (total <= limits.max >> last)))
    return jnp.stack(fit)

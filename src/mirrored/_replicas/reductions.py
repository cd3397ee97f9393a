"""The reductions: one record says how the values of all replicas become one. Whoever reduces asks this table.

docs/design/doors.md says what a new one needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._jax.marks import Purpose
from .._options import ReduceOp, VariableAggregation
from .._typing import Shape

Axes = tuple[int, ...]
Arrays = Sequence[jax.Array]

#: The MEAN of up to so many integers is exact: the sum of their remainders fits 32 bits. More are added as floating point.
_MAX_EXACT_COUNT = 46_340
psum = jax.lax.psum  # JAX's own: while a step is traced, the public names are `named`'s, for the collectives that users write


class Reduction(NamedTuple):
    """How many values become one: they are turned into arrays, which are combined over their axes and over the replicas."""

    begin: Callable[[jax.Array, int], list[jax.Array]]  # makes the arrays, given how many values become one
    padding: Callable[[DTypeLike], int | np.ndarray]  # takes the place of a missing row in such an array, and changes no result
    combine: Callable[[jax.Array, Axes], jax.Array]  # over axes of such an array
    across: Callable[[Any, str], Any]  # over the replicas, in a step
    finish: Callable[[Arrays, int, DTypeLike], jax.Array]  # makes the result, given how many values became one, and their dtype
    repeated: Callable[[jax.Array, int], jax.Array]  # of the result for one replica, if so many have the same value
    adds: bool  # the arrays are added up: then a user's function may do it, and JAX knows the derivative
    marks: tuple[Purpose, Purpose] | None  # for the advice, of a value in a step, and of all values in merged code

    def parts(self, array: jax.Array, axes: Axes, count: int, shapes: tuple[Shape, ...] | None = None) -> list[jax.Array]:
        """Return the arrays to combine over the replicas; `shapes` are those of the rows of a padded stack."""
        parts = [padded(part, shapes, self.padding(part.dtype)) for part in self.begin(array, count)]
        return [self.combine(part, axes) if axes else part for part in parts]


def padded(stack: jax.Array, shapes: tuple[Shape, ...] | None, padding: int | np.ndarray) -> jax.Array:
    """Replace the padding in a stack of arrays of different shapes by a number."""
    for axis, sizes in enumerate(zip(*(shapes or ()), strict=True), 1):
        rows = jnp.array(sizes).reshape(-1, *(1,) * (stack.ndim - 1))
        is_real = jax.lax.broadcasted_iota(jnp.int32, stack.shape, axis) < rows
        stack = jnp.where(is_real, stack, jnp.full_like(stack, padding))
    return stack


def _wide(dtype: DTypeLike) -> Any:
    return np.dtype(dtype) if np.dtype(dtype).itemsize >= 4 else np.dtype(np.float32)  # JAX promotes no float8


# -- SUM and MEAN


def accumulator_dtype(op: ReduceOp, dtype: DTypeLike) -> Any:
    """Return the dtype in which values are added: for a SUM that of `jnp.sum`, for a MEAN one that does not round it to 0."""
    if dtype == jnp.bool_:
        dtype = np.dtype(np.int32)
    if not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(
            f"values of dtype {dtype} cannot be added over the replicas; expected numbers. To bring them together use "
            "strategy.gather(x, axis=0), or ctx.all_gather(x, axis=0) in a step."
        )
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype if op is ReduceOp.SUM else _wide(dtype)
    if op is ReduceOp.MEAN:
        return jnp.result_type(float)
    widest = jax.dtypes.canonicalize_dtype(np.uint64 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int64)
    return widest if np.dtype(dtype).itemsize < widest.itemsize else dtype  # JAX promotes no integers of 4 or 2 bits


def _addends(array: jax.Array, _: int) -> list[jax.Array]:
    return [array.astype(accumulator_dtype(ReduceOp.SUM, array.dtype))]


def _addends_of_mean(array: jax.Array, count: int) -> list[jax.Array]:
    """Return quotients and remainders of integers: as floating point, 16777217 would become 16777216 before the addition."""
    dtype = accumulator_dtype(ReduceOp.MEAN, array.dtype)
    if not (jnp.issubdtype(array.dtype, jnp.integer) and 0 < count <= _MAX_EXACT_COUNT):
        return [array.astype(dtype)]
    wide = array.astype(jnp.int32) if array.dtype.itemsize < 4 else array
    return [jax.lax.div(wide, jnp.full_like(wide, count)), jax.lax.rem(wide, jnp.full_like(wide, count))]


def _added(array: jax.Array, axes: Axes) -> jax.Array:
    return jnp.sum(array, axis=axes, dtype=array.dtype)


def _mean(totals: Sequence[jax.Array], count: int, dtype: DTypeLike) -> jax.Array:
    if len(totals) == 1:
        return divide(totals[0], count, dtype)
    quotient, remainder = totals
    divisor = jnp.full_like(remainder, count)
    whole, rest = quotient + jax.lax.div(remainder, divisor), jax.lax.rem(remainder, divisor)
    mean_dtype = accumulator_dtype(ReduceOp.MEAN, dtype)
    return whole.astype(mean_dtype) + rest.astype(mean_dtype) / count


def divide(total: jax.Array, count: int, dtype: DTypeLike) -> jax.Array:
    """Finish a MEAN: the mean of integers is floating point, every other one has the dtype of its values."""
    mean = total / float(count)  # an int of 2**31 or more does not fit JAX's default int
    return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean


# -- MAX, and MIN, which is the MAX in the reverse order


def _ranks(is_min: bool, array: jax.Array, _: int) -> list[jax.Array]:
    """Return integers in the order of the values, NaN last; XLA's own comparison over the devices would lose NaN."""
    dtype = array.dtype
    if dtype != jnp.bool_ and not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(
            f"values of dtype {dtype} have no largest and no smallest; expected real numbers or bools. Of complex numbers "
            "compare the magnitudes, abs(x)."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        rank = array
        if dtype.itemsize < 4:  # NCCL compares no 16 bits
            rank = array.astype(jnp.int32)
        return [_turned(is_min, rank)]
    wide = array.astype(_wide(dtype))
    # The bits of a floating point number are its rank, but those of negative ones run backwards.
    rank = _flipped(jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}"))
    return [jnp.where(jnp.isnan(wide), jnp.iinfo(rank.dtype).max, _turned(is_min, rank))]


def _turned(is_min: bool, rank: jax.Array) -> jax.Array:
    return ~rank if is_min else rank


def _flipped(bits: jax.Array) -> jax.Array:
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _of_rank(is_min: bool, ranks: Arrays, count: int, dtype: DTypeLike) -> jax.Array:
    if not count:
        raise ValueError(
            "there is no largest and no smallest value of no rows: the axis that is reduced has the length 0 on every replica. "
            "Leave the empty batch out, or give the axis a row that does not count, such as -jnp.inf for a largest value."
        )
    rank = _turned(is_min, ranks[0])
    if not jnp.issubdtype(dtype, jnp.floating):
        return rank.astype(dtype)
    return jax.lax.bitcast_convert_type(_flipped(rank), _wide(dtype)).astype(dtype)


def _first_rank(dtype: DTypeLike) -> np.ndarray:
    return np.array(jnp.iinfo(dtype).min, dtype)


def _last(ranks: jax.Array, axes: Axes) -> jax.Array:
    return jnp.max(ranks, axis=axes, initial=_first_rank(ranks.dtype))


def _ordered(is_min: bool) -> Reduction:
    begin, finish = functools.partial(_ranks, is_min), functools.partial(_of_rank, is_min)
    return Reduction(begin, _first_rank, _last, jax.lax.pmax, finish, lambda result, _: result, False, None)


# -- the table


def _times(result: jax.Array, count: int) -> jax.Array:
    return result * jnp.asarray(count).astype(result.dtype)


_SUMS, _MEANS = (Purpose.SUM, Purpose.SUM_OF_ALL), (Purpose.MEAN, Purpose.MEAN)
REDUCTIONS = {
    ReduceOp.SUM: Reduction(_addends, lambda _: 0, _added, psum, lambda totals, *_: totals[0], _times, True, _SUMS),
    ReduceOp.MEAN: Reduction(_addends_of_mean, lambda _: 0, _added, psum, _mean, lambda result, _: result, True, _MEANS),
    ReduceOp.MAX: _ordered(is_min=False),
    ReduceOp.MIN: _ordered(is_min=True),
}


def reduction_of(mode: VariableAggregation) -> Reduction | None:
    """Return the reduction by which a variable's values become one; None if none does."""
    return REDUCTIONS[ReduceOp[mode.name]] if mode.name in ReduceOp.__members__ else None


#: Reduces arrays over axes of each, and over the replicas.
Run = Callable[[Reduction, Arrays, Sequence[Axes]], list[jax.Array]]


def run_with_derivative(run: Run, reduction: Reduction, arrays: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """Reduce arrays. As for `jnp.max`, all values that equal the maximum share its derivative."""
    is_float = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]
    if reduction.adds or not any(is_float):
        return run(reduction, arrays, axes)
    if not all(is_float):
        pairs = zip(arrays, axes, strict=True)
        return [run_with_derivative(run, reduction, [array], [own_axes])[0] for array, own_axes in pairs]
    compare = jax.custom_jvp(lambda *arrays: run(reduction, arrays, axes))

    @compare.defjvp
    def derivative(values: Arrays, tangents: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        results, total = compare(*values), REDUCTIONS[ReduceOp.SUM]
        wide = [jnp.expand_dims(result, own_axes) for result, own_axes in zip(results, axes, strict=True)]
        equal = [value == result for value, result in zip(values, wide, strict=True)]
        changes = run(total, [jnp.where(is_it, tangent, 0) for is_it, tangent in zip(equal, tangents, strict=True)], axes)
        counts = run(total, [is_it.astype(value.dtype) for is_it, value in zip(equal, values, strict=True)], axes)
        return results, [change / count for change, count in zip(changes, counts, strict=True)]

    return compare(*arrays)

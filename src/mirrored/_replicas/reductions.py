"""The reductions: one record says how the values of all replicas become one. Whoever reduces asks this table.

docs/design/collectives.md says what a new one needs.
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

Axes = tuple[int, ...]
Arrays = Sequence[jax.Array]

#: The MEAN of up to so many integers is exact: the sum of their remainders fits 32 bits. More are added as floating point.
_MAX_EXACT_COUNT = 46_340
psum = jax.lax.psum  # JAX's own: while a step is traced, the public names are `named`'s, for the collectives that users write


class Reduction(NamedTuple):
    """How values become one: as arrays that may be combined in any order, over axes of their own and over the replicas.

    Attributes:
        begin: makes the arrays to combine, element by element, given how many values become one.
        padding: the number that takes the place of a missing row in an array of a dtype, and changes no result.
        combine: combines an array over axes of its own.
        across: does the same over the replicas, in a step.
        finish: makes the result of the combined arrays, how many values became one, and the values' dtype.
        repeated: makes the result for so many replicas with the same value of the result for one.
        adds: whether the arrays are added up: then a user's function may do it, and JAX knows the derivative.
        marks: for the advice: of a value in a step, and of all replicas' values in merged code; None: it has nothing to say.
    """

    begin: Callable[[jax.Array, int], list[jax.Array]]
    padding: Callable[[DTypeLike], int | np.ndarray]
    combine: Callable[[jax.Array, Axes], jax.Array]
    across: Callable[[Any, str], Any]
    finish: Callable[[Arrays, int, DTypeLike], jax.Array]
    repeated: Callable[[jax.Array, int], jax.Array] = lambda result, _: result
    adds: bool = True
    marks: tuple[Purpose, Purpose] | None = None

    def parts(self, array: jax.Array, axes: Axes, count: int) -> list[jax.Array]:
        """Return the arrays to combine over the replicas; `finish` makes the result of them."""
        return [self.combine(part, axes) if axes else part for part in self.begin(array, count)]


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
        return dtype if op is ReduceOp.SUM else jnp.promote_types(dtype, jnp.float32)
    if op is ReduceOp.MEAN:
        return jnp.result_type(float)
    widest = np.uint64 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int64
    return jnp.promote_types(dtype, jax.dtypes.canonicalize_dtype(widest))


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


# -- MAX and MIN


def require_order(dtype: DTypeLike) -> None:
    """Refuse a dtype whose values have no largest."""
    if dtype != jnp.bool_ and not (jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)):
        raise TypeError(
            f"values of dtype {dtype} have no largest and no smallest; expected real numbers or bools. Of complex numbers "
            "compare the magnitudes, abs(x)."
        )


def _ranks(wins: Callable[[DTypeLike], np.ndarray], array: jax.Array, _: int) -> list[jax.Array]:
    """Return integers in the order of the values; NaN gets the one that `wins`.

    A float's bits are its rank, but those of negative ones run backwards. XLA's own comparison over the devices loses a NaN.
    """
    require_order(array.dtype)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return [array.astype(jnp.int32) if array.dtype.itemsize < 4 else array]  # NCCL compares no 16 bits
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    bits = _flipped(jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}"))
    return [jnp.where(jnp.isnan(wide), wins(bits.dtype), bits)]


def _flipped(bits: jax.Array) -> jax.Array:
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _of_rank(ranks: Sequence[jax.Array], count: int, dtype: DTypeLike) -> jax.Array:
    if not count:
        raise ValueError(
            "there is no largest and no smallest value of no rows: the axis that is reduced has the length 0 on every replica. "
            "Leave the empty batch out, or give the axis a row that does not count, such as -jnp.inf for a largest value."
        )
    [rank] = ranks
    if not jnp.issubdtype(dtype, jnp.floating):
        return rank.astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.lax.bitcast_convert_type(_flipped(rank), wide).astype(dtype)


def _least(dtype: DTypeLike) -> np.ndarray:
    return np.array(jnp.iinfo(dtype).min, dtype)


def _most(dtype: DTypeLike) -> np.ndarray:
    return np.array(jnp.iinfo(dtype).max, dtype)


def _largest(ranks: jax.Array, axes: Axes) -> jax.Array:
    return jnp.max(ranks, axis=axes, initial=_least(ranks.dtype))


def _smallest(ranks: jax.Array, axes: Axes) -> jax.Array:
    return jnp.min(ranks, axis=axes, initial=_most(ranks.dtype))


# -- any of them

#: Reduces arrays over axes of each, and over the replicas.
Run = Callable[[Reduction, Arrays, Sequence[Axes]], list[jax.Array]]


def run_with_derivative(run: Run, reduction: Reduction, arrays: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """Reduce arrays by `run`, which also adds up what the derivative needs."""
    return run(reduction, arrays, axes) if reduction.adds else _compare(run, reduction, tuple(axes), list(arrays))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _compare(run: Run, reduction: Reduction, axes: Sequence[Axes], arrays: Arrays) -> list[jax.Array]:
    return run(reduction, arrays, axes)


@_compare.defjvp
def _derivative(
    run: Run, reduction: Reduction, axes: Sequence[Axes], primals: tuple[Arrays], tangents: tuple[Any]
) -> tuple[list[jax.Array], list[Any]]:
    """As for `jnp.max`, it is the mean of the derivatives of the values that equal the result."""
    [arrays], [given] = primals, tangents
    results = _compare(run, reduction, axes, arrays)
    floats = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    own = [axes[place] for place in floats]
    equal = [arrays[k] == jnp.expand_dims(results[k], axes[k]) for k in floats]
    changes = run(REDUCTIONS[ReduceOp.SUM], [jnp.where(e, given[k], 0) for k, e in zip(floats, equal, strict=True)], own)
    counts = run(REDUCTIONS[ReduceOp.SUM], [e.astype(results[k].dtype) for k, e in zip(floats, equal, strict=True)], own)
    moved: list[Any] = [np.zeros(result.shape, jax.dtypes.float0) for result in results]
    for place, change, count in zip(floats, changes, counts, strict=True):
        moved[place] = change / count
    return results, moved


REDUCTIONS = {
    ReduceOp.SUM: Reduction(
        begin=_addends,
        padding=lambda _: 0,
        combine=_added,
        across=psum,
        finish=lambda totals, count, dtype: totals[0],
        repeated=lambda result, count: result * jnp.asarray(count).astype(result.dtype),
        marks=(Purpose.SUM, Purpose.SUM_OF_ALL),
    ),
    ReduceOp.MEAN: Reduction(
        begin=_addends_of_mean,
        padding=lambda _: 0,
        combine=_added,
        across=psum,
        finish=_mean,
        marks=(Purpose.MEAN, Purpose.MEAN),
    ),
    ReduceOp.MAX: Reduction(
        begin=functools.partial(_ranks, _most),
        padding=_least,
        combine=_largest,
        across=jax.lax.pmax,
        finish=_of_rank,
        adds=False,
    ),
    ReduceOp.MIN: Reduction(
        begin=functools.partial(_ranks, _least),
        padding=_most,
        combine=_smallest,
        across=jax.lax.pmin,
        finish=_of_rank,
        adds=False,
    ),
}


def reduction_of(mode: VariableAggregation) -> Reduction | None:
    """Return the reduction by which a variable's values become one; None if none does."""
    return REDUCTIONS[ReduceOp[mode.name]] if mode.name in ReduceOp.__members__ else None

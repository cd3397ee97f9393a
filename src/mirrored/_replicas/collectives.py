"""Collectives that one replica's program calls: all-reduce, all-gather, the first replica's value."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import UnevenReplicasError
from .._jax import user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import ReduceOp, ReductionToOneDevice, VariableAggregation
from .._typing import REPLICA_AXIS, ArrayLike, PyTree, Shape
from .arrays import as_array, is_wrapped
from .reductions import REDUCTIONS, Arrays, Axes, Reduction, accumulator_dtype, psum, run_with_derivative

#: Axes as users give them.
AxesLike = int | Sequence[int] | None

#: Arrays smaller than this many bytes travel together in flat buffers. To copy larger ones into and out of buffers
#: costs more than fewer collectives save (benchmarks/all_reduce.py).
PACK_BELOW_BYTES = 128 * 1024
#: The most arrays in one buffer. XLA's time to compile a concatenation grows steeply with their number: with all
#: small gradients of a 40-layer MLP in one buffer the first step took twice as long (benchmarks/compile_time.py).
MAX_ARRAYS_PER_PACK = 8


class Sizes(Protocol):
    """The sizes of arrays on all replicas, while an uneven step is being traced for one replica's shapes."""

    def each(self, size: int) -> tuple[int, ...]: ...

    def rows(self) -> tuple[int, int]: ...

    def examples(self, size: int) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class ReplicaAxis:
    """One replica's way to the others: the mesh axis. A single replica outside any `run` has no axis."""

    size: int  # the number of replicas
    bound: bool = True  # False in the default replica context outside any `run`, where no mesh axis exists
    sizes: Sizes | None = None  # of the other replicas' arrays, in an uneven step
    lengths: tuple[tuple[int, ...], ...] = ()  # of the step's arguments, on each replica: see `Call.lengths`
    bytes_per_pack: int = 0  # see `CommunicationOptions`
    packs: bool = True  # whether small arrays travel together by default
    ops: ReductionToOneDevice | None = None  # the user's function that replaces sums, if any

    def each(self, size: int) -> tuple[int, ...]:
        """Return a size, such as the length of an axis, on each replica; on this one it is `size`."""
        return (size,) * self.size if self.sizes is None else self.sizes.each(size)

    def rows(self) -> tuple[int, int]:
        """Return this replica's number of rows and the number of all rows; 1 and R when all replicas have equally many."""
        return (1, self.size) if self.sizes is None else self.sizes.rows()

    def examples(self, size: int) -> tuple[int, ...]:
        """As `each`, for the length of an array of per-example losses; refuse lengths that do not match the replicas' rows."""
        return (size,) * self.size if self.sizes is None else self.sizes.examples(size)

    def index(self) -> jax.Array | int:
        return jax.lax.axis_index(REPLICA_AXIS) if self.bound else 0

    def groups(self, arrays: Sequence[Any]) -> list[list[int]]:
        """Return the positions of arrays that travel together, for `move_packed`."""
        is_packed = self.packs or self.bytes_per_pack
        if is_packed:
            return groups_of(arrays, self.bytes_per_pack)
        return [[position] for position in range(len(arrays))]

    def sum(self, arrays: Arrays, across: Callable[..., Any] = psum) -> list[jax.Array]:
        """Combine arrays over the replicas: add them up, or as `across` does."""
        if not self.bound:
            return list(arrays)
        if self.sizes is not None:
            arrays = [mark(array, Mark(Purpose.OPERAND, "", "")) for array in arrays]
        return across(list(arrays), REPLICA_AXIS)

    def stack(self, array: jax.Array) -> jax.Array:
        """Return the values of all replicas along a new leading axis."""
        if not self.bound:
            return array[None]
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = jax.lax.all_gather(jax.random.key_data(array), REPLICA_AXIS)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return jax.lax.all_gather(array, REPLICA_AXIS)


def all_reduce(
    op: ReduceOp, tree: PyTree, axis: ReplicaAxis, array_axes: AxesLike = None, verb: str = "all_reduce", by_rows: bool = True
) -> PyTree:
    """Combine a tree over the replicas, and over axes of each leaf, in one collective for each dtype.

    In an uneven step, a MEAN over the replicas alone weighs each replica by its rows and ignores one without rows; with
    `by_rows=False` all replicas weigh the same.
    """
    reduction = REDUCTIONS[op]
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_wrapped)
    arrays = [as_array(leaf, verb) for leaf in leaves]
    if reduction.marks is not None:
        arrays = noted(reduction.marks[0], arrays, verb)
    axes = [normalize_axes(array_axes, array.ndim, verb) for array in arrays]
    if by_rows and op is ReduceOp.MEAN and axis.sizes is not None and not any(axes):
        if axis.ops is not None:
            raise UnevenReplicasError(
                f"a mean over the replicas of an uneven batch, at {user_code.user_line()}, weighs them by their rows, but "
                f"{axis.ops} has an accumulation_fn, which knows no weights. Combine with 'sum'; give all replicas one weight, "
                "ctx.all_reduce('mean', value, by_rows=False); or leave the odd rows out: mr.InputOptions(drop_remainder=True)."
            )
        weighed = _packed(REDUCTIONS[ReduceOp.SUM], weigh_by_rows(arrays, axis), axis)
        results = [reduction.finish([total], axis.rows()[1], a.dtype) for total, a in zip(weighed, arrays, strict=True)]
    else:
        results = run_with_derivative(functools.partial(_over_replicas, axis), reduction, arrays, axes)
    if reduction.marks is not None:
        results = noted(Purpose.TOTAL, results, verb)
    return jax.tree.unflatten(treedef, results)


def _over_replicas(axis: ReplicaAxis, reduction: Reduction, arrays: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """Reduce each array over its own axes, and over the replicas."""
    ops = axis.ops if reduction.adds else None
    counts = [
        sum(axis.each(math.prod(array.shape[a] for a in own_axes))) if own_axes else axis.size
        for array, own_axes in zip(arrays, axes, strict=True)
    ]
    # A count of 0 lets `parts` leave integers whole, for the user's function.
    exact = counts if ops is None else [0] * len(arrays)
    parts = [reduction.parts(array, own_axes, count) for array, own_axes, count in zip(arrays, axes, exact, strict=True)]
    flat = list(itertools.chain.from_iterable(parts))
    combined = _packed(reduction, flat, axis) if ops is None else [accumulate(ops, axis.stack(part)) for part in flat]
    totals = iter(combined)
    return [
        reduction.finish([next(totals) for _ in of_array], count, array.dtype)
        for of_array, count, array in zip(parts, counts, arrays, strict=True)
    ]


def noted(purpose: Purpose, arrays: Sequence[jax.Array], verb: str) -> list[jax.Array]:
    """Mark the operands of a step's sum or mean over the replicas, or its results, in the same order."""
    # A result's mark names no line: replicas with other numbers of rows may make the same sum in another line.
    where = "" if purpose is Purpose.TOTAL else user_code.user_line()
    return [mark(array, Mark(purpose, verb, where, number)) for number, array in enumerate(arrays)]


def accumulate(ops: ReductionToOneDevice, stack: jax.Array) -> jax.Array:
    """Call the user's function on the replicas' arrays in place of a sum; refuse a result of another shape or dtype."""
    assert ops.accumulation_fn is not None
    result = ops.accumulation_fn(list(stack))
    expected = f"{stack.dtype}{list(stack.shape[1:])}"
    given = f"{result.dtype}{list(jnp.shape(result))}" if hasattr(result, "dtype") else repr(result)
    if given != expected:
        raise TypeError(
            f"accumulation_fn returned {given} for {len(stack)} arrays {expected}; expected one array like them, such as that of "
            "lambda values: jnp.stack(values).max(axis=0)."
        )
    return result


def weigh_by_rows(arrays: Sequence[jax.Array], axis: ReplicaAxis) -> list[jax.Array]:
    """Multiply arrays by this replica's rows, for a mean by rows: the caller divides their sum by the number of all rows."""
    wide = [array.astype(accumulator_dtype(ReduceOp.MEAN, array.dtype)) for array in arrays]
    own, _ = axis.rows()
    note = Mark(Purpose.BY_ROWS, "a mean by rows", user_code.user_line())
    marked = [mark(array, note) for array in wide]
    if own:
        return [array * own for array in marked]
    # A replica without rows gives zeros without a gradient: its mean is NaN, and NaN * 0 is NaN. The zeros still depend on
    # the array, so that this replica also reaches the gradient's collectives.
    return [jnp.where(False, mark(array, Mark(Purpose.NO_ROWS, "", "")), jnp.zeros_like(array)) for array in marked]


def all_gather(tree: PyTree, array_axis: int, axis: ReplicaAxis) -> PyTree:
    """Concatenate each leaf over the replicas along one of its own axes."""

    def gather(leaf: ArrayLike) -> jax.Array:
        array = as_array(leaf, "all_gather")
        position = check_axis(array_axis, array.ndim, "all_gather")
        sizes = axis.each(array.shape[position])
        stack = axis.stack(pad_to(array, (*array.shape[:position], max(sizes), *array.shape[position + 1 :])))
        return join_rows(stack, position, sizes)

    return jax.tree.map(gather, tree, is_leaf=is_wrapped)


def stack_uneven(array: jax.Array, axis: ReplicaAxis) -> tuple[jax.Array, tuple[Shape, ...] | None]:
    """Return the replicas' arrays along a new leading axis, padded to the largest, and their shapes if they differ."""
    sizes = [axis.each(size) for size in array.shape]
    stack = axis.stack(pad_to(array, tuple(map(max, sizes))))
    if all(len(set(of_axis)) == 1 for of_axis in sizes):
        return stack, None
    return stack, tuple(zip(*sizes, strict=True))


def pad_to(array: jax.Array, shape: Shape) -> jax.Array:
    """Pad an array with zeros at its end, to exactly this shape."""
    if array.shape == shape:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        padded = pad_to(data, (*shape, *data.shape[array.ndim :]))
        return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(array))
    return jnp.pad(array, [(0, size - old_size) for size, old_size in zip(shape, array.shape, strict=True)])


def join_rows(stack: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
    """Concatenate a stack's arrays `[R, ...]` along one of their own axes; `sizes` counts each array's real rows."""
    if len(set(sizes)) > 1:
        rows = [jax.lax.slice_in_dim(stack[i], 0, size, axis=axis) for i, size in enumerate(sizes)]
        return jnp.concatenate(rows, axis=axis)
    _, *shape = stack.shape
    return jnp.moveaxis(stack, 0, axis).reshape(*shape[:axis], stack.shape[0] * shape[axis], *shape[axis + 1 :])


def aggregate(mode: VariableAggregation, array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Combine the replicas' values by a variable's aggregation, and keep their dtype."""
    if mode is VariableAggregation.ONLY_FIRST_REPLICA:
        return _first_replica(array, axis)
    return all_reduce(ReduceOp[mode.name], array, dataclasses.replace(axis, ops=None)).astype(array.dtype)


def _first_replica(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or array.dtype == jnp.bool_:
        return axis.stack(array)[0]
    if jnp.iscomplexobj(array):
        return jax.lax.complex(_first_replica(array.real, axis), _first_replica(array.imag, axis))
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits in (8, 16, 32, 64):
        return _first_bits(array, axis)
    return _first_sum(array, axis)


def _first_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return axis.sum([jnp.where(axis.index() == 0, array, jnp.zeros_like(array))])[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _first_bits(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Send floating point numbers as bits: by addition, -0.0 would become 0.0, and XLA may turn a subnormal into zero."""
    return jax.lax.bitcast_convert_type(_first_sum(bits_of(array), axis), array.dtype)


@_first_bits.defjvp
def _first_tangent(axis: ReplicaAxis, arrays: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _first_bits(arrays[0], axis), _first_sum(tangents[0], axis)


def bits_of(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, f"uint{jnp.finfo(array.dtype).bits}")


def _packed(reduction: Reduction, arrays: Arrays, axis: ReplicaAxis) -> list[jax.Array]:
    """Combine arrays over the replicas: small ones in flat buffers of one dtype (XLA joins no two), large ones as they are."""
    # Complex numbers travel as pairs of real ones, because XLA on CPU ends the process when it adds up a complex constant.
    real = [jnp.stack([array.real, array.imag]) if jnp.iscomplexobj(array) else array for array in arrays]
    groups = [[position] for position in range(len(real))]
    if axis.size > 1:  # a single replica sends nothing, and XLA would compile its buffers longer than all the rest
        groups = axis.groups(real)
    sums = move_packed(real, groups, functools.partial(axis.sum, across=reduction.across))
    return [jax.lax.complex(total[0], total[1]) if jnp.iscomplexobj(a) else total for total, a in zip(sums, arrays, strict=True)]


def sum_in_one_buffer(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Sum arrays of one dtype over the replicas, in one collective."""
    return move_packed(arrays, [list(range(len(arrays)))], lambda buffers: psum(buffers, REPLICA_AXIS))


def move_packed(
    arrays: Arrays, groups: Sequence[Sequence[int]], move: Callable[[list[jax.Array]], Arrays], num_kept: int = 0
) -> list[jax.Array]:
    """Pack each group of arrays of one dtype into a buffer, run collectives on the buffers, and unpack the results.

    `groups` holds the positions of the arrays, each in one group. `move` runs the collectives on the buffers and keeps their
    last axis. A buffer keeps the first `num_kept` axes of its arrays and flattens the others.
    """
    results: list[Any] = [None] * len(arrays)
    buffers = [_pack([arrays[i] for i in members], num_kept) for members in groups]
    for members, buffer in zip(groups, move(buffers), strict=True):
        for i, part in zip(members, _unpack(buffer, [arrays[i].shape[num_kept:] for i in members]), strict=True):
            results[i] = part
    return results


def _pack(arrays: Sequence[jax.Array], num_kept: int) -> jax.Array:
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([array.reshape(*array.shape[:num_kept], -1) for array in arrays], axis=num_kept)


def _unpack(buffer: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    if len(shapes) == 1:
        return [buffer]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = jnp.split(buffer, ends[:-1], axis=-1)
    return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]


def groups_of(arrays: Sequence[Any], bytes_per_pack: int, max_arrays: int = MAX_ARRAYS_PER_PACK) -> list[list[int]]:
    """Group arrays of one dtype, by position and in order, for `move_packed`."""
    # A group is full with `bytes_per_pack` bytes. If that is 0, it is full with `max_arrays`, and a large array is alone.
    groups: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    limit = bytes_per_pack or max_arrays
    for position, array in enumerate(arrays):
        num_bytes = array.size * array.dtype.itemsize
        if not bytes_per_pack and num_bytes >= PACK_BELOW_BYTES:
            groups.append([position])
            continue
        group, held = filling.get(array.dtype, ([], limit))
        if held >= limit:
            groups.append(group := [])
            held = 0
        group.append(position)
        filling[array.dtype] = group, held + (num_bytes if bytes_per_pack else 1)
    return groups


def check_axis(axis: object, ndim: int, verb: str) -> int:
    """Return `axis` as a non-negative int, or raise an error that says which axes the array has."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"{verb}: axis is {axis!r} of type {type(axis).__name__}; expected an int, for example axis=0.")
    if not -ndim <= axis < ndim:
        has = {
            0: "it is a scalar and has no axes. Return x[None] from the step to give it one, or use axis=None in reduce",
            1: "its only axis is 0",
        }.get(ndim, f"its axes are 0 to {ndim - 1}")
        raise ValueError(f"{verb}: axis={axis} for a value of rank {ndim} on each replica; {has}.")
    return int(axis) % ndim


def normalize_axes(axis: AxesLike, ndim: int, verb: str) -> Axes:
    """Turn None, an axis or several into sorted, distinct, non-negative ints."""
    if axis is None:
        return ()
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    return tuple(sorted({check_axis(a, ndim, verb) for a in axes}))

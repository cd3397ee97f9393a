"""PerReplica: a value that may differ by replica."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import numpy as np

from .. import _html
from .._errors import PerReplicaError
from .._jax import user_code
from .._typing import REPLICA_AXIS, Shape

_WAYS_OUT = """it has one value for each replica. Write one of
    strategy.run(step, args=(x,))   # computes on each replica
    strategy.reduce('sum', x)       # such as the shares of a loss; or 'mean'; axis=0 also over its rows
    strategy.gather(x, axis=0)      # all rows
    strategy.local_results(x)       # a tuple of values"""


class Origin(NamedTuple):
    """The origin of a batch: its dataset."""

    dataset: object  # equal only for batches of one dataset
    is_auto_by_file: bool  # whether AUTO chose to divide the data by file
    last_sizes: tuple[int, ...] = ()  # each replica's rows in the dataset's last batch, if known to differ


class PerReplica:
    """One value for each replica, as returned by `run` and by distributed datasets.

    Physically it is one `jax.Array` with a new leading axis of length R, sharded over the replicas. If replicas hold different
    shapes of one rank, each is padded to the largest; `shapes` says which elements are real, and the padding is never shown.

    A PerReplica is a pytree whose only leaf is that stacked array. In a step a replica sees its own slice, an ordinary array.

    >>> x = strategy.distribute_values_from_function(lambda ctx: np.full(2, ctx.replica_id_in_sync_group))
    >>> x.shape, x.dtype
    ((2,), dtype('int32'))
    >>> x
    PerReplica(shape=(2,), dtype=int32,
      0: [0 0],
      1: [1 1])
    >>> x + 1
    Traceback (most recent call last):
    ...
    mirrored.PerReplicaError: PerReplica does not support `+` ...

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedValues
    """

    __slots__ = ("__weakref__", "_array", "_carried", "_origin", "_proven", "_rank", "_shapes")

    def __init__(
        self,
        array: Any,
        shapes: tuple[Shape, ...] | None = None,
        carried: tuple[jax.Array, jax.Array, Any] | None = None,
        origin: Origin | None = None,
        proven: object = None,
        rank: int | None = None,
    ) -> None:
        """Wrap a stacked array; users do not call this, but get PerReplica values from a strategy."""
        self._array = array  # `[R, ...]`, sharded over the replicas along its first axis
        self._shapes = shapes  # each replica's true shape when they differ, else None
        self._carried = carried  # SUM and MEAN over the replicas, and the mesh, if the program that made it computed them
        self._origin = origin  # the dataset, for a batch
        self._proven = proven  # what the mirror proof found of it, for a step's result
        self._rank = rank  # how many axes its stack had before `jax.vmap`, `jax.tree.map` or the like gave it others; else None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each replica's value."""
        return self._shapes or (tuple(self._whole().shape[1:]),) * self._array.shape[0]

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of one replica's value; None along an axis where the replicas differ."""
        if self._shapes is None:
            return tuple(self._whole().shape[1:])
        return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*self._shapes, strict=True))

    @property
    def ndim(self) -> int:
        """The number of axes of one replica's value."""
        return self._whole().ndim - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which is the same on all replicas."""
        return self._array.dtype

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._whole().shape[0]

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """This worker's values in replica order, each on its replica's device."""
        self._whole()
        return tuple(self._local_rows().values())

    def _whole(self) -> Any:
        if self._rank is not None:
            require_whole(self, lambda: "this is")
        return self._array

    def _local_rows(self) -> dict[int, jax.Array]:
        """Return this worker's values by replica number, in order."""
        rows: dict[int, Any] = {}
        if isinstance(self._array, jax.Array) and not isinstance(self._array, jax.core.Tracer):
            for shard in self._array.addressable_shards:
                first = shard.index[0].start or 0
                for i in range(shard.data.shape[0]):  # one row, unless `jax.tree.map` changed the placement
                    rows.setdefault(first + i, shard.data[i])
        else:
            rows = {i: self._array[i] for i in range(self.num_replicas)}
        if self._shapes is not None:
            rows = {i: row[tuple(map(slice, self._shapes[i]))] for i, row in rows.items()}  # without the padding
        return {i: rows[i] for i in sorted(rows)}

    def __repr__(self) -> str:
        is_array = isinstance(self._array, jax.Array | np.ndarray) and not isinstance(self._array, jax.core.Tracer)
        if not is_array or not self._array.ndim or self._rank is not None:
            return f"PerReplica({self._array!r})"
        if isinstance(self._array, jax.Array) and self._array.is_deleted():
            return f"PerReplica(shape={self.shape}, dtype={self.dtype}, deleted)"
        with jax.ensure_compile_time_eval():  # compute now, also inside a step
            own = self._local_rows()
            rows = ",\n".join((label := f"  {i}: ") + _abridge(value, label) for i, value in own.items())
        others = "" if len(own) == self.num_replicas else f" {len(own)} of {self.num_replicas} replicas are of this worker:"
        return f"PerReplica(shape={self.shape}, dtype={self.dtype},{others}\n{rows})"

    def _repr_html_(self) -> str:
        is_array = isinstance(self._array, jax.Array) and not isinstance(self._array, jax.core.Tracer)
        if not is_array or self._array.is_deleted() or self._rank is not None:
            return _html.element("pre", repr(self))
        own = self._local_rows()
        rows = [(number, str(tuple(value.shape)), _html.element("code", _abridge(value, ""))) for number, value in own.items()]
        title = f"PerReplica of {self.num_replicas} replicas, shape {self.shape}, dtype {self.dtype}"
        return _html.join([_html.element("b", title), _html.table(("replica", "shape", "value"), rows)])

    if not TYPE_CHECKING:  # so that type checkers find misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that says what to write instead of `x.mean()`, `x.item()` and other methods of arrays."""
            hint = f": {_WAYS_OUT}" if name == "numpy" or hasattr(jax.Array, name) else "."
            raise AttributeError(f"PerReplica has no attribute {name!r}{hint}")

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse(f"the format {spec!r}")
        return repr(self)

    def _refuse(self, operation: str, *operands: object, **options: object) -> NoReturn:
        user_code.hide_lines()
        raise PerReplicaError(f"PerReplica does not support {operation} (shape {self.shape}): {_WAYS_OUT}")

    def __jax_array__(self) -> NoReturn:
        self._refuse("use as one array")

    def __array_ufunc__(self, ufunc: np.ufunc, *args: object, **kwargs: object) -> NoReturn:
        self._refuse(f"`np.{ufunc.__name__}`")

    __hash__ = object.__hash__


# PerReplica has every operator: each raises the same error, which names the ways out.
_OF_TWO = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@", "and": "&",
    "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "divmod": "divmod",
}  # fmt: skip
_REFUSED = {
    "lt": "`<`", "le": "`<=`", "gt": "`>`", "ge": "`>=`", "eq": "`==`", "ne": "`!=`", "neg": "`-`", "pos": "`+`", "abs": "`abs`",
    "invert": "`~`", "round": "`round`", "trunc": "`math.trunc`", "floor": "`math.floor`", "ceil": "`math.ceil`",
    "bool": "`bool()`", "float": "`float()`", "int": "`int()`", "complex": "`complex()`", "len": "`len()`", "contains": "`in`",
    "iter": "iteration", "index": "use as an index", "getitem": "indexing", "setitem": "assignment to its items",
    "array": "conversion to a numpy array",
}  # fmt: skip
for _name, _symbol in _OF_TWO.items():
    _REFUSED |= {_name: f"`{_symbol}`", f"r{_name}": f"`{_symbol}`"}
for _name, _operation in _REFUSED.items():
    setattr(PerReplica, f"__{_name}__", functools.partialmethod(PerReplica._refuse, _operation))


def _abridge(value: jax.Array, label: str) -> str:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return str(value) if is_key else np.array2string(np.asarray(value), threshold=20, prefix=label)


def is_per_replica(value: object) -> bool:
    """Tell whether a value is a PerReplica; as `is_leaf`, this keeps them whole."""
    return isinstance(value, PerReplica)


# Attributes for other wings; `__init__` explains each.
stack_of: Callable[[PerReplica], Any] = operator.attrgetter("_array")
carried_sums: Callable[[PerReplica], tuple[Any, Any, Any] | None] = operator.attrgetter("_carried")
origin_of: Callable[[PerReplica], Origin | None] = operator.attrgetter("_origin")
uneven_shapes: Callable[[PerReplica], tuple[Shape, ...] | None] = operator.attrgetter("_shapes")
lost_rank: Callable[[PerReplica], int | None] = operator.attrgetter("_rank")
#: A value's class, shapes if they differ, and its array's placement, shape and dtype, ...; read in C, for each warm step.
facts_of = operator.attrgetter("__class__", "_shapes", "_array.sharding", "_array.aval.shape", "_array.aval.dtype", "_rank")


def proven_of(value: object) -> Any:
    """Return what the mirror proof found of a value; None if no step returned the value."""
    return value._proven if isinstance(value, PerReplica) else None


def require_whole(value: PerReplica, what: Callable[[], str]) -> None:
    """Refuse a PerReplica whose array got another shape outside of a step; `what` begins the message, such as "reduce got"."""
    array, shapes = stack_of(value), uneven_shapes(value) or ()
    if not getattr(array, "ndim", 0):
        found = "without replicas"
    elif any(len(shape) != array.ndim - 1 or any(map(operator.gt, shape, array.shape[1:])) for shape in shapes):
        found = f"whose array of shape {array.shape} does not hold the replicas' shapes {', '.join(map(str, shapes))}"
    elif not isinstance(array, jax.core.Tracer) and REPLICA_AXIS in getattr(getattr(array, "sharding", None), "spec", ((),))[1:]:
        found = "whose first axis is another than that of the replicas"
    elif (rank := lost_rank(value)) is not None:
        found = f"whose array has the shape {array.shape}, and had {rank} {'axis' if rank == 1 else 'axes'}"
    else:
        return
    raise PerReplicaError(
        f"{what()} a PerReplica {found}: jax.tree.map(jnp.sum, value) and the like work on one array of all replicas, padding "
        "included, and jax.vmap, jax.lax.map and jax.lax.scan map over its first axis, or add one before it. Compute in a step: "
        "strategy.run(jnp.sum, args=(value,)), strategy.run(lambda *x: jnp.stack(x), args=values), "
        "strategy.run(lambda x, many: jax.vmap(lambda k: step(x, k))(many), args=(x, many)). Outside of one, mr.scan takes and "
        "returns PerReplica values; and what is mapped may return one array, as of "
        "strategy.reduce('sum', strategy.run(step, args=(x, k)))."
    )


def stack_shapes(shapes: Sequence[Shape]) -> tuple[Shape, tuple[Shape, ...] | None]:
    """Return the shape to which all `shapes` are padded, and the shapes themselves when they differ."""
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    if all(shape == largest for shape in shapes):
        return largest, None
    return largest, tuple(shapes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A PerReplica's static part in a tree; `jax.tree.map` joins PerReplica values of equal kinds, whatever their ranks."""

    shapes: tuple[Shape, ...] | None
    rank: int | None = dataclasses.field(compare=False)


def _flatten(value: PerReplica) -> tuple[tuple[Any], _Kind]:
    rank = lost_rank(value)
    if rank is None:
        rank = getattr(stack_of(value), "ndim", None)
    return (stack_of(value),), _Kind(uneven_shapes(value), rank)


def _unflatten(kind: _Kind, children: Sequence[Any]) -> PerReplica:
    rank = kind.rank
    if getattr(children[0], "ndim", None) == rank:
        rank = None
    return PerReplica(children[0], kind.shapes, rank=rank)


jax.tree_util.register_pytree_node(PerReplica, _flatten, _unflatten)

"""Takes a call's arguments apart, and makes the cache key by which two calls share a program."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import StrategyMismatchError
from .._jax import tracing, user_code
from .._models import libraries
from .._replicas.arrays import check_range, is_numeric, refuse_mask
from .._replicas.per_replica import PerReplica, is_per_replica, lost_rank, origin_of, require_whole, stack_of, uneven_shapes
from .._typing import PyTree, Shape, UserFunction
from .._variables.variable import Variable
from .guards import match
from .own_code import ABSENT, FUNCTIONS, Sight, content_key, look_at

_WHOLE = (PerReplica, Variable)
#: Python numbers of these types are traced; a bool and an enum, which are ints too, are compiled in.
NUMBERS = (int, float, complex)
#: Types of arguments that hold no others, without numbers and numpy's arrays, which share programs with arrays of JAX.
_LEAVES = frozenset({*_WHOLE, bool, str, bytes})


class ArrayLeaf(NamedTuple):
    """An array argument: a mirrored one, or one replica's slice of a PerReplica."""

    shape: Shape  # without the axis of the replicas
    dtype: np.dtype[Any]
    is_weak: bool
    is_per_replica: bool
    shapes: tuple[Shape, ...] | None = None  # of the PerReplica, when they differ
    is_batch: bool = False  # whether it is a dataset's even batch, in a call with another, uneven one

    def aval(self, shape: Shape) -> jax.ShapeDtypeStruct:
        """Return its type for a trace, with this shape."""
        return jax.ShapeDtypeStruct(shape, self.dtype, weak_type=self.is_weak)


#: The function's code, the structure of the arguments, what each of their leaves is, JAX's settings; placements (see `key_of`).
CallKey = tuple[Any, ...]
_array_leaf = functools.partial(tuple.__new__, ArrayLeaf)  # without the Python function of NamedTuple, in every step


class Call(NamedTuple):
    """One call, taken apart."""

    key: CallKey  # equal for calls that share a program, if their guards match
    function: UserFunction
    arrays: list[Any]  # the array arguments; a PerReplica is its stacked array, a Python number itself
    treedef: Any
    leaves: list[ArrayLeaf | tuple[Any]]  # a static object is in a 1-tuple
    functions: tuple[UserFunction, ...]  # whose code is looked at; see `key_of`
    runs_steps: bool  # whether it is the call of an `mr.function`

    @property
    def name(self) -> str:
        """The user's name of the function."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def apply(self, arrays: Sequence[Any]) -> PyTree:
        """Call the function with other arrays in place of the given ones."""
        remaining = iter(arrays)
        leaves = [next(remaining) if isinstance(leaf, ArrayLeaf) else leaf[0] for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return self.function(*args, **kwargs)

    def array_leaves(self) -> list[ArrayLeaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, ArrayLeaf)]

    def is_uneven(self) -> bool:
        """Tell whether some argument has a different shape on different replicas."""
        return any(leaf.shapes is not None for leaf in self.array_leaves())

    def lengths(self, num_replicas: int) -> tuple[tuple[int, ...], ...]:
        """Return the lengths, on all replicas, of axes of per-replica arguments: of first axes, and of axes that differ."""
        of_each = [leaf.shapes or (leaf.shape,) * num_replicas for leaf in self.array_leaves() if leaf.is_per_replica]
        axes = [(axis, sizes) for shapes in of_each for axis, sizes in enumerate(zip(*shapes, strict=True))]
        return tuple(dict.fromkeys(sizes for axis, sizes in axes if axis == 0 or len(set(sizes)) > 1))

    def sees(self) -> Sight:
        """Look at the call's functions, and add the objects among its arguments that are known by identity."""
        sight = look_at(self.functions, self.runs_steps)
        static = [leaf[0] for leaf in self.leaves if not isinstance(leaf, ArrayLeaf)]
        objects = [value for value in static if _is_by_identity(value) and not isinstance(value, FUNCTIONS)]
        return sight._replace(objects=sight.objects + objects)


def _is_leaf(leaf: object) -> bool:
    return type(leaf) in _WHOLE


def take_apart(function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any], runs_steps: bool = False) -> Call:
    """Separate a call into arrays, which are passed to the program, and static objects, which are compiled in.

    Python numbers are passed, too, and arrays of other libraries on the host; the numbers in an Equinox module are static.
    """
    key, functions, arrays = key_of(function, args, kwargs, runs_steps)
    flat, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_leaf)
    leaves = [kind if isinstance(kind, ArrayLeaf) else (leaf,) for leaf, kind in zip(flat, key[2], strict=True)]
    return Call(key, function, arrays, treedef, leaves, functions, runs_steps)


def key_of(
    function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any], runs_steps: bool = False
) -> tuple[CallKey, tuple[UserFunction, ...], list[Any]]:
    """Return a call's key, the functions whose code is looked at, and its array arguments: all that a warm step needs.

    The functions are the called one, bound to the objects among its arguments, and the functions among its arguments. An
    `mr.function` (`runs_steps`) belongs to no strategy: its arguments choose the devices, so they are in its key.
    """
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        flat, structure, compiled_in = args, len(args), frozenset()  # most steps: nothing to flatten
    else:
        flat, structure = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_leaf)
        compiled_in = libraries.static_leaves(structure)
    # For messages only: a name costs more than all the rest of the key.
    name_of = lambda position: _names(function, jax.tree.structure((tuple(args), kwargs), is_leaf=_is_leaf))[position]  # noqa: E731
    arrays: list[Any] = []
    static: list[Any] = []
    kinds: list[ArrayLeaf | Hashable] = []  # for each leaf, an ArrayLeaf or a static key
    is_uneven = any(type(leaf) is PerReplica and uneven_shapes(leaf) is not None for leaf in flat)
    for position, leaf in enumerate(flat):
        is_static = position in compiled_in and type(leaf) in NUMBERS
        if is_static or (found := _as_array(leaf, is_uneven, functools.partial(name_of, position))) is None:
            static.append(leaf)
            kinds.append(static_key(leaf))
        else:
            arrays.append(found[0])
            kinds.append(found[1])
    functions: tuple[UserFunction, ...] = (function,)
    if static:
        functions = (_with_objects(function, args, kwargs, static), *(leaf for leaf in static if isinstance(leaf, FUNCTIONS)))
    key = (id(_code_of(function)), structure, tuple(kinds), tracing.settings())
    if runs_steps:
        key += tuple(getattr(stack_of(leaf), "sharding", None) for leaf in flat if isinstance(leaf, PerReplica))
    return key, functions, arrays


def _as_array(leaf: object, is_uneven: bool, name: Callable[[], str]) -> tuple[Any, ArrayLeaf] | None:
    """Return an argument as an array, and its type; None for an object that is compiled in."""
    if isinstance(leaf, PerReplica):
        array, shapes = stack_of(leaf), uneven_shapes(leaf)
        if lost_rank(leaf) is not None:
            require_whole(leaf, lambda: f"the argument {name()} is")
        is_batch = is_uneven and shapes is None and origin_of(leaf) is not None
        return array, _array_leaf((array.shape[1:], array.dtype, False, True, shapes, is_batch))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):  # random keys have no `weak_type`
        return leaf, _array_leaf((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), False, None, False))
    if type(leaf) in NUMBERS:
        if type(leaf) is int and leaf.bit_length() > 31:
            in_64_bits = min(max(leaf, -(2**63)), 2**63 - 1)  # numpy makes an object of what is larger
            check_range(np.asarray(in_64_bits), lambda: f"the argument {name()} holds")
        return leaf, _number_leaf(type(leaf), tracing.is_wide())
    if not _gives_array(type(leaf)):
        if isinstance(leaf, jax.Ref):
            refuse_ref(leaf, f"the argument {name()} is")
        return None
    array = _host_array(leaf, name)
    return array, _array_leaf((array.shape, jax.dtypes.canonicalize_dtype(array.dtype), False, False, None, False))


def refuse_ref(value: object, what: str) -> None:
    """Refuse a `jax.Ref` on its way into a program or out of it; `what` begins the message."""
    if isinstance(value, jax.Ref):
        raise TypeError(
            f"{what} a jax.Ref, which JAX changes in place and on one device only. What steps change is a variable: write v = "
            "mr.Variable(ref[...]) in `with strategy.scope():`, and v.assign(x) in the step. Its present value is an array: "
            "pass or return ref[...]. A step may make a Ref and use it until it ends."
        )


def _with_objects(function: UserFunction, args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[Any]) -> UserFunction:
    """Bind the objects among a function's arguments, such as `self`, so that a look at it follows their names, too."""
    objects = {id(leaf) for leaf in static if _is_by_identity(leaf) and not isinstance(leaf, (*_WHOLE, *FUNCTIONS))}
    if not objects:
        return function
    by_name = {name: value for name, value in kwargs.items() if id(value) in objects}
    return functools.partial(function, *[value if id(value) in objects else ABSENT for value in args], **by_name)


def _code_of(function: Any) -> Any:
    """Return a function's code, without `partial`s and bound methods around it; for another callable, return its type."""
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return getattr(function, "__code__", type(function))


@functools.lru_cache
def _number_leaf(kind: type, is_wide: bool) -> ArrayLeaf:
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(kind))
    return ArrayLeaf((), dtype, True, False)


@functools.lru_cache(maxsize=4096)
def _gives_array(kind: type) -> bool:
    """Tell whether objects of a type are arrays on the host: numpy's, and others that numpy or DLPack can read."""
    if issubclass(kind, str | bytes | type):
        return False
    is_foreign = (hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")) and not hasattr(kind, "__jax_array__")
    return is_foreign or issubclass(kind, np.ndarray | np.generic)


def _host_array(leaf: Any, name: Callable[[], str]) -> np.ndarray:
    """Copy an array on the host, because the user may change it before the program reads it."""
    refuse_mask(leaf, lambda: f"the argument {name()} is")
    try:
        array = np.array(leaf)
    except TypeError:  # numpy has no bfloat16, in which torch's tensors may be
        if not hasattr(leaf, "__dlpack__"):
            raise
        array = np.array(jax.dlpack.from_dlpack(leaf))
    if not is_numeric(array.dtype):
        raise TypeError(
            f"the argument {name()} is a numpy array of dtype {array.dtype}, which no device can hold; expected numbers. Encode "
            "it as integers first, or leave it out of args."
        )
    check_range(array, lambda: f"the argument {name()} holds")
    return array


def array_leaves(key: CallKey) -> list[ArrayLeaf]:
    """Return the types of the array arguments in a key of `key_of`."""
    return [kind for kind in key[2] if isinstance(kind, ArrayLeaf)]


def check_replicas(arrays: Sequence[Any], leaves: Sequence[ArrayLeaf], names: Callable[[], list[str]], num_replicas: int) -> None:
    """Refuse a PerReplica that another strategy made."""
    for position, (array, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        if not leaf.is_per_replica:
            continue
        require_whole(PerReplica(array, leaf.shapes), lambda: f"the argument {names()[position]} is")  # noqa: B023
        if array.shape[0] != num_replicas:
            raise StrategyMismatchError(
                f"the argument {names()[position]} is a PerReplica of {array.shape[0]} replicas, but this strategy has "
                f"{num_replicas}; it comes from another strategy. Distribute the data with the strategy that runs the step."
            )


def static_key(value: Any) -> Hashable:
    """Return a hashable that is equal for static values with the same program; of functions the guards must match, too."""
    if isinstance(value, FUNCTIONS):
        return (type(value), id(_code_of(value)))
    if isinstance(value, float | complex):
        return content_key(value)
    if _is_by_identity(value):
        return (type(value), id(value))
    return (type(value), value)


def is_same(first: Any, second: Any) -> bool:
    """Tell whether two static values give the same program."""
    sees_same = not isinstance(first, FUNCTIONS) or match(look_at((first,)).guards, (second,))
    return static_key(first) == static_key(second) and sees_same


def _is_by_identity(value: object) -> bool:
    """Tell whether an object is equal to itself only. Keys have its `id`, so that they do not keep it alive."""
    kind = type(value)
    if isinstance(value, Variable) or (kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__):
        return True
    try:
        hash(value)
    except TypeError:
        return True
    return False


def argument_names(call: Call) -> list[str]:
    """Return the name of each array argument, such as `x['image']`, in the order of `call.arrays`."""
    return [name for name, leaf in zip(leaf_names(call), call.leaves, strict=True) if isinstance(leaf, ArrayLeaf)]


def leaf_names(call: Call) -> list[str]:
    return _names(call.function, call.treedef)


def _names(function: UserFunction, treedef: Any) -> list[str]:
    tree = jax.tree.unflatten(treedef, list(range(treedef.num_leaves)))
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [_name_of(path, positional, variadic) for path, _ in paths]


def _name_of(path: Any, positional: Sequence[str], variadic: str) -> str:
    position, first, *rest = path
    if position.idx == 1:
        name = str(first.key)
    elif first.idx < len(positional):
        name = positional[first.idx]
    else:
        name = f"{variadic}[{first.idx - len(positional)}]"
    return f"`{name}{jax.tree_util.keystr(tuple(rest))}`"


# -- batches among the arguments


def of_last_batch(arguments: PyTree) -> PyTree | None:
    """Return a new step's arguments as in the last batch of their dataset: with its shapes, and without values.

    Return None unless each argument with rows is of a dataset whose last batch is known, and uneven. Warn of two datasets
    whose rows may not pair.
    """
    values = [v for v in jax.tree.leaves(arguments, is_leaf=is_per_replica) if isinstance(v, PerReplica) and v.ndim]
    origins = [origin for value in values if (origin := origin_of(value)) is not None]
    if len({origin.dataset for origin in origins}) > 1 and any(origin.is_auto_by_file for origin in origins):
        user_code.warn(_OTHER_PAIRS)
    last = {id(value): _last(value) for value in values}
    if not values or any(coming is None for coming in last.values()):
        return None
    is_leaf = lambda leaf: hasattr(leaf, "__jax_array__")  # noqa: E731  # of ours: a variable stays one
    return jax.tree.map(lambda leaf: last.get(id(leaf), leaf), arguments, is_leaf=is_leaf)


def _last(value: PerReplica) -> PerReplica | None:
    array, origin = stack_of(value), origin_of(value)
    if origin is None or not origin.last_sizes or uneven_shapes(value) or isinstance(array, jax.core.Tracer):
        return None
    sizes = origin.last_sizes
    stands_for = jax.ShapeDtypeStruct((len(sizes), max(sizes), *array.shape[2:]), array.dtype, sharding=array.sharding)
    return PerReplica(stands_for, tuple((size, *array.shape[2:]) for size in sizes))


_OTHER_PAIRS = (
    "a step takes batches of two distributed datasets, of which AutoShardPolicy.AUTO shares one by file: on several "
    "workers other rows may meet than on one. If rows belong in pairs, zip the pipelines and distribute them as one "
    "dataset. If not, say so: mr.InputOptions(auto_shard_policy='file')."
)

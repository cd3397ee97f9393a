"""What makes two calls the same program: the function, the structure, the arrays' types, the static values."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import StrategyMismatchError
from .._replicas.arrays import check_range, is_numeric, refuse_mask
from .._replicas.per_replica import PerReplica, require_whole, stack_of, uneven_shapes
from .._typing import PyTree, Shape
from .._variables.variable import Variable

_WHOLE = (PerReplica, Variable)
_BY_REPR = (float, complex)  # 0.0 and -0.0 differ, nan equals itself
_BY_VALUE = (bool, int, str, bytes, type(None))
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_NUMPY = (np.ndarray, np.generic)
#: Types of arguments that hold no others (without numpy's arrays, which share programs with those of JAX).
_LEAVES = frozenset({*_WHOLE, *_BY_REPR, bool, int, str, bytes})


class ArrayLeaf(NamedTuple):
    """An array argument: a mirrored one, or one replica's slice of a PerReplica.

    Attributes:
        shape, dtype, is_weak: its type, without the replica axis.
        is_per_replica: whether each replica gets its own slice.
        shapes: the PerReplica's shapes when they differ.
    """

    shape: Shape
    dtype: Any
    is_weak: bool
    is_per_replica: bool
    shapes: tuple[Shape, ...] | None = None

    def aval(self, shape: Shape) -> jax.ShapeDtypeStruct:
        """Return what stands for it in a trace, with a shape of its own."""
        return jax.ShapeDtypeStruct(shape, self.dtype, weak_type=self.is_weak)


_array_leaf = functools.partial(tuple.__new__, ArrayLeaf)  # without the Python function of NamedTuple, in every step


class Call(NamedTuple):
    """One call, taken apart.

    Attributes:
        key: equal for calls that can share a program.
        arrays: the array arguments; a PerReplica is its stacked array.
        treedef, leaves: the rest: each leaf is an ArrayLeaf, or the static object in a 1-tuple.
        numbers: which of the arrays were Python numbers, see `_program/numbers`.
    """

    key: Any
    function: Callable[..., Any]
    arrays: list[Any]
    treedef: Any
    leaves: list[Any]
    numbers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The user's name of the function."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def apply(self, arrays: Sequence[Any], wrap: Callable[[ArrayLeaf, Any], Any]) -> PyTree:
        """Call the function with other arrays in place of the given ones."""
        remaining = iter(arrays)
        leaves = [wrap(leaf, next(remaining)) if isinstance(leaf, ArrayLeaf) else leaf[0] for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return self.function(*args, **kwargs)

    def array_leaves(self) -> list[ArrayLeaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, ArrayLeaf)]

    def has_numbers(self) -> bool:
        """Tell whether some argument is a Python number that is compiled in."""
        return any(type(leaf[0]) in (int, float) for leaf in self.leaves if not isinstance(leaf, ArrayLeaf))

    def is_uneven(self) -> bool:
        """Tell whether some argument has a different shape on different replicas."""
        return any(leaf.shapes is not None for leaf in self.array_leaves())

    def keyed_again(self) -> Call:
        """Return the call with the key that it has after a trace, which may have set globals, such as a count of traces."""
        return self._replace(key=(function_key(self.function), *self.key[1:]))


def _is_whole(leaf: Any) -> bool:
    return type(leaf) in _WHOLE


def take_apart(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Separate a call into what is compiled in and what is passed to the program.

    Arrays (jax, numpy, PerReplica) are passed; everything else is static and part of the key.
    """
    key, arrays = key_of(function, args, kwargs)
    flat, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_whole)
    leaves = [kind if isinstance(kind, ArrayLeaf) else (leaf,) for leaf, kind in zip(flat, key[2], strict=True)]
    return Call(key, function, arrays, treedef, leaves)


def key_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return a call's key and its array arguments, which is all that a warm step looks at."""
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        flat, structure = args, len(args)  # most steps: nothing to flatten
    else:
        flat, structure = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_whole)
    arrays: list[Any] = []
    kinds: list[Any] = []  # for each leaf, an ArrayLeaf or a static key
    for leaf in flat:
        if isinstance(leaf, PerReplica):
            array = stack_of(leaf)
            kinds.append(_array_leaf((array.shape[1:], array.dtype, False, True, uneven_shapes(leaf))))
        elif isinstance(leaf, jax.Array):
            array = leaf
            is_weak = getattr(array, "weak_type", False)  # random keys have none
            kinds.append(_array_leaf((array.shape, array.dtype, is_weak, False, None)))
        elif isinstance(leaf, _NUMPY) and not isinstance(leaf, str | bytes):
            refuse_mask(leaf, lambda: f"the argument {_name_at(len(kinds), function, args, kwargs)} is")
            array = np.array(leaf)  # a copy: the program reads it later, when the user may have changed it
            if not is_numeric(leaf.dtype):
                raise TypeError(_numpy_message(leaf, _name_at(len(kinds), function, args, kwargs)))
            check_range(array, lambda: f"the argument {_name_at(len(kinds), function, args, kwargs)} holds")
            kinds.append(_array_leaf((leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), False, False, None)))
        else:
            kinds.append(static_key(leaf))
            continue
        arrays.append(array)
    return (function_key(function), structure, tuple(kinds)), arrays


def array_leaves(key: Any) -> list[ArrayLeaf]:
    """Return what a key of `key_of` says about the array arguments."""
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


def _name_at(position: int, function: Any, args: Sequence[Any], kwargs: Any) -> str:
    return _names(function, jax.tree.structure((tuple(args), kwargs), is_leaf=_is_whole))[position]


def _numpy_message(array: np.ndarray | np.generic, name: str) -> str:
    return (
        f"the argument {name} is a numpy array of dtype {array.dtype}, which no device can hold; expected numbers. Encode "
        "it as integers first, or leave it out of args."
    )


def static_key(value: Any) -> Any:
    """Return a hashable that is equal for static values which give the same program."""
    if is_by_content(type(value)):
        return _content_key(value, _MAX_DEPTH)
    return (type(value), id(value) if _is_by_identity(value) else value)


class _Forgotten(NamedTuple):
    """What is remembered of an object that is equal to itself only."""

    kind: str
    identity: int

    def __repr__(self) -> str:
        return f"<{self.kind} at {self.identity:#x}>"


def remembered(value: Any) -> Any:
    """Return a static value, or what tells it from others without keeping it alive."""
    is_function = isinstance(value, FUNCTIONS)
    return _Forgotten(str(type(value).__name__), id(value)) if is_function or _is_by_identity(value) else value


def _is_by_identity(value: Any) -> bool:
    """Tell whether an object is equal to itself only. Its `id` is in keys then, so that they do not keep it alive."""
    kind = type(value)
    if isinstance(value, Variable) or (kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__):
        return True
    try:
        hash(value)
    except TypeError:
        return True
    return False


#: Of so much code the names are kept, and with them the code.
MAX_NAMES = 4096
#: Functions in a function's closure are told apart by theirs, so many levels deep.
_MAX_DEPTH = 4


def function_key(function: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a hashable that is equal for functions which give the same program.

    A function that is defined again and again in a loop keeps its code; it is the same program while the
    things that it closes over, and the module's globals that it names, are the same objects, or equal numbers and strings.
    """
    if isinstance(function, types.FunctionType):
        # Here as in `_content_key`, without a call for each value that is compared by identity: this is in every step.
        named = [id(v) if not is_by_content(type(v)) else _content_key(v, 0) for v in _globals_of(function)]
        identity = (id(function.__code__), id(function.__globals__), tuple(named))
        if function.__defaults__ or function.__kwdefaults__:
            identity += tuple([_content_key(v, depth) for v in _defaults_of(function)])
        if not function.__closure__:
            return identity
        own = [id(v) if not is_by_content(type(v)) else _content_key(v, depth) for v in map(_content_of, function.__closure__)]
        return (identity, tuple(own))
    if isinstance(function, types.MethodType):
        return (function_key(function.__func__, depth), id(function.__self__))
    if isinstance(function, functools.partial):
        content = (*function.args, *function.keywords.values())
        return (function_key(function.func, depth), tuple(function.keywords), tuple([_content_key(v, depth) for v in content]))
    return id(function)


def _content_key(value: Any, depth: int) -> Any:
    if not is_by_content(type(value)):
        return id(value)
    if isinstance(value, _BY_REPR):
        return (type(value), repr(value))
    if isinstance(value, _BY_VALUE):
        return (type(value), value)
    return function_key(value, depth - 1) if depth else id(value)


@functools.lru_cache(maxsize=4096)
def is_by_content(kind: type) -> bool:
    return issubclass(kind, (*_BY_REPR, *_BY_VALUE, *FUNCTIONS))


#: The names in code, by its `id`: the hash of code, which `lru_cache` would ask for, is of all its instructions.
_names_by_code: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}


def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that code reads; `co_names` has attributes too, and `output.loss` does not read a global `loss`."""
    known = _names_by_code.get(id(code))
    if known is not None:
        return known[1]
    own = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in names_in(const)]
    if len(_names_by_code) >= MAX_NAMES:
        _names_by_code.clear()
    names = tuple(dict.fromkeys((*own, *inner)))
    _names_by_code[id(code)] = code, names
    return names


#: In place of a name that is no global, such as that of a built-in function.
ABSENT = object()


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Return the module-level objects that a function names, which a notebook or a loop in a script may rebind."""
    return map(function.__globals__.get, names_in(function.__code__), itertools.repeat(ABSENT))


def _defaults_of(function: types.FunctionType) -> list[Any]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).keys(), *(function.__kwdefaults__ or {}).values()]


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def identified(call: Call) -> Iterator[Any]:
    """Yield the objects whose identity is in a call's key: while they live, no other object can have it."""
    yield from identified_by(call.function, _MAX_DEPTH)
    for leaf in call.leaves:
        if isinstance(leaf, ArrayLeaf):
            continue
        if is_by_content(type(leaf[0])):
            yield from _identified_in(leaf[0], _MAX_DEPTH)
        elif _is_by_identity(leaf[0]):
            yield leaf[0]


def identified_by(function: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield those whose identity is in `function_key(function, depth)`."""
    if isinstance(function, types.FunctionType):
        yield function.__code__
        for value in _globals_of(function):
            yield from _identified_in(value, 0)
        for value in (*_defaults_of(function), *map(_content_of, function.__closure__ or ())):
            yield from _identified_in(value, depth)
    elif isinstance(function, types.MethodType):
        yield function.__self__
        yield from identified_by(function.__func__, depth)
    elif isinstance(function, functools.partial):
        yield from identified_by(function.func, depth)
        for value in (*function.args, *function.keywords.values()):
            yield from _identified_in(value, depth)
    else:
        yield function


def _identified_in(value: Any, depth: int) -> Iterator[Any]:
    """Yield those in `_content_key(value, depth)`."""
    if not is_by_content(type(value)) or (isinstance(value, FUNCTIONS) and not depth):
        yield value
    elif isinstance(value, FUNCTIONS):
        yield from identified_by(value, depth - 1)


def argument_names(call: Call) -> list[str]:
    """Return the name of each array argument, such as `x['image']`, in the order of `call.arrays`."""
    return [name for name, leaf in zip(leaf_names(call), call.leaves, strict=True) if isinstance(leaf, ArrayLeaf)]


def leaf_names(call: Call) -> list[str]:
    return _names(call.function, call.treedef)


def _names(function: Callable[..., Any], treedef: Any) -> list[str]:
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

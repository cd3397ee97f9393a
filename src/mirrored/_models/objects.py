"""Model objects that hold arrays: a step gets their arrays, and returns new ones; checkpoints name the arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._errors import ContextError
from .._jax import tracing, user_code
from .._jax.marks import Mark, Purpose, mark
from .._replicas import frames, placement
from .._replicas.context import current_replica
from .._replicas.division import placement_of_array
from .._replicas.mesh import ReplicaMesh
from .._typing import PyTree
from .._variables import storage
from .libraries import LIBRARIES
from .library import Objects, Path


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class _StandIn:
    """The stand-in for an object among a step's arguments; the first stand-in has the arrays of all objects."""

    kind: Objects
    number: int  # which of the step's distinct objects it stands for
    structure: Any = None
    paths: tuple[Path, ...] = ()
    arrays: tuple[Any, ...] = ()

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        keys = [jax.tree_util.GetAttrKey(".".join(map(str, path[1:]))) for path in self.paths]
        return list(zip(keys, self.arrays, strict=True)), self.tree_flatten()[1]

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.arrays, (self.kind, self.number, self.structure, self.paths)  # faster, where nobody asks for names

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Sequence[Any]) -> _StandIn:
        kind, number, structure, paths = static
        return cls(kind, number, structure, paths, tuple(arrays))


def _is_stand_in(leaf: object, kind: Objects) -> bool:
    return isinstance(leaf, _StandIn) and leaf.kind is kind


def held_in(arguments: PyTree) -> Objects | None:
    """Return the kind of the first imported library that has objects among the arguments; None if there are none."""
    for library in LIBRARIES:  # in place, without calls of ours: a warm step asks
        kind = library.objects
        if kind is not None and library.package in sys.modules:
            is_leaf = lambda value, kind=kind: type(value) is _StandIn or kind.is_whole(value)  # noqa: E731
            if any(map(kind.is_one, jax.tree.leaves(arguments, is_leaf=is_leaf))):
                return kind
    return None


def is_object(value: object) -> bool:
    """Tell whether a value is an object that holds arrays, of an imported library."""
    return any(library.package in sys.modules and library.objects.is_one(value) for library in LIBRARIES if library.objects)


def arrays_in(value: object) -> tuple[Any, ...]:
    """Return the arrays of an object, always in one order."""
    return tuple(jax.tree.leaves(list(_apart(value).arrays.values())))


def arrays_by_name(value: object) -> dict[str, Any]:
    """Return the arrays of an object by their names, such as `['conv']['kernel']`."""
    return {_name(path): array for path, array in _apart(value).arrays.items()}


def set_arrays(value: object, arrays: Mapping[str, Any]) -> None:
    """Give an object new arrays, by name; it keeps the arrays that are not named."""
    parts = _apart(value)
    parts.give_back({path: arrays[_name(path)] for path in parts.arrays if _name(path) in arrays})


def _apart(value: object) -> Any:
    kinds = [library.objects for library in LIBRARIES if library.objects is not None and library.package in sys.modules]
    return next(kind for kind in kinds if kind.is_one(value)).take_apart([value])


def _name(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path[1:])


def run_with(
    kind: Objects,
    run: Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], PyTree],
    mesh: ReplicaMesh | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> PyTree:
    """Run a step with objects among its arguments, and give the objects their new values.

    The step gets copies of the objects, as in `nnx.jit`. Values that it changes must be the same on every replica. The argument
    `run` runs a step whose arguments are arrays.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=kind.is_whole)
    objects = list({id(leaf): leaf for leaf in leaves if kind.is_one(leaf)}.values())
    structure, given, give_back = kind.take_apart(objects)
    placed = _placed(mesh, given)
    stand_ins = {id(value): _StandIn(kind, number) for number, value in enumerate(objects)}
    with_arrays = iter([_StandIn(kind, 0, structure, tuple(placed), tuple(placed.values()))])  # only once, also if passed twice
    new_leaves = [next(with_arrays, stand_ins[id(leaf)]) if kind.is_one(leaf) else leaf for leaf in leaves]
    new_args, new_kwargs = jax.tree.unflatten(treedef, new_leaves)
    result, changed = run(_on_arrays(kind, function), new_args, new_kwargs)
    moved = {path: array for path, array in placed.items() if array is not given[path]}
    give_back(moved | changed)
    return result


def _placed(mesh: ReplicaMesh | None, arrays: dict[Path, Any]) -> dict[Path, Any]:
    """Place arrays as a step returns them, so that the second step compiles nothing; not needed on several workers."""
    if mesh is None or not mesh.is_alone or frames.is_traced() or tracing.current_trace() is not tracing.NO_TRACE:
        return arrays
    targets = {path: placement_of_array(mesh, array) for path, array in arrays.items() if isinstance(array, jax.Array)}
    missing = [path for path, target in targets.items() if arrays[path].sharding != target]
    others = [*(arrays[path] for path in targets.keys() - missing), *storage.held_arrays()]
    moving = placement.unshared(mesh, [placement.own_copy(arrays[path]) for path in missing], others, is_moving=True)
    moved = mesh.put(moving, [targets[path] for path in missing])
    return arrays | dict(zip(missing, moved, strict=True))


def _on_arrays(kind: Objects, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a step that takes stand-ins, and returns `function`'s result and the objects' new arrays, by path."""

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: _is_stand_in(leaf, kind))
        [whole] = [leaf for leaf in leaves if _is_stand_in(leaf, kind) and leaf.structure is not None]
        objects, replica = kind.put_together(whole.structure, list(whole.arrays)), current_replica()
        with kind.on_replica(objects, replica) if replica else contextlib.nullcontext():
            began = kind.take_apart(objects).arrays  # held, so that no other array gets their ids
            leaves = [objects[leaf.number] if _is_stand_in(leaf, kind) else leaf for leaf in leaves]
            real_args, real_kwargs = jax.tree.unflatten(treedef, leaves)
            result = function(*real_args, **real_kwargs)
        where = user_code.line_of(function)
        structure, ended, _ = kind.take_apart(objects)
        if structure != whole.structure:
            raise ContextError(kind.changed.format(where=where))
        given = zip(whole.paths, whole.arrays, strict=True)
        # An unchanged random stream has its given key again; an unchanged metric has the zero with which a replica began.
        unchanged = {(path, id(array)) for path, array in [*given, *began.items()]}
        new = {path: array for path, array in ended.items() if (path, id(array)) not in unchanged}
        return result, {path: _marked(kind, objects, path, array, where) for path, array in new.items()}

    return step


def _marked(kind: Objects, objects: list[Any], path: Path, value: PyTree, where: str) -> PyTree:
    """Mark an object's new value, so that the proof refuses a step in which it differs by replica."""
    name = ".".join([type(objects[path[0]]).__name__, *map(str, path[1:])])
    return jax.tree.map(lambda array: mark(array, Mark(Purpose.STATE, name, where, message=kind.remedy)), value)

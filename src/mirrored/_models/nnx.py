"""Flax NNX objects among a step's arguments: the step takes their arrays, and they get their new values when it ends."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import ContextError
from .._jax import tracing, user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import ReduceOp
from .._replicas import frames, placement
from .._replicas.context import ReplicaContext, current_replica
from .._replicas.mesh import ReplicaMesh
from .._typing import REPLICA_AXIS, PyTree

#: The path of an array in a list of NNX objects.
_Path = tuple[Any, ...]
_ARRAYS = (jax.Array, np.ndarray)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class _StandIn:
    """The stand-in for an NNX object in the arguments of a step; the first one has the structure and arrays of all objects."""

    number: int  # which of the step's distinct objects it stands for
    graph: Any = None
    paths: tuple[_Path, ...] = ()
    arrays: tuple[Any, ...] = ()

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        keys = [jax.tree_util.GetAttrKey(".".join(map(str, path[1:]))) for path in self.paths]
        return list(zip(keys, self.arrays, strict=True)), (self.number, self.graph, self.paths)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.arrays, (self.number, self.graph, self.paths)  # faster, where nobody asks for names

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Sequence[Any]) -> _StandIn:
        number, graph, paths = static
        return cls(number, graph, paths, tuple(arrays))


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def holds_objects(arguments: PyTree) -> bool:
    """Tell whether arguments contain an NNX object. Call this only when `flax.nnx` has been imported."""
    return any(map(is_object, jax.tree.leaves(arguments, is_leaf=lambda value: type(value) is _StandIn or _is_whole(value))))


def is_object(value: object) -> bool:
    """Tell whether a value is an NNX module, optimizer, metric or variable. Call this only when `flax.nnx` is imported."""
    return not isinstance(value, _ARRAYS) and isinstance(value, _nnx().Pytree | _nnx().Variable)


def variables_of(value: object) -> Iterator[tuple[_Path, Any]]:
    """Yield the path and the array of each variable of an NNX object."""
    for path, node in _nnx().iter_graph(value):
        if isinstance(node, _nnx().Variable):
            yield path, node.get_raw_value()


def arrays_by_name(value: object) -> dict[str, Any]:
    """Return the arrays of an NNX object by their names, such as `['conv']['kernel']`."""
    return {_name(path): array for path, array in _arrays_of(_take_apart([value])[1]).items()}


def set_arrays(value: object, arrays: Mapping[str, Any]) -> None:
    """Give an NNX object new arrays, by name; it keeps the arrays that are not named."""
    leaves = _take_apart([value])[1]
    _give_back([value], leaves, {path: arrays[_name(path)] for path in leaves if _name(path) in arrays})


def _name(path: _Path) -> str:
    return "".join(f"[{key!r}]" for key in path[1:])


def _take_apart(objects: list[Any]) -> tuple[Any, dict[_Path, Any]]:
    """Return the structure of NNX objects, and their variables and bare arrays by path."""
    # At each step, nnx.split and nnx.to_flat_state would leave all arrays in a reference cycle: a closure that calls itself.
    graph, leaves = _nnx().flatten(objects)
    return graph, dict(leaves)


def _arrays_of(leaves: Mapping[_Path, Any]) -> dict[_Path, Any]:
    as_pure, found = _nnx().as_pure, {}
    for path, leaf in leaves.items():
        raw = leaf.get_raw_value() if _is_variable(leaf) else leaf
        found[path] = raw if isinstance(raw, _ARRAYS) else as_pure(raw)
    return found


def _is_variable(leaf: object) -> bool:
    """Ask Flax, whose `isinstance` is slow, only about what is no array."""
    return not isinstance(leaf, _ARRAYS) and isinstance(leaf, _nnx().Variable)


def _give_back(objects: list[Any], leaves: Mapping[_Path, Any], new: Mapping[_Path, Any]) -> None:
    """Give NNX objects new values, by writing to their variables: that takes a ninth of the time of `nnx.update`."""
    others = []
    for path, value in new.items():
        leaf = leaves[path]
        if _is_variable(leaf) and isinstance(leaf.get_raw_value(), _ARRAYS):
            leaf.set_raw_value(value)
        else:
            others.append((path, value))
    if others:
        _nnx().update(objects, _nnx().from_flat_state(others))


def _is_whole(value: object) -> bool:
    return isinstance(value, _nnx().State) or is_object(value)  # a State is a tree of arrays, as in nnx.jit


def run_with_objects(
    run: Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], PyTree],
    mesh: ReplicaMesh | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> PyTree:
    """Run a step with NNX objects among its arguments, and give the objects their new values.

    The step gets copies of the objects, as in `nnx.jit`. Values that it changes must be the same on every replica, except
    metrics, which are summed. Random streams differ by replica; BatchNorm layers see the rows of all replicas. The
    argument `run` runs a step whose arguments are arrays.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_whole)
    objects = list({id(leaf): leaf for leaf in leaves if is_object(leaf)}.values())
    graph, leaves_by_path = _take_apart(objects)
    given = _arrays_of(leaves_by_path)
    placed = _placed(mesh, given)
    numbers = {id(each): number for number, each in enumerate(objects)}
    first = iter([(graph, tuple(placed), tuple(placed.values()))])
    stand_ins = [_StandIn(numbers[id(leaf)], *next(first, ())) if is_object(leaf) else leaf for leaf in leaves]
    new_args, new_kwargs = jax.tree.unflatten(treedef, stand_ins)
    result, changed = run(_on_arrays(function), new_args, new_kwargs)
    moved = {path: array for path, array in placed.items() if array is not given[path]}
    _give_back(objects, leaves_by_path, moved | changed)
    return result


def _placed(mesh: ReplicaMesh | None, arrays: dict[_Path, Any]) -> dict[_Path, Any]:
    """Place arrays on the replicas before the first step, so that it need not compile twice; not needed on several workers."""
    if mesh is None or not mesh.is_alone or frames.is_traced() or tracing.current_trace() is not tracing.NO_TRACE:
        return arrays
    known = {path: array for path, array in arrays.items() if isinstance(array, jax.Array)}
    return arrays | dict(zip(known, placement.mirror(mesh, list(known.values())), strict=True))


def _on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a step that takes stand-ins, and returns `function`'s result and the objects' new arrays, by path."""

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, _StandIn))
        [whole] = [leaf for leaf in leaves if isinstance(leaf, _StandIn) and leaf.graph is not None]
        objects = _nnx().unflatten(whole.graph, list(whole.arrays))
        replica = current_replica()
        with jax.named_scope(user_code.OURS + "the start of the step, where its nnx.Rngs and metrics become each replica's own"):
            keys = _make_own(objects, replica) if replica else []
        norms = [norm for norm in _nodes(objects, _nnx().BatchNorm) if replica and norm.axis_name is None]
        for norm in norms:  # BatchNorm sees the rows of all replicas
            norm.axis_name = REPLICA_AXIS
        began = _arrays_of(_take_apart(objects)[1])  # held, so that no other array gets their ids
        given = set(map(id, began.values()))
        own = [objects[leaf.number] if isinstance(leaf, _StandIn) else leaf for leaf in leaves]
        own_args, own_kwargs = jax.tree.unflatten(treedef, own)
        result = function(*own_args, **own_kwargs)
        for norm in norms:
            norm.axis_name = None
        where = user_code.line_of(function)
        if replica:
            _combine_metrics(objects, replica, lambda state: id(state.get_value()) not in given)
        for stream, key in keys:
            stream.set_value(key)
        graph, by_path = _take_apart(objects)
        if graph != whole.graph:
            raise ContextError(
                f"the step at {where} has changed the structure of an NNX object in its arguments: it has added or removed "
                "a layer or an array, or set an attribute that is no array, such as `model.train()` does. A step is traced once "
                "and run many times; change the structure before it, and keep what changes by step in an nnx.Variable. A step "
                "takes no references: a model of nnx.with_vars(model, ref=True) needs ref=False before."
            )
        was = zip(whole.paths, whole.arrays, strict=True)  # a stream has its key of then, a metric its start of `began`
        unchanged = {(path, id(array)) for path, array in [*was, *began.items()]}
        new = {path: array for path, array in _arrays_of(by_path).items() if (path, id(array)) not in unchanged}
        return result, {path: _marked(objects, path, array, where) for path, array in new.items()}

    return step


def _make_own(objects: list[Any], replica: ReplicaContext) -> list[tuple[Any, jax.Array]]:
    """Give a replica its own random streams, and let metrics begin at zero on all replicas but the first.

    Return the streams, each with the key that it gets back after the step.
    """
    keys = [(node, node.get_value()) for node in _nodes(objects, _nnx().RngKey)]
    for node, key in keys:
        node.set_value(replica.rng(key))
    for state in (state for metric in _metrics_of(objects) for state in _states_of(metric)):
        state.set_value(jnp.where(replica.replica_id_in_sync_group == 0, state.get_value(), jnp.zeros_like(state.get_value())))
    return keys


def _metrics_of(objects: list[Any]) -> list[Any]:
    """Return the metrics that can be combined over the replicas."""
    return _nodes(objects, _nnx().metrics.Average | _nnx().metrics.Welford)


def _nodes(objects: list[Any], kind: Any) -> list[Any]:
    return [node for _, node in _nnx().iter_graph(objects) if isinstance(node, kind)]


def _states_of(metric: Any) -> list[Any]:
    return [v for v in vars(metric).values() if isinstance(v, _nnx().metrics.MetricState)]


def _combine_metrics(objects: list[Any], replica: ReplicaContext, is_changed: Callable[[Any], bool]) -> None:
    """Combine the replicas' metrics, so that each holds what all replicas have added to it."""
    sum_over_replicas = functools.partial(replica.all_reduce, ReduceOp.SUM)
    metrics = [metric for metric in _metrics_of(objects) if any(map(is_changed, _states_of(metric)))]
    averages = [state for metric in metrics if isinstance(metric, _nnx().metrics.Average) for state in _states_of(metric)]
    for state, value in zip(averages, sum_over_replicas([state.get_value() for state in averages]), strict=True):
        state.set_value(value)
    for metric in metrics:
        if isinstance(metric, _nnx().metrics.Welford):
            _combine_welford(metric, sum_over_replicas)


def _combine_welford(metric: Any, sum_over_replicas: Callable[[Any], Any]) -> None:
    """Combine the replicas' counts, means and squared distances; some replicas may have seen no values.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    count, mean, m2 = metric.count.get_value(), metric.mean.get_value(), metric.m2.get_value()
    mean, m2 = jnp.where(count > 0, mean, 0), jnp.where(count > 0, m2, 0)
    total, weighted = sum_over_replicas((count, count * mean))
    new_mean = weighted / jnp.maximum(total, 1)
    metric.count.set_value(total)
    metric.mean.set_value(new_mean)
    metric.m2.set_value(sum_over_replicas(m2 + count * (mean - new_mean) ** 2))


def _marked(objects: list[Any], path: _Path, value: PyTree, where: str) -> PyTree:
    """Mark an object's new value, so that the proof refuses a step in which it differs by replica."""
    name = ".".join([type(objects[path[0]]).__name__, *map(str, path[1:])])
    return jax.tree.map(lambda array: mark(array, Mark(Purpose.STATE, name, where)), value)

"""Flax NNX: models, optimizers, metrics and variables are objects that hold arrays. Random streams differ by replica."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import ContextError
from .._jax import user_code
from .._options import ReduceOp
from .._replicas.context import ReplicaContext
from .._typing import REPLICA_AXIS
from .library import Apart, Library, Objects, Path

_ARRAYS = (jax.Array, np.ndarray)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_object(value: object) -> bool:
    """Tell whether a value is an NNX module, optimizer, metric or variable."""
    return not isinstance(value, _ARRAYS) and isinstance(value, _nnx().Pytree | _nnx().Variable)


def _is_whole(value: object) -> bool:
    return isinstance(value, _nnx().State) or _is_object(value)  # a State is a tree of arrays, as in nnx.jit


def _take_apart(objects: list[Any]) -> Apart:
    # At each step, nnx.split and nnx.to_flat_state would leave all arrays in a reference cycle: a closure that calls itself.
    graph, flat = _nnx().flatten(objects)
    leaves = dict(flat)
    return Apart(graph, _arrays_of(leaves), functools.partial(_give_back, objects, leaves))


def _arrays_of(leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    as_pure, found = _nnx().as_pure, {}
    for path, leaf in leaves.items():
        raw = leaf.get_raw_value() if _is_variable(leaf) else leaf
        found[path] = raw if isinstance(raw, _ARRAYS) else as_pure(raw)
    return found


def _is_variable(leaf: object) -> bool:
    return not isinstance(leaf, _ARRAYS) and isinstance(leaf, _nnx().Variable)  # in this order: Flax's `isinstance` is slow


def _give_back(objects: list[Any], leaves: Mapping[Path, Any], new: Mapping[Path, Any]) -> None:
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


# -- in a step


@contextlib.contextmanager
def _on_replica(objects: list[Any], replica: ReplicaContext) -> Iterator[None]:
    """Inside this block, random streams differ by replica and BatchNorm sees all replicas' rows; at its end, combine metrics.

    Metrics begin at zero on all replicas but the first, so that their earlier values are counted once.
    """
    states = [state for metric in _metrics_of(objects) for state in _states_of(metric)]
    with jax.named_scope(user_code.OURS + "the start of the step, where its nnx.Rngs and metrics become each replica's own"):
        keys = [(node, node.get_value()) for node in _nodes(objects, _nnx().RngKey)]
        for node, key in keys:
            node.set_value(replica.rng(key))
        for state in states:
            start = jnp.where(replica.replica_id_in_sync_group == 0, state.get_value(), jnp.zeros_like(state.get_value()))
            state.set_value(start)
    began = [state.get_value() for state in states]  # held, so that no other array gets their ids
    norms = [norm for norm in _nodes(objects, _nnx().BatchNorm) if norm.axis_name is None]
    for norm in norms:
        norm.axis_name = REPLICA_AXIS
    yield
    for norm in norms:
        norm.axis_name = None
    given = set(map(id, began))
    changed = [m for m in _metrics_of(objects) if any(id(state.get_value()) not in given for state in _states_of(m))]
    _combine_metrics(changed, replica)
    for stream, key in keys:
        stream.set_value(key)


def _metrics_of(objects: list[Any]) -> list[Any]:
    """Return the metrics that can be combined over the replicas."""
    return _nodes(objects, _nnx().metrics.Average | _nnx().metrics.Welford)


def _nodes(objects: list[Any], kind: Any) -> list[Any]:
    return [node for _, node in _nnx().iter_graph(objects) if isinstance(node, kind)]


def _states_of(metric: Any) -> list[Any]:
    return [v for v in vars(metric).values() if isinstance(v, _nnx().metrics.MetricState)]


def _combine_metrics(metrics: list[Any], replica: ReplicaContext) -> None:
    """Combine the replicas' metrics: each then has the additions of all replicas."""
    sum_over_replicas = functools.partial(replica.all_reduce, ReduceOp.SUM)
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


def _explain(error: Exception, arguments: Iterable[tuple[str, Any]], where: str) -> ContextError | None:
    if not (found := re.match(r"Cannot mutate (\w+) from a different trace level", str(error))):
        return None
    user_code.leave_out(sys.modules["flax"])
    return ContextError(
        f"an object of Flax NNX was changed (its {found[1]}), at {user_code.raising_line(error)}, in a function that only closes "
        "over it. Give the object to the function: strategy.run(step, args=(model, x)); a loop carries it, and returns the "
        "changed one: model, ys = mr.scan(lambda model, x: (model, model(x)), model, xs). What a call does not change, such "
        "as an nnx.Linear, may be closed over, and so may a model after model.eval()."
    )


NNX = Library(
    package="flax.nnx",
    name="Flax NNX",
    before="strategy.run(step, args=(model, optimizer, batch))",
    inside="grads = mr.get_replica_context().all_reduce('sum', grads); optimizer.update(model, grads)",
    explain=_explain,
    objects=Objects(
        is_one=_is_object,
        is_whole=_is_whole,
        take_apart=_take_apart,
        put_together=lambda graph, arrays: _nnx().unflatten(graph, arrays),
        on_replica=_on_replica,
        changed="the step at {where} has changed the structure of an NNX object in its arguments: it has added or removed "
        "a layer or an array, or set an attribute that is no array, such as `model.train()` does. A step is traced once "
        "and run many times; change the structure before it, and keep what changes by step in an nnx.Variable. A step "
        "takes no references: a model of nnx.with_vars(model, ref=True) needs ref=False before.",
        remedy="Statistics of normalization layers are those of all replicas with nnx.BatchNorm(..., axis_name='replica'). ",
    ),
)

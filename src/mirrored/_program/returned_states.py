"""Does a step return a state that it was given, of which each replica has another one now?

A train state that a step takes and returns is no variable, so nothing refuses that its copies drift apart: it comes back as
PerReplica values, and the next step takes these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from .._errors import ReplicasDivergeWarning
from .._jax import jaxprs, user_code, ways
from .._typing import Shape
from .call import ArrayLeaf, Call
from .lift import Lifted
from .proof import Findings, State


class _Array(NamedTuple):
    """An array of an argument or result.

    Attributes:
        shape, dtype: its type.
        state: what the proof says of a result.
        is_own: whether each replica has its own: of an argument, one that was given so; of a result, no gradient as it is.
    """

    shape: Shape
    dtype: Any
    state: State | None
    is_own: bool


def check(call: Call, lifted: Lifted, findings: Findings, num_replicas: int) -> None:
    """Warn where a step that computes gradients returns a state that it was given, and replicas have different ones now.

    A state is a nest of arrays, such as a train state or a module, that comes back with the same structure, shapes and dtypes.
    """
    states = findings.outputs[: lifted.num_results]
    if not _has_gradient(lifted):
        return
    given = list(_given(call))
    for part in _returned(lifted, states):
        leaves, treedef = jax.tree.flatten(part, is_leaf=_is_array)
        differing = [leaf for leaf in leaves if leaf.is_own]
        if differing and (_types(leaves), treedef) in given:
            user_code.warn(
                f"{call.name} was given a state, {len(leaves)} arrays that are the same on all {num_replicas} replicas, and "
                f"returns it with {len(differing)} that differ by replica: they depend on {differing[0].state.origin}. From now "
                "on each replica trains a model of its own. Combine the gradients before the update: grads = "
                "mr.get_replica_context().all_reduce('mean', grads, by_rows=True). If each shall have its own, say so from the "
                "beginning: state = strategy.distribute_values_from_function(lambda ctx: state).",
                ReplicasDivergeWarning,
            )
            return


def _has_gradient(lifted: Lifted) -> bool:
    return any(map(_is_backward, jaxprs.all_equations(lifted.shown.jaxpr)))


def _is_backward(equation: Any) -> bool:
    return ways.way_of(ways.path_of("", equation), equation) is not ways.Way.FORWARD


def _given(call: Call) -> Iterator[tuple[list[Any], Any]]:
    """Yield the types and structure of each argument that is a nest of arrays, all of them the same on all replicas."""
    describe = lambda leaf: _Array(leaf.shape, leaf.dtype, None, leaf.is_per_replica)  # noqa: E731
    arrays = [describe(leaf) if isinstance(leaf, ArrayLeaf) else None for leaf in call.leaves]
    args, kwargs = jax.tree.unflatten(call.treedef, arrays)
    for argument in (*args, *kwargs.values()):
        leaves, treedef = jax.tree.flatten(argument, is_leaf=_is_array)
        if leaves and not jax.tree_util.treedef_is_leaf(treedef) and not any(leaf.is_own for leaf in leaves):
            yield _types(leaves), treedef


def _returned(lifted: Lifted, states: list[State]) -> Iterator[Any]:
    """Yield the result, and what is directly in it, with a description in place of each array."""
    jaxpr = lifted.shown.jaxpr
    described = []
    for atom, state in zip(jaxpr.outvars[: lifted.num_results], states, strict=True):
        is_own = not state.is_mirrored and not _is_gradient(jaxpr, atom)
        aval: Any = atom.aval
        described.append(_Array(tuple(aval.shape), aval.dtype, state, is_own))
    remaining = iter(described)
    result = lifted.plan.treedef.unflatten([next(remaining) if leaf is None else None for leaf in lifted.plan.static])
    yield result
    if isinstance(result, tuple | list) and not isinstance(result, _Array):
        yield from result


def _is_gradient(jaxpr: Any, atom: Any) -> bool:
    """Tell whether a result is a gradient as JAX has computed it, which may well differ by replica."""
    maker = next((equation for equation in jaxpr.eqns if any(atom is variable for variable in equation.outvars)), None)
    if maker is None or _is_backward(maker):
        return maker is not None
    position = maker.outvars.index(atom)
    inner = [own.jaxpr for own in jaxprs.inner_jaxprs(maker) if len(own.jaxpr.outvars) == len(maker.outvars)]
    return any(_is_gradient(own, own.outvars[position]) for own in inner)


def _types(leaves: list[_Array]) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


def _is_array(value: Any) -> bool:
    return isinstance(value, _Array)

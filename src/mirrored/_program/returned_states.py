"""Does the state of an optimizer, which a step was given the same on all replicas, come back to it different on each?

A train state that a step takes and returns is no variable, so nothing refuses that its copies drift apart. Other things that a
step carries, such as sums of an epoch, may well differ by replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .._errors import ReplicasDivergeWarning
from .._jax import user_code
from .call import ArrayLeaf, Call, leaf_names


def check(treedef: Any, before: Sequence[Any], call: Call, has_collectives: bool) -> None:
    """Warn of an optimizer's state that each replica updates for itself.

    A step that is given a state of optax must combine the gradients: that state may not begin to differ by replica, nor may
    anything that the step was given, if it combines nothing.

    Args:
        treedef, before: the arguments of the function's last call that needed a program.
        call: this one.
        has_collectives: whether its program combines anything over the replicas.
    """
    if treedef != call.treedef or not _holds_optax(treedef):
        return
    differing = [
        name
        for name, old, new, is_inside in zip(leaf_names(call), before, call.leaves, _of_optax(treedef), strict=True)
        if _begins_to_differ(old, new) and (is_inside or not has_collectives)
    ]
    if differing:
        user_code.warn(
            f"{call.name} was given the state of an optimizer, and {len(differing)} arrays that were the same on all replicas, "
            f"such as {differing[0]}, have come back different on each. From now on each trains a model of its own. Combine "
            "the gradients before the update: grads = mr.get_replica_context().all_reduce('mean', grads). If "
            "each shall have its own, say so before: state = strategy.distribute_values_from_function(lambda ctx: state).",
            ReplicasDivergeWarning,
        )


def _begins_to_differ(old: Any, new: Any) -> bool:
    if not (isinstance(old, ArrayLeaf) and isinstance(new, ArrayLeaf)):
        return False
    return new.is_per_replica and not old.is_per_replica and old.shape == new.shape


def _of_optax(treedef: Any, is_inside: bool = False) -> Iterator[bool]:
    """Yield for each leaf of a tree whether it is in a state of optax."""
    node = treedef.node_data()
    is_inside = is_inside or _is_of_optax(node)
    if node is None:
        yield from [is_inside] * treedef.num_leaves
    for child in treedef.children():
        yield from _of_optax(child, is_inside)


def _holds_optax(treedef: Any) -> bool:
    """Tell whether a tree holds a state of optax, which has no leaves where there is nothing to remember."""
    return _is_of_optax(treedef.node_data()) or any(map(_holds_optax, treedef.children()))


def _is_of_optax(node: Any) -> bool:
    return node is not None and getattr(node[0], "__module__", "").partition(".")[0] == "optax"

"""What cross-replica code does with many values at once: one program, in which small arrays travel together.

The sums over the replicas have the same bits as those of a program for each: the additions of an element stay in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .collectives import finished, groups_of, local_sums, move_packed
from .cross_replica import compiled, gather_stack, reduce_stack, with_zero_padding

#: Arrays in one buffer. More of them compile longer and run no faster (benchmarks/all_reduce.py).
MAX_ARRAYS_TOGETHER = 25


class Task(NamedTuple):
    """What is to be done with one array."""

    function: Callable[..., jax.Array]  # one of `cross_replica`, of an array
    static: tuple[Any, ...]  # its other arguments

    def __repr__(self) -> str:
        return f"{self.function.__name__}{self.static}"  # equal on all workers


def run(arrays: list[jax.Array], tasks: Sequence[Task], placement: NamedSharding) -> list[jax.Array]:
    """Do with each array what its task says, in one compiled program; the results have the placement."""
    if not arrays:
        return []
    if len(arrays) == 1:
        [(function, static)] = tasks
        return [compiled(function, placement, *static)(arrays[0])]
    return compiled(compute_all, placement, tuple(tasks), placement)(arrays)


def compute_all(arrays: Sequence[jax.Array], tasks: Sequence[Task], whole: NamedSharding) -> list[jax.Array]:
    """Do with each array what its task says; `whole` is the placement of what is the same on all devices."""
    kinds = [_kind(array, task, whole) for array, task in zip(arrays, tasks, strict=True)]
    sums = [i for i, kind in enumerate(kinds) if kind is reduce_stack]
    gathers = [i for i, kind in enumerate(kinds) if kind is gather_stack]
    results = {i: task.function(arrays[i], *task.static) for i, task in enumerate(tasks) if kinds[i] is None}
    results |= zip(sums, _reduced([arrays[i] for i in sums], [tasks[i].static for i in sums]), strict=True)
    everywhere = _moved([arrays[i] for i in gathers], lambda stack: jax.lax.with_sharding_constraint(stack, whole))
    for i, stack in zip(gathers, everywhere, strict=True):
        axis, shapes, _ = tasks[i].static
        results[i] = gather_stack(stack, axis, shapes, None)
    return [results[i] for i in range(len(arrays))]


def _kind(array: jax.Array, task: Task, whole: NamedSharding) -> Any:
    """Return the function of a task if its array may travel with others."""
    if whole.num_devices == 1:
        return None
    if task.function is gather_stack:
        return None if jnp.issubdtype(array.dtype, jax.dtypes.extended) else gather_stack
    if task.function is not reduce_stack:
        return None
    _, axes, _, ops = task.static
    has_same_additions = array.shape[0] == whole.num_devices or not axes  # else other additions would come first
    return reduce_stack if has_same_additions and ops is None else None


def _reduced(stacks: Sequence[jax.Array], static: Sequence[tuple[Any, ...]]) -> list[jax.Array]:
    """Do what `reduce_stack` does for each, with sums over the replicas in few buffers."""
    counts, parts = [], []
    for stack, (op, axes, shapes, _) in zip(stacks, static, strict=True):
        real, count = with_zero_padding(stack, axes, shapes)
        counts.append(count)
        parts.append(local_sums(op, real, tuple(axis + 1 for axis in axes), count))
    totals = iter(_moved([part for own in parts for part in own], lambda stack: jnp.sum(stack, axis=0, dtype=stack.dtype)))
    return [
        finished(op, [next(totals) for _ in own], count, stack.dtype)
        for stack, own, count, (op, *_) in zip(stacks, parts, counts, static, strict=True)
    ]


def _moved(stacks: Sequence[jax.Array], move: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Apply a function of a stack `[R, n]`, which keeps its last axis, to small ones together."""
    rows = [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype) for stack in stacks]
    groups = groups_of(rows, 0, MAX_ARRAYS_TOGETHER)
    return move_packed(stacks, groups, lambda packs: list(map(move, packs)), num_kept=1)

"""Strategies and their variables, what steps of many tests say, and threads that do something at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

import mirrored as mr
from mirrored._program import program
from mirrored._program.passes import fuse_all_reduces, order_sums
from mirrored._program.program import Program
from mirrored._replicas import collectives, division
from mirrored._replicas.per_replica import stack_of, uneven_shapes


def strategy_of(num_devices: int, **options: Any) -> mr.MirroredStrategy:
    """Make a strategy on the first CPU devices."""
    return mr.MirroredStrategy([f"cpu:{i}" for i in range(num_devices)], **options)


TWO = strategy_of(2)


def variable(value: Any, strategy: mr.Strategy = TWO, **options: Any) -> mr.Variable:
    """Make a variable of a strategy."""
    with strategy.scope():
        return mr.Variable(value, **options)


def numbers(strategy: mr.Strategy, first: Any = 0.0) -> mr.PerReplica:
    """Make a PerReplica of 0.0, 1.0 and so on, or of arrays, each larger by one than that of the replica before."""
    return strategy.distribute_values_from_function(lambda ctx: np.float32(first) + ctx.replica_id_in_sync_group)


def ctx() -> mr.ReplicaContext:
    return mr.get_replica_context()


def number() -> jax.Array:
    """Return this replica's number, in a step."""
    return ctx().replica_id_in_sync_group


def all_reduce(op: str, tree: Any, **options: Any) -> Any:
    return ctx().all_reduce(op, tree, **options)


def arrays_of(result: mr.PerReplica) -> list[np.ndarray]:
    """Return each replica's value as a NumPy array; `result.values` has XLA cut each of them out of the whole."""
    stack, shapes = np.asarray(stack_of(result)), uneven_shapes(result)
    return list(stack) if shapes is None else [own[tuple(map(slice, shape))] for own, shape in zip(stack, shapes, strict=True)]


def values_of(result: mr.PerReplica) -> list[Any]:
    """Return each replica's value as a number or a list."""
    return [value.tolist() for value in arrays_of(result)]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what a test computes on one device, by `jax.jit`; where NumPy computes the steps, it computes this too."""
    return program.jax.jit(function)


def divide_small_arrays(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Take arrays of so many bytes for large, so that a test of arrays in parts need not make larger ones."""
    patch.setattr(division, "LEAST_BYTES", num_bytes)
    patch.setattr(order_sums, "LARGE_BYTES", num_bytes)
    for module in (collectives, fuse_all_reduces):
        patch.setattr(module, "PACK_BELOW_BYTES", num_bytes)


class Made(Exception):
    """A program was made, and would run now."""


def made(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function up to the run of its first program, which is proven by then, and is neither compiled nor run."""

    def stop(program: Program, arrays: list[Any]) -> None:
        raise Made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "execute", stop)
        try:
            return function(*args)
        except Made:
            return None


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run functions at once, each in a thread of its own; return what they return, or raise what one of them raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]

"""Runs a step on arrays in parts: gathers all of them at its start, and keeps this device's parts of the new ones at its end.

So a step that is written for whole arrays needs no change, and between steps a device stores parts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._replicas.division import Division, division_of_array
from .._replicas.mesh import ReplicaMesh
from .._variables.variable import spec_of
from .call import Call
from .lift import Lifted


def divisions_of(
    mesh: ReplicaMesh, lifted: Lifted, call: Call, is_mirrored: Sequence[bool]
) -> tuple[list[Division | None], list[Division | None]]:
    """Return how each array is divided that a step takes, and each that it returns: variables first, or results first."""
    of_variables = {variable: spec_of(variable).division for variable in lifted.variables}
    of_arguments = [
        None if leaf.is_per_replica else division_of_array(mesh, leaf.shape, leaf.dtype) for leaf in call.array_leaves()
    ]
    results = lifted.closed.jaxpr.outvars[: lifted.num_results]
    of_results = [
        division_of_array(mesh, result.aval.shape, result.aval.dtype) if same else None
        for result, same in zip(results, is_mirrored, strict=True)
    ]
    return [*of_variables.values(), *of_arguments], [*of_results, *(of_variables[variable] for variable in lifted.written)]


def on_parts(
    run: Callable[..., list[Any]], mesh: ReplicaMesh, taken: Sequence[Division | None], kept: Sequence[Division | None]
) -> Callable[..., list[Any]]:
    """Make a function that runs a step on arrays of which some are in parts, `taken`, and returns some in parts, `kept`."""
    if not any(taken) and not any(kept):
        return run

    def run_on_parts(sums: Any, constants: list[Any], arrays: list[Any], *ends: Sequence[bool]) -> list[Any]:
        whole = [array if own is None else own.gathered(array, mesh.axis) for array, own in zip(arrays, taken, strict=True)]
        results = run(sums, constants, whole, *ends)
        new = [result if own is None else own.own_part(result, mesh.axis) for result, own in zip(results, kept, strict=False)]
        return [*new, *results[len(kept) :]]

    return run_on_parts

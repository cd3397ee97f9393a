"""Runs a step on arrays in parts: gathers all of them at its start, and keeps this device's parts of the new ones at its end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ..._replicas.division import Division, division_of_array, placement_of
from ..._variables.variable import spec_of
from .proven import Proven, Run


class Divisions(NamedTuple):
    """How the inputs and outputs of a step are divided; None: each device has all of it, or its replicas their own."""

    inputs: list[Division | None]
    outputs: list[Division | None]

    @classmethod
    def of(cls, step: Proven) -> Divisions:
        """Return the divisions of a step's variables, and of its arguments and results that are arrays in parts."""
        jaxpr, written, variables = step.closed.jaxpr, step.lifted.written, step.lifted.variables

        def of_array(atom: Any, is_own: bool) -> Division | None:
            is_array = isinstance(atom.aval, jax.core.ShapedArray) and not is_own
            return division_of_array(step.mesh, atom.aval.shape, atom.aval.dtype) if is_array else None

        arguments = map(of_array, jaxpr.invars[len(variables) :], step.own_inputs[len(variables) :])
        results = map(of_array, jaxpr.outvars[: step.lifted.num_results], step.own_outputs)
        kept = ([spec_of(variable).division for variable in some] for some in (variables, written))
        return cls([*next(kept), *arguments], [*results, *next(kept)])


def store_in_parts(step: Proven) -> Proven:
    """Let a step take and return large arrays in parts."""
    divisions = Divisions.of(step)
    if not any((*divisions.inputs, *divisions.outputs)):
        return step

    def specs(of: Sequence[PartitionSpec], its: Sequence[Division | None]) -> tuple[PartitionSpec, ...]:
        pairs = zip(of, its, strict=True)
        return tuple([spec if division is None else placement_of(step.mesh, division).spec for spec, division in pairs])

    new = {"in_specs": specs(step.in_specs, divisions.inputs), "out_specs": specs(step.out_specs, divisions.outputs)}
    return dataclasses.replace(step, run=functools.partial(_run_gathered, step.run, divisions), **new)  # type: ignore[arg-type]


def _run_gathered(run: Run, divisions: Divisions, step: Proven, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a step with all arrays whole until it ends."""
    name = step.mesh.axis
    pairs = zip(inputs, divisions.inputs, strict=True)
    outputs = run(step, constants, [array if its is None else its.gathered(array, name) for array, its in pairs])
    for k, division in enumerate(divisions.outputs):
        if division is not None:
            outputs[k] = division.own_part(outputs[k], name)
    return outputs

"""Lets a step take and return large arrays that are the same on every replica in parts, one on each device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..._jax import dead_code
from ..._jax.jaxprs import Atom
from ..._replicas.division import Division, division_of_array, placement_of
from ..._variables.variable import spec_of
from .on_parts import DevicePart, Value, Whole, shape_of
from .parted import Parted
from .proven import Proven, Run
from .sums_in_parts import Known


class Divisions(NamedTuple):
    """How a step's inputs and outputs are divided; None: whole on each device, or one for each replica."""

    inputs: list[Division | None]
    outputs: list[Division | None]

    @classmethod
    def of(cls, step: Proven) -> Divisions:
        """Return the divisions of a step's variables, and of its arguments and results that are arrays in parts."""
        jaxpr, written, variables = step.closed.jaxpr, step.lifted.written, step.lifted.variables

        def of_array(atom: Atom, is_own: bool) -> Division | None:
            if is_own or not isinstance(atom.aval, jax.core.ShapedArray):
                return None
            return division_of_array(step.mesh, atom.aval.shape, atom.aval.dtype)

        arguments = map(of_array, jaxpr.invars[len(variables) :], step.own_inputs[len(variables) :])
        results = map(of_array, jaxpr.outvars[: step.lifted.num_results], step.own_outputs)
        kept = ([spec_of(variable).division for variable in some] for some in (variables, written))
        return cls([*next(kept), *arguments], [*results, *next(kept)])


def store_in_parts(step: Proven) -> Proven:
    """Let a step take and return large arrays in parts."""
    divisions = Divisions.of(step)
    if not any((*divisions.inputs, *divisions.outputs)):
        return step

    def specs(usual: Sequence[PartitionSpec], divisions: Sequence[Division | None]) -> tuple[PartitionSpec, ...]:
        pairs = zip(usual, divisions, strict=True)
        return tuple([spec if division is None else placement_of(step.mesh, division).spec for spec, division in pairs])

    new = {"in_specs": specs(step.in_specs, divisions.inputs), "out_specs": specs(step.out_specs, divisions.outputs)}
    atoms = [*step.closed.jaxpr.invars, *step.closed.jaxpr.outvars[: len(divisions.outputs)]]  # no sums that it carries
    stored = zip(atoms, (*divisions.inputs, *divisions.outputs), strict=True)
    known = Known(step.mesh.axis, {shape_of(atom): division for atom, division in stored if division is not None})
    return dataclasses.replace(step, run=functools.partial(_run_on_parts, step.run, known, divisions), **new)


def _run_on_parts(
    run: Run, known: Known, divisions: Divisions, step: Proven, constants: Sequence[Any], inputs: Sequence[Any]
) -> list[Any]:
    """Run a step on a device. Per-replica values have a leading axis, of size 1 if the device has one replica."""
    jaxpr, given, is_alone = step.closed.jaxpr, list[Value](), step.mesh.per_device == 1
    if not is_alone:  # what `run` does for all replicas of a device is the program of a device
        pairs = zip(inputs, divisions.inputs, jaxpr.invars, strict=True)
        whole = [array if division is None else jax.ShapeDtypeStruct(shape_of(v), array.dtype) for array, division, v in pairs]
        jaxpr, constants = dead_code.pruned(jax.make_jaxpr(functools.partial(run, step, constants))(whole))
    for var, array, division, is_own in zip(jaxpr.invars, inputs, divisions.inputs, step.own_inputs, strict=True):
        if division is not None:
            given.append(DevicePart(array, division, shape_of(var)))
        elif is_own:
            given.append(Whole(jnp.squeeze(array, 0) if is_alone else array, False))
        else:
            given.append(Whole(array, True))
    walk = Parted(known)
    results = walk.run(jaxpr, constants, given)
    outputs = []
    for value, atom, division, is_own in zip(results, jaxpr.outvars, divisions.outputs, step.own_outputs, strict=False):
        if division is not None:
            part = walk.gathers.part(value, division, shape_of(atom))
            outputs.append(walk.gathers.real(part, division, 0))
        else:
            array = walk.whole(value)
            outputs.append(jnp.expand_dims(array, 0) if is_own and is_alone else array)
    return [*outputs, *map(walk.whole, results[len(outputs) :])]

"""Makes values in parts: by one program for all of them, in which no device computes or stores a whole large array."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from .._jax import interpreter
from .._options import Storage, StorageName
from .._replicas import in_flight, placement
from .._replicas.arrays import strong
from .._replicas.division import Division, division_of, placement_of
from .._replicas.mesh import PlannedMesh, ReplicaMesh
from .._replicas.planned import stand_in
from .._typing import PyTree, Shape
from .._workers import joint_programs
from .spec import VariableSpec

_NAME = "making values in parts"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_TRACED = (
    "The function makes values in parts, so that no device need have all of one. So JAX traces it, and its values are not known "
    "meanwhile. Call it first, and give its result: mr.Variable(make()) in place of mr.Variable(make)."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A new value as it is stored, in a fresh buffer, with the shape of the whole value."""

    stored: jax.Array
    shape: Shape
    division: Division | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self.stored.dtype


def called(
    function: Callable[[], PyTree],
    mesh: ReplicaMesh,
    storage: Storage | StorageName | None,
    is_on_read: bool,
    dtype: DTypeLike | None,
) -> PyTree:
    """Return a variable's first value, made by a function; in parts where the variable may be."""
    how = mesh.storage
    if storage is not None:
        how = Storage.parse(storage, "storage")
    if how is Storage.WHOLE or len(mesh.devices) == 1 or is_on_read:
        return function()
    return make(function, mesh, how, dtype)


def make(
    function: Callable[..., PyTree],
    mesh: ReplicaMesh,
    storage: Storage | None = None,
    dtype: DTypeLike | None = None,
    given: Sequence[tuple[VariableSpec, jax.Array]] = (),
) -> PyTree:
    """Return a function's result, with a `Made` for each computed array; arrays that existed before are unchanged.

    Args:
        function: takes the whole values of the `given` variables. It is traced once.
        given: for each variable its spec and its stored array.
    """
    result: dict[str, Any] = {}

    def traced(*values: jax.Array) -> list[jax.Array]:
        leaves, result["tree"] = jax.tree.flatten(function(*values))
        result["leaves"] = [None if isinstance(leaf, jax.core.Tracer) else (leaf,) for leaf in leaves]
        computed = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
        return [strong(leaf, leaf.dtype if dtype is None else dtype) for leaf in computed]

    try:
        closed = jax.make_jaxpr(traced)(*(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec, _ in given))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        error.add_note(_TRACED)
        raise
    avals: list[Any] = [atom.aval for atom in closed.jaxpr.outvars]
    kinds = [(aval, division_of(mesh, aval.shape, aval.dtype, storage)) for aval in avals]
    placements = [placement_of(mesh, division) for _, division in kinds]

    def compute(arrays: list[jax.Array]) -> list[jax.Array]:
        constants, stored = arrays[: len(closed.consts)], arrays[len(closed.consts) :]
        values = [spec.whole(array) for (spec, _), array in zip(given, stored, strict=True)]
        made = interpreter.evaluate(closed, constants, values)
        return [array if division is None else division.stored(array) for array, (_, division) in zip(made, kinds, strict=True)]

    stored: list[Any] = []
    if isinstance(mesh, PlannedMesh):
        shapes = jax.eval_shape(compute, [*closed.consts, *(array for _, array in given)])
        stored = list(map(stand_in, shapes, placements))
    elif kinds:
        program: Any = jax.jit(compute, out_shardings=placements)
        if in_flight.is_joint(mesh.mirrored):
            program = joint_programs.agreed(_NAME, _ADDRESS.sub("", f"{closed.jaxpr} {placements}"), program)
        constants = placement.mirror_constants(mesh, closed.consts, "an array that makes the first value of a variable")
        stored = in_flight.dispatch(mesh.mirrored, program, [*constants, *(array for _, array in given)])
    new = iter([Made(array, aval.shape, division) for array, (aval, division) in zip(stored, kinds, strict=True)])
    return jax.tree.unflatten(result["tree"], [next(new) if leaf is None else leaf[0] for leaf in result["leaves"]])

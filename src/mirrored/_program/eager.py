"""Steps that run operation by operation, to print values and to stop in a debugger."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._errors import ContextError, UnevenReplicasError
from .._models import libraries
from .._replicas import frames, placement
from .._replicas.context import ReplicaContext
from .._replicas.division import Division, division_of_array, placement_of
from .._replicas.mesh import ReplicaMesh
from .._typing import REPLICA_AXIS, PyTree
from .._variables.access import claimed, lent, store
from .._variables.bindings import Bindings, with_few_compilations
from .._variables.variable import Variable, spec_of
from . import lift
from .call import Call, argument_names
from .program import StepProgram, place

is_eager: contextvars.ContextVar[bool] = contextvars.ContextVar("mirrored_eager", default=False)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run steps operation by operation inside this block, to print values and to stop in a debugger.

    `print(x)` in a step then shows the value on each replica, and breakpoints stop in the step with real
    values. Results are the same as compiled ones; it is many times slower. The first call with new shapes
    also traces the step, silently, to prove that mirrored values stay mirrored.

    >>> def step(x):
    ...     return x + 1
    >>> with mr.eager():
    ...     int(strategy.run(step, args=(np.int32(1),)))
    2
    """
    token = is_eager.set(True)
    try:
        yield
    finally:
        is_eager.reset(token)


def _refuse_unknown(variable: Variable) -> jax.Array:
    raise ContextError(
        f"variable {variable.name!r} was used when the step ran operation by operation, but not when it was traced a moment "
        "before. A step must do the same every time it is called: look for a counter, a cache, or random Python numbers in it."
    )


def run_eagerly(strategy: object, program: StepProgram, call: Call) -> PyTree:
    """Run the user's function operation by operation, and keep the new values of its variables.

    All results come back stacked; the proof of the traced program tells which of them are mirrored.
    """
    _refuse_eager(call, program.mesh)
    mesh, replica = program.mesh, ReplicaContext(strategy, program.axis)
    lifted = program.lifted
    new_lifted: dict[str, Any] = {}

    def body(caches: Callable[[], Any], values: list[Any], arrays: list[Any]) -> list[Any]:
        specs = map(spec_of, lifted.variables)
        local = [_own(array, spec.is_on_read, spec.division) for array, spec in zip(values, specs, strict=True)]
        given = zip(arrays, leaves, divisions, strict=True)
        rows = [_own(array, leaf.is_per_replica, division) for array, leaf, division in given]
        with caches() as renew:
            bindings = Bindings(dict(zip(lifted.variables, local, strict=True)), _refuse_unknown, renew)
            with frames.entered(frames.Frame(strategy, mesh, replica, program.axis, bindings)):
                new_lifted["plan"], results = libraries.traced(lambda: lift.plan_result(call.apply(rows)), mesh, may_repeat=False)
        for variable in bindings.written.keys() - set(lifted.written):
            _refuse_unknown(variable)
        return [jnp.asarray(x)[None] for x in (*results, *bindings.values(lifted.written))]

    stacked, leaves = PartitionSpec(REPLICA_AXIS), call.array_leaves()
    divisions = [None if leaf.is_per_replica else division_of_array(mesh, leaf.shape, leaf.dtype) for leaf in leaves]
    value_specs = [spec_of(v).placement.spec for v in lifted.variables]
    pairs = zip(leaves, divisions, strict=True)
    array_specs = [stacked if leaf.is_per_replica else placement_of(mesh, division).spec for leaf, division in pairs]
    arrays = place(program, call.arrays, call.array_leaves, lambda: argument_names(call))

    def compute(values: list[Any], caches: Callable[[], Any]) -> list[Any]:
        own_body = functools.partial(body, caches)
        specs = {"in_specs": (value_specs, array_specs), "out_specs": stacked, "check_vma": False}
        return jax.shard_map(own_body, mesh=mesh.mesh, **specs)(values, arrays)

    with claimed(lifted.written), lent(lifted.variables) as values:
        outputs = with_few_compilations(functools.partial(compute, values))
        for variable, new in zip(lifted.written, outputs[lifted.num_results :], strict=True):
            store(variable, new if spec_of(variable).is_on_read else _first_row(mesh, new))
    pairs = zip(outputs[: lifted.num_results], program.findings.outputs, strict=False)
    rows = [_first_row(mesh, result) if state.is_mirrored else result for result, state in pairs]
    return dataclasses.replace(program, lifted=dataclasses.replace(lifted, plan=new_lifted["plan"])).rebuild(rows)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keep the trace of a step from printing and from stopping at `breakpoint()`; an error shows what was printed."""
    printed, hook = io.StringIO(), sys.breakpointhook
    sys.breakpointhook = lambda *args, **kwargs: None
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except BaseException:
        sys.stdout.write(printed.getvalue())
        raise
    finally:
        sys.breakpointhook = hook


def _own(array: jax.Array, is_own: bool, division: Division | None) -> jax.Array:
    """Return one replica's value from the array that its device stores."""
    if division is not None:
        return division.gathered(array)
    return jnp.squeeze(array, 0) if is_own else array


def _first_row(mesh: ReplicaMesh, stack: jax.Array) -> jax.Array:
    return placement.mirror(mesh, [stack[0]])[0]


def _refuse_eager(call: Call, mesh: ReplicaMesh) -> None:
    if not mesh.is_alone:
        raise ContextError(
            "mr.eager() runs each operation by itself, which works with one worker only. Run the same script without a "
            "cluster: the numbers are the same with as many replicas, mr.MirroredStrategy(['cpu:0', 'cpu:1', ...])."
        )
    if mesh.per_device > 1:
        raise ContextError(
            f"mr.eager() runs each operation on one device for each replica, but there are {mesh}. Make as many virtual devices, "
            f"mr.MirroredStrategy([f'cpu:{{i}}' for i in range({mesh.num_replicas})]): the numbers are the same."
        )
    for position, leaf in enumerate(call.array_leaves()):
        if leaf.shapes is not None:
            raise UnevenReplicasError(
                f"the argument {argument_names(call)[position]} has a different shape on each replica: "
                f"{', '.join(map(str, leaf.shapes))}. Inside mr.eager() all replicas run each operation together, so shapes "
                "must be equal: look at a batch that the number of replicas divides. Outside mr.eager() it runs as it is."
            )

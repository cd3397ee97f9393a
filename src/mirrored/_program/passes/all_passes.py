"""The whole way of a proven step to its devices, in one list."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..._replicas import in_flight
from ..._replicas.reductions import divide
from .fuse_all_reduces import join_sums
from .order_sums import order_sums
from .proven import Proven
from .store_in_parts import store_in_parts
from .virtual import run_all_on_device

#: When a pass runs, and the pass, in the order in which they run. docs/design/passes.md has their gains.
PASSES: tuple[tuple[Callable[[Proven], bool], Callable[[Proven], Proven]], ...] = (
    (Proven.may_join_sums, join_sums),  # how sums travel: together
    (Proven.may_order_sums, order_sums),  # where a sum is made: at its gradient, for which the backward pass waits
    (Proven.shares_devices, run_all_on_device),  # how many replicas a device has, where sums are of the rows of all
    (operator.attrgetter("may_divide"), store_in_parts),  # how what is the same on every replica is stored
)


def passed(step: Proven) -> Proven:
    """Return a step after all passes."""
    for is_needed, change in PASSES:
        if is_needed(step):
            step = change(step)
    return step


def mapped(step: Proven) -> Callable[..., Any]:
    """Make the function of global arrays, in which each device runs the step on its rows."""
    mesh, lifted = step.mesh, step.lifted
    num_results, num_outputs = lifted.num_results, len(step.own_outputs)

    def body(written: list[Any], read_only: list[Any], arrays: list[Any], constants: list[Any]) -> Any:
        outputs = step.run(step, constants, [*written, *read_only, *arrays])
        results, totals = outputs[:num_results], outputs[num_outputs:]
        results += totals
        if mesh.num_replicas > 1:  # else each is its own mean, too
            results += [divide(total, mesh.num_replicas, total.dtype) for total in totals]
        return results, outputs[num_results:num_outputs], in_flight.new_witness(mesh.mirrored)

    first, rest = len(lifted.written), len(lifted.variables)
    inputs, outputs, replicated = list(step.in_specs), list(step.out_specs), PartitionSpec()
    carried = [replicated] * (len(step.joined.carried) * min(mesh.num_replicas, 2))
    in_specs = (inputs[:first], inputs[first:rest], inputs[rest:], replicated)
    out_specs = ([*outputs[:num_results], *carried], outputs[num_results:], replicated)
    # check_vma=False: gradients are local, and `_program/proof` takes the place of JAX's own check.
    return jax.shard_map(body, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

"""What a step is refused or warned for, and the messages that users see."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

from .._errors import FactorOfReplicasError, FactorOfReplicasWarning, ReplicasDivergeError, UnevenReplicasError
from .._jax import user_code
from .._jax.marks import Mark, Purpose
from .._variables.variable import spec_of
from . import divisors
from .divisors import Divided
from .lift import Lifted
from .proof import Findings, Sameness, State


def check_assignments(lifted: Lifted, findings: Findings) -> None:
    for note, state in findings.marks:
        if note.purpose is Purpose.ASSIGN and not state.is_mirrored:
            raise ReplicasDivergeError(_diverge_message(note, state))
        if note.purpose is Purpose.STATE and not state.is_mirrored:
            raise ReplicasDivergeError(_state_message(note, state))
    new_states = findings.outputs[lifted.num_results :]
    for variable, where, state in zip(lifted.written, lifted.write_lines, new_states, strict=True):
        if not spec_of(variable).is_on_read and not state.is_mirrored:
            raise ReplicasDivergeError(_diverge_message(Mark(Purpose.ASSIGN, variable.name, where), state))


def _diverge_message(note: Mark, state: State) -> str:
    return (
        f"variable {note.name!r} is mirrored, but the value assigned to it at {note.where} may differ by replica: it "
        f"depends on {state.origin}. The copies would drift apart without a word. Combine the replicas first, for "
        "example ctx = mr.get_replica_context(); variable.assign(ctx.all_reduce('mean', value)); or let "
        "mr.Optimizer(...).apply_gradients(grads) do it; or create the variable with aggregation='mean'. "
        "If each replica shall keep its own value, create it with synchronization='on_read'."
    )


def _state_message(note: Mark, state: State) -> str:
    return (
        f"{note.name}, which the step at {note.where} changes, would differ by replica: it depends on {state.origin}. A model in "
        "the arguments of strategy.run is one for all replicas. Combine the gradients before the optimizer's update: "
        "grads = mr.get_replica_context().all_reduce('mean', grads); optimizer.update(model, grads). Statistics of "
        "normalization layers are those of all replicas with nnx.BatchNorm(..., axis_name='replica'). What each replica shall "
        "keep for itself is a mr.Variable with synchronization='on_read'."
    )


def check_means(findings: Findings) -> None:
    """Refuse means by rows of gradients that others have added to without a weight: the mean would come too late for these."""
    for note, state in findings.marks:
        if note.purpose is Purpose.BY_ROWS and state.came_back:
            raise UnevenReplicasError(
                f"the batch does not divide evenly among the replicas, and the mean over the replicas at {note.where} is of "
                f"gradients that have come back through a collective, at {state.came_back}, as through a layer that normalizes "
                "over the replicas. There the gradients of all replicas' losses were added up, and a weight for the rows of each "
                "comes too late. Write the loss as mr.losses.compute_average_loss(per_example_loss), which has the weights, and "
                "add the gradients up: ctx.all_reduce('sum', grads), or optimizer.apply_gradients(grads, aggregate='sum'). "
                "Or leave the odd rows out: strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))."
            )


def check_gradients(findings: Findings, num_replicas: int) -> None:
    gradients = [(note, state) for note, state in findings.marks if note.purpose is Purpose.GRADIENT]
    for note, state in gradients:
        if state.sameness is Sameness.REDUCED and not _is_of_shares(state):
            raise FactorOfReplicasError(
                f"the gradient of variable {note.name!r} given to apply_gradients at {note.where} has already been "
                "combined over the replicas. apply_gradients sums gradients over the replicas itself, so this update "
                f"would be R times too large (R = {num_replicas} here). Leave the all_reduce out, or say (to a "
                "mr.Optimizer) that it is done: optimizer.apply_gradients(grads, aggregate=False)."
            )
    if not gradients or num_replicas == 1:
        return
    for updated in _by_optimizer(gradients):
        if all(state.sameness is Sameness.SAME and not _is_shared(state) for _, state in updated):
            _warn_of_factor(
                f"all {num_replicas} replicas computed the same gradients, from no data that differs by replica, and "
                f"apply_gradients at {updated[0][0].where} sums them: the update is {num_replicas} times that of one device, "
                "unless the loss was divided by the number of replicas. An array passed to strategy.run goes whole to every "
                "replica; give each replica its part of the batch with strategy.distribute_dataset(dataset)."
            )
    is_same = all(state.sameness is Sameness.SAME for _, state in gradients)
    if not is_same and _has_combined_loss(findings, num_replicas):
        _warn_of_factor(
            "the loss was combined over the replicas before it was differentiated, so each gradient already stands for "
            f"all replicas, and apply_gradients at {gradients[0][0].where} sums them again: the update is {num_replicas} times "
            "too large. Differentiate this replica's own loss (mr.losses.compute_average_loss) and reduce the loss "
            "after the gradient, or for reporting outside with strategy.reduce('sum', loss)."
        )


def _by_optimizer(gradients: list[tuple[Mark, State]]) -> list[list[tuple[Mark, State]]]:
    groups: dict[tuple[int, str], list[tuple[Mark, State]]] = {}
    for note, state in gradients:
        groups.setdefault((note.number, note.where), []).append((note, state))
    return list(groups.values())


def _is_shared(state: State) -> bool:
    """Tell whether all losses of a gradient were divided for a sum over the replicas, as `scale_regularization_loss` does."""
    return bool(state.trails) and all(trail.is_whole for trail in state.trails)


def _is_of_shares(state: State) -> bool:
    """Tell whether a gradient that is the same everywhere is that of shares of a combined loss, which add up to the whole."""
    return bool(state.trails) and all(trail.is_share for trail in state.trails)


def _has_combined_loss(findings: Findings, num_replicas: int) -> bool:
    losses = [state for note, state in findings.marks if note.purpose is Purpose.LOSS]
    gradients = [state for note, state in findings.marks if note.purpose is Purpose.GRADIENT]
    return any(state.sameness is Sameness.REDUCED and not state.is_share for state in losses) or any(
        divisors.of_combined_loss(state.trails, num_replicas) for state in gradients
    )


def check_divisors(findings: Findings, num_replicas: int, rows: Collection[int], num_rows: Collection[int]) -> None:
    """Warn where a loss was divided by this replica's rows only and its gradients are summed, and where both make a mean.

    Args:
        findings: what the proof found.
        num_replicas: how many replicas there are.
        rows: the numbers of rows that a replica may have.
        num_rows: the numbers that all may have together.
    """
    if num_replicas == 1 or 1 in rows or _has_combined_loss(findings, num_replicas):
        return  # a mean of one row is a sum
    summed, averaged = (
        _by_optimizer([(note, state) for note, state in findings.marks if note.purpose is purpose])
        for purpose in (Purpose.GRADIENT, Purpose.MEAN_GRADIENT)
    )
    found = functools.partial(_divisions, rows=rows, num_rows=num_rows, num_replicas=num_replicas)
    for updated in summed:
        where = updated[0][0].where
        if Divided.BY_OWN in found(own for own in updated if not own[1].is_mirrored):
            _warn_of_factor(
                "the loss was divided by this replica's own number of rows, as jnp.mean does, and never by that of all "
                f"{num_replicas} replicas, and apply_gradients at {where} sums the gradients over the replicas: the update is "
                f"{num_replicas} times that of one device. Write either the loss as "
                "mr.losses.compute_average_loss(per_example_loss), or the update as "
                "optimizer.apply_gradients(gradients, aggregate='mean')."
            )
        elif (number := max(divisors.too_many_averages(state.trails, rows) for _, state in updated)) > 1:
            _warn_of_factor(
                f"compute_average_loss divides by the rows that it is given, and it was given {number} parts of the batch one "
                f"after the other, whose gradients are added up for apply_gradients at {where}: the update is {number} times "
                "that of the batch. Say how many rows all parts have on all replicas: "
                "mr.losses.compute_average_loss(per_example_loss, global_batch_size=n), or divide the gradients by "
                f"{number}."
            )
    for updated in averaged:
        if found(updated) == {Divided.BY_ALL}:
            _warn_of_factor(
                f"the loss was divided by what stands for all {num_replicas} replicas, as mr.losses.compute_average_loss does, "
                f"and apply_gradients at {updated[0][0].where} divides again, with aggregate='mean': the update is "
                f"{num_replicas} times smaller than that of one device. Write either the loss as jnp.mean(per_example_loss), or "
                "the update as optimizer.apply_gradients(gradients, aggregate='sum')."
            )


def _divisions(marked: Iterable[tuple[Mark, State]], **counts: Any) -> set[Divided]:
    return {divisors.divided(trail, **counts) for _, state in marked for trail in state.trails}


def _warn_of_factor(message: str) -> None:
    user_code.warn(message, FactorOfReplicasWarning)

"""What a step is refused or warned for, and the messages that users see."""

from __future__ import annotations

import warnings

from .._errors import FactorOfReplicasError, FactorOfReplicasWarning, ReplicasDivergeError
from .._jax import user_code
from .._jax.marks import Mark, Purpose
from .._variables.variable import spec_of
from .lift import Lifted
from .proof import Findings, Sameness, State


def check_assignments(lifted: Lifted, findings: Findings) -> None:
    for note, state in findings.marks:
        if note.purpose is Purpose.ASSIGN and not state.is_mirrored:
            raise ReplicasDivergeError(_diverge_message(note, state))
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


def check_gradients(findings: Findings, num_replicas: int) -> None:
    gradients = [(note, state) for note, state in findings.marks if note.purpose is Purpose.GRADIENT]
    for note, state in gradients:
        if state.sameness is Sameness.REDUCED:
            raise FactorOfReplicasError(
                f"the gradient of variable {note.name!r} given to apply_gradients at {note.where} has already been "
                "combined over the replicas. apply_gradients sums gradients over the replicas itself, so this update "
                f"would be R times too large (R = {num_replicas} here). Leave the all_reduce out, or say (to a "
                "mr.Optimizer) that it is done: optimizer.apply_gradients(grads, aggregate=False)."
            )
    if not gradients or num_replicas == 1:
        return
    if all(state.sameness is Sameness.SAME for _, state in gradients):
        _warn_of_factor(
            f"all {num_replicas} replicas computed the same gradients, from no data that differs by replica, and "
            f"apply_gradients at {gradients[0][0].where} sums them: the update is {num_replicas} times that of one device, "
            "unless the loss was divided by the number of replicas. An array passed to strategy.run goes whole to every replica; "
            "give each replica its part of the batch with strategy.distribute_dataset(dataset)."
        )
    elif any(note.purpose is Purpose.LOSS and state.sameness is Sameness.REDUCED for note, state in findings.marks):
        _warn_of_factor(
            "the loss was combined over the replicas before it was differentiated, so each gradient already stands for "
            f"all replicas, and apply_gradients at {gradients[0][0].where} sums them again: the update is {num_replicas} times "
            "too large. Differentiate this replica's own loss (mr.losses.compute_average_loss) and reduce the loss "
            "after the gradient, or for reporting outside with strategy.reduce('sum', loss)."
        )


def _warn_of_factor(message: str) -> None:
    warnings.warn(message, FactorOfReplicasWarning, stacklevel=user_code.user_stacklevel())

"""Refusals and warnings of a step that the proof has looked at, with the messages that users see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from .. import _errors
from .._jax import user_code
from .._jax.marks import Mark, Purpose
from .._variables.variable import spec_of
from .advice import GIVEN_TO_OPTIMIZERS, Gradient, Said
from .call import Call
from .lift import Lifted
from .proof import Findings, Sameness, State

_SUMS = frozenset({Purpose.SUM, Purpose.SUM_OF_ALL})


def check_assignments(lifted: Lifted, findings: Findings) -> None:
    for note, state in findings.marks:
        if note.purpose is Purpose.ASSIGN and not state.is_mirrored:
            raise _errors.ReplicasDivergeError(_DIVERGES.format(name=note.name, where=note.where, origin=state.origin))
        if note.purpose is Purpose.STATE and not state.is_mirrored:
            what = {"name": note.name, "where": note.where, "origin": state.origin, "message": note.message}
            raise _errors.ReplicasDivergeError(_STATE_DIVERGES.format(**what))
    new_states = findings.outputs[lifted.num_results :]
    for variable, where, state in zip(lifted.written, lifted.write_lines, new_states, strict=True):
        if not spec_of(variable).is_on_read and not state.is_mirrored:
            raise _errors.ReplicasDivergeError(_DIVERGES.format(name=variable.name, where=where, origin=state.origin))


def check_means(findings: Findings) -> None:
    """Refuse means of an uneven step that would not weigh the replicas by their rows.

    They are means of gradients to which other replicas have added in the backward pass, without weights, and means of
    sync-on-read variables, whose copies get one weight when they are read.
    """
    for note, state in findings.marks:
        if note.purpose is Purpose.KEPT_MEAN and not state.is_mirrored:
            raise _errors.UnevenReplicasError(_KEPT_MEAN.format(name=note.name, where=note.where))
        if note.purpose is Purpose.BY_ROWS and state.advice.came_back:
            raise _errors.UnevenReplicasError(
                f"the batch does not divide evenly among the replicas, and the mean over the replicas at {note.where} is of "
                f"gradients that have come back through a collective, at {state.advice.came_back}, as through a layer that "
                "normalizes over the replicas. There the gradients of all replicas' losses were added up, and a weight for the "
                "rows of each comes too late. Write the loss as mr.losses.compute_average_loss(per_example_loss), which has "
                "the weights, and add the gradients up: ctx.all_reduce('sum', grads), or "
                "optimizer.apply_gradients(grads, aggregate='sum'). "
                "Or leave the odd rows out: strategy.distribute_dataset(dataset, mr.InputOptions(drop_remainder=True))."
            )


def check_gradients(marks: Sequence[tuple[Mark, State]], num_replicas: int) -> None:
    """Refuse, or warn of, gradients, shares of losses and metric states whose combination does not fit their division."""
    for note, _ in marks:
        if note.purpose is Purpose.SHARE:
            raise _errors.FactorOfReplicasError(_DIVIDED_AGAIN.format(where=note.where))
    for note, state in marks:
        if note.purpose is Purpose.REGULARIZATION and not state.is_mirrored:
            raise _errors.FactorOfReplicasError(_OWN_REGULARIZATION.format(where=note.where, origin=state.origin))
        if note.purpose is Purpose.ADDED and not state.is_mirrored and state.advice.old != (note.number, True):
            raise _errors.FactorOfReplicasError(note.message.format(name=note.name, where=note.where))
    given = [(note, state) for note, state in marks if note.purpose in GIVEN_TO_OPTIMIZERS]
    summed = [(note, state) for note, state in marks if note.purpose in _SUMS and state.advice.gradient]
    for note, state in given:
        _refuse_contradiction(note, state, num_replicas)
    for note, state in summed:
        if note.purpose is Purpose.SUM:
            _refuse_second_sum(note, state, num_replicas)
    losses = [note.where for note, state in marks if note.purpose is Purpose.LOSS and state.advice.said < Said.WHOLE]
    for where in dict.fromkeys(losses):
        user_code.warn(_UNSPOKEN_LOSS.format(where=where), _errors.FactorOfReplicasWarning)
    means = [note.where for note, state in marks if note.purpose is Purpose.MEAN and state.advice.said is Said.SHARE]
    for where in dict.fromkeys(means):
        user_code.warn(_MEAN_OF_SHARES.format(where=where, num_replicas=num_replicas), _errors.FactorOfReplicasWarning)
    gradients = given + summed
    averaged = [(note, state) for note, state in marks if note.purpose is Purpose.MEAN and state.advice.gradient]
    if num_replicas > 1 and all(_is_same_work(note, state) for note, state in gradients + averaged):
        for note, _ in (gradients + averaged)[:1]:
            user_code.warn(_SAME.format(what=_WORK, where=_place(note), num_replicas=num_replicas))
    sums: dict[tuple[str, int], list[tuple[Mark, State]]] = {}  # by line and optimizer
    for note, state in gradients:
        if note.purpose is not Purpose.MEAN_GRADIENT:
            optimizer = 0 if note.purpose in _SUMS else note.number
            sums.setdefault((_place(note), optimizer), []).append((note, state))
    for (place, _), members in sums.items():
        if message := _complaint(members[0][0], [state for _, state in members], num_replicas):
            share = next((state.advice.curved for _, state in members if state.advice.curved), "")
            user_code.warn(message.format(where=place, num_replicas=num_replicas, share=share), _errors.FactorOfReplicasWarning)


def _is_same_work(note: Mark, state: State) -> bool:
    """Tell whether a gradient is combined correctly, but all replicas have computed the same one."""
    is_mean = note.purpose in (Purpose.MEAN, Purpose.MEAN_GRADIENT)
    return state.is_same and is_mean is not (state.advice.said is Said.SHARE)


def _place(note: Mark) -> str:
    """Return the verb that combines a gradient, and its line."""
    verb = "apply_gradients" if note.purpose in GIVEN_TO_OPTIMIZERS else note.name
    return f"{verb} at {note.where}"


def check_noise(findings: Findings) -> None:
    """Warn of random numbers that are the same on all replicas, and are combined with a replica's own rows."""
    for drawn, met in dict(findings.drawn.met).items():
        user_code.warn(
            f"the random numbers drawn at {drawn} are the same on all replicas, because their key is, and at {met} they are "
            "combined with each replica's own rows, so that examples on different replicas get the same noise. Make the key the "
            "replica's own: key = mr.get_replica_context().rng(key). If all shall have the same, draw outside of the step, and "
            "pass the array.",
            _errors.SameNoiseWarning,
        )


def check_outside(given: Iterable[tuple[Mark, State | None]], num_replicas: int) -> None:
    """As `check_gradients`, for values that steps have returned, each with its use and its state in the step."""
    marks = [(note, state) for note, state in given if state is not None]
    check_gradients(marks, num_replicas)
    if any(note.purpose is Purpose.MEAN and state.of_uneven and state.advice.said is not Said.SHARE for note, state in marks):
        user_code.warn(_PLAIN_MEAN, _errors.UnevenReplicasWarning)


def _refuse_contradiction(note: Mark, state: State, num_replicas: int) -> None:
    is_share = state.advice.said is Said.SHARE or (state.advice.said is Said.COMBINED and not state.is_mirrored)
    if note.purpose is Purpose.MEAN_GRADIENT:
        if is_share:
            raise _errors.FactorOfReplicasError(
                f"the gradient of variable {note.name!r}, given to apply_gradients at {note.where} with aggregate='mean', is "
                "that of a share of the global batch's loss: a loss for each example, or a loss of mr.losses, is divided by all "
                f"rows. Their mean would be R times too small (R = {num_replicas} here). Leave aggregate='mean' out, "
                "or return the mean over this replica's own rows alone, jnp.mean(per_example_loss)."
            )
    elif state.is_mirrored and (state.advice.gradient is Gradient.TOTAL or (state.sameness is Sameness.REDUCED and not is_share)):
        raise _errors.FactorOfReplicasError(
            f"the gradient of variable {note.name!r} given to apply_gradients at {note.where} has already been "
            "combined over the replicas. apply_gradients sums gradients over the replicas itself, so this update "
            f"would be R times too large (R = {num_replicas} here). Leave the all_reduce out, or say (to a "
            "mr.Optimizer) that it is done: optimizer.apply_gradients(grads, aggregate=False)."
        )


def _refuse_second_sum(note: Mark, state: State, num_replicas: int) -> None:
    is_combined = state.advice.gradient is Gradient.TOTAL or state.advice.said is Said.COMBINED
    if is_combined and state.is_mirrored:
        raise _errors.FactorOfReplicasError(
            f"{_place(note)} sums a gradient over the replicas that has already been combined over them, so it would be R times "
            f"too large (R = {num_replicas} here). Leave one of the two out. Of a value that is the same on all replicas "
            "ctx.all_reduce('mean', value) is the value itself."
        )


def _complaint(note: Mark, states: list[State], num_replicas: int) -> str:
    """Return the warning for gradients that are summed together, or "" for none."""
    said = {state.advice.said for state in states}
    if Said.WHOLE in said:
        return _COMBINED_LOSS
    if any(state.advice.gradient in (Gradient.BENT, Gradient.MIXED) for state in states):
        return _BENT_SUM
    is_unspoken = not said.isdisjoint((Said.CONSTANT, Said.NOTHING))
    if num_replicas > 1 and is_unspoken and all(state.is_same for state in states):
        return _SAME.replace("{what}", _FACTOR)
    if not is_unspoken or note.purpose is Purpose.SUMMED_GRADIENT:
        return ""
    if any(state.advice.curved for state in states):
        return _CURVED
    return _UNSPOKEN if note.purpose is Purpose.GRADIENT else _UNSPOKEN_SUM


def check_results(call: Call, lifted: Lifted, findings: Findings) -> None:
    """Warn if a step gets an optax state, and returns per-replica arrays to which own gradients were added.

    What a step takes and returns is no variable, so the proof does not refuse that its copies drift apart.
    """
    positions = jax.tree.unflatten(call.treedef, range(call.treedef.num_leaves))
    if not any(map(_is_of_optax, jax.tree.leaves(positions, is_leaf=_is_of_optax))):
        return
    results = findings.outputs[: lifted.num_results]
    drifting = [i for i, state in enumerate(results) if state.advice.gradient is Gradient.MIXED and not state.is_mirrored]
    if drifting:
        user_code.warn(
            f"{call.name} was given the state of an optimizer, and {len(drifting)} of its results, such as "
            f"result{lifted.plan.path_of(drifting[0])}, are arrays of all replicas to which each has added its own gradients, so "
            "that from now on each trains a model of its own. Combine the gradients before the update, with a loss of mr.losses: "
            "grads = mr.get_replica_context().all_reduce('sum', grads); or 'mean', if the loss is a mean over the replica's own "
            "rows. If each shall have its own, say so before: "
            "state = strategy.distribute_values_from_function(lambda ctx: state).",
            _errors.ReplicasDivergeWarning,
        )


def _is_of_optax(node: object) -> bool:
    return type(node).__module__.partition(".")[0] == "optax"


_DIVERGES = (
    "variable {name!r} is mirrored, but the value assigned to it at {where} may differ by replica: it "
    "depends on {origin}. The copies would drift apart without a word. Combine the replicas first, for "
    "example ctx = mr.get_replica_context(); variable.assign(ctx.all_reduce('mean', value)); or let "
    "mr.Optimizer(...).apply_gradients(grads) do it; or create the variable with aggregation='mean'. "
    "If each replica shall keep its own value, create it with synchronization='on_read'."
)
_STATE_DIVERGES = (
    "{name}, which the step at {where} changes, would differ by replica: it depends on {origin}. A model in "
    "the arguments of strategy.run is one for all replicas. Combine the gradients before the optimizer's update: "
    "loss, grads = mr.get_replica_context().all_reduce('sum', (loss, grads)), with a loss of mr.losses. {message}What each "
    "replica shall keep for itself is a mr.Variable with synchronization='on_read'."
)
_MEAN_OF_SHARES = (
    "the mean over the replicas at {where} is of this replica's share of a loss, or of what is computed from it, such as its "
    "gradient: a loss for each example, or a loss of mr.losses, is divided by all rows, so that the shares of all replicas add "
    "up, and their mean is R times too small (R = {num_replicas} here). Add them up: ctx.all_reduce('sum', value), or outside "
    "of a step strategy.reduce('sum', value)."
)
_PLAIN_MEAN = (
    "strategy.reduce('mean', value) gives all replicas one weight, and this value comes of a step in which they had different "
    "numbers of rows: of means over own rows it is not the mean over the batch, and a replica without rows may make it NaN. "
    "Write one of these lines:\n"
    "    ctx.all_reduce('mean', value)            # in the step: weighs each replica by its rows\n"
    "    strategy.reduce('mean', values, axis=0)  # of one value for each row\n"
    "    strategy.reduce('sum', value) / strategy.num_replicas_in_sync  # one weight for each replica"
)
_KEPT_MEAN = (
    "variable {name!r} is sync-on-read with aggregation='mean', which gives all replicas one weight when it is read, and the "
    "batch does not divide evenly among them: of means over own rows that would not be the mean over the batch. It is assigned "
    "at {where}. Combine the value first: variable.assign(ctx.all_reduce('mean', value)), which weighs by rows, or with "
    "by_rows=False. Or keep a sum and a number of rows, in variables with aggregation='sum'."
)
_OWN_REGULARIZATION = (
    "the penalty given to scale_regularization_loss at {where} depends on {origin}. It is divided by the number of replicas, as "
    "one that is the same on each; that of own rows would have a wrong weight in a batch that the replicas do not divide. Write "
    "mr.losses.mean_over_own_rows(penalty), in which a penalty for weights counts once, too; or add it to the loss of each "
    "example."
)
_DIVIDED_AGAIN = (
    "the loss at {where} is divided by all rows, and in it is a share of mr.losses, or the gradient of one, that was divided so "
    "before: it would count 1/R. Add shares to each other, `return share + mr.losses.compute_average_loss(losses)`, and what "
    "every replica adds to the loss of each example as it is: `return losses + penalty`. A gradient in a loss is "
    "combined first: mr.get_replica_context().all_reduce('sum', gradient)."
)
_SAME = (
    "all {num_replicas} replicas computed the same gradients, from no data that differs by replica, and {where} {what}. An array "
    "passed to strategy.run goes whole to every replica, and of one key all draw the same rows. Write one of these lines, or see "
    "why the batch reaches nothing that is trained, as by jax.lax.stop_gradient:\n"
    "    for x in strategy.distribute_dataset(dataset):  # gives each replica its part of the batch\n"
    "    key = ctx.rng(key)  # gives each its own key: draw global_batch_size // ctx.num_replicas_in_sync rows of it"
)
_FACTOR = (
    "sums them: the update is {num_replicas} times that of one device, unless the loss was divided by the number of replicas"
)
_WORK = "combines them: the numbers are right, and each replica has done the whole work"
_COMBINED_LOSS = (
    "the loss was combined over the replicas before it was differentiated, so each gradient already stands for "
    "all replicas, and {where} sums them again: the update is R times too large "
    "(R = {num_replicas} here). Differentiate this replica's own loss (mr.losses.compute_average_loss) and reduce the loss "
    "after the gradient, or for reporting outside with strategy.reduce('sum', loss)."
)
_BENT_SUM = (
    "{where} sums what each replica has computed of its own gradients, and that is not the same function of their sum: clipped "
    "or normalized gradients and an optimizer's updates are up to R times too large (R = {num_replicas} here), and a weight "
    "decay, a momentum, noise or a constant that was added counts R times. Sum first:\n"
    "    gradients = ctx.all_reduce('sum', gradients)  # then clip, normalize and add\n"
    "    mr.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), variables)  # does both after the sum\n"
    "    value = mr.losses.as_share(value)  # before the sum, if it is meant, or value is no gradient"
)
_UNSPOKEN_LOSS = (
    "nobody has said how the loss is divided that mr.losses.global_loss sums over the replicas at {where}. If it is a mean over "
    "the replica's own rows, as of jnp.mean, the loss is R times that of one device. Return "
    "mr.losses.compute_average_loss(per_example_losses) from its function, mr.losses.mean_over_own_rows(loss), or, when all rows "
    "have divided it, mr.losses.already_divided(loss)."
)
_UNSPOKEN = (
    "nobody has said how the loss is divided whose gradients {where} sums over the replicas. If it is a mean "
    "over the replica's own rows, as of jnp.mean, the update is R times that of one device. Write one of these lines:\n"
    "    return per_example_losses                  # in the function given to mr.value_and_grad: it takes the global mean\n"
    "    return mr.losses.mean_over_own_rows(loss)  # or mr.losses.already_divided(loss), when all rows have divided it\n"
    "    return share + mr.losses.scale_regularization_loss(penalty)  # a share of mr.losses, and what every replica adds\n"
    "    optimizer.apply_gradients(grads, aggregate='mean')  # of mr.Optimizer; or 'sum', when all rows have divided the loss"
)
_CURVED = (
    "the derivative of the loss by a share of mr.losses, at {share}, may differ by replica, as by that in jnp.sqrt(share), in a "
    "product or quotient of shares, or in a share times a value of own rows. The shares of all replicas add up, and what is so "
    "computed of each does not: the sum of gradients by {where} need not be that of one device. Write one of these lines:\n"
    "    return mr.losses.scale_regularization_loss(jnp.sqrt(ctx.all_reduce('sum', share)))  # or another function of the whole\n"
    "    return mr.losses.compute_average_loss(losses * weights)  # with what is of own rows in the loss of each example"
)
_UNSPOKEN_SUM = (
    "nobody has said how the loss is divided whose gradients {where} sums over the replicas. If it is a mean over the replica's "
    "own rows, as of jnp.mean, the sum is R times the gradient of one device. Write one of these lines:\n"
    "    return mr.losses.compute_average_loss(losses)  # in the function that is differentiated, of one loss for each example\n"
    "    return mr.losses.mean_over_own_rows(loss)      # or mr.losses.already_divided(loss), when all rows have divided it\n"
    "    gradients = ctx.all_reduce('mean', gradients)  # in place of the sum, of losses that are means over own rows\n"
    "    value = mr.losses.as_share(value)              # before the sum, if it is meant, or value is no gradient"
)

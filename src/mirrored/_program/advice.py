"""What values are in a training: losses, gradients, noise, states of metrics. Warnings and refusals of mistakes come from here.

The proof carries an `Advice` with each value's state and asks here how an equation changes it. No proof rests on it: a mistake in
this file warns wrongly, and cannot let copies differ. docs/design/advice.md has the rules.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from .._jax import jaxprs, primitives, random_keys
from .._jax.jaxprs import Equation
from .._jax.marks import Mark, Purpose
from . import noise as noises
from .noise import Noise

#: The purposes of gradients that an optimizer combines over the replicas.
GIVEN_TO_OPTIMIZERS = frozenset({Purpose.GRADIENT, Purpose.SUMMED_GRADIENT, Purpose.MEAN_GRADIENT})


class Said(enum.IntEnum):
    """The mark of a loss, and of the values and derivatives computed from it.

    A product has the highest mark of its factors, a sum the lowest of its operands, without constants.
    """

    ZERO = 0  # the number 0, and what it is multiplied with: it has no mark
    CONSTANT = 1  # computed from numbers in the program alone
    NOTHING = 2
    WHOLE = 3  # a value equal on all replicas was summed over them, as in the backward pass of a loss that was combined
    COMBINED = 4  # a share that was combined over the replicas
    SHARE = 5  # the loss is this replica's share: the shares of all add up to the whole, and so do their gradients


class Gradient(enum.IntEnum):
    """Whether a value is a gradient: the result of a backward pass, or a value that differs by replica only through gradients."""

    NONE = 0
    OWN = 1  # linear in the replica's own gradients, so that the sum over the replicas is the same function of their sum
    BENT = 2  # another function of them, such as a clipped gradient
    MIXED = 3  # one to which a mirrored value was added, such as a weight decay, or which was added to a mirrored value
    TOTAL = 4  # combined over the replicas by the step


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """What a value is in a training."""

    said: Said = Said.NOTHING
    is_operand: bool = False  # whether the step itself passes it, unchanged, to a collective
    came_back: str = ""  # the line of the collective through which a gradient has come back to it
    curved: str = ""  # the line of a share in which the loss is not linear, if the value comes from its derivative there
    has_share: bool = False  # whether it contains a share, or the gradient of one, that no collective has summed yet
    gradient: Gradient = Gradient.NONE
    noise: Noise | None = None  # random numbers in it, the same on all replicas
    old: tuple[int, bool] | None = None  # the variable whose old value is in it, and whether all else was added to that


class Advised(Protocol):
    """A value's state in the proof."""

    @property
    def advice(self) -> Advice:
        """What the value is in a training."""

    @property
    def is_mirrored(self) -> bool:
        """Whether the value is the same on all replicas."""


@dataclasses.dataclass
class Drawn:
    """The random draws of a step; a draw in a loop counts once."""

    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    #: Draws that are the same on all replicas and meet a replica's own rows: the lines of the draw and of the operation.
    met: list[tuple[str, str]] = dataclasses.field(default_factory=list)


NOTHING = Advice()
_with = dataclasses.replace


def join(given: Sequence[Advice]) -> Advice:
    """Return the advice for a value that is computed from such values."""
    said, came_back, curved, has_share, noise, old = Said.CONSTANT, "", "", False, None, None
    for advice in given:
        said = max(said, advice.said)
        came_back = came_back or advice.came_back
        curved = curved or advice.curved
        has_share = has_share or advice.has_share
        noise = noise or advice.noise
        old = old or advice.old
    return Advice(said, False, came_back, curved, has_share, Gradient.NONE, noise, old and (old[0], False))


def either(states: Sequence[Advised], joined: Advice) -> Advice:
    """Return the advice for a value that is one of several."""
    olds = {state.advice.old for state in states}
    old = olds.pop() if len(olds) == 1 else joined.old
    said = _lowest([state.advice.said for state in states], above=Said.CONSTANT)
    return _with(joined, said=said, gradient=_gradient_of_sum(states), old=old)


def chosen(value: Advice, joined: Advice) -> Advice:
    """Return the advice for a value that a condition chose; `joined` is the joint advice of value and condition."""
    return _with(joined, said=value.said, gradient=value.gradient, noise=value.noise, old=value.old or joined.old)


def backward(result: Advice) -> Advice:
    """Return the advice for a result of a backward pass."""
    return result if result.said is Said.ZERO else _with(result, gradient=Gradient.OWN)


def operation(
    equation: Equation, inputs: Sequence[Advised], state: Advised, line: Callable[[Equation], str], drawn: Drawn | None
) -> Advice:
    """Return the advice for a primitive's results; note draws in `drawn`, None while the fixed point of a loop is searched."""
    name, new = equation.primitive.name, state.advice
    has_gradient = any(operand.advice.gradient for operand in inputs)
    places = [0] if name in primitives.SPREADS else jaxprs.linear_operands(equation)  # also of an integer, as in `jnp.pad`
    if places is not None:
        new = _linear(name, [inputs[k] for k in places], new, has_gradient)
    elif has_gradient and _differs_by_gradients(inputs):
        new = _with(new, gradient=Gradient.BENT)
    # What is computed of a loss or gradient and is no float, such as whether it is finite, is neither.
    if not all(jax.numpy.issubdtype(getattr(atom.aval, "dtype", np.float32), np.inexact) for atom in equation.outvars):
        new = _with(new, said=min(new.said, Said.NOTHING), has_share=False, gradient=Gradient.NONE)
    if name in primitives.DRAWS or new.noise is not None:
        new = _with(new, noise=_noise(equation, inputs, state, line, drawn))
    if new.old is not None:
        new = _with(new, old=_old(name, [operand.advice for operand in inputs], new.old))
    return new


def _noise(
    equation: Equation, inputs: Sequence[Advised], state: Advised, line: Callable[[Equation], str], drawn: Drawn | None
) -> Noise | None:
    """Return the noise in an operation's result; note noise that meets a replica's own rows in the operation."""
    is_draw = equation.primitive.name in primitives.DRAWS
    if is_draw and drawn is not None:
        kind = "the same on all replicas" if state.is_mirrored else "other on each replica"
        if random_keys.draws_by_rows(equation):
            kind = "by rows"
        drawn.kinds[kind] += 1
    if state.is_mirrored:
        if is_draw:
            return noises.drawn(equation, line(equation))
        return noises.result_of(equation, [operand.advice.noise for operand in inputs])
    operands = list(zip(inputs, equation.invars, strict=True))
    differing = [operand for operand, atom in operands if not operand.is_mirrored and noises.has_rows(atom)]
    has_rows = not all(operand.advice.gradient for operand in differing)  # a gradient has none
    if drawn is not None and equation.primitive.name in primitives.ELEMENTWISE and has_rows:
        of_rows = [noise for operand, atom in operands if (noise := operand.advice.noise) is not None and noise.is_for_rows(atom)]
        drawn.met.extend((noise.where, line(equation)) for noise in of_rows)
    return None


def marked(
    note: Mark, state: Advised, gradients: dict[int, Gradient], is_backward: Callable[[], bool], line: Callable[[], str]
) -> tuple[Advice, bool]:
    """Return the advice for a marked value, and whether `refusals` judge the mark; `gradients` are those of the next sum."""
    old = state.advice
    match note.purpose:
        case Purpose.SHARE:
            is_divided_again = note.name == "divided" and old.has_share
            return _with(old, said=Said.SHARE, has_share=True, gradient=Gradient.NONE), is_divided_again
        case Purpose.TANGENT:
            return _with(old, said=Said.SHARE), False
        case Purpose.COTANGENT if old.said is not Said.WHOLE:
            if state.is_mirrored:
                return _with(old, said=Said.SHARE), False
            return _with(old, said=Said.NOTHING, curved=line()), False  # the loss is not linear in the share
        case Purpose.OWN_GRADIENT:  # by a replica's own rows it is no share
            return _with(old, has_share=old.has_share or old.said is Said.SHARE, gradient=Gradient.OWN), False
        case Purpose.OLD:
            return _with(old, old=(note.number, True)), False
        case Purpose.OPERAND:
            return _with(old, is_operand=True), False
        case Purpose.TOTAL:
            return _with(old, gradient=_combined(gradients.get(note.number, Gradient.NONE))), False
        case Purpose.SUM | Purpose.MEAN:
            gradients[note.number] = old.gradient
            return old, not is_backward()  # there a derivative of the user's own sums, or what a checkpoint computes again
    if note.purpose in GIVEN_TO_OPTIMIZERS:  # judged here, and no more where it is summed
        old = _with(old, gradient=Gradient.NONE)
    return old, True


def combined(name: str, given: Advised, is_of_step: bool) -> Advice:
    """Return the advice for the result of a collective that makes a value the same on all replicas."""
    old, is_sum = given.advice, name in primitives.SUMS
    if name in primitives.COMPARE:  # a largest share or gradient is none
        return NOTHING
    if not given.is_mirrored:
        if is_sum:
            return Advice(min(old.said, Said.COMBINED))
        return Advice(old.said, gradient=_combined(old.gradient))
    # In a backward pass also what was computed from a combined share, such as the derivative of its logarithm.
    highest, said = Said.NOTHING if is_of_step else Said.COMBINED, old.said
    if is_sum and Said.ZERO < said <= highest:  # so it is multiplied by R
        said = Said.WHOLE
    return _with(old, is_operand=False, has_share=False, said=said)


def _old(name: str, inputs: Sequence[Advice], mixed: tuple[int, bool]) -> tuple[int, bool]:
    """Return which variable's old value is in a result, and whether all else was added to it."""
    first, *others = inputs
    if name in primitives.SELECTS:
        if first.old is not None or len({branch.old for branch in others}) > 1:
            return mixed
        return others[0].old or mixed
    if name in primitives.COMMUTATIVE and first.old is None and len(others) == 1:
        first, others = others[0], [first]
    is_sum = name in primitives.SPREADS or name in primitives.ADD_TO_FIRST
    if is_sum and first.old is not None and all(addend.old is None for addend in others):
        return first.old
    return mixed


def _linear(name: str, given: Sequence[Advised], joined: Advice, has_gradient: bool) -> Advice:
    """Refine `joined`, the advice for any operation, for an operation that is linear in the `given` operands."""
    if name in primitives.ADDITIONS or name in primitives.DERIVATIVE_SUMS:
        joined = _with(joined, said=_said_of_sum(given, name in primitives.DERIVATIVE_SUMS))
        return _with(joined, gradient=_gradient_of_sum(given)) if has_gradient else joined
    is_quotient = name in primitives.DIVISIONS
    factors = given[:1] if is_quotient else given
    if any(factor.advice.said is Said.ZERO for factor in factors):
        return _with(joined, said=Said.ZERO)
    if is_quotient and given[1:] and given[1].advice.said is Said.WHOLE:  # a sum over the replicas: this does not multiply by R
        joined = _with(joined, said=given[0].advice.said)
    if has_gradient:
        joined = _with(joined, gradient=_gradient_of_product(given, factors))
    return joined


def _said_of_sum(given: Sequence[Advised], of_derivatives: bool) -> Said:
    """Return the mark of a sum; in JAX's sums of derivatives, constants count, because they are derivatives too."""
    said = [addend.advice.said for addend in given]
    if not of_derivatives:
        return _lowest(said, above=Said.CONSTANT)
    return Said.WHOLE if Said.WHOLE in said else _lowest(said, above=Said.ZERO)


def _differs_by_gradients(states: Sequence[Advised]) -> bool:
    """Tell whether some values differ by replica, and all of these are gradients."""
    differing = [state for state in states if not state.is_mirrored]
    return bool(differing) and all(state.advice.gradient for state in differing)


def _gradient_of_sum(states: Sequence[Advised]) -> Gradient:
    """Return what a sum of values is, as a gradient."""
    kinds = [state.advice.gradient for state in states]
    if not any(kinds):
        return Gradient.NONE
    others = max([state.advice.said for state in states if state.is_mirrored and not state.advice.gradient], default=Said.ZERO)
    if all(state.is_mirrored for state in states):
        return Gradient.NONE if others > Said.CONSTANT else max(kinds)
    if not _differs_by_gradients(states):
        return Gradient.NONE
    if others > Said.CONSTANT or Gradient.TOTAL in kinds:
        return Gradient.MIXED
    return max(kinds) if others is Said.ZERO else max(Gradient.BENT, *kinds)


def _gradient_of_product(states: Sequence[Advised], factors: Sequence[Advised]) -> Gradient:
    """Return what a product of values is, as a gradient; `factors` are all values, of a quotient only the first."""
    differing = [place for place, state in enumerate(states) if not state.is_mirrored]
    if not differing:
        gradients = [factor.advice.gradient for factor in factors if factor.advice.gradient]
        return gradients[0] if len(gradients) == 1 else Gradient.NONE
    if not _differs_by_gradients(states):
        return Gradient.NONE
    is_linear = len(differing) == 1 and differing[0] < len(factors)
    return states[differing[0]].advice.gradient if is_linear else Gradient.BENT


def _combined(kind: Gradient) -> Gradient:
    """Return what a gradient is after it was combined over the replicas."""
    return Gradient.TOTAL if kind in (Gradient.OWN, Gradient.TOTAL) else Gradient.NONE


def _lowest(said: Sequence[Said], above: Said) -> Said:
    return min([kind for kind in said if kind > above], default=max(said, default=above))

"""By what has a loss been divided on the way to its gradient: by the replica's own rows, or by those of all replicas?

A gradient begins as the number 1 at the loss, and meets the divisions of the loss before it meets any data: `jnp.mean` over 8
elements divides it by 8 and then spreads it over 8. Only these first operations are told apart; divisions inside a model, as in
normalization layers, come later. docs/design/mirror-proof.md has the rules.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .._jax import jaxprs

#: More ways than these, or longer ones, are not followed: nothing is said about such a gradient.
_MAX_TRAILS, _MAX_SCALES = 64, 16
#: Operations with a constant 1.0 that no gradient begins with.
NEVER_FIRST = frozenset({"add", "sub", "max", "min", "pow", "pad", "clamp", "eq", "ne", "lt", "le", "gt", "ge"})
_SUMS = frozenset({"add", "add_any", "sub", "concatenate"})
_PRODUCTS = frozenset({"mul", "div", "dot_general", "conv_general_dilated"})


class Trail(NamedTuple):
    """One way from a differentiated loss to a value of its gradient.

    Attributes:
        seed: which differentiation.
        where: the user's line of it.
        times: how many of them a loop has added up.
        scales: what the gradient met before it met a replica's data: `("div", 8.0)` and `("mul", 0.1)` by constants,
            `("own", 0)` for a division by what a replica has computed of its data, `("spread", 8)` where a sum of so many begins.
        after: the divisions and products by constants that it met later.
        is_whole: whether it was divided by something that stands for all replicas.
        counted: the replica's rows that `compute_average_loss` has counted, or 0.
        is_share: whether the loss was divided for a sum over the replicas, so that its gradients are to be summed however they
            were computed.
        is_combined: whether it came back through a sum over the replicas before it met any data, so that each replica has the
            gradient of a sum of all losses.
    """

    seed: Hashable
    where: str
    times: int = 1
    scales: tuple[tuple[str, float], ...] = ()
    after: frozenset[tuple[str, float]] = frozenset()
    is_whole: bool = False
    counted: int = 0
    is_share: bool = False
    is_combined: bool = False


Trails = frozenset[Trail]
NO_TRAILS: Trails = frozenset()


class Traced(Protocol):
    """The state of a value, as the proof knows it."""

    @property
    def sameness(self) -> int: ...

    @property
    def trails(self) -> Trails: ...

    @property
    def is_same(self) -> bool: ...

    @property
    def is_mirrored(self) -> bool: ...


class Divided(enum.Enum):
    """By what a loss was divided before its gradients are combined."""

    BY_ALL = "something that stands for all replicas"
    BY_OWN = "the replica's own number of rows"
    BY_NEITHER = "neither"


def passed(equation: Any, states: Sequence[Traced]) -> Trails:
    """Return the ways that lead to the results of an equation."""
    given = [state for state in states if state.trails]
    if not given:
        return NO_TRAILS
    name = equation.primitive.name
    if name in _SUMS:  # beside data, what comes from none, such as a regularization, is not looked at
        highest = max(state.sameness for state in states)
        added = [state for state in states if state.sameness == highest]
        is_of_shares = all(state.trails for state in added)  # what was combined already has no ways
        return _bounded(t._replace(is_share=t.is_share and is_of_shares) for state in added for t in state.trails)
    if name in _PRODUCTS and len(given) == 2:
        return _bounded(_both(a, b) for a in given[0].trails for b in given[1].trails)
    [*_, state] = given
    if name in ("mul", "div") and not (name == "div" and states[1].trails):
        position = states.index(state)
        return _scaled(name, state, states[1 - position], equation.invars[1 - position])
    if name == "broadcast_in_dim" and state.is_same:
        [out], [of] = equation.outvars, equation.invars[:1]
        factor = math.prod(out.aval.shape) // max(1, math.prod(of.aval.shape))
        return _noted(state.trails, ("spread", float(factor))) if factor > 1 else state.trails
    return _bounded(trail for state in given for trail in state.trails)


def _scaled(name: str, state: Traced, by: Traced, atom: Any) -> Trails:
    trails = state.trails
    if math.prod(atom.aval.shape) != 1:
        return trails
    if isinstance(atom, jaxprs.Literal):
        step = (name, abs(float(atom.val.real)))
        return _noted(trails, step) if state.is_same else _bounded(t._replace(after=t.after | {step}) for t in trails)
    if not state.is_same:
        return trails
    if name == "div" and not by.is_mirrored:
        return _noted(trails, ("own", 0.0))
    if name == "div" or (by.is_mirrored and not by.is_same):
        return frozenset(trail._replace(is_whole=True) for trail in trails)
    return trails


def _noted(trails: Trails, step: tuple[str, float]) -> Trails:
    return _bounded(t._replace(scales=(*t.scales, step)) for t in trails if len(t.scales) < _MAX_SCALES)


def _both(a: Trail, b: Trail) -> Trail:
    """Return the way of a product of two gradients, as in a penalty for the size of one."""
    scales = (*a.scales, *b.scales)[:_MAX_SCALES]
    return b._replace(
        scales=scales,
        after=a.after | b.after,
        is_whole=a.is_whole or b.is_whole,
        counted=max(a.counted, b.counted),
        is_share=a.is_share and b.is_share,
        is_combined=a.is_combined or b.is_combined,
    )


def _bounded(trails: Iterable[Trail]) -> Trails:
    found = frozenset(trails)
    return found if len(found) <= _MAX_TRAILS else NO_TRAILS


def looped(before: Iterable[Traced], trails: Trails, length: int) -> Trails:
    """Return the ways to what a loop of this length has computed: it has added up the losses that were differentiated in it."""
    outside = {trail.seed for own in before for trail in own.trails}
    return frozenset(trail if trail.seed in outside else trail._replace(times=trail.times * length) for trail in trails)


def divided(trail: Trail, rows: Collection[int], num_rows: Collection[int], num_replicas: int) -> Divided:
    """Tell by what a loss was divided.

    Args:
        trail: the way to its gradient.
        rows: the numbers of rows that this replica has.
        num_rows: the numbers that all have together.
        num_replicas: how many they are.
    """
    if trail.is_whole:
        return Divided.BY_ALL
    if trail.is_combined and (place := _place_of_mean(trail, num_replicas)) is not None:  # the sum makes up for it
        trail = trail._replace(scales=trail.scales[:place] + trail.scales[place + 1 :])
    spreads = [value for kind, value in trail.scales if kind == "spread"]
    begins = {*spreads[:1], math.prod(spreads)} if spreads else set()
    is_by_row = _is_one_of(spreads[0], rows) if spreads else False
    own, others, is_spread = [], [], False
    for step, after in itertools.zip_longest(trail.scales, trail.scales[1:]):
        kind, value = step
        divisor = value if kind != "mul" else 1 / value if value else 0.0
        is_mean_of_row = is_spread and is_by_row and after == ("spread", divisor)
        if kind == "spread":
            is_spread = True
        elif _is_one_of(divisor, num_rows) or (kind == "mul" and _is_one_of(value, {n / m for n in rows for m in num_rows})):
            return Divided.BY_NEITHER if _is_one_of(divisor, begins) else Divided.BY_ALL  # so many numbers may have been added up
        elif kind == "own" or (not is_mean_of_row and _is_one_of(divisor, {*rows, *(() if is_spread else begins)} - {1})):
            own.append((kind, divisor))
        else:
            others.append((kind, divisor))
    others += own[1:] + own[: len(own) > 1]  # one of them is the division by the rows
    others += [step for step in trail.after if step[0] == "div"]
    if any(_is_of_all(kind, value, num_replicas) for kind, value in others):
        return Divided.BY_NEITHER
    return Divided.BY_OWN if own else Divided.BY_NEITHER


def _is_one_of(value: float, numbers: Iterable[float]) -> bool:
    return any(math.isclose(value, number, rel_tol=1e-5) for number in numbers)


def _is_of_all(kind: str, divisor: float, num_replicas: int) -> bool:
    """Tell whether a division may be one by the number of replicas: in doubt it is, so that nobody is warned for nothing."""
    if kind == "mul":
        return _is_one_of(divisor, (num_replicas,))
    return divisor > 0 and divisor % num_replicas == 0


def of_combined_loss(trails: Trails, num_replicas: int) -> bool:
    """Tell whether a loss was added up over the replicas before it was differentiated, and not divided by their number."""
    return any(trail.is_combined and _place_of_mean(trail, num_replicas) is None for trail in trails)


def _place_of_mean(trail: Trail, num_replicas: int) -> int | None:
    """Return which of the scales of a combined loss is its division by the number of replicas."""
    by_all = (("div", float(num_replicas)), ("mul", 1 / num_replicas))
    return next((place for place, step in enumerate(trail.scales) if step in by_all), None)


def too_many_averages(trails: Trails, rows: Collection[int]) -> int:
    """Return how many averages, each over a part of a replica's rows, are added up and not divided by their number; or 1."""
    lines: dict[tuple[str, int], dict[Any, int]] = {}
    for trail in trails:
        if trail.counted:
            times = lines.setdefault((trail.where, trail.counted), {})
            times[trail.seed] = max(trail.times, times.get(trail.seed, 1))
    for (where, counted), times in lines.items():
        number = sum(times.values())
        own = [trail for trail in trails if (trail.where, trail.counted) == (where, counted)]
        if number > 1 and counted * number in rows and not any(_is_divided_by(number, trail) for trail in own):
            return number
    return 1


def _is_divided_by(number: int, trail: Trail) -> bool:
    steps = [(kind, value) for kind, value in (*trail.scales, *trail.after) if kind in ("mul", "div") and value]
    return any(_is_one_of(value if kind == "div" else 1 / value, (number,)) for kind, value in steps)

"""Runs a proven step in which large arrays that are the same on every replica are stored in parts, one on each device.

Elementwise operations on such arrays run on parts. A sum over the replicas becomes a reduce-scatter if its result is stored in
parts. Other operations get whole arrays, gathered where they are used (docs/design/parts.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import jaxprs, primitives, tracing
from ..._jax.interpreter import Interpreter, run_parts
from ..._jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from ..._replicas.division import Division
from ..._typing import ArrayLike, Shape
from .flat import flattened, varying_in
from .on_parts import Addend, DevicePart, Gathers, Value, Whole, run_on_parts, shape_of
from .order_sums import PRODUCTS, large, moved_up
from .sums_in_parts import ADDS, Known, SumsInParts, find_sums, is_added_to
from .turns import Turns


class Parted(Interpreter[Value]):
    """An evaluation of a program on parts. Each body of a loop or condition gets a new one, with new gathers."""

    def __init__(self, known: Known, around: tuple[str, ...] = ()) -> None:
        self.known, self.around = known, around
        self.sums = SumsInParts()
        self.turns, self.gathers = Turns(), Gathers(known.axis, self.whole)
        self.varying: set[Var] = set()  # the variables that may differ by replica
        self.gathered: dict[tuple[int, int, bool], tuple[Any, Any]] = {}  # see `_gather`

    # -- values

    def constant(self, value: Any, aval: jax.core.AbstractValue) -> Value:
        return Whole(value, True)

    def is_same(self, var: Var) -> bool:
        """Tell whether the proof shows that a result is the same on every replica."""
        return var not in self.varying

    def whole(self, value: Value, is_again: bool = False) -> Any:
        """Return a value's whole array. The backward pass (`is_again`) gathers it anew, and need not keep the forward pass's."""
        if isinstance(value, Whole):
            return value.array
        if isinstance(value, Addend):
            assert value.value is not None  # it is only added up
            return value.value.array
        return self._gather(value, value.array, is_again)

    def _gather(self, part: DevicePart, array: jax.Array, is_again: bool) -> jax.Array:
        """Gather a part once; `array` is the part's array, or that array behind a barrier."""
        key = id(part.array), part.division.axis, is_again
        if key not in self.gathered:
            self.gathered[key] = part.array, part.division.gathered(array, self.known.axis)  # the part keeps its number
        return self.gathered[key][1]

    def begin(self, addend: Addend) -> Any:
        """Return this device's part of an addend's sum; start the sum unless it has started."""
        if addend.total is None:
            addend.total = addend.division.scattered_sum(self.whole(addend), self.known.axis)
        return addend.total

    # -- the walk

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        """Return a program's results. Open its calls first, and prove again which variables are the same on every replica."""
        equations, results = flattened(jaxpr)
        differ = {var for var, value in zip(jaxpr.invars, arguments, strict=True) if not _is_same(value)}
        self.varying = varying_in(jaxpr, equations, results, differ)
        carried = {var for var, value in zip(jaxpr.invars, arguments, strict=True) if _is_total(value)}
        self.sums = find_sums(self.known, equations, results, self.varying, carried)
        values: dict[Var, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values.update({v: self.constant(value, v.aval) for v, value in zip(jaxpr.constvars, constants, strict=True)})

        def read(atom: Atom) -> Value:
            return self.constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        for equation in moved_up(self.sums.terms, equations):
            made = self.equation(equation, list(map(read, equation.invars)))
            values.update({var: self._noted(var, value) for var, value in zip(equation.outvars, made, strict=True)})
        return list(map(read, results))

    def _noted(self, var: Var, value: Value) -> Value:
        """Note a gradient, so that its sum begins early, or a term of a gradient, so that it is made early."""
        division = self.known.division_of(var) if var in self.sums.terms else None
        if division is None or not isinstance(value, Whole) or value.is_same:
            return value
        addend = Addend(value, division) if var in self.sums.operands else None
        self.turns.add(value, addend)
        return addend or value

    def results_of(self, equation: Equation, arrays: Sequence[Any]) -> list[Value]:
        return [Whole(array, self.is_same(var)) for array, var in zip(arrays, equation.outvars, strict=True)]

    # -- the rules

    def plain(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        name = equation.primitive.name
        if any(map(_is_total, values)) or self._adds_terms(equation, values):
            return [self._of_total(equation, values)]
        if name in primitives.ONE_TO_ONE:
            return self._held(equation, values)
        if any(isinstance(value, DevicePart) for value in values):
            if (results := run_on_parts(self.gathers, equation, values)) is not None:
                return results
        elif (filled := _fill(equation, values)) is not None:
            return [filled]
        return self._on_wholes(equation, values)

    def _adds_terms(self, equation: Equation, values: list[Value]) -> bool:
        """Tell whether an operation adds two terms of a gradient, each summed over the replicas on its own."""
        are_addends = equation.primitive.name in ADDS and all(isinstance(value, Addend) for value in values)
        return are_addends and self.sums.only.issuperset([*equation.invars, *equation.outvars])

    def _of_total(self, equation: Equation, values: list[Value]) -> Addend:
        """Run an operation on sums instead of on their addends: an addition, or scaling by a factor equal on every replica."""
        first: Any = next(value for value in values if isinstance(value, Addend))
        shape, division = shape_of(equation.outvars[0]), first.division
        if equation.primitive.name in ADDS:
            return Addend(None, division, *tracing.bind(equation, [self.total(value, division, shape) for value in values]))
        part = DevicePart(first.total, division, shape)
        results = run_on_parts(self.gathers, equation, [part if value is first else value for value in values])
        assert results is not None  # see `sums_in_parts`
        return Addend(None, division, results[0].array)

    def total(self, value: Value, division: Division, shape: Shape) -> Any:
        """Return this device's part of a value's sum over the replicas."""
        if isinstance(value, Addend):
            return self.begin(value)
        if _is_same(value):
            part = self.gathers.part(value, division, shape)
            return part * jnp.asarray(jax.lax.axis_size(self.known.axis), part.dtype)
        return division.scattered_sum(value.array, self.known.axis)

    def _held(self, equation: Equation, values: list[Value]) -> list[Value]:
        """Hold a barrier's values until their turn. Parts stay parts, and are gathered again behind the barrier."""
        parts, others = ([k for k, v in enumerate(values) if isinstance(v, DevicePart) == is_part] for is_part in (True, False))
        arrays = [_array_of(values[k]) for k in parts], [self.whole(values[k]) for k in others]
        results = list(values)
        for k, array in zip([*parts, *others], self.turns.hold(*arrays, self.begin), strict=True):
            results[k] = Whole(array, self.is_same(equation.outvars[k]))
            if isinstance(part := values[k], DevicePart):
                results[k] = dataclasses.replace(part, array=array)
        return results

    def _on_wholes(self, equation: Equation, values: list[Value]) -> list[Value]:
        """Run an operation on whole arrays; a backward pass gathers each array only when its turn comes."""
        is_again = jaxprs.is_backward(equation, self.around)
        new = [v for v in values if isinstance(v, DevicePart) and (id(v.array), v.division.axis, is_again) not in self.gathered]
        may_wait = is_again and any(map(self._differs, values))
        if may_wait and (new or (self.turns.has_waiting and _is_with_weight(equation, values))):
            ready = self.turns.ready([part.array for part in new])
            values = self._waited(values)
            for part, array in zip(new, ready, strict=True):
                self._gather(part, array, is_again)
        return self.results_of(equation, tracing.bind(equation, [self.whole(value, is_again) for value in values]))

    def _waited(self, values: list[Value]) -> list[Value]:
        """Return values, the first that may differ by replica available only after the gradients noted before."""
        first = next((k for k, value in enumerate(values) if self._differs(value)), None)
        if first is None:
            return values
        [tied] = self.turns.wait([self.whole(values[first])], self.begin)
        return [*values[:first], Whole(tied, False), *values[first + 1 :]]

    def _differs(self, value: Value) -> bool:
        """Tell whether a value may differ by replica and can pass a barrier: it is computed, and no key or reference."""
        if _is_same(value) or _is_total(value):
            return False
        array = self.whole(value)
        is_computed = isinstance(array, jax.core.Tracer) and isinstance(getattr(array, "dtype", None), np.dtype)
        return is_computed and isinstance(jax.typeof(array), jax.core.ShapedArray)

    def over_replicas(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        if not jaxprs.is_sum(equation):
            return self._on_wholes(equation, values)
        results: list[Value | None] = [self._sum(atom, value) for atom, value in zip(equation.invars, values, strict=True)]
        rest = [k for k, result in enumerate(results) if result is None]
        if rest:
            few = equation.replace(invars=[equation.invars[k] for k in rest], outvars=[equation.outvars[k] for k in rest])
            for k, total in zip(rest, tracing.bind(few, [self.whole(values[k]) for k in rest]), strict=True):
                results[k] = Whole(total, True)
        return results  # type: ignore[return-value]

    def _sum(self, atom: Atom, value: Value) -> DevicePart | None:
        """Return the sum of a value over the replicas in parts; None if it is to be whole."""
        division = self.known.division_of(atom) if isinstance(value, Whole) else value.division
        if division is None or (isinstance(value, Whole) and value.is_same):
            return None
        return DevicePart(self.total(value, division, shape_of(atom)), division, shape_of(atom))

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        """Run a call that was not opened, because it has its own derivative, on whole arrays."""
        return self._on_wholes(equation, values)

    def loop(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Run a scan on parts of its rows. Gather a part that all rounds take first, unless rounds have backward passes."""
        if not jaxprs.is_scan(equation):
            return self._on_wholes(equation, values)
        loop, around = jaxprs.loop_of(equation), self.around + jaxprs.transforms_of(equation)
        [body], is_again = loop.parts, jaxprs.is_backward(equation, self.around)
        is_of_steps = not is_again and any(jaxprs.is_backward(inner, around) for inner in jaxprs.inside(equation))
        given: list[Value] = [self._given(v, is_again, k not in body.fixed or is_of_steps) for k, v in enumerate(values)]
        sums_rounds = is_of_steps and any(isinstance(value, DevicePart) for value in values)  # else one sum is enough
        for place, (k, var) in enumerate(zip(loop.carry, equation.outvars, strict=False)):
            division = self.known.division_of(var) if sums_rounds and var in self.sums.only else None
            if division is not None and is_added_to(body.closed.jaxpr, k, place):
                given[k] = Addend(None, division, self.total(given[k], division, shape_of(var)))
            elif not self.is_same(var) or not isinstance(given[k], DevicePart):
                given[k] = Whole(self.whole(given[k], is_again), self.is_same(var))
        for k in loop.rows:
            if isinstance(row := given[k], DevicePart):
                given[k] = _moved(row, -1) if row.division.axis else Whole(self.whole(row, is_again), True)
        waits = is_again and self.turns.has_waiting
        if waits:
            given = self._waited(given)
        arrays: list[Any] = [_array_of(value) for value in given]
        divisions = [self._row_division(var) if var in self.sums.only else None for var in equation.outvars]
        kinds: list[Value] = []

        def one_round(*arrays: jax.Array) -> list[Any]:
            walk = Parted(self.known, around)
            kinds[:] = walk.run_closed(body.closed, list(map(_with_array, given, arrays)))
            for k, value in enumerate(kinds):
                if k < len(loop.carry):
                    kinds[k] = value if _is_total(value) else walk.like(value, given[loop.carry[k]])
                elif (division := divisions[k]) is not None and not isinstance(value, DevicePart):
                    kinds[k] = Addend(None, division, division.scattered_sum(walk.whole(value), self.known.axis))
            return [_typed(_array_of(value), var) for value, var in zip(kinds, body.closed.jaxpr.outvars, strict=True)]

        made = run_parts(equation, arrays, [one_round])
        results = [_with_array(kind, array) for kind, array in zip(kinds, made, strict=True)]
        for k, var in enumerate(equation.outvars):
            if isinstance(result := results[k], Whole):
                results[k] = Whole(result.array, self.is_same(var))
            elif k >= len(loop.carry):
                results[k] = _moved(result, 1, shape_of(var))
        return self._waited(results) if waits else results  # the sums that began before the loop end beside it

    def _given(self, value: Value, is_again: bool, may_be_part: bool = True) -> DevicePart | Whole:
        """Return a value as a loop's body or a branch gets it."""
        if isinstance(value, Whole) or (isinstance(value, DevicePart) and may_be_part):
            return value
        return Whole(self.whole(value, is_again), isinstance(value, DevicePart))

    def _row_division(self, var: Var) -> Division | None:
        """Return the division of the rows of a stack whose sum over the replicas is stored in parts."""
        division = self.known.division_of(var)
        if division is None or not division.axis:
            return None
        return dataclasses.replace(division, axis=division.axis - 1)

    def like(self, value: Value, other: Value) -> DevicePart | Whole:
        """Return a value in parts or whole, like another value."""
        if isinstance(other, DevicePart):
            return dataclasses.replace(other, array=self.gathers.part(value, other.division, other.shape))
        return Whole(self.whole(value), isinstance(other, Whole) and other.is_same)

    def cond(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Run a condition on parts if its decision is the same on every replica, else on whole arrays."""
        decision, *operands = values
        is_joint = isinstance(decision, Whole) and decision.is_same
        if not is_joint or not any(isinstance(value, DevicePart) for value in operands):
            return self._on_wholes(equation, values)
        around, loop = self.around + jaxprs.transforms_of(equation), jaxprs.loop_of(equation)
        given = [self._given(value, jaxprs.is_backward(equation, self.around)) for value in operands]
        kinds: list[DevicePart | Whole] = [self._stored(None, var) for var in equation.outvars]

        def branch_of(part: jaxprs.Part) -> Callable[..., list[Any]]:
            def branch(*arrays: jax.Array) -> list[Any]:
                walk = Parted(self.known, around)
                results = walk.run_closed(part.closed, list(map(_with_array, given, arrays)))
                made = [walk.like(value, kind).array for value, kind in zip(results, kinds, strict=True)]
                return list(map(_typed, made, part.closed.jaxpr.outvars))

            return branch

        arrays = run_parts(equation, [self.whole(decision), *map(_array_of, given)], list(map(branch_of, loop.parts)))
        return list(map(_with_array, kinds, arrays))

    def _stored(self, array: jax.Array | None, var: Var) -> DevicePart | Whole:
        """Return a result in parts if it is the same on every replica and arrays of its shape are divided; else whole."""
        division, is_same = self.known.division_of(var), self.is_same(var)
        if division is None or not is_same:
            return Whole(array, is_same)
        return DevicePart(array, division, shape_of(var))

    def solve(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        return self._on_wholes(equation, values)


def _is_same(value: Value) -> bool:
    """Tell whether a value is known to be the same on every replica."""
    return isinstance(value, DevicePart) or (isinstance(value, Whole) and value.is_same)


def _is_with_weight(equation: Equation, values: Sequence[Value]) -> bool:
    """Tell whether an operation is a product with a large weight: a whole array, the same on every replica."""
    atoms = [atom for atom, v in zip(equation.invars, values, strict=True) if isinstance(v, Whole) and v.is_same]
    return equation.primitive.name in PRODUCTS and bool(large(atoms))


def _is_total(value: Value) -> bool:
    """Tell whether a value is only known by its sum over the replicas."""
    return isinstance(value, Addend) and value.value is None


def _typed(array: ArrayLike, atom: Atom) -> jax.Array:
    """Return an array; a Python number becomes one of the dtype that the program gives it."""
    return array if isinstance(array, jax.Array) else jnp.asarray(array, getattr(atom.aval, "dtype", None))


def _array_of(value: Value) -> Any:
    return value.total if isinstance(value, Addend) else value.array


def _with_array(value: Value, array: jax.Array) -> Any:
    """Return a value with another array, such as one behind a barrier or in a loop."""
    if isinstance(value, Whole):
        return Whole(array, value.is_same)
    if isinstance(value, Addend):
        return dataclasses.replace(value, total=array)
    return dataclasses.replace(value, array=array)


def _moved(value: DevicePart | Addend, places: int, shape: Shape = ()) -> Any:
    """Return parts of an array that has `places` more axes before the divided one."""
    division = dataclasses.replace(value.division, axis=value.division.axis + places)
    if isinstance(value, Addend):
        return Addend(None, division, value.total)
    return DevicePart(value.array, division, shape or value.shape[-places:])


def _fill(equation: Equation, values: Sequence[Value]) -> Whole | None:
    """Run an operation whose result has one number in every element; return None for any other."""
    [first, *_], name = equation.outvars, equation.primitive.name
    shape, numbers = getattr(first.aval, "shape", ()), [_number_of(value) for value in values]
    if shape == () or any(number is None for number in numbers):
        return None
    if name in primitives.BROADCASTS:
        number = numbers[0]
    elif name in primitives.ELEMENTWISE:
        [number] = tracing.bind(equation, numbers)
    else:
        return None
    return Whole(jnp.broadcast_to(number, shape), True, number)


def _number_of(value: Value) -> Any:
    """Return the number that all elements of an array have on every replica; None if there is none."""
    if not isinstance(value, Whole) or not value.is_same:
        return None
    return value.array if jnp.ndim(value.array) == 0 else value.number

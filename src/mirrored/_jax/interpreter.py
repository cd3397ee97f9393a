"""Walks through a traced program, with a rule for each kind of equation that subclasses override.

`Interpreter` walks, and finds each equation's kind. `Evaluation` computes arrays. `Analysis` finds a property of each value.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax

from .._typing import REPLICA_AXIS
from . import jaxprs, tracing
from .jaxprs import ClosedJaxpr, Equation, Jaxpr, Literal, Var
from .primitives import CALLS, INLINE_CALLS, SIMPLE

Value = TypeVar("Value")
#: Primitive -> rule, for primitives that run jaxprs in other ways than a single call.
_RULES = {"scan": "loop", "while": "loop", "cond": "cond", "custom_linear_solve": "solve"}


class Interpreter(abc.ABC, Generic[Value]):
    """A walk through a program, with a value for each of its variables.

    A rule takes an equation and the values of its operands, and returns the values of its results. By default the walk enters
    calls, and handles every other kind as `plain`.
    """

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        """Return the values of a program's results, given its constants and the values of its arguments."""
        known: dict[Var, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        known.update((v, self.constant(value, v.aval)) for v, value in zip(jaxpr.constvars, constants, strict=True))
        for equation in jaxpr.eqns:
            values = [self.constant(a.val, a.aval) if isinstance(a, Literal) else known[a] for a in equation.invars]
            known.update(zip(equation.outvars, self.equation(equation, values), strict=True))
        return [self.constant(a.val, a.aval) if isinstance(a, Literal) else known[a] for a in jaxpr.outvars]

    def run_closed(self, closed: ClosedJaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Return the values of a closed program's results."""
        return self.run(closed.jaxpr, closed.consts, arguments)

    def equation(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Apply the rule of an equation's kind."""
        if equation.primitive.name in SIMPLE:
            return self.plain(equation, values)
        if (rule := _RULES.get(equation.primitive.name)) is not None:
            return getattr(self, rule)(equation, values)  # type: ignore[no-any-return]
        if equation.primitive.name in CALLS and (inner := jaxprs.callee(equation)) is not None:
            return self.call(equation, inner, values)
        if REPLICA_AXIS in jaxprs.axis_names(equation):
            return self.over_replicas(equation, values)
        return self.plain(equation, values)

    # -- the rules

    def constant(self, value: Any, aval: jax.core.AbstractValue) -> Value:
        """Return the value of a constant, or of a number in an equation."""
        return value

    @abc.abstractmethod
    def plain(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Handle an operation, and every equation without another rule."""

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        """Handle an equation that runs one program once."""
        return self.run_closed(inner, values)

    def over_replicas(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Handle an equation that names the replicas' axis: the replica's number, or a collective."""
        return self.plain(equation, values)

    loop = cond = solve = over_replicas


class Flattening(Interpreter[Value]):
    """A walk that inlines calls, except those with a meaning of their own, such as a derivative, and no collective inside.

    It cuts a sum over both the replicas and array axes into two sums.
    """

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        is_entered = equation.primitive.name in INLINE_CALLS or jaxprs.has_collective(equation)
        return self.run_closed(inner, values) if is_entered else self.plain(equation, values)

    def solve(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        if not jaxprs.has_collective(equation):
            return self.plain(equation, values)
        jaxpr, operands = jaxprs.solver_of(equation)  # the solver has no constants
        return self.run(jaxpr, (), [values[i] for i in operands])

    def over_replicas(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        if not jaxprs.adds_own_axes(equation):
            return self.plain(equation, values)
        along_axes, rest = tracing.own_axes_first(equation)
        return self.plain(rest, self.run_closed(along_axes, values))


class Evaluation(Interpreter[Any]):
    """A walk that computes a program's arrays, in the current trace; an equation that it does not enter runs unchanged."""

    def enters(self, equation: Equation, values: list[Any]) -> bool:
        """Tell whether to walk through the inside of an equation too."""
        return False

    def equation(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        """Apply the rule of an equation that this walk enters; run any other."""
        return super().equation(equation, values) if self.enters(equation, values) else tracing.bind(equation, values)

    def plain(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        return tracing.bind(equation, values)

    def loop(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        walk, parts = self.run_closed, jaxprs.loop_of(equation).parts
        return run_parts(equation, values, [lambda *arguments, part=part: walk(part.closed, arguments) for part in parts])

    cond = loop


def evaluate(closed: ClosedJaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Run a traced function on arrays, in the current trace."""
    if tracing.have_mesh(jaxprs.all_equations(closed.jaxpr)):
        return Evaluation().run(closed.jaxpr, constants, arguments)
    return jax.core.eval_jaxpr(closed.jaxpr, constants, *arguments)


def run_parts(equation: Equation, operands: Sequence[Any], bodies: Sequence[Callable[..., Sequence[Any]]]) -> list[Any]:
    """Run a loop or condition with other functions in place of its jaxprs, with the same signatures (see `loop_of`)."""
    loop = jaxprs.loop_of(equation)
    if loop.index:
        branches = [lambda *arguments, body=body: list(body(*arguments)) for body in bodies]
        return list(jax.lax.switch(operands[0], branches, *operands[1:]))
    fixed = [[operands[k] for k in part.fixed] for part in loop.parts]
    carry, rows = ([operands[k] for k in positions] for positions in (loop.carry, loop.rows))
    if loop.parts[0].decides:
        again, body = bodies
        return list(jax.lax.while_loop(lambda c: again(*fixed[0], *c)[0], lambda c: list(body(*fixed[1], *c)), carry))

    def one_round(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        results = list(bodies[0](*fixed[0], *carry, *rows))
        return results[: len(carry)], results[len(carry) :]

    options = {key: equation.params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(one_round, carry, rows, **options)
    return [*carry, *stacked]


class Analysis(Interpreter[Value]):
    """A walk that finds a property of each value: the higher, the less is known. A result gets the highest of its operands'.

    It walks through a loop until the properties of the carry no longer rise.
    """

    @abc.abstractmethod
    def join(self, values: Sequence[Value]) -> Value:
        """Return the highest of some properties; the lowest possible one if there are none."""

    def merged(self, values: Sequence[Value]) -> Value:
        """Return the property of a result of a condition, or of a loop's carry, given those of the branches or rounds."""
        return self.join(values)

    def chosen(self, decision: Value, value: Value) -> Value:
        """Return the property of a result of a `cond` or `while`, given those of the condition and of the result itself."""
        return self.join((decision, value))

    def inside(self, equation: Equation, decision: Value | None = None, is_final: bool = True) -> Analysis[Value]:
        """Return the analysis for the inside of a loop, condition or call.

        `decision` is the property of the value that decides whether, or how often, the inside runs. The walk passes through a
        loop several times before the arguments' properties are final.
        """
        return self

    def constant(self, value: Any, aval: jax.core.AbstractValue) -> Value:
        """Return the lowest property."""
        return self.join(())

    def plain(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Give each result the highest of the operands' properties."""
        return [self.join(values)] * len(equation.outvars)

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        return self.inside(equation).run_closed(inner, values)

    def solve(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        jaxpr, operands = jaxprs.solver_of(equation)
        return self.inside(equation).run(jaxpr, (), [values[i] for i in operands])

    def cond(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        decision, *operands = values
        inside = self.inside(equation, decision)
        branches = [inside.run_closed(closed, operands) for closed in equation.params["branches"]]
        return [self.chosen(decision, self.merged(results)) for results in zip(*branches, strict=True)]

    def loop(self, equation: Equation, values: list[Value]) -> Sequence[Value]:
        """Walk through the body, and a `while`'s condition, until the carry is settled."""
        loop = jaxprs.loop_of(equation)
        *conditions, body = loop.parts
        rows = [values[k] for k in loop.rows]
        search = self.inside(equation, is_final=False)

        def walk(inside: Analysis[Value], part: jaxprs.Part, carry: Sequence[Value]) -> list[Value]:
            return inside.run_closed(part.closed, [*(values[k] for k in part.fixed), *carry, *rows])

        def decide(carry: Sequence[Value]) -> Value | None:
            return walk(search, conditions[0], carry)[0] if conditions else None

        def one_round(carry: Sequence[Value]) -> Sequence[Value]:
            again, results = decide(carry), walk(search, body, carry)[: len(carry)]
            return results if again is None else [self.chosen(again, value) for value in results]

        carry = self.settled([values[k] for k in loop.carry], one_round)
        final = self.inside(equation, decide(carry))
        *_, results = [walk(final, part, carry) for part in loop.parts]
        return [*carry, *results[len(carry) :]]

    def settled(self, carry: Sequence[Value], one_round: Callable[[Sequence[Value]], Sequence[Value]]) -> list[Value]:
        """Return the properties of a loop's carry after enough rounds that one more changes nothing."""
        while True:
            wider = [self.merged(pair) for pair in zip(carry, one_round(carry), strict=True)]
            if wider == list(carry):
                return wider
            carry = wider

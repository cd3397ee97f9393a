"""More replicas than devices: each device runs several replicas of a step, all together or one by one.

The step is traced and proven for R replicas, and becomes nodes: its equations, with calls opened. A node is *shared* if it
computes the same on every replica, *own* if each replica has its own values, and a *meeting* if the replicas exchange values in
it: a collective, or a loop or condition with one inside. A node's stage is the number of meetings on the longest way to it,
itself included, so the nodes of one stage need no meeting between them.

The nodes run on arrays of a device's replicas `[v, ...]`, stage by stage: first the meetings, over the device's replicas and over
the devices, then shared nodes once, and own nodes for each replica, by `jax.vmap` or in a `jax.lax.scan`.
docs/design/several-replicas-on-a-device.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._errors import ContextError
from ..._jax import jaxprs, primitives, tracing
from ..._jax.interpreter import Evaluation, run_parts
from ..._jax.jaxprs import ClosedJaxpr, Equation, Jaxpr, Var
from ..._replicas.mesh import ReplicaMesh
from ..._typing import REPLICA_AXIS
from ..lift import Lifted
from ..uneven.nodes import Node, Reading, Value, stages_of
from . import sink_reductions
from .proven import Proven
from .sink_reductions import is_of_floats, merge, wide_type


def run_all_on_device(step: Proven) -> Proven:
    """Let each device run all of its replicas."""
    return dataclasses.replace(step, run=_run_replicas)


def _run_replicas(step: Proven, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a step for all replicas of a device."""
    # Made before any loop, because a value made inside one may not be used behind it.
    mesh = step.mesh
    numbers = jax.lax.axis_index(mesh.axis) * mesh.per_device + jnp.arange(mesh.per_device, dtype=jnp.int32)
    device = _Device(mesh, numbers, step.findings.varying)
    return _Course(device, _jaxpr_of(step.lifted), constants, inputs, step.own_inputs).run(step.own_outputs)


def _jaxpr_of(lifted: Lifted) -> Jaxpr:
    """Return a step with high-level primitives expanded only where that is needed, because expanded ones lose derivatives."""
    closed, shown = lifted.closed.jaxpr, lifted.shown.jaxpr
    must_see = lambda e: jaxprs.has_collective(e) or jaxprs.has_replica_number(e) or _is_slow(e)  # noqa: E731
    pairs = zip(closed.eqns, shown.eqns, strict=True)
    return closed.replace(eqns=[expanded if must_see(expanded) else equation for equation, expanded in pairs])


class _Device(NamedTuple):
    """A device's replicas."""

    mesh: ReplicaMesh
    numbers: jax.Array
    varying: Set[Var]  # the step's variables, and those of the jaxprs inside, whose values may differ by replica: see `Findings`


def _free_of_mesh(constant: Any) -> Any:
    """Return an array that a call inside closes over as one of its devices has it: JAX does not mix arrays of two meshes."""
    if isinstance(constant, jax.core.Tracer) or not isinstance(constant, jax.Array) or not constant.is_fully_replicated:
        return constant
    return constant.addressable_data(0)


class _Course:
    """A program run for all replicas of a device; per-replica values have a leading axis for the replicas."""

    def __init__(self, device: _Device, jaxpr: Jaxpr, constants: Sequence[Any], arrays: Any, is_own: Sequence[bool]) -> None:
        """Prepare to run; `is_own` tells which arrays are per-replica values."""
        self.device, (self.mesh, self.numbers, varying) = device, device
        values = [Value(variable.aval, is_own=flag) for variable, flag in zip(jaxpr.invars, is_own, strict=True)]
        self.is_whole = self.mesh.one_by_one or _has_references(jaxpr)
        self.plan = Agenda(jaxpr, constants, values, varying, self.splits)
        self.known: dict[Value, Any] = dict(zip(values, arrays, strict=True))
        self.totals: dict[Value, Any] = {}  # sums over the device's replicas

    def run(self, ends: Sequence[bool]) -> list[Any]:
        """Return the outputs; `ends` tells which are per-replica values."""
        for nodes in stages_of(self.plan.nodes):
            for node in nodes:
                if node.is_collective:
                    self.keep(node, self.meet(node))
            for node in nodes:
                if not node.is_own and not node.is_collective:
                    self.keep(node, tracing.bind(node.equation, list(map(self.read, node.inputs))))
            self.run_own([node for node in nodes if node.is_own])
        return [self.as_kind(value, end) for value, end in zip(self.plan.outputs, ends, strict=True)]

    def read(self, value: Value) -> Any:
        return self.known[value] if value in self.known else _free_of_mesh(value.content)

    def as_kind(self, value: Value, end: bool) -> Any:
        """Return a value's array, with a row for each replica if `end`; else one row, because the proof found all rows equal."""
        array = self.read(value)
        if value.is_own == end:
            return array
        return self.spread(array) if end else array[0]

    def keep(self, node: Node, arrays: Sequence[Any]) -> None:
        self.known.update(zip(node.outputs, arrays, strict=True))

    def keep_totals(self, values: Iterable[Value], pairs: Iterable[tuple[Any, Any]]) -> None:
        """Keep the sums of values. Each pair has a value's array, and the value's sum or None."""
        self.totals.update({value: total for value, (_, total) in zip(values, pairs, strict=True) if total is not None})

    def run_own(self, nodes: Sequence[Node]) -> None:
        at_once = lambda node: (node.by_rows and not self.is_whole) or self.splits(node.equation)  # noqa: E731
        how = lambda node: (self.is_alone(node.equation), at_once(node))  # noqa: E731
        for (one_by_one, is_at_once), group in itertools.groupby(nodes, how):
            if is_at_once:
                for node in group:
                    self.keep(node, self.run_at_once(node))
            else:
                self._run_group(list(group), one_by_one)

    def run_at_once(self, node: Node) -> list[Any]:
        """Run a node once for all replicas: a scan taken apart, a barrier, or an elementwise operation on all rows."""
        loop = jaxprs.loop_of(node.equation)
        if loop.parts:
            return self.run_loop(node, loop)
        if not node.by_rows:
            return tracing.bind(node.equation, list(map(self.read, node.inputs)))
        operands = [merge(self.as_kind(value, True), 0) if value.aval.shape else self.read(value) for value in node.inputs]
        [rows] = tracing.bind(node.equation, operands)
        return [rows.reshape(self.mesh.per_device, *node.outputs[0].aval.shape)]

    def is_alone(self, equation: Equation) -> bool:
        """Tell whether to run an equation for one replica after the other: run for all at once, it would do something else."""
        return self.is_whole or _is_slow(equation) or tracing.have_mesh(jaxprs.inside(equation))

    def splits(self, equation: Equation) -> bool:
        """Tell whether to take a scan, a `jax.checkpoint` or a barrier apart, so that sums over the replicas sink into it."""
        is_apart = jaxprs.is_scan(equation) or equation.primitive.name in primitives.AGAIN | primitives.ONE_TO_ONE
        return is_apart and not self.is_alone(equation)

    def _run_group(self, nodes: list[Node], one_by_one: bool) -> None:
        made = [value for node in nodes for value in node.outputs]
        taken = list(dict.fromkeys(value for node in nodes for value in node.inputs if value.is_own and value in self.known))
        rows = [self.known[value] for value in taken]

        def run_one(outputs: Sequence[Value], number: Any, rows: Sequence[Any]) -> list[Any]:
            known, replica = dict(zip(taken, rows, strict=True)), _OneReplica(number)
            for node in nodes:
                operands = [known[value] if value in known else self.read(value) for value in node.inputs]
                known.update(zip(node.outputs, replica.equation(node.equation, operands), strict=True))
            return [known[value] for value in outputs]

        if not one_by_one:
            with contextlib.suppress(NotImplementedError):  # JAX's word for what it cannot batch
                stacks = jax.vmap(functools.partial(run_one, made))(self.numbers, rows)
                self.known.update(zip(made, stacks, strict=True))
                return
        added, leaving = self.plan.needed(nodes)
        if any(isinstance(value.aval, jax.ref.AbstractRef) for value in leaving):
            raise ContextError(
                "the step uses a jax.Ref before and after a collective. With several replicas on a device only arrays are "
                "carried across one: read the Ref into an array, ref[...], before it, and make a new one after it."
            )
        totals, stacks = self._scan(functools.partial(run_one, [*added, *leaving]), rows, len(added))
        self.totals.update(zip(added, totals, strict=True))
        self.known.update(zip(leaving, stacks, strict=True))

    def _scan(self, function: Callable[..., list[Any]], rows: list[Any], num_added: int) -> tuple[list[Any], list[Any]]:
        """Run a function on each replica, one after the other; add its first results up, and stack the others."""
        numbers = self.numbers
        first = jax.eval_shape(function, numbers[0], [row[0] for row in rows])[:num_added]

        def one_replica(totals: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
            results = function(*given)
            return [a + b for a, b in zip(totals, results, strict=False)], results[num_added:]

        return jax.lax.scan(one_replica, [jnp.zeros(a.shape, a.dtype) for a in first], (numbers, rows))

    def meet(self, node: Node) -> list[Any]:
        if jaxprs.is_sum(node.equation):
            return self.add_up(node)
        loop = jaxprs.loop_of(node.equation)
        if loop.parts:
            return self.run_loop(node, loop)
        return self.exchange(node)

    def add_up(self, node: Node) -> list[Any]:
        totals = list(map(self.total, node.inputs))
        if len(self.mesh.devices) == 1:  # on CPU an all-reduce of one device is a copy
            return totals
        return jax.lax.psum(totals, self.mesh.axis)

    def total(self, value: Value, wide: bool = False) -> jax.Array:
        """Sum a value over the device's replicas; a `wide` sum has 32 bits or more."""
        dtype = wide_type(value) if wide else value.aval.dtype
        if value.is_own or value in self.totals:
            return sink_reductions.sum_over_replicas(value, self.read, self.totals, dtype)
        return jnp.asarray(self.read(value), dtype) * jnp.asarray(self.mesh.per_device, dtype)

    def exchange(self, node: Node) -> list[Any]:
        """Run a collective other than a sum on the values of all replicas, and keep the results for this device's replicas."""
        stacks = [self.as_kind(value, True) for value in node.inputs]
        every = [jax.lax.all_gather(stack, self.mesh.axis, tiled=True) for stack in stacks]
        try:
            results = jax.vmap(lambda *given: tracing.bind(node.equation, given), axis_name=REPLICA_AXIS)(*every)
        except (RuntimeError, ValueError) as error:
            raise ContextError(
                f"the collective `{node.equation.primitive.name}` cannot run with several replicas on a device: {error}. Write "
                "it with ctx.all_gather or ctx.all_reduce, or give each replica a device: leave num_replicas out."
            ) from error
        first, count = self.numbers[0], self.mesh.per_device
        of_device = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count)
        return [of_device(row) if value.is_own else row[0] for row, value in zip(results, node.outputs, strict=True)]

    def run_loop(self, node: Node, loop: jaxprs.Loop) -> list[Any]:
        """Run a loop, or a condition with collectives inside, for all replicas together: all take the same rounds or branch.

        A scan also carries and stacks the sums of per-replica values; JAX drops the sums that nobody uses.
        """
        ends = [value.is_own for value in node.outputs]
        is_own = [value.is_own and k not in loop.index for k, value in enumerate(node.inputs)]  # inside
        is_own[loop.carry.start : loop.carry.stop] = ends[: len(loop.carry)]  # a carry has the kind of its result
        operands = [self.as_kind(v, flag) for v, flag in zip(node.inputs, is_own, strict=True)]
        for k in loop.rows:
            operands[k] = _swap(operands[k], is_own[k])
        num_kept = len(ends) if loop.index else len(loop.carry)  # the others are stacked from rows
        added = [self.splits(node.equation) and end and is_of_floats(v) for v, end in zip(node.outputs, ends, strict=True)]
        sums = {k: self.total(node.inputs[k], wide=True) for k, is_added in zip(loop.carry, added, strict=False) if is_added}
        pairs = [operand if k in loop.index else (operand, sums.get(k)) for k, operand in enumerate(operands)]

        def body_of(part: jaxprs.Part) -> Callable[..., list[Any]]:
            flags = [is_own[k] for k in (*part.fixed, *loop.carry, *loop.rows)]

            def body(*pairs: tuple[Any, Any]) -> list[Any]:
                arrays = [array for array, _ in pairs]
                course = _Course(self.device, part.closed.jaxpr, part.closed.consts, arrays, flags)
                course.keep_totals(course.known, pairs)
                if part.decides:
                    return course.run([False])
                results = zip(course.run(ends), course.plan.outputs, added, strict=True)
                return [(array, course.total(value, wide=True) if is_added else None) for array, value, is_added in results]

            return body

        made = run_parts(node.equation, pairs, list(map(body_of, loop.parts)))
        self.keep_totals(node.outputs, made)
        results = [array for array, _ in made]
        results = [*results[:num_kept], *map(_swap, results[num_kept:], ends[num_kept:])]
        kinds = zip(results, node.outputs, ends, strict=True)
        return [self.spread(array) if value.is_own > end else array for array, value, end in kinds]

    def spread(self, array: jax.Array) -> jax.Array:
        """Repeat a shared array for each replica of the device."""
        return jnp.broadcast_to(array, (self.mesh.per_device, *jnp.shape(array)))


def _is_slow(equation: Equation) -> bool:
    return any(e.primitive.name in primitives.HOST_EFFECTS or _is_other_random(e) for e in (equation, *jaxprs.inside(equation)))


def _has_references(jaxpr: Jaxpr) -> bool:
    """Tell whether a program, or a function that it calls, has a `jax.Ref`; those inside a kernel or loop do not count."""
    atoms = [atom for equation in jaxpr.eqns for atom in (*equation.invars, *equation.outvars)]
    called = [inner for equation in jaxpr.eqns if (inner := jaxprs.callee(equation)) is not None]
    return any(isinstance(atom.aval, jax.ref.AbstractRef) for atom in atoms) or any(_has_references(c.jaxpr) for c in called)


def _is_other_random(equation: Equation) -> bool:
    """Tell whether an equation makes random numbers that change when many are made together: with `rbg` keys."""
    if equation.primitive.name in primitives.RANDOM:
        return "fry" not in str(equation.invars[0].aval)
    return equation.primitive.name in primitives.DEVICE_RANDOM


class _OneReplica(Evaluation):
    """A program on one replica's values, which knows the replica's number."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def enters(self, equation: Equation, values: list[Any]) -> bool:
        return jaxprs.has_replica_number(equation)

    def over_replicas(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        return [self.number]

    def plain(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        raise ContextError(
            f"the replica's number is asked for inside `{equation.primitive.name}`, which several replicas of one device cannot "
            "do. Ask before, or give each replica a device: leave num_replicas out."
        )


def _swap(array: Any, is_own: bool) -> Any:
    """Bring the rounds of a loop before its replicas, and back."""
    return jnp.swapaxes(array, 0, 1) if is_own else array


# -- the plan: which nodes there are, and in which stage


class Agenda(Reading):
    """The nodes of a step, or of a body in it, in their order, and its outputs.

    The results of one node are either all per-replica values or all shared. The exception is a node that is taken apart
    (`splits`): some of its results, such as a scan's counter, may be shared from the next stage on.

    Raises:
        ContextError: when several replicas of one device cannot run an operation.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[Any],
        inputs: Sequence[Value],
        varying: Set[Var],
        splits: Callable[[Equation], bool],
    ) -> None:
        super().__init__()
        self.varying, self.splits = varying, splits
        self.outputs = self.run(jaxpr, constants, inputs)

    def needed(self, nodes: Sequence[Node]) -> tuple[list[Value], list[Value]]:
        """Return two lists of the nodes' results: those that other nodes sum over the replicas, and those used otherwise."""
        group = set(nodes)
        others = [node for node in self.nodes if node not in group]
        added = {value for node in others if jaxprs.is_sum(node.equation) for value in node.inputs}
        used = {*self.outputs, *(value for node in others if not jaxprs.is_sum(node.equation) for value in node.inputs)}
        made = [value for node in nodes for value in node.outputs]
        return [value for value in made if value in added], [value for value in made if value in used]

    def call(self, equation: Equation, inner: ClosedJaxpr, values: list[Value]) -> Sequence[Value]:
        held = jaxprs.held_operands(equation)
        if held is None or not self.splits(equation):
            return super().call(equation, inner, values)
        behind = dict(enumerate(values))
        if held:
            kept = self.plain(tracing.barrier([values[k].aval for k in held]), [values[k] for k in held])
            for k, value in zip(held, kept, strict=True):
                behind[k], value.maker = value, None  # so that sums over the replicas do not sink through it
        return self.run_closed(inner, list(behind.values()))

    def plain(self, equation: Equation, values: list[Value]) -> list[Value]:
        outputs, node = super().plain(equation, values), self.nodes[-1]
        is_barrier = equation.primitive.name in primitives.ONE_TO_ONE  # the proof has not seen those made here
        varies = [v.is_own for v in values] if is_barrier else [variable in self.varying for variable in equation.outvars]
        node.stage = max((value.stage for value in values), default=0) + node.is_collective
        node.is_own = not node.is_collective and (any(varies) or not node.is_pure or any(value.is_own for value in values))
        is_apart = node.is_collective or (node.is_own and self.splits(equation))
        if not is_apart:  # all results are made together
            varies = [node.is_own] * len(outputs)
        for value, is_own in zip(outputs, varies, strict=True):
            value.is_own, value.stage = is_own, node.stage + (node.is_own and not is_own)
        node.by_rows = node.is_own and _follows_convolution(node)
        return outputs


def _follows_convolution(node: Node) -> bool:
    """Tell whether a node is elementwise behind a convolution: XLA fuses both if not even a reshape stands between them."""
    if node.equation.primitive.name not in primitives.ELEMENTWISE:
        return False
    makers, shape = [value.maker for value in node.inputs if value.maker is not None], node.outputs[0].aval.shape
    follows = any(maker.by_rows or maker.equation.primitive.name in primitives.CONVOLUTIONS for maker in makers)
    return follows and all(value.aval.shape == shape or not (value.is_own or value.aval.shape) for value in node.inputs)

"""Lifting: turn a function that reads and writes variables into a pure one.

The function is traced once: a variable becomes an operand of the program when it is first read. docs/design/lifting.md says how.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax import jaxprs, tracing, user_code
from .._models import libraries
from .._replicas import context, frames, named
from .._replicas.per_replica import PerReplica, require_whole, stack_of, uneven_shapes
from .._replicas.placement import checksum
from .._text import call_it, shown
from .._typing import PyTree, Shape, UserFunction
from .._variables.bindings import Bindings
from .._variables.spec import without_counters
from .._variables.storage import WeakVariables
from .._variables.variable import Variable, is_variable, spec_of
from . import mistakes
from .call import Call, refuse_ref
from .own_code import Sight

#: Settings that change a program's numbers and not its text.
_SETTINGS = ("jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class ResultPlan:
    """A plan to rebuild a function's result from the arrays that a compiled program returns."""

    treedef: Any  # variables, PerReplica values and static objects are leaves
    static: tuple[Callable[[], Any] | None, ...]  # for each leaf, what returns the object; None: an array
    shapes: tuple[tuple[Shape, ...] | None, ...]  # for each array, `shapes` of the PerReplica that it was in, or None
    stacked: tuple[bool, ...]  # for each array, whether it was in a PerReplica

    @functools.cached_property
    def rebuild(self) -> Callable[[Sequence[Any]], PyTree]:
        """The function that makes the result of these arrays."""
        return self._fill if any(leaf is not None for leaf in self.static) else self.treedef.unflatten

    def path_of(self, position: int) -> str:
        """Return where in the result an array stands, such as `['loss']`."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.treedef.unflatten(range(len(self.static))))
        path, _ = [leaf for leaf, static in zip(leaves, self.static, strict=True) if static is None][position]
        return jax.tree_util.keystr(path)

    def _fill(self, arrays: Sequence[Any]) -> PyTree:
        remaining = iter(arrays)
        return self.treedef.unflatten([next(remaining) if leaf is None else leaf() for leaf in self.static])


@dataclasses.dataclass(frozen=True)
class Lifted:
    """A pure function: `(written values, read-only values, arrays) -> (result arrays, new written values)`."""

    closed: jaxprs.ClosedJaxpr  # its constants are the arrays that the user's function closes over
    shown: jaxprs.ClosedJaxpr  # the same to look at, with the expansions of JAX's high-level primitives
    writes: WeakVariables
    write_lines: tuple[str, ...]  # the user's line of each written variable's last write
    reads: WeakVariables  # those that it only reads
    donated: tuple[int, ...]  # the positions of the arrays that the user's own `jax.jit` donates
    plan: ResultPlan

    def bare(self) -> Lifted:
        """Return the function with types in place of its constants: a program keeps only the constants on its devices."""
        bare = [jaxprs.ClosedJaxpr(c.jaxpr, [v.aval for v in c.jaxpr.constvars]) for c in (self.closed, self.shown)]
        return dataclasses.replace(self, closed=bare[0], shown=bare[1])

    @property
    def written(self) -> tuple[Variable, ...]:
        return self.writes.alive()

    @property
    def read_only(self) -> tuple[Variable, ...]:
        return self.reads.alive()

    @property
    def num_results(self) -> int:
        return len(self.plan.stacked)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables, in the order of the pure function's first arguments."""
        return (*self.written, *self.read_only)

    def describe(self) -> str:
        """Write the program as text: two workers may run it together if their texts are equal.

        Addresses of objects and lines of files may differ, and are left out. Variables have the number of their creation, because
        two may have the same name, shape and dtype.
        """
        specs = map(spec_of, self.variables)
        ways = {True: "on read", False: "mirrored"}
        kinds = [
            f"{s.number} {without_counters(s.name)}: {ways[s.is_on_read]} {s.dtype}{list(s.shape)} {s.division or ''}"
            for s in specs
        ]
        settings = ", ".join(f"{name}={getattr(jax.config, name)}" for name in _SETTINGS)
        known = [array for array in jaxprs.inner_constants(self.shown.jaxpr) if not isinstance(array, jax.core.Tracer)]
        arrays = [a for a in known if isinstance(a, np.ndarray) or a.is_fully_addressable or a.is_fully_replicated]
        sums = {key: checksum(array) for key, array in {id(array): array for array in arrays}.items()}  # once for each array
        inner = [sums[id(array)] for array in arrays]
        return (
            f"writes variables {kinds[: len(self.written)]}\nreads variables {kinds[len(self.written) :]}\nsettings {settings}\n"
            f"checksums of arrays that inner functions close over {inner}\n{_ADDRESS.sub('', str(self.shown.jaxpr))}"
        )


class Traced(NamedTuple):
    """A function that was traced once."""

    closed: jaxprs.ClosedJaxpr  # takes the arrays, asks for variables, and gives the results and the values that were written
    operands: dict[Variable, int]  # the variables that were read -> the numbers of their operands
    written: dict[Variable, str]  # the variables that were written -> the user's lines of their last writes
    plan: ResultPlan
    frame: frames.Frame

    def lifted(self, among: Sequence[Traced] = ()) -> Lifted:
        """Turn the variables that the traces `among` (default: this one) touch into arguments, their new values into results."""
        traces = among or (self,)
        written = dict.fromkeys(variable for traced in traces for variable in traced.written)
        read_only = dict.fromkeys(variable for traced in traces for variable in traced.operands if variable not in written)
        jaxpr, num_results = self.closed.jaxpr, len(self.closed.jaxpr.outvars) - len(self.written)
        asked = {e.params["number"]: e.outvars[0] for e in jaxpr.eqns if e.primitive is tracing.operand_p}
        touched = (*written, *read_only)
        first = [asked.get(self.operands.get(variable)) or jaxprs.Var(_aval(variable, self.frame)) for variable in touched]
        new = dict(zip(self.written, jaxpr.outvars[num_results:], strict=True))
        kept = [new.get(variable, value) for variable, value in zip(written, first, strict=False)]
        jaxpr = jaxpr.replace(
            invars=[*first, *jaxpr.invars],
            eqns=[equation for equation in jaxpr.eqns if equation.primitive is not tracing.operand_p],
            outvars=[*jaxpr.outvars[:num_results], *kept],
        )
        closed = jaxprs.ClosedJaxpr(jaxpr, self.closed.consts)
        lines = tuple(self.written.get(variable, "<unknown>") for variable in written)
        shown = tracing.lowered(closed, self.frame.axis)
        writes, reads = WeakVariables(tuple(written)), WeakVariables(tuple(read_only))
        return Lifted(closed, shown, writes, lines, reads, jaxprs.donated_inputs(self.closed.jaxpr), self.plan)


def _aval(variable: Variable, frame: frames.Frame) -> jax.core.ShapedArray:
    """Return the type of a variable's operand: of one replica's value in a step, else of the whole stored array."""
    spec = spec_of(variable)
    shape = spec.traced_shape if frame.replica is None else spec.shape
    return jax.core.ShapedArray(shape, spec.dtype)


def trace(call: Call, shapes: Sequence[Shape], frame: frames.Frame) -> Traced:
    """Trace a call's function with arrays of these shapes: one replica's for a step, PerReplica values for an `mr.function`."""
    frames.require_no_mesh_around()
    leaves, in_step = call.array_leaves(), frame.replica is not None
    avals = [leaf.aval(shape) for leaf, shape in zip(leaves, shapes, strict=True)]

    def traced() -> Traced:
        seen: dict[str, Any] = {}

        def record(arguments: Sequence[jax.Array]) -> list[jax.Array]:
            outermost, values = tracing.current_trace(), dict[Variable, jax.Array]()
            given: Sequence[Any] = arguments
            if not in_step:
                pairs = zip(leaves, arguments, strict=True)
                given = [PerReplica(array, leaf.shapes) if leaf.is_per_replica else array for leaf, array in pairs]

            def ask_for(variable: Variable) -> jax.Array:
                if variable not in values:
                    values[variable] = tracing.new_operand(outermost, len(values), _aval(variable, frame))
                return values[variable]

            with tracing.separate_caches() as renew:
                bindings = Bindings({}, ask_for, renew)
                with frames.entered(dataclasses.replace(frame, bindings=bindings)):
                    seen["plan"], results = plan_result(call.apply(given))
            seen["operands"] = {variable: number for number, variable in enumerate(values)}
            seen["written"] = bindings.written
            return [*results, *bindings.values(tuple(bindings.written))]

        closed = tracing.trace(record, (avals,), frame.axis, call.function)
        return Traced(closed, **seen, frame=frame)

    try:
        found: Traced = libraries.traced(traced, frame.mesh)
        for constant in found.closed.consts:
            refuse_ref(constant, f"{call.name} closes over")
        return found
    except Exception as error:
        mistakes.explain(error, call, in_step and context.knows_id(frame.replica))
        raise


def plan_result(result: PyTree) -> tuple[ResultPlan, list[jax.Array]]:
    """Separate a result tree into the arrays that a program computes and everything else."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=lambda leaf: isinstance(leaf, PerReplica | Variable))
    static: list[Callable[[], Any] | None] = []
    arrays: list[jax.Array] = []
    shapes: list[tuple[Shape, ...] | None] = []
    stacked: list[bool] = []
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            require_whole(leaf, lambda: "the function returned")
            value, leaf_shapes = stack_of(leaf), uneven_shapes(leaf)
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
            value, leaf_shapes = leaf, None
        else:
            refuse_ref(leaf, "the step returned")
            _refuse_hidden_arrays(leaf)
            if isinstance(leaf, Variable):  # a program does not keep a variable alive
                static.append(weakref.ref(leaf))
            else:
                static.append(lambda leaf=leaf: leaf)
            continue
        static.append(None)
        arrays.append(jax.numpy.asarray(value))
        shapes.append(leaf_shapes)
        stacked.append(isinstance(leaf, PerReplica))
    return ResultPlan(treedef, tuple(static), tuple(shapes), tuple(stacked)), arrays


def _refuse_hidden_arrays(leaf: Any) -> None:
    """Refuse an object in which JAX cannot look, but which holds traced arrays: these must not leave the step."""
    kind = type(leaf).__name__
    if inspect.isgenerator(leaf) or inspect.iscoroutine(leaf):
        raise TypeError(f"the step returned a {kind}: it contains `yield` or `await`, so calling it runs nothing. Use `return`.")
    for name, value in _fields_of(leaf):
        parts = jax.tree.leaves(value, is_leaf=is_variable)
        if isinstance(leaf, types.FunctionType) and any(map(is_variable, parts)):
            raise TypeError(f"the step returned {shown(leaf)}, which computes with variables.{call_it(leaf)}")
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            raise TypeError(
                f"the step returned a {kind}, whose field {name!r} holds an array, but JAX does not know how to look "
                f"into a {kind}. Register it with @jax.tree_util.register_dataclass above the class, or return a "
                "dict, tuple or namedtuple."
            )


def _fields_of(leaf: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield what an object that is no pytree holds: attributes, slots, bound arguments, closed-over values."""
    if isinstance(leaf, Variable | type | types.ModuleType) or depth == 0:
        return
    fields = dict(getattr(leaf, "__dict__", {}))
    fields |= {name: getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ()) if isinstance(name, str)}
    if isinstance(leaf, functools.partial):
        fields |= {"args": leaf.args, "keywords": leaf.keywords}
    if isinstance(leaf, types.FunctionType):
        fields |= inspect.getclosurevars(leaf).nonlocals
    for name, value in fields.items():
        yield name, value
        if jax.tree_util.all_leaves([value]) and not isinstance(value, jax.Array | np.ndarray):
            yield from _fields_of(value, depth - 1)


def warn_of_leaks(function: UserFunction, sight: Sight) -> None:
    """Warn if a step has left a traced array at the end of a list, dict or tuple that it names, or in an attribute."""
    for name, value in {**sight.named, "self": getattr(function, "__self__", None)}.items():
        parts = {name: value}
        if type(value).__dictoffset__ and " " not in name:  # it has attributes, and the name is one that the code has
            parts |= {f"{name}.{key}": part for key, part in vars(value).items() if isinstance(part, jax.core.Tracer)}
        for place in (place for place, part in parts.items() if _ends_with_traced(part)):
            user_code.warn(
                f"the step has put an array into `{place}`. It is traced once and then run, so what it puts there has no value. "
                f"Return the array: x = strategy.run(step), and put x into `{place}` outside."
            )


def _ends_with_traced(value: Any) -> bool:
    while isinstance(value, dict | list | tuple) and value:
        parts = value.values() if isinstance(value, dict) else value
        value = next(reversed(parts))
    return isinstance(value, jax.core.Tracer)


def trace_step(call: Call, shapes: Sequence[Shape], frame: frames.Frame) -> Traced:
    """Trace a step for replicas on which its array arguments have these shapes."""
    with named.seen():
        return trace(call, shapes, frame)

"""The tracers that stand for variables while a function is traced, and what is written to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from .._errors import ContextError
from .._jax import tracing, user_code
from .._replicas import frames
from .._replicas.frames import Frame
from .access import lent
from .variable import Variable

#: Reads a variable that is not bound, in the enclosing place.
Fallback = Callable[[Variable], jax.Array]

ResultT = TypeVar("ResultT")


class Bindings:
    """The values that stand for variables while a function is traced; `fallback` reads other variables.

    Args:
        renew: starts a new set of JAX's inner caches, see `tracing.separate_caches`. None: JAX's caches are
            shared with other code, so a variable may not be read inside an inner jit or scan.

    Attributes:
        written: the variables that were written, in order, each with the user's line of its last write.
    """

    def __init__(self, values: Mapping[Variable, jax.Array], fallback: Fallback, renew: Callable[[], None] | None) -> None:
        self._values = dict(values)
        self._fallback = fallback
        self._trace_state = tracing.trace_state()
        self._was_read_deeper = False
        self._renew = renew
        self.written: dict[Variable, str] = {}

    def read(self, variable: Variable) -> jax.Array:
        if not self._was_read_deeper and tracing.trace_state() != self._trace_state:
            if self._renew is None and tracing.is_staging():
                raise ReadInsideJit
            self._was_read_deeper = self._renew is not None
        return self.value_of(variable)

    def value_of(self, variable: Variable) -> jax.Array:
        """Return a variable's present value to inner bindings, which check the read themselves."""
        if (value := self._values.get(variable)) is None:
            return self._fallback(variable)
        return value

    def write(self, variable: Variable, value: jax.Array) -> None:
        if tracing.trace_state() != self._trace_state:
            raise ContextError(frames.foreign_trace_message("written", variable.name, frames.current()))
        self._values[variable] = value
        self.written[variable] = user_code.user_line()
        if self._was_read_deeper and self._renew is not None:
            self._renew()
            self._was_read_deeper = False

    @property
    def caches(self) -> Callable[[], Any]:
        """The caches for bindings on top of these, see `with_few_compilations`."""
        return contextlib.nullcontext if self._renew is None else tracing.separate_caches

    def values(self, variables: Sequence[Variable]) -> list[jax.Array]:
        """Return the present values of some variables."""
        return [self.read(variable) for variable in variables]


class ReadInsideJit(BaseException):
    """Code was traced with JAX's shared caches, and must be traced again with separate ones. Users never see it."""


def with_few_compilations(compute: Callable[[Callable[[], Any]], ResultT]) -> ResultT:
    """Call `compute(caches)` outside a trace: with JAX's shared caches first, which save compilations."""
    try:
        return compute(contextlib.nullcontext)
    except ReadInsideJit:  # a variable was read inside an inner jit or scan: now JAX compiles every operation again
        return compute(tracing.separate_caches)


@contextlib.contextmanager
def bound(
    values: Mapping[Variable, jax.Array], outer: Fallback | None = None, caches: Callable[[], Any] | None = None
) -> Iterator[Bindings]:
    """Bind variables on top of the bindings of this place: for a loop's body, or a differentiated function.

    Args:
        outer: reads other variables: `outer_reader()` of the place where the loop was called. Default: of this place.
        caches: see `with_few_compilations`. Default: those of this place.
    """
    frame = frames.current() or Frame(None, None)
    if caches is None:
        caches = tracing.separate_caches if frame.bindings is None else frame.bindings.caches
    with caches() as renew:
        bindings = Bindings(values, outer or outer_reader(), renew)
        with frames.entered(dataclasses.replace(frame, bindings=bindings)):
            yield bindings


def outer_reader() -> Fallback:
    """Return a reader of variables in the current place; outside a step it refuses to bake a value into a foreign trace."""
    frame = frames.current()
    if frame is not None and frame.bindings is not None:
        return frame.bindings.value_of
    is_foreign = tracing.is_staging()

    def stored(variable: Variable) -> jax.Array:
        if is_foreign:
            raise ContextError(frames.foreign_trace_message("read", variable.name, None))
        with lent([variable]) as [array]:
            if (value := variable._joined(array)) is array:
                variable._slot.note_held()
            return value

    return stored

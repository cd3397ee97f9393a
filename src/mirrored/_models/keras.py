"""Keras with a strategy: Keras' variables are views on ours, and its layers and optimizers know about replicas.

We never import Keras; we use it if the program has imported it. docs/design/models.md says how the parts fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from .._errors import ContextError
from .._jax import user_code
from .._replicas.mesh import ReplicaMesh, default_mesh
from . import keras_parts
from .keras_variables import UndiscoveredError, adopt, ours_of, scope_mesh
from .replaced import in_place

if TYPE_CHECKING:
    import keras

#: A function that meets new variables in so many traces makes them itself, which is an error.
MAX_TRACES = 8


@contextlib.contextmanager
def in_scope() -> Iterator[None]:
    """Inside this block, a strategy's scope, let Keras make variables and models that belong to the strategy."""
    was_there = keras_parts.imported_keras() is not None
    with in_place():
        yield
    if not was_there and keras_parts.imported_keras() is not None:
        user_code.warn(
            "keras was imported inside a strategy's scope, so the strategy does not know the models that were made there: steps "
            "take their variables over when they use them, but model.fit would train them on one device. Import keras before "
            "`with strategy.scope():`."
        )


def traced_until_found(trace: Callable[[], Any], mesh: ReplicaMesh | None) -> Any:
    """Trace a function. While the trace meets Keras variables that are not ours, adopt them and trace again."""
    keras = keras_parts.imported_keras()
    if keras is None:
        return trace()
    new = ""
    for _ in range(MAX_TRACES):
        with adopting_variables(keras, mesh, is_discovery=True) as found:
            result = trace()
        if not found:
            return result
        new = found[-1].path
    raise ContextError(
        f"each time the step is called it makes new Keras variables, such as {new!r}, whose values would be lost. "
        "Make layers, models, metrics and optimizers before the step, in `with strategy.scope():`."
    )


def build_by(call: Callable[[], Any]) -> None:
    """Call a function that has no variables yet; if it makes some, like a model's first call, start the whole trace again.

    Outside a trace that can be repeated, the function is not called.
    """
    keras = keras_parts.imported_keras()
    scope = None if keras is None else keras_parts.innermost_scope(keras)
    if isinstance(scope, VariableScope):
        call()
        if scope.strangers:
            raise UndiscoveredError(list(scope.strangers.values()), scope_mesh())


def refusing_new_variables(mesh: ReplicaMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Let a function be traced, or run, inside this block; it must not meet new Keras variables."""
    keras = keras_parts.imported_keras()
    return contextlib.nullcontext() if keras is None else adopting_variables(keras, mesh, is_discovery=False)


# -- the variables that a trace touches


class VariableScope:
    """The scope in which a function that uses Keras is traced: Keras asks it for the values of variables.

    It reads and writes variables of ours as always, and notes all others, even those made in the scope, which Keras
    initializes at its end.
    """

    def __init__(self) -> None:
        super().__init__(collect_losses=True)  # type: ignore[call-arg]
        self.strangers: dict[int, Any] = {}  # variables that are not ours yet, by `id`

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the value that Keras reads from a variable."""
        if ours_of(variable) is not None:
            return variable._value
        self.strangers[id(variable)] = variable
        value = super().get_current_value(variable)  # type: ignore[misc]
        return jnp.zeros(variable.shape, keras_parts.dtype_of(variable)) if value is None else value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Take the value that Keras writes to a variable."""
        variable, value = update
        if ours_of(variable) is not None:
            variable._value = value
        else:
            self.strangers[id(variable)] = variable
            super().add_update(update)  # type: ignore[misc]


@contextlib.contextmanager
def adopting_variables(keras: ModuleType, mesh: ReplicaMesh | None, is_discovery: bool) -> Iterator[list[Any]]:
    """Let a function be traced inside this block; afterwards the yielded list has the new Keras variables, now adopted.

    With `is_discovery` the trace can be repeated, and the variables will be on `mesh`; without it, there must be none. If a
    larger trace has to be repeated, raise UndiscoveredError.
    """
    found: list[Any] = []
    is_inner = isinstance(keras_parts.innermost_scope(keras), VariableScope)
    scope, met = keras_parts.subclass_of(keras.StatelessScope, VariableScope)(), mesh
    make: Callable[[], list[Any]] = list
    try:
        # Keras initializes new variables at the end of the outermost scope, when no trace is running any more.
        with in_place(), scope:
            yield found
    except UndiscoveredError as error:
        scope.strangers |= {id(variable): variable for variable in error.variables}
        met, make = error.mesh or mesh, error.make
    found += scope.strangers.values()
    if is_inner and (found or make is not list):
        raise UndiscoveredError(found, met, make)
    found += make()
    if found and not is_discovery:
        raise ContextError(
            f"the Keras variable {found[0].path!r} was used when the function was traced, but not when its variables were "
            "discovered a moment before. A step must do the same every time it is traced: look for layers, metrics or "
            "optimizers that are made in it, and for code that depends on something outside that changes."
        )
    for variable in found:
        adopt(variable, met or default_mesh())

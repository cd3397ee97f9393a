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
from . import keras_fit, keras_layers, keras_parts, keras_variables
from .keras_variables import UndiscoveredError, adopt, ours_of, scope_mesh
from .library import Library

if TYPE_CHECKING:
    import keras

#: A function that meets new variables in so many traces makes them itself, which is an error.
MAX_TRACES = 8


@contextlib.contextmanager
def _in_scope() -> Iterator[None]:
    """Warn if Keras is imported inside this block, a strategy's scope."""
    was_there = keras_parts.imported_keras() is not None
    yield
    if not was_there and keras_parts.imported_keras() is not None:
        user_code.warn(
            "keras was imported inside a strategy's scope, so the strategy does not know the models that were made there: steps "
            "take their variables over when they use them, but model.fit would train them on one device. Import keras before "
            "`with strategy.scope():`."
        )


def _replaced() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    keras = keras_parts.imported_keras()
    if keras is None:
        return
    user_code.leave_out(keras)
    yield keras.Variable, "__init__", keras_variables.init_variable
    if keras.config.backend() != "jax":
        return
    yield keras.layers.BatchNormalization, keras_parts.MOMENTS, keras_layers.moments
    yield keras.random.SeedGenerator, "next", keras_layers.next_seed
    yield keras.optimizers.Optimizer, "apply", keras_layers.apply
    yield keras.optimizers.LossScaleOptimizer, "apply", keras_layers.apply
    yield keras.Model, "__init__", keras_fit.init_model
    for name, method in keras_fit.METHODS.items():
        yield keras.Model, name, method


def _traced(trace: Callable[[], Any], mesh: ReplicaMesh | None, may_repeat: bool) -> Any:
    """Trace a function. While the trace meets Keras variables that are not ours, adopt them and trace again."""
    keras, new = keras_parts.imported_keras(), ""
    if keras is None:
        return trace()
    for _ in range(MAX_TRACES):
        result, found = _trace_once(keras, trace, mesh, may_repeat)
        if not found:
            return result
        new = found[-1].path
    raise ContextError(
        f"each time the step is called it makes new Keras variables, such as {new!r}, whose values would be lost. "
        "Make layers, models, metrics and optimizers before the step, in `with strategy.scope():`."
    )


def _trace_once(keras: ModuleType, trace: Callable[[], Any], mesh: ReplicaMesh | None, may_repeat: bool) -> tuple[Any, list[Any]]:
    """Trace a function; return the result, and the new Keras variables that it has met, now adopted.

    If the trace may be repeated, the variables will be on `mesh`; else there must be none. If a larger trace has to be
    repeated, raise UndiscoveredError.
    """
    is_inner = isinstance(keras_parts.innermost_scope(keras), VariableScope)
    scope, result = keras_parts.subclass_of(keras.StatelessScope, VariableScope)(), None
    make: Callable[[], list[Any]] = list
    try:
        # Keras initializes new variables at the end of the outermost scope, when no trace is running any more.
        with scope:
            result = trace()
    except UndiscoveredError as error:
        scope.strangers |= {id(variable): variable for variable in error.variables}
        mesh, make = error.mesh or mesh, error.make
    found = list(scope.strangers.values())
    if is_inner and (found or make is not list):
        raise UndiscoveredError(found, mesh, make)
    found += make()
    if found and not may_repeat:
        raise ContextError(
            f"the Keras variable {found[0].path!r} was used when the function was traced, but not when its variables were "
            "discovered a moment before. A step must do the same every time it is traced: look for layers, metrics or "
            "optimizers that are made in it, and for code that depends on something outside that changes."
        )
    for variable in found:
        adopt(variable, mesh or default_mesh())
    return result, found


def _build_by(call: Callable[[], Any]) -> None:
    """In a trace that can be repeated, call a function without variables; if it makes some, start the whole trace again."""
    keras = keras_parts.imported_keras()
    scope = None if keras is None else keras_parts.innermost_scope(keras)
    if isinstance(scope, VariableScope):
        call()
        if scope.strangers:
            raise UndiscoveredError(list(scope.strangers.values()), scope_mesh())


# -- the variables that a trace touches


class VariableScope:
    """The scope in which a function that uses Keras is traced: Keras asks it for the values of variables.

    It reads and writes our variables as usual, and records all others, also those made in the scope, which Keras initializes
    when the scope ends.
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


KERAS = Library(
    package="keras",
    name="Keras",
    before="with strategy.scope(): model, optimizer = ..., ...",
    inside="mr.value_and_grad(loss, model.trainable_variables), and optimizer.apply_gradients of Keras",
    unbuilt=" A Keras model has none before it is built: model.build(input_shape).",
    scope=_in_scope,
    replaced=_replaced,
    traced=_traced,
    build=_build_by,
    is_stranger=keras_variables.is_stranger,
    own_variable=keras_variables.own_variable,
    tree_of=keras_variables.tree_of,
    describe=keras_fit.describe,
    explain=keras_variables.explain,
)

"""Keras with a strategy: its variables are ours, its layers and optimizers know about replicas.

Keras is found when the program has imported it; we never import it. docs/design/models.md says how the parts fit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .._errors import ContextError
from .._jax import user_code
from .._replicas.mesh import ReplicaMesh
from . import keras_fit, keras_layers, keras_parts
from .keras_scope import VariableScope, search
from .keras_variables import UndiscoveredError, claim, scope_mesh

#: A function that is traced so often, and meets new variables each time, makes them itself.
MAX_TRACES = 8


def prepare() -> ModuleType | None:
    """Let Keras know about strategies, when the program has imported it; return it then."""
    keras = keras_parts.loaded()
    if keras is not None:
        _prepare(keras)
    return keras


def _replaced(keras: ModuleType) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield what is replaced in Keras: the class, the name of its method, and ours, which is given the old one first.

    Each does what the old one does for a model or variable of no strategy, and, but for those of `fit`, outside of steps.
    """
    yield keras.Variable, "__init__", _init_variable
    if keras.config.backend() != "jax":
        return
    yield keras.layers.BatchNormalization, keras_parts.MOMENTS, keras_layers.moments
    yield keras.random.SeedGenerator, "next", keras_layers.next_seed
    yield keras.optimizers.Optimizer, "apply", keras_layers.apply
    yield keras.optimizers.LossScaleOptimizer, "apply", keras_layers.apply_scaled
    yield keras.Model, "__init__", keras_fit.init_model
    yield keras.Model, "make_train_function", keras_fit.make_function
    yield keras.Model, "make_test_function", keras_fit.make_function
    yield keras.Model, "make_predict_function", keras_fit.make_function
    yield keras.Model, keras_parts.BUILD, keras_fit.build_quietly
    yield keras.Model, "fit", keras_fit.with_dataset
    yield keras.Model, "evaluate", keras_fit.with_dataset
    yield keras.Model, "predict", keras_fit.with_dataset


@functools.cache
def _prepare(keras: ModuleType) -> None:
    user_code.leave_out(keras)
    for owner, name, method in _replaced(keras):
        keras_layers.replace(owner, name, method)


@contextlib.contextmanager
def in_scope() -> Iterator[None]:
    """Let what Keras makes inside this block, a strategy's scope, be the strategy's."""
    keras = prepare()
    yield
    if keras is None and prepare() is not None:
        user_code.warn(
            "keras was imported inside a strategy's scope, so the strategy does not know the models that were made there: steps "
            "take their variables over when they use them, but model.fit would train them on one device. Import keras before "
            "`with strategy.scope():`."
        )


def _init_variable(old: Callable[..., None], variable: Any, *args: Any, **kwargs: Any) -> None:
    """Make a variable; in a strategy's scope one of the strategy."""
    if (mesh := scope_mesh()) is not None:
        claim(variable, mesh)
    old(variable, *args, **kwargs)


def traced_until_found(trace: Callable[[], Any], mesh: ReplicaMesh | None) -> Any:
    """Call what traces a function, again while that meets Keras variables that are not ours; these are adopted in between."""
    keras = prepare()
    if keras is None:
        return trace()
    new = ""
    for _ in range(MAX_TRACES):
        with search(keras, mesh, is_discovery=True) as found:
            result = trace()
        if not found:
            return result
        new = found[-1].path
    raise ContextError(
        f"each time the step is called it makes new Keras variables, such as {new!r}, whose values would be lost. "
        "Make layers, models, metrics and optimizers before the step, in `with strategy.scope():`."
    )


def build_by(call: Callable[[], Any]) -> None:
    """Call a function that was given no variables: when it makes some, as a model that is called first, all is traced again.

    Outside of a trace that can be repeated it is not called.
    """
    keras = keras_parts.loaded()
    scope = None if keras is None else keras_parts.innermost_scope(keras)
    if isinstance(scope, VariableScope):
        call()
        if scope.strangers:
            raise UndiscoveredError(list(scope.strangers.values()), scope_mesh())


def tracing(mesh: ReplicaMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Trace, or run, a function inside this block that meets no Keras variables but those that were found before."""
    keras = keras_parts.loaded()
    return contextlib.nullcontext() if keras is None else search(keras, mesh, is_discovery=False)

"""Keras with a strategy: its variables are ours, its layers and optimizers know about replicas.

Keras is found when the program has imported it; we never import it. docs/design/models.md says how the parts fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .._errors import ContextError
from .._jax import user_code
from .._replicas.mesh import ReplicaMesh
from . import keras_parts
from .keras_scope import VariableScope, search
from .keras_variables import UndiscoveredError, scope_mesh
from .replaced import in_place

#: A function that is traced so often, and meets new variables each time, makes them itself.
MAX_TRACES = 8


@contextlib.contextmanager
def in_scope() -> Iterator[None]:
    """Let what Keras makes inside this block, a strategy's scope, be the strategy's."""
    was_there = keras_parts.loaded() is not None
    with in_place():
        yield
    if not was_there and keras_parts.loaded() is not None:
        user_code.warn(
            "keras was imported inside a strategy's scope, so the strategy does not know the models that were made there: steps "
            "take their variables over when they use them, but model.fit would train them on one device. Import keras before "
            "`with strategy.scope():`."
        )


def traced_until_found(trace: Callable[[], Any], mesh: ReplicaMesh | None) -> Any:
    """Call what traces a function, again while that meets Keras variables that are not ours; these are adopted in between."""
    keras = keras_parts.loaded()
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

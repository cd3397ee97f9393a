"""Which Keras variables a function touches while it is traced, and those that it makes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from .._errors import ContextError
from .._replicas.mesh import ReplicaMesh, default_mesh
from . import keras_parts
from .keras_variables import UndiscoveredError, adopt, ours_of
from .replaced import in_place

if TYPE_CHECKING:
    import keras


class VariableScope:
    """The scope in which a function that uses Keras is traced: Keras asks it for the values of variables.

    Variables of ours are read and written as always. Others are noted, and so are those that are made here: Keras
    initializes none before the end of the scope.
    """

    def __init__(self) -> None:
        super().__init__(collect_losses=True)  # type: ignore[call-arg]
        self.strangers: dict[int, Any] = {}  # the variables that are not ours yet, by `id`

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return what Keras reads."""
        if ours_of(variable) is not None:
            return variable._value
        self.strangers[id(variable)] = variable
        value = super().get_current_value(variable)  # type: ignore[misc]
        return jnp.zeros(variable.shape, keras_parts.dtype_of(variable)) if value is None else value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Take what Keras writes."""
        variable, value = update
        if ours_of(variable) is not None:
            variable._value = value
        else:
            self.strangers[id(variable)] = variable
            super().add_update(update)  # type: ignore[misc]


@functools.cache
def _scope_class(base: type) -> type:
    return type("VariableScope", (VariableScope, base), {})


@contextlib.contextmanager
def search(keras: ModuleType, mesh: ReplicaMesh | None, is_discovery: bool) -> Iterator[list[Any]]:
    """Trace a function inside this block; afterwards the list has the Keras variables that are ours now and were not before.

    Where the trace can be repeated, `is_discovery`, they will be on `mesh`; else none may be met. When a larger trace around
    this one has to be repeated, it raises UndiscoveredError.
    """
    found: list[Any] = []
    is_inner = isinstance(keras_parts.innermost_scope(keras), VariableScope)
    scope, met = _scope_class(keras.StatelessScope)(), mesh
    make: Callable[[], list[Any]] = list
    try:
        # At the end of `scope` Keras initializes what was made, now that nothing is traced, if there is no scope around it.
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

"""The table of what is replaced in Keras, Equinox and Linen, inside scopes and traces only."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import _process
from .._jax import user_code
from .._replicas.context import current_replica
from .._typing import REPLICA_AXIS
from . import equinox, keras_fit, keras_layers, keras_parts, keras_variables

if TYPE_CHECKING:
    import keras


def table() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield a class of an imported library, a method's name, and our method, which gets the old one as first argument.

    For models and variables without a strategy ours does what the old one does; outside steps too, except the methods of `fit`.
    """
    if (layers := sys.modules.get("equinox.nn")) is not None:
        yield layers.BatchNorm, "__call__", equinox.call_norm
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
    yield keras.Model, "__init__", _init_model
    for name, method in _OF_MODELS.items():
        yield keras.Model, name, method


def _init_model(old: Callable[..., None], model: keras.Model, *args: object, **kwargs: object) -> None:
    """Make a model; if it is made in a scope, it still belongs to the strategy after the scope."""
    if (mesh := keras_variables.scope_mesh()) is not None:
        _process.keras_models[model] = mesh
        _know(model)
    old(model, *args, **kwargs)


def _make_function(old: Callable[..., Any], model: keras.Model, force: bool = False) -> Callable[..., Any] | None:
    function = keras_fit.make_function(old, model, force)
    if model in _process.keras_models:  # it may have been made elsewhere; from now on it belongs to the strategy
        _know(model)
    return function


#: The methods of a strategy's model that take batches.
_OF_MODELS = {
    **dict.fromkeys(("make_train_function", "make_test_function", "make_predict_function"), _make_function),
    **dict.fromkeys(("fit", "evaluate", "predict"), keras_fit.with_dataset),
    keras_parts.BUILD: keras_fit.build_quietly,
}


def _know(model: keras.Model) -> None:
    """Give one model methods that put the table in place while they run, so that it trains outside the scope too."""
    for name in _OF_MODELS:
        own = functools.partial(_call_in_place, model, name)
        model.__dict__.setdefault(name, functools.update_wrapper(own, getattr(model, name)))


def _call_in_place(model: keras.Model, name: str, *args: object, **kwargs: object) -> Any:
    with in_place():
        return getattr(type(model), name)(model, *args, **kwargs)


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Put the table's methods in place during this block; several threads may be in such blocks at once."""
    with _process.replaced_lock:
        for owner, name, method in table():
            if (owner, name) not in _process.replaced:
                _process.replaced[owner, name] = _replace(owner, name, method)
        _process.num_replacing += 1
    try:
        yield
    finally:
        with _process.replaced_lock:
            _process.num_replacing -= 1
            if not _process.num_replacing:
                _undo()


@contextlib.contextmanager
def over_replicas() -> Iterator[None]:
    """Let a step be traced, or run, inside this block: its BatchNorm layers also normalize over the replicas."""
    linen = sys.modules.get("flax.linen")
    with in_place(), contextlib.nullcontext() if linen is None else linen.intercept_methods(_intercept):
        yield


def _intercept(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Any:
    """Call a method of a Linen module; for a BatchNorm without an axis name, call a clone with the replicas' axis name."""
    layer = context.module
    is_own = isinstance(layer, sys.modules["flax.linen"].BatchNorm) and layer.axis_name is None
    if is_own and context.method_name == "__call__" and current_replica() is not None:
        return layer.clone(parent=layer.scope, axis_name=REPLICA_AXIS)(*args, **kwargs)
    return method(*args, **kwargs)


def _replace(owner: type, name: str, method: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """Replace a method; return the new one, and the class's own old one, or None if the class inherits it."""
    old = getattr(owner, name)

    @functools.wraps(old)
    def new(self: object, *args: object, **kwargs: object) -> Any:
        return method(old, self, *args, **kwargs)

    own = vars(owner).get(name)
    setattr(owner, name, new)
    return new, own


def _undo() -> None:
    for (owner, name), (new, own) in list(_process.replaced.items()):
        if vars(owner).get(name) is not new:
            continue  # somebody has replaced ours and calls it: in place again, it would do its work twice
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        del _process.replaced[owner, name]

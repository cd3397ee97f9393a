"""Makes Keras variables views on variables of ours, so that all of Keras' own code works with them unchanged; names state."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import _process
from .._errors import ContextError
from .._jax import complaints, tracing, user_code
from .._jax.marks import Mark, Purpose, mark
from .._options import VariableAggregation
from .._replicas import frames
from .._replicas.mesh import ReplicaMesh, default_mesh
from .._variables.access import store
from .._variables.variable import Variable, spec_of
from . import keras_parts

if TYPE_CHECKING:
    import keras

#: A name with the counter that Keras gives it.
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
_OURS, _MESH = "_mirrored_variable", "_mirrored_mesh"
_FIT_OUTSIDE = (
    "a Keras model that was made outside of a strategy's scope, and that its steps have taken over, is fitted outside of it: "
    "each replica computes the whole batch, which is right and slow. Make the model in `with strategy.scope():`, or fit it there."
)
_NO_SUM = (
    "the variable {name!r} of a Keras metric is summed over the replicas when it is read, and the value assigned to it at "
    "{where} is no sum: it is not the old value and something that was added to it. A largest or last value, or a running mean, "
    "would be a sum of those of all replicas. Add to it: variable.assign_add(value). Or combine the replicas in update_state, "
    "and say so where the variable is made: self.add_variable(shape, initializer, aggregation='only_first_replica'), and for a "
    "largest value variable.assign(keras.ops.maximum(variable, jax.lax.pmax(value, 'replica')))."
)


class View:
    """The methods of a view: a Keras variable whose array is in an `mr.Variable`, made when the view gets its first value."""

    @property
    def _value(self) -> Any:
        ours = vars(self).get(_OURS)
        if ours is None:
            return None
        if keras_parts.is_shape_inference(sys.modules["keras"]):
            return jnp.zeros(ours.shape, ours.dtype)
        frame = frames.current()
        is_in_step = frame is not None and frame.bindings is not None
        # Outside steps, an eager scan or cond closes over the value, as in Keras.
        is_passing = not is_in_step and tracing.is_staging() and tracing.is_for_this_call()
        with tracing.untraced() if is_passing else contextlib.nullcontext():
            return _noted(Purpose.OLD, ours, ours.value)

    @_value.setter
    def _value(self, value: jax.Array | None) -> None:
        ours = vars(self).get(_OURS)
        if value is None:  # to be initialized later, or `fit` has taken the array and will set a new one
            if ours is not None and not _process.num_replacing:
                user_code.warn(_FIT_OUTSIDE)
            return
        if ours is None:
            vars(self)[_OURS] = _made(self, value)
        elif _process.is_library_update.get():
            if not spec_of(ours).is_on_read:
                value = mark(value, Mark(Purpose.ASSIGN, ours.name, user_code.user_line()))
            store(ours, value)
        else:
            ours.assign(_noted(Purpose.ADDED, ours, value))

    def _initialize_layout(self) -> None:
        """Leave the placement to the strategy, whatever `keras.distribution` says."""

    def _direct_assign(self, value: jax.Array | None) -> None:
        self._value = value

    def __reduce_ex__(self, protocol: object) -> Any:
        """Copy and pickle as an ordinary Keras variable with this value."""
        state = {name: content for name, content in vars(self).items() if name not in (_OURS, _MESH)}
        return object.__new__, (type(self).__base__,), state | {keras_parts.VALUE: self._value}


def _noted(purpose: Purpose, variable: Variable, value: jax.Array) -> jax.Array:
    """Mark reads and writes of a metric's variable, so that the proof can check that it is only ever added to."""
    frame, spec = frames.current(), spec_of(variable)
    if frame is None or frame.replica is None or not (spec.is_on_read and spec.aggregation is VariableAggregation.SUM):
        return value
    return mark(jnp.asarray(value), Mark(purpose, spec.name, user_code.user_line(), spec.number, _NO_SUM))


@functools.cache
def _view_class(kind: type) -> type:
    """Return a subclass of `kind` with the methods of View: Python lets an object change its class only to such a class."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {name: vars(View)[name] for name in (keras_parts.VALUE, "_initialize_layout", "_direct_assign", "__reduce_ex__")}
    return type(kind.__name__, (kind,), methods | names)


def _made(view: Any, value: jax.Array) -> Variable:
    """Make the variable behind a view from its first value."""
    how = "on_read" if view.synchronization == "on_read" else "auto"
    kind: Any = {"name": view.path, "trainable": view.trainable, "aggregation": view.aggregation, "synchronization": how}
    with frames.entered(frames.Frame(None, vars(view)[_MESH])):
        if how == "auto" or view.aggregation == "none":
            return Variable(value, **kind)
        # What a metric has counted so far is the sum over the replicas.
        return Variable(jnp.zeros_like(value), **kind).assign(value)


def is_keras_variable(value: object) -> bool:
    keras = keras_parts.imported_keras()
    return keras is not None and isinstance(value, keras.Variable)


def ours_of(variable: keras.Variable) -> Variable | None:
    """Return the variable behind a Keras variable; None if there is none, or it has no value yet."""
    return vars(variable).get(_OURS)


def init_variable(old: Callable[..., None], variable: keras.Variable, *args: object, **kwargs: object) -> None:
    """Initialize a Keras variable; in a strategy's scope, it belongs to the strategy."""
    if (mesh := scope_mesh()) is not None:
        claim(variable, mesh)
    old(variable, *args, **kwargs)


def claim(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Turn a Keras variable into a view whose array will be on these devices."""
    _require_support(variable)
    variable.__class__ = _view_class(type(variable))
    variable.__dict__[_MESH] = mesh


def adopt(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Turn a Keras variable into a view on a new variable with its value; a second call does nothing."""
    if _MESH in vars(variable):
        return
    kind, value = type(variable), variable.__dict__.pop(keras_parts.VALUE, None)
    try:
        claim(variable, mesh)
        variable._value = value
    except BaseException:
        variable.__class__ = kind
        setattr(variable, keras_parts.VALUE, value)
        variable.__dict__.pop(_MESH, None)
        raise


def _require_support(variable: keras.Variable) -> None:
    keras = sys.modules["keras"]
    if keras.config.backend() != "jax":
        raise ContextError(
            f"Keras computes with {keras.config.backend()!r}, but its variable {getattr(variable, 'path', '')!r} is used with a "
            "strategy, whose steps are programs of JAX. Set the environment variable KERAS_BACKEND=jax "
            "before keras is imported."
        )
    if getattr(keras.config, "is_nnx_enabled", bool)():
        raise ContextError(
            "Keras is in its NNX mode, in which its variables belong to Flax; with a strategy it must be off: leave out "
            "KERAS_NNX_ENABLED, which has to be so before keras is imported."
        )


def scope_mesh() -> ReplicaMesh | None:
    """Return the devices of the strategy whose scope or step the program is in."""
    frame = frames.current()
    return frame.mesh if frame is not None and frame.strategy is not None else None


def own_variable(value: object) -> Any:
    """Return the variable behind a Keras variable, adopting it if necessary; return any other value unchanged."""
    if not is_keras_variable(value):
        return value
    if ours_of(value) is None:
        if frames.is_traced():
            raise UndiscoveredError([value], scope_mesh())  # no variable can be made here
        adopt(value, scope_mesh() or default_mesh())
    return ours_of(value)


def is_stranger(value: object) -> bool:
    return is_keras_variable(value) and ours_of(value) is None


def explain(error: Exception, arguments: Iterable[tuple[str, Any]], where: str) -> TypeError | None:
    """Name the Keras variables among the arguments: some functions of JAX take a `mr.Variable`, but no Keras variable."""
    if complaints.complaint_of(error)[0] != "variable is not converted":
        return None
    found = [(name, value.path) for name, value in arguments if is_keras_variable(value)]
    if not found:
        return None
    (name, path), more = found[0], len(found) - 1
    return TypeError(
        f"the argument {name} is a variable of Keras, {path!r}{f', and so are {more} more' * bool(more)}. A function of JAX that "
        f"takes arrays only, such as jax.jit, jax.grad, a loop or one of jax.lax, was given a variable, at {where}. Pass arrays, "
        "args=([v.value for v in model.trainable_variables], x), and return the new ones from the step; or pass none, and "
        "write mr.value_and_grad(loss_fn, model.trainable_variables)() in the step."
    )


class UndiscoveredError(BaseException):
    """A trace has met Keras variables that are not views yet, so it must start again. Users never see this.

    Call `make` outside the trace: it makes and returns more variables.
    """

    def __init__(self, variables: list[Any], mesh: ReplicaMesh | None, make: Callable[[], list[Any]] = list) -> None:
        super().__init__()
        self.variables, self.mesh, self.make = variables, mesh, make


# -- the names of state, the same in every run that builds the objects in the same way


def tree_of(value: object) -> Any:
    """Return the variables of a model, layer, metric or optimizer, by name; return any other value unchanged."""
    keras = keras_parts.imported_keras()
    if is_keras_variable(value):
        return _ours([value])[0]
    if keras is None or not isinstance(value, keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric):
        return value
    kind, name = type(value).__name__, value.name
    if isinstance(value, keras.optimizers.Optimizer):
        if not value.built:
            raise TypeError(
                f"the Keras optimizer {name!r} ({kind}) has not made the variables that belong to the model's. Build it first, "
                "in the strategy's scope: optimizer.build(model.trainable_variables)."
            )
        # Keras saves them by number too, because their paths contain the paths of the model's variables.
        return {str(number): variable for number, variable in enumerate(_ours(value.variables))}
    if isinstance(value, keras.Layer) and not value.built:
        raise TypeError(
            f"{name!r} ({kind}) has not made its variables yet. Build it first, in the strategy's scope: "
            "model.build(input_shape), or call it once."
        )
    return dict(zip(_names([variable.path for variable in value.variables]), _ours(value.variables), strict=True))


def _ours(variables: Sequence[Any]) -> list[Variable]:
    """Return the variables behind Keras variables; those without one are first adopted by the strategy of the others."""
    known = [ours for ours in map(ours_of, variables) if ours is not None]
    mesh = spec_of(known[0]).mesh if known else scope_mesh()
    for variable in variables:
        if mesh is None:
            raise TypeError(
                f"the Keras variable {variable.path!r} belongs to no strategy. Make the model, its metrics and its optimizer in "
                "`with strategy.scope():`."
            )
        adopt(variable, mesh)
    return [ours for ours in map(ours_of, variables) if ours is not None]  # each has one now


def _names(paths: Sequence[str]) -> list[str]:
    """Return the paths with Keras' counters restarted for these objects, and with numbers after equal paths.

    Keras counts over the whole program: a second model has a `dense_2` where the first has a `dense`.
    """
    numbers = defaultdict(set)
    for stem, number in {_split(part) for path in paths for part in path.split("/")}:
        numbers[stem].add(number)

    def own_name(part: str) -> str:
        stem, number = _split(part)
        index = sorted(numbers[stem]).index(number)
        return f"{stem}_{index}" if index else stem

    seen: Counter[str] = Counter()
    names = []
    for path in paths:
        name = "/".join(map(own_name, path.split("/")))
        seen[name] += 1
        names.append(f"{name}#{seen[name]}" if seen[name] > 1 else name)
    return names


def _split(part: str) -> tuple[str, int]:
    stem, number = _NUMBERED.fullmatch(part).groups()  # type: ignore[union-attr]
    return stem, int(number or -1)

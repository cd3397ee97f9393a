"""Gradients with respect to variables that a function reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, overload

import jax
import jax.numpy as jnp

from .._errors import ContextError, StrategyMismatchError
from .._jax import user_code
from .._jax.marks import Mark, Purpose, mark
from .._libraries import lines_for
from .._models import libraries
from .._program import lift
from .._replicas import arrays, frames
from .._text import shown
from .._typing import PyTree, UserFunction
from .._variables.access import load, store
from .._variables.bindings import bound, with_few_compilations
from .._variables.tree import trainable
from .._variables.variable import Variable, is_variable, spec_of
from ..losses import compute_average_loss

_FOR_ARRAYS = " For gradients with respect to arrays use jax.value_and_grad."
P = ParamSpec("P")


@user_code.shorten_errors
def grad(fn: Callable[P, Any], variables: PyTree, has_aux: bool = False) -> Callable[P, Any]:
    """Make a function that returns the gradients of `fn` with respect to variables that it reads.

    It is `mr.value_and_grad` without the value; with `has_aux`, the function returns `(gradients, aux)`.

    >>> w = mr.Variable(3.0)
    >>> float(mr.grad(lambda x: w.value**2 * x, w)(10.0))
    60.0
    """
    value_and_gradient = value_and_grad(fn, variables, has_aux)

    def gradient(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, gradients = value_and_gradient(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


@overload
def value_and_grad(
    fn: Callable[P, Any], variables: PyTree, has_aux: Literal[False] = False
) -> Callable[P, tuple[jax.Array, PyTree]]: ...
@overload
def value_and_grad(
    fn: Callable[P, tuple[Any, Any]], variables: PyTree, has_aux: Literal[True]
) -> Callable[P, tuple[tuple[jax.Array, Any], PyTree]]: ...
@user_code.shorten_errors
def value_and_grad(fn: UserFunction, variables: PyTree, has_aux: bool = False) -> Callable[..., Any]:
    """Make a function that returns `fn`'s value and its gradients with respect to variables that it reads.

    `fn` returns one loss for each example; the value is their mean over the global batch. In a step it is this replica's
    share of that mean: `strategy.reduce("sum", value)` adds the shares up, and `mr.Optimizer` adds up the gradients. Add a
    penalty for large weights to each example's loss. `fn` may also return a scalar: in a step one of `mr.losses`, or any
    other if you tell the optimizer how to `aggregate`.
    `fn` may assign other variables (statistics of normalization layers, counters); they keep the new values.
    Plain `jax.grad` over `variable.value` gives the same numbers for a scalar.

    Args:
        fn: returns losses of shape `[n]`, one number for each of n examples, or a scalar; with `has_aux`, `(loss, aux)`. It
            gets the arguments of the new function.
        variables: floating point variables, in any nest.
        has_aux: whether `fn` returns `(loss, aux)`.

    Returns:
        A function with `fn`'s arguments that returns `(loss, gradients)`, or `((loss, aux), gradients)`;
        `gradients` is a tree like `variables`, with zeros for variables that `fn` does not depend on.

    Raises:
        TypeError: when `variables` holds anything but floating point variables, and when the loss is not floating
            point.
        ValueError: for a variable that is listed twice, and for losses with more axes than `[n]`.
        ContextError: outside a step, for a sync-on-read variable.

    >>> w = mr.Variable([1.0, 2.0])
    >>> def loss(x):
    ...     return x @ w  # one for each example
    >>> value, gradient = mr.value_and_grad(loss, w)(np.array([[3.0, 4.0], [5.0, 0.0]]))
    >>> float(value), gradient
    (8.0, Array([4., 2.], dtype=float32))

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/GradientTape
    """
    if not callable(fn):
        raise TypeError(f"mr.value_and_grad got {shown(fn)}; expected a function that returns a loss.")
    # A Keras model in a trace may get its variables only when `fn` runs.
    is_empty = not jax.tree.leaves(variables, is_leaf=is_variable)
    is_later = libraries.has_strangers(variables) or (is_empty and frames.is_traced())
    check = functools.partial(check_variables, variables, "mr.value_and_grad", "mr.value_and_grad(loss_fn, [w, b])", _FOR_ARRAYS)
    known = None if is_later else check()

    @user_code.shorten_errors
    def wrapped(*args: object, **kwargs: object) -> Any:
        if known is None and not jax.tree.leaves(variables):
            for library in libraries.imported():
                library.build(lambda: fn(*args, **kwargs))  # a model's first call makes its variables
        leaves, treedef = known or check()
        if frames.is_traced():
            return differentiate(leaves, treedef, None, args, kwargs)
        return with_few_compilations(lambda caches: differentiate(leaves, treedef, caches, args, kwargs))

    def differentiate(leaves: list[Variable], treedef: Any, caches: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        kept: dict[str, Any] = {}

        def loss_of(values: list[jax.Array]) -> Any:
            with bound(dict(zip(leaves, values, strict=True)), caches=caches) as bindings:
                result = fn(*args, **kwargs)
                loss, aux = _split(result, has_aux)
                kept["plan"], aux_arrays = lift.plan_result(aux)
                kept["written"] = list(bindings.written)
                written = bindings.values(kept["written"])
            return _one_number(loss), (aux_arrays, written)

        _refuse_copies(leaves)
        before = [load(variable) for variable in leaves]
        (loss, (aux_arrays, written)), gradients = jax.value_and_grad(loss_of, has_aux=True)(before)
        for variable, value in zip(kept["written"], written, strict=True):
            store(variable, value)
        value = (loss, kept["plan"].rebuild(aux_arrays)) if has_aux else loss
        return value, jax.tree.unflatten(treedef, [mark(gradient, Mark(Purpose.OWN_GRADIENT, "", "")) for gradient in gradients])

    return wrapped


def check_variables(variables: PyTree, verb: str, example: str, hint: str = "") -> tuple[list[Variable], Any]:
    """Return the variables in a nest given to `verb`, and its structure; refuse leaves that have no gradient."""
    given, treedef = jax.tree.flatten(trainable(variables), is_leaf=is_variable)
    leaves = list(map(libraries.own_variable, given))
    if not leaves:
        hints = "".join(library.unbuilt for library in libraries.LIBRARIES)
        raise TypeError(f"{verb} got no variables; expected at least one, for example {example}.{hints}")
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Variable):
            raise TypeError(
                f"{verb} got {shown(leaf)} of type {type(leaf).__name__} among its variables; expected mr.Variable objects.{hint}"
                + lines_for(variables)
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"variable {leaf.name!r} has dtype {leaf.dtype}; only floating point variables have gradients. Leave it out."
            )
        if spec_of(leaf).mesh != spec_of(leaves[0]).mesh:
            raise StrategyMismatchError(
                f"variables {leaves[0].name!r} and {leaf.name!r} belong to different strategies; {verb} takes variables of one. "
                "Create them in the same `with strategy.scope():`, or take those of each strategy alone."
            )
        if any(leaf is earlier for earlier in leaves[:position]):
            raise ValueError(f"variable {leaf.name!r} is listed twice in {verb}; only one could get its gradient.")
    return leaves, treedef


def _refuse_copies(variables: list[Variable]) -> None:
    """Refuse a sync-on-read variable outside a step: only its copies have gradients."""
    frame = frames.current()
    for variable in variables:
        if spec_of(variable).is_on_read and (frame is None or frame.replica is None):
            raise ContextError(
                f"variable {variable.name!r} is sync-on-read: outside a step it has one value per replica and no gradient of "
                "its own. Differentiate in strategy.run(fn), or with respect to a mirrored variable."
            )


def _split(result: object, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        returned = "an array" if isinstance(result, jax.Array) else shown(result)
        raise TypeError(f"with has_aux=True the function must return (loss, aux); it returned {returned}.")
    return result


def _one_number(loss: object) -> jax.Array:
    """Return the scalar to differentiate; for a vector its mean, in a step this replica's share of the global batch's mean."""
    if isinstance(loss, tuple):
        raise TypeError("the function returned a tuple; pass has_aux=True when it returns (loss, aux).")
    if loss is None or not (hasattr(loss, "dtype") or isinstance(loss, int | float)):
        raise TypeError(
            f"the function returned {shown(loss)}; expected a loss, one for each example or one number. Does it end with "
            "`return loss`?"
        )
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss has dtype {loss.dtype}; expected a floating point number.")
    if loss.ndim == 0:
        return loss
    arrays.check_losses(loss, "the function returned")
    if (frame := frames.current()) is not None and frame.replica is not None:
        return compute_average_loss(loss)
    return jnp.sum(loss) / loss.shape[0]

"""Of which model library is an object, and which lines make variables of it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: By the beginning of a module's name: the library, and what to write before the step and in it.
_LINES = {
    "flax.nnx": (
        "Flax NNX",
        "graphdef, params, rest = nnx.split(model, nnx.Param, ...); variables = jax.tree.map(mr.Variable, params)",
        "model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, variables), rest)",
    ),
    "flax": (
        "Flax Linen",
        "variables = jax.tree.map(mr.Variable, model.init(key, x))",
        "model.apply(jax.tree.map(jnp.asarray, variables), x)",
    ),
    "equinox": (
        "Equinox",
        "params, static = eqx.partition(model, eqx.is_inexact_array); variables = jax.tree.map(mr.Variable, params)",
        "model = eqx.combine(jax.tree.map(jnp.asarray, variables), static)",
    ),
    "keras": (
        "Keras",
        "with strategy.scope(): model, optimizer = ..., ...",
        "mr.value_and_grad(loss, model.trainable_variables), and optimizer.apply_gradients of Keras",
    ),
    "torch": (
        "PyTorch, which does not compute with JAX",
        "variables = {name: mr.Variable(p.detach().numpy()) for name, p in model.named_parameters()}",
        "the model written in JAX",
    ),
}


def lines_for(value: Any) -> str:
    """Return a sentence that names the library and the lines to write, behind a space; "" for an object of none.

    Args:
        value: what a user gave: an object, or a list or dict of some.
    """
    values = [value, *value] if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping):
        values = [value, *value.values()]
    for prefix, (library, before, inside) in _LINES.items():
        modules = [base.__module__ for one in values for base in type(one).__mro__]
        if any(module == prefix or module.startswith(f"{prefix}.") for module in modules):
            return f" This is an object of {library}. Before the step write {before}. In the step: {inside}."
    return ""

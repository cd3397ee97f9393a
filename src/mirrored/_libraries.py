"""Finds an object's model library, and the lines that use that library with this one."""

from __future__ import annotations

from collections.abc import Mapping

#: First part of a module's name -> the library, the lines before the step, and the lines in it.
_LINES = {
    "flax.nnx": (
        "Flax NNX",
        "strategy.run(step, args=(model, optimizer, batch))",
        "grads = mr.get_replica_context().all_reduce('sum', grads); optimizer.update(model, grads)",
    ),
    "flax": (
        "Flax Linen",
        "with strategy.scope(): variables = mr.Variable(model.init(key, x))",
        "model.apply(variables.value, x)",
    ),
    "equinox": (
        "Equinox",
        "with strategy.scope(): variables = mr.Variable(model)",
        "variables.value(x), and variables.assign(eqx.apply_updates(variables.value, updates))",
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


def lines_for(value: object) -> str:
    """Return " " and a sentence with the library of an object or its elements, and the lines to write; "" for others."""
    values = [value, *value] if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping):
        values = [value, *value.values()]
    for prefix, (library, before, inside) in _LINES.items():
        modules = [base.__module__ for one in values for base in type(one).__mro__]
        if any(module == prefix or module.startswith(f"{prefix}.") for module in modules):
            return f" This is an object of {library}. Before the step write {before}. In the step: {inside}."
    return ""

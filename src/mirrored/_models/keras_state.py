"""Names the state of Keras' objects; the names are the same in every run that builds the objects in the same way."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from .._variables.variable import Variable, spec_of
from . import keras_parts
from .keras_variables import adopt, is_keras_variable, ours_of, scope_mesh

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


def state_of(value: object) -> Any:
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
    """Return the variables behind Keras variables; first let the strategy of the others adopt those without one."""
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

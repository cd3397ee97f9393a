"""The private parts of Keras that we use; tests/_models/test_keras_parts.py fails when Keras moves one of them."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def imported_keras() -> ModuleType | None:
    """Return Keras if the program has imported it, else None; we never import it."""
    keras = sys.modules.get("keras")
    return keras if hasattr(keras, "Variable") and hasattr(keras, "Model") and hasattr(keras, "random") else None


@functools.cache
def subclass_of(base: type, ours: type) -> type:
    """Return a class that inherits from our class, then from a class of Keras."""
    return type(ours.__name__, (ours, base), {})


def innermost_scope(keras: ModuleType) -> Any:
    """Return the `keras.StatelessScope` that the program is in, or None."""
    return keras.src.backend.common.stateless_scope.get_stateless_scope()


def is_shape_inference(keras: ModuleType) -> bool:
    """Tell whether Keras only infers shapes, so that a variable's value does not matter."""
    return keras.src.backend.common.symbolic_scope.in_symbolic_scope()


#: The attribute with a variable's array. It is None before the first value, and while `fit` has the array.
VALUE = "_value"
#: The method that computes the mean and the variance of a batch.
MOMENTS = "_moments"
#: The method with which `fit`, `evaluate` and `predict` build a model from the first batch.
BUILD = "_symbolic_build"
#: The dtype in which a variable is stored; reading it may cast.
dtype_of: Callable[[Any], str] = operator.attrgetter("_dtype")
#: The axes over which a normalization layer computes its moments.
reduction_axes_of: Callable[[Any], Sequence[int]] = operator.attrgetter("_reduction_axes")
#: The variables for which an optimizer was built.
trained_by: Callable[[Any], list[Any]] = operator.attrgetter("_trainable_variables")


def adapter_base() -> type:
    """Return the class of the objects from which `fit` takes batches."""
    return sys.modules["keras"].src.trainers.data_adapters.data_adapter.DataAdapter

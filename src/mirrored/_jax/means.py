"""Which equations belong to a mean over the replicas, `jax.lax.pmean`?

It is no primitive, but a sum and a division by the number of replicas, in this order or, in a gradient, in the other one.
JAX keeps with every equation the functions in which it was made, also when it transforms it.
"""

from __future__ import annotations

import os
from typing import Any

import jax

_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def is_of_mean(equation: Any) -> bool:
    """Tell whether an equation was made in `jax.lax.pmean`."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return any(frame.function_name == "pmean" and frame.file_name.startswith(_JAX_FOLDER) for frame in frames)

"""What JAX complains about, where the class of its error does not say it: told from the text, which it does not promise."""

from __future__ import annotations

import functools
import re

import jax

#: Raised when Python wants the value of a traced array: in `if`, as an index, as a numpy array, as a mask.
NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_ARGUMENTS = re.compile(r"\barguments\[(\d+)\]")
_SLICE_NEEDS_A_VALUE = re.compile(r"Slice entries must be static|must have static start/stop/step")
_TRACER_NEEDED = re.compile(r"(unhashable type:|single integer, got) '\w*Tracer")
_UNBOUND_AXIS = re.compile(r"unbound axis name:? ['\"]?(\w+)")


def needed_arguments(error: BaseException) -> list[int] | None:
    """Return which of the `arguments` of the traced function Python needed the values of; none when JAX does not say which.

    None when Python needed no value.
    """
    text = str(error)
    is_slice = isinstance(error, IndexError) and _SLICE_NEEDS_A_VALUE.search(text)
    if is_slice or isinstance(error, NEEDS_A_VALUE) or (isinstance(error, TypeError) and "concrete values" in text):
        return sorted(set(map(int, _ARGUMENTS.findall(text))))
    return [] if isinstance(error, TypeError) and _TRACER_NEEDED.search(text) else None


def unbound_axis(error: BaseException) -> str | None:
    """Return the name of an axis that a collective was given and that nothing binds."""
    found = _UNBOUND_AXIS.search(str(error)) if isinstance(error, NameError) else None
    return found and found[1]


def _says(kind: type[Exception], pattern: str, error: BaseException) -> bool:
    """Tell whether an error is of a class, and its text has a pattern."""
    return isinstance(error, kind) and re.search(pattern, str(error)) is not None


#: Whether an object that only `jax.numpy` converts, by `__jax_array__`, was given to a function of `jax.lax`.
is_unconverted = functools.partial(_says, ValueError, r"__jax_array__\(\) during abstractification")
#: Whether a traced array was called like a function.
is_call_of_array = functools.partial(_says, TypeError, r"'\w*Tracer' object is not callable")
#: Whether a function was to be unpacked, as in `a, b = function`.
is_unpacked_function = functools.partial(_says, TypeError, r"\Acannot unpack non-iterable function object\Z")
#: Whether a function of torch was given a traced array.
is_for_torch = functools.partial(_says, TypeError, r"must be Tensor, not \w*Tracer")
#: Whether a traced array was to be written in a format, such as `.3f`.
is_formatted = functools.partial(_says, TypeError, r"unsupported format string passed to \w*Tracer\.__format__")


def is_tree_against_leaf(error: BaseException, kind: type) -> bool:
    """Tell whether `jax.tree.map` has met an object of a kind, which is a tree, where the next tree has an array."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return isinstance(error, ValueError) and "different types at key path" in str(error) and f"<class '{name}'>" in str(error)


def missing_attribute(error: BaseException) -> str | None:
    """Return the name of an attribute that an array was asked for and does not have."""
    is_of_array = isinstance(error, AttributeError) and isinstance(error.obj, jax.Array)
    return error.name if is_of_array else None  # type: ignore[union-attr]

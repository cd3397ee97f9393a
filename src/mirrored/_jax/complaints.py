"""What JAX complains about, where the class of its error does not say it: told from the text, which it does not promise."""

from __future__ import annotations

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
_TRACER_CALLED = re.compile(r"'\w*Tracer' object is not callable")
_TRACER_FOR_TORCH = re.compile(r"must be Tensor, not \w*Tracer")
_TRACER_FORMATTED = re.compile(r"unsupported format string passed to \w*Tracer\.__format__")


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


def is_unconverted(error: BaseException) -> bool:
    """Tell whether an object that only `jax.numpy` converts, by `__jax_array__`, was given to a function of `jax.lax`."""
    return isinstance(error, ValueError) and "__jax_array__() during abstractification" in str(error)


def is_tree_against_leaf(error: BaseException, kind: type) -> bool:
    """Tell whether `jax.tree.map` has met an object of a kind, which is a tree, where the next tree has an array."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return isinstance(error, ValueError) and "different types at key path" in str(error) and f"<class '{name}'>" in str(error)


def is_call_of_array(error: BaseException) -> bool:
    """Tell whether a traced array was called like a function."""
    return isinstance(error, TypeError) and _TRACER_CALLED.search(str(error)) is not None


def is_unpacked_function(error: BaseException) -> bool:
    """Tell whether a function was to be unpacked, as in `a, b = function`."""
    return isinstance(error, TypeError) and str(error) == "cannot unpack non-iterable function object"


def is_for_torch(error: BaseException) -> bool:
    """Tell whether a function of torch was given a traced array."""
    return isinstance(error, TypeError) and _TRACER_FOR_TORCH.search(str(error)) is not None


def is_formatted(error: BaseException) -> bool:
    """Tell whether a traced array was to be written in a format, such as `.3f`."""
    return isinstance(error, TypeError) and _TRACER_FORMATTED.search(str(error)) is not None


def missing_attribute(error: BaseException) -> str | None:
    """Return the name of an attribute that an array was asked for and does not have."""
    is_of_array = isinstance(error, AttributeError) and isinstance(error.obj, jax.Array)
    return error.name if is_of_array else None  # type: ignore[union-attr]

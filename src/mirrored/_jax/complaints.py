"""Recognizes JAX's errors in traces by their class, else by their text, which JAX does not promise."""

from __future__ import annotations

import re
import traceback

import jax

#: The errors when Python needs the value of a traced array: in `if`, as an index, as a numpy array, as a mask.
NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_ARGUMENTS = re.compile(r"\barguments\[(\d+)\]")
_SLICE_NEEDS_A_VALUE = re.compile(r"Slice entries must be static|must have static start/stop/step")
_TRACER_NEEDED = re.compile(r"(unhashable type:|single integer, got) '\w*Tracer")
#: Kind of complaint -> the class of the error, and its text, in which a group is the name that it is about.
_COMPLAINTS: dict[str, tuple[type[Exception], str]] = {
    "no static number": (jax.errors.ConcretizationTypeError, r"is expected: .*\n(.*(?:size argument|static).*)"),
    "no attribute": (AttributeError, r"^The '(\w+)' (?:method|attribute) is not available on"),
    "no axis": (NameError, r"unbound axis name:? ['\"]?(\w+)"),
    "array is called": (TypeError, r"'\w*Tracer' object is not callable"),
    "array in a format": (TypeError, r"unsupported format string passed to \w*Tracer\.__format__"),
    "array for torch": (TypeError, r"must be Tensor, not \w*Tracer"),
    "function is unpacked": (TypeError, r"^cannot unpack non-iterable function object$"),
    "key by rows": (NotImplementedError, r"fry_by_rows"),
    "variable is not converted": (ValueError, r"__jax_array__\(\) during abstractification"),
    "variable beside an array": (ValueError, r"different types at key path[\s\S]*<class 'mirrored\.[\w.]*\.Variable'>"),
}


def needed_arguments(error: BaseException, numbers: list[int]) -> list[int]:
    """Return the numbers of the arguments whose values Python needed: those that the error names, or else all `numbers`."""
    text = str(error)
    is_said = isinstance(error, IndexError) and _SLICE_NEEDS_A_VALUE.search(text)
    if is_said or isinstance(error, NEEDS_A_VALUE) or (isinstance(error, TypeError) and "concrete values" in text):
        return sorted(set(map(int, _ARGUMENTS.findall(text))))
    return numbers if isinstance(error, TypeError | ValueError) and _TRACER_NEEDED.search(text) else []


def complaint_of(error: BaseException) -> tuple[str, str]:
    """Return the kind of an error's complaint, and the name that it is about; two empty texts for any other error."""
    if isinstance(error, ZeroDivisionError) and traceback.extract_tb(error.__traceback__)[-1].name == "_compute_newshape":
        return "no rows to divide by", ""
    if isinstance(error, AttributeError) and isinstance(error.obj, jax.Array):
        return "no attribute", error.name or ""
    for complaint, (kind, text) in _COMPLAINTS.items():
        if isinstance(error, kind) and (found := re.search(text, str(error))):
            return complaint, "".join(found.groups())
    return "", ""

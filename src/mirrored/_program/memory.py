"""Does a program fit into the memory of a device? Asked before it overwrites variables for the first time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import DeviceError
from .._text import bytes_in_words
from .._workers.joint_programs import Announced


def refuse_too_large(
    name: str, compiled: Callable[..., Any], has: int, is_trained: Sequence[bool], arguments: tuple[Any, ...]
) -> None:
    """Raise an error if a program needs more than a device has, with what takes it; nothing has run then.

    Args:
        compiled: the jitted program, which its first call finds compiled.
        has: bytes of the device.
        is_trained: of each variable among the arguments.
        arguments: `(written, read_only, arrays, constants)`.
    """
    program: Any = compiled.program if isinstance(compiled, Announced) else compiled
    sizes = program.lower(*arguments).compile().memory_analysis()
    if sizes is None:  # this backend does not tell
        return
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    needs = sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes
    if needs <= has:
        return
    written, read_only, *others = arguments
    variables = list(map(bytes_on_device, [*written, *read_only]))
    trained = sum(size for size, its in zip(variables, is_trained, strict=True) if its)
    parts = {
        "trained variables": trained,
        "an optimizer's and other state": sum(variables) - trained,
        "arguments": sum(map(bytes_on_device, jax.tree.leaves(others))),
        "results": results,
        "temporaries": sizes.temp_size_in_bytes,
    }
    listed = ", ".join(f"{bytes_in_words(size)} {what}" for what, size in parts.items() if size)
    raise DeviceError(
        f"{name} needs {bytes_in_words(needs)} of memory on each device, which has {bytes_in_words(has)}: {listed}. It was not "
        "run, and nothing has changed. Temporaries shrink with fewer rows, with parts of a batch one after the other "
        '(schedule="one_by_one"), with jax.checkpoint and with bfloat16; the state of an optimizer with shard_state=True.'
    )


def bytes_on_device(array: Any) -> int:
    """Return the bytes of an array, or of what stands for one, on each of its devices."""
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    return math.prod(shape) * (8 if is_key else array.dtype.itemsize)  # a random key: two numbers of 32 bits, most often

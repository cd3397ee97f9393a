"""What does a program need of a device's memory, and does it fit? Asked before it overwrites variables for the first time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import DeviceError
from .._replicas.division import division_in, is_divisible
from .._text import bytes_in_words
from .._workers.joint_programs import Announced

_OF_STATE = "an optimizer's and other state"
_REMEDIES = (
    "It was not run, and nothing has changed. Temporaries shrink with fewer rows, with parts of a batch one after the other "
    '(schedule="one_by_one"), with jax.checkpoint and with bfloat16; the state of an optimizer with shard_state=True; all '
    'variables with mr.MirroredStrategy(storage="parts").'
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device; `variables` are those that are trained, `state` the others.

    Attributes:
        whole: the bytes of large variables that every device stores whole, and could store in parts.
        saved: the bytes that each device saves by storing one part of a variable.
    """

    variables: int
    state: int
    arguments: int
    results: int
    temporaries: int
    whole: int = 0
    saved: int = 0

    @classmethod
    def of(
        cls, compiled: jax.stages.Compiled | None, is_trained: Sequence[bool], arguments: tuple[Any, ...], num_copies: int = 1
    ) -> Memory:
        """Measure what a compiled program needs; without one (XLA could not make it) results and temporaries are 0.

        `is_trained` tells which variables are trained in `arguments`, `(written, read_only, arrays, constants)`. There are
        `num_copies` of an array in parts.
        """
        written, read_only, *others = arguments
        variables = [*written, *read_only]
        state = [array for array, trains in zip(variables, is_trained, strict=True) if not trains]
        of_state, of_all = sum(map(bytes_on_device, state)), sum(map(bytes_on_device, variables))
        results = temporaries = 0
        if compiled is not None:
            sizes: Any = compiled.memory_analysis()
            results, temporaries = sizes.output_size_in_bytes - sizes.alias_size_in_bytes, sizes.temp_size_in_bytes
        return cls(
            variables=of_all - of_state,
            state=of_state,
            arguments=sum(map(bytes_on_device, jax.tree.leaves(others))),
            results=results,
            temporaries=temporaries,
            whole=sum(map(_may_be_divided, variables)),
            saved=sum(_saved(array, num_copies) for array in variables),
        )

    @property
    def peak(self) -> int:
        """All of it: a program writes the new values of variables over the old ones."""
        return self.variables + self.state + self.arguments + self.results + self.temporaries

    def in_words(self, of_state: str = "other state") -> str:
        """List the parts that are not empty."""
        parts = {
            "trained variables": self.variables, of_state: self.state, "arguments": self.arguments, "results": self.results,
            "temporaries": self.temporaries,
        }  # fmt: skip
        return ", ".join(f"{bytes_in_words(size)} {what}" for what, size in parts.items() if size)


def refuse_too_large(
    name: str, compiled: Callable[..., Any], has: int, is_trained: Sequence[bool], arguments: tuple[Any, ...]
) -> None:
    """Raise DeviceError before the first run if a program, with arguments as for `Memory.of`, needs more than a device `has`."""
    program: Any = compiled.program if isinstance(compiled, Announced) else compiled
    try:
        made = program.lower(*arguments).compile()  # the program's first call finds it compiled
    except jax.errors.JaxRuntimeError as error:  # XLA tries kernels on a GPU, and a TPU's compiler knows the memory
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason, parts = str(error).splitlines()[0], Memory.of(None, is_trained, arguments).in_words(_OF_STATE)
        raise DeviceError(
            f"{name} does not fit into a device, which has {bytes_in_words(has)}, less what other processes use. XLA, which "
            f"compiled it, says: {reason}. Known so far: {parts or 'no arguments'}. {_REMEDIES}"
        ) from error
    sizes = made.memory_analysis()
    if sizes is None:  # this backend does not tell
        return
    memory = Memory.of(made, is_trained, arguments)
    needs = sizes.argument_size_in_bytes + memory.results + memory.temporaries
    if needs <= has:
        return
    parts = memory.in_words(_OF_STATE)
    raise DeviceError(
        f"{name} needs {bytes_in_words(needs)} of memory on each device, which has {bytes_in_words(has)}: {parts}. {_REMEDIES}"
    )


def _may_be_divided(array: Any) -> int:
    """Return the bytes of an array that every device stores whole, if it could be divided; else 0."""
    if array.sharding.is_fully_replicated and is_divisible(array.shape, array.dtype):
        return bytes_on_device(array)
    return 0


def _saved(array: Any, num_copies: int) -> int:
    """Return the bytes that a device need not store of an array in parts; 0 for per-replica values."""
    division = division_in(array)
    if division is None or (division.axis, division.length) == (0, division.num_parts):
        return 0
    return math.prod(array.shape) * array.dtype.itemsize // num_copies - bytes_on_device(array)


def bytes_on_device(array: Any) -> int:
    """Return an array's bytes on each of its devices; the array may be a stand-in without values."""
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    item_bytes = array.dtype.itemsize
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        item_bytes = 8  # a random key: two numbers of 32 bits, most often
    return math.prod(shape) * item_bytes

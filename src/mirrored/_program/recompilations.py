"""How often has a function been compiled, and why again? `testing` and `explain` tell it; a warning comes after many times."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optax
from jax.tree_util import PyTreeDef

from .._errors import RecompilationWarning
from .._jax import tracing, user_code
from .._text import shown
from .._variables.variable import Variable, spec_of
from .call import ArrayLeaf, Call, leaf_names, static_key
from .own_code import Sight, content_key

#: So many programs of one function are normal (a few shapes, training and not); more are reported once.
MAX_SILENT_RECOMPILATIONS = 8
#: So many functions are remembered; those that were compiled least recently are forgotten first.
MAX_FUNCTIONS = 1024

#: Called with each program that is made, and the reason why the function's last one did not fit ("" for the first).
listeners: list[Callable[[Any, str], None]] = []


class Compilation(NamedTuple):
    """One compilation of a function."""

    name: str  # the function's
    count: int  # the number of its programs, with this one
    cause: str  # why the last program did not fit; "" for the first

    def tell(self, program: object) -> None:
        """Tell the listeners that this program was made, and warn of a function that is compiled again and again."""
        for listener in listeners:
            listener(program, self.cause)
        if self.count == MAX_SILENT_RECOMPILATIONS + 1:
            text = f"{self.name} has been compiled {self.count} times; this time because {self.cause}"
            user_code.warn(text, RecompilationWarning)


class Recompilations:
    """The compilations of the functions of one strategy.

    They are counted for a function and its variables, so that the folds of a cross-validation are silent. Steps with the same
    code count as one function, because a loop may define its step anew in each turn. Each `mr.function` counts alone: a
    decorator in a factory may make many of one code.
    """

    def __init__(self) -> None:
        self._seen: collections.OrderedDict[tuple[int, ...], _Seen] = collections.OrderedDict()

    def note(self, call: Call, variables: Sequence[Variable], sight: Sight) -> Compilation:
        """Count a compilation, and find its reason: what differs from the last call of this function and these variables."""
        owner = call.function if call.runs_steps else _code_of(call.function)
        key = (id(owner), *sorted(spec_of(variable).number for variable in variables))
        seen = self._seen.pop(key, None)
        if seen is None or seen.owner() is not owner:
            seen = _Seen(_refer_to(owner), 0, None)
        leaves = [leaf if isinstance(leaf, ArrayLeaf) else (static_key(leaf[0]), shown(leaf[0])) for leaf in call.leaves]
        named = {name: content_key(value) for name, value in sight.named.items()}
        structure = _Structure(call.treedef, leaves, named, tracing.settings())
        cause = "" if seen.structure is None else _reason(seen.structure, structure, leaf_names(call))
        self._seen[key] = _Seen(seen.owner, seen.count + 1, structure)
        if len(self._seen) > MAX_FUNCTIONS:
            self._seen.popitem(last=False)
        name = getattr(call.function, "__qualname__", None) or shown(call.function)
        return Compilation(name, seen.count + 1, cause)


def _code_of(function: Callable[..., Any]) -> object:
    """Return the code of a step, without decorators; the function itself may be made anew for each call."""
    function = inspect.unwrap(function)
    return getattr(function, "__code__", function)


def _refer_to(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: None


class _Structure(NamedTuple):
    """The structure of a call, without the objects in it, so that it keeps none of them alive."""

    treedef: Any
    leaves: list[ArrayLeaf | tuple[Hashable, str]]  # of a static value: its key, and how it is shown
    named: dict[str, Hashable]  # see `Sight`: name -> `content_key`
    settings: tuple[Any, ...]  # JAX's


class _Seen(NamedTuple):
    """The compilations of one function."""

    owner: Callable[[], Any]  # returns the function, or its code; None when it is gone, and another may have its `id`
    count: int
    structure: _Structure | None  # of the last call for which a program was made


# -- the reason, in words


def _reason(before: _Structure, after: _Structure, names: Sequence[str]) -> str:
    """Say which difference between two calls needs another program, and how to avoid it."""
    if before.treedef != after.treedef:
        return _structure_reason(before.treedef, after.treedef)
    for argument, old, new in zip(names, before.leaves, after.leaves, strict=True):
        if old != new:
            return f"the argument {argument} changed from {_change_of_argument(old, new)}"
    for name, content in after.named.items():
        if (old_content := before.named.get(name, content)) != content:
            return f"{name}, which it reads, {_change_of_name(old_content, content)}"
    if before.settings != after.settings:
        return "a setting of JAX is another, as with jax.enable_x64. Leave JAX's settings as they are between steps."
    return "something that it closes over is another object. Define the step once, outside of the loop, and pass what changes."


def _structure_reason(before: PyTreeDef, after: PyTreeDef) -> str:
    """Explain the first node in which two treedefs differ."""
    old, new = before.node_data(), after.node_data()
    if old == new:
        pairs = zip(before.children(), after.children(), strict=False)
        if (differing := next((pair for pair in pairs if pair[0] != pair[1]), None)) is not None:
            return _structure_reason(*differing)
    elif old and new and list(_transformations(old[1])) != list(_transformations(new[1])):
        return (
            "an optax transformation in its arguments is another object than before, and its functions are compiled into the "
            "program. Make it once, before the loop, and give it to each state: tx = optax.adam(0.1); TrainState.create(tx=tx, "
            "...). A rate that changes is a number of its state: optax.inject_hyperparams(optax.adam)(learning_rate=0.1)."
        )
    return "the structure of its arguments changed. Pass arguments of one structure."


def _transformations(fixed: object) -> Iterator[object]:
    """Yield the optax transformations in the static part of a pytree's node, such as a train state or an NNX optimizer."""
    if isinstance(fixed, optax.GradientTransformation):
        yield fixed
        return
    parts: Iterable[object] = ()
    if dataclasses.is_dataclass(fixed):
        parts = [getattr(fixed, field.name, None) for field in dataclasses.fields(fixed)]
    elif isinstance(fixed, dict):
        parts = fixed.values()
    elif isinstance(fixed, tuple | list):
        parts = fixed
    for part in parts:
        yield from _transformations(part)


def _change_of_argument(old: ArrayLeaf | tuple[Hashable, str], new: ArrayLeaf | tuple[Hashable, str]) -> str:
    if not isinstance(old, ArrayLeaf) or not isinstance(new, ArrayLeaf):
        return (
            f"{_shown(old)} to {_shown(new)}. Strings, bools, functions and other objects are compiled into the program. Pass a "
            "value that changes as a number or an array."
        )
    if old.shape[1:] != new.shape[1:]:  # drop_remainder would not help
        remedy = (
            "Rows of each shape need a program of their own. Pad them to a few lengths, such as powers of two: up to "
            f"{MAX_SILENT_RECOMPILATIONS} programs are normal. If you want more, say so before the loop: "
            "warnings.simplefilter('ignore', mr.RecompilationWarning)."
        )
    elif (old.shape, old.dtype, old.shapes) != (new.shape, new.dtype, new.shapes):
        remedy = "Give batches one shape, for example with drop_remainder=True."
    else:
        remedy = "Pass values of one kind."
    return f"shape {_type_of(old)} to {_type_of(new)}. {remedy}"


def _change_of_name(old: Hashable, new: Hashable) -> str:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return (
            f"changed from {_content(old)} to {_content(new)}. What a step reads is compiled into it. Pass what changes as an "
            "argument: strategy.run(step, args=(batch, value))."
        )
    return (
        "is another object than before. Define functions once, outside of the loop, and pass an array that changes as an "
        "argument: strategy.run(step, args=(batch, array))."
    )


def _content(key: tuple[Any, Any]) -> str:
    """Show the value of a `content_key`, in which numbers are texts."""
    return key[1] if isinstance(key[1], str) and not issubclass(key[0], str) else shown(key[1])


def _type_of(leaf: ArrayLeaf) -> str:
    text = f"{leaf.shape} {leaf.dtype}"
    if leaf.shapes is not None:
        return f"{text} (of which the replicas have {', '.join(map(str, leaf.shapes))})"
    return text + " on each replica" * leaf.is_per_replica + " of a Python number" * leaf.is_weak


def _shown(leaf: ArrayLeaf | tuple[Hashable, str]) -> str:
    return f"an array of shape {leaf.shape}" if isinstance(leaf, ArrayLeaf) else leaf[1]

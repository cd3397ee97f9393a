"""The list of model libraries, and the questions that other wings ask all of them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .. import _process
from .._replicas.mesh import ReplicaMesh
from .._typing import PyTree
from .._variables.variable import is_variable
from . import equinox, keras, linen, nnx
from .library import Library
from .replaced import in_place

_TORCH = Library(
    package="torch",
    name="PyTorch, which does not compute with JAX",
    before="variables = {name: mr.Variable(p.detach().numpy()) for name, p in model.named_parameters()}",
    inside="the model written in JAX",
)
#: An inner package, such as flax.nnx, stands before the package around it.
LIBRARIES: list[Library] = [nnx.NNX, linen.LINEN, equinox.EQUINOX, keras.KERAS, _TORCH]
_process.libraries = LIBRARIES  # for messages of the floors below


def imported() -> list[Library]:
    """Return the libraries that the program has imported."""
    return [library for library in LIBRARIES if library.package in sys.modules]


@contextlib.contextmanager
def in_scope() -> Iterator[None]:
    """Enter a strategy's scope in all libraries: models and variables made inside this block belong to the strategy."""
    with contextlib.ExitStack() as stack:
        for library in LIBRARIES:
            stack.enter_context(library.scope())
        with in_place():
            yield


def traced(trace: Callable[[], Any], mesh: ReplicaMesh | None, may_repeat: bool = True) -> Any:
    """Trace user code, or run it eagerly, by calling `trace` inside every imported library's `traced`."""
    for library in imported():
        trace = functools.partial(library.traced, trace, mesh, may_repeat)
    with in_place():
        return trace()


def own_variable(value: object) -> Any:
    """Return the variable behind a library's variable, making it if necessary; return any other value unchanged."""
    for library in imported():
        value = library.own_variable(value)
    return value


def has_strangers(tree: PyTree) -> bool:
    """Tell whether a tree has variables of a library without a `mr.Variable` behind them."""
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    return any(library.is_stranger(leaf) for library in imported() for leaf in leaves)


def tree_of(value: object) -> Any:
    """Return the variables behind a library's model or optimizer, by name; return any other value unchanged."""
    for library in imported():
        value = library.tree_of(value)
    return value


def static_leaves(structure: Any) -> frozenset[int]:
    """Return the positions of a tree's leaves that are constants of the program if they are Python numbers."""
    found: frozenset[int] = frozenset()
    for library in LIBRARIES:
        if library.static_leaves is not None and library.package in sys.modules:
            found |= library.static_leaves(structure)
    return found

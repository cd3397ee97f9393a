"""Replaces methods of model libraries, inside scopes and traces only."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .. import _process


def table() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield a class of an imported library, a method's name, and our method, whose first argument is the old method.

    Ours calls the old one for models and variables without a strategy, and outside of steps, except in the methods of `fit`.
    """
    for library in _process.libraries:
        if library.package in sys.modules:
            yield from library.replaced()


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Put the table's methods in place during this block; several threads may be in such blocks at once."""
    with _process.replaced_lock:
        for owner, name, method in table():
            if (owner, name) not in _process.replaced:
                _process.replaced[owner, name] = _replace(owner, name, method)
        _process.num_replacing += 1
    try:
        yield
    finally:
        with _process.replaced_lock:
            _process.num_replacing -= 1
            if not _process.num_replacing:
                _undo()


def _replace(owner: type, name: str, method: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """Replace a method; return the new method, and the class's own old one, which is None if it is inherited."""
    old = getattr(owner, name)

    @functools.wraps(old)
    def new(self: object, *args: object, **kwargs: object) -> Any:
        return method(old, self, *args, **kwargs)

    defined = vars(owner).get(name)
    setattr(owner, name, new)
    return new, defined


def _undo() -> None:
    for (owner, name), (new, defined) in list(_process.replaced.items()):
        if vars(owner).get(name) is not new:
            continue  # somebody has replaced ours and calls it: in place again, it would do its work twice
        if defined is None:
            delattr(owner, name)
        else:
            setattr(owner, name, defined)
        del _process.replaced[owner, name]

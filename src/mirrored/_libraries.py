"""Finds an object's model library, and the lines that use that library with this one."""

from __future__ import annotations

from collections.abc import Mapping

from . import _process


def lines_for(value: object) -> str:
    """Return a sentence after a space: the library of an object or its elements, and the lines to write; "" for others."""
    values = [value, *value] if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping):
        values = [value, *value.values()]
    modules = [f"{base.__module__}." for part in values for base in type(part).__mro__]
    for library in _process.libraries:  # `_models/library.Library`
        if any(module.startswith(f"{library.package}.") for module in modules):
            return f" This is an object of {library.name}. Before the step write {library.before}. In the step: {library.inside}."
    return ""

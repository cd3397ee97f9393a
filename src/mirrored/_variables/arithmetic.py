"""The operators of a variable: those of its value, except in-place ones, which would put an array in its place."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

_OF_TWO = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@", "and": "&",
    "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_COMPARISONS = ("ne", "lt", "le", "gt", "ge")
_CONVERSIONS = ("neg", "pos", "abs", "invert", "round", "bool", "float", "int", "complex", "index")


def add_operators(kind: type[Any]) -> None:
    """Give a class the operators and conversions of arrays, through its methods `_apply` and `_apply_to`."""
    names = [*_OF_TWO, "divmod"]
    for name in (*names, *(f"r{name}" for name in names), *_COMPARISONS):
        setattr(kind, f"__{name}__", functools.partialmethod(kind._apply_to, f"__{name}__"))
    for name in _CONVERSIONS:
        setattr(kind, f"__{name}__", functools.partialmethod(kind._apply, f"__{name}__"))
    for name, symbol in _OF_TWO.items():
        setattr(kind, f"__i{name}__", functools.partialmethod(_refuse_in_place, symbol))
    kind.__setitem__ = functools.partialmethod(_refuse_in_place, "[i] ")


def _refuse_in_place(variable: Any, symbol: str, *others: object) -> NoReturn:
    why, new = "put a new array in its place", f"variable {symbol} x"
    if symbol == "[i] ":
        why, new = "change its array, and arrays of JAX do not change", "variable.value.at[i].set(x)"
    line = {"+": "variable.assign_add(x)", "-": "variable.assign_sub(x)"}.get(symbol, f"variable.assign({new})")
    raise TypeError(f"`{symbol}=` on variable {variable.name!r} would {why}. Write {line}; or y = {new} for a new array.")

"""Which of our programs is being compiled: for those who count them."""

from __future__ import annotations

import sys

from .program import Program

_PACKAGE = __name__.split(".")[0] + "."
#: What stands between a program and JAX. What else is compiled while a program runs, such as copies of arrays, is no program.
_BETWEEN = frozenset({
    "overwrite", "_overwrite_and_move", "overwrite_when_done", "Program._until_done", "prepared.<locals>.call",
    "started.<locals>.call",
})  # fmt: skip


def program_on_stack() -> Program | None:
    """Return the program that JAX is compiling, when JAX calls the caller while it compiles one of ours."""
    frame, is_in_jax = sys._getframe(), False
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            if frame.f_code is Program.execute.__code__:
                return frame.f_locals["self"]
            if is_in_jax and frame.f_code.co_qualname not in _BETWEEN:
                return None
        else:
            is_in_jax = True  # the frames before are of those who listen
        frame = frame.f_back
    return None

"""Which line of a program is the user's: neither ours nor JAX's."""

from __future__ import annotations

import contextlib
import os
import sys
from types import ModuleType
from typing import Any

import jax

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_not_user_code = (_PACKAGE_FOLDER, _JAX_FOLDER, "<frozen", os.path.dirname(contextlib.__file__) + os.sep + "contextlib")


def leave_out(library: ModuleType) -> None:
    """Take a library's files for code that is not the user's, from now on."""
    global _not_user_code
    folder = os.path.dirname(os.path.abspath(library.__file__ or "")) + os.sep
    _not_user_code = tuple(dict.fromkeys((*_not_user_code, folder)))


def user_line() -> str:
    """Return `file:line` of the innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_not_user_code):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the caller's `warnings.warn` points at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(_not_user_code):
        frame, level = frame.f_back, level + 1
    return level


def raising_line(error: BaseException) -> str:
    """Return `file:line` of the innermost user code that an exception came through."""
    where = "<unknown>"
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_not_user_code):
            where = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return where


def equation_line(equation: Any) -> str | None:
    """Return `file:line` of the user's code that made an equation of a jaxpr, or None when JAX does not know it."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_not_user_code):
            return f"{frame.file_name}:{frame.line_num}"
    return None

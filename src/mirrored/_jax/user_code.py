"""Which line of a program is the user's: neither ours nor JAX's."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from typing import Any

import jax

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_NOT_USER_CODE = (_PACKAGE_FOLDER, _JAX_FOLDER, "<frozen", os.path.dirname(contextlib.__file__) + os.sep + "contextlib")


def user_line() -> str:
    """Return `file:line` of the innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_NOT_USER_CODE):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"


def line_of(function: Any) -> str:
    """Return `file:line` of a function's definition, or its name when it has no Python code of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the caller's `warnings.warn` points at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame, level = frame.f_back, level + 1
    return level


def raising_line(error: BaseException) -> str:
    """Return `file:line` of the innermost user code that an exception came through."""
    where = "<unknown>"
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_NOT_USER_CODE):
            where = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return where


def equation_line(equation: Any) -> str | None:
    """Return `file:line` of the user's code that made an equation of a jaxpr, or None when JAX does not know it."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_NOT_USER_CODE):
            return f"{frame.file_name}:{frame.line_num}"
    return None

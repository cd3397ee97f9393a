"""Finds the user's line of a program: neither ours nor JAX's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import optax

from .. import _process
from .jaxprs import Equation

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_OPTAX_FOLDER = os.path.dirname(os.path.abspath(optax.__file__)) + os.sep
_CONTEXTLIB = os.path.dirname(contextlib.__file__) + os.sep + "contextlib"
_process.library_folders = (_PACKAGE_FOLDER, _JAX_FOLDER, _OPTAX_FOLDER, _CONTEXTLIB, "<frozen")
#: Begins a `jax.named_scope` of our code that has no line of the user's around it: messages name the scope.
OURS = "mirrored: "


def leave_out(library: types.ModuleType) -> None:
    """From now on, treat a library's files as code that is not the user's."""
    folder = os.path.dirname(os.path.abspath(library.__file__ or "")) + os.sep
    _process.library_folders = tuple(dict.fromkeys((*_process.library_folders, folder)))


def user_line() -> str:
    """Return `file:line` of the innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_process.library_folders):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"


def line_of(function: Callable[..., Any]) -> str:
    """Return `file:line` of a function's definition, or its name if it has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def user_stacklevel() -> int:
    """Return the `stacklevel` that makes the caller's `warnings.warn` point at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(_process.library_folders):
        frame, level = frame.f_back, level + 1
    return level


_MAX_WARNED = 100
_WHERE_IT_WENT = (
    "A step whose jit has `donate_argnums` takes the memory of those arguments for new arrays. Go on with what it returned, pass "
    "it a copy (jnp.copy), or leave the argument out of donate_argnums."
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, and count the warning for reports."""
    _process.warned[message] = _process.warned.pop(message, 0) + 1
    while len(_process.warned) > _MAX_WARNED:
        _process.warned.popitem(last=False)
    warnings.warn(message, category, stacklevel=user_stacklevel())


def raising_line(error: BaseException) -> str:
    """Return `file:line` of the innermost user code that an exception passed through, else of the running user code."""
    lines = [f"{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}" for entry in _entries(error) if _is_users(entry)]
    return lines[-1] if lines else user_line()


def shorten_errors(verb: Callable[P, T]) -> Callable[P, T]:
    """Wrap a public function so that its exceptions show only the user's lines."""

    @functools.wraps(verb)
    def shortened(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return verb(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            show_users_lines(error)
            raise

    return shortened


def hide_lines() -> None:
    """Hide the running frames, up to the user's, from IPython and pytest: the error will pass through JAX without us."""
    frame = sys._getframe(1) if jax.config.jax_traceback_filtering != "off" else None
    while frame is not None and frame.f_code.co_filename.startswith(_process.library_folders):
        frame.f_locals["__tracebackhide__"] = True
        frame = frame.f_back


def show_users_lines(error: BaseException) -> None:
    """Leave only the user's lines in the tracebacks of an exception, its causes and contexts; `raise` it afterwards.

    This also removes JAX's note about hidden lines. A bug of ours keeps all lines, and under JAX_TRACEBACK_FILTERING=off,
    with which JAX shows its own lines, every exception does.
    """
    if str(error).startswith("Array has been deleted"):
        error.add_note(_WHERE_IT_WENT)
    if jax.config.jax_traceback_filtering == "off":
        return
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        waiting += [link.__cause__, link.__context__]
        entries = _entries(link)
        if entries and not _is_bug(link, entries[-1]):
            link.__traceback__ = None
            for entry in filter(_is_users, reversed(entries)):
                link.__traceback__ = types.TracebackType(link.__traceback__, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            if notes := getattr(link, "__notes__", None):
                link.__notes__ = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]


def _entries(error: BaseException) -> list[types.TracebackType]:
    """Return the traceback entries of an exception, from the outermost to the innermost."""
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _is_users(entry: types.TracebackType) -> bool:
    return not entry.tb_frame.f_code.co_filename.startswith(_process.library_folders)


def _is_bug(error: BaseException, innermost: types.TracebackType) -> bool:
    """Tell whether our code raised an exception of a class that we never raise to users."""
    is_ours = innermost.tb_frame.f_code.co_filename.startswith(_PACKAGE_FOLDER)
    return is_ours and isinstance(error, AssertionError | LookupError)


def equation_line(*equations: Equation) -> str:
    """Return the `file:line` in the user's code of the first equation that has one; else the name of our code around it."""
    for traceback in filter(None, (equation.source_info.traceback for equation in equations)):
        for frame in traceback.frames:
            if not frame.file_name.startswith(_process.library_folders):
                return f"{frame.file_name}:{frame.line_num}"
    scopes = [str(equation.source_info.name_stack).partition(OURS)[2] for equation in equations]
    return next(filter(None, scopes), "<unknown>")

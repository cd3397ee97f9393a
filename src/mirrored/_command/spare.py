"""A process that imports a worker's modules in advance, and becomes that worker at a restart.

It runs as a file, so it gives the worker's program a new module `__main__`, and runs it as `python` would.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import pkgutil
import signal
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from runpy import _run_module_as_main as run_module  # pyrefly: ignore[missing-module-attribute]


def wait(modules: Sequence[str], command: list[str]) -> None:
    """Import modules, wait for an environment, and become the worker; end when the launcher is gone."""
    is_module, path = command[0] == "-m", os.path.abspath(command[0])
    has_main = not is_module and pkgutil.get_importer(path) is not None  # a folder, or a zip file
    sys.path[: not sys.flags.safe_path] = _first_of_path(path, is_module, has_main)  # in place of this file's folder
    for module in modules:
        # `mirrored` itself loads nothing before the first use of a public name.
        importlib.import_module("mirrored._public" if module == "mirrored" else module)
    os.write(0, b"+")
    turn = sys.stdin.buffer.readline()
    if not turn:
        os.killpg(0, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(json.loads(turn))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    main = types.ModuleType("__main__")  # kept alive for threads and atexit functions
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"], sys.argv, sys.orig_argv = main, command, [sys.executable, "-u", *command]
    if is_module:
        sys.argv = ["-m", *command[2:]]
        run_module(command[1])  # the function that `python` itself calls
    elif has_main:
        run_module("__main__", alter_argv=False)
    else:
        _run_file(path, main)


def _first_of_path(path: str, is_module: bool, has_main: bool) -> list[str]:
    """Return what `python` puts before the rest of `sys.path`."""
    if has_main:
        return [path]
    if sys.flags.safe_path:
        return []
    return [os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))]


def _run_file(path: str, main: types.ModuleType) -> None:
    main.__file__ = path
    if path.endswith(".pyc"):
        main.__loader__ = compiled = SourcelessFileLoader("__main__", path)
        code = compiled.get_code("__main__")
        assert code is not None
    else:
        main.__loader__ = source = SourceFileLoader("__main__", path)
        code = source.source_to_code(source.get_data(path), path)
    exec(code, vars(main))  # noqa: S102


if __name__ == "__main__":
    wait(sys.argv[1].split(","), sys.argv[2:])

"""The package's files as trees: read when a test first asks, and once for all tests of a process."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import mirrored as mr

PACKAGE = Path(mr.__file__).parent
#: `_program.proof`: its file.
PATHS = {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: parsed(path) for name, path in PATHS.items()}


@functools.cache
def nodes(tree: ast.AST) -> dict[type, list[ast.AST]]:
    """Return the nodes of a tree by their class, each list in the order of `ast.walk`."""
    found = defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return found


def each(*kinds: type) -> list[tuple[str, ast.AST]]:
    """Return the nodes of some classes in all files, and before each the name of its file."""
    return [(name, node) for name, tree in trees().items() for kind in kinds for node in nodes(tree)[kind]]

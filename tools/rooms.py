"""Where is what? Print the modules of `src/mirrored` with their first sentences, by wings.

`python tools/rooms.py` prints all of them. `python tools/rooms.py donat` prints those that have the word in their path or
docstring, or in the name or docstring of a definition, with these definitions.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "mirrored"


def summary(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def rooms(word: str = "") -> Iterator[str]:
    """Yield the lines of the map: each module, below it the definitions that a word finds."""
    word = word.lower()
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent.parts, path.stem)):
        text = path.read_text()
        name = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
        if word not in f"{name} {text}".lower():
            continue
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)] if word else []
        named = [node for node in nodes if word in f"{node.name} {ast.get_docstring(node)}".lower()]
        found = [f"    {node.name}: {summary(node)}" for node in named]
        if found or word in f"{name} {ast.get_docstring(tree)}".lower():
            yield f"{name}: {summary(tree)}"
            yield from found


if __name__ == "__main__":
    print("\n".join(rooms(*sys.argv[1:2])) or f"No module, docstring or definition has {sys.argv[1]!r}.")

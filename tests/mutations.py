"""Damage the lines of the source that a change has touched: `make mutations`. A survivor is a line that no test reads.

A damage that changes nothing a user could see survives too: the list is to be read, not to be empty.

Usage: python tests/mutations.py [--since REVISION] [--jobs N]
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mutants import SOURCE, TESTS, Mutant, missed

_PAIRS = ((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or))
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    **{one: other for pair in _PAIRS for one, other in (pair, pair[::-1])},
}  # fmt: skip


def mutations(text: str, lines: set[int]) -> Iterator[tuple[int, str]]:
    """Yield damages to these lines of a source, the first being 1: the line, and the whole damaged source."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _without_annotations(tree):
        if getattr(node, "lineno", 0) not in lines:
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for new in _replacements(node):
            yield node.lineno, (text.encode()[:start] + new.encode() + text.encode()[end:]).decode()


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what is executed with an effect: no annotations, no texts of messages."""
    yield node
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if name in ("annotation", "returns") or isinstance(node, ast.JoinedStr):
            continue
        for child in children:
            if isinstance(child, ast.AST):
                yield from _without_annotations(child)


def _replacements(node: ast.AST) -> Iterator[str]:
    """Yield what may stand in the place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _with_operator(node, "ops", [_SWAPPED[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _SWAPPED:
        yield _with_operator(node, "op", _SWAPPED[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(node.body)})"
        yield f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Raise | ast.Delete | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None"


def _with_operator(node: ast.expr, field: str, operator: object) -> str:
    changed = ast.parse(ast.unparse(node), mode="eval").body
    setattr(changed, field, operator)
    return f"({ast.unparse(changed)})"


def touched(revision: str) -> dict[str, set[int]]:
    """Return the lines of each source file that differ from a revision."""
    command = ["git", "diff", "-U0", "--no-color", "--relative", revision, "--", "."]
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(line.removeprefix("+++ b/"), set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines.update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return {file: lines for file, lines in found.items() if file.endswith(".py")}


def mirror_of(file: str) -> str:
    """Return the tests that mirror a source file, or those of its wing."""
    own = Path("tests", Path(file).parent, f"test_{Path(file).stem.strip('_')}.py")
    wing = Path("tests", Path(file).parts[0])
    return next((str(path) for path in (own, wing) if (TESTS.parent / path).exists()), "tests/test_public.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default="HEAD", help="the revision to compare the working tree with")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = []
    for file, lines in touched(options.since).items():
        text = (SOURCE / file).read_text()
        damages = mutations(text, lines)
        chosen += [Mutant(file, text, damaged, mirror_of(file), f"line {line}") for line, damaged in damages]
    print(f"{len(chosen)} damages", flush=True)
    for mutant, what in missed(chosen, options.jobs):
        changes = zip(mutant.old.splitlines(), mutant.new.splitlines(), strict=False)
        before, after = next((old, new) for old, new in changes if old != new)
        print(f"{mutant.file}, {mutant.where}: {what}\n  - {before.strip()}\n  + {after.strip()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

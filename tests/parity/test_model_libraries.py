"""The examples of Flax NNX, Linen and Equinox are their twins for one device with five lines changed, and learn the same.

So does a plain tree in a variable. The models page shows them whole, with what differs marked.
"""

import difflib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parameters import nightly

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LIBRARIES = ["nnx", "linen", "equinox"]
TABS = {"Flax NNX": "nnx", "Flax Linen": "linen", "Equinox": "equinox", "Plain tree": "tree"}
PAGE = (EXAMPLES.parent / "docs" / "model-libraries.md").read_text()


def paths(library: str) -> tuple[Path, Path]:
    return EXAMPLES / f"{library}_digits.py", EXAMPLES / "single_device" / f"{library}_digits.py"


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_example_is_its_single_device_twin_with_five_lines_changed(library: str) -> None:
    ours, alone = (path.read_text().splitlines() for path in paths(library))
    bodies = [lines[lines.index('"""', 1) + 1 :] for lines in (alone, ours)]
    new = [line[2:] for line in difflib.ndiff(*bodies) if line.startswith("+ ")]
    assert len([line for line in new if line.strip() and line != "import mirrored as mr"]) == 5


def formatted(path: Path) -> list[str]:
    """Return a program without its docstring, in lines as wide as those of a page."""
    body = path.read_text().split('"""\n\n', 1)[1]
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "88", "-"]
    return subprocess.run(command, input=body, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_models_page_shows_the_whole_examples_and_marks_the_lines_that_differ() -> None:
    tab = r":::\{tab-item\} ([^\n]+)\n\n```\{code-block\} python\n:emphasize-lines: ([-\d, ]+)\n\n(.*?)\n```"
    shown = {TABS[name]: (code.splitlines(), marked) for name, marked, code in re.findall(tab, PAGE, re.DOTALL)}
    assert set(shown) == set(TABS.values()) == {path.stem.removesuffix("_digits") for path in EXAMPLES.glob("single_device/*.py")}
    for library, (code, marked) in shown.items():
        ours, alone = map(formatted, paths(library))
        assert code == ours, library
        steps = difflib.SequenceMatcher(None, alone, ours, autojunk=False).get_opcodes()
        changed = {i + 1 for tag, *_, start, end in steps if tag != "equal" for i in range(start, end) if ours[i]}
        spans = [[int(end) for end in span.split("-")] for span in marked.split(", ")]
        assert {line for span in spans for line in range(span[0], span[-1] + 1)} == changed, library


@pytest.mark.slow
@pytest.mark.parametrize("library", ["nnx", *nightly(*(name for name in TABS.values() if name != "nnx"))])
def test_an_example_learns_what_its_twin_learns(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for path in paths(library):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        said.append(capsys.readouterr().out.split("\n")[-2])
    assert said[0] == said[1] and "of 360 held-out images right" in said[0]

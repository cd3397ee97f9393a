"""The examples of Flax NNX, Linen and Equinox are their twins for one device with five lines changed, and learn the same."""

import difflib
import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LIBRARIES = ["nnx", "linen", "equinox"]


def paths(library: str) -> tuple[Path, Path]:
    return EXAMPLES / f"{library}_digits.py", EXAMPLES / "single_device" / f"{library}_digits.py"


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_example_is_its_single_device_twin_with_five_lines_changed(library: str) -> None:
    ours, alone = (path.read_text().splitlines() for path in paths(library))
    bodies = [lines[lines.index('"""', 1) + 1 :] for lines in (alone, ours)]
    new = [line[2:] for line in difflib.ndiff(*bodies) if line.startswith("+ ")]
    assert len([line for line in new if line.strip() and line != "import mirrored as mr"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_example_learns_what_its_twin_learns(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for path in paths(library):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        said.append(capsys.readouterr().out.split("\n")[-2])
    assert said[0] == said[1] and "of 360 held-out images right" in said[0]

"""The pages as they are built: no path of the machine, whole sentences, a search that finds the user's pages first."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-b",
        "html",
        "-d",
        str(folder / "trees"),
        "docs",
        str(folder / "html"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    return folder / "html"


def test_no_page_has_a_path_of_the_machine_that_built_it(built: Path) -> None:
    pages = [*built.rglob("*.html"), *built.rglob("*.md.txt"), built / "searchindex.js"]
    assert len(pages) > 120
    known = {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix} - {"/usr"}
    assert [(page.name, path) for page in pages for path in known if path in page.read_text()] == []

"""The pages as they are built: no path of the machine, whole sentences, a search that finds the user's pages first."""

import fcntl
import html
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mirrored as mr
from mirrored import testing

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pages once, whichever of pytest's processes needs them first."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    pages, trees = folder / "pages", folder / "trees"
    with (folder / "pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (pages / "searchindex.js").exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-d", trees, "docs", pages]
            subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    return pages


def words(page: Path) -> str:
    """Return what a reader sees of a page, on one line."""
    return plain(html.unescape(re.sub(r"<[^>]+>", "", page.read_text())))


def plain(text: str) -> str:
    """Return a text on one line, without marks of code, and with the apostrophe of typewriters."""
    return " ".join(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").replace("`", "").split())


def test_no_page_has_a_path_of_the_machine_that_built_it(built: Path) -> None:
    pages = [*built.rglob("*.html"), *built.rglob("*.md.txt"), built / "searchindex.js"]
    assert len(pages) > 120
    known = {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix} - {"/usr"}
    assert [(page.name, path) for page in pages for path in known if path in page.read_text()] == []


def test_the_first_sentence_of_each_attribute_is_whole(built: Path) -> None:
    """Napoleon takes what stands before a colon for a type."""
    text = " ".join(map(words, built.glob("api/*.html")))
    things = [getattr(owner, name) for owner in (mr, mr.data, testing) for name in dir(owner)]
    properties = {
        f"{cls.__name__}.{name}": inspect.getdoc(thing).split("\n\n")[0]
        for cls in things
        if isinstance(cls, type)
        for name, thing in vars(cls).items()
        if isinstance(thing, property) and not name.startswith("_") and thing.__doc__
    }
    with_colon = {name: plain(sentence) for name, sentence in properties.items() if ": " in sentence}
    assert {"Variable.value", "VariableTree.value", "Optimizer.state", "Strategy.is_chief"} <= set(with_colon)
    assert [name for name, sentence in with_colon.items() if sentence not in text] == []


def test_each_public_name_is_a_link(built: Path) -> None:
    page = (built / "api.html").read_text()
    links = set(re.findall(r'<a class="reference internal" href="api/\w+\.html#mirrored\.([\w.]+)"', page))
    errors = {name for name in mr.__all__ if inspect.isclass(getattr(mr, name)) and issubclass(getattr(mr, name), Exception)}
    assert errors < links and {"Variable", "losses.weighted_mean", "data.NumpyDataset"} <= links
    assert set(re.findall(r"(?m)py:obj\}`[^`]*?mirrored\.([\w.]+)>?`", (ROOT / "docs" / "api.md").read_text())) == links


def test_a_message_is_one_line_that_the_browser_wraps(built: Path) -> None:
    page = (built / "troubleshooting.html").read_text()
    messages = [html.unescape(re.sub("<[^>]+>", "", text)) for text in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    messages = [message.rstrip("\n") for message in messages if message.lstrip().startswith("mirrored.")]
    assert len(messages) > 30
    broken = [message for message in messages if re.search(r"\n\S", message) and not re.search(r"\n ", message)]
    assert broken == [] and max(len(message.split("\n")[0]) for message in messages) > 300

"""The pages hang together: no link is broken, each page is in the contents, names on them exist, and they stay short."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
from source import each, nodes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("benchmarks/*.md")])


def _prose(page: Path) -> str:
    return re.sub(r"```(?!\{toctree|\{grid|\{tab).*?```", "", page.read_text(), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them, and those that it names itself."""
    text = _prose(page)
    headings = [re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)]
    return {*headings, *re.findall(r"^\(([\w-]+)\)=$", text, re.M)}


def _broken(page: Path) -> list[str]:
    found = []
    for target in re.findall(r"(?<!`)\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            found.append(target)
    for target in re.findall(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`", _prose(page)):
        if not (page.parent / f"{target}.md").exists():
            found.append(target)
    return found


def test_no_link_is_broken() -> None:
    broken = {str(page.relative_to(ROOT)): links for page in PAGES if (links := _broken(page))}
    assert broken == {}


def _contents() -> set[Path]:
    """Return the pages that the lists of contents name."""
    named = {DOCS / "index.md"}
    for page in DOCS.glob("**/*.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            entries = [re.sub(r".*<(.+)>", r"\1", line) for line in block.splitlines() if line and not line.startswith(":")]
            named |= {page.parent / f"{entry}.md" for entry in entries}
    return {page.resolve() for page in named}


def test_each_page_is_in_the_contents() -> None:
    assert _contents() == {page.resolve() for page in DOCS.glob("**/*.md")}


def test_the_readme_is_read_in_thirty_seconds() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_code_fits_into_a_page() -> None:
    """Formatted as Black does, so that no block needs a scroll bar; errors and commands are broken by hand."""
    wide = []
    for page in PAGES:
        languages = r"```(?:\{code-block\} )?(?:python|py|pycon|sh)\b[^\n]*\n(.*?)```"
        for block in re.findall(languages, page.read_text(), re.DOTALL):
            wide += [(page.name, line) for line in block.splitlines() if len(line) > 88]
    assert wide == []


def test_rows_of_tables_are_short() -> None:
    """What needs more words is a paragraph, a list or a heading; the design notes may have a long reason in a row."""
    pages = [
        page for page in PAGES if page.parent.name not in ("design", "benchmarks") and page.name not in ("LOG.md", "CHANGELOG.md")
    ]
    rows = [(page.name, line) for page in pages for line in page.read_text().splitlines() if line.startswith("|")]
    assert [(page, row) for page, row in rows if len(row) > 260] == []


#: On design pages, of JAX, the system, or formulas.
OF_OTHERS = {
    "K_d", "digitize", "missed_heartbeat_callback", "num_carry", "num_consts", "pbroadcast_dynamic", "precv", "shm_open",
}  # fmt: skip
#: Of text in code quotes: a public name, an attribute of a class.
_PUBLIC, _ATTRIBUTE = r"(?<![\w./])(?:mr|mirrored)((?:\.[A-Za-z]\w*)+)", r"(?<![\w./])([A-Z]\w*)\.(\w+)"


@functools.cache
def _classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return for each class of the source its attributes, as its body and methods name them, and its bases."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for _, node in each(ast.ClassDef):
        names, bases = found.setdefault(node.name, (set(), set()))
        inner = nodes(node)
        names |= {node.name for node in inner[ast.FunctionDef]}
        names |= {node.id for node in inner[ast.Name]}
        names |= {node.attr for node in inner[ast.Attribute]}
        bases |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return found


@functools.cache
def _words() -> set[str]:
    """Return all words of the source and of the tests, but for this file's."""
    files = [*ROOT.glob("src/**/*.py"), *(path for path in ROOT.glob("tests/**/*.py") if path.name != "test_pages.py")]
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}


def _has(name: str, attribute: str) -> bool:
    """Tell whether a class has an attribute; one with a base that is not ours may have any."""
    names, bases = _classes()[name]
    return attribute in names or any(base not in _classes() or _has(base, attribute) for base in bases)


def _is_public(path: str) -> bool:
    value: object = importlib.import_module("mirrored")
    for name in path.removeprefix(".").split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def _missing(text: str, is_design: bool) -> list[str]:
    """Return the names in code quotes that do not exist: public ones, attributes of our classes, on a design page others too."""
    found = []
    for quoted in re.findall(r"`([^`]+)`", re.sub(r"(?ms)^ *(```|~~~).*?^ *\1", "", text)):
        found += [f"mr{name}" for name in re.findall(_PUBLIC, quoted) if not _is_public(name)]
        found += [f"{name}.{it}" for name, it in re.findall(_ATTRIBUTE, quoted) if name in _classes() and not _has(name, it)]
        if is_design and re.fullmatch(r"[A-Za-z_]\w+", quoted) and quoted not in _words() and quoted not in OF_OTHERS:
            found.append(quoted)
    return found


def test_names_on_the_pages_exist() -> None:
    """Paths are tested with the house. The changelog names what has gone."""
    importlib.import_module("mirrored.testing")
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    missing = {str(page.relative_to(ROOT)): _missing(page.read_text(), page.parent.name == "design") for page in pages}
    assert {page: names for page, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`mr.losses.as_share(x)`, `mr.gone`, `mr.losses.gone`, `examples/mr.gone`", ["mr.gone", "mr.losses.gone"]),
        ("`Bindings.write`, `State.came_back`, `Optimizer.apply_gradients(...)`", ["State.came_back"]),
        ("`prove`, `_no_such_name`, `PASSES`, `NO_LIST`, `no` `nosuch`", ["_no_such_name", "NO_LIST", "nosuch"]),
        ("```py\n`mr.gone`\n```\n`numpy`, `x`, `jax.no_such`", []),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, missing: list[str]) -> None:
    assert _missing(text, is_design=True) == missing


#: A newcomer reads these before a first change. Who adds words takes as many out.
MOST_WORDS = {"docs/design/house.md": 2500, "docs/design/": 18_000, "docs/LOG.md": 4000, "CHANGELOG.md": 1500}


def _num_words(text: str) -> int:
    """Count words with a letter or digit, without code."""
    return sum(re.search(r"\w", word) is not None for word in re.sub(r"(?s)```.*?```", "", text).split())


def test_what_is_read_before_a_change_stays_short() -> None:
    """Of the changelog the newest release counts, and the design pages count together."""
    texts = {name: (ROOT / name).read_text() for name in MOST_WORDS if not name.endswith("/")}
    texts["CHANGELOG.md"] = texts["CHANGELOG.md"].split("\n## ")[1]
    texts["docs/design/"] = "\n".join(page.read_text() for page in (DOCS / "design").glob("*.md"))
    words = {name: _num_words(text) for name, text in texts.items()}
    assert {name: count for name, count in words.items() if count > MOST_WORDS[name]} == {}

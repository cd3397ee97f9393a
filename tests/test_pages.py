"""The pages hang together: no link is broken, each page is in the contents, and a search finds what people look for."""

import re
from pathlib import Path

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


#: A newcomer reads these before a first change. Who adds words takes as many out.
MOST_WORDS = {"docs/design/house.md": 2500, "docs/LOG.md": 4000, "CHANGELOG.md": 1500}


def test_what_is_read_before_a_change_stays_short() -> None:
    """Words with a letter or digit, without code; of the changelog those of the newest release."""
    texts = {name: re.sub(r"(?s)```.*?```", "", (ROOT / name).read_text()) for name in MOST_WORDS}
    texts["CHANGELOG.md"] = texts["CHANGELOG.md"].split("\n## ")[1]
    words = {name: sum(re.search(r"\w", word) is not None for word in text.split()) for name, text in texts.items()}
    assert {name: count for name, count in words.items() if count > MOST_WORDS[name]} == {}

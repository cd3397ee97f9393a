"""Docstrings of attributes are prose; napoleon takes one with a colon for a type."""

from sphinx.application import Sphinx


def _begin_with_an_empty_comment(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # napoleon looks for a type in the first line only


def setup(app: Sphinx) -> dict[str, bool]:
    """Come before napoleon, whose priority is 500."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _begin_with_an_empty_comment, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

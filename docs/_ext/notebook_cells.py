"""The directive `{notebook} FILE`: a notebook's cells and outputs, as kept."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_TEXT = "{code-block} text\n:class: cell-text\n"


def as_markdown(book: dict[str, Any]) -> str:
    """Write a notebook as MyST Markdown, without its title: pages have their own."""
    parts = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts += [_block("python", source), *map(_output, cell["outputs"])]
        else:
            parts.append(
                source.partition("\n")[2] if source.startswith("# ") else source
            )
    return "\n\n".join(parts)


def _block(kind: str, text: str) -> str:
    return f"`````{kind}\n{text.rstrip()}\n`````"


def _output(output: dict[str, Any]) -> str:
    """Write one output: as HTML where there is some, as Jupyter does, else as text."""
    if output["output_type"] == "error":
        return _block(_TEXT, f"{output['ename']}: {output['evalue']}")
    if output["output_type"] == "stream":
        return _block(_TEXT, "".join(output["text"]))
    data = {kind: "".join(lines) for kind, lines in output["data"].items()}
    if "text/html" in data:
        return _block(
            "{raw} html", f'<div class="cell-output">{data["text/html"]}</div>'
        )
    return _block(_TEXT, data["text/plain"])


class Notebook(SphinxDirective):
    """Show a notebook; the file is named from the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what the page shows."""
        _, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(path)
        return self.parse_text_to_nodes(
            as_markdown(json.loads(Path(path).read_text(encoding="utf-8")))
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("notebook", Notebook)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

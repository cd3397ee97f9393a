"""Messages of the library on a page: one line, which the browser wraps at any width."""

from docutils import nodes
from sphinx.application import Sphinx


def joined(message: str) -> str:
    """Join the lines of a message; a line that begins with a blank is one of its own.

    >>> joined("mirrored.Error: a\\nb. Write\\n    x = 1\\nor c\\nd")
    'mirrored.Error: a b. Write\\n    x = 1\\nor c d'
    """
    lines = message.split("\n")[:1]
    for line in message.split("\n")[1:]:
        if line.startswith(" ") or lines[-1].startswith(" "):
            lines.append(line)
        else:
            lines[-1] += f" {line}"
    return "\n".join(lines)


def _join(app: Sphinx, document: nodes.document) -> None:
    for block in document.findall(nodes.literal_block):
        text = block.astext()
        if block.get("language") == "text" and text.startswith("mirrored."):
            block.rawsource, block[:] = joined(text), [nodes.Text(joined(text))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Join them when a page has been read."""
    app.connect("doctree-read", _join)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

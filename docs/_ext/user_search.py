"""What the search finds: pages for users, without the notes of developers."""

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

#: Names of pages, or of folders with a `/` at the end.
_NOT_FOR_USERS = ("design/", "LOG", "releasing", "contributing")


def _leave_out(app: Sphinx, env: BuildEnvironment) -> None:
    """Mark pages as with `:no-search:` at their top, which GitHub would show."""
    for page in env.found_docs:
        if page.startswith(_NOT_FOR_USERS):
            env.metadata[page]["no-search"] = ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of it."""
    app.connect("env-updated", _leave_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

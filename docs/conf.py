"""How the documentation is built: `make docs`, result in out/docs."""

import sys
from pathlib import Path

import mirrored

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "mirrored"
author = "the mirrored developers"
release = mirrored.__version__
extensions = [
    "myst_parser",
    "attribute_docstrings",
    "messages",
    "notebook_cells",
    "user_search",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "search.js")
html_title = "mirrored"
html_show_copyright = False
copybutton_prompt_text = ">>> "
copybutton_exclude = ".linenos, .gp, .go"
exclude_patterns = ["_build", "_ext"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "fieldlist"]
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
suppress_warnings = ["myst.xref_missing"]  # links from the design notes to source files

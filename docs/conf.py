"""How the documentation is built: `make check`, result in out/docs."""

import mirrored

project = "mirrored"
author = "the mirrored developers"
release = mirrored.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["fieldlist"]
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
suppress_warnings = ["myst.xref_missing"]  # links from the design notes to source files

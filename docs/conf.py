"""Sphinx configuration. Build with ``sphinx-build -W -b html docs docs/_build/html``."""

from __future__ import annotations

from aiosync._version import __version__

project = "aiosync"
author = "aiosync contributors"
copyright = "2026, aiosync contributors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"aiosync {release}"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_class_signature = "separated"
autodoc_default_options = {
    "exclude-members": "__init__, __new__, __reduce__, __weakref__",
    "members": True,
    "show-inheritance": True,
}
autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autosummary_generate = False

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Cancellation", "Ownership", "Threads", "Ownership / Threads"]
napoleon_use_ivar = True

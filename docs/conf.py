"""Sphinx configuration. Build with ``sphinx-build -W -b html docs docs/_build/html``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils.nodes import Element, paragraph
from sphinx.builders.text import TextBuilder
from sphinx.ext.viewcode import viewcode_anchor
from sphinx.writers.text import TextTranslator

import aiosync
from aiosync._version import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

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
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"aiosync {release}"
pygments_dark_style = "github-dark"  # furo's own underlines each module
# What a program printed is not for copying.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_class_signature = "separated"
autodoc_default_options = {
    "exclude-members": "__init__, __new__, __reduce__, __weakref__",
    "members": True,
}
autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autosummary_generate = False

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Cancellation", "Ownership", "Threads", "Ownership / Threads"]
napoleon_use_ivar = True


def _text(app: Sphinx, name: str) -> str:
    """A page as Markdown: its source, or, where that only names docstrings, what came of them."""
    path = Path(app.env.doc2path(name))
    source = path.read_text()
    if "{eval-rst}" in source:
        doctree, builder = app.env.get_doctree(name), TextBuilder(app, app.env)
        builder.secnumbers = {}
        for anchor in list(doctree.findall(viewcode_anchor)):
            anchor.parent.remove(anchor)
        visitor = TextTranslator(doctree, builder)
        doctree.walkabout(visitor)
        return visitor.body

    def included(match: re.Match[str]) -> str:
        return f"```{match[2]}\n{(path.parent / match[1]).read_text()}```\n"

    include = r"^```\{literalinclude\} (\S+)\n:language: (\S+)\n```\n"
    source = re.sub(include, included, source, flags=re.MULTILINE)
    source = re.sub(r"^!.*\{\.only-dark\}\n", "", source, flags=re.MULTILINE)
    return re.sub(r"^!\[(.*)\]\(.*\)\{\.only-light\}", r"(Picture: \1)", source, flags=re.MULTILINE)


def _listed(app: Sphinx, name: str, level: int = 1) -> Iterator[str]:
    """The lines of llms.txt for a page and what is below it, in the order of the side bar."""
    first = " ".join(node.astext() for node in app.env.get_doctree(name).findall(paragraph))
    says = re.split(r"(?<=\.) ", " ".join(first.split()), maxsplit=1)[0]
    title = app.env.titles[name].astext()
    below = app.env.toctree_includes.get(name, [])
    if below:
        yield f"\n{'#' * min(level, 2)} {title}\n"
    yield f"> {says}\n" if level == 1 else f"- [{title}]({name}.md): {says}"
    for child in sorted(below, key=lambda child: child in app.env.toctree_includes):
        yield from _listed(app, child, level + 1)


def _write_markdown(app: Sphinx, exception: Exception | None) -> None:
    """Put each page's Markdown beside its HTML, and a list of them all into llms.txt."""
    if exception is None and app.builder.name == "html":
        for name in app.env.found_docs:
            path = app.outdir / f"{name}.md"
            path.write_text(_text(app, name))
        lines = "\n".join(_listed(app, app.config.root_doc))
        (app.outdir / "llms.txt").write_text(lines.lstrip() + "\n")


def _find_home(app: Sphinx, env: Any, node: Element, inside: Element) -> Element | None:
    """Have a link to ``aiosync.Name`` lead to where the module is described that has the name."""
    name, _, member = node.get("reftarget", "").removeprefix("aiosync.").partition(".")
    home = getattr(getattr(aiosync, name, None), "__module__", None)
    if home is None or node.get("refdomain") != "py":
        return None
    target = f"{home}.{name}{'.' * bool(member)}{member}"
    domain = env.get_domain("py")
    kind, page = node["reftype"], node["refdoc"]
    return domain.resolve_xref(env, page, app.builder, kind, target, node, inside)


def setup(app: Sphinx) -> dict[str, Any]:
    """Have Sphinx call what is above."""
    app.connect("build-finished", _write_markdown)
    app.connect("missing-reference", _find_home)
    return {"parallel_read_safe": True}

"""Sphinx configuration. Build with ``sphinx-build -W -b html docs docs/_build/html``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils.nodes import Element, paragraph
from sphinx.addnodes import desc, desc_signature
from sphinx.builders.text import TextBuilder
from sphinx.ext.viewcode import viewcode_anchor
from sphinx.writers.text import TextTranslator

import aiosync
import aiosync.sync
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

autodoc_default_options = {
    "exclude-members": "__init__, __new__, __reduce__, __weakref__",
    "members": True,
}
autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autosummary_generate = False

# A long signature has a line for each argument, and the bar of a page has whole names.
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

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


def _homes(node: Element) -> Iterator[str]:
    """The names under which the target of a link may be described, if not under its own."""
    target = node.get("reftarget", "").removeprefix("aiosync.")
    name, _, member = target.partition(".")
    home = getattr(getattr(aiosync, name, None), "__module__", None)
    if home is not None:
        yield f"{home}.{name}{'.' * bool(member)}{member}"
    if name == "Dtypes":
        yield "aiosync.tensors.Dtypes"
    # A class's docstring may name a member that a base class describes.
    owner = getattr(sys.modules.get(node.get("py:module")), node.get("py:class") or "", object)
    for base in owner.__mro__[1:]:
        for module in ("aiosync", "aiosync.sync", "aiosync.legacy", base.__module__):
            yield f"{module}.{base.__name__}.{target}"


def _find_home(app: Sphinx, env: Any, node: Element, inside: Element) -> Element | None:
    """Have a link lead to where its target is described."""
    if node.get("refdomain") != "py":
        return None
    domain, kind, page = env.get_domain("py"), node["reftype"], node["refdoc"]
    found = (
        domain.resolve_xref(env, page, app.builder, kind, home, node, inside)
        for home in _homes(node)
        # To resolve a name that nothing has takes a look at each object.
        if home in domain.objects
    )
    return next((each for each in found if each is not None), None)


# The members of a scheme that a reader needs first, in this order.
FIRST = (
    *("init_on_sender", "init_on_receiver", "connect", "send", "send_nowait", "send_async"),
    *("wait_async", "receive", "pull", "wait_for_version", "wait_staged", "wait_lag_below"),
    *("ready", "reading", "guarded", "last_read", "span", "staleness", "apply_pending"),
    *("version", "epoch", "lag", "worker_versions", "model", "stats", "aclose", "shutdown"),
)

# Classes that two pages describe, and the place that signatures lead to.
DESCRIBED_TWICE = {
    "TLS": "~aiosync.transports.credentials.TLS",
    "WeightStrategy": "~aiosync.strategy.WeightStrategy",
}

# Stands for a colon in the first line of a property, before which napoleon would see a type.
NO_TYPE = "\0 "


def _is_scheme(what: object) -> bool:
    name = getattr(what, "__name__", "")
    homes = (getattr(module, name, None) for module in (aiosync, aiosync.sync))
    return name.endswith("Scheme") and what in homes


def _options(cls: type) -> dict[str, list[str]]:
    """The lines of a class's own docstring on each of its options."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    found = re.search(r"^Args:\n((?: .*\n?)+)", text, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\w)", found[1] if found else "", flags=re.MULTILINE)[1:]
    named = (entry.partition(": ") for entry in entries)
    return {name: says.splitlines() for name, _, says in named if not says.startswith("As for")}


def _show_options(
    app: Sphinx, what: str, name: str, cls: Any, options: Any, lines: list[str]
) -> None:
    """Have a scheme's page say what each option is, also of those that all schemes have."""
    if what != "class" or not _is_scheme(cls):
        return
    known: dict[str, list[str]] = {}
    for base in reversed((*cls.__mro__, *getattr(aiosync, cls.__name__).__mro__)):
        known |= _options(base)
    text = re.sub(r"^Args:\n(?:(?: .*)?\n)+", "", "\n".join(lines), flags=re.MULTILINE)
    before, raises, after = text.partition("Raises:\n")
    lines[:] = [*before.rstrip().splitlines(), "", "Args:"]
    for option in inspect.signature(cls).parameters:
        first, *more = known[option]
        lines += [f"    {option}: {first}", *more]
    lines += ["", *(raises + after).splitlines()]


def _show_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, args: str | None, returns: str
) -> tuple[str, str] | None:
    """Show the constructor of schemes; of most other classes users make no objects."""
    if args is None or what not in ("class", "exception"):
        return None
    if not _is_scheme(obj):
        return "", ""
    return re.sub("|".join(DESCRIBED_TWICE), lambda found: DESCRIBED_TWICE[found[0]], args), returns


def _link(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the path of a page in a docstring into a link, and correct links of blocking twins."""

    def linked(match: re.Match[str]) -> str:
        return f":doc:`/{match[1]}`" if match[1] in app.env.found_docs else match[0]

    lines[:] = [re.sub(r"``docs/([\w/-]+)\.md``", linked, line) for line in lines]
    if name.startswith("aiosync.sync."):
        # A twin has the docstring of the async method.
        lines[:] = [line.replace(":meth:`send_nowait`", ":meth:`send_async`") for line in lines]
    if what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(": ", NO_TYPE)


def _end_types(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put back the colons that napoleon must not see."""
    lines[:] = [line.replace(NO_TYPE, ": ") for line in lines]


def _sort_members(app: Sphinx, domain: str, kind: str, content: Element) -> None:
    """Put the members of a scheme that a reader needs first before the others."""
    described = content.parent
    if kind != "class" or not described[0]["fullname"].endswith("Scheme"):
        return

    def place(member: Element) -> int:
        name = next(member.findall(desc_signature))["fullname"].rpartition(".")[2]
        return FIRST.index(name) if name in FIRST else len(FIRST)

    members = [each for each in content if isinstance(each, desc)]
    # An entry of the index stands before each member.
    pairs = [(content[content.index(each) - 1], each) for each in sorted(members, key=place)]
    for each in [node for pair in pairs for node in pair]:
        content.remove(each)
        content.append(each)


def setup(app: Sphinx) -> dict[str, Any]:
    """Have Sphinx call what is above."""
    app.connect("build-finished", _write_markdown)
    app.connect("missing-reference", _find_home)
    app.connect("autodoc-process-docstring", _show_options, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _link, priority=400)
    app.connect("autodoc-process-docstring", _end_types, priority=600)
    app.connect("autodoc-process-signature", _show_signature)
    app.connect("object-description-transform", _sort_members)
    return {"parallel_read_safe": True}

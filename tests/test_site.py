"""Additions that the documentation's configuration makes to a site, here a site of small pages."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "index.md": """\
# A site

All that there is. And more.

```{toctree}
about/index
alone
```
""",
    "alone.md": """\
# Alone

It stands alone: nothing is below.

![A box](pictures/update.svg){.only-light}
![A box](pictures/update-dark.svg){.only-dark}

```python
print("copied")
```

```text
printed
```

```{literalinclude} program.py
:language: python
```
""",
    "about/index.md": """\
# About

What it is about.

```{toctree}
errors
scheme
```
""",
    "about/errors.md": """\
# Errors

```{eval-rst}
.. automodule:: aiosync.errors
```
""",
    "about/scheme.md": """\
# A scheme

What it has.

```{eval-rst}
.. autoclass:: aiosync.SharedMemWeightSyncScheme
   :inherited-members: object

.. autoclass:: aiosync.sync.SharedMemWeightSyncScheme
   :inherited-members: object

.. autoclass:: aiosync.SendHandle
```
""",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name, text in PAGES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "program.py").write_text('print("included")\n')
    (source / "pictures").symlink_to(DOCS / "pictures")
    command = ["-m", "sphinx", "-W", "-q", "-b", "html", "-c", str(DOCS), str(source), str(site)]
    subprocess.run([sys.executable, *command], check=True, stdin=subprocess.DEVNULL)
    return site


@pytest.mark.slow
def test_each_page_has_its_markdown_beside_it(site: Path) -> None:
    for name in PAGES:
        assert (site / name).exists()
        assert (site / name).with_suffix(".html").exists()
    alone = (site / "alone.md").read_text()
    assert "(Picture: A box)" in alone
    assert "only-" not in alone
    assert 'print("copied")' in alone
    assert '```python\nprint("included")\n```\n' in alone


@pytest.mark.slow
def test_a_page_of_docstrings_is_written_out(site: Path) -> None:
    text = (site / "about" / "errors.md").read_text()
    assert "eval-rst" not in text
    assert "exception aiosync.errors.PartialSyncError" in text


@pytest.mark.slow
def test_llms_txt_lists_every_page_with_a_line(site: Path) -> None:
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[:3] == ["# A site", "", "> All that there is."]
    assert "- [Alone](alone.md): It stands alone: nothing is below." in lines
    assert lines.index("## About") < lines.index("- [About](about/index.md): What it is about.")
    assert [line for line in lines if line.startswith("- [Errors](about/errors.md): ")]


@pytest.mark.slow
def test_programs_can_be_copied_and_output_cannot(site: Path) -> None:
    page = (site / "alone.html").read_text()
    assert "copybutton.js" in page
    script = (site / "_static" / "copybutton.js").read_text()
    assert "div:not(.highlight-text) > div.highlight > pre" in script


@pytest.mark.slow
@pytest.mark.parametrize("package", ["aiosync", "aiosync.sync"])
def test_a_scheme_shows_each_option_and_first_the_methods_that_one_needs(
    site: Path, package: str
) -> None:
    scheme = importlib.import_module(package).SharedMemWeightSyncScheme
    text = (site / "about" / "scheme.md").read_text()
    _, _, text = text.partition(f"class {package}.SharedMemWeightSyncScheme")
    constructor, _, below = text.partition("\n   init_on_sender(")
    for name, option in inspect.signature(scheme).parameters.items():
        assert re.search(rf"\b{name}: .+ = {re.escape(repr(option.default))}", constructor), name
        # A sentence, and not a reference to another class.
        assert re.search(rf"\*\*{name}\*\* \u2013 (?!As for )\S+ ", constructor), name
    members = re.findall(r"^   (?:async |property |abstractmethod )*(\w+)[(:]", below, re.MULTILINE)
    assert members.index("connect") < members.index("send") < members.index("abort")
    # The types of properties are those of their annotations.
    assert "Type:" not in text


@pytest.mark.slow
def test_the_bar_of_a_page_has_short_names_and_other_classes_no_constructor(site: Path) -> None:
    page = (site / "about" / "scheme.html").read_text()
    _, _, bar = page.partition('class="toc-tree"')
    assert ">init_on_sender()</span>" in bar
    assert "SharedMemWeightSyncScheme.init_on_sender()" not in bar
    text = (site / "about" / "scheme.md").read_text()
    assert re.search(r"^class aiosync\.SendHandle$", text, re.MULTILINE)


def _described() -> set[int]:
    """Return the ids of the objects in the reference; integrations have pages of their own."""
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "reference").rglob("*.md")))
    names, module = set(), ""
    for kind, name, first in re.findall(
        r"^\.\. (currentmodule|auto\w+):: (\S+)\n(?: +:(\S+):)?", pages, re.MULTILINE
    ):
        if kind == "currentmodule":
            module = name
        elif kind != "automodule":
            names.add(name if name.startswith("aiosync.") else f"{module}.{name}")
        elif first != "no-members" and ".integrations" not in name:
            names |= {f"{name}.{each}" for each in importlib.import_module(name).__all__}
    homes = (name.rpartition(".") for name in names)
    return {id(getattr(importlib.import_module(home), name)) for home, _, name in homes}


@pytest.mark.parametrize(
    "package", ["aiosync", "aiosync.schemes", "aiosync.sync", "aiosync.legacy"]
)
def test_the_reference_describes_every_public_name(package: str) -> None:
    """A public name is described under this name, or under that of the module it comes from."""
    module, described = importlib.import_module(package), _described()
    missing = {name for name in module.__all__ if id(getattr(module, name)) not in described}
    assert missing <= {"__version__"}

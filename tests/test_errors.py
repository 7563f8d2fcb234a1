"""Sections of the documentation about exceptions, and the link of each exception to its own."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import traceback
from pathlib import Path

import pytest

from aiosync import errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("errors", "errors-updates")]
SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SECTIONS = {
    match[1]: (page, match[2]) for page in PAGES for match in SECTION.finditer(page.read_text())
}
PARTS = ["What happened", "Your model", "What to do"]
CLASSES = [getattr(errors, name) for name in errors.__all__]


def made(cls: type[errors.AiosyncError]) -> errors.AiosyncError:
    keywords_only = issubclass(cls, errors.ManifestMismatch | errors.PartialSyncError)
    return cls() if keywords_only else cls("the text")


def test_each_class_has_a_section_and_each_section_a_class() -> None:
    headings = [match[1] for page in PAGES for match in SECTION.finditer(page.read_text())]
    assert sorted(headings) == sorted(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_a_section_has_three_parts_a_message_and_the_reference(name: str) -> None:
    _, text = SECTIONS[name]
    assert re.findall(r"^- \*\*(.+):\*\* \S", text, re.MULTILINE) == PARTS
    assert re.findall(r"autoexception:: aiosync\.errors\.(\w+)", text) == [name]
    assert len(re.findall(r"^```text\n(.+)\n```$", text, re.MULTILINE)) == 1


def test_messages_are_those_of_the_package() -> None:
    """Each quoted message contains three words or more of one text in the source."""
    pieces = {
        node.value.strip()
        for path in (ROOT / "aiosync").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if len(node.value.split()) > 2
    }
    invented = [
        name
        for name, (_, text) in SECTIONS.items()
        for message in re.findall(r"^```text\n(.+)\n```$", text, re.MULTILINE)
        if not any(piece in message for piece in pieces)
    ]
    assert invented == []


@pytest.mark.parametrize("cls", CLASSES, ids=errors.__all__)
def test_an_error_leads_to_its_section(cls: type[errors.AiosyncError]) -> None:
    error = made(cls)
    [note] = error.__notes__
    found = re.search(r"reference/([\w-]+)#(\w+)", note)
    assert found is not None
    page, _ = SECTIONS[cls.__name__]
    assert (page.stem, cls.__name__.lower()) == found.groups()
    assert traceback.format_exception(error)[-1].strip() == note


@pytest.mark.parametrize("cls", CLASSES, ids=errors.__all__)
def test_the_text_has_no_link_and_a_copy_has_one(cls: type[errors.AiosyncError]) -> None:
    """The text of an error has no link: texts are joined into longer ones, and sent to peers."""
    error = made(cls)
    assert "reference/" not in str(error) + repr(error)
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(same), same.__notes__) == (str(error), error.__notes__)


def test_a_class_of_somebody_else_leads_to_the_nearest_one() -> None:
    class Refused(errors.ConnectError):
        pass

    assert Refused("no").__notes__ == errors.ConnectError("no").__notes__


def test_an_error_inside_of_another_adds_no_link_to_it() -> None:
    inner = errors.ManifestMismatch(missing=["weight"])
    outer = errors.PartialSyncError(failed={0: inner}, version=1)
    assert "ManifestMismatch: the weights do not fit the target (missing: weight)" in str(outer)
    assert outer.__notes__ == errors.PartialSyncError().__notes__

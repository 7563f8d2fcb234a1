"""Statements of the pages about versions and about TorchRL."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import aiosync.sync
from aiosync.wire import WIRE_VERSION

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "topics" / "compatibility.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = [
    "torch",
    "tensordict",
    "uvloop",
    "torchrl",
    "ray",
    "ray[serve]",
    "ray[rllib]",
    "transformers",
    "verl",
    "vllm",
]


def _asked() -> dict[str, str]:
    """Return the versions that each required library may have, without the pins of the demo."""
    extras = PROJECT["optional-dependencies"]
    lines = [
        *PROJECT["dependencies"],
        *(line for name, lines in extras.items() if name != "demo" for line in lines),
    ]
    parts = [re.fullmatch(r"([\w.\[\]-]+?)((?:[<>=~!]=?[^;]*)?)(?:;.*)?", each) for each in lines]
    return {part[1]: part[2].strip() for part in parts if part is not None}


@pytest.mark.parametrize("name", NAMED)
def test_the_page_says_which_versions_are_allowed(name: str) -> None:
    spec = _asked()[name]
    assert spec
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and f"{spec}`" in line]
    assert any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", row) for row in rows), spec


def test_the_page_names_pythons_and_the_wire_format() -> None:
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"| Python | {least} or newer |" in PAGE
    listed = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if " 3." in line]
    assert all(version in PAGE for version in listed)
    assert f"today {WIRE_VERSION}." in PAGE


@pytest.mark.slow
def test_what_is_said_of_torchrl_is_so() -> None:
    """The page for users of TorchRL agrees with the TorchRL that is installed."""
    theirs = pytest.importorskip("torchrl.weight_update")
    page = (ROOT / "docs" / "coming-from" / "torchrl.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    named = {name for left, _ in rows for name in re.findall(r"\w+WeightSyncScheme", left)}
    assert len(named) >= 6
    assert [name for name in named if not hasattr(theirs, name)] == []
    mine = {name for _, right in rows for name in re.findall(r"`scheme\.(\w+)\(", right)}
    assert [name for name in mine if not hasattr(aiosync.sync.WeightSyncScheme, name)] == []
    scheme = theirs.SharedMemWeightSyncScheme
    assert "send_async" in (scheme.__doc__ or "")
    assert not hasattr(scheme, "send_async")
    assert not hasattr(scheme, "wait_async")

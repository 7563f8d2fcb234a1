"""LoRA adapters for a real engine: loaded while it generates, each under a name of its own."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    # The first test starts the engine.
    pytest.mark.timeout(400),
]


def test_each_version_generates_as_in_a_fresh_engine(adapters: dict[str, Any]) -> None:
    versions, names, tokens = zip(*adapters["versions"], strict=True)
    assert "no adapter has arrived" in adapters["early"]
    assert list(versions) == list(range(2, 23))
    assert len(set(names)) == 21
    assert list(tokens) == adapters["fresh"]
    # The adapters make a difference, each its own.
    assert len({tuple(each) for each in (adapters["plain"], adapters["first"], *tokens)}) > 15


def test_a_request_keeps_the_version_that_it_began_with(adapters: dict[str, Any]) -> None:
    assert adapters["first"] != adapters["plain"]
    assert adapters["long"][:16] == adapters["first"] == adapters["again"]
    assert len(adapters["long"]) == 400


def test_what_the_engine_refuses_changes_nothing(adapters: dict[str, Any]) -> None:
    assert "no_such_proj" in adapters["refused"]
    assert adapters["same"] is True
    assert adapters["kept"] == adapters["versions"][-1][2]


def test_old_versions_go(adapters: dict[str, Any]) -> None:
    # Two of them, and the new one.
    assert adapters["kept_files"] == 3
    assert adapters["left_files"] == 0

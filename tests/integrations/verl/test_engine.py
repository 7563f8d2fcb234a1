"""The checkpoint engine in verl's own manager and workers, and the version of verl."""

from __future__ import annotations

import importlib
import importlib.metadata
from importlib.util import find_spec
from typing import Any

import pytest

import aiosync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODULE = "aiosync.integrations.verl"


@pytest.mark.parametrize("found", ["0.8.0", "0.9.0", "0.10.0.dev0", "1.0", None])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(_: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(importlib.import_module("sys").modules, MODULE, raising=False)
    with pytest.raises(aiosync.ConfigError) as caught:
        importlib.import_module(MODULE)
    expected = found or "none"
    assert f"written for verl 0.9.1, and this environment has {expected}:" in str(caught.value)
    assert str(caught.value).endswith("install verl==0.9.1")


# The warnings are verl's own.
@pytest.mark.filterwarnings("ignore")
def test_configuration_alone_chooses_it() -> None:
    if not find_spec("verl"):
        pytest.skip("needs verl in this environment: `pip install verl==0.9.1`")
    engine = importlib.import_module(MODULE).AiosyncCheckpointEngine
    registry = importlib.import_module("verl.checkpoint_engine").CheckpointEngineRegistry
    assert registry.get("aiosync") is engine


def test_every_update_arrives_bit_for_bit(seen: dict[str, Any]) -> None:
    assert len(seen["loop"]) == 20
    assert all(all(step) for step in seen["loop"])
    assert seen["metrics"]["aiosync/members"] == 2
    assert seen["metrics"]["aiosync/nbytes"] > 2**21
    assert seen["calls"] == ["abort", "release", "restore", "resume"]


def test_every_rank_of_the_actor_gathers_all_weights(seen: dict[str, Any]) -> None:
    assert seen["gathered"] == [43, 43]


def test_a_rollout_that_fails(seen: dict[str, Any]) -> None:
    found = seen["rollout raised"]
    assert found["taken"] == ["", "RuntimeError: this model is full"]
    assert found["at"] == [True, False]
    sent, other_rank = found["sent"]
    assert "PartialSyncError: version 50 " in sent and "ApplyError: rollout rank 1 (" in sent
    assert other_rank == ""
    assert seen["after rollout raised"] == [True, True]


def test_an_actor_that_fails(seen: dict[str, Any]) -> None:
    found = seen["trainer raised"]
    assert found["sent"] == ["RuntimeError: the gather failed", ""]
    for text in found["taken"]:
        assert text.startswith("PeerClosed: actor rank 0 (")
        assert text.endswith("gave this sync up: RuntimeError: the gather failed")
    assert found["at"] == [True, True]  # on the version before
    assert seen["after trainer raised"] == [True, True]


def test_a_rollout_that_is_killed_and_replaced(seen: dict[str, Any]) -> None:
    found = seen["rollout killed"]
    assert found["taken"][0] == "" and found["taken"][1].startswith("ActorDiedError")
    assert "worker 1: PeerClosed: rollout rank 1 (" in found["sent"][0]
    assert found["at"] == [True]
    assert seen["after rollout killed"] == [True]
    assert seen["replaced"] == [True, True]


def test_an_actor_that_is_killed_and_replaced(seen: dict[str, Any]) -> None:
    found = seen["trainer killed"]
    assert all("PeerClosed: actor rank 0 (" in text for text in found["taken"])
    assert found["at"] == [True, True]
    assert seen["after trainer killed"] == [True, True]


def test_links_outlive_a_sync(seen: dict[str, Any]) -> None:
    first, last = seen["links"]
    assert len(first) == 2 and first == last


def test_a_manager_that_pauses_only_to_load(seen: dict[str, Any]) -> None:
    found = seen["staged"]
    assert found["at"] == [True, True]
    assert found["calls"] == ["abort", "release", "restore", "resume"]
    assert found["metrics"]["aiosync/members"] == 2


def test_a_transfer_that_fails_before_the_pause(seen: dict[str, Any]) -> None:
    found = seen["staged"]
    assert "the gather failed" in found["failed"]
    assert found["calls when it failed"] == []
    assert found["at when it failed"] == [True, True]
    assert found["at in the end"] == [True, True]

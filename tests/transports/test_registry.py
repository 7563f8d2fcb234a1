"""Transports by name, those that other packages bring included."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aiosync import errors, transports
from aiosync.transports import registry


def test_every_name_is_that_of_its_class() -> None:
    for name in transports.transport_names():
        assert transports.get_transport(name).capabilities.name == name


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(errors.UnknownTransportError, match="'carrier-pigeon'.*memory.*tcp"):
        transports.get_transport("carrier-pigeon")


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    transports.register_transport("mine", "aiosync.transports.memory:MemoryTransport")
    assert transports.get_transport("mine") is transports.MemoryTransport
    transports.register_transport("mine", transports.MemoryTransport)  # the same again
    with pytest.raises(errors.ConfigError, match="'mine' is registered"):
        transports.register_transport("mine", transports.MPTransport)


def test_an_installed_package_brings_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[aiosync.transports]\npigeon = pigeon:Pigeon\n")
    (tmp_path / "pigeon.py").write_text(
        "from aiosync.transports import MemoryTransport\nclass Pigeon(MemoryTransport): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "pigeon" in transports.transport_names()
    try:
        assert transports.get_transport("pigeon").__name__ == "Pigeon"
    finally:
        sys.modules.pop("pigeon", None)

"""Transports by name, those that other packages bring included."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from aiosync import errors, transports


def test_every_name_is_that_of_its_class() -> None:
    for name in transports.transport_names():
        assert transports.get_transport(name).capabilities.name == name


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(errors.UnknownTransportError, match="'carrier-pigeon'.*memory.*tcp"):
        transports.get_transport("carrier-pigeon")


class Mine(transports.MemoryTransport):
    """Stays registered: there is no way back."""

    capabilities = dataclasses.replace(transports.MemoryTransport.capabilities, name="mine")


def test_register() -> None:
    transports.register_transport("mine", f"{__name__}:Mine")
    assert transports.get_transport("mine") is Mine
    transports.register_transport("mine", Mine)  # the same again
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

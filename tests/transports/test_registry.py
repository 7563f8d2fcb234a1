"""Transports by name."""

from __future__ import annotations

import dataclasses

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

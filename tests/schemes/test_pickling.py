"""What travels when a scheme is pickled or copied, and what does not. (Options: test_options.)"""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop

NAMES = [
    f"{kind}WeightSyncScheme"
    for kind in ("No", "MultiProcess", "SharedMem", "TCP", "Distributed", "RPC")
]
every = pytest.mark.parametrize("name", NAMES)
ways = pytest.mark.parametrize("way", [copy.copy, harness.twin])


class Tagged(aiosync.TCPWeightSyncScheme):
    """A user's scheme with a name of its own."""

    def __init__(self, tag: str, **options: Any) -> None:
        super().__init__(**options)
        self.tag = tag


def is_new(scheme: Any) -> None:
    assert not (scheme.initialized_on_sender or scheme.initialized_on_receiver)
    assert not (scheme.synchronized_on_sender or scheme.synchronized_on_receiver)
    assert scheme.model is scheme.context is scheme.weights is None
    assert (scheme.version, scheme.lag, scheme.worker_versions) == (0, 0, {})
    assert (scheme.sender_transports, scheme.receiver_transport) == ({}, None)


@pytest.mark.asyncio
@every
@ways
async def test_roles_links_and_models_do_not_travel(name: str, way: Any) -> None:
    scheme = getattr(aiosync, name)()
    scheme.model_id = "critic"
    is_new(way(scheme))
    scheme.init_on_sender(model=models.linear())
    await scheme.connect()
    is_new(other := way(scheme))
    assert (type(other), other.model_id) == (type(scheme), "critic")
    assert b"Linear" not in pickle.dumps(scheme)
    other.init_on_receiver(model=models.linear())
    assert other.initialized_on_receiver
    is_new(way(other))
    await other.aclose()
    await scheme.aclose()
    again = way(scheme)  # a copy of a closed one is a new one
    again.init_on_receiver(model=models.linear())
    again.abort()


@pytest.mark.asyncio
@ways
async def test_what_a_subclass_sets_travels_from_either_end(way: Any) -> None:
    ends = harness.here(Tagged("south"), models.linear(), sender={"model": models.linear()})
    async with ends as pair:
        for scheme in pair:
            scheme.later = "set after connect()"
            is_new(other := way(scheme))
            assert (other.tag, other.later) == ("south", scheme.later)


@pytest.mark.asyncio
async def test_copies_find_the_port_and_prove_the_token() -> None:
    token = "correct horse battery staple"
    sender = aiosync.TCPWeightSyncScheme(token=token)
    assert all(token.encode() not in text for text in (pickle.dumps(sender), repr(sender).encode()))
    assert pickle.dumps(sender) != pickle.dumps(sender)  # masked anew each time
    sender.init_on_sender(model=models.linear())
    async with sender:
        await sender.connect()
        for way in (copy.copy, harness.twin):
            async with way(sender) as receiver:
                assert receiver.address == sender.address
                receiver.init_on_receiver(model=models.linear())
                await asyncio.wait_for(receiver.connect(), harness.PATIENCE)
                assert receiver.version == 1
        assert sender.refused == {}

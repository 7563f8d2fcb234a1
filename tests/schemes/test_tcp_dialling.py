"""Workers that listen, and the trainer that dials them: who takes the place of whom."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models
from tests.support.waiting import free_address

pytestmark = pytest.mark.one_loop


PATIENCE = harness.PATIENCE


def make(address: str, **options: Any) -> aiosync.TCPWeightSyncScheme:
    defaults: dict[str, Any] = {"dial": "sender", "timeout": PATIENCE}
    return aiosync.TCPWeightSyncScheme([address], **{**defaults, **options})


@pytest.mark.asyncio
async def test_a_second_trainer_is_refused_until_the_first_one_leaves() -> None:
    address = free_address()
    async with make(address) as first, make(address) as second, make(address) as receiver:
        first.init_on_sender(model=models.linear(1.0))
        receiver.init_on_receiver(model=models.linear(), worker_idx=0)
        await asyncio.gather(first.connect(), receiver.connect())
        async with make(address) as third:
            third.init_on_sender(model=models.linear())
            with pytest.raises(
                aiosync.ConnectTimeout, match=rf"another trainer has .*127.*, process {os.getpid()}"
            ):
                await third.connect(timeout=0.1)
        second.init_on_sender(model=models.linear(2.0))
        waiting = asyncio.ensure_future(second.connect())
        assert (await first.send()).acked == {0}
        assert receiver.reconnects == 0
        assert models.holds(receiver, 1.0)
        assert not waiting.done()
        await first.aclose()
        await waiting  # it went on trying
        assert models.holds(receiver, 2.0)
        assert (await second.send()).acked == {0}


@pytest.mark.asyncio
async def test_a_worker_says_why_it_let_no_trainer_in() -> None:
    address = free_address()
    async with make(address, token="one", timeout=1) as receiver:
        receiver.init_on_receiver(model=models.linear(), worker_idx=0)
        joining = asyncio.create_task(receiver.connect())
        async with make(address, token="another") as sender:
            sender.init_on_sender(model=models.linear())
            with pytest.raises(aiosync.PartialSyncError, match="tokens"):
                await sender.connect()
            with pytest.raises(aiosync.ConnectTimeout, match="last refusal: AuthError: .*token"):
                await joining


@pytest.mark.asyncio
@pytest.mark.parametrize(("dial", "role"), [("sender", "sender"), ("receiver", "receiver")])
async def test_port_0_cannot_be_dialled(dial: Any, role: str) -> None:
    async with make("tcp://127.0.0.1:0", dial=dial, timeout=2) as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        with pytest.raises(aiosync.ConfigError, match="has no port to dial"):
            await scheme.connect()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dial", "role", "says"),
    [
        ("sender", "sender", r"after 0.4 s worker 0 at.*init_on_receiver\(\) and connect\(\)"),
        ("both", "sender", "after 0.4 s the weight server at.*`aiosync serve` has to run"),
        ("receiver", "receiver", r"init_on_sender\(\) and connect\(\), or"),
        ("both", "receiver", "`aiosync serve` has to run"),
    ],
)
async def test_connect_has_its_own_timeout_and_says_what_the_other_side_has_to_do(
    dial: Any, role: str, says: str
) -> None:
    began = asyncio.get_running_loop().time()
    async with make(free_address(), dial=dial, timeout=0.1) as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        with pytest.raises(aiosync.ConnectTimeout, match=f"{says}.*the last attempt: ") as caught:
            await scheme.connect(timeout=0.4)
    assert caught.value.__cause__ is not None
    assert asyncio.get_running_loop().time() - began >= 0.35


@pytest.mark.parametrize(
    ("where", "dial", "init", "advice"),
    [
        (["tcp://a:1"], "sender", {"num_workers": 2}, "a list of addresses, one for each"),
        (["tcp://a:1", "tcp://b:1"], "sender", {"num_workers": 3}, "only 2 addresses"),
        (["tcp://a:1"], "sender", {"params_map": {1: {"a": torch.ones(1)}}}, "only 1 addresses"),
        ("tcp://a:1", "both", {"num_workers": 2}, "leave num_workers out"),
    ],
)
def test_more_workers_than_can_be_dialled_are_refused(
    where: Any, dial: Any, init: Any, advice: str
) -> None:
    sender = aiosync.TCPWeightSyncScheme(where, dial=dial)
    with pytest.raises(aiosync.ConfigError, match=f"workers are expected, but .*{advice}"):
        sender.init_on_sender(**init)
    sender.init_on_sender(num_workers=1)  # it has no role yet

"""Invalid times and versions in each call that takes one; the blocking API has the same checks."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import aiosync
from aiosync.server import WeightClient, WeightServer
from aiosync.serving import AdmissionGate
from tests.schemes._harness import PATIENCE, here
from tests.schemes._models import linear
from tests.server._tools import URL

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

NO_TIMES = [10**400, 10**5000, -(10**400), Fraction(1, 3), -1, math.nan, "x", True, 1j]
NO_VERSIONS = [10**400, 10**5000, -1, 1.5, Fraction(3, 2), math.nan, "x", True, torch.tensor(True)]


async def refused(call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(aiosync.ConfigError) as caught:
        made = call(*args, **options)
        async with asyncio.timeout(PATIENCE):
            await made
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["TCP", "SharedMem", "MultiProcess"])
async def test_calls_of_schemes(name: str) -> None:
    scheme = getattr(aiosync, f"{name}WeightSyncScheme")(timeout=PATIENCE)
    async with here(scheme, linear(), sender={"model": linear()}) as (sender, receiver):
        await sender.send()
        for version in NO_VERSIONS:
            for side in (sender, receiver):
                await refused(side.wait_for_version, version)
                await refused(side.wait_staged, version)
            await refused(receiver.pull, min_version=version)
            await refused(sender.send, max_lag=version)
        for timeout in NO_TIMES:
            for side in (sender, receiver):
                await refused(side.wait_for_version, 1, timeout=timeout)
                await refused(side.wait_lag_below, 1, timeout=timeout)
                await refused(side.ready.wait, timeout=timeout)
            await refused(receiver.receive, timeout)
            await refused(sender.send, timeout=timeout)
        for version in (0, 1, np.int64(1), torch.tensor(1)):
            assert await receiver.wait_for_version(version, timeout=np.float32(PATIENCE)) >= 1


async def test_calls_of_servers_clients_and_gates() -> None:
    gate = AdmissionGate(initial_version=1)
    async with WeightServer(URL) as server:
        client = WeightClient(server.url)
        for version in NO_VERSIONS:
            await refused(client.pull, min_version=version)
            await refused(gate.require, version)
            await refused(gate.request, min_version=version)
            await refused(AdmissionGate, initial_version=version)
        for timeout in NO_TIMES:
            await refused(client.status, timeout=timeout)
            await refused(client.pull, timeout=timeout)
            await refused(AdmissionGate, timeout=timeout)
            await refused(WeightServer, URL, handshake_timeout=timeout)
            await refused(aiosync.TCPWeightSyncScheme, reconnect=timeout)
        for version in NO_VERSIONS:
            await refused(aiosync.TCPWeightSyncScheme, first_version=version)

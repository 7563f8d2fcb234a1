"""The transport over process groups, on every loop, against every check of the published suite.

Payloads above 128 KiB go over the group, smaller ones in the control stream.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiosync.testing import CONFORMANCE_CHECKS, Check, Hooks
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from tests.conformance.test_transports import Pair, cut_stream, tcp_ends

pytestmark = pytest.mark.one_loop


@asynccontextmanager
async def pair(sender: Limits | None = None, receiver: Limits | None = None) -> AsyncIterator[Pair]:
    left, right = tcp_ends()
    async with (
        TCPTransport(left, limits=sender) as one,
        TCPTransport(right, limits=receiver) as two,
        DistributedTransport(one, rank=0) as a,
        DistributedTransport(two, rank=1) as b,
    ):
        yield a, b
    await threads_end()


async def threads_end() -> None:
    """abort() may leave a thread that meets the peer, for three seconds at most."""
    give_up = time.monotonic() + 5
    while any(thread.name.startswith("aiosync-gloo") for thread in threading.enumerate()):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.name)
@pytest.mark.asyncio
async def test_conformance(check: Check) -> None:
    hooks = Hooks(cut=cut_stream, limited=pair)
    reason = check.skip_reason(hooks, DistributedTransport.capabilities)
    if reason is not None:
        pytest.skip(reason)
    await check.run(pair, hooks=hooks)

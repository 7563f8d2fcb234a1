"""A worker's answers on a link that has ended, which its reader is about to notice."""

from __future__ import annotations

import pytest

from aiosync._tasks import TaskOwner
from aiosync.errors import AiosyncError, PeerClosed, RemoteProtocolError
from aiosync.receiver.answers import Outgoing
from aiosync.transports import MemoryTransport
from aiosync.wire import Fetch

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


@pytest.mark.parametrize("error", [PeerClosed("gone"), RemoteProtocolError("a damaged header")])
async def test_an_ended_link_loses_them(error: AiosyncError) -> None:
    async with MemoryTransport.pair() as (link, _):
        tasks = TaskOwner(lambda crash: pytest.fail(str(crash)))
        link.fail(error)
        Outgoing(link, tasks).say(Fetch(1))
        await tasks.aclose()

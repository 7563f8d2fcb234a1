"""A worker's answers on a link that has ended, which its reader is about to notice."""

from __future__ import annotations

from typing import Any

import pytest

from aiosync.errors import AiosyncError, PeerClosed, RemoteProtocolError
from aiosync.receiver.answers import Outgoing
from aiosync.transports import MemoryTransport
from aiosync.wire import Fetch

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


@pytest.mark.parametrize("error", [PeerClosed("gone"), RemoteProtocolError("a damaged header")])
async def test_an_ended_link_loses_them(error: AiosyncError) -> None:
    async with MemoryTransport.pair() as (link, _):
        link.fail(error)
        no_tasks: Any = None  # Only a busy link needs a task.
        Outgoing(link, no_tasks).say(Fetch(1))

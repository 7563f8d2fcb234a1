"""The start and the end of a weight server that do not go as planned."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from aiosync.errors import LocalProtocolError, PartialSyncError, PeerClosed
from aiosync.server import WeightServer
from tests.schemes._harness import PATIENCE, until
from tests.server._tools import URL, described, send, trainer, worker
from tests.server.test_server import SlowStore, address

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


async def test_a_start_without_a_loop_may_be_made_up_for() -> None:
    server = WeightServer(URL)
    with pytest.raises(LocalProtocolError, match="needs an asyncio event loop"):
        await asyncio.to_thread(server.start().send, None)
    async with server, trainer(server) as source:
        await send(source, 1.0)
        assert described(server)["version"] == 1


@pytest.mark.parametrize("has_stranger", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_close_that_is_cancelled_waits_for_no_disk(
    turns: int, has_stranger: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for at that turn of the loop: with a stranger, the end of a handshake."""
    slow = SlowStore(monkeypatch)
    server = WeightServer(URL, store=tmp_path)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(trainer(server, reconnect=0))
        below = await stack.enter_async_context(worker(server, reconnect=0, initial=False))
        if has_stranger:
            _, stranger = await asyncio.open_connection(*address(server))
            stack.callback(stranger.close)
        handle = source.send_nowait(source.it)
        await until(lambda: slow.versions == [1])
        closing = asyncio.ensure_future(server.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        async with asyncio.timeout(PATIENCE / 2):
            await asyncio.wait({closing})
            assert closing.cancelled()
            await server.wait_closed()
            with pytest.raises(PeerClosed):
                await below.wait_for_version(1)
            with contextlib.suppress(PartialSyncError):
                await handle
        slow.go()

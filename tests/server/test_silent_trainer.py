"""A trainer that wants the place of one that does not answer, or a server that does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiosync
from aiosync.errors import ConfigError, ConnectTimeout, PartialSyncError
from aiosync.server import WeightServer, WeightStore
from aiosync.wire import Current, Fetch, Hello, Refuse, Welcome
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import linear
from tests.server._tools import URL, answer, described, dialled, send, trainer

pytestmark = pytest.mark.asyncio

_TRAINER = """
import asyncio, sys
import aiosync
from tests.server._tools import send, trainer

async def main():
    async with trainer(sys.argv[1]) as scheme:
        await send(scheme, 1.0)
        print("sent", flush=True)
        await asyncio.sleep(600)

aiosync.run(main())
"""


@contextlib.asynccontextmanager
async def _stopped_trainer() -> AsyncIterator[tuple[WeightServer, asyncio.subprocess.Process]]:
    """A server whose trainer, in a process of its own, has sent a version and is frozen."""
    async with WeightServer(URL) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TRAINER, server.url, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert await process.stdout.readline() == b"sent\n"
            process.send_signal(signal.SIGSTOP)
            yield server, process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _refused_for_now(server: WeightServer, connecting: asyncio.Future[Any]) -> None:
    await until(lambda: "ConnectError" in server.status()["ended"] or connecting.done())


def _new_trainer(server: WeightServer) -> Any:
    scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", timeout=PATIENCE)
    scheme.it = linear()
    scheme.init_on_sender("policy", model=scheme.it)
    return scheme


async def test_a_new_trainer_waits_for_the_end_of_one_that_is_silent() -> None:
    async with _stopped_trainer() as (server, stopped), _new_trainer(server) as scheme:
        connecting = asyncio.ensure_future(scheme.connect())
        await _refused_for_now(server, connecting)
        stopped.kill()
        await connecting
        await send(scheme, 2.0)
        assert described(server)["epoch"] == scheme._clock.epoch


async def test_a_silent_trainer_is_named_when_the_time_of_the_new_one_is_up() -> None:
    async with _stopped_trainer() as (server, _), _new_trainer(server) as scheme:
        name = described(server)["trainer"]
        with pytest.raises(ConnectTimeout) as caught:
            await scheme.connect(timeout=4.0)
    text = str(caught.value)
    assert "was reached, but has not let this trainer in" in text
    assert "has to run there" not in text
    said = f"{name} is already pushing model 'policy', but nothing came from it within 1 s"
    assert text.count(said) == 1  # though it was refused more than once


async def test_a_silent_trainer_that_wakes_up_keeps_its_place() -> None:
    async with _stopped_trainer() as (server, stopped), _new_trainer(server) as scheme:
        connecting = asyncio.ensure_future(scheme.connect())
        await _refused_for_now(server, connecting)
        stopped.send_signal(signal.SIGCONT)
        with pytest.raises(PartialSyncError) as caught:
            await connecting
        assert isinstance(caught.value.failed[0], ConfigError)


async def test_a_trainer_is_asked_after_its_handshake_and_only_once_while_it_is_silent() -> None:
    async with WeightServer(URL) as server, dialled(server, "sender", epoch=5) as first:
        assert isinstance(await answer(first), Hello)
        for asked in (False, True, True):
            async with dialled(server, "sender", epoch=6) as second:
                refusal = await answer(second)
                assert isinstance(refusal, Refuse)
                assert refusal.error_type == "ConnectError"
                assert "but nothing came from it within 1 s" in refusal.error_text
            if not asked:
                await first.send(Welcome(5, 0, 0))
                model: Any = server._models["policy"]
                await until(lambda model=model: model._pulse._may_ask)  # type: ignore[misc]
        assert await answer(first) == Fetch(0)
        await first.send(Current(5, 0))
        await until(lambda: model._pulse._may_ask)
        async with dialled(server, "sender", epoch=6) as second:
            assert await answer(first) == Fetch(0)  # the second question
            await first.send(Current(5, 0))
            assert (await answer(second)).error_type == "ConfigError"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_a_question_does_not_keep_the_link_of_a_dead_host_from_being_found_dead() -> None:
    async with WeightServer(URL) as server, trainer(server):
        fd = server._models["policy"]._trainer.channel.io.read_fd  # type: ignore[union-attr]
        with socket.socket(fileno=os.dup(fd)) as sock:
            seconds = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert seconds == 60.0  # keepalive sends no probes while bytes wait to be taken


async def test_a_trainer_that_was_answered_too_late_says_that_the_server_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, save = threading.Event(), WeightStore.save

    def slow(*args: Any) -> Any:
        ready.wait(PATIENCE)
        return save(*args)

    monkeypatch.setattr(WeightStore, "save", slow)
    async with WeightServer(URL, store=tmp_path) as server:
        try:
            async with trainer(server) as first:
                first.it = linear()
                first.send_nowait(first.it)
                await until(lambda: described(server)["updates"] == 1)
            async with _new_trainer(server) as second:
                with pytest.raises(ConnectTimeout) as caught:
                    await second.connect(timeout=0.5)
        finally:
            ready.set()
        assert "was reached, but has not let this trainer in" in str(caught.value)
        assert "has to run there" not in str(caught.value)

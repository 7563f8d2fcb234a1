"""Manifests of 100,000 leaves: the event loop that reads one goes on with its other work."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from aiosync.wire import Fetch, Manifest, ManifestMessage, plan_manifest
from tests.conformance.test_transports import SUBJECTS, Subject
from tests.schemes._harness import PATIENCE

some = [each for each in SUBJECTS if each.name in ("pipe", "shm", "tcp", "tcp-tls", "distributed")]
every_transport = pytest.mark.parametrize("subject", some, ids=lambda subject: subject.name)
pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    leaves = range(100_000)
    return plan_manifest([(f"layers.{at}.weight", "float32", (4, 4), "param", ()) for at in leaves])


class Turns:
    """Durations of all turns of the event loop, in seconds of this thread's CPU time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        self.seconds.append(now - self._last)
        self._last = now
        self._handle = self._loop.call_soon(self._turn)

    def end(self) -> float:
        """End the measurement; return the longest turn apart from the longest one in a hundred."""
        self._handle.cancel()
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


@pytest.mark.slow
@pytest.mark.timeout(180)
@every_transport
async def test_no_turn_of_the_loop_is_long(subject: Subject, manifest: Manifest) -> None:
    async with subject.factory() as (sender, receiver):
        sending = asyncio.create_task(sender.send(ManifestMessage(manifest)))
        turns = Turns()
        async with asyncio.timeout(PATIENCE):
            received = await receiver.recv()
        assert turns.end() < 0.005
        await sending
        assert received.message == ManifestMessage(manifest)
        assert received.message.manifest.digest == manifest.digest


@pytest.mark.slow
@pytest.mark.timeout(180)
@every_transport
@pytest.mark.parametrize("subscribes", [False, True], ids=["recv", "subscribe"])
async def test_what_follows_comes_after_it(
    subject: Subject, subscribes: bool, manifest: Manifest
) -> None:
    """Messages arrive in order, though the sender closes the link at once.

    A cancelled recv() loses none of them.
    """
    async with subject.factory() as (sender, receiver):
        came: list[Any] = []

        async def say() -> None:
            await sender.send(ManifestMessage(manifest))
            await sender.send(Fetch(1))
            await sender.aclose()

        saying = asyncio.create_task(say())
        async with asyncio.timeout(PATIENCE):
            if subscribes:
                receiver.subscribe(lambda received: came.append(received.message))
            while len(came) < 2:
                if subscribes:
                    await asyncio.sleep(0.01)
                    continue
                try:
                    async with asyncio.timeout(0.02):
                        came.append((await receiver.recv()).message)
                except TimeoutError:
                    pass
        await saying
        assert came == [ManifestMessage(manifest), Fetch(1)]

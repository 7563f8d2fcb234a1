"""The turns in which a thread applies updates, while the loop has other things to do."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from aiosync.protocol import Inbox
from aiosync.receiver.guard import Guard
from aiosync.receiver.turns import Turns

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

PATIENCE = 20.0


class Updates:
    """The updates that wait for a model on an accelerator, whose thread applies them.

    Attributes:
        waiting: Versions that wait; one below 0 is refused.
        tries: The versions that waited at each try.
    """

    def __init__(self, *waiting: int) -> None:
        self.waiting, self.tries = [*waiting], list[list[int]]()
        self.has_tried = threading.Event()
        self.guard, self.inbox, model = Guard(), Inbox(), SimpleNamespace(waits=True)
        stand_in: Any = model
        self.turns = Turns(
            self.guard, stand_in, self.inbox, take=self._take, ended=lambda changed: None
        )

    def _take(self) -> None:
        self.tries.append(self.waiting.copy())
        while self.waiting:
            version = self.waiting.pop()
            if version > 0:
                self.inbox.applied(1, version)
        self.has_tried.set()

    def wait_for_thread(self) -> None:
        """Wait, without a turn of the loop, until the thread has applied and let reads in."""
        assert self.has_tried.wait(PATIENCE)
        while not self.guard.is_free():
            time.sleep(0.001)


@pytest.mark.parametrize("first", [[], [-1], [1]], ids=["nothing", "refused", "applied"])
async def test_an_update_that_comes_as_the_thread_ends_is_applied(first: list[int]) -> None:
    """Also if the thread had nothing to apply, or the model refused that."""
    updates = Updates(*first)
    updates.turns.submit()
    updates.wait_for_thread()
    # The loop has not heard yet that the thread is done.
    updates.waiting.append(2)
    updates.turns.submit()
    async with asyncio.timeout(PATIENCE):
        while updates.waiting:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    assert updates.inbox.version == 2
    # There is no try for which no update was offered.
    assert updates.tries == [first, [2]]
    updates.turns.close()


async def test_a_refused_version_that_its_word_still_names_is_not_tried_again() -> None:
    updates, words = Updates(-1), memoryview(bytearray(8)).cast("Q")
    words[0] = 7
    updates.guard.watch_word(words, updates.turns.take, lambda: None)
    updates.turns.submit()
    updates.wait_for_thread()
    updates.turns.submit()
    async with asyncio.timeout(PATIENCE):
        while len(updates.tries) < 2:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    assert updates.guard.has_news
    assert len(updates.tries) == 2
    updates.turns.close()

"""A link that is dialled, and again when it was lost: its states, and for how long it tries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import aiosync
from aiosync.rendezvous import KeptLink, LinkState

pytestmark = pytest.mark.asyncio

LOST = aiosync.PeerClosed("it went away")


class Link:
    """As much of a link as is looked at."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


class Trainer:
    """Somebody to dial: what the next attempts end with, then a link."""

    def __init__(self, *errors: Exception, at_greeting: bool = False) -> None:
        self.errors = list(errors)
        self.at_greeting = at_greeting
        self.again: list[bool] = []
        self.links: list[Link] = []

    async def dial(self, left: Callable[[], float | None], again: bool) -> Any:
        self.again.append(again)
        if self.errors and not self.at_greeting:
            raise self.errors.pop(0)
        link = Link()
        self.links.append(link)
        return link

    async def greet(self, link: Any, timeout: float | None) -> str:
        if self.errors and self.at_greeting:
            raise self.errors.pop(0)
        return "welcome"

    def kept(self) -> KeptLink[Any, str]:
        def nobody(within: str) -> str:
            return f"nobody was there{within}"

        return KeptLink("the trainer", self.dial, self.greet, nobody=nobody)


@pytest.mark.parametrize(
    "error", [aiosync.AuthError("x"), aiosync.ConfigError("x"), aiosync.LocalProtocolError("x")]
)
async def test_what_would_fail_again_is_not_tried_again(error: aiosync.AiosyncError) -> None:
    kept = Trainer(error).kept()
    with pytest.raises(type(error)) as caught:
        await kept.connect(5.0)
    assert caught.value is error
    assert kept.state is LinkState.GAVE_UP


async def test_links_that_are_of_no_use_do_not_count() -> None:
    """The time runs from when a link was of use, however many were there since."""
    trainer = Trainer()
    kept = trainer.kept()
    await kept.connect(None)
    await kept.reconnect(LOST, 0.3, progress=1)
    began = time.monotonic()
    with pytest.raises(aiosync.PeerClosed, match=r"the trainer was lost .*it went away.* 0.3 s"):
        while True:
            await kept.reconnect(LOST, 0.3, progress=1)
    assert 0.1 < time.monotonic() - began < 1.0
    assert kept.state is LinkState.GAVE_UP


async def test_cancelled_it_leaves_no_link() -> None:
    trainer = Trainer()

    async def never(link: Any, timeout: float | None) -> str:
        await asyncio.sleep(60.0)
        return ""

    trainer.greet = never  # type: ignore[method-assign]
    task = asyncio.ensure_future(trainer.kept().connect(None))
    while not trainer.links:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trainer.links[0].aborted


async def test_an_attempt_that_ran_out_of_time_does_not_hide_why_there_was_another() -> None:
    trainer = Trainer(aiosync.ConnectError("no place"), at_greeting=True)
    greet = trainer.greet

    async def slow(link: Any, timeout: float | None) -> str:
        await greet(link, timeout)
        await asyncio.sleep(timeout or 0.0)
        raise aiosync.ConnectTimeout("it said nothing")

    trainer.greet = slow  # type: ignore[method-assign]
    with pytest.raises(aiosync.ConnectTimeout, match="no place"):
        await trainer.kept().connect(0.2)

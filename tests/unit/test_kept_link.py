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


async def test_it_is_dialled_until_somebody_answers() -> None:
    trainer = Trainer(aiosync.ConnectError("no"), aiosync.ConnectError("no"))
    kept = trainer.kept()
    assert kept.state is LinkState.DIALING
    assert await kept.connect(5.0) == (trainer.links[0], "welcome")
    assert kept.state is LinkState.UP
    assert trainer.again == [False] * 3


async def test_it_is_greeted_again_and_a_refused_link_is_closed() -> None:
    trainer = Trainer(aiosync.ConnectError("no place"), at_greeting=True)
    kept = trainer.kept()
    await kept.connect(5.0)
    assert [link.aborted for link in trainer.links] == [True, False]


@pytest.mark.parametrize(
    "error", [aiosync.AuthError("x"), aiosync.ConfigError("x"), aiosync.LocalProtocolError("x")]
)
async def test_what_would_fail_again_is_not_tried_again(error: aiosync.AiosyncError) -> None:
    kept = Trainer(error).kept()
    with pytest.raises(type(error)) as caught:
        await kept.connect(5.0)
    assert caught.value is error
    assert kept.state is LinkState.GAVE_UP


@pytest.mark.parametrize("at_greeting", [False, True])
async def test_the_error_says_why_the_last_attempt_failed(at_greeting: bool) -> None:
    errors = [aiosync.ConnectError("no place")] * 100
    kept = Trainer(*errors, at_greeting=at_greeting).kept()
    began = time.monotonic()
    with pytest.raises(aiosync.ConnectTimeout, match="no place") as caught:
        await kept.connect(0.1)
    assert time.monotonic() - began < 1.0
    assert caught.value.__cause__ is errors[0]
    assert ("nobody was there" in str(caught.value)) is not at_greeting


async def test_a_lost_link_is_replaced() -> None:
    trainer = Trainer()
    kept = trainer.kept()
    await kept.connect(None)
    link, _ = await kept.reconnect(LOST, 5.0, progress=1)
    assert link is trainer.links[1]
    assert kept.state is LinkState.UP
    assert trainer.again == [False, True]


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


async def test_a_link_that_was_of_use_counts() -> None:
    kept = Trainer().kept()
    await kept.connect(None)
    began = time.monotonic()
    progress = 0
    while time.monotonic() - began < 0.5:
        progress += 1
        await kept.reconnect(LOST, 0.3, progress)


async def test_steps_that_are_not_in_the_table_are_refused() -> None:
    kept = Trainer(aiosync.AuthError("x")).kept()
    with pytest.raises(aiosync.LocalProtocolError):
        await kept.reconnect(LOST, 1.0, progress=0)  # nothing could have been lost
    with pytest.raises(aiosync.AuthError):
        await kept.connect(1.0)
    with pytest.raises(aiosync.LocalProtocolError):
        await kept.connect(1.0)  # it gave up


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

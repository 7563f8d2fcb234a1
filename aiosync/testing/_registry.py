"""The shape of a conformance check, and of what a transport's author hands to the suite.

This module must never import pytest or torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from aiosync.testing._tools import ConformanceError
from aiosync.testing.leaks import LEAK_KINDS, LeakError, assert_no_leaks
from aiosync.transports.base import Transport
from aiosync.types import Capabilities, Limits

__all__ = ["Bench", "Check", "Hooks", "RawPeer", "TransportFactory", "check"]

Pair: TypeAlias = tuple[Transport, Transport]
_CHECK_SECONDS = 30.0


class TransportFactory(Protocol):
    """Makes one link: ``async with factory() as (sender, receiver)``.

    Both ends live on the running loop. Leaving the context must close both, whatever state the
    check left them in, and everything that was opened to make them.
    """

    def __call__(self) -> AbstractAsyncContextManager[Pair]: ...


class RawPeer(Protocol):
    """The far end of a link without a transport on it: raw bytes, for hostile frames."""

    async def write(self, data: bytes) -> None:
        """Write all of ``data``; raises ``OSError`` when the other end has gone."""

    def close(self) -> None:
        """Close this end. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a transport's author can offer beyond the factory; checks that lack theirs are skipped.

    Attributes:
        cut: Severs the raw link beneath one end at once, from outside, as the death of that
            end's process would: nothing is flushed and no farewell is said.
        limited: Makes a link whose ends have these limits (sender's, receiver's).
        raw: Makes a link whose far end is raw: ``async with raw() as (peer, transport)``. For
            transports that move frames of ``aiosync.wire`` over a byte stream.
        raw_payload_nbytes: The largest payload, in bytes, that the transport itself would put
            into that stream; at least 2.
    """

    cut: Callable[[Transport], None] | None = None
    limited: Callable[[Limits, Limits], AbstractAsyncContextManager[Pair]] | None = None
    raw: Callable[[], AbstractAsyncContextManager[tuple[RawPeer, Transport]]] | None = None
    raw_payload_nbytes: int = 2**20


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check works with.

    Attributes:
        pair: Makes a link.
        hooks: What else the author offers.
        declared: Capabilities to check against instead of the transport's own.
    """

    pair: TransportFactory
    hooks: Hooks = field(default_factory=Hooks)
    declared: Capabilities | None = None

    def capabilities(self, transport: Transport) -> Capabilities:
        """What the transport declares."""
        return self.declared if self.declared is not None else transport.capabilities

    def limited(self, sender: Limits, receiver: Limits) -> AbstractAsyncContextManager[Pair]:
        """Make a link with these limits; only for checks that need ``limited``."""
        assert self.hooks.limited is not None
        return self.hooks.limited(sender, receiver)

    def raw(self) -> AbstractAsyncContextManager[tuple[RawPeer, Transport]]:
        """Make a link with a raw far end; only for checks that need ``raw``."""
        assert self.hooks.raw is not None
        return self.hooks.raw()

    def cut(self, transport: Transport) -> None:
        """Sever the link beneath ``transport``; only for checks that need ``cut``."""
        assert self.hooks.cut is not None
        self.hooks.cut(transport)


@dataclass(frozen=True, slots=True)
class Check:
    """One statement of the transport contract, as a test.

    Attributes:
        name: Stable name; what ``Capabilities.exceptions`` refers to.
        description: The statement, in one sentence.
        needs: Names of the :class:`Hooks` that it uses.
        body: The coroutine function.
    """

    name: str
    description: str
    needs: frozenset[str]
    body: Callable[[Bench], Awaitable[None]]

    def skip_reason(
        self, hooks: Hooks | None = None, capabilities: Capabilities | None = None
    ) -> str | None:
        """Why this check cannot or need not run, or ``None`` when it must."""
        if capabilities is not None and self.name in capabilities.exceptions:
            return f"declared exception: {capabilities.exceptions[self.name]}"
        missing = sorted(need for need in self.needs if getattr(hooks, need, None) is None)
        return f"needs the hook {', '.join(missing)}" if missing else None

    async def run(
        self,
        pair_factory: TransportFactory,
        *,
        hooks: Hooks | None = None,
        capabilities: Capabilities | None = None,
        leaks: tuple[str, ...] = LEAK_KINDS,
    ) -> None:
        """Run the check on fresh links.

        Args:
            pair_factory: Makes a link for the check.
            hooks: What else the author offers.
            capabilities: Checked against instead of ``transport.capabilities``.
            leaks: Kinds of leaks to look for after the check; see
                :data:`aiosync.testing.LEAK_KINDS`.

        Raises:
            ConformanceError: The statement does not hold, or the check hangs.
            LeakError: The statement holds, and something was left behind.
        """
        bench = Bench(pair_factory, hooks if hooks is not None else Hooks(), capabilities)
        try:
            async with assert_no_leaks(kinds=leaks):
                await self._bounded(bench)
        except (ConformanceError, LeakError) as exc:
            if hasattr(exc, "add_note"):
                exc.add_note(f"conformance check {self.name}: {self.description}")
            raise

    async def _bounded(self, bench: Bench) -> None:
        task = asyncio.ensure_future(self.body(bench))
        try:
            await asyncio.wait({task}, timeout=_CHECK_SECONDS)
            if not task.done():
                raise ConformanceError(f"{self.name} hangs: not done in {_CHECK_SECONDS:g} s")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=5.0)
        task.result()


def check(
    *needs: str,
) -> Callable[[Callable[[Bench], Awaitable[None]]], Callable[[Bench], Awaitable[None]]]:
    """Note which hooks a check needs. Its name and description come from the function."""

    def mark(
        body: Callable[[Bench], Awaitable[None]],
    ) -> Callable[[Bench], Awaitable[None]]:
        body.__dict__["needs"] = frozenset(needs)
        return body

    return mark


def as_check(body: Callable[[Bench], Awaitable[None]]) -> Check:
    """Build the registry entry of a ``check_*`` coroutine function."""
    name = body.__name__.removeprefix("check_")
    description = (body.__doc__ or "").strip().splitlines()[0]
    return Check(name, description, body.__dict__.get("needs", frozenset()), body)

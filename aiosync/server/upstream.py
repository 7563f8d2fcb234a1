"""A server's link to its upstream: the weight server or trainer whose versions it passes on.

Must not import the command line.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from aiosync._log import log
from aiosync.errors import AiosyncError
from aiosync.rendezvous.dialer import Dialer, KeptLink, to_dial
from aiosync.rendezvous.handshake import greet
from aiosync.transports.address import Address
from aiosync.transports.credentials import TLS, Credentials
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from aiosync.wire import Hello, Welcome

__all__ = ["Follower", "Upstream"]

_ATTEMPT_SECONDS = 10.0
_KEEPALIVE_SECONDS = 30.0


class Follower(Protocol):
    """A model that takes the versions of an upstream."""

    async def hello(self, *, is_upstream: bool) -> Hello:
        """Return the message that tells the upstream what is here."""

    async def follow(self, link: TCPTransport, welcome: Welcome) -> None:
        """Take the versions that arrive over a link until it ends, and raise the reason."""

    @property
    def version(self) -> int:
        """Newest version that is here; 0 for none."""


class Upstream:
    """The weight server or the listening trainer that a server follows.

    Args:
        url: Its address; or several, of which the first is used that can be reached.
        token: Secret that both prove that they have.
        tls: TLS of the side that dials.
        limits: Limits on what it may announce.
        streams: Number of connections of each link to it.

    Raises:
        ConfigError: An address cannot be dialled, or the token is empty.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | bytes | None,
        tls: TLS | ssl.SSLContext | None,
        limits: Limits | None,
        streams: int,
    ) -> None:
        self._dialer = Dialer(
            addresses=to_dial(url),
            credentials=Credentials(token=token, tls=tls),
            limits=limits,
            keepalive=_KEEPALIVE_SECONDS,
            streams=streams,
            attempt_timeout=_ATTEMPT_SECONDS,
            name="the upstream",
        )

    @property
    def where(self) -> str:
        """The addresses, as a piece of a text."""
        return self._dialer.where

    def leads_to(self, url: str) -> bool:
        """Return True if ``url`` is one of the addresses."""
        return Address.parse(url) in self._dialer.addresses

    async def feed(self, model_id: str, model: Follower, serves: str) -> None:
        """Have a model follow the upstream for ever; a lost link is dialled again and again.

        The upstream is told the address at which this server serves; empty for none.
        """
        logged = ""

        def log_once(error: AiosyncError) -> None:
            nonlocal logged
            if str(error) != logged:
                logged = str(error)
                text = f"{self.where} is not followed, and dialled again: {logged}"
                log(logging.WARNING, "waiting", text, model=model_id)

        async def introduce(link: TCPTransport, timeout: float | None) -> Welcome:
            # The Hello says what the model has now, so each link gets a new one.
            hello = await model.hello(is_upstream=True)
            hello = replace(hello, serves=serves, follows=kept.follows)
            return await greet(link, hello, timeout=timeout)

        kept: KeptLink[TCPTransport, Welcome] = KeptLink(
            "the upstream",
            self._dialer.dials,
            introduce,
            not_reached_text=self._dialer.not_reached_text,
            # No error ends the attempts, so each handshake has to end by itself.
            final=None,
            on_failure=log_once,
            # Only an upstream at addresses of TCP may send this server on to another one.
            dial_named=self._dialer.dial if self._dialer.is_remote else None,
        )
        link, welcome = await kept.connect(None)
        while True:
            before = model.version
            log(logging.INFO, "joined", f"follows {link.channel.name}", model=model_id)
            try:
                await model.follow(link, welcome)
            except AiosyncError as exc:
                # After a link that was of use, the same error is news.
                if model.version != before:
                    logged = ""
                log_once(exc)
                link, welcome = await kept.reconnect(exc, model.version, None)

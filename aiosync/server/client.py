"""What asks a weight server, or a listening trainer, once: for its status, for its weights.

A client needs no module and no scheme. Must not import the command line, nor torch before weights
are pulled.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TYPE_CHECKING, Any

from aiosync._log import Waiting
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    TransportBroken,
)
from aiosync.protocol import validate_timeout
from aiosync.rendezvous.dialer import Dialer
from aiosync.transports.address import Address
from aiosync.transports.credentials import TLS, Credentials, Secret
from aiosync.types import Limits
from aiosync.wire import (
    Hello,
    Refuse,
    Status,
    stats_from,
)

if TYPE_CHECKING:
    from aiosync.events import SyncStats
    from aiosync.server.pulling import PulledWeights, PullProgress

__all__ = ["WeightClient"]

_ATTEMPT_SECONDS = 10.0


class WeightClient:
    """Asks a weight server, one call at a time. Holds no link between two calls.

    Args:
        url: ``tcp://host:port`` or ``unix:///path``.
        token: A secret that both sides prove that they have; it is never sent.
        tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext`` of the side that dials.
        limits: What the other side may announce, and how much an answer holds.

    Raises:
        ConfigError: Not an address, an address without a port, or an empty token.
    """

    def __init__(
        self,
        url: str,
        *,
        token: Secret | str | bytes | None = None,
        tls: TLS | ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._address = Address.parse(url)
        if self._address.scheme == "tcp" and not self._address.port:
            raise ConfigError(f"{self._address} has no port to dial")
        self._dialer = Dialer(
            address=self._address,
            credentials=Credentials(token=token, tls=tls),
            limits=limits,
            keepalive=30.0,
            attempt_timeout=_ATTEMPT_SECONDS,
            name="the server",
        )

    def __repr__(self) -> str:
        return f"<WeightClient for {self._address}>"

    # -- status --------------------------------------------------------------------------------

    async def status(self, *, timeout: float | None = 30.0) -> dict[str, Any]:
        """Ask a weight server what it serves, by whom and to whom. One attempt.

        Args:
            timeout: Seconds for the whole call; ``None`` for as long as it takes.

        Returns:
            Plain values; see ``WeightServer.status()``.

        Raises:
            ConnectError: Nothing listens there, or it is not a weight server.
            AuthError: The tokens or certificates do not match.
            ConfigError: The other side requires TLS.
            ConnectTimeout: Not in time.

        Cancellation:
            Class A.
        """
        values = await self._ask(timeout)
        if "models" not in values:
            raise ConnectError(
                f"{self._address} is a trainer, not a weight server: `aiosync top` shows it"
            )
        return values

    async def stats(self, *, timeout: float | None = 30.0) -> tuple[SyncStats, ...]:
        """Ask whoever listens there how its syncs stand. One attempt.

        Args:
            timeout: Seconds for the whole call; ``None`` for as long as it takes.

        Returns:
            Of a weight server one for each model; of a trainer, or a worker that listens, its own.

        Raises:
            ConnectError: Nothing listens there.
            AuthError: The tokens or certificates do not match.
            ConfigError: The other side requires TLS.
            ConnectTimeout: Not in time.
            RemoteProtocolError: The answer is illegal.

        Cancellation:
            Class A.
        """
        return stats_from((await self._ask(timeout)).get("stats"))

    async def _ask(self, timeout: float | None) -> dict[str, Any]:
        """Ask for the status."""
        validate_timeout(timeout)
        hello = Hello(role="status", model_id="", pid=os.getpid())
        try:
            async with asyncio.timeout(timeout):
                link = await self._dialer.dial()
                link.channel.allow_payloads()  # the answer has values, as updates have
                try:
                    await link.send(hello)
                    answer = (await link.recv()).message
                except (PeerClosed, TransportBroken) as exc:
                    raise ConnectError(
                        f"{self._address} closed the link without answering: it is not a weight "
                        "server (aiosync serve), or has just ended"
                    ) from exc
                finally:
                    link.abort()
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise ConnectTimeout(f"{self._address} did not answer within {timeout:g} s") from exc
        if isinstance(answer, Status):
            return dict(answer.values)
        if isinstance(answer, Refuse):
            raise ConnectError(f"{self._address} refused the status request: {answer.error_text}")
        raise RemoteProtocolError(f"expected Status, got {type(answer).__name__}")

    # -- weights -------------------------------------------------------------------------------

    async def pull(
        self,
        model_id: str = "policy",
        *,
        min_version: int = 0,
        timeout: float | None = 120.0,
        progress: PullProgress | None = None,
    ) -> PulledWeights:
        """Get the newest version of a model, from a weight server or from a trainer.

        Where the newest holds a part of the names, the others come with it, as they are newest.
        Waits for a first version, and logs a warning after 5 s. The first attempt to connect has
        to succeed; after that a lost link is replaced until the time is up, and the transfer goes
        on where it stopped. What the other side makes of it may be illegal: then the transfer
        begins anew.

        Args:
            model_id: Which model.
            min_version: The lowest acceptable version, in whatever epoch.
            timeout: Seconds for the whole call; ``None`` for as long as it takes.
            progress: Called with what has arrived, after each chunk. It must not raise.

        Raises:
            ConnectError: Nothing listens there.
            AuthError: The tokens or certificates do not match.
            ConfigError: The other side does not serve the model, or requires TLS; or the
                ``model_id`` is none.
            RecvTimeout: There was no such version in time, or it did not arrive in time.
            RemoteProtocolError: The other side sent something illegal.

        Cancellation:
            Class A.
        """
        from aiosync.schemes.sources import as_model_id
        from aiosync.server.pulling import Pull

        validate_timeout(timeout)
        least = max(1, min_version)
        pull = Pull(self._dialer, as_model_id(model_id), least, progress)
        try:
            with Waiting("pull()", timeout, pull.describe, model=model_id):
                async with asyncio.timeout(timeout):
                    return await pull.run()
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise RecvTimeout(pull.describe(f" within {timeout:g} s")) from exc
        finally:
            pull.close()

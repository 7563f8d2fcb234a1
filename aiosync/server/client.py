"""The client for single requests to a weight server or a listening trainer: status and weights.

A client needs no module and no scheme. Must not import the command line, nor torch before weights
are pulled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiosync._log import Waiting
from aiosync._repr import in_every_state
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    TransportBroken,
    TransportError,
)
from aiosync.protocol import as_count, as_version, validate_timeout
from aiosync.rendezvous.dialer import Backoff, Dialer, is_final, retry, to_dial
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, greet
from aiosync.transports.base import Received, make_ack
from aiosync.transports.credentials import TLS, Credentials, Secret
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import (
    MAX_STREAMS,
    Fetch,
    Hello,
    Leave,
    ManifestMessage,
    Refuse,
    Status,
    Update,
    Welcome,
    stats_from,
)

if TYPE_CHECKING:
    import torch

    from aiosync.events import SyncStats
    from aiosync.receiver.update_reader import Staged
    from aiosync.tensors import FlatBuffer, Layout

__all__ = ["PullProgress", "PulledWeights", "WeightClient"]

_ATTEMPT_SECONDS = 10.0

PullProgress: TypeAlias = Callable[[int, int], None]
"""Function called with the bytes that have arrived and are verified, and with the bytes in all."""


@dataclass(frozen=True, slots=True, eq=False)
class PulledWeights:
    """One complete version of a model's weights, in memory of its own.

    Attributes:
        model_id: Name of the model.
        epoch: Epoch of the trainer that sent the version.
        version: Number of the version in that epoch.
        layout: Position of each tensor in ``buffer``.
        buffer: The memory of the tensors.
        values: Values that are not tensors, by dotted name, as they travelled.
        reconnects: Number of times that a lost link was replaced during the transfer.
    """

    model_id: str
    epoch: int
    version: int
    layout: Layout
    buffer: FlatBuffer
    values: Mapping[str, Any]
    reconnects: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, with the padding between them."""
        return self.layout.nbytes

    def mapping(self) -> dict[str, Any]:
        """Return tensors and values by dotted name, as ``load_state_dict()`` takes them.

        The tensors are views of :attr:`buffer`; tied tensors are one object under each name.

        Raises:
            ConfigError: A value is none that a trainer of aiosync sends.
        """
        from aiosync.tensors.values import inner_names, unpack_value

        tensors = dict(self.buffer.named_views(self.layout))

        def tensor(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ConfigError(f"a value names the tensor {name!r}, which did not come with it")
            return tensors[name]

        values = {name: unpack_value(value, tensor) for name, value in self.values.items()}
        inside = inner_names(self.values)
        return {name: each for name, each in tensors.items() if name not in inside} | values


class WeightClient:
    """Client of a weight server or a listening trainer. It holds no link between two calls.

    Args:
        url: ``tcp://host:port`` or ``unix:///path``.
        token: A secret that both sides prove that they have; it is never sent.
        tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext`` of the side that dials.
        limits: Limits on the sizes that the other side may announce, and on its answers.
        streams: Connections of each link, up to 16: between sites, where one connection gets less
            than the line.

    Raises:
        ConfigError: The ``url`` is no address or has no port, or the token is empty.
    """

    def __init__(
        self,
        url: str,
        *,
        token: Secret | str | bytes | None = None,
        tls: TLS | ssl.SSLContext | None = None,
        limits: Limits | None = None,
        streams: int = 1,
    ) -> None:
        self._dialer = Dialer(
            addresses=to_dial(url),
            credentials=Credentials(token=token, tls=tls),
            limits=limits,
            keepalive=30.0,
            streams=as_count("streams", streams, 1, MAX_STREAMS),
            attempt_timeout=_ATTEMPT_SECONDS,
            name="the server",
        )

    @in_every_state
    def __repr__(self) -> str:
        return f"<WeightClient for {self._dialer.where}>"

    # -- status --------------------------------------------------------------------------------

    async def status(self, *, timeout: float | None = 30.0) -> dict[str, Any]:
        """Ask a weight server for its status: its models, their trainers and their workers.

        Makes one attempt.

        Args:
            timeout: Seconds for the whole call; ``None`` for as long as it takes.

        Returns:
            Plain values; see ``WeightServer.status()``.

        Raises:
            ConnectError: Nothing listens at the address, or it is not a weight server.
            AuthError: The tokens or certificates do not match.
            ConfigError: The other side requires TLS.
            ConnectTimeout: There was no answer in time.

        Cancellation:
            Class A.
        """
        values = await self._ask(timeout)
        if "models" not in values:
            raise ConnectError(
                f"{self._dialer.where} is a trainer, not a weight server: `aiosync top` shows it"
            )
        return values

    async def stats(self, *, timeout: float | None = 30.0) -> tuple[SyncStats, ...]:
        """Ask the listening peer for the statistics of its syncs.

        Makes one attempt.

        Args:
            timeout: Seconds for the whole call; ``None`` for as long as it takes.

        Returns:
            The statistics of each model from a weight server; a trainer returns its own.

        Raises:
            ConnectError: Nothing listens at the address.
            AuthError: The tokens or certificates do not match.
            ConfigError: The other side requires TLS.
            ConnectTimeout: There was no answer in time.
            RemoteProtocolError: The answer is illegal.

        Cancellation:
            Class A.
        """
        return stats_from((await self._ask(timeout)).get("stats"))

    async def _ask(self, timeout: float | None) -> dict[str, Any]:
        """Dial the peer, ask for its status and close the link; return the status as values."""
        validate_timeout(timeout)
        hello = Hello(role="status", model_id="", pid=os.getpid())
        where = self._dialer.where
        try:
            async with asyncio.timeout(timeout):
                link = await self._dialer.dial_first()
                link.channel.allow_payloads()  # the answer carries values, as updates do
                try:
                    await link.send(hello)
                    answer = (await link.recv()).message
                except (PeerClosed, TransportBroken) as exc:
                    raise ConnectError(
                        f"{where} closed the link without answering: it is not a weight server "
                        "(aiosync serve), or has just ended"
                    ) from exc
                finally:
                    link.abort()
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise ConnectTimeout(f"{where} did not answer within {timeout:g} s") from exc
        if isinstance(answer, Status):
            return dict(answer.values)
        if isinstance(answer, Refuse):
            raise ConnectError(f"{where} refused the status request: {answer.error_text}")
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

        If the newest version holds only some of the names, the newest tensors of the other names
        come with it. Waits for a first version, and logs a warning after 5 s. The first attempt to
        connect has to succeed. After that the client replaces a lost link until the time is up, and
        the transfer goes on where it stopped. If the other side sends something illegal over the
        new link, the transfer begins anew, but only once.

        Args:
            model_id: Name of the model.
            min_version: The lowest acceptable version, in whatever epoch.
            timeout: Seconds for the whole call; ``None`` for as long as it takes.
            progress: Called with the bytes that have arrived, after each chunk. It must not raise.

        Raises:
            ConnectError: Nothing listens at the address.
            AuthError: The tokens or certificates do not match.
            ConfigError: The other side does not serve the model, or requires TLS; or ``model_id``
                or ``min_version`` is illegal.
            RecvTimeout: There was no such version in time, or it did not arrive in time.
            RemoteProtocolError: The other side sent something illegal.

        Cancellation:
            Class A.
        """
        from aiosync.schemes.sources import as_model_id

        validate_timeout(timeout)
        least = max(1, as_version("min_version", min_version))
        pull = _Pull(self._dialer, as_model_id(model_id), least, progress)
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


class _Pull:
    """One call of :meth:`WeightClient.pull`."""

    def __init__(
        self,
        dialer: Dialer,
        model_id: str,
        least: int,
        progress: PullProgress | None,
    ) -> None:
        from aiosync.receiver.update_reader import UpdateReader

        self._dialer = dialer
        self._model_id = model_id
        self._least = least
        self._progress = progress
        self._session = secrets.token_bytes(16)
        self._welcome: Welcome | None = None
        self._link: TCPTransport | None = None
        self._updates = UpdateReader()
        # Error of the last attempt while the other side is not reached, for the text of a timeout.
        self._lost: AiosyncError | None = None
        # Epoch, version, bytes and digest of the partial update that the Hello of this link named.
        self._partial: tuple[int, int, int, bytes] | None = None
        self._total = 0  # bytes of the update that arrives
        self._moved = False  # a part of an update arrived over this link
        self._reconnects = 0
        self._illegal = 0  # attempts that an illegal message ended
        self._pauses = Backoff()

    async def run(self) -> PulledWeights:
        """Get the weights; replace a lost link until they are complete."""
        return await retry(
            lambda left: self._attempt(), None, final=self._is_final, backoff=self._pauses
        )

    def _is_final(self, error: AiosyncError) -> bool:
        """Return True if the error of an attempt ends the call; after others it dials again."""
        if isinstance(error, RemoteProtocolError):
            # The two sides may have disagreed about the partial update, which is dropped now. The
            # transfer begins anew, and the next such error is final.
            return self._partial is None or self._illegal > 1
        # Before the first Welcome no server is known to be at the address, so there is no retry.
        may_retry = isinstance(error, TransportError | ConnectTimeout) and self._welcome is not None
        return is_final(error) or not may_retry

    async def _attempt(self) -> PulledWeights:
        """Dial, ask for the version and receive it over this link.

        Keeps the part that has arrived if the link is lost.
        """
        self._moved = False
        self._partial = self._updates.partial
        try:
            link = self._link = await self._dialer.dial_first(is_redial=self._welcome is not None)
            welcome = await greet(link, self._hello(), timeout=HANDSHAKE_SECONDS)
            self._reconnects += self._welcome is not None
            self._welcome, self._lost = welcome, None
            self._updates.use_link(link)
            await link.send(Fetch(self._least))
            while (staged := self._take(await link.recv(into=self._updates.lender))) is None:
                pass
            epoch, version = staged.epoch, staged.version
            # The version is complete here: the ack only serves the other side's statistics, so its
            # errors do not matter.
            with contextlib.suppress(AiosyncError):
                ack = make_ack(epoch, version, AckStatus.APPLIED, None)
                await link.send(ack, timeout=HANDSHAKE_SECONDS)
                # So that the other side does not count this client as lost.
                await link.send(Leave(), timeout=HANDSHAKE_SECONDS)
            return PulledWeights(
                *(self._model_id, epoch, version, staged.layout, staged.flat, staged.values),
                reconnects=self._reconnects,
            )
        except AiosyncError as exc:
            self._lost = exc
            self.close()
            if isinstance(exc, RemoteProtocolError):
                self._illegal += 1
                self._updates.drop_partial()
            if self._moved:
                self._pauses.reset()
            raise

    def _hello(self) -> Hello:
        """Return a Hello that subscribes to nothing, and names the part of an update that is here.

        A :class:`Fetch` then asks for the version.
        """
        partial = self._partial or (None, None, 0, b"")
        return Hello(
            role="receiver",
            model_id=self._model_id,
            pid=os.getpid(),
            strategy=ANY_STRATEGY,
            session=self._session,
            subscribe=False,
            partial_epoch=partial[0],
            partial_version=partial[1],
            partial_nbytes=partial[2],
            partial_digest=partial[3],
        )

    def _take(self, received: Received) -> Staged | None:
        """Read a manifest or a part of an update; return the update that it completes, if any."""
        message = received.message
        if isinstance(message, ManifestMessage):
            self._total = message.manifest.nbytes
        staged = self._updates.read(received)
        if isinstance(message, Update):
            self._moved = True
            if self._progress is not None:
                self._progress(self._total if staged is not None else self._here, self._total)
        return staged

    @property
    def _here(self) -> int:
        """Verified bytes of the update that arrives."""
        return 0 if self._updates.partial is None else self._updates.partial[2]

    def close(self) -> None:
        """Close the link; the part of an update that has arrived stays."""
        if self._link is not None:
            self._link.abort()

    def describe(self, within: str = "") -> str:
        """Return the reason why there are no weights yet; ``within`` is a text with the time."""
        url, what = self._dialer.where, f"model {self._model_id!r}"
        if self._lost is not None and not self._moved:
            return f"{url} was lost ({self._lost}) and not reached again{within}"
        if self._total:
            return f"{self._here} of {self._total} bytes of {what} arrived from {url}{within}"
        if self._welcome is None:
            return f"{url} did not answer{within}"
        if self._welcome.version == 0:
            advice = self._welcome.note or "is a trainer running, or the model_id another one?"
            return f"{url} has no version of {what} yet, and got none{within}; {advice}"
        return (
            f"{url} has no version {self._least} of {what}, and got none{within}; it had version "
            f"{self._welcome.version}; min_version= may be too high: each `aiosync push`, and each "
            "trainer restarted without first_version=, counts from 1 again"
        )

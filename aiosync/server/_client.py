"""What asks a weight server, or a listening trainer, once: for its status, for its weights.

A client needs no module and no scheme. Must not import the command line.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    TransportBroken,
    TransportError,
)
from aiosync.protocol import validate_timeout
from aiosync.schemes._context import as_model_id
from aiosync.schemes._dialling import Backoff, Dialler
from aiosync.schemes._handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, greet
from aiosync.schemes._staging import Staged, Staging
from aiosync.tensors import FlatBuffer, Layout
from aiosync.tensors._values import referenced, unpack_value
from aiosync.transports.address import Address
from aiosync.transports.base import make_ack
from aiosync.transports.credentials import TLS, Credentials, Secret
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Limits
from aiosync.wire import Fetch, Hello, ManifestMessage, Refuse, Resend, Status, Update, Welcome

if TYPE_CHECKING:
    import torch

__all__ = ["PullProgress", "PulledWeights", "WeightClient"]

PullProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are here and verified, and with how many there will be."""

_ATTEMPT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class PulledWeights:
    """One complete version, in memory of its own.

    Attributes:
        model_id: Which model.
        epoch: Epoch of the trainer that made it.
        version: Its number in that epoch.
        layout: Where each tensor lies in ``buffer``.
        buffer: The tensors.
        values: What is not a tensor, by dotted name, as it travelled.
        reconnects: How often the link was lost and replaced meanwhile.
        resumed_nbytes: Bytes that did not have to be sent again after that.
    """

    model_id: str
    epoch: int
    version: int
    layout: Layout
    buffer: FlatBuffer
    values: Mapping[str, Any]
    reconnects: int = 0
    resumed_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, with the padding between them."""
        return self.layout.nbytes

    def mapping(self) -> dict[str, Any]:
        """Tensors and values by dotted name, as ``load_state_dict()`` takes them.

        The tensors are views of :attr:`buffer`; tied ones are one object under each name.

        Raises:
            ConfigError: A value is not what a trainer of aiosync sends.
        """
        leaves = self.layout.manifest.leaves
        tensors: dict[str, torch.Tensor] = {}
        for leaf, view in zip(leaves, self.buffer.views(self.layout), strict=True):
            tensors.update(dict.fromkeys((leaf.name, *leaf.aliases), view))

        def tensor(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ConfigError(f"a value names the tensor {name!r}, which did not come with it")
            return tensors[name]

        values = {name: unpack_value(value, tensor) for name, value in self.values.items()}
        inside = {name for value in self.values.values() for name in referenced(value)}
        return {name: each for name, each in tensors.items() if name not in inside} | values


class WeightClient:
    """Asks a weight server, one call at a time. Holds no link between two calls.

    Args:
        url: ``tcp://host:port`` or ``unix:///path``.
        token: A secret that both sides prove that they have; it is never sent.
        tls: :class:`aiosync.TLS`, or an ``ssl.SSLContext`` of the side that dials.
        limits: What the other side may announce.

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
        self._dialler = Dialler(
            self._address,
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
        validate_timeout(timeout)
        hello = Hello(role="status", model_id="", pid=os.getpid())
        try:
            async with asyncio.timeout(timeout):
                link = await self._dialler.dial()
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
        if isinstance(answer, Refuse) and answer.error_type == RemoteProtocolError.__name__:
            raise ConnectError(
                f"{self._address} is a trainer, not a weight server: only `aiosync serve` reports "
                "its status"
            )
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

        Waits for a first version. The first attempt to connect has to succeed; after that a lost
        link is replaced until the time is up, and the transfer goes on where it stopped. What the
        other side makes of it may be illegal: then the transfer begins anew.

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
        validate_timeout(timeout)
        pull = _Pull(self._dialler, as_model_id(model_id), max(1, min_version), progress)
        try:
            async with asyncio.timeout(timeout):
                return await pull.run()
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise RecvTimeout(pull.describe(str(self._address), timeout or 0.0)) from exc
        finally:
            pull.close()


class _Pull:
    """One call of :meth:`WeightClient.pull`."""

    def __init__(
        self, dialler: Dialler, model_id: str, least: int, progress: PullProgress | None
    ) -> None:
        self._dialler = dialler
        self._model_id = model_id
        self._least = least
        self._progress = progress
        self._session = secrets.token_bytes(16)
        self._welcome: Welcome | None = None
        self._link: TCPTransport | None = None
        self._staging: Staging | None = None
        self._lost: AiosyncError | None = None
        self._arriving: tuple[int, int] | None = None  # epoch and version
        self._here = 0  # bytes of it
        self._sizes: dict[bytes, int] = {}  # of payloads, by the digest of the manifest
        self._moved = False  # something arrived over this link
        self._resumes = False  # a part was announced over this link
        self._reconnects = 0
        self._resumed = 0

    async def run(self) -> PulledWeights:
        backoff = Backoff()
        while True:
            try:
                return await self._attempt()
            except (AuthError, ConfigError):
                raise
            except (TransportError, ConnectTimeout) as exc:
                if self._welcome is None:
                    raise  # nobody is there, as far as anybody knows
                self._lost = exc
            except RemoteProtocolError as exc:
                if not self._resumes or self._staging is None:
                    raise
                # The two did not agree about the part that is here, perhaps: begin anew, once.
                self._staging.drop_part()
                self._lost = exc
            self.close()
            if self._moved:
                backoff.reset()
            self._reconnects += 1
            await backoff.wait()

    async def _attempt(self) -> PulledWeights:
        """Over one link."""
        self._moved = False
        link = self._link = await self._dialler.dial()
        partial = self._staging.prepare_resume() if self._staging is not None else None
        epoch, version, nbytes = partial or (None, None, 0)
        self._here, self._resumes = nbytes, nbytes > 0
        hello = Hello(
            role="receiver",
            model_id=self._model_id,
            pid=os.getpid(),
            strategy=ANY_STRATEGY,
            session=self._session,
            subscribe=False,
            partial_epoch=epoch,
            partial_version=version,
            partial_nbytes=nbytes,
        )
        self._welcome = await greet(link, hello, timeout=HANDSHAKE_SECONDS)
        if self._staging is None:
            self._staging = Staging(link)
        self._staging.next_link(link)
        await link.send(Fetch(self._least))
        while True:
            staged = await self._take_message(link, self._staging)
            if staged is not None:
                return await self._finish(link, staged)

    async def _take_message(self, link: TCPTransport, staging: Staging) -> Staged | None:
        received = await link.recv(into=staging.lender)
        message = received.message
        if isinstance(message, ManifestMessage):
            staging.learn(message.manifest)
            self._sizes = {message.manifest.digest: message.manifest.nbytes}
            return None
        if not isinstance(message, Update):
            raise RemoteProtocolError(f"the server sent an unexpected {type(message).__name__}")
        if (message.epoch, message.version) != self._arriving:
            self._arriving, self._here = (message.epoch, message.version), 0
        elif not self._moved:  # the first chunk over another link
            if message.chunk is None or message.chunk[0] == 0:
                self._here = 0  # from the beginning
            self._resumed += self._here
        self._moved = True
        part = staging.take_part(received)
        if isinstance(part, Resend):
            await link.send(part)
            return None
        self._here += received.nbytes
        if self._progress is not None:
            total = self._sizes.get(message.digest, self._here)
            self._progress(min(self._here, total), total)
        return part

    async def _finish(self, link: TCPTransport, staged: Staged) -> PulledWeights:
        try:
            ack = make_ack(staged.epoch, staged.version, AckStatus.APPLIED, None)
            await link.send(ack, timeout=_ATTEMPT_SECONDS)
        except AiosyncError:
            link.abort()  # everything is here; only the statistics of the other side are not
        return PulledWeights(
            model_id=self._model_id,
            epoch=staged.epoch,
            version=staged.version,
            layout=staged.layout,
            buffer=staged.flat,
            values=staged.values,
            reconnects=self._reconnects,
            resumed_nbytes=self._resumed,
        )

    def close(self) -> None:
        """Close the link; what has arrived stays."""
        if self._link is not None:
            self._link.abort()

    def describe(self, url: str, seconds: float) -> str:
        """Why there is nothing after ``seconds``."""
        what = f"model {self._model_id!r}"
        if self._lost is not None and not self._moved:
            return f"{url} was lost ({self._lost}) and not reached again within {seconds:g} s"
        if self._arriving is not None:
            return f"{self._here} bytes of {what} arrived from {url} within {seconds:g} s; not all"
        if self._welcome is None:
            return f"{url} did not answer within {seconds:g} s"
        if self._welcome.version == 0:
            return (
                f"{url} has no version of {what} yet, and got none within {seconds:g} s: is a "
                "trainer running, or the model_id another one?"
            )
        return (
            f"{url} has no version {self._least} of {what}, and got none within {seconds:g} s; "
            f"it had version {self._welcome.version}"
        )

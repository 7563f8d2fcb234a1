"""One call that gets the weights of a model, over as many links as it takes.

Must not import the command line.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectTimeout,
    RemoteProtocolError,
    TransportError,
)
from aiosync.receiver.updates import Staged, UpdateReader
from aiosync.rendezvous.dialer import Backoff, Dialer, is_final, retry
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, greet
from aiosync.tensors import FlatBuffer, Layout
from aiosync.tensors.values import inner_names, unpack_value
from aiosync.transports.base import Received, make_ack
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus
from aiosync.wire import (
    Fetch,
    Hello,
    Leave,
    ManifestMessage,
    Update,
    Welcome,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Pull", "PullProgress", "PulledWeights"]

PullProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are here and verified, and with how many there will be."""


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
        """Tensors and values by dotted name, as ``load_state_dict()`` takes them.

        The tensors are views of :attr:`buffer`; tied ones are one object under each name.

        Raises:
            ConfigError: A value is not what a trainer of aiosync sends.
        """
        tensors = dict(self.buffer.named_views(self.layout))

        def tensor(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ConfigError(f"a value names the tensor {name!r}, which did not come with it")
            return tensors[name]

        values = {name: unpack_value(value, tensor) for name, value in self.values.items()}
        inside = inner_names(self.values)
        return {name: each for name, each in tensors.items() if name not in inside} | values


class Pull:
    """One call of :meth:`WeightClient.pull`."""

    def __init__(
        self,
        dialer: Dialer,
        model_id: str,
        least: int,
        progress: PullProgress | None,
    ) -> None:
        self._dialer = dialer
        self._model_id = model_id
        self._least = least
        self._progress = progress
        self._session = secrets.token_bytes(16)
        self._welcome: Welcome | None = None
        self._link: TCPTransport | None = None
        self._updates = UpdateReader()
        self._lost: AiosyncError | None = None
        self._partial: tuple[int, int, int] | None = None  # announced over this link as here
        self._here: int | None = None  # verified bytes of what arrives
        self._total = 0  # bytes of it
        self._moved = False  # something arrived over this link
        self._reconnects = 0
        self._pauses = Backoff()

    async def run(self) -> PulledWeights:
        """Get the weights, over one link after the other."""
        return await retry(
            lambda left: self._attempt(), None, final=self._is_final, backoff=self._pauses
        )

    def _is_final(self, error: AiosyncError) -> bool:
        if isinstance(error, RemoteProtocolError):
            # The two did not agree about the part that was here, perhaps: begin anew, once.
            return self._partial is None
        # Before there was a Welcome nobody is there, as far as anybody knows.
        again = isinstance(error, (TransportError, ConnectTimeout)) and self._welcome is not None
        return is_final(error) or not again

    async def _attempt(self) -> PulledWeights:
        """Over one link."""
        self._moved = False
        self._partial = self._updates.partial
        try:
            link = self._link = await self._dialer.dial(again=self._welcome is not None)
            self._welcome = await greet(link, self._hello(), timeout=HANDSHAKE_SECONDS)
            self._updates.use_link(link)
            await link.send(Fetch(self._least))
            while (staged := self._take(await link.recv(into=self._updates.lender))) is None:
                pass
            epoch, version = staged.epoch, staged.version
            with contextlib.suppress(AiosyncError):  # it is here; the other side's statistics
                ack = make_ack(epoch, version, AckStatus.APPLIED, None)
                await link.send(ack, timeout=HANDSHAKE_SECONDS)
                await link.send(Leave(), timeout=HANDSHAKE_SECONDS)  # it is not lost
            return PulledWeights(
                *(self._model_id, epoch, version, staged.layout, staged.flat, staged.values),
                reconnects=self._reconnects,
            )
        except AiosyncError as exc:
            self._lost = exc
            self.close()
            if self._moved:
                self._pauses.reset()
            self._reconnects += 1
            raise

    def _hello(self) -> Hello:
        partial = self._partial or (None, None, 0)
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
        )

    def _take(self, received: Received) -> Staged | None:
        """A manifest, or a part of an update; the update that it completes, if it does."""
        message = received.message
        if isinstance(message, ManifestMessage):
            self._total = message.manifest.nbytes
        staged = self._updates.read(received)
        if isinstance(message, Update):
            self._moved = True
            partial = self._updates.partial
            self._here = self._total if staged is not None else 0 if partial is None else partial[2]
            if self._progress is not None:
                self._progress(self._here, self._total)
        return staged

    def close(self) -> None:
        """Close the link; what has arrived stays."""
        if self._link is not None:
            self._link.abort()

    def describe(self, within: str = "") -> str:
        """Why there is nothing yet, or ``within`` some time."""
        url, what = self._dialer.address, f"model {self._model_id!r}"
        if self._lost is not None and not self._moved:
            return f"{url} was lost ({self._lost}) and not reached again{within}"
        if self._here is not None:
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

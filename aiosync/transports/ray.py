"""Links inside a Ray cluster: to workers with aiosync, and to plain actors.

Ray is loaded when a link is made. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    RecvTimeout,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.transports._ray_actor import Weights
from aiosync.transports._ray_store import RayObjects, RayPlane, in_lines, landed, need_cluster
from aiosync.transports.base import Lender, Payload, Received, Transport, again, flat_view, make_ack
from aiosync.transports.data_plane import INLINE_NBYTES, DataPlaneTransport, SharedPayload
from aiosync.transports.stream import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Cancellation, Capabilities, Limits
from aiosync.wire import Hello, Manifest, ManifestMessage, Message, Refuse, Update

__all__ = ["RayActorTransport", "RayTransport"]

_NO_PEER = "the other end is an actor without aiosync: there is no second end to check"


class RayTransport(DataPlaneTransport):
    """A link whose large payloads travel through Ray's object store. Owns ``control``.

    ``recv()`` without lent buffers returns the object itself where the system allows it: memory
    that all receivers of a node share, and that nobody can write to. A write through it ends the
    process. The memory lives until nothing refers to it any more.

    Args:
        control: Connected link for messages.
        objects: What the sender's links share; made when first needed if omitted.
        inline_nbytes: Payloads up to this size travel in the control stream.

    Raises:
        ConfigError: Ray is not installed, or this process is not connected to a cluster.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="ray",
        cross_host=True,
        whole_payloads=True,
        zero_copy_recv=True,
        send_cancellation=Cancellation.BREAKS_LINK,
        recv_cancellation=Cancellation.BREAKS_LINK,
    )

    def __init__(
        self,
        control: FramedTransport,
        *,
        objects: RayObjects | None = None,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        super().__init__(control, RayPlane(objects), inline_nbytes)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[RayTransport, RayTransport]]:
        """Two connected ends in this process, closed when the context ends."""
        async with TCPTransport.pair(limits=limits) as (left, right):
            async with cls(left) as one, cls(right) as two:
                yield one, two


class RayActorTransport(Transport):
    """Brings weights to an actor that knows nothing of aiosync.

    Each update is one call of a method of the actor, with a dict of tensors by dotted name. The
    call's return is the acknowledgement, its exception the refusal. The tensors are views of
    Ray's object store, which every actor of a node shares: they are read-only, and writing to
    one ends the actor. ``load_state_dict()`` and ``copy_()`` into parameters are fine; for the
    former the scheme's strategy should be ``"state_dict"``, as the other also sends buffers that
    are not persistent.

    Give it to a sender: ``scheme.init_on_sender(model=..., transports={0: link})``.

    Args:
        actor: Handle of the actor.
        update_method: Name of the method to call with the weights.
        model_id: The model that the sender serves; set by a scheme that gets this link.

    Raises:
        ConfigError: Ray is not installed, or the actor has no such method.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="ray-actor",
        cross_host=True,
        whole_payloads=True,
        send_cancellation=Cancellation.SAFE,
        recv_cancellation=Cancellation.SAFE,
        exceptions={"*": _NO_PEER},
    )

    def __init__(
        self, actor: Any, update_method: str = "update_weights", *, model_id: str = "policy"
    ) -> None:
        self._ray = need_cluster()
        try:
            method = getattr(actor, update_method)
        except AttributeError as exc:
            raise ConfigError(f"{actor!r} has no method {update_method!r}") from exc
        self._method: Any = method.options(num_returns=1)  # whatever it returns, it is waited for
        self.model_id = model_id
        self._name = f"{actor!r}"
        self._objects: RayObjects | None = None
        self._manifest: Manifest | None = None
        hello = Hello("receiver", model_id, 0, strategy="any", has_target=True)
        self._answers: deque[Message] = deque([hello])
        self._arrived = asyncio.Event()
        self._sending = self._receiving = self._closed = False
        self._error: AiosyncError | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._error is None else "ended"
        return f"<{type(self).__name__} to {self._name}: {state}>"

    def _check(self) -> None:
        if self._closed:
            raise TransportClosed(f"this end of the link to {self._name} was closed")
        if self._error is not None:
            raise again(self._error)

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self, message: Message, payload: Payload = (), *, timeout: float | None = None
    ) -> None:
        """See :meth:`Transport.send`. Returns when the actor was called.

        Cancellation: class A; a payload that is on its way into the store gets there first.
        """
        if self._sending:
            raise TransportBusy(f"another send() is running on the link to {self._name}")
        self._sending = True
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(0)
                self._check()
                if isinstance(message, ManifestMessage):
                    self._manifest = message.manifest
                elif isinstance(message, Refuse):
                    self._end(PeerClosed(f"the sender refused the link: {message.error_text}"))
                elif isinstance(message, Update):
                    await self._update(message, payload)
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise SendTimeout(f"{self._name} was not called within {timeout or 0:g} s") from exc
        finally:
            self._sending = False

    async def _update(self, message: Update, payload: Payload) -> None:
        manifest = self._manifest
        if manifest is None or manifest.digest != message.digest:
            raise LocalProtocolError("an update names a manifest that was not sent last")
        if self._objects is None:
            self._objects = RayObjects()
        views = [view for view in map(flat_view, payload) if view.nbytes]
        memo = payload.memo if isinstance(payload, SharedPayload) else {}
        leaves = [
            ((leaf.name, *leaf.aliases), leaf.dtype, leaf.shape, leaf.offset, leaf.nbytes)
            for leaf in manifest.leaves
        ]
        rest = manifest.nbytes, leaves, dict(message.values)
        # Another digest, or other values, are another payload.
        key = ("ray-actor", manifest.digest)
        entry = await self._objects.put(memo, key, lambda: Weights(in_lines(views), *rest))
        self._check()
        if not self._ray.is_initialized():
            raise TransportBroken("this process is not connected to a Ray cluster any more")
        try:
            answered = landed(self._method.remote(entry.ref), asyncio.get_running_loop())
        except Exception as exc:  # of Ray, of many types; the caller of the scheme's send() sees it
            exc.__traceback__ = None  # its frames would keep the weights
            raise LocalProtocolError(
                f"{self._name} could not be called: {type(exc).__name__}: {exc}"
            ) from exc
        answered.add_done_callback(
            functools.partial(self._on_answer, message.epoch, message.version)
        )

    def _on_answer(self, epoch: int, version: int, done: asyncio.Future[Any]) -> None:
        if self._closed or done.cancelled():
            return
        error, exceptions = done.exception(), self._ray.exceptions
        text = str(error).strip().partition("\n")[0]
        reason = None if error is None else getattr(error, "cause", None) or error
        if isinstance(error, getattr(exceptions, "ActorUnavailableError", ())):
            reason = TransportBroken(
                f"{self._name} is restarting, or cannot be reached for the moment; it gets the "
                f"next update: {text}"
            )
        elif isinstance(error, exceptions.RayActorError):
            self._end(PeerClosed(f"{self._name} has died: {text}"))
            return
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._answers.append(make_ack(epoch, version, status, reason))
        self._arrived.set()

    def _end(self, error: AiosyncError) -> None:
        self._error = error
        self._arrived.set()

    # -- receiving -----------------------------------------------------------------------------

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`: first a Hello, then what became of each call."""
        if self._receiving:
            raise TransportBusy(f"another recv() is waiting on the link to {self._name}")
        self._receiving = True
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(timeout):
                while not self._answers or self._closed:
                    self._check()
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as exc:
            raise RecvTimeout(f"{self._name} did not answer within {timeout or 0:g} s") from exc
        finally:
            self._receiving = False
        message = self._answers.popleft()
        if isinstance(message, Hello):
            message = replace(message, model_id=self.model_id)
        return Received(message)

    async def idle(self) -> None:
        """Wait until nothing reads any payload; see :meth:`RayObjects.idle`."""
        if self._objects is not None:
            await self._objects.idle()

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Let go of the actor, which goes on living. What it was called with, it still does."""
        self.abort()
        if self._objects is not None:
            await self._objects.aclose()

    def abort(self) -> None:
        """See :meth:`aclose`."""
        self._closed = True
        self._manifest = None
        self._arrived.set()
        if self._objects is not None:
            self._objects.abort()

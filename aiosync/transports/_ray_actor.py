"""A plain Ray actor as the far end of a link: one of its methods is called with the weights.

Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    TransportBusy,
    TransportClosed,
)
from aiosync.transports._buffers import flat_view
from aiosync.transports._carrier import SharedPayload
from aiosync.transports._link import again
from aiosync.transports._ray_objects import RayObjects, in_lines, landed, need_cluster
from aiosync.transports._ray_remote import Weights
from aiosync.transports.base import Lender, Payload, Received, Transport, make_ack
from aiosync.types import AckStatus, Cancellation, Capabilities
from aiosync.wire import Hello, Manifest, ManifestMessage, Message, Refuse, Update

__all__ = ["RayActorTransport"]

_ANY_STRATEGY = "any"
_NO_PEER = "the other end is an actor without aiosync: there is no second end to check"


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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._objects: RayObjects | None = None
        self._manifests: dict[bytes, Manifest] = {}
        self._inbox: deque[Message] = deque()
        self._arrived: asyncio.Event = asyncio.Event()
        self._greeted = self._sending = self._receiving = self._closed = False
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
                await self._send(message, payload)
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise SendTimeout(f"{self._name} was not called within {timeout or 0:g} s") from exc
        finally:
            self._sending = False

    async def _send(self, message: Message, payload: Payload) -> None:
        if isinstance(message, ManifestMessage):
            manifest = message.manifest
            self._manifests = {manifest.digest: manifest}
        elif isinstance(message, Refuse):
            self._error = PeerClosed(f"the sender refused the link: {message.error_text}")
            self._arrived.set()
        elif isinstance(message, Update):
            await self._update(message, payload)
        elif payload:
            raise LocalProtocolError(f"{type(message).__name__} takes no payload")

    async def _update(self, message: Update, payload: Payload) -> None:
        manifest = self._manifests.get(message.digest)
        if manifest is None:
            raise LocalProtocolError("an update names a manifest that was never sent")
        loop = self._loop = asyncio.get_running_loop()
        if self._objects is None:
            self._objects = RayObjects()
        views = [view for view in map(flat_view, payload) if view.nbytes]
        memo = payload.memo if isinstance(payload, SharedPayload) else {}
        make = functools.partial(_weights, views, manifest, message.values)
        # Another digest, or other values, are another payload.
        key = ("ray-actor", manifest.digest)
        entry = await self._objects.put(memo, key, make, publish=False)
        self._check()
        if not self._ray.is_initialized():
            raise TransportBroken("this process is not connected to a Ray cluster any more")
        try:
            answered = landed(self._method.remote(entry.ref), loop)
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
        error = done.exception()
        exceptions = self._ray.exceptions
        text = "" if error is None else str(error).strip().partition("\n")[0]
        reason = None if error is None else getattr(error, "cause", None) or error
        if isinstance(error, getattr(exceptions, "ActorUnavailableError", ())):
            reason = TransportBroken(
                f"{self._name} is restarting, or cannot be reached for the moment; it gets the "
                f"next update: {text}"
            )
        elif isinstance(error, exceptions.RayActorError):
            self._error = PeerClosed(f"{self._name} has died: {text}")
            self._arrived.set()
            return
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._inbox.append(make_ack(epoch, version, status, reason))
        self._arrived.set()

    # -- receiving -----------------------------------------------------------------------------

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`: first a Hello, then what became of each call."""
        del into
        if self._receiving:
            raise TransportBusy(f"another recv() is waiting on the link to {self._name}")
        self._receiving = True
        try:
            await asyncio.sleep(0)
            if not self._greeted:
                self._check()
                self._greeted = True
                return Received(
                    Hello(
                        role="receiver",
                        model_id=self.model_id,
                        pid=0,
                        strategy=_ANY_STRATEGY,
                        has_target=True,
                    )
                )
            async with asyncio.timeout(timeout):
                while not self._inbox:
                    self._check()
                    self._arrived.clear()
                    await self._arrived.wait()
            self._check_open()
            return Received(self._inbox.popleft())
        except TimeoutError as exc:
            if isinstance(exc, AiosyncError):
                raise
            raise RecvTimeout(f"{self._name} did not answer within {timeout or 0:g} s") from exc
        finally:
            self._receiving = False

    def _check_open(self) -> None:
        if self._closed:
            self._check()

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
        self._inbox.clear()
        self._manifests.clear()
        self._arrived.set()
        if self._objects is not None:
            self._objects.abort()


def _weights(views: list[memoryview], manifest: Manifest, values: Mapping[str, Any]) -> Weights:
    leaves = [
        ((leaf.name, *leaf.aliases), leaf.dtype, leaf.shape, leaf.offset, leaf.nbytes)
        for leaf in manifest.leaves
    ]
    nbytes = sum(view.nbytes for view in views)
    if nbytes != manifest.nbytes:
        raise RemoteProtocolError(f"{nbytes} bytes do not fit a manifest of {manifest.nbytes}")
    return Weights(in_lines(views), nbytes, leaves, dict(values))

"""The receiver's half of a scheme: ``init_on_receiver``, ``receive`` and what they need.

Must not import the sender's half.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
    RecvTimeout,
    SyncTimeout,
)
from aiosync.schemes._core import SchemeCore
from aiosync.schemes._handshake import greet
from aiosync.schemes.guard import Reading
from aiosync.schemes.handles import AppliedUpdate
from aiosync.schemes.receiver import WeightReceiver
from aiosync.schemes.rendezvous import dial
from aiosync.transports.base import Transport
from aiosync.wire import Hello, Welcome

__all__ = ["ReceivingScheme"]


class ReceivingScheme(SchemeCore):
    """Methods of a receiver; see :class:`aiosync.WeightSyncScheme`."""

    def _transport_over(self, sock: socket.socket, name: str) -> Transport:
        """A link over a connected Unix socket."""
        raise LocalProtocolError(f"{type(self).__name__} has no link to {name}")

    def create_transport(self, pipe_or_context: Any) -> Transport:
        """A link over a ``multiprocessing`` connection or a socket. Needs a running loop."""
        raise LocalProtocolError(f"{type(self).__name__} has no transport")

    def init_on_receiver(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        worker_idx: int | None = None,
        model: Any = None,
        weights: Any = None,
        pipe: Any = None,
        transport: Transport | None = None,
    ) -> None:
        """Make this object a receiver. Local only: nothing is sent and nobody is waited for.

        Assigning another :attr:`model`, :attr:`context` or :attr:`weights` to a connected
        receiver, also with ``apply="manual"``, guards the new model and gives it the weights of
        :attr:`version` before it returns. The old model keeps its values in memory of its own,
        and loses its hooks. If the weights do not fit, the assignment raises
        :class:`~aiosync.ApplyError`, in whatever thread it is made, and nothing changes. While a
        forward pass runs in another thread, the hooks and the check are made at once, and the
        new model gets the weights when that pass ends. ``model = None`` drops the model: the
        version is 0 then, and the next model, which may have other shapes, gets the next update.

        Args:
            model_id: Name of the model, as the sender calls it.
            context: Owner of the model (kept as a weak reference).
            worker_idx: Index of this worker, from 0, which no other live worker has; ``None``
                lets the sender choose.
            model: Module to keep up to date. May be given later, by setting :attr:`model`.
            weights: TensorDict or dict of tensors to keep up to date, instead of a module.
            pipe: Connection to the sender, instead of the scheme's own socket.
            transport: Link to the sender, instead of the scheme's own socket.

        Raises:
            ConfigError: The arguments exclude each other, or updates could tear: a target
                without forward hooks needs ``guard="reading"`` or ``apply="manual"``.
            LocalProtocolError: This object has a role already.
        """
        self._check_role("init_on_receiver")
        if model is not None and weights is not None:
            raise ConfigError("weights cannot be provided if model is provided")
        if pipe is not None and transport is not None:
            raise ConfigError("pipe cannot be provided if transport is provided")
        target = model if model is not None else weights
        self._check_guard(target)
        self._model_id = model_id or self._model_id or "policy"
        self._model, self._weights = model, weights
        self.context = context
        self._pipe = transport if transport is not None else pipe
        self._worker_idx = worker_idx if worker_idx is not None else _worker_idx_of(context)
        self._role = "receiver"

    init_on_worker = init_on_receiver

    async def _connect_receiver(self, worker_idx: int | None, timeout: float | None) -> None:
        assert self._loop is not None
        started = self._loop.time()
        if worker_idx is not None:
            self._worker_idx = worker_idx
        transport = await self._reach(timeout)
        self._receiver = receiver = WeightReceiver(
            transport,
            resolve=self._resolve_target,
            apply=self.apply,
            copy=self.apply_copy,
            strict=self.strict,
            guard=self._guard_object,
            install_hooks=self.guard == "forward",
            on_applied=self._on_applied,
            flipped=self._on_flip,
            relay=lambda: self._relay,
            relink=self._relink,
        )
        receiver.prepare_target()
        left = None if timeout is None else max(0.0, timeout - self._loop.time() + started)
        welcome = await self._introduce(receiver, left)
        self._worker_idx = welcome.worker_idx
        receiver.start()
        if welcome.version == 0 or not self._subscribes:
            return
        late = ConnectTimeout(f"the initial weights did not arrive within {timeout or 0:g} s")
        left = None if timeout is None else max(0.0, timeout - self._loop.time() + started)

        def arrived() -> bool:
            if receiver.refused is not None:
                raise _apply_error(*receiver.refused) from receiver.refused[1]
            if self._resolve_target() is None:
                return receiver.has_staged
            if self.apply == "manual" and receiver.has_staged:
                receiver.apply_soon()
            return receiver.inbox.version > 0

        await receiver.wait_until(arrived, timeout=left, late=late)
        self._reported = receiver.inbox.version

    # What finds another link after one was lost; None where a lost link is the end.
    _relink: Callable[[AiosyncError], Awaitable[Transport]] | None = None
    _subscribes = True  # gets every update, and not only those it asks for

    def _hello(self) -> Hello:
        """What this receiver says first on a link."""
        return Hello(
            role="receiver",
            model_id=self._model_id or "policy",
            pid=os.getpid(),
            worker_idx=self._worker_idx,
            strategy=self.strategy_str,
            has_target=self._resolve_target() is not None and self.apply == "auto",
        )

    async def _introduce(self, receiver: WeightReceiver, timeout: float | None) -> Welcome:
        """The handshake on the link of ``receiver``."""
        return await greet(receiver.transport, self._hello(), timeout=timeout)

    async def _reach(self, timeout: float | None) -> Transport:
        if isinstance(self._pipe, Transport):
            return self._pipe
        if self._pipe is not None:
            return self.create_transport(self._pipe)
        sock = await dial(self._address, sender_pid=self._sender_pid, timeout=timeout)
        return self._transport_over(sock, "the trainer")

    def _resolve_target(self) -> Any:
        if self._weights is not None:
            return self._weights
        try:
            return self.model
        except AttributeError:
            return None  # the context has no such model yet

    def _on_applied(self, epoch: int, version: int) -> None:
        """Called on the loop after each applied update; subclasses may extend it."""

    def _on_flip(self, epoch: int, version: int) -> None:
        if self._flipped is None:
            return
        try:
            self._flipped(epoch, version)
        except Exception as exc:  # noqa: BLE001 - of who asked to be told; his loop says it
            if self._loop is not None:
                context = {"message": "a look at an update failed", "exception": exc}
                self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)

    async def receive(self, *, timeout: float | None = None) -> AppliedUpdate | None:
        """Wait for the next update that is applied and was not returned before.

        Updates are applied in the background whether or not this is called. With
        ``apply="manual"`` this applies what is staged, between two forward passes.

        Args:
            timeout: Seconds; ``None`` waits until the trainer goes away, 0 only looks.

        Returns:
            The newest applied update, or ``None`` when the timeout passed without one.

        Raises:
            ApplyError: ``apply="manual"`` and the staged update does not fit the model.
            PeerClosed: The trainer went away.
            LocalProtocolError: Not a connected receiver.

        Cancellation:
            Class A.
        """
        receiver = self._require_receiver("receive")
        manual = self.apply == "manual"

        def arrived() -> bool:
            if manual:
                receiver.refused = None
                receiver.apply_soon()
                if receiver.refused is not None:
                    version, error = receiver.refused
                    raise _apply_error(version, error) from error
            return receiver.inbox.version not in (0, self._reported)

        try:
            if timeout is not None and timeout <= 0:
                await asyncio.sleep(0)
                if not arrived():
                    receiver.check()
                    return None
            else:
                await receiver.wait_until(arrived, timeout=timeout, late=RecvTimeout())
        except RecvTimeout:
            return None
        self._reported = receiver.inbox.version
        return AppliedUpdate(
            receiver.inbox.epoch or 0,
            receiver.inbox.version,
            self._model_id or "policy",
            lambda: self.weights,
        )

    async def _wait_until_applied(
        self, version: int, limit: float | None, late: RecvTimeout
    ) -> int:
        receiver = self._require_receiver("wait_for_version")
        manual = self.apply == "manual"

        def reached() -> bool:
            if manual:
                receiver.apply_soon()
            if receiver.refused is not None and receiver.refused[0] >= version:
                raise _apply_error(*receiver.refused) from receiver.refused[1]
            return receiver.inbox.version >= version

        await receiver.wait_until(reached, timeout=limit, late=late)
        return receiver.inbox.version

    async def pull(self, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """Ask the trainer for its newest version, and wait until the model has it.

        Args:
            min_version: The least version to be content with; the trainer answers once it has
                it. ``None`` takes what there is now, which may be nothing.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The version that the model has now; 0 if the trainer has not sent any.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: The update was refused by the model.
            LocalProtocolError: Not a connected receiver.

        Cancellation:
            Class A; the update may still come.
        """
        receiver = self._require_receiver("pull")
        least = 0 if min_version is None else min_version
        limit = self._limit(timeout)
        late = RecvTimeout(f"no version from {least} on was applied within {limit or 0:g} s")
        inbox, manual = receiver.inbox, self.apply == "manual"
        before, answers = (inbox.epoch, inbox.version), receiver.answers
        receiver.refused = None
        receiver.fetch(least)

        def arrived() -> bool:
            if manual:
                receiver.apply_soon()
            if receiver.refused is not None:
                raise _apply_error(*receiver.refused) from receiver.refused[1]
            if inbox.version < least or receiver.has_staged or inbox.lag:
                return False
            return receiver.answers != answers or (inbox.epoch, inbox.version) != before

        await receiver.wait_until(arrived, timeout=limit, late=late)
        return inbox.version

    def reading(self) -> Reading:
        """Context manager: what is computed inside sees one version of the weights.

        Forward passes of the model itself need none. ``with`` in threads and in code without
        awaits, ``async with`` in coroutines that await inside.
        """
        return Reading(self._guard_object)

    def apply_pending(self) -> int | None:
        """Apply the staged update now, on this thread. For ``apply="manual"``.

        Returns:
            The version that was applied, or ``None`` when nothing was staged.

        Raises:
            ApplyError: It does not fit the model, which kept its version.
            LocalProtocolError: Not a connected receiver, or called inside a forward pass.
        """
        if self._receiver is None or self._closed:
            self._check_open()
            raise LocalProtocolError("apply_pending() needs a connected receiver")
        return self._receiver.apply_pending()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Put weights into this receiver's model by hand, between two forward passes.

        Args:
            weights: TensorDict or state dict; copied, never aliased.
            inplace: Keep the parameter objects; otherwise replace them.

        Raises:
            ManifestMismatch: They do not fit; nothing was changed.
            LocalProtocolError: Not a receiver.
            ConfigError: There is no model.
        """
        self._check_open()
        if self._role == "sender":
            raise LocalProtocolError("apply_weights() called on a sender side.")
        if self._role is None:
            raise LocalProtocolError(
                "apply_weights() called before init_on_receiver has been called."
            )
        target = self._resolve_target()
        if target is None:
            raise ConfigError("No model registered")

        def apply() -> None:
            self._strategy.apply_weights(target, weights, inplace=inplace)

        if not self._guard_object.exclusively(apply, timeout=30.0):
            raise SyncTimeout("a forward pass in another thread did not end within 30 s")

    def _require_receiver(self, method: str) -> WeightReceiver:
        self._check_open()
        if self._role != "receiver":
            raise LocalProtocolError(
                f"{method}(): Must be initialized on receiver before receiving weights: call "
                "init_on_receiver() and connect() first"
            )
        if self._receiver is None or not self._connected:
            raise LocalProtocolError(
                f"{method}(): Must be synchronized on receiver before receiving weights: "
                "await scheme.connect() first"
            )
        self._check_loop()
        return self._receiver


def _apply_error(version: int, error: BaseException) -> ApplyError:
    return ApplyError(
        f"version {version} could not be applied: {type(error).__name__}: {error}",
        version=version,
        remote_type=type(error).__name__,
    )


def _worker_idx_of(context: Any) -> int | None:
    try:
        return getattr(context, "worker_idx", None)
    except RuntimeError:
        return None  # a collector that has no index yet

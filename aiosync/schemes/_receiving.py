"""The receiver's half of a scheme: ``init_on_receiver``, ``receive`` and what they need.

Must not import the sender's half.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

from torch import nn

from aiosync.errors import (
    AiosyncError,
    AuthError,
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
)
from aiosync.protocol.indices import as_index
from aiosync.receiver.guard import Reading
from aiosync.rendezvous.dialer import Backoff, retry
from aiosync.rendezvous.handshake import Refused, greet
from aiosync.rendezvous.unix import NobodyListens, connect
from aiosync.schemes._context import as_model_id
from aiosync.schemes._following import FollowingScheme, apply_error
from aiosync.schemes._transforming import Transform
from aiosync.schemes.receiver import WeightReceiver
from aiosync.tensors.apply import Loader, LoadTarget
from aiosync.transports._link import without_frames
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import can_lock
from aiosync.wire import Hello, Welcome

__all__ = ["ReceivingScheme"]


class ReceivingScheme(FollowingScheme):
    """Methods of a receiver; see :class:`aiosync.WeightSyncScheme`."""

    def init_on_receiver(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        worker_idx: int | None = None,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        pipe: Any = None,
        transport: Transport | None = None,
    ) -> None:
        """Make this object a receiver. Local only: it sends nothing and waits for nothing.

        Assigning another :attr:`model`, :attr:`context` or :attr:`weights` to a connected
        receiver, also with ``apply="manual"``, guards the new model and gives it the weights of
        :attr:`version` before it returns. The old model keeps its values in memory of its own,
        and loses its hooks. If the weights do not fit, the assignment raises
        :class:`~aiosync.ApplyError`, in whatever thread it is made, and nothing changes. While a
        forward pass runs in another thread, the hooks and the check are made at once, and the
        new model gets the weights when that pass ends. ``model = None`` drops the model, also when
        that pass ends: the version is 0 then, and the next model, which may have other shapes,
        gets the next update.

        Args:
            model_id: Name of the model, as the sender calls it.
            context: Owner of the model (kept as a weak reference). With ``apply="auto"``,
                connecting warns if it has no such model, for which updates then wait.
            worker_idx: Index of this worker, from 0, which no other live worker has; ``None``
                lets the sender choose.
            model: Module to keep up to date. May be given later, by setting :attr:`model`.
            weights: TensorDict or dict of tensors to keep up to date, instead of a module.
            load: Function that is called with all names and tensors of each version, instead of
                a module: ``load(weights: Iterable[tuple[str, Tensor]])``. It is called wherever
                updates are applied. The tensors are views of received memory, valid and
                unchanged until it returns: it copies what it keeps, and writes to none. If it
                raises, the update is refused; it must itself undo what it changed.
            transform: Turns the names and tensors of each
                version into those that the model expects: ``transform(weights) ->
                Iterable[tuple[str, Tensor]]``, for example a :class:`aiosync.WeightMap`. It runs in
                a thread while the event loop goes on, and its result is copied. If it raises, the
                update is refused. Values that are not tensors, and what is inside them, are passed
                on unchanged. The trainer hears nothing meanwhile: over streams it must not take
                longer than its ``stall_timeout``.
            pipe: Connection to the sender, instead of the scheme's own socket.
            transport: Link to the sender, instead of the scheme's own socket.

        Raises:
            ConfigError: The arguments exclude each other, or updates could tear: a target
                without forward hooks, such as a scripted module, needs ``guard="reading"``
                or ``apply="manual"``.
            LocalProtocolError: This object already has a role.
        """
        self._check_role("init_on_receiver")
        if model is not None and weights is not None:
            raise ConfigError("weights cannot be provided if model is provided")
        if load is not None and (model is not None or weights is not None):
            raise ConfigError("load cannot be provided if model or weights are provided")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform must be callable, got {type(transform).__name__}")
        if pipe is not None and transport is not None:
            raise ConfigError("pipe cannot be provided if transport is provided")
        loader = None if load is None else LoadTarget(load)
        target = model if model is not None else weights if weights is not None else load
        self._check_guard(target)
        if self._prepare_model is not None:
            self._prepare_model(target)
        self._model_id = as_model_id(model_id or self._model_id or "policy")
        self._model, self._weights = model, weights
        self._loader, self._transform = loader, transform
        self.context = context
        self._pipe = transport if transport is not None else pipe
        found = worker_idx if worker_idx is not None else self._worker_idx  # assigned before
        found = found if found is not None else _worker_idx_of(context)
        self._worker_idx = None if found is None else as_index("worker_idx", found)
        self._role = "receiver"

    init_on_worker = init_on_receiver

    async def _connect_receiver(self, worker_idx: int | None, timeout: float | None) -> None:
        await self._join(worker_idx, timeout)
        lacks = self._why_no_model() if self.apply == "auto" else None
        if lacks is not None:  # a model that comes late, or a name that is wrong
            warnings.warn(
                f"{lacks}: updates wait until there is one, or until scheme.model is set",
                stacklevel=3,
            )

    async def _join(self, worker_idx: int | None, timeout: float | None) -> None:
        assert self._loop is not None
        started = self._loop.time()
        if worker_idx is not None:
            self._worker_idx = as_index("worker_idx", worker_idx)
        if isinstance(model := self._resolve_target(), nn.Module):  # may be the context's
            self._check_guard(model)
        transport = await self._reach(timeout)
        self._receiver = receiver = WeightReceiver(
            transport,
            resolve=self._resolve_target,
            apply=self.apply,
            copy=self.apply_copy or self._loader is not None,
            strict=self.strict,
            guard=self._guard_object,
            install_hooks=self.guard == "forward",
            on_applied=self._on_applied,
            flipped=self._on_flip,
            relay=lambda: self._relay,
            transform=self._transform,
            relink=self._relink,
            promises=self._promises,
        )
        left = None if timeout is None else max(0.0, timeout - self._loop.time() + started)
        welcome = await self._introduce(receiver, left)
        self._worker_idx = welcome.worker_idx
        receiver.prepare_target()
        receiver.start()
        if welcome.version == 0 or not self._subscribes or not self._waits_for_first:
            return
        late = ConnectTimeout(f"the initial weights did not arrive within {timeout or 0:g} s")
        left = None if timeout is None else max(0.0, timeout - self._loop.time() + started)

        def arrived() -> bool:
            refused = receiver.refused
            # What comes before the newest may be a mistake that all workers have refused.
            if refused is not None and (
                refused[0] >= welcome.version or receiver.inbox.newest_epoch != welcome.epoch
            ):
                raise apply_error(*refused) from refused[1]
            if self._resolve_target() is None:
                return receiver.has_staged
            if self.apply == "manual" and receiver.has_staged:
                receiver.apply_soon()
            inbox = receiver.inbox
            if inbox.epoch == welcome.epoch:  # the newest of each name, one after the other
                return inbox.version >= welcome.version
            return inbox.version > 0

        try:
            await receiver.wait_until(arrived, timeout=left, late=late)
        except ConnectTimeout as exc:
            if receiver.cut_off is None:
                raise
            why = receiver.cut_off[1]  # and not only that the time is up
            raise ConnectTimeout(f"{exc}; the link was lost: {why}") from why
        self._reported = receiver.inbox.version

    # What finds another link after one was lost; None where a lost link is the end.
    _relink: Callable[[AiosyncError], Awaitable[Transport]] | None = None
    _waits_for_first = True  # connect() returns once the initial weights are applied
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

    def _hello_on(self, link: Transport) -> Hello:
        hello = self._hello()
        if link.slots is not None:
            hello = dataclasses.replace(hello, slots=can_lock())
        return hello

    # What ends one handshake only: the next one may work.
    _tries_again: type[AiosyncError] = Refused

    async def _introduce(self, receiver: WeightReceiver, timeout: float | None) -> Welcome:
        """The handshake on the link of ``receiver``; on another one if that was not let in."""
        loop = asyncio.get_running_loop()
        give_up = None if timeout is None else loop.time() + timeout
        backoff = Backoff()
        lost: AiosyncError | None = None

        def left() -> float | None:
            return None if give_up is None else max(0.0, give_up - loop.time())

        while True:
            try:
                if lost is not None:
                    await backoff.wait()
                    receiver.use_link(await self._reach(left()))
                hello = self._hello_on(receiver.transport)
                return await greet(receiver.transport, hello, timeout=left())
            except (AuthError, ConfigError, LocalProtocolError):
                raise
            except ConnectTimeout as exc:
                if lost is None:
                    raise
                text = f"{lost}; no other attempt worked within {timeout:g} s"
                raise ConnectTimeout(text) from exc
            except self._tries_again as exc:
                if self._pipe is not None:
                    raise
                lost = without_frames(exc)
                receiver.transport.abort()

    async def _reach(self, timeout: float | None) -> Transport:
        if isinstance(self._pipe, Transport):
            return self._pipe
        if self._pipe is not None:
            return self.create_transport(self._pipe)

        async def attempt() -> socket.socket:
            return connect(self._address, listener_pid=self._sender_pid)[0]

        def late(why: str) -> ConnectTimeout:
            return ConnectTimeout(
                f"no trainer listened within {timeout:g} s: call init_on_sender() and connect() on "
                f"the trainer's copy of this scheme{why}"
            )

        def final(error: AiosyncError) -> bool:
            return not isinstance(error, NobodyListens)

        pauses = Backoff(0.005, 0.1)
        sock = await retry(attempt, timeout, late=late, final=final, backoff=pauses)
        return self._transport_over(sock, "the trainer")

    @property
    def receiver_transport(self) -> Transport | None:
        """The link to the trainer, the last one if it was lost; ``None`` where there was none.

        For inspection only: the scheme sends and receives on it, on its event loop.
        """
        return None if self._receiver is None else self._receiver.transport

    def _resolve_target(self) -> Any:
        if self._loader is not None:
            return self._loader
        if self._weights is not None:
            return self._weights
        if self._model is not None:
            return self._model
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

    def reading(self) -> Reading:
        """Context manager: what is computed inside sees one version of the weights.

        Forward passes of the model itself do not need it. ``with`` in threads and in code without
        awaits, ``async with`` in coroutines that await inside.
        """
        return Reading(self._guard_object)

    def apply_pending(self) -> int | None:
        """Apply the staged update now, on this thread. For ``apply="manual"``.

        Returns:
            The version that was applied, or ``None`` when nothing was staged, or there is no
            model yet.

        Raises:
            ApplyError: It does not fit the model, which kept its version.
            LocalProtocolError: Not a connected receiver, or called inside a forward pass.
            SyncTimeout: A forward pass of another thread did not end within 30 seconds; on an
                event loop it is not waited for.
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
            LocalProtocolError: Not a receiver, or called inside a forward pass or a
                :meth:`reading` block, which would see two versions.
            ConfigError: There is no model.
            SyncTimeout: Another thread's forward pass did not end within 30 seconds; on an
                event loop it is not waited for.
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

        self._guard_object.refuse_inside_read("apply_weights")

        def apply() -> None:
            self._strategy.apply_weights(target, weights, inplace=inplace)

        advice = "call apply_weights() again, or in a thread"
        self._guard_object.between_reads(apply, advice=advice)


def _worker_idx_of(context: Any) -> int | None:
    try:
        return getattr(context, "worker_idx", None)
    except RuntimeError:
        return None  # a collector that has no index yet

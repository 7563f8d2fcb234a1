"""What is below the older generation's schemes: the portal, pipes, and the calls of senders.

Must not import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from multiprocessing import active_children
from typing import TYPE_CHECKING, Any

import aiosync.schemes as aio
from aiosync import sync
from aiosync.errors import AiosyncError, ConfigError, TransportClosed
from aiosync.legacy._attachment import Attachment
from aiosync.legacy._links import PipeLinks, Sending
from aiosync.legacy._strategy import hinting
from aiosync.sync._portal import Lease, lease, refuse_inside_loop

if TYPE_CHECKING:
    from aiosync.legacy._receiver import WeightReceiver
    from aiosync.legacy._schemes import WeightSyncScheme
    from aiosync.legacy._sender import WeightSender

__all__ = ["Running"]

_EXIT_SECONDS = 5.0


class _Tenant:
    """What a scheme leaves on the portal. Nobody closes schemes of this generation: no word."""

    def __init__(self, scheme: aio.WeightSyncScheme, pipes: PipeLinks | Attachment) -> None:
        self._scheme = scheme
        self._pipes = pipes

    def forgotten(self) -> None:
        return None

    def abort(self) -> None:
        self._pipes.say_goodbye()
        self._scheme.abort()
        if isinstance(self._pipes, PipeLinks):
            self._pipes.close()
        else:
            self._pipes.abort()


class Running(sync.WeightSyncScheme):
    """A blocking scheme whose pipes are answered in the background."""

    _makes_links = False  # of pipes, and not transports of this generation
    _apply_given = False

    def _adopt(self, scheme: aio.WeightSyncScheme) -> None:
        links: PipeLinks | None = self.__dict__.get("_links")
        attachment: Attachment | None = self.__dict__.get("_attachment")
        super()._adopt(scheme)
        if links is not None:  # forked: the pipes are the parent's
            links.close()
        if attachment is not None:
            attachment.forget()
        self._links: PipeLinks | None = None
        self._attachment: Attachment | None = None
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._twin: WeightSyncScheme | None = None
        self._cached: Any = None
        self._pipeless = False  # init_on_worker() was called without a pipe

    # -- what senders and receivers do ---------------------------------------------------------

    def _check_registered(self, weights: Any) -> None:
        """Raise unless the model may be sent."""

    def _initial_weights(self) -> Any:
        """What workers get that attach before the first send; ``None`` for nothing."""
        return None

    def _started(self, what: str) -> PipeLinks | None:
        self._check(what)
        links = self._links
        if links is not None and not links.started:
            self._call(links.start(self._initial_weights()))
        return links

    def _deliver(self, weights: Any, worker_ids: int | Iterable[int] | None) -> Iterable[int]:
        links = self._started("send")
        if links is None:
            self.send(weights, worker_ids)
            return ()
        with hinting():
            missing: Iterable[int] = self._call(links.send(_something(weights), worker_ids))
        return missing

    def _begin(self, weights: Any, worker_ids: int | Iterable[int] | None) -> Sending:
        links = self._started("send_async")
        if links is None:
            return Sending(self.send_async(weights, worker_ids), None, frozenset())
        sending: Sending = self._call(links.begin(_something(weights), worker_ids))
        return sending

    def _finish(self, sending: Sending) -> Iterable[int]:
        self._check("wait_async")
        if self._links is None:
            self.wait_async()
            return ()
        with hinting():
            missing: Iterable[int] = self._call(self._links.finish(sending))
        return missing

    def _look(self, model: Any, timeout: float | None) -> bool:
        if self._attachment is None:
            return self.receive(timeout=timeout) is not None
        with hinting():
            received: bool = self._ask("receive", lambda each: each.receive(model, timeout))
        return received

    def _ask(self, what: str, ask: Callable[[Attachment], Coroutine[Any, Any, Any]]) -> Any:
        """Ask the attachment something, or say why there is no link any more."""
        attachment = self._attachment
        assert attachment is not None
        error = attachment.error
        if error is None:
            try:
                self._check(what)
                return self._call(ask(attachment))
            except TransportClosed:
                error = attachment.why_closed()  # a link that ended meanwhile, perhaps
                if error is None:
                    raise
        self.shutdown()
        raise error

    @property
    def _reads_by_hand(self) -> bool:
        # Elsewhere weights are applied as soon as they are here.
        return self._attachment is not None and self._scheme.apply == "manual"

    def _is_up(self) -> bool:
        return self._attachment is not None and self._attachment.is_up

    def _poll(self, timeout: float | None) -> bool:
        try:
            there: bool = self._ask("poll", lambda each: each.poll(timeout))
        except AiosyncError:
            if self._attachment is None or self._attachment.error is None:
                raise
            return True  # _peek() raises it
        return there

    def _peek(self) -> tuple[str, Any]:
        found: tuple[str, Any] = self._ask("recv", lambda each: each.peek())
        return found

    # -- the portal ----------------------------------------------------------------------------

    @property
    def _pipes(self) -> PipeLinks | Attachment | None:
        return self._links if self._links is not None else self._attachment

    def _call(self, coroutine: Any) -> Any:
        pipes = self._pipes
        if pipes is not None:
            with self._lock:
                if self._lease is None or not self._lease.valid:
                    self._lease = lease(_Tenant(self._scheme, pipes))
                    _deliver_at_exit(self)
        return super()._call(coroutine)

    def _after_call(self, held: Lease) -> None:
        if self._attachment is None or not self._attachment.goes_on:
            super()._after_call(held)
            return
        with self._lock:
            self._calls -= 1  # what goes on needs the portal, though the scheme has no link yet

    def _deliver_rest(self, give_up: float) -> None:
        links, held = self._links, self._lease
        if links is None or not links.started or held is None or not held.valid:
            return
        if not self._scheme._closed:
            with contextlib.suppress(AiosyncError):  # the program has ended: nobody would see it
                self._call(links.deliver_rest(give_up - time.monotonic(), _has_children))

    def connect(self, **kwargs: Any) -> None:  # type: ignore[misc]  # pipes need no connect()
        """As :meth:`aiosync.sync.WeightSyncScheme.connect`; with pipes there is nothing to do."""
        if self._attachment is None and self._started("connect") is None:
            super().connect(**kwargs)

    def shutdown(self) -> None:
        """Close every link, task, socket and buffer of this object. Idempotent, bounded."""
        self._after_fork()
        try:
            if self._pipes is not None:
                self._pipes.say_goodbye()
            self._detach()
            super().shutdown()
        finally:
            self._close_rest()

    def abort(self) -> None:
        """Close at once from synchronous code, for destructors and signal handlers."""
        super().abort()
        if self._twin is not None:
            self._twin.abort()

    def _detach(self) -> None:
        attachment, held = self._attachment, self._lease
        if attachment is not None and held is not None and held.valid:
            refuse_inside_loop("shutdown", "await scheme.aclose()")
            with contextlib.suppress(TransportClosed):  # another thread's shutdown was quicker
                held.call(attachment.aclose())

    def _close_rest(self) -> None:
        if self._links is not None:
            self._links.close()
        for side in (self._sender, self._receiver):
            if side is not None:
                side._close()
        if self._twin is not None:
            self._twin.shutdown()

    # -- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_apply_given": self._apply_given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._apply_given = state["_apply_given"]


_running: weakref.WeakSet[Running] = weakref.WeakSet()
_hooked = False


def _deliver_at_exit(scheme: Running) -> None:
    """Before the portal ends with the program, let child processes that start up attach.

    Call it with the portal running: its own end has to come later.
    """
    global _hooked
    _running.add(scheme)
    if not _hooked:
        _hooked = True
        atexit.register(_deliver_all)


def _deliver_all() -> None:
    give_up = time.monotonic() + _EXIT_SECONDS
    for scheme in list(_running):
        scheme._deliver_rest(give_up)


def _has_children() -> bool:
    # Those that the interpreter waits for when it ends; it kills the others.
    return any(not child.daemon for child in active_children())


def _something(weights: Any) -> Any:
    if weights is None:
        raise ConfigError(
            "there is nothing to send: pass weights to send(), or model=, weights= or context= to "
            "init_on_sender()"
        )
    return weights

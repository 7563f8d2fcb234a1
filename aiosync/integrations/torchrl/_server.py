"""How TorchRL's ``InferenceServer`` calls a scheme: polling, under the lock of its model.

Must not import collectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiosync.errors import AiosyncError, ApplyError
from aiosync.schemes.inside import belongs_to_torchrl, life_of, receiver_of
from aiosync.sync import WeightSyncScheme
from aiosync.sync._schemes import core_of

__all__ = ["ServerOwner"]

_LOOK_SECONDS = 1.0


class ServerOwner:
    """Between an ``InferenceServer`` and the scheme that receives its weights.

    Updates wait until the server asks, between two batches and under its lock, so that every
    answer is computed by one version and labelled with it. A trainer that goes away, and an
    update that does not fit, are warnings: the server goes on serving what it has, and the
    trainer is told of the misfit.

    Args:
        server: The server; referred to weakly.
        scheme: The scheme that it calls.
    """

    blocks_loops = False  # it calls the scheme in a thread of its own

    def __init__(self, server: Any, scheme: WeightSyncScheme) -> None:
        self._server = weakref.ref(server)
        self._scheme = weakref.ref(scheme)
        self._known = (0, 0)  # epoch and version of the newest label
        self._ended = False
        # Whoever gave the scheme its role, the server's lock is the right time.
        scheme.apply = "manual"
        belongs_to_torchrl(core_of(scheme))
        if getattr(server, "static_batch_size", None) is not None:
            scheme.apply_copy = True  # a CUDA graph knows addresses
        receiver = receiver_of(core_of(scheme))
        if receiver is not None:
            receiver.applier.apply_by_hand()
            self._note()

    def call(
        self,
        name: str,
        proceed: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """See :class:`aiosync.sync._schemes.Owner`."""
        if name in ("init_on_receiver", "init_on_worker"):
            return self._init(proceed, args, kwargs)
        if name == "receive":
            return self._receive(proceed, args, kwargs)
        result = proceed(*args, **kwargs)
        if name == "connect":
            self._note()
            scheme = self._scheme()
            loop = None if scheme is None else life_of(core_of(scheme)).loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(self._look_after)
        return result

    def stands_for(self, context: object) -> bool:
        """See :class:`aiosync.sync._schemes.Owner`."""
        return self._server() is context

    def _look_after(self) -> None:
        """Close the scheme when the server has ended: nobody would take its updates. On the loop.

        The trainer would wait for each of them until its deadline.
        """
        scheme, server = self._scheme(), self._server()
        if scheme is None or not scheme.synchronized_on_receiver:
            return
        if server is None or server._shutdown_event.is_set():
            scheme.abort()
            return
        asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_after)

    def _init(
        self, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if len(args) < 2:
            kwargs = {"context": self._server(), **kwargs}
        proceed(*args, **kwargs)

    def _note(self) -> int:
        """How many versions have come since the last time."""
        scheme = self._scheme()
        assert scheme is not None
        receiver = receiver_of(core_of(scheme))
        if receiver is None:
            return 0
        (epoch, version), before = (receiver.inbox.epoch or 0, receiver.inbox.version), self._known
        self._known = (epoch, version)
        return version - before[1] if epoch == before[0] else 1

    def _receive(
        self, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        scheme, server = self._scheme(), self._server()
        assert scheme is not None
        receiver = receiver_of(core_of(scheme))
        if kwargs.get("timeout") == 0 and receiver is not None:
            # The server asks before every batch: look before going to the other thread.
            if not receiver.applier.has_staged and (receiver.error is None or self._ended):
                return None
        try:
            update = proceed(*args, **kwargs)
        except ApplyError as exc:
            warnings.warn(f"the server refused an update: {exc}", RuntimeWarning, stacklevel=2)
            return None
        except AiosyncError as exc:  # anything that is raised here would end the server
            self._ended = True
            warnings.warn(
                f"the trainer is gone; the server continues with version {scheme.version}: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        grown = self._note() if update is not None else 0
        if server is not None and scheme.context is server:
            for _ in range(grown):
                server.update_policy_weights_(model_id=scheme.model_id)
        return update

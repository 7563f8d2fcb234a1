"""The blocking twins of the schemes for one host. Must not import torch."""

from __future__ import annotations

from typing import Final

import aiosync.schemes as aio
from aiosync.sync._blocking import blocking, direct, on_loop
from aiosync.sync._schemes import _TWINS, WeightSyncScheme

__all__ = [
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "SharedMemWeightSyncScheme",
]


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Blocking twin of :class:`aiosync.SharedMemWeightSyncScheme`."""

    _async_class = aio.SharedMemWeightSyncScheme

    create_transport: Final = on_loop(  # type: ignore[misc]  # the override has the same signature
        aio.SharedMemWeightSyncScheme.create_transport
    )


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Blocking twin of :class:`aiosync.MultiProcessWeightSyncScheme`."""

    _async_class = aio.MultiProcessWeightSyncScheme

    create_transport: Final = on_loop(  # type: ignore[misc]  # the override has the same signature
        aio.MultiProcessWeightSyncScheme.create_transport
    )


class NoWeightSyncScheme(WeightSyncScheme):
    """Blocking twin of :class:`aiosync.NoWeightSyncScheme`."""

    _async_class = aio.NoWeightSyncScheme
    _scheme: aio.NoWeightSyncScheme

    carry: Final = direct(aio.NoWeightSyncScheme.carry)
    connect: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.connect
    )
    send: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.send
    )
    receive: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.receive
    )
    wait_for_version: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.wait_for_version
    )
    wait_staged: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.wait_staged
    )
    pull: Final = blocking(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.pull
    )
    apply_pending: Final = direct(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.apply_pending
    )
    create_transport: Final = on_loop(  # type: ignore[misc]  # the override has the same signature
        aio.NoWeightSyncScheme.create_transport
    )


_TWINS += [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme]

"""Payloads through Ray's object store: put once by the sender, mapped by every receiver.

Ray's objects are pickles, and are read as such: whoever is in the cluster is trusted, as Ray
itself does. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiosync.errors import RemoteProtocolError, TransportBroken
from aiosync.transports import _ray_remote
from aiosync.transports._carrier import Carrier, Fetched
from aiosync.transports._ray_objects import (
    NAMESPACE,
    Entry,
    RayObjects,
    actor_name,
    are_arrays,
    in_lines,
    landed,
    need_cluster,
)
from aiosync.transports._ray_thread import OneThread
from aiosync.transports.handshake import name_from
from aiosync.wire import ALIGNMENT, ExtValue, Setup

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RayCarrier"]

_HUB_SECONDS = 60.0  # until the hub has what the sender gave it
_FETCH_SECONDS = 600.0  # until an object came from another node
_COPIED_NBYTES = 2**20  # larger copies are made off the loop
_HUB_NAME = re.compile(r"aiosync-[0-9a-f]{32}")
_ACTOR, _GOT = "actor", "got"

_regions = itertools.count(1)


class RayCarrier(Carrier):
    """Moves payloads through the object store.

    Args:
        objects: What the sender has in the store, shared by its links; ``None`` makes one of
            its own for this link when it first sends.
    """

    kind = "ray"

    def __init__(self, objects: RayObjects | None = None) -> None:
        self._ray = need_cluster()
        self._loop = asyncio.get_running_loop()
        self._objects = objects
        self._own_objects: RayObjects | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._announced: Entry | None = None  # until the peer holds the object itself
        self._changed = asyncio.Event()
        self._hubs: dict[str, Any] = {}
        self._thread = OneThread(self._loop)

    # -- telling -------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Tell the peer which actor this is, for its errors."""
        name = actor_name(self._ray)
        if name:
            self.say(_ACTOR, name.encode("ascii"))

    def hear(self, message: Setup) -> None:
        """See :class:`Carrier`."""
        if message.key == _GOT:
            if self._announced is not None and self._announced.ticket == message.value:
                self._announced = None
                self._changed.set()
        elif message.key == _ACTOR:
            name = name_from(message.value)
            if name and not self.control.name.startswith("actor "):
                self.control.name = f"actor {name} at {self.control.name}"
        else:
            super().hear(message)

    # -- sending -------------------------------------------------------------------------------

    async def offer(
        self, payload: list[memoryview], nbytes: int, memo: dict[Any, Any]
    ) -> Mapping[str, ExtValue]:
        """See :class:`Carrier`. Puts the payload, unless another link did."""
        self._check()
        objects = self._objects
        if objects is None:
            objects = self._objects = self._own_objects = RayObjects()
        make = functools.partial(in_lines, payload)
        entry = await objects.put(memo, objects, make, publish=True)
        self._check()
        assert entry.hub is not None
        assert entry.told is not None
        entry.told.add_done_callback(self._on_told)
        self._announced = entry
        return {"ref": entry.ticket, "hub": entry.hub.name}

    def _on_told(self, told: asyncio.Future[Any]) -> None:
        error = None if told.cancelled() else told.exception()
        if error is not None and not self._end.done():
            broken = TransportBroken("Ray's hub actor has died")
            broken.__cause__ = error
            self.control.fail(broken)

    async def push(self, payload: list[memoryview], nbytes: int) -> None:
        """See :class:`Carrier`. Waits until the peer holds the object itself."""
        while self._announced is not None:
            self._changed.clear()
            await self._changed.wait()
            self._check()

    # -- receiving -----------------------------------------------------------------------------

    async def fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> Fetched:
        """See :class:`Carrier`. Without lent buffers the payload is the object itself."""
        self._check()
        ticket, name = ext.get("ref"), ext.get("hub")
        if type(ticket) is not bytes or len(ticket) != 16:
            raise RemoteProtocolError("a payload beside the stream has no valid ticket")
        if type(name) is not str or not _HUB_NAME.fullmatch(name):
            raise RemoteProtocolError("a payload beside the stream names no valid hub")
        buffers = None if lend is None else lend()
        arrays = _checked(await self._take(name, ticket), nbytes)
        self.say(_GOT, ticket)
        if buffers is not None:
            await self._copy(arrays, buffers, nbytes)
            return Fetched(buffers)
        block = _ray_remote.flat_memory(arrays, nbytes)
        if block is None:
            own: NDArray[np.uint8] = np.empty(nbytes + ALIGNMENT, np.uint8)
            block = own[-own.ctypes.data % ALIGNMENT :][:nbytes]
            await self._copy(arrays, [block.data], nbytes)
        return Fetched([memoryview(block).cast("B")], key=(next(_regions), 0))

    async def _take(self, name: str, ticket: bytes) -> Any:
        hub = self._hubs.get(name)
        try:
            if hub is None:
                find = functools.partial(self._ray.get_actor, name, NAMESPACE)
                hub = await self._within(self._thread.start(find), _HUB_SECONDS)
                self._hubs = {name: hub}
            asked = hub.get.remote(ticket, _HUB_SECONDS)
            refs = await self._within(landed(asked, self._loop), _HUB_SECONDS + 10.0)
            if not refs:
                raise TransportBroken("the sender has released a payload that it announced")
            return await self._within(landed(refs[0], self._loop), _FETCH_SECONDS)
        except (self._ray.exceptions.RayError, ValueError) as exc:
            text = str(exc).partition("\n")[0]
            raise TransportBroken(
                f"Ray could not fetch the payload: {type(exc).__name__}: {text}"
            ) from exc

    async def _within(self, there: asyncio.Future[Any], seconds: float) -> Any:
        try:
            await asyncio.wait(
                {there, self._end}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            self._check()
            if not there.done():
                raise TransportBroken(f"Ray did not deliver the payload within {seconds:g} s")
            return there.result()
        finally:
            there.cancel()

    async def _copy(
        self, arrays: Sequence[NDArray[np.uint8]], buffers: list[memoryview], nbytes: int
    ) -> None:
        """Copy into memory of the receiver; when cancelled, still wait until it is done."""
        if nbytes <= _COPIED_NBYTES:
            _copy(arrays, buffers)
            return
        copying = self._thread.start(functools.partial(_copy, arrays, buffers))
        await self._thread.result_of(copying)

    # -- closing -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._end.done():
            self.control.check()
            raise TransportBroken("the link has ended")

    def end(self) -> None:
        """See :class:`Carrier`."""
        if not self._end.done() and not self._loop.is_closed():
            self._end.set_result(None)
            self._changed.set()
        self._announced = None
        self._thread.end()
        if self._own_objects is not None:
            self._own_objects.abort()

    async def aclose(self) -> None:
        """See :class:`Carrier`."""
        self.end()
        self._hubs.clear()
        await self._thread.aclose()
        if self._own_objects is not None:
            await self._own_objects.aclose()


def _checked(value: Any, nbytes: int) -> list[NDArray[np.uint8]]:
    if not are_arrays(value):
        raise RemoteProtocolError("the object of a payload is not a list of bytes")
    total = sum(each.nbytes for each in value)
    if total != nbytes:
        raise RemoteProtocolError(f"the object of a payload has {total} bytes, not {nbytes}")
    return value


def _copy(arrays: Sequence[NDArray[np.uint8]], buffers: list[memoryview]) -> None:
    """Byte by byte, however the two sides are cut into pieces; without the GIL."""
    targets = iter(buffers)
    target = np.empty(0, np.uint8)
    for array in arrays:
        rest = array
        while rest.size:
            while not target.size:
                target = np.frombuffer(next(targets), np.uint8)
            step = min(rest.size, target.size)
            np.copyto(target[:step], rest[:step])
            rest, target = rest[step:], target[step:]

"""Payloads through Ray's object store: put once by the sender, mapped by every receiver.

Ray's objects are pickles, and are read as such: whoever is in the cluster is trusted, as Ray
itself does. Ray is loaded when it is first needed. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import re
import secrets
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from aiosync.errors import (
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    WeightsChanged,
)
from aiosync.transports import _ray_actor
from aiosync.transports.data_plane import (
    CHANGED,
    KEPT,
    STEADY,
    DataPlane,
    Threads,
    copy_bytes,
    outlast,
)
from aiosync.wire import ALIGNMENT, ExtValue, Setup

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "RayObjects",
    "RayPlane",
    "actor_name",
    "in_lines",
    "landed",
    "load_ray",
    "need_cluster",
]

_NAMESPACE = "aiosync"  # of the hub actors
_HUB_NAME = re.compile(r"aiosync-[0-9a-f]{32}")
_HUB_SECONDS = 60.0  # until the hub has what the sender gave it
_FETCH_SECONDS = 600.0  # until an object came from another node
_BACK_SECONDS = 60.0  # until an object is here again that may have been spilled
_CLOSE_SECONDS = 5.0
# Ray starts six threads for each array above 1 MiB, which only pays for much larger ones.
_SLICE_NBYTES = 2**20
_THREADED_NBYTES = 32 * 2**20
_GOT = "got"

_regions = itertools.count(1)


def load_ray() -> Any:
    """The module ``ray``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as exc:
        raise ConfigError(
            f"this needs Ray, which cannot be imported ({exc}): pip install 'aiosync[ray]'"
        ) from exc
    return ray


def need_cluster() -> Any:
    """The module ``ray``, connected to a cluster.

    Raises:
        ConfigError: It is not, or through a client that has no object store.
    """
    ray = load_ray()
    if not ray.is_initialized():
        raise ConfigError("this process is not connected to a Ray cluster: call ray.init() first")
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "a Ray client (ray://...) has no object store of its own: run the trainer as a driver "
            "on a node of the cluster, or in an actor"
        )
    return ray


def landed(ref: Any, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
    """What a reference stands for, as a future of ``loop``; cancelling it only stops the wait.

    May be called in another thread than the loop's.
    """
    there: asyncio.Future[Any] = loop.create_future()

    def copy(done: Future[Any]) -> None:
        if there.done():
            done.exception()
            return
        error = done.exception()
        if error is None:
            there.set_result(done.result())
        else:
            there.set_exception(error)
            there.exception()  # who waits sees it; perhaps nobody does any more

    def tell(done: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so is who waited
            loop.call_soon_threadsafe(copy, done)

    ref.future().add_done_callback(tell)
    return there


def in_lines(payload: Iterable[memoryview]) -> list[NDArray[np.uint8]]:
    """The payload as arrays that each fill whole lines of 64 bytes, but for the last one.

    The store aligns each array to 64 bytes, so that these lie in it without gaps. Only lines
    that two pieces share are copied.
    """
    arrays: list[NDArray[np.uint8]] = []
    line = bytearray()
    for piece in payload:
        view = piece
        if line:
            taken = min(ALIGNMENT - len(line), view.nbytes)
            line += view[:taken]
            view = view[taken:]
            if len(line) == ALIGNMENT:
                arrays.append(np.frombuffer(bytes(line), np.uint8))
                line.clear()
        whole = view.nbytes - view.nbytes % ALIGNMENT
        step = _SLICE_NBYTES if whole < _THREADED_NBYTES else whole
        arrays.extend(
            np.frombuffer(view[start : min(start + step, whole)], np.uint8)
            for start in range(0, whole, step or 1)
        )
        line += view[whole:]
    if line:
        arrays.append(np.frombuffer(bytes(line), np.uint8))
    return arrays


def _are_arrays(value: Any) -> TypeGuard[list[NDArray[np.uint8]]]:
    """Whether an object of the store is what :func:`in_lines` made."""
    return type(value) is list and all(
        type(each) is np.ndarray
        and each.dtype == np.uint8
        and each.ndim == 1
        and each.flags.c_contiguous
        for each in value
    )


def actor_name(ray: Any) -> str:
    """What the actor that this process is calls itself, in at most 110 characters of ASCII.

    Nothing if it is none.
    """
    context = ray.get_runtime_context()
    actor_id = context.get_actor_id()
    if actor_id is None:
        return ""
    name = context.get_actor_name()
    called = f"{name[:70]} ({actor_id})" if name else actor_id
    return called.encode("ascii", "replace").decode()


class Entry:
    """One payload in the object store; it is passed on for as long as this object lives."""

    __slots__ = ("__weakref__", "ref", "ticket")

    def __init__(self, ref: Any) -> None:
        self.ref: Any = ref
        self.ticket: bytes = secrets.token_bytes(16)


class RayObjects:
    """Puts each payload once, however many links want it. Belongs to one loop.

    An actor, the hub, passes references on to the receivers.

    Attributes:
        threads: For calls of Ray that block, and copies out of its store.
    """

    def __init__(self) -> None:
        self._ray = need_cluster()
        # Whoever gets objects of that module has no need of aiosync, or of importing all of it.
        self._ray.cloudpickle.register_pickle_by_value(_ray_actor)
        self._loop = asyncio.get_running_loop()
        self.threads: Threads = Threads("aiosync-ray", 1)
        self._hub: tuple[str, Any] | None = None  # name and handle

    async def put(self, memo: dict[Any, Any], key: object, make: Callable[[], Any]) -> Entry:
        """The entry of a payload, made by the first who asks.

        Args:
            memo: Of the payload.
            key: Names the entry in it.
            make: Called in a thread; returns what is put.

        Raises:
            LocalProtocolError: The store did not take it.

        Cancellation:
            Waits all the same until nothing reads the payload, and is raised then.
        """
        if CHANGED in memo:  # found out for another link
            raise LocalProtocolError(str(memo[CHANGED]))
        putting: asyncio.Future[Entry] | None = memo.get(key)
        if putting is None:
            start, call = self.threads.start, functools.partial(self._put, make)
            putting = memo[key] = memo[STEADY](start, call) if STEADY in memo else start(call)
            putting.add_done_callback(functools.partial(self._keep, memo, key))
        cancelled = await outlast(putting)
        if cancelled is not None:
            raise cancelled
        try:
            return putting.result()
        except (SendTimeout, WeightsChanged) as exc:  # send() raises it; the link is as it was
            memo[CHANGED] = exc
            raise LocalProtocolError(str(exc)) from exc

    def _put(self, make: Callable[[], Any]) -> Entry:
        self._check_cluster()
        try:
            entry = Entry(self._ray.put(make()))
        except Exception as exc:  # of Ray: the store is full; who sends sees it
            exc.__traceback__ = None  # its frames would keep the weights
            raise LocalProtocolError(
                f"Ray's object store did not accept the weights: {_said(exc)}"
            ) from exc
        weakref.finalize(entry, self._forget, entry.ticket).atexit = False
        return entry

    def _forget(self, ticket: bytes) -> None:
        # The collector may run this anywhere, also inside of Ray.
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the hub with it
            self._loop.call_soon_threadsafe(self._drop, ticket)

    def _drop(self, ticket: bytes) -> None:
        # Any call would connect this process to a cluster again, or start one.
        if self._hub is not None and self._ray.is_initialized():
            self._hub[1].drop.remote(ticket)

    def _keep(self, memo: dict[Any, Any], key: object, putting: asyncio.Future[Entry]) -> None:
        if memo.get(key) is not putting:
            return
        if putting.cancelled() or putting.exception() is not None:
            del memo[key]  # the next link tries again
        else:
            memo[KEPT] = functools.partial(self._bring_back, putting.result())

    async def publish(self, entry: Entry) -> tuple[str, asyncio.Future[Any]]:
        """Have the hub pass the entry on for as long as this object lives.

        Returns:
            The hub's name, and when it has the entry; an error of Ray's where it has died.

        Raises:
            TransportBroken: The hub cannot be started.
        """
        hub = self._hub
        if hub is None:
            hub = await self.threads.run(self._start_hub)
        self._check_cluster()
        name, actor = hub
        return name, landed(actor.put.remote(entry.ticket, [entry.ref]), self._loop)

    def _start_hub(self) -> tuple[str, Any]:
        if self._hub is not None:
            return self._hub  # another link was quicker
        self._check_cluster()
        name = f"aiosync-{secrets.token_hex(16)}"
        try:
            here = self._ray.get_runtime_context().get_node_id()
            strategies = self._ray.util.scheduling_strategies
            actor = self._ray.remote(_ray_actor.Hub).options(
                name=name,
                namespace=_NAMESPACE,
                num_cpus=0,
                max_concurrency=10_000,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(here, soft=False),
            )
            self._hub = name, actor.remote()
        except Exception as exc:  # of Ray; who sends sees it
            raise TransportBroken(f"Ray has no hub actor: {_said(exc)}") from exc
        return self._hub

    async def _bring_back(self, entry: Entry) -> list[memoryview]:
        """The bytes of a payload, where they lie in the store of this node."""
        try:
            self._check_cluster()
            async with asyncio.timeout(_BACK_SECONDS):
                arrays = await landed(entry.ref, self._loop)
        except (self._ray.exceptions.RayError, TransportBroken, TimeoutError) as exc:
            raise LocalProtocolError(
                f"Ray's object store has lost the weights: {_said(exc)}"
            ) from exc
        if not _are_arrays(arrays):
            raise LocalProtocolError("these weights are in the object store for plain actors only")
        return [array.data for array in arrays]

    def _check_cluster(self) -> None:
        # Ray's calls start a cluster where there is none any more.
        if not self._ray.is_initialized():
            raise TransportBroken("this process is not connected to a Ray cluster any more")

    async def idle(self) -> None:
        """Wait until nothing reads any payload.

        Cancellation: waits all the same, and is raised then.
        """
        await self.threads.idle()

    def abort(self) -> None:
        """Have the hub end, after what is under way. Never waits; idempotent."""
        self.threads.end(self._end_hub)

    def _end_hub(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None and self._ray.is_initialized():
            self._ray.kill(hub[1])

    async def aclose(self) -> None:
        """The same, and wait until it is done. Bounded."""
        self.abort()
        await self.threads.aclose(_CLOSE_SECONDS)


class RayPlane(DataPlane):
    """Moves payloads through the object store.

    Args:
        objects: What the sender has in the store, shared by its links; ``None`` makes one of
            its own for this link.
    """

    kind = "ray"

    _told: asyncio.Future[Any]  # the hub has what is offered

    def __init__(self, objects: RayObjects | None) -> None:
        self._ray = need_cluster()
        self._loop = asyncio.get_running_loop()
        self._objects = RayObjects() if objects is None else objects
        self._owns_objects = objects is None
        self._end: asyncio.Future[None] = self._loop.create_future()
        # What the peer was told of, and until it holds the object itself.
        self._announced: tuple[Entry, asyncio.Future[None]] | None = None
        self._hub: tuple[str, Any] = ("", None)

    def hear(self, message: Setup) -> None:
        """See :class:`DataPlane`."""
        if message.key != _GOT:
            raise RemoteProtocolError("unexpected set-up of the object store")
        if self._announced is not None and self._announced[0].ticket == message.value:
            self._announced[1].set_result(None)
            self._announced = None

    # -- sending -------------------------------------------------------------------------------

    async def offer(
        self, payload: list[memoryview], memo: dict[Any, Any]
    ) -> Mapping[str, ExtValue]:
        """See :class:`DataPlane`. Puts the payload, unless another link did."""
        self._check()
        entry = await self._objects.put(memo, self._objects, lambda: in_lines(payload))
        hub, self._told = await self._objects.publish(entry)
        self._check()
        self._announced = entry, self._loop.create_future()
        return {"ref": entry.ticket, "hub": hub}

    async def push(self, payload: list[memoryview]) -> None:
        """See :class:`DataPlane`. Waits until the peer holds the object itself."""
        # Not the entry: the traceback of an error keeps what is here.
        got = None if self._announced is None else self._announced[1]
        try:
            await self._within(self._told, _HUB_SECONDS)
        except self._ray.exceptions.RayError as exc:
            raise TransportBroken(f"Ray's hub actor has died: {_said(exc)}") from exc
        if got is not None:
            await self._within(got, None)

    # -- receiving -----------------------------------------------------------------------------

    async def fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> tuple[Sequence[memoryview], Hashable]:
        """See :class:`DataPlane`. Without lent buffers the payload is the object itself."""
        ticket, name = ext.get("ref"), ext.get("hub")
        if type(ticket) is not bytes or len(ticket) != 16:
            raise RemoteProtocolError("a payload beside the stream has no valid ticket")
        if type(name) is not str or not _HUB_NAME.fullmatch(name):
            raise RemoteProtocolError("a payload beside the stream names no valid hub")
        buffers = None if lend is None else lend()
        arrays = await self._take(name, ticket)
        if not _are_arrays(arrays) or sum(each.nbytes for each in arrays) != nbytes:
            raise RemoteProtocolError(f"the object of a payload is not a list of {nbytes} bytes")
        self.say(_GOT, ticket)
        if buffers is not None:
            await self._objects.threads.run(lambda: copy_bytes(arrays, buffers))
            return buffers, None
        block = memoryview(_ray_actor.flat_memory(arrays, nbytes))
        return [block.cast("B")], (next(_regions), 0)

    async def _take(self, name: str, ticket: bytes) -> Any:
        self._check()
        try:
            if self._hub[0] != name:
                found = self._objects.threads.start(lambda: self._ray.get_actor(name, _NAMESPACE))
                self._hub = name, await self._within(found, _HUB_SECONDS)
            asked = landed(self._hub[1].get.remote(ticket, _HUB_SECONDS), self._loop)
            refs = await self._within(asked, _HUB_SECONDS + 10.0)
            if not refs:
                raise TransportBroken("the sender has released a payload that it announced")
            return await self._within(landed(refs[0], self._loop), _FETCH_SECONDS)
        except (self._ray.exceptions.RayError, ValueError) as exc:
            raise TransportBroken(f"Ray could not fetch the payload: {_said(exc)}") from exc

    async def _within(self, there: asyncio.Future[Any], seconds: float | None) -> Any:
        either = {there, self._end}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            if not there.done():
                raise TransportBroken(f"Ray did not deliver the payload within {seconds:g} s")
            return there.result()
        finally:
            there.cancel()

    # -- closing -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._end.done():
            self.control.check()
            raise TransportBroken("the link has ended")

    def end(self) -> None:
        """See :class:`DataPlane`."""
        if not self._end.done() and not self._loop.is_closed():
            self._end.set_result(None)
        self._announced = None
        if self._owns_objects:
            self._objects.abort()

    async def aclose(self) -> None:
        """See :class:`DataPlane`."""
        self.end()
        self._hub = "", None
        if self._owns_objects:
            await self._objects.aclose()


def _said(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".partition("\n")[0]

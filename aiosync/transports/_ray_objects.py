"""The sender's side of Ray's object store: what is put once for all links, and the hub actor.

Ray is loaded when it is first needed. Must not import torch or schemes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import secrets
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from aiosync.errors import ConfigError, LocalProtocolError, TransportBroken
from aiosync.transports import _ray_remote
from aiosync.transports._carrier import KEPT
from aiosync.transports._ray_thread import OneThread
from aiosync.wire import ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "NAMESPACE",
    "Entry",
    "RayObjects",
    "actor_name",
    "are_arrays",
    "in_lines",
    "landed",
    "load_ray",
    "need_cluster",
]

NAMESPACE = "aiosync"
"""Ray's namespace of the hub actors."""

# Ray starts six threads for each array above 1 MiB, which only pays for much larger ones.
_SLICE_NBYTES = 2**20
_THREADED_NBYTES = 32 * 2**20
_BACK_SECONDS = 60.0  # until an object is here again that may have been spilled


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


def are_arrays(value: Any) -> TypeGuard[list[NDArray[np.uint8]]]:
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


def _check_cluster(ray: Any) -> None:
    """Ray's calls start a cluster where there is none any more."""
    if not ray.is_initialized():
        raise TransportBroken("this process is not connected to a Ray cluster any more")


class Entry:
    """One payload in the object store; dropped from the hub when this object goes."""

    __slots__ = ("__weakref__", "hub", "ref", "ticket", "told")

    def __init__(self, ref: Any) -> None:
        self.ref: Any = ref
        self.ticket: bytes = secrets.token_bytes(16)
        self.hub: Hub | None = None
        self.told: asyncio.Future[Any] | None = None


class Hub:
    """The actor that passes references on, from the side of who owns it.

    Args:
        ray: The module.
        loop: Where its end is noticed.
    """

    def __init__(self, ray: Any, loop: asyncio.AbstractEventLoop) -> None:
        _pickle_by_value(ray)
        self.name: str = f"aiosync-{secrets.token_hex(16)}"
        self.dead: bool = False
        here = ray.get_runtime_context().get_node_id()
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        self._ray = ray
        self.actor: Any = (
            ray.remote(_ray_remote.Hub)
            .options(
                name=self.name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=10_000,
                scheduling_strategy=where,
            )
            .remote()
        )
        self._stays = self.actor.stay.remote()
        self._stays.future().add_done_callback(self._on_end)
        self._loop = loop

    def _on_end(self, done: Future[Any]) -> None:
        done.exception()
        self.dead = True

    def tell(self, entry: Entry) -> None:
        """Have the hub keep the reference; called in a thread."""
        told = landed(self.actor.put.remote(entry.ticket, [entry.ref]), self._loop)
        entry.hub, entry.told = self, told
        weakref.finalize(entry, self._forget, entry.ticket).atexit = False

    def _forget(self, ticket: bytes) -> None:
        # The collector may run this anywhere, also inside of Ray.
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the hub with it
            self._loop.call_soon_threadsafe(self._drop, ticket)

    def _drop(self, ticket: bytes) -> None:
        # Any call would connect this process to a cluster again, or start one.
        if not self.dead and self._ray.is_initialized():
            self.actor.drop.remote(ticket)

    def end(self) -> None:
        """End the actor. May be called in any thread."""
        if not self.dead and self._ray.is_initialized():
            self._ray.kill(self.actor)
        self.dead = True


@functools.cache
def _pickle_by_value(ray: Any) -> None:
    # Whoever gets objects of that module has no need of aiosync, or of importing all of it.
    ray.cloudpickle.register_pickle_by_value(_ray_remote)


class RayObjects:
    """Puts each payload once, however many links want it. Belongs to one loop."""

    def __init__(self) -> None:
        self._ray = need_cluster()
        _pickle_by_value(self._ray)
        self._loop = asyncio.get_running_loop()
        self._thread = OneThread(self._loop)
        self._hub: Hub | None = None

    @property
    def hub(self) -> Hub | None:
        """The actor, once there is one."""
        return self._hub

    async def put(
        self,
        memo: dict[Any, Any],
        key: object,
        make: Callable[[], Any],
        *,
        publish: bool,
    ) -> Entry:
        """The entry of a payload, made by the first who asks.

        Args:
            memo: Of the payload.
            key: Names the entry in it.
            make: Called in a thread; returns what is put.
            publish: Have the hub pass it on.

        Raises:
            LocalProtocolError: The store did not take it.
            TransportBroken: The hub cannot be started.

        Cancellation:
            Waits all the same until nothing reads the payload, and is raised then.
        """
        entry = memo.get(key)
        if not isinstance(entry, Entry):
            putting = entry
            if putting is None:
                putting = self._thread.start(functools.partial(self._put, make))
                memo[key] = putting
                putting.add_done_callback(functools.partial(self._keep, memo, key))
            entry = await self._thread.result_of(putting)
            assert isinstance(entry, Entry)
        if publish and (entry.hub is None or entry.hub.dead):
            telling = self._thread.start(functools.partial(self._tell, entry))
            await self._thread.result_of(telling)
        return entry

    def _put(self, make: Callable[[], Any]) -> Entry:
        _check_cluster(self._ray)
        try:
            return Entry(self._ray.put(make()))
        except Exception as exc:  # of Ray: the store is full; who sends sees it
            text = str(exc).partition("\n")[0]
            exc.__traceback__ = None  # its frames would keep the weights
            raise LocalProtocolError(
                f"Ray's object store did not accept the weights: {type(exc).__name__}: {text}"
            ) from exc

    def _tell(self, entry: Entry) -> None:
        if entry.hub is not None and not entry.hub.dead:
            return  # another link was quicker
        _check_cluster(self._ray)
        try:
            if self._hub is None or self._hub.dead:
                self._hub = Hub(self._ray, self._loop)
            self._hub.tell(entry)
        except Exception as exc:  # of Ray; who sends sees it
            text = str(exc).partition("\n")[0]
            raise TransportBroken(f"Ray has no hub actor: {type(exc).__name__}: {text}") from exc

    def _keep(self, memo: dict[Any, Any], key: object, putting: asyncio.Future[Entry]) -> None:
        if memo.get(key) is not putting:
            return
        if putting.cancelled() or putting.exception() is not None:
            del memo[key]  # the next link tries again
            return
        entry = memo[key] = putting.result()
        memo[KEPT] = functools.partial(self._bring_back, entry)

    async def _bring_back(self, entry: Entry) -> list[memoryview]:
        """The bytes of a payload, where they lie in the store of this node."""
        try:
            _check_cluster(self._ray)
            async with asyncio.timeout(_BACK_SECONDS):
                arrays = await landed(entry.ref, self._loop)
        except (self._ray.exceptions.RayError, TransportBroken, TimeoutError) as exc:
            text = str(exc).partition("\n")[0]
            raise LocalProtocolError(
                f"Ray's object store has lost the weights: {type(exc).__name__}: {text}"
            ) from exc
        if not are_arrays(arrays):
            raise LocalProtocolError("these weights are in the object store for plain actors only")
        return [array.data for array in arrays]

    async def idle(self) -> None:
        """Wait until nothing reads any payload.

        Cancellation: waits all the same, and is raised then.
        """
        await self._thread.idle()

    def abort(self) -> None:
        """Have the hub end, after what is under way. Never waits; idempotent."""
        self._thread.end(self._end_hub)

    def _end_hub(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.end()

    async def aclose(self) -> None:
        """The same, and wait until it is done. Bounded."""
        self.abort()
        await self._thread.aclose()

"""Links inside a Ray cluster: to workers with aiosync, and to plain actors.

Payloads go through Ray's object store: the sender puts each one once, and every receiver maps it.
Ray's objects are pickles and are unpickled: every process in the cluster is trusted, as Ray itself
trusts them. Ray is loaded when a link is made. Must not import torch or schemes.
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
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import numpy as np

from aiosync._repr import in_every_state
from aiosync._tasks import Notifier
from aiosync.errors import (
    AiosyncError,
    ConfigError,
    LocalProtocolError,
    PeerClosed,
    RecvTimeout,
    RemoteProtocolError,
    SendTimeout,
    TransportBroken,
    TransportClosed,
    WeightsChanged,
)
from aiosync.transports import _ray_actor
from aiosync.transports.base import (
    Lender,
    Payload,
    Received,
    Transport,
    again,
    flat_view,
    in_time,
    in_turn,
    make_ack,
)
from aiosync.transports.data_plane import (
    INLINE_NBYTES,
    DataPlaneTransport,
    PayloadState,
    SharedPayload,
    Threads,
    copy_bytes,
    first_line,
    result_of,
)
from aiosync.transports.framed_link import FramedTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import AckStatus, Cancellation, Capabilities, Limits
from aiosync.wire import (
    ALIGNMENT,
    ExtValue,
    Hello,
    Manifest,
    ManifestMessage,
    Message,
    Refuse,
    Update,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "RayActorTransport",
    "RayObjects",
    "RayTransport",
    "error_of_cluster",
    "landed",
    "load_ray",
    "need_cluster",
]

# Ray's namespace of the hub actors.
_NAMESPACE = "aiosync"
_HUB_NAME = re.compile(r"aiosync-[0-9a-f]{32}")
# Time until the hub has a reference that the sender gave it.
_HUB_SECONDS = 60.0
# Time after which the hub is asked for another reference to an object that has not come.
_ASK_AGAIN_SECONDS = 2.0
# Time to get an object from another node.
_FETCH_SECONDS = 600.0
# Time to bring back an object that Ray may have spilled to disk.
_BACK_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
# Ray starts six threads for each array above 1 MiB, which is only worth it for much larger ones. So
# smaller payloads are cut into slices of 1 MiB.
_SLICE_NBYTES = 2**20
_THREADED_NBYTES = 32 * 2**20
# Key of the Setup message of a receiver that has the object, so that the sender may drop it.
_GOT = "got"

_NO_PEER = "the other end is an actor without aiosync: there is no second end to check"

# Numbers for Received.key: no two objects of the store are the same memory.
_regions = itertools.count(1)


def load_ray() -> Any:
    """Import and return the module ``ray``.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as exc:
        raise ConfigError(
            f"this needs Ray, which cannot be imported ({exc}): pip install 'aiosync[ray]'"
        ) from exc
    return ray


def need_cluster() -> Any:
    """Return the module ``ray`` in a process that is connected to a cluster.

    Raises:
        ConfigError: Ray is not installed, or this process is not connected to a cluster, or only
            through a Ray client, which has no object store.
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


def error_of_cluster(error: BaseException | None) -> BaseException | None:
    """Return the error of a call if Ray itself raised it; ``None`` if the called method did.

    What a method raises is also an instance of its cause's class, such as another actor's death.
    """
    return None if isinstance(error, load_ray().exceptions.RayTaskError) else error


def landed(ref: Any) -> asyncio.Future[Any]:
    """Return a future of the object of a reference. Cancelling the future only stops the wait."""
    there = asyncio.wrap_future(ref.future())
    # The exception counts as seen, as perhaps no task waits for it any more: Python 3.14 would
    # report the error of each shielded future that no task waits for.
    there.add_done_callback(lambda done: done.cancelled() or done.exception())
    return there


def in_lines(payload: Iterable[memoryview]) -> list[NDArray[np.uint8]]:
    """Return a payload as arrays that each have a multiple of 64 bytes, except the last one.

    The store aligns each array to 64 bytes, so these arrays lie in it without gaps. Only lines of
    64 bytes that two pieces of the payload share are copied.
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
        # Ray copies an array above 1 MiB with threads, which pays only for much larger ones.
        step = _SLICE_NBYTES if whole < _THREADED_NBYTES else whole
        arrays.extend(
            np.frombuffer(view[start : min(start + step, whole)], np.uint8)
            for start in range(0, whole, step)
        )
        line += view[whole:]
    if line:
        arrays.append(np.frombuffer(bytes(line), np.uint8))
    return arrays


def _are_arrays(value: Any) -> TypeGuard[list[NDArray[np.uint8]]]:
    """Return True if an object of the store is a list of arrays such as :func:`in_lines` makes."""
    return type(value) is list and all(
        type(each) is np.ndarray
        and each.dtype == np.uint8
        and each.ndim == 1
        and each.flags.c_contiguous
        for each in value
    )


class Entry:
    """One payload in the object store. The hub passes it on as long as this object lives.

    Attributes:
        ref: Ray's reference to the object.
        ticket: Random key by which receivers ask the hub for the reference.
    """

    __slots__ = ("__weakref__", "ref", "ticket")

    def __init__(self, ref: Any) -> None:
        self.ref: Any = ref
        self.ticket: bytes = secrets.token_bytes(16)


class RayObjects:
    """The payloads of a sender in Ray's object store. Each is put once for any number of links.

    An actor, the hub, passes references on to the receivers. This object belongs to one loop.

    Attributes:
        threads: Threads for blocking calls of Ray, and for copies out of its store.
    """

    def __init__(self) -> None:
        self._ray = need_cluster()
        # Processes that get objects of that module then need not have aiosync, nor import it.
        self._ray.cloudpickle.register_pickle_by_value(_ray_actor)
        self._loop = asyncio.get_running_loop()
        self.threads: Threads = Threads("aiosync-ray", 1)
        # Name and handle of the hub.
        self._hub: tuple[str, Any] | None = None

    async def put(self, state: PayloadState, key: object, make: Callable[[], Any]) -> Entry:
        """Return the entry of a payload. The first call for a payload makes it.

        Args:
            state: The state of the payload.
            key: Key of the entry in it.
            make: Called in a thread; returns the object to put.

        Raises:
            LocalProtocolError: The store did not take the object, or the weights changed while
                they were read.

        Cancellation:
            Waits until nothing reads the payload any more, and is raised then.
        """
        # The call for another link found that the weights changed.
        if state.unusable is not None:
            raise LocalProtocolError(str(state.unusable))
        putting: asyncio.Future[Entry] | None = state.made.get(key)
        if putting is None:
            start, call = self.threads.start, functools.partial(self._put, make)
            putting = start(call) if state.steadily is None else state.steadily(start, call)
            state.made[key] = putting
            putting.add_done_callback(functools.partial(self._keep, state, key))
        try:
            return await result_of(putting)
        except (SendTimeout, WeightsChanged) as exc:
            # send() raises the error; the links go on as before.
            state.unusable = exc
            raise LocalProtocolError(str(exc)) from exc

    def _put(self, make: Callable[[], Any]) -> Entry:
        """Put the object that ``make()`` returns into the store. Runs on a thread, as it blocks."""
        self.check_cluster()
        try:
            entry = Entry(self._ray.put(make()))
        except Exception as exc:
            # Ray raises this, for example if its store is full; the caller of send() sees it.
            # The frames of the error would keep the weights alive.
            exc.__traceback__ = None
            raise LocalProtocolError(
                f"Ray's object store did not accept the weights: {_said(exc)}"
            ) from exc
        weakref.finalize(entry, self._forget, entry.ticket).atexit = False
        return entry

    def _forget(self, ticket: bytes) -> None:
        """Have the loop drop a ticket of the hub, as its entry is gone."""
        # The garbage collector may call this anywhere, even inside Ray, so only the loop calls Ray.
        # A closed loop raises RuntimeError; the hub has ended with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._drop, ticket)

    def _drop(self, ticket: bytes) -> None:
        # Without a cluster, any call of Ray would connect this process to one, or start one.
        if self._hub is not None and self._ray.is_initialized():
            self._hub[1].drop.remote(ticket)

    def _keep(self, state: PayloadState, key: object, putting: asyncio.Future[Entry]) -> None:
        """Let the payload be brought back from the entry that was put, or forget a failed put."""
        if state.made.get(key) is not putting:
            return
        if putting.cancelled() or putting.exception() is not None:
            # The next link tries again.
            del state.made[key]
        else:
            state.bring_back = functools.partial(self._bring_back, putting.result())

    async def publish(self, entry: Entry) -> tuple[str, asyncio.Future[Any]]:
        """Make the hub pass the entry on, as long as the entry lives.

        Returns:
            The hub's name, and a future that is done once the hub has the entry; it raises an error
            of Ray if the hub has died.

        Raises:
            TransportBroken: The hub cannot be started, or there is no cluster any more.
        """
        hub = self._hub
        if hub is None:
            hub = await self.threads.run(self._start_hub)
        self.check_cluster()
        name, actor = hub
        return name, landed(actor.put.remote(entry.ticket, [entry.ref]))

    def lose_hub(self, name: str) -> None:
        """Have the next payload start another hub, as the one of this name has died."""
        if self._hub is not None and self._hub[0] == name:
            self._hub = None

    def _start_hub(self) -> tuple[str, Any]:
        """Start the hub, if it does not run, and return its name and handle. It may block."""
        if self._hub is not None:
            # The call for another link has started it meanwhile.
            return self._hub
        self.check_cluster()
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
        except Exception as exc:  # Ray raises errors of any type; the caller of send() sees them.
            raise TransportBroken(f"Ray has no hub actor: {_said(exc)}") from exc
        return self._hub

    async def _bring_back(self, entry: Entry) -> list[memoryview]:
        """Return the bytes of a payload as views of this node's store.

        Raises:
            LocalProtocolError: The store has lost them.
        """
        try:
            self.check_cluster()
            async with asyncio.timeout(_BACK_SECONDS):
                arrays = await landed(entry.ref)
        except (self._ray.exceptions.RayError, TransportBroken, TimeoutError) as exc:
            raise LocalProtocolError(
                f"Ray's object store has lost the weights: {_said(exc)}"
            ) from exc
        return [array.data for array in arrays]

    def check_cluster(self) -> None:
        """Raise if there is no cluster any more, because a call of Ray would start one.

        Raises:
            TransportBroken: This process is not connected to a cluster any more.
        """
        if not self._ray.is_initialized():
            raise TransportBroken("this process is not connected to a Ray cluster any more")

    def abort(self) -> None:
        """End the hub after the calls that are under way. Never waits; idempotent."""
        self.threads.end(self._end_hub)

    def _end_hub(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None and self._ray.is_initialized():
            self._ray.kill(hub[1])

    async def aclose(self) -> None:
        """End the hub, and wait for that, at most 5 s."""
        self.abort()
        await self.threads.aclose(_CLOSE_SECONDS)


class RayTransport(DataPlaneTransport):
    """A link whose large payloads travel through Ray's object store. Owns ``control``.

    ``recv()`` without lent buffers returns the object itself if the system allows it: memory
    that all receivers of a node share, and that none of them can write to. A write through it ends
    the process. The memory lives until nothing refers to it any more.

    Args:
        control: Connected link for messages.
        objects: The payloads in Ray's store that the sender's links share; the link makes and owns
            one if omitted.
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

    _kind = "ray"

    def __init__(
        self,
        control: FramedTransport,
        *,
        objects: RayObjects | None = None,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        self._ray = need_cluster()
        self._objects = RayObjects() if objects is None else objects
        self._owns_objects = objects is None
        # Name and handle of the peer's hub, which passed on the last payload.
        self._hub: tuple[str, Any] = ("", None)
        super().__init__(control, inline_nbytes)

    @classmethod
    @contextlib.asynccontextmanager
    async def pair(
        cls, *, limits: Limits | None = None
    ) -> AsyncIterator[tuple[RayTransport, RayTransport]]:
        """Make two connected ends in this process, which are closed when the context ends."""
        async with TCPTransport.pair(limits=limits) as (left, right):
            async with cls(left) as one, cls(right) as two:
                yield one, two

    # -- sending -------------------------------------------------------------------------------

    async def _offer(
        self, payload: list[memoryview], state: PayloadState
    ) -> tuple[Mapping[str, ExtValue], Callable[[], Awaitable[None]]]:
        """See :class:`DataPlaneTransport`. Puts the payload, unless another link has put it."""
        self._control.check()
        entry = await self._objects.put(state, self._objects, lambda: in_lines(payload))
        hub, passed_on = await self._objects.publish(entry)
        self._control.check()
        taken = self._until_told(_GOT, entry.ticket)

        async def push() -> None:
            try:
                await self._outcome(passed_on, _HUB_SECONDS)
            except self._ray.exceptions.RayError as exc:
                self._objects.lose_hub(hub)
                # The frames of the error would keep the weights alive.
                exc.__traceback__ = None
                raise TransportBroken(f"Ray's hub actor has died: {_said(exc)}") from exc
            await self._outcome(taken)

        return {"ref": entry.ticket, "hub": hub}, push

    # -- receiving -----------------------------------------------------------------------------

    async def _fetch(
        self, ext: Mapping[str, ExtValue], nbytes: int, lend: Callable[[], list[memoryview]] | None
    ) -> tuple[Sequence[memoryview], Hashable]:
        """See :class:`DataPlaneTransport`.

        Without lent buffers this returns the object's memory, mapped read-only, or a copy.
        """
        name, ticket = _place_in_store(ext)
        buffers = None if lend is None else lend()
        arrays = await self._take(name, ticket)
        if not _are_arrays(arrays) or sum(each.nbytes for each in arrays) != nbytes:
            raise RemoteProtocolError(f"the object of a payload is not a list of {nbytes} bytes")
        # The object stays as long as ``arrays`` refers to it, so that the sender may drop it.
        self._say(_GOT, ticket)
        if buffers is not None:
            await self._objects.threads.run(lambda: copy_bytes(arrays, buffers))
            return buffers, None
        block = memoryview(_ray_actor.flat_memory(arrays, nbytes))
        return [block.cast("B")], (next(_regions), 0)

    async def _take(self, name: str, ticket: bytes) -> Any:
        """Return the object for which a ticket stands, by the hub of this name."""
        self._control.check()
        self._objects.check_cluster()
        try:
            if self._hub[0] != name:
                found = self._objects.threads.start(lambda: self._ray.get_actor(name, _NAMESPACE))
                self._hub = name, await self._outcome(found, _HUB_SECONDS)
            refs = await self._ask(ticket)
            coming = landed(refs[0])
            either: set[asyncio.Future[Any]] = {coming, self._over}
            done, _ = await asyncio.wait(
                either, timeout=_ASK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                # Ray may never call a reference ready if another link of this process gave its own
                # back meanwhile. A further reference to the object wakes both up.
                refs += await self._ask(ticket)
            return await self._outcome(coming, _FETCH_SECONDS)
        except (self._ray.exceptions.RayError, ValueError) as exc:
            raise TransportBroken(f"Ray could not fetch the payload: {_said(exc)}") from exc

    async def _ask(self, ticket: bytes) -> list[Any]:
        """Return a list with a reference from the hub. It borrows the object while it lives."""
        asked = landed(self._hub[1].get.remote(ticket, _HUB_SECONDS))
        refs: list[Any] = await self._outcome(asked, _HUB_SECONDS + 10.0)
        if not refs:
            raise TransportBroken("the sender has released a payload that it announced")
        return refs

    # -- closing -------------------------------------------------------------------------------

    def _end(self) -> None:
        """Make transfers fail soon, as the link has ended; end the hub if this link owns it."""
        super()._end()
        if self._owns_objects:
            self._objects.abort()

    async def aclose(self) -> None:
        """Close the link, and give back its objects in the store."""
        self.abort()
        self._hub = "", None
        if self._owns_objects:
            await self._objects.aclose()


class RayActorTransport(Transport):
    """A link that brings weights to an actor that knows nothing of aiosync.

    Each update is one call of a method of the actor, with a dict of tensors by dotted name. The
    return of the call acknowledges the update, and an exception refuses it. The tensors are views
    of Ray's object store, which every actor of a node shares: they are read-only, and writing to
    one ends the actor. ``load_state_dict()`` and ``copy_()`` into parameters are fine; for the
    former the scheme's strategy should be ``"state_dict"``, as the other strategy also sends
    buffers that are not persistent.

    Give it to a sender: ``scheme.init_on_sender(model=..., transports={0: link})``.

    Args:
        actor: Handle of the actor.
        update_method: Name of the method to call with the weights.
        model_id: Id of the model that the sender serves; a scheme that gets this link sets it.

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
        # The method may return anything. With one return, there is one reference to wait for.
        self._method: Any = method.options(num_returns=1)
        self.model_id = model_id
        self._name = f"{actor!r}"
        self._objects: RayObjects | None = None
        self._manifest: Manifest | None = None
        hello = Hello("receiver", model_id, 0, strategy="any", has_target=True)
        # Messages for recv(), which this end makes in place of the actor.
        self._answers: deque[Message] = deque([hello])
        self._arrival = Notifier()
        self._running: set[str] = set()
        self._closed = False
        self._error: AiosyncError | None = None

    @in_every_state
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

        Cancellation: class A; a payload that is being put into the store gets there first.
        """
        with in_turn(self._running, "send", self._name):
            async with in_time(timeout, SendTimeout, f"{self._name} was not called"):
                await asyncio.sleep(0)
                self._check()
                # An actor without aiosync gets weights only, so other messages are dropped.
                if isinstance(message, ManifestMessage):
                    self._manifest = message.manifest
                elif isinstance(message, Refuse):
                    self._end(PeerClosed(f"the sender refused the link: {message.error_text}"))
                elif isinstance(message, Update):
                    await self._update(message, payload)

    async def _update(self, message: Update, payload: Payload) -> None:
        """Put weights into the store, unless another link has, and call the actor with them."""
        manifest = self._manifest
        if manifest is None or manifest.digest != message.digest:
            raise LocalProtocolError("an update names a manifest that was not sent last")
        if self._objects is None:
            self._objects = RayObjects()
        views = [view for view in map(flat_view, payload) if view.nbytes]
        state = payload.share() if isinstance(payload, SharedPayload) else PayloadState()
        leaves = [
            ((leaf.name, *leaf.aliases), leaf.dtype, leaf.shape, leaf.offset, leaf.nbytes)
            for leaf in manifest.leaves
        ]
        rest = manifest.nbytes, leaves, dict(message.values)

        def make() -> _ray_actor.Weights:
            return _ray_actor.Weights(in_lines(views), *rest)

        # All links share this entry. Updates with another digest or other values never get it, as
        # they have another payload.
        entry = await self._objects.put(state, ("ray-actor", manifest.digest), make)
        self._check()
        self._objects.check_cluster()
        answered = self._call(entry.ref)
        answered.add_done_callback(
            functools.partial(self._on_answer, message.epoch, message.version)
        )

    def _call(self, ref: Any) -> asyncio.Future[Any]:
        """Call the actor's method with the weights."""
        try:
            return landed(self._method.remote(ref))
        except Exception as exc:
            # Ray raises errors of many types; the caller of the scheme's send() sees them.
            # The frames of the error would keep the weights alive.
            exc.__traceback__ = None
            raise LocalProtocolError(
                f"{self._name} could not be called: {type(exc).__name__}: {exc}"
            ) from exc

    def _on_answer(self, epoch: int, version: int, done: asyncio.Future[Any]) -> None:
        """Answer for the actor whose call ended: an Ack, or the end of the link if it has died."""
        if self._closed or done.cancelled():
            return
        error, exceptions = done.exception(), self._ray.exceptions
        text, failure = first_line(error), error_of_cluster(error)
        reason = None if error is None else getattr(error, "cause", None) or error
        if isinstance(failure, getattr(exceptions, "ActorUnavailableError", ())):
            reason = TransportBroken(
                f"{self._name} is restarting, or cannot be reached for the moment; it gets the "
                f"next update: {text}"
            )
        elif isinstance(failure, exceptions.RayActorError):
            self._end(PeerClosed(f"{self._name} has died: {text}"))
            return
        status = AckStatus.APPLIED if error is None else AckStatus.NACK
        self._answers.append(make_ack(epoch, version, status, reason))
        self._arrival.notify()

    def _end(self, error: AiosyncError) -> None:
        """End the link with an error that send() and recv() raise from now on."""
        self._error = error
        self._arrival.notify()

    # -- receiving -----------------------------------------------------------------------------

    async def recv(self, *, into: Lender | None = None, timeout: float | None = None) -> Received:
        """See :meth:`Transport.recv`. The first message is a Hello; then each call has an Ack."""
        with in_turn(self._running, "recv", self._name):
            await asyncio.sleep(0)
            async with in_time(timeout, RecvTimeout, f"{self._name} did not answer"):
                while not self._answers or self._closed:
                    self._check()
                    await self._arrival.wait()
        message = self._answers.popleft()
        if isinstance(message, Hello):
            message = replace(message, model_id=self.model_id)
        return Received(message)

    async def idle(self) -> None:
        """Wait until no thread reads a payload any more; see :meth:`Threads.idle`."""
        if self._objects is not None:
            await self._objects.threads.idle()

    # -- closing -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the link. The actor lives on, and still executes the calls that were made."""
        self.abort()
        if self._objects is not None:
            await self._objects.aclose()

    def abort(self) -> None:
        """Close the link as :meth:`aclose` does, but without waiting for the last calls of Ray."""
        self._closed = True
        self._manifest = None
        self._arrival.notify()
        if self._objects is not None:
            self._objects.abort()


def _said(exc: BaseException) -> str:
    """Return the type and the first line of an error of Ray, for the text of another error."""
    return f"{type(exc).__name__}: {first_line(exc)}"


def _place_in_store(ext: Mapping[str, ExtValue]) -> tuple[str, bytes]:
    """Return the name of the hub that passes a payload on, and its ticket; raise if illegal."""
    ticket, name = ext.get("ref"), ext.get("hub")
    if type(ticket) is not bytes or len(ticket) != 16:
        raise RemoteProtocolError("a payload beside the stream has no valid ticket")
    if type(name) is not str or not _HUB_NAME.fullmatch(name):
        raise RemoteProtocolError("a payload beside the stream names no valid hub")
    return name, ticket

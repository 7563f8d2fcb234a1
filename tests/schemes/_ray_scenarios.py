"""Scenarios of the Ray tests, which run in the process of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import pickle
import select
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from torch import nn

from aiosync.errors import (
    ApplyError,
    ConnectError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    TransportBroken,
    TransportClosed,
)
from aiosync.schemes.ray import RayModuleTransformScheme, RayWeightSyncScheme
from aiosync.testing import CONFORMANCE_CHECKS, ConformanceError, Hooks, check_transport
from aiosync.transports.ray import RayActorTransport, RayObjects, RayTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Update
from tests.conformance.test_transports import cut_stream
from tests.contract import remote
from tests.contract.bench import PATIENCE
from tests.contract.bench import Hooks as contract_hooks
from tests.contract.suite import ANYWHERE
from tests.schemes import _models
from tests.schemes._harness import until
from tests.schemes._models import fill
from tests.schemes._ray_actors import (
    TOKEN,
    Bereft,
    Owner,
    Plain,
    Serial,
    Transform,
    Worker,
)

MIB = 2**20


def stored() -> int:
    """Return the bytes of the objects that the cluster keeps; copies of them do not count."""
    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0))


def as_if_far(scheme: RayWeightSyncScheme, **options: Any) -> RayWeightSyncScheme:
    """Return a copy of a scheme for an actor that is treated like those on other hosts."""
    twin = copy.copy(scheme)
    for name, value in {"shared_memory": False, **options}.items():
        setattr(twin, name, value)
    return twin


def kinds(scheme: RayWeightSyncScheme) -> dict[int, type]:
    return {idx: type(link) for idx, link in scheme.sender_transports.items()}


async def each(actors: list[Any], method: str) -> list[Any]:
    return await asyncio.gather(*(getattr(actor, method).remote() for actor in actors))


async def join(
    scheme: RayWeightSyncScheme, actors: list[Any], first: int = 0, copies: Any = None
) -> list[int]:
    """Let actors join with indices from ``first`` on; ``copies`` has schemes of some of them."""
    calls = [
        actor.join.remote((copies or {}).get(idx, scheme), idx)
        for idx, actor in enumerate(actors, first)
    ]
    return await asyncio.gather(*calls)


@contextlib.asynccontextmanager
async def crew(
    scheme: RayWeightSyncScheme, actors: list[Any], copies: dict[int, Any] | None = None
) -> AsyncIterator[Any]:
    """The model of a connected sender whose actors have joined, some with schemes of ``copies``."""
    model = _models.big()
    fill(model, 1.0)
    try:
        scheme.init_on_sender(model_id="policy", model=model)
        await scheme.connect(timeout=30)
        assert await join(scheme, actors, copies=copies) == [1] * len(actors)
        yield model
    finally:
        await scheme.aclose()
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def held_store() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: the store sets the first when it is asked, and then waits for the second."""
    entered, go_on, put = threading.Event(), threading.Event(), ray.put

    def wait(value: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return put(value)

    with mock.patch.object(ray, "put", wait):
        yield entered, go_on


@ray.remote(num_cpus=0)
class Elsewhere:
    """Actor that has workers of the contract; it takes seconds to start."""

    async def act(self, *args: Any) -> Any:
        return await remote.act(*args)


@cache
def turns() -> Iterator[Any]:
    return itertools.cycle([Elsewhere.remote() for _ in range(3)])


async def contract(number: int) -> None:
    """Run a check of the contract with actors as workers."""

    def hire(scheme: Any, init: dict[str, Any]) -> remote.Remote:
        return remote.Remote(scheme, init, next(turns()).act.remote)

    make = partial(RayWeightSyncScheme, timeout=PATIENCE, shared_memory=False, inline_nbytes=64)
    await ANYWHERE[number].run(make, contract_hooks(hire=hire), leaks=("tasks",))


async def conformance(share: int, shares: int) -> tuple[set[str], dict[str, str]]:
    """Run every ``shares``-th check of the suite, from ``share`` on; return passed and skipped."""
    checks, hooks = CONFORMANCE_CHECKS[share::shares], Hooks(cut=cut_stream)
    try:
        report = await check_transport(RayTransport.pair, hooks=hooks, checks=checks)
    except ConformanceError as exc:
        if "LeakError" not in str(exc):
            raise
        # Ray may open sockets of its own at any time; a leak of aiosync appears in both runs.
        report = await check_transport(RayTransport.pair, hooks=hooks, checks=checks)
    return set(report.passed), dict(report.skipped)


async def many_updates(shared_memory: bool) -> None:
    """Many updates reach asynchronous actors and a serial one; one has an early copy of the scheme.

    The early copy was pickled before init_on_sender().
    """
    scheme = RayWeightSyncScheme(shared_memory=shared_memory, token=TOKEN)
    early = pickle.loads(pickle.dumps(scheme))
    actors = [Worker.remote(), Worker.remote(), Serial.remote()]
    async with crew(scheme, actors, {0: early}) as model:
        assert set(kinds(scheme).values()) == {
            SharedMemTransport if shared_memory else RayTransport
        }
        resting = await each(actors, "memory")
        for value in range(2, 12):
            fill(model, float(value))
            sent = scheme.send() if value % 3 else scheme.send_nowait()
            assert (await sent).acked == {0, 1, 2}
            # The tensors belong to the trainer again.
            fill(model, -1.0)
            if value == 3:
                await each(actors, "keep")
            if value in (2, 7, 11):
                assert await each(actors, "look") == [(value, {float(value)})] * 3
            # The store keeps one object for all workers, and not the one before; or it keeps none.
            least = 0 if shared_memory else 64 * MIB
            await until(lambda least=least: least <= stored() < least + MIB)
        # An actor keeps a copy of the version that it was told to keep.
        kept = 64 * MIB if shared_memory else 0
        for old, new in zip(resting, await each(actors, "memory"), strict=True):
            assert new - old < kept + 16 * MIB, (new - old) / MIB
        await each(actors, "close")
        assert await each(actors, "kept_values") == [{3.0}] * 3
    await until(lambda: stored() < MIB)


async def killed(shared_memory: bool) -> None:
    """The error names an actor that dies in mid-transfer; after its restart it joins again."""
    scheme = RayWeightSyncScheme(shared_memory=shared_memory)
    options = {"max_restarts": 1, "max_task_retries": -1}
    actors = [Worker.remote(), Worker.options(**options).remote()]
    async with crew(scheme, actors) as model:
        # A worker promises to take versions in its reads only after a read.
        await each(actors, "look")
        fill(model, 1.5)
        assert (await scheme.send()).acked == {0, 1}
        pid = await actors[1].pid.remote()
        os.kill(pid, signal.SIGSTOP)
        fill(model, 2.0)
        if shared_memory:
            # The stopped worker counts, because its next read would use the version.
            assert (await scheme.send()).acked == {0, 1}
        sending = None if shared_memory else asyncio.ensure_future(scheme.send())
        await until(lambda: scheme.worker_versions[0] == 3)
        assert sending is None or not sending.done()
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(select.select, [pidfd], [], [], 10)
        os.close(pidfd)
        with pytest.raises(PartialSyncError) as caught:
            await (sending or scheme.send())
        assert (set(caught.value.failed), caught.value.acked) == ({1}, {0})
        assert isinstance(caught.value.failed[1], (PeerClosed, TransportBroken))
        if shared_memory:
            # Of an actor on another node only the address would be known.
            assert f"process {pid}" in str(caught.value.failed[1])
        fill(model, 3.0)
        third = await scheme.send()
        assert third.acked == {0}
        assert await actors[0].look.remote() == (third.version, {3.0})
        assert await join(scheme, actors[1:], 1) == [third.version]
        fill(model, 4.0)
        fourth = await scheme.send()
        assert fourth.acked == {0, 1}
        assert await each(actors, "look") == [(fourth.version, {4.0})] * 2


async def in_place() -> None:
    """An actor that writes to shared weights ends, and no other; with apply_copy it may write."""
    scheme = RayWeightSyncScheme(shared_memory=False)
    actors = [Worker.remote(), Worker.remote(), Worker.remote()]
    async with crew(scheme, actors, {0: as_if_far(scheme, apply_copy=True)}) as model:
        fill(model, 2.0)
        await scheme.send()
        await actors[0].write.remote()
        assert await actors[0].look.remote() == (2, {3.0})
        with pytest.raises(ray.exceptions.RayActorError):
            await actors[1].write.remote()
        assert await actors[2].look.remote() == (2, {2.0})


async def faults_of_the_store() -> None:
    """A full store fails one send; a cancelled send ends only after the store has answered."""
    scheme, actor = RayWeightSyncScheme(shared_memory=False), Worker.remote()
    async with crew(scheme, [actor]) as model:
        fill(model, 2.0)
        await scheme.send()
        assert await actor.wait_for.remote(2) == 2
        assert await actor.look.remote() == (2, {2.0})
        await until(lambda: kinds(scheme))
        link = scheme.sender_transports[0]
        full = ray.exceptions.ObjectStoreFullError("full")
        with mock.patch.object(ray, "put", side_effect=full):
            with pytest.raises(PartialSyncError, match="did not accept the weights") as caught:
                await scheme.send()
        assert isinstance(caught.value.failed[0], LocalProtocolError)
        fill(model, 4.0)
        with held_store() as (entered, go_on):
            sending = asyncio.ensure_future(scheme.send())
            await until(entered.is_set)
            sending.cancel()
            await asyncio.wait({sending}, timeout=0.1)
            assert not sending.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await sending
        # The tensors are the caller's again.
        fill(model, -1.0)
        assert await actor.wait_for.remote(4) == 4
        assert await actor.look.remote() == (4, {4.0})
        assert scheme.sender_transports[0] is link


async def changed_after_a_cancellation() -> None:
    """A cancelled send is cancelled, also if the weights change while it makes its copy."""
    scheme, actor = RayWeightSyncScheme(shared_memory=False), Worker.remote()
    async with crew(scheme, [actor]) as model:
        with held_store() as (entered, go_on):
            sending = asyncio.ensure_future(scheme.send())
            await until(entered.is_set)
            sending.cancel()
            for _ in range(4):
                await asyncio.sleep(0)
            # The copy has begun from which the transfer would go on.
            fill(model, 3.0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await sending
        fill(model, 4.0)
        assert (await scheme.send()).acked == {0}
        assert await actor.look.remote() == (3, {4.0})


async def cancelled_before_the_store() -> None:
    """A send of a new layout that is cancelled at any turn arrives whole, or not at all."""
    scheme, actor = RayWeightSyncScheme(shared_memory=False), Worker.remote()
    async with crew(scheme, [actor], {0: as_if_far(scheme, strict=False)}) as model:
        for turns in range(6):
            version = scheme.version
            fill(model, 2.0)
            # Another dtype is another layout, whose manifest travels first.
            dtype = (torch.float64, torch.float32)[turns % 2]
            weights = {name: each.to(dtype) for name, each in model.state_dict().items()}
            sending = asyncio.ensure_future(scheme.send(weights))
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            is_sent = scheme.version > version
            assert await actor.wait_for.remote(scheme.version) == scheme.version
            expected = scheme.version, {2.0 if is_sent else 1.0}
            assert await actor.look.remote() == expected, f"cancelled after {turns} turns"
            for each in weights.values():
                each.fill_(1.0)
            await scheme.send(weights)
            assert await actor.look.remote() == (scheme.version, {1.0})


async def lost_in_the_store() -> None:
    """Weights that the store has lost reach no worker, and the next weights arrive."""
    scheme, actors, owner = RayWeightSyncScheme(), [Worker.remote()], Owner.remote()

    def put(value: Any) -> Any:
        return ray.get(owner.put.remote(value))[0]

    async with crew(scheme, actors, {0: as_if_far(scheme)}) as model:
        fill(model, 2.0)
        with mock.patch.object(ray, "put", put):
            await scheme.send()
        # No other process has mapped the object.
        for actor in (actors[0], owner):
            ray.kill(actor)
        await until(lambda: not kinds(scheme) and stored() < MIB)
        actors.append(Worker.remote())
        joining = asyncio.ensure_future(join(scheme, actors[1:], 1))
        await until(lambda: 1 in kinds(scheme))
        await asyncio.wait({joining}, timeout=0.5)
        assert not joining.done()
        fill(model, 3.0)
        await scheme.send(worker_ids=1)
        assert await joining == [3]
        assert await actors[1].look.remote() == (3, {3.0})


def kill_hubs() -> None:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == "aiosync":
            ray.kill(ray.get_actor(**actor))


async def dead_hub() -> None:
    """A dead hub breaks the link; the kept error keeps no weights, here or in the store.

    The next link gets a new hub.
    """
    update = Update(epoch=1, version=1, digest=b"d" * 16)
    # A scheme has one for all its links.
    objects = RayObjects()
    async with (
        TCPTransport.pair() as (left, right),
        RayTransport(left, objects=objects) as sender,
        RayTransport(right, objects=objects) as receiver,
    ):
        weights = np.zeros(4 * MIB, np.uint8)
        await asyncio.gather(sender.send(update, [memoryview(weights)]), receiver.recv())
        kill_hubs()
        receiving = asyncio.ensure_future(receiver.recv())
        with pytest.raises(TransportBroken, match="hub actor has died"):
            await sender.send(update, [memoryview(weights)])
        with pytest.raises(TransportBroken):
            await receiving
        gone = weakref.ref(weights)
        del weights
        await until(lambda: gone() is None and stored() < MIB)
        assert sender.channel.error is not None
    async with (
        TCPTransport.pair() as (left, right),
        RayTransport(left, objects=objects) as sender,
        RayTransport(right, objects=objects) as receiver,
    ):
        sending = sender.send(update, [bytes(4 * MIB)], timeout=20)
        _, received = await asyncio.gather(sending, receiver.recv())
        assert received.nbytes == 4 * MIB
    await objects.aclose()


async def dead_hub_of_a_scheme() -> None:
    """It costs the send that meets it; the worker dials again, and the next send gets a new hub."""
    scheme, actor = RayWeightSyncScheme(shared_memory=False), Worker.remote()
    async with crew(scheme, [actor]) as model:
        for version, value in ((2, 2.0), (4, 4.0)):
            fill(model, value)
            assert (await scheme.send()).acked == {0}
            assert await actor.look.remote() == (version, {value})
            kill_hubs()
            fill(model, value + 1.0)
            with pytest.raises(PartialSyncError):
                await scheme.send()
            assert await actor.wait_for.remote(version + 1) == version + 1
            assert await actor.look.remote() == (version + 1, {value + 1.0})


# -- actors without aiosync ---------------------------------------------------------------------


async def plain_actors() -> None:
    """Actors without aiosync take updates, refuse them, die, and restart."""
    model = _models.medium()
    fill(model, 1.0)
    one, two, again = Plain.remote(), Plain.remote(), Plain.options(max_restarts=5).remote()

    def to(**actors: Any) -> dict[int, RayActorTransport]:
        return {
            idx: RayActorTransport(actor, method)
            for idx, (method, actor) in enumerate(actors.items())
        }

    async with RayWeightSyncScheme() as scheme:
        links = to(update=one, update_twice=two)
        scheme.init_on_sender(model_id="mine", model=model, transports=links)
        await scheme.connect(timeout=30)
        for value in (2.0, 3.0):
            fill(model, value)
            assert (await scheme.send()).acked == {0, 1}
            assert await each([one, two], "look") == [{value}] * 2
            await until(lambda: 8 * MIB <= stored() < 9 * MIB)
    for failing, kind in (
        (to(update=one, refuse=two), ApplyError),
        (to(update=one, end=two), PeerClosed),
        ({**to(update=one), 1: links[1]}, TransportClosed),  # The link was closed with its scheme.
    ):
        async with RayWeightSyncScheme() as scheme:
            scheme.init_on_sender(model_id="mine", model=model, transports=failing)
            with pytest.raises(PartialSyncError) as caught:
                await scheme.connect(timeout=30)
            assert (set(caught.value.failed), caught.value.acked) == ({1}, {0})
            assert isinstance(caught.value.failed[1], kind)
            assert getattr(caught.value.failed[1], "remote_type", "ValueError") == "ValueError"
    # A living actor's method may meet the end of another one.
    for failing in (to(meet_death=one), to(meet_restart=one)):
        async with RayWeightSyncScheme() as scheme:
            scheme.init_on_sender(model_id="mine", model=model, transports=failing)
            with pytest.raises(PartialSyncError) as caught:
                await scheme.connect(timeout=30)
            assert isinstance(caught.value.failed[0], ApplyError)
    async with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="mine", model=model, transports=to(update=again))
        await scheme.connect(timeout=30)
        texts = list[str]()
        for _ in range(5):
            # The kill is asynchronous, so that the actor may take an update before its end.
            ray.kill(again, no_restart=False)
            try:
                await scheme.send(timeout=30)
            except PartialSyncError as exc:
                texts.append(str(exc))
                break
        assert ["is restarting" in text for text in texts] == [True]
        sent = None
        while sent is None:
            with contextlib.suppress(PartialSyncError):
                sent = await scheme.send()
        assert await again.look.remote() == {3.0}
    # An actor gets tensors on the CPU, an empty one too, whatever its default device.
    await again.prefer.remote("meta")
    async with RayWeightSyncScheme() as scheme:
        model.empty = nn.Parameter(torch.zeros(0))
        scheme.init_on_sender(model_id="mine", model=model, transports=to(take=again))
        await scheme.connect(timeout=30)
        assert (await scheme.send()).acked == {0}
        assert await again.where.remote() == {"cpu"}
    for actor in (one, again):
        ray.kill(actor)


async def parts_for_a_busy_actor() -> None:
    """With strict=False an actor that was busy gets the newest of each name."""
    fast, busy = Plain.remote(), Plain.options(max_concurrency=2).remote()
    links = {
        0: RayActorTransport(fast, "gather"),
        1: RayActorTransport(busy, "gather_once_free"),
    }
    async with RayWeightSyncScheme("state_dict", strict=False, require=1) as scheme:
        scheme.init_on_sender(model_id="mine", transports=links)
        await scheme.connect(timeout=30)
        for name, value in (("a", 1.0), ("a", 2.0), ("b", 3.0), ("a", 4.0)):
            # More than a sender copies on its loop.
            await scheme.send({name: torch.full((2 * MIB,), value)})
        assert await fast.gathered.remote() == {"a": 4.0, "b": 3.0}
        await busy.free.remote()
        await until(lambda: scheme.worker_versions[1] == 4)
        assert await busy.gathered.remote() == {"a": 4.0, "b": 3.0}
    for actor in (fast, busy):
        ray.kill(actor)


# -- the module of a transform -------------------------------------------------------------------


def to_transform(actor: Any, model: Any = None, **options: Any) -> RayModuleTransformScheme:
    scheme = RayModuleTransformScheme(**options)
    scheme.init_on_sender(model=model, ray_transform=actor)
    return scheme


async def transform() -> None:
    """An actor whose methods block may get another trainer or module, and copy its state."""
    actor, model = Transform.remote(), _models.medium()
    fill(model, 1.0)
    old, new = to_transform(actor, model), to_transform(actor)
    await old.connect(timeout=30)
    assert await actor.look.remote() == {1.0}
    # The object has no attribute of aiosync, which could not be pickled.
    assert await actor.save.remote()
    # The second trainer has no weights yet.
    await new.connect(timeout=30)
    # The first trainer ends only its own link.
    await old.aclose()
    for value in (2.0, 3.0):
        fill(model, value)
        assert (await new.send(model)).acked == {0}
        assert await actor.look.remote() == {value}
        await actor.replace.remote()
    await new.aclose()
    assert not await actor.receives.remote()
    async with to_transform(Plain.remote()) as wrong:
        with pytest.raises(ConnectError, match="no attribute 'module'"):
            await wrong.connect(timeout=30)
    async with to_transform(Bereft.remote()) as wrong:
        with pytest.raises(ConnectError, match="could not join: .*ActorError"):
            await wrong.connect(timeout=30)
    ray.kill(actor)


async def a_refusal_of_a_transform() -> None:
    """An update that does not fit the module costs only its own send."""
    for apply in ("auto", "manual"):
        actor, model = Transform.remote(), _models.medium()
        fill(model, 1.0)
        async with to_transform(actor, model, apply=apply) as scheme:
            await scheme.connect(timeout=30)
            with pytest.raises(PartialSyncError) as caught:
                await scheme.send({"block": torch.zeros(3)})
            assert isinstance(caught.value.failed[0], ApplyError)
            fill(model, 2.0)
            assert (await scheme.send(model)).acked == {0}
            assert await actor.look.remote() == {2.0}
        ray.kill(actor)

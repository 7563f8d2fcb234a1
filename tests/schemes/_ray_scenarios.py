"""What the Ray tests do, in the process of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest
import ray

from aiosync.errors import (
    ApplyError,
    ConnectError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    TransportBroken,
    TransportClosed,
)
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.ray_transform import RayModuleTransformScheme
from aiosync.testing import CONFORMANCE_CHECKS, ConformanceError, Hooks, check_transport
from aiosync.transports._ray_objects import RayObjects
from aiosync.transports.ray import RayActorTransport, RayTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.wire import Update
from tests.conformance.test_transports import cut_stream
from tests.schemes import _models
from tests.schemes._models import fill
from tests.schemes._ray_actors import (
    NoTransform,
    Owner,
    Plain,
    Serial,
    Transform,
    TransformTrainer,
    Worker,
)

MIB = 2**20


def stored() -> int:
    """Bytes of the objects that the cluster keeps; other copies of them do not count."""
    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0))


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found:
                return
            await asyncio.sleep(0.02)


def as_if_far(scheme: RayWeightSyncScheme) -> RayWeightSyncScheme:
    """A copy for an actor that is treated like those on other hosts."""
    twin = copy.copy(scheme)
    twin.shared_memory = False
    return twin


def in_store() -> RayWeightSyncScheme:
    """A scheme whose actors all read the object store."""
    return RayWeightSyncScheme(shared_memory=False)


def kinds(scheme: RayWeightSyncScheme) -> dict[int, type]:
    return {idx: type(peer.transport) for idx, peer in scheme._sender.peers.items()}


@contextlib.asynccontextmanager
async def crew(
    scheme: RayWeightSyncScheme,
    model: Any,
    actors: list[Any],
    *,
    early: Any = None,
    far: Collection[int] = (),
    name: str = "medium",
) -> AsyncIterator[list[Any]]:
    """A connected sender, and actors that have joined; those of ``far`` as if on another host."""
    try:
        scheme.init_on_sender(model_id="policy", model=model, num_workers=len(actors))
        schemes = [as_if_far(scheme) if idx in far else scheme for idx in range(len(actors))]
        schemes[0] = early or schemes[0]
        joining = [actor.join.remote(schemes[idx], idx, name) for idx, actor in enumerate(actors)]
        await scheme.connect(timeout=30)
        assert await asyncio.gather(*joining) == [1] * len(actors)
        yield actors
    finally:
        await scheme.aclose()
        for actor in actors:
            ray.kill(actor)


async def conformance(share: int, shares: int) -> tuple[set[str], dict[str, str]]:
    """Every ``shares``-th check of the suite, from ``share`` on; one hub for all links."""
    objects = RayObjects()

    def pair() -> Any:
        return RayTransport.pair(objects=objects)

    try:
        await objects.put({}, "warm", list, publish=True)
        await _warm_up(pair)
        checks = CONFORMANCE_CHECKS[share::shares]
        try:
            report = await check_transport(pair, hooks=Hooks(cut=cut_stream), checks=checks)
        except ConformanceError as exc:
            if "LeakError" not in str(exc):
                raise
            # Ray opens sockets of its own whenever it likes; a leak of ours is there each time.
            report = await check_transport(pair, hooks=Hooks(cut=cut_stream), checks=checks)
    finally:
        await objects.aclose()
    return set(report.passed), dict(report.skipped)


async def _warm_up(pair: Any) -> None:
    """Ray opens connections at the first use of an actor, and keeps them."""
    async with pair() as (left, right):
        for each in (left, right):
            each.channel.allow_payloads()
        sending = asyncio.ensure_future(left.send(Update(1, 1, bytes(16)), [bytes(2 * MIB)]))
        await right.recv()
        await sending


async def local_cluster() -> None:
    """Three asynchronous actors and a serial one; one copy was pickled before init_on_sender()."""
    model = _models.big()
    fill(model, 1.0)
    scheme = in_store()
    early = pickle.loads(pickle.dumps(scheme))
    actors = [Worker.remote(), Worker.remote(), Worker.remote(), Serial.remote()]
    async with crew(scheme, model, actors, early=early, name="big"):
        resting = await asyncio.gather(*(actor.memory.remote() for actor in actors))
        for value in range(2, 12):
            fill(model, float(value))
            report = await scheme.send()
            assert report.acked == {0, 1, 2, 3}
            fill(model, -1.0)  # belongs to the trainer again
            if value == 3:
                await asyncio.gather(*(actor.keep.remote() for actor in actors))
            if value in (2, 7, 11):
                found = await asyncio.gather(*(actor.look.remote() for actor in actors))
                assert found == [(value, {float(value)})] * 4
            # One object for all workers; the one before goes.
            await until(lambda: 64 * MIB <= stored() < 65 * MIB)
        assert await scheme._objects.hub.actor.count.remote() == 1
        grown = await asyncio.gather(*(actor.memory.remote() for actor in actors))
        for old, new in zip(resting, grown, strict=True):
            assert new["RssAnon"] - old["RssAnon"] < 16 * MIB, (old, new)
        await asyncio.gather(*(actor.close.remote() for actor in actors))
        values = await asyncio.gather(*(actor.kept_values.remote() for actor in actors))
        assert values == [{3.0}] * 4
    await until(lambda: stored() < MIB)


async def late_joiner() -> None:
    """An actor that comes later gets what was put for the others."""
    model = _models.medium()
    fill(model, 1.0)
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote()]) as actors:
        scheme._sender.workers.num_workers = None
        fill(model, 2.0)
        await scheme.send()
        fill(model, -1.0)
        actors.append(Worker.remote())
        assert await actors[1].join.remote(scheme, 1) == 2
        assert await actors[1].look.remote() == (2, {2.0})


async def killed_and_restarted() -> None:
    """An actor that dies in mid-transfer is named, the others go on; restarted, it re-joins."""
    model = _models.big()
    fill(model, 1.0)
    scheme = in_store()
    restarting = Worker.options(max_restarts=1).remote()
    async with crew(scheme, model, [Worker.remote(), restarting], name="big") as actors:
        pid = await restarting.pid.remote()
        os.kill(pid, signal.SIGSTOP)  # takes the announcement, but not the object
        fill(model, 2.0)
        sending = asyncio.ensure_future(scheme.send())
        await until(lambda: scheme.worker_versions[0] == 2)
        assert not sending.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PartialSyncError) as caught:
            await sending
        assert set(caught.value.failed) == {1}
        assert caught.value.acked == {0}
        error = caught.value.failed[1]
        assert isinstance(error, (PeerClosed, TransportBroken))
        assert restarting._actor_id.hex() in str(error)
        fill(model, 3.0)
        report = await scheme.send()
        assert report.acked == {0} and set(report.lost) == {1}
        assert await actors[0].look.remote() == (3, {3.0})
        assert await rejoin(restarting, scheme) == 3
        assert await restarting.look.remote() == (3, {3.0})
        fill(model, 4.0)
        assert (await scheme.send()).acked == {0, 1}


async def rejoin(actor: Any, scheme: RayWeightSyncScheme) -> int:
    while True:
        try:
            return await actor.join.remote(scheme, 1, "big")
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(0.05)


async def coalesced() -> None:
    """A newer update overtakes one that a slow actor has not begun with."""
    model = _models.medium()
    fill(model, 1.0)
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote(), Worker.remote()]) as actors:
        pid = await actors[1].pid.remote()
        os.kill(pid, signal.SIGSTOP)
        handles = []
        for value in (2.0, 3.0, 4.0):
            fill(model, value)
            handles.append(scheme.send_nowait())
            await until(lambda v=value: scheme.worker_versions[0] == int(v))
        os.kill(pid, signal.SIGCONT)
        reports = [await handle for handle in handles]
        assert reports[1].skipped == {1: 4}
        assert reports[0].acked == reports[2].acked == {0, 1}
        assert await actors[1].look.remote() == (4, {4.0})


async def serves_meanwhile() -> None:
    """Calls of an actor are answered while updates come in."""
    model = _models.big()
    fill(model, 1.0)
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote()], name="big") as actors:
        slowest, count, stop = 0.0, 0, False

        async def ask() -> None:
            nonlocal slowest, count
            while not stop:
                begun = time.perf_counter()
                await actors[0].ping.remote()
                slowest = max(slowest, time.perf_counter() - begun)
                count += 1

        asking = asyncio.ensure_future(ask())
        for value in range(2, 10):
            fill(model, float(value))
            await scheme.send()
        stop = True
        await asking
        assert count >= 8 and slowest < 1.0


async def in_place() -> None:
    """Writing to shared weights ends the actor and nobody else; copying is the way out."""
    model = _models.medium()
    fill(model, 1.0)
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote(), Worker.remote()]) as actors:
        fill(model, 2.0)
        await scheme.send()
        with pytest.raises(ray.exceptions.RayActorError):
            await actors[0].write.remote()
        assert await actors[1].look.remote() == (2, {2.0})
    fill(model, 1.0)
    scheme = RayWeightSyncScheme(apply_copy=True, shared_memory=False)
    async with crew(scheme, model, [Worker.remote(), Worker.remote()]) as actors:
        fill(model, 2.0)
        await scheme.send()
        await actors[0].write.remote()
        assert await actors[0].look.remote() == (2, {3.0})
        assert await actors[1].look.remote() == (2, {2.0})


async def hub_dies() -> None:
    """Another hub takes over."""
    model = _models.medium()
    fill(model, 1.0)
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote()]) as actors:
        old = scheme._objects.hub
        ray.kill(old.actor)
        await until(lambda: old.dead)
        fill(model, 2.0)
        assert (await scheme.send()).acked == {0}
        assert await actors[0].look.remote() == (2, {2.0})


async def cancelled_send() -> None:
    """The tensors are the caller's again once a cancelled send() returned."""
    model = _models.big()
    fill(model, 1.0)
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote()], name="big") as actors:
        fill(model, 2.0)
        thread = scheme._objects._thread
        thread.start(lambda: time.sleep(0.5))  # as if the store were slow
        sending = asyncio.ensure_future(scheme.send())
        await until(lambda: len(thread._running) == 2)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        fill(model, -1.0)
        assert await actors[0].wait_for.remote(2) == 2
        assert await actors[0].look.remote() == (2, {2.0})


async def plain_actors() -> None:
    """Actors without aiosync: acknowledged, refused, dead."""
    model = _models.medium()
    fill(model, 1.0)
    one, two = Plain.remote(), Plain.remote()
    links = {0: RayActorTransport(one, "update"), 1: RayActorTransport(two, "update_twice")}
    async with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="mine", model=model, transports=links)
        await scheme.connect(timeout=30)
        for value in (2.0, 3.0):
            fill(model, value)
            assert (await scheme.send()).acked == {0, 1}
            assert await one.look.remote() == await two.look.remote() == {value}
            await until(lambda: 8 * MIB <= stored() < 9 * MIB)
        assert (await one.where.remote()).startswith("r--s")
    async with RayWeightSyncScheme() as scheme:
        links = {0: RayActorTransport(one, "update"), 1: RayActorTransport(two, "refuse")}
        scheme.init_on_sender(model_id="mine", model=model, transports=links)
        with pytest.raises(PartialSyncError, match="not these") as caught:
            await scheme.connect(timeout=30)
        assert isinstance(caught.value.failed[1], ApplyError)
        assert caught.value.failed[1].remote_type == "ValueError"
    async with RayWeightSyncScheme() as scheme:
        links = {0: RayActorTransport(one, "update"), 1: RayActorTransport(two, "end")}
        scheme.init_on_sender(model_id="mine", model=model, transports=links)
        with pytest.raises(PartialSyncError) as caught:
            await scheme.connect(timeout=30)
        assert isinstance(caught.value.failed[1], PeerClosed)
        assert caught.value.acked == {0}
    async with RayWeightSyncScheme() as scheme:
        again = Plain.options(max_restarts=1).remote()
        scheme.init_on_sender(
            model_id="mine", model=model, transports={0: RayActorTransport(again, "update")}
        )
        await scheme.connect(timeout=30)
        ray.kill(again, no_restart=False)
        with pytest.raises(PartialSyncError, match="is restarting"):
            await scheme.send(timeout=30)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(PartialSyncError):
                    await scheme.send()
                    break
        assert await again.look.remote() == {3.0}
        ray.kill(again)
    async with RayWeightSyncScheme() as scheme:  # the link was closed with the scheme before
        scheme.init_on_sender(model_id="mine", model=model, transports={0: links[0]})
        with pytest.raises(PartialSyncError) as caught:
            await scheme.connect(timeout=60)
        assert isinstance(caught.value.failed[0], TransportClosed)
    ray.kill(one)


async def transform() -> None:
    """The module of an actor whose methods block."""
    actor = Transform.remote()
    model = _models.medium()
    fill(model, 1.0)
    scheme = RayModuleTransformScheme()
    scheme._set_transform(actor)
    scheme.init_on_sender(model=model)
    await scheme.connect(timeout=30)
    assert await actor.look.remote() == {1.0}
    fill(model, 2.0)
    assert (await scheme.send()).acked == {0}
    assert await actor.look.remote() == {2.0}
    await scheme.aclose()
    assert await actor.look.remote() == {2.0}
    async with RayModuleTransformScheme() as again:  # without weights at first
        again.init_on_sender(model_id="m", ray_transform=actor)
        await again.connect(timeout=30)
        fill(model, 3.0)
        await again.send(model)
        assert await actor.look.remote() == {3.0}
    async with RayModuleTransformScheme() as wrong:
        wrong.init_on_sender(ray_transform=NoTransform.remote())
        with pytest.raises(ConnectError, match="no attribute 'module'"):
            await wrong.connect(timeout=30)
    ray.kill(actor)


def to_transform(actor: Any, model: Any, **options: Any) -> RayModuleTransformScheme:
    scheme = RayModuleTransformScheme(**options)
    scheme.init_on_sender(model=model, ray_transform=actor)
    return scheme


async def transform_changes() -> None:
    """Another trainer, another module, and a copy of the actor's state."""
    actor, model = Transform.remote(), _models.medium()
    old, new = to_transform(actor, model), to_transform(actor, model)
    await old.connect(timeout=30)
    assert await actor.save.remote()  # nothing of aiosync is in the object
    await new.connect(timeout=30)
    await old.aclose()  # ends nothing but its own
    fill(model, 2.0)
    assert (await new.send()).acked == {0}
    assert await actor.look.remote() == {2.0}
    await actor.replace.remote()
    fill(model, 3.0)
    assert (await new.send()).acked == {0}
    assert await actor.look.remote() == {3.0}
    await new.aclose()
    assert "aiosync-transform" not in await actor.threads.remote()
    ray.kill(actor)


async def transform_given_up() -> None:
    """Who stops to wait blocks the actor no longer; a trainer that died leaves nothing there."""
    actor, model = Transform.remote(), _models.medium()
    await actor.look.remote()
    for busy, wait in ((0.0, 0.0), (0.0, 0.01), (1.0, 0.3)):
        working = actor.work.remote(busy)
        scheme = to_transform(actor, model)
        connecting = asyncio.ensure_future(scheme.connect(timeout=60))
        await asyncio.sleep(wait)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await scheme.aclose()
        await working
        async with asyncio.timeout(10):
            assert "aiosync-transform" not in await actor.threads.remote()
    trainer = TransformTrainer.remote()
    await trainer.connect.remote(actor, 0.5)
    assert "aiosync-transform" in await actor.threads.remote()
    ray.kill(trainer)
    async with asyncio.timeout(20):
        while "aiosync-transform" in await actor.threads.remote():
            await asyncio.sleep(0.1)
    ray.kill(actor)


async def full_store() -> None:
    """What the store does not take fails that send, and the link stays."""
    model = _models.medium()
    scheme = in_store()
    async with crew(scheme, model, [Worker.remote()]) as actors:
        link = scheme._sender.peers[0].transport
        objects = scheme._objects

        def too_large() -> Any:
            raise ray.exceptions.ObjectStoreFullError("full")

        with pytest.raises(LocalProtocolError, match="did not accept the weights"):
            await objects.put({}, objects, too_large, publish=True)
        fill(model, 2.0)
        assert (await scheme.send()).acked == {0}
        assert scheme._sender.peers[0].transport is link
        assert await actors[0].look.remote() == (2, {2.0})


async def two_nodes() -> None:
    """Actors on the sender's node and on another one."""
    model = _models.big()
    for scheme in (in_store(), RayWeightSyncScheme()):
        fill(model, 1.0)
        actors = [Worker.options(resources={f"node{idx}": 0.1}).remote() for idx in (0, 1, 1)]
        # Both nodes are on this host.
        far = {1, 2} if scheme.shared_memory else {0, 1, 2}
        async with crew(scheme, model, actors, name="big", far=far):
            assert kinds(scheme) == {
                idx: RayTransport if idx in far else SharedMemTransport for idx in range(3)
            }
            for value in (2, 3, 4):
                fill(model, float(value))
                assert (await scheme.send()).acked == {0, 1, 2}
                fill(model, -1.0)
                found = await asyncio.gather(*(actor.look.remote() for actor in actors))
                assert found == [(value, {float(value)})] * 3
            restored = copy.copy(scheme)
            assert restored.address == scheme.address


# -- actors on the sender's host --------------------------------------------------------------


async def on_this_host() -> None:
    """They read shared memory: nothing is in the object store, and nothing is copied for them."""
    model = _models.big()
    fill(model, 1.0)
    scheme = RayWeightSyncScheme()
    early = pickle.loads(pickle.dumps(scheme))
    actors = [Worker.remote(), Worker.remote(), Serial.remote()]
    async with crew(scheme, model, actors, early=early, name="big"):
        assert set(kinds(scheme).values()) == {SharedMemTransport}
        resting = await asyncio.gather(*(actor.memory.remote() for actor in actors))
        for value in range(2, 12):
            fill(model, float(value))
            sent = scheme.send() if value % 3 else scheme.send_nowait()
            assert (await sent).acked == {0, 1, 2}
            fill(model, -1.0)  # belongs to the trainer again
            if value in (2, 7, 11):
                found = await asyncio.gather(*(actor.look.remote() for actor in actors))
                assert found == [(value, {float(value)})] * 3
        assert stored() < MIB
        assert scheme._objects is None
        assert scheme._same_host.arena.num_slots <= 3
        grown = await asyncio.gather(*(actor.memory.remote() for actor in actors))
        for old, new in zip(resting, grown, strict=True):
            assert new["RssAnon"] - old["RssAnon"] < 16 * MIB, (old, new)
        await actors[0].write.remote()  # stays its own
        assert await actors[0].look.remote() == (11, {12.0})
        assert await actors[1].look.remote() == (11, {11.0})


async def near_and_far() -> None:
    """Actors of both kinds get the same; who comes late finds what was put for the others."""
    model = _models.big()
    fill(model, 1.0)
    scheme = RayWeightSyncScheme()
    async with crew(scheme, model, [Worker.remote()], far={0}, name="big") as actors:
        assert kinds(scheme) == {0: RayTransport}
        scheme._sender.workers.num_workers = None
        fill(model, 2.0)
        await scheme.send()
        slots = scheme._same_host.arena.num_slots
        assert scheme._sender.workers.newest_for(1).never_copied  # it is in the store only
        fill(model, -1.0)
        actors += [Worker.remote(), Worker.remote()]
        joining = [actors[idx].join.remote(scheme, idx, "big") for idx in (1, 2)]
        assert await asyncio.gather(*joining) == [2, 2]
        assert kinds(scheme) == {0: RayTransport, 1: SharedMemTransport, 2: SharedMemTransport}
        assert scheme._same_host.arena.num_slots <= max(slots, 1) + 1  # one for both of them
        for value in range(3, 9):
            found = await asyncio.gather(*(actor.look.remote() for actor in actors))
            assert found == [(value - 1, {value - 1.0})] * 3
            fill(model, float(value))
            sent = scheme.send() if value % 3 else scheme.send_nowait()
            assert (await sent).acked == {0, 1, 2}
            fill(model, -1.0)
        assert scheme._same_host.arena.num_slots <= 4


async def before_anybody_came() -> None:
    """What was sent to nobody is there for who comes, of either kind."""
    model = _models.big()
    fill(model, 1.0)
    async with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", model=model)
        await scheme.connect()
        fill(model, 2.0)
        await scheme.send()
        fill(model, -1.0)
        actors = [Worker.remote(), Worker.remote()]
        assert await actors[0].join.remote(scheme, 0, "big") == 2
        assert await actors[1].join.remote(as_if_far(scheme), 1, "big") == 2
        found = await asyncio.gather(*(actor.look.remote() for actor in actors))
        assert found == [(2, {2.0})] * 2
        assert kinds(scheme) == {0: SharedMemTransport, 1: RayTransport}
        for actor in actors:
            ray.kill(actor)


async def joins_in_the_middle() -> None:
    """Who joins while tensors are read for others gets that version, whole."""
    model = _models.big()
    fill(model, 1.0)
    scheme = RayWeightSyncScheme()
    async with crew(scheme, model, [Worker.remote()], far={0}, name="big") as actors:
        scheme._sender.workers.num_workers = None
        for value in (2.0, 3.0, 4.0):
            fill(model, value)
            thread = scheme._objects._thread
            late = Worker.remote()
            await late.pid.remote()  # it is up
            thread.start(lambda: time.sleep(2.0))  # as if the store were slow
            sending = asyncio.ensure_future(scheme.send())
            await until(lambda thread=thread: len(thread._running) == 2)
            idx = len(actors)
            joining = late.join.remote(scheme, idx, "big")
            await until(lambda idx=idx: idx in scheme._sender.peers)
            assert not sending.done()
            if value == 4.0:  # its worker is lost, and the payload perhaps kept nowhere
                ray.kill(actors[0])
                with pytest.raises(PartialSyncError):
                    await sending
            else:
                await sending
            fill(model, -1.0)
            assert await joining == value
            assert await late.look.remote() == (value, {value})
            assert kinds(scheme)[idx] is SharedMemTransport
            ray.kill(late)
            await until(lambda idx=idx: idx not in scheme._sender.peers)
            scheme._sender.workers.unreported.clear()


async def lost_in_the_store() -> None:
    """Weights that the store has lost fail for who wants them, and the next ones arrive."""
    model = _models.big()
    fill(model, 1.0)
    scheme = RayWeightSyncScheme()
    async with crew(scheme, model, [Worker.remote()], far={0}, name="big") as actors:
        scheme._sender.workers.num_workers = None
        fill(model, 2.0)
        await scheme.send()
        entry = scheme._sender.workers.newest_for(1).memo[scheme._objects]
        owner = Owner.remote()
        [entry.ref] = await owner.make.remote()
        ray.kill(owner)
        actors.append(Worker.remote())
        await asyncio.sleep(0.5)
        joining = actors[1].join.remote(scheme, 1, "big")
        await until(lambda: 1 in scheme._sender.peers)
        await until(lambda: 1 in scheme._sender.workers._failures)
        assert "lost the weights" in str(scheme._sender.workers._failures[1])
        fill(model, 3.0)
        await scheme.send(worker_ids=1)
        assert await joining == 3
        assert await actors[1].look.remote() == (3, {3.0})


async def killed_on_this_host() -> None:
    """It is named as an actor, within a second."""
    model = _models.big()
    fill(model, 1.0)
    scheme = RayWeightSyncScheme()
    actors = [Worker.remote(), Worker.options(name="the second").remote()]
    async with crew(scheme, model, actors, name="big"):
        pid = await actors[1].pid.remote()
        os.kill(pid, signal.SIGSTOP)
        fill(model, 2.0)
        sending = asyncio.ensure_future(scheme.send())
        await until(lambda: scheme.worker_versions[0] == 2)
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PartialSyncError) as caught:
            await sending
        assert time.monotonic() - begun < 1.0
        assert (set(caught.value.failed), caught.value.acked) == ({1}, {0})
        said = str(caught.value.failed[1])
        assert f"actor the second ({actors[1]._actor_id.hex()})" in said
        assert f"process {pid}" in said

"""What happens in an RPC group; each function is the trainer of one test of ``test_rpc``."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any

from torch.distributed import rpc

import aiosync
from aiosync.schemes.rpc import RPCWeightSyncScheme
from tests.schemes import _harness as harness
from tests.schemes import _rpc_group as group_module
from tests.schemes._rpc_group import Group, block, fill

MIB = 40  # more than two chunks


class Collector:
    """What a scheme looks at in TorchRL's RPCCollector."""

    collector_infos: list[Any]
    collector_rrefs: list[Any]
    collector_class: Any = None
    policy: Any = None


async def joined(
    group: Group, key: str, scheme: Any, *, early: bool = False, **init: Any
) -> tuple[Any, Any]:
    """A connected trainer and its workers; their copies are made before or after its role."""
    model = block(MIB, 1.0)
    before = pickle.dumps(scheme)
    scheme.init_on_sender(model_id="policy", model=model, **init)
    after = pickle.dumps(scheme)
    await group.all(group_module.hold, key, before if early else after)
    joining = [
        asyncio.ensure_future(group.call(idx, group_module.join, key, MIB, idx))
        for idx in range(len(group.names))
    ]
    await scheme.connect(timeout=group_module.MAX_SECONDS)
    assert await asyncio.gather(*joining) == [1] * len(joining)
    return scheme, model


async def check(group: Group, key: str, expected: list[tuple[int, float]]) -> None:
    found = [await group.call(idx, group_module.state, key) for idx in range(len(group.names))]
    assert [(version, values) for version, values, _ in found] == [
        (version, [value]) for version, value in expected
    ], found


async def leave(group: Group, key: str, scheme: Any) -> None:
    await group.all(group_module.leave, key)
    await scheme.aclose()


def by_rpc(*args: Any) -> RPCWeightSyncScheme:
    """A scheme whose workers get large updates by RPC although they are on this host."""
    return RPCWeightSyncScheme(*args, shared_memory=False)


# -- scenarios ---------------------------------------------------------------------------------


async def calm(group: Group) -> None:
    await many_updates(group)
    await copies_made_before(group)
    await links_of_a_tuple(group)
    await the_loop_lets_go(group)
    assert await group.all(group_module.payloads_awaited) == [0, 0, 0]
    assert group_module.offered() == 0


async def the_loop_lets_go(group: Group) -> None:
    """Whatever Python does on RPC's own threads, the loop waits for: it needs the GIL."""
    from aiosync.transports._rpc_flight import Flight

    threads: list[int] = []
    let_go = Flight._on_let_go

    def noted(flight: Flight) -> None:
        threads.append(threading.get_ident())
        let_go(flight)

    Flight._on_let_go = noted  # type: ignore[method-assign]
    try:
        scheme, model = await joined(group, "quiet", by_rpc(), num_workers=3)
        for version in range(2, 6):
            fill(model, float(version))
            await scheme.send()
        await leave(group, "quiet", scheme)
    finally:
        Flight._on_let_go = let_go  # type: ignore[method-assign]
    assert len(threads) >= 5 * 3 * 3  # chunks
    assert set(threads) == {threading.get_ident()}


async def on_one_host(group: Group) -> None:
    """The same through shared memory, which needs no call but those that tell the address."""
    await many_updates(group, RPCWeightSyncScheme())
    assert group_module.offered() == 0


async def many_updates(group: Group, scheme: Any = None) -> None:
    everybody = {0, 1, 2}
    scheme, model = await joined(group, "many", scheme or by_rpc(), num_workers=3)
    await check(group, "many", [(1, 1.0)] * 3)
    for version in range(2, 6):
        fill(model, float(version))
        report = await scheme.send()
        assert (report.version, report.acked) == (version, everybody)
        await check(group, "many", [(version, float(version))] * 3)
    # One worker only.
    fill(model, 6.0)
    report = await scheme.send(worker_ids=1)
    assert (report.version, report.acked) == (6, {1})
    await check(group, "many", [(5, 5.0), (6, 6.0), (5, 5.0)])
    fill(model, 7.0)
    assert (await scheme.send(worker_ids=[0, 2])).acked == {0, 2}
    await check(group, "many", [(7, 7.0), (6, 6.0), (7, 7.0)])
    # The second of three that come at once is overtaken before the first was received.
    handles = []
    for value in (8.0, 9.0, 10.0):
        fill(model, value)
        handles.append(scheme.send_nowait())
    reports = [await handle for handle in handles]
    assert reports[1].skipped.keys() == everybody
    assert reports[2].acked == everybody
    await check(group, "many", [(10, 10.0)] * 3)
    # A call that is cancelled, and weights that change right after.
    sending = asyncio.ensure_future(scheme.send({"block": model.block.detach().add(1.0)}))
    while not any(await group.all(group_module.payloads_awaited)) and not sending.done():
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait({sending})
    fill(model, 12.0)
    await scheme.wait_for_version(11)
    await check(group, "many", [(11, 11.0)] * 3)
    await a_lost_link(group, scheme, model)
    await leave(group, "many", scheme)


async def a_lost_link(group: Group, scheme: Any, model: Any) -> None:
    """The worker dials again, and an update that was on its way arrives."""
    peer = scheme._sender.peers[1]
    peer.transport.channel.fail(aiosync.TransportBroken("for the test"))
    await harness.until(lambda: scheme._sender.peers.get(1) not in (None, peer))
    report = await scheme.send()
    assert report.acked == {0, 1, 2}
    await check(group, "many", [(12, 12.0)] * 3)
    assert (await group.call(1, group_module.state, "many"))[2] == 1


async def copies_made_before(group: Group) -> None:
    """Receivers first, as TorchRL's RPCCollector has it."""
    infos = [rpc.get_worker_info(name) for name in group.names]
    collector = Collector()
    collector.collector_infos = infos
    scheme = by_rpc("state_dict")
    await group.all(group_module.hold, "early", pickle.dumps(scheme))
    joining = [
        asyncio.ensure_future(group.call(idx, group_module.join, "early", MIB, None))
        for idx in range(3)
    ]
    collector.policy = block(MIB, 5.0)
    scheme.init_on_sender(model_id="policy", context=collector)
    await scheme.connect(timeout=group_module.MAX_SECONDS)
    assert await asyncio.gather(*joining) == [1, 1, 1]
    fill(collector.policy, 6.0)
    assert (await scheme.send()).acked == {0, 1, 2}
    await check(group, "early", [(2, 6.0)] * 3)
    await leave(group, "early", scheme)
    # By their names, and one that does not exist: it delays nobody.
    names = [*group.names, "nobody"]
    scheme, _ = await joined(group, "named", by_rpc(), early=True, workers=names, num_workers=3)
    await leave(group, "named", scheme)
    try:
        scheme.create_transport((1, 2))
    except aiosync.ConfigError:
        return
    raise AssertionError("a tuple of two was taken")


async def links_of_a_tuple(group: Group) -> None:
    """One transport for each remote collector, as TorchRL makes them."""
    scheme = by_rpc()
    await group.all(group_module.hold, "tuple", pickle.dumps(scheme))
    links = {
        idx: scheme.create_transport((rpc.get_worker_info(name), None, None))
        for idx, name in enumerate(group.names)
    }
    model = block(MIB, 3.0)
    scheme.init_on_sender(model_id="policy", model=model, transports=links)
    joining = [
        asyncio.ensure_future(group.call(idx, group_module.join, "tuple", MIB, idx))
        for idx in range(3)
    ]
    await scheme.connect(timeout=group_module.MAX_SECONDS)
    assert await asyncio.gather(*joining) == [1, 1, 1]
    fill(model, 4.0)
    assert (await scheme.send()).acked == {0, 1, 2}
    await check(group, "tuple", [(2, 4.0)] * 3)
    await leave(group, "tuple", scheme)


async def killed(group: Group) -> None:
    """A worker dies in mid-transfer; another stands still, and goes on."""
    scheme, model = await joined(group, "kill", by_rpc(), num_workers=3)
    loop = asyncio.get_running_loop()
    # It stands still first: its neighbours do not wait, and nothing torn comes when it goes on.
    still = group.processes[2]
    still.send_signal(signal.SIGSTOP)
    fill(model, 2.0)
    started = loop.time()
    try:
        await scheme.send(timeout=1.5)
        raise AssertionError("a worker that stands still has answered")
    except aiosync.PartialSyncError as exc:
        assert (set(exc.failed), exc.acked) == ({2}, {0, 1}), exc
        assert isinstance(exc.failed[2], aiosync.AckTimeout)
    assert loop.time() - started < 4.0
    fill(model, 3.0)
    still.send_signal(signal.SIGCONT)
    await scheme.wait_for_version(2)
    await check(group, "kill", [(2, 2.0)] * 3)
    for _ in range(20):  # until one is caught in the middle
        sending = asyncio.ensure_future(scheme.send())
        while not sending.done() and not await group.call(1, group_module.payloads_awaited):
            pass
        # It may be about to answer: a process that stands still does not.
        group.processes[1].send_signal(signal.SIGSTOP)
        await asyncio.wait([sending], timeout=0.5)
        if not sending.done():
            break
        group.processes[1].send_signal(signal.SIGCONT)
    assert not sending.done(), "no transfer took long enough to be caught"
    group.processes[1].kill()
    started = loop.time()
    try:
        await sending
        raise AssertionError("a dead worker has answered")
    except aiosync.PartialSyncError as exc:
        assert (set(exc.failed), exc.acked) == ({1}, {0, 2}), exc
        assert isinstance(exc.failed[1], (aiosync.TransportBroken, aiosync.PeerClosed))
        assert "1" in str(exc)
    assert loop.time() - started < 5.0
    for value in (4.0, 5.0):
        fill(model, value)
        report = await scheme.send()
        assert (report.acked, set(report.lost)) == ({0, 2}, {1})
    for idx in (0, 2):
        expected = (scheme.version, [5.0])
        assert (await group.call(idx, group_module.state, "kill"))[:2] == expected
        await group.call(idx, group_module.leave, "kill")
    await scheme.aclose()
    assert group_module.offered() == 0


def run(name: str, loop: str, group: Group) -> None:
    with asyncio.Runner(loop_factory=harness.loop_factory(loop)) as runner:
        runner.run(globals()[name](group))
        left = asyncio.all_tasks(runner.get_loop())
    assert not left, left
    names = [each.name for each in threading.enumerate() if each.name.startswith("aiosync")]
    assert not names, names


def main(*wanted: str) -> None:
    """Run scenarios, each given as ``name:loop``, in one group."""
    group = Group(3)
    try:
        for each in wanted:
            run(*each.split(":"), group)
        if "killed" in wanted[-1]:
            started = time.monotonic()
            rpc.shutdown(graceful=False)  # the dead one would be waited for, by RPC itself
            assert time.monotonic() - started < 5.0
        else:
            group.shut_down()
    except BaseException:  # noqa: BLE001 - the test sees the text and the status
        traceback.print_exc()
        group.kill()
        os._exit(1)  # RPC was not shut down, and would be waited for
    group.kill()


if __name__ == "__main__":
    from tests.schemes import _rpc_scenarios

    _rpc_scenarios.main(*sys.argv[1:])

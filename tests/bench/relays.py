"""A tree of weight servers: time until the last of many workers has an update.

``python -m tests.bench.relays`` runs a trainer, a server that follows it, servers that follow that
one, and workers. All of them dial the first server, which sends the workers on to the others. The
kernel paces every link to the same rate. It compares the last worker with one worker that dials the
trainer itself. Then it kills a server in the middle of an update, whose workers go on at another
one, and says when the last of them and of the others had it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

import aiosync
from aiosync.server import WeightServer
from tests.support.waiting import free_port

_SO_MAX_PACING_RATE = 47
_CHUNK = 2**20
_PATIENCE = 120.0


def _pace(rate: float) -> None:
    """Have the kernel pace what this process sends on connections that it accepts."""
    listen = socket.socket.listen

    def paced(sock: socket.socket, *backlog: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(rate))
        listen(sock, *backlog)

    socket.socket.listen = paced  # type: ignore[method-assign]


def _model(mib: int) -> nn.Module:
    return nn.Linear(mib * 2**18, 1, bias=False)


def server(url: str, upstream: str, fanout: int, rate: float, conn: Connection) -> None:
    """Run a server that follows another one; answer with the processor's seconds when asked."""
    given: dict[str, Any] = {"model_ids": ["policy"], "upstream": upstream, "fanout": fanout}
    torch.set_num_threads(1)
    _pace(rate)

    async def main() -> None:
        async with WeightServer(url, chunk_nbytes=_CHUNK, **given) as following:
            conn.send(None)
            while await asyncio.to_thread(conn.recv):
                (served,) = following.status()["models"]
                conn.send((len(served["workers"]), time.process_time()))

    asyncio.run(main())


def workers(url: str, count: int, mib: int, conn: Connection) -> None:
    """Run workers; answer when all have a version: when each had it, and on how many links."""
    torch.set_num_threads(1)

    async def main() -> None:
        schemes, had = [], [dict[int, float]() for _ in range(count)]
        for times in had:

            def note(epoch: int, version: int, times: dict[int, float] = times) -> None:
                times[version] = time.monotonic()

            scheme = aiosync.TCPWeightSyncScheme(
                url, dial="both", reconnect=None, timeout=_PATIENCE
            )
            hooks = aiosync.SchemeHooks(applied=note)
            scheme.init_on_receiver("policy", model=_model(mib), hooks=hooks)
            schemes.append(scheme)
        await asyncio.gather(*(each.connect() for each in schemes))
        conn.send(None)
        while version := await asyncio.to_thread(conn.recv):
            await asyncio.gather(*(each.wait_for_version(version) for each in schemes))
            found = [
                (times[version], each.reconnects) for times, each in zip(had, schemes, strict=True)
            ]
            conn.send((found, time.process_time()))
        await asyncio.gather(*(each.aclose() for each in schemes))

    asyncio.run(main())


class Tree:
    """The processes below a trainer."""

    def __init__(self, rate: float, mib: int) -> None:
        self.rate, self.mib = rate, mib
        self._context = multiprocessing.get_context("spawn")
        self.started: list[BaseProcess] = []
        # A process whose pipe is collected would complain before it is ended.
        self._conns: list[Connection] = []

    def start(self, target: Any, *args: Any) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        self.started.append(process)
        self._conns.append(ours)
        return process, ours

    def serve(self, upstream: str, fanout: int) -> tuple[str, BaseProcess, Connection]:
        url = f"tcp://127.0.0.1:{free_port()}"
        return url, *self.start(server, url, upstream, fanout, self.rate)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.join()


async def _say(conns: Sequence[Connection], what: Any) -> list[Any]:
    for each in conns:
        each.send(what)
    return await _heard(conns)


async def _heard(conns: Sequence[Connection]) -> list[Any]:
    return [await asyncio.wait_for(asyncio.to_thread(each.recv), _PATIENCE) for each in conns]


def _trainer() -> aiosync.TCPWeightSyncScheme:
    return aiosync.TCPWeightSyncScheme(
        f"tcp://127.0.0.1:{free_port()}", chunk_nbytes=_CHUNK, timeout=_PATIENCE
    )


async def alone(tree: Tree, sends: int) -> list[float]:
    """Return the seconds of sends to one worker that dials the trainer itself."""
    scheme, model = _trainer(), _model(tree.mib)
    scheme.init_on_sender("policy", model=model, num_workers=1)
    _, conn = tree.start(workers, scheme.address, 1, tree.mib)
    async with scheme:
        await scheme.connect()
        await _heard([conn])
        seconds = []
        for _ in range(sends):
            began = time.monotonic()
            await scheme.send()
            ((((had, _),), _),) = await _say([conn], scheme.version)
            seconds.append(had - began)
        conn.send(0)
    return seconds


async def together(tree: Tree, sites: int, per_site: int, sends: int, bound: float) -> None:
    """Measure sends to workers behind servers; then kill one of the servers in the middle."""
    scheme, model = _trainer(), _model(tree.mib)
    scheme.init_on_sender("policy", model=model, num_workers=1)
    root, _, root_conn = tree.serve(scheme.address, sites)
    async with scheme:
        await scheme.connect()
        await _heard([root_conn])
        found = [tree.serve(root, per_site) for _ in range(sites)]
        await _heard([conn for _, _, conn in found])
        while (await _say([root_conn], True))[0][0] < sites:
            await asyncio.sleep(0.05)
        crews = [tree.start(workers, root, per_site, tree.mib)[1] for _ in range(sites)]
        await _heard(crews)
        servers, ratios = [root_conn, *(conn for _, _, conn in found)], []
        links = [count for count, _ in await _say(servers, True)]
        print(f"links of the first server: {links[0]}, of the others: {links[1:]}")
        before = await _busy(crews, servers, scheme.version)
        began_all = time.monotonic()
        for _ in range(sends):
            began = time.monotonic()
            await scheme.send()
            told = await _say(crews, scheme.version)
            last = max(max(had for had, _ in each) for each, _ in told) - began
            ratios.append(last / bound)
            print(f"  last of {sites * per_site} workers: {last:.2f} s, {ratios[-1]:.2f} of one")
        busy = await _busy(crews, servers, scheme.version) - before
        share = busy / (time.monotonic() - began_all) / (os.cpu_count() or 1)
        print(
            f"median {statistics.median(ratios):.2f}; the processes took {share:.0%} of all cores"
        )
        _, process, _ = found[0]
        began = time.monotonic()
        sending = asyncio.ensure_future(scheme.send())
        await asyncio.sleep(bound / 2)
        process.kill()
        process.join()
        killed = time.monotonic()
        await sending
        told = await _say(crews, scheme.version)
        all_of_them = [each for crew, _ in told for each in crew]
        orphans = max((had for had, again in all_of_them if again), default=began)
        others = max(had for had, again in all_of_them if not again)
        print(
            f"a server killed after {killed - began:.2f} s: its workers have the "
            f"version after {orphans - began:.2f} s, all others after {others - began:.2f} s"
        )


async def _busy(crews: list[Connection], servers: list[Connection], version: int) -> float:
    """Return the processor's seconds of all processes, this one included."""
    told, spent = await _say(crews, version), await _say(servers, version)
    return sum(seconds for _, seconds in [*told, *spent]) + time.process_time()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--per-site", type=int, default=8)
    parser.add_argument("--sends", type=int, default=5)
    given = parser.parse_args()
    rate = given.mbit * 1e6 / 8
    _pace(rate)
    tree = Tree(rate, given.mib)
    try:
        seconds = await alone(tree, given.sends)
        bound = statistics.median(seconds)
        print(f"{given.mib} MiB at {given.mbit:g} Mbit/s for each link: one worker {bound:.2f} s")
        await together(tree, given.sites, given.per_site, given.sends, bound)
    finally:
        tree.end()


if __name__ == "__main__":
    asyncio.run(main())

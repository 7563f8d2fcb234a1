"""The gain of deltas on a slow link: time from ``send()`` until the worker has applied the update.

``python -m tests.bench.delta_link`` runs a trainer, a worker and between them a proxy that carries
a limited number of bytes for each second and connection, each in a process of its own. It sends
weights in bfloat16 of which a share has changed, nine in ten by one step, with each value of
``delta=``. The values take turns, so that a change of the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import aiosync

MODES = ("off", "auto", "always")
_BLOCK_NBYTES = 2**16


def _relay(source: socket.socket, target: socket.socket, rate: float) -> None:
    """Carry bytes at most at this rate for each second; 0 for no limit."""
    due, block = time.perf_counter(), memoryview(bytearray(_BLOCK_NBYTES))
    while nbytes := source.recv_into(block):
        now = time.perf_counter()
        # Capacity that was not used in the last 20 ms is lost, as it is on a real link.
        due = max(due, now - 0.02)
        if rate:
            due += nbytes / rate
        if due > now:
            time.sleep(due - now)
        target.sendall(block[:nbytes])
    target.shutdown(socket.SHUT_WR)


def proxy(port: int, rate: float, ready: Any) -> None:
    """Relay connections to a port of this host, limited towards the dialer."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    while True:
        dialer, _ = listener.accept()
        upstream = socket.create_connection(("127.0.0.1", port))
        for each in (dialer, upstream):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, option, 2**18)
        for pair in ((upstream, dialer, rate), (dialer, upstream, 0.0)):
            threading.Thread(target=_relay, args=pair, daemon=True).start()


def _model(nbytes: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    for index in range(8):
        weights = (torch.randn(nbytes // 16) * 0.02).bfloat16()
        model.register_parameter(f"w{index}", nn.Parameter(weights, requires_grad=False))
    return model


def worker(url: str, nbytes: int, mode: Any, streams: int, checks: Any) -> None:
    """Take updates; answer with the sum of the weights' bits whenever asked."""
    torch.set_num_threads(1)

    async def main() -> None:
        model = _model(nbytes)
        scheme = aiosync.TCPWeightSyncScheme(url, delta=mode, streams=streams)
        scheme.init_on_receiver("policy", model=model)
        async with scheme:
            await scheme.connect()
            while await asyncio.to_thread(checks.recv):
                spent = time.process_time()
                checks.send((_bits(model), spent, time.process_time()))

    asyncio.run(main())


def _bits(model: nn.Module) -> int:
    return sum(int(each.view(torch.int16).sum(dtype=torch.int64)) for each in model.parameters())


def _change(model: nn.Module, share: float, rng: np.random.Generator) -> None:
    for each in model.parameters():
        bits = each.data.view(torch.int16).numpy()
        places = rng.integers(0, bits.size, int(bits.size * share))
        far = np.where(rng.random(places.size) < 0.9, 1, 2)
        bits[places] += (far * rng.choice([-1, 1], places.size)).astype(np.int16)


async def measure(
    mib: int, share: float, rate: float, streams: int, sends: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return for each value of ``delta=`` the seconds of sends, and of both sides' processors."""
    context, rng = multiprocessing.get_context("spawn"), np.random.default_rng(0)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    work: dict[str, list[float]] = {mode: [] for mode in MODES}
    pairs, processes, spent_there = [], [], dict.fromkeys(MODES, 0.0)
    try:
        for mode in MODES:
            model = _model(mib * 2**20)
            scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", delta=mode)
            scheme.init_on_sender("policy", model=model, num_workers=1)
            port = int(scheme.address.rpartition(":")[2])
            ours, theirs = context.Pipe()
            limit = context.Process(target=proxy, args=(port, rate, theirs), daemon=True)
            limit.start()
            url = f"tcp://127.0.0.1:{ours.recv()}"
            given = (url, mib * 2**20, mode, streams, theirs)
            process = context.Process(target=worker, args=given, daemon=True)
            process.start()
            processes += limit, process
            await scheme.connect()
            pairs.append((mode, scheme, model, ours))
        for send in range(sends + 2):
            for mode, scheme, model, checks in pairs:
                _change(model, share, rng)
                began, spent_here = time.perf_counter(), time.process_time()
                await scheme.send()
                elapsed = time.perf_counter() - began
                spent_here = time.process_time() - spent_here
                checks.send(True)
                found, there, after = await asyncio.to_thread(checks.recv)
                assert found == _bits(model)
                if send >= 2:
                    seconds[mode].append(elapsed)
                    work[mode].append(spent_here + there - spent_there[mode])
                spent_there[mode] = after
        for _, scheme, _, checks in pairs:
            checks.send(False)
            await scheme.aclose()
    finally:
        for process in processes:
            process.terminate()
    return seconds, work


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--gbit", type=float, nargs="*", default=[1, 10, 0], help="0 for no limit")
    parser.add_argument("--share", type=float, nargs="*", default=[0.01])
    parser.add_argument("--streams", type=int, default=1, help="connections, each with its limit")
    parser.add_argument("--sends", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("Milliseconds: the median (the least; of processors on both sides, the median)")
    print(f"| MiB | Gbit/s | changed | {' | '.join(MODES)} | times faster |")
    for mib in given.mib:
        for gbit in given.gbit:
            for share in given.share:
                how = share, gbit * 125e6, given.streams, given.sends
                found, work = asyncio.run(measure(mib, *how))
                cells = [statistics.median(found[mode]) for mode in MODES]
                row = " | ".join(
                    f"{1000 * each:.0f} ({1000 * min(found[mode]):.0f}; "
                    f"{1000 * statistics.median(work[mode]):.0f})"
                    for mode, each in zip(MODES, cells, strict=True)
                )
                print(
                    f"| {mib} | {gbit or 'loopback'} | {100 * share:g} % | {row} "
                    f"| {cells[0] / cells[2]:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

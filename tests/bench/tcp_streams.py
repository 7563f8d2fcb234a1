"""Large weights over TCP on loopback, plain and with TLS, beside raw sockets of both kinds.

The four take turns, block by block. Two times are measured for each update: until the worker has
reported that it has applied it (*delivered*, ``SendReport.elapsed``), and until ``send()`` has
returned, which also copies the weights for workers to come. The raw sockets block, and send the
same tensors into memory that is there already, without checksums; that with TLS is Python's
``SSLSocket``. Every update has other values, which the workers check at the end of each block. Not
measured: a network.

    python -m tests.bench.tcp_streams --mebibytes 512 --blocks 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

import aiosync
from tests._certificates import certificates

TENSORS = 16
WINDOW = 2**20
PATIENCE = 60.0


def build(mebibytes: int) -> nn.Module:
    return nn.ParameterList(
        [nn.Parameter(torch.zeros(mebibytes * 2**18 // TENSORS)) for _ in range(TENSORS)]
    )


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


# -- workers ------------------------------------------------------------------------------------


def work_raw(pipe: Connection, sock: socket.socket, nbytes: int, tls: aiosync.TLS | None) -> None:
    if tls is not None:
        sock = tls.dialling_context().wrap_socket(sock, server_hostname="localhost")
    landing = np.zeros(nbytes, np.uint8)
    view = memoryview(landing)
    while True:
        expected = pipe.recv()
        done = 0
        while done < nbytes:
            got = sock.recv_into(view[done : done + WINDOW])
            if not got:
                return
            done += got
        sock.send(b"x")
        if expected is not None:
            pipe.send(bool((landing.view(np.float32) == expected).all()))


def work_aiosync(pipe: Connection, scheme: Any, mebibytes: int) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        model = build(mebibytes)
        scheme.init_on_receiver(model_id="policy", model=model)
        async with scheme:
            await scheme.connect()
            loop = asyncio.get_running_loop()
            asked = asyncio.Event()
            loop.add_reader(pipe.fileno(), asked.set)
            while True:
                await asked.wait()
                asked.clear()
                expected = pipe.recv()
                if expected is None:
                    return
                pipe.send(all(bool((p == expected).all()) for p in model.parameters()))

    aiosync.run(main())


# -- the trainer --------------------------------------------------------------------------------


class Raw:
    def __init__(self, model: nn.Module, context: Any, *, tls: bool) -> None:
        self._views = [memoryview(p.detach().numpy()).cast("B") for p in model.parameters()]
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sock = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        self.pipe, its = context.Pipe()
        nbytes = sum(view.nbytes for view in self._views)
        args = (its, theirs, nbytes, certificates().dialling if tls else None)
        self.process = context.Process(target=work_raw, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self._tls = tls

    async def open(self) -> None:
        """Agree on keys; the socket is open already."""
        if self._tls:
            context = certificates().listening.listening_context()
            self._sock = context.wrap_socket(self._sock, server_side=True)

    async def send(self, last: float | None) -> tuple[float, float]:
        self.pipe.send(last)
        started = time.perf_counter()
        for view in self._views:
            for start in range(0, view.nbytes, WINDOW):
                self._sock.sendall(view[start : start + WINDOW])
        self._sock.recv(1)
        took = time.perf_counter() - started
        if last is not None:
            assert self.pipe.recv()
        return took, took

    async def close(self) -> None:
        self.pipe.send(None)
        self._sock.close()
        self.process.join(PATIENCE)


class Stream:
    def __init__(self, model: nn.Module, context: Any, mebibytes: int, *, tls: bool) -> None:
        options: dict[str, Any] = {"tls": certificates().both} if tls else {}
        self.scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)
        self.scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
        self.pipe, its = context.Pipe()
        args = (its, self.scheme, mebibytes)
        self.process = context.Process(target=work_aiosync, args=args, daemon=True)
        self.process.start()

    async def open(self) -> None:
        await self.scheme.connect(processes=[self.process], timeout=PATIENCE)

    async def send(self, last: float | None) -> tuple[float, float]:
        started = time.perf_counter()
        report = await self.scheme.send()
        took = time.perf_counter() - started
        if last is not None:
            self.pipe.send(last)
            assert await asyncio.to_thread(self.pipe.recv)
        return report.elapsed, took

    async def close(self) -> None:
        self.pipe.send(None)
        await asyncio.to_thread(self.process.join, PATIENCE)
        await self.scheme.aclose()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = build(args.mebibytes)
    context = multiprocessing.get_context("spawn")
    contenders: dict[str, Raw | Stream] = {
        "raw socket": Raw(model, context, tls=False),
        "raw socket with TLS": Raw(model, context, tls=True),
        "plain": Stream(model, context, args.mebibytes, tls=False),
        "TLS": Stream(model, context, args.mebibytes, tls=True),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    values = _values()
    for contender in contenders.values():
        await contender.open()
    for block in range(args.blocks + 1):
        for name, contender in contenders.items():
            for index in range(args.sends):
                value = next(values)
                fill(model, value)
                took = await contender.send(value if index == args.sends - 1 else None)
                # The first block warms up.
                if block:
                    times[name].append(took)
    for contender in contenders.values():
        await contender.close()
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    raw = medians["raw socket"][0]
    return {
        name: {
            "delivered_ms": round(delivered * 1e3, 1),
            "send_ms": round(sent * 1e3, 1),
            "delivered_of_raw": round(raw / delivered, 3),
            "send_of_raw": round(raw / sent, 3),
            "gigabytes_per_s": round(args.mebibytes * 2**20 / delivered / 1e9, 2),
        }
        for name, (delivered, sent) in medians.items()
    }


def _values() -> Iterator[float]:
    value = 0.0
    while True:
        value = value % 1000 + 1
        yield value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--sends", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(aiosync.run(measure(args)), indent=1))


if __name__ == "__main__":
    main()

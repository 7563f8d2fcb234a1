"""Throughput of the TCP scheme beside a raw blocking socket, same buffers, one run.

    python -m tests.bench.tcp_vs_raw [--mib 512] [--repeats 7] [--tensors 64] [--json FILE]

Sender and receiver are two processes. An *aiosync* send is timed from the call of
``await scheme.send()`` to the worker's answer that it applied the version (``SendReport.elapsed``):
from the sender's tensors to the receiver's staged and applied buffers, every chunk and the whole
checked. The call itself returns later, shown in brackets: it then copies the weights for workers
that join before the next send. A *raw* copy sends the same tensors with ``sendall`` from a blocking
socket into one block of memory of the receiver with ``recv_into``, and waits for one byte. The
two take turns; the medians are compared, as machines change their speed. TLS is measured beside
it where the package trustme is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import aiosync

WINDOW = 2**20


def build(num_tensors: int, nbytes: int) -> nn.ParameterDict:
    size = nbytes // num_tensors // 4
    return nn.ParameterDict({f"w{i}": nn.Parameter(torch.ones(size)) for i in range(num_tensors)})


# -- the receiver's process -------------------------------------------------------------------


def receiver(conn: Connection, schemes: dict[str, Any], port: int, args: Any) -> None:
    torch.set_num_threads(1)
    aiosync.run(lambda: _receive(conn, schemes, port, args))


async def _receive(conn: Connection, schemes: dict[str, Any], port: int, args: Any) -> None:
    models = {name: build(args.tensors, args.mib * 2**20) for name in schemes}
    for name, scheme in schemes.items():
        scheme.init_on_receiver(model=models[name], worker_idx=0)
        await scheme.connect()
    raw = socket.create_connection(("127.0.0.1", port)) if port else None
    block = memoryview(np.zeros(args.mib * 2**20, np.uint8))
    conn.send("ready")
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[Any] = asyncio.Queue()
    loop.add_reader(conn.fileno(), lambda: asked.put_nowait(conn.recv()))
    while (what := await asked.get()) is not None:
        if what == "raw":
            assert raw is not None
            got = 0
            while got < len(block):
                got += raw.recv_into(block[got : got + WINDOW])
            raw.send(b"x")
        else:
            name, value = what
            good = all(bool((p == value).all()) for p in models[name].values())
            conn.send(good)
    loop.remove_reader(conn.fileno())
    for scheme in schemes.values():
        await scheme.aclose()


# -- the sender's process ---------------------------------------------------------------------


def _tls(folder: Path) -> Any:
    try:
        import trustme
    except ImportError:
        return None
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    cert = authority.issue_cert("localhost", "127.0.0.1")
    cert.private_key_and_cert_chain_pem.write_to_path(str(folder / "cert.pem"))
    return aiosync.TLS(cert=folder / "cert.pem", ca=folder / "ca.pem")


async def measure(args: Any, folder: Path) -> dict[str, Any]:
    schemes: dict[str, Any] = {
        "tcp": aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0"),
        "unix": aiosync.TCPWeightSyncScheme(f"unix://{folder}/socket"),
    }
    if not args.quick and (tls := _tls(folder)) is not None:
        schemes["tcp with TLS"] = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", tls=tls)
    model = build(args.tensors, args.mib * 2**20)
    for scheme in schemes.values():
        scheme.init_on_sender(model=model, num_workers=1)
    listening = socket.create_server(("127.0.0.1", 0))
    mine, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    port = listening.getsockname()[1]
    process = spawn.Process(target=receiver, args=(theirs, schemes, port, args), daemon=True)
    process.start()
    for scheme in schemes.values():
        await scheme.connect(processes=[process])
    raw, _ = await asyncio.to_thread(listening.accept)
    listening.close()
    await asyncio.to_thread(mine.recv)
    sources = [memoryview(p.detach().numpy()).cast("B") for p in model.values()]
    times: dict[str, list[float]] = {"raw": [], **{name: [] for name in schemes}}
    whole: dict[str, list[float]] = {name: [] for name in schemes}
    value = 1.0
    for turn in range(args.repeats + 1):
        value += 1
        with torch.no_grad():
            for parameter in model.values():
                parameter.fill_(value)
        mine.send("raw")
        started = time.perf_counter()
        for source in sources:
            for at in range(0, len(source), WINDOW):
                raw.sendall(source[at : at + WINDOW])
        raw.recv(1)
        _note(times["raw"], started, turn)
        for name, scheme in schemes.items():
            started = time.perf_counter()
            report = await scheme.send()
            if turn:
                times[name].append(report.elapsed)
            _note(whole[name], started, turn)
            mine.send((name, value))
            if not await asyncio.to_thread(mine.recv):
                raise AssertionError(f"{name}: the receiver has other weights")
    mine.send(None)
    await asyncio.to_thread(process.join)
    for scheme in schemes.values():
        await scheme.aclose()
    raw.close()
    found = {name: _summary(each, args.mib) for name, each in times.items()}
    for name, each in whole.items():
        found[name]["whole_call_ms"] = statistics.median(each) * 1e3
    return found


def _note(times: list[float], started: float, turn: int) -> None:
    if turn:  # the first one touches fresh memory
        times.append(time.perf_counter() - started)


def _summary(times: list[float], mib: int) -> dict[str, float]:
    median = statistics.median(times)
    return {
        "median_ms": median * 1e3,
        "best_ms": min(times) * 1e3,
        "worst_ms": max(times) * 1e3,
        "gb_per_s": mib * 2**20 / median / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="without TLS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = aiosync.run(lambda: measure(args, Path(folder)))
    base = found["raw"]["median_ms"]
    for name, each in found.items():
        print(
            f"{name:14} {each['median_ms']:8.1f} ms ({each['best_ms']:.1f} to "
            f"{each['worst_ms']:.1f})  {each['gb_per_s']:5.2f} GB/s  "
            f"{base / each['median_ms']:5.2f} of raw"
            + (f"  (call {each['whole_call_ms']:.1f} ms)" if "whole_call_ms" in each else "")
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "python": sys.version,
                    "args": vars(args) | {"json": str(args.json)},
                    "results": found,
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()

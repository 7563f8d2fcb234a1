"""An ASGI server under a steady load while updates of its weights arrive back to back.

    python -m tests.bench.asgi_under_load [--mib 1024] [--rate 200] [--seconds 20] [--json FILE]

Three processes take part: a Starlette application with a feed under uvicorn, and a model of the
given size; a trainer that fills the model with the number of each version and sends it over TCP,
one after the other without a pause; and this process, which sends requests at a steady rate. The
load is open: requests begin when the clock says so, not when earlier ones have ended, and latencies
count from then. Half of the requests are answered by one forward, half by two forwards with a pause
of 2 ms between them. Every forward reads elements of every tensor, and an answer is *mixed* unless
all of them are the version that the header names.

*Lag* is how much later than asked a timer of 1 ms in the server fires. It includes the work of
requests and of other processes, so it is measured without updates, too. ``--loop asyncio --blame``
times every callback of the loop: *wall* by the clock, *busy* by the processor time of the thread.

``--mode immediate`` shows that the check can fail: in this mode an answer of two forwards may be
mixed.

Not measured: other machines, TLS, and models whose forwards take long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aiosync
from aiosync.serving import AdmissionGate, WeightFeed
from tests.bench._loop_time import Spans, Ticker, summary, watch_everything

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 120.0
PAUSE = 0.002
PERCENTILES = ("p50", "p99", "max")
SPAN = (
    "  {:<34} {:>7} times | wall p50 {:6.3f}  p99 {:6.3f}  max {:7.3f} | "
    "busy p50 {:6.3f}  p99 {:6.3f}  max {:7.3f} ms"
)


class Probe(nn.Module):
    """Model of ``nbytes`` bytes, whose output names the version of every tensor."""

    def __init__(self, nbytes: int, num_tensors: int) -> None:
        super().__init__()
        size = nbytes // num_tensors // 4
        self.tensors = nn.ParameterList(torch.zeros(size) for _ in range(num_tensors))
        self.size = size

    def forward(self, where: torch.Tensor) -> torch.Tensor:
        at = int(where.sum()) % self.size
        return torch.stack([tensor[at] for tensor in self.tensors])


# -- the trainer ------------------------------------------------------------------------------


def train(args: Any, control: Any) -> None:
    torch.set_num_threads(1)
    aiosync.run(_train(args, control))


async def _train(args: Any, control: Any) -> None:
    model = Probe(args.mib * 2**20, args.tensors)
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", require=1)
    _fill(model, 1)
    scheme.init_on_sender(model=model, num_workers=1)
    control.send(str(scheme.address))
    loop = asyncio.get_running_loop()
    took = []
    async with scheme:
        await scheme.connect(timeout=PATIENCE)
        control.send("connected")
        what = await loop.run_in_executor(None, control.recv)
        while what == "send":
            ending = loop.run_in_executor(None, control.recv)
            while not ending.done():
                _fill(model, scheme.version + 1)
                report = await scheme.send()
                took.append(report.elapsed)
                await asyncio.sleep(0)
            control.send((scheme.version, took))
            what = await ending
            if what == "pause":
                what = await loop.run_in_executor(None, control.recv)


def _fill(model: nn.Module, version: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)


# -- the server -------------------------------------------------------------------------------


def serve(sock: socket.socket, address: str, args: Any) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from aiosync.integrations.asgi import WeightsMiddleware

    torch.set_num_threads(1)
    policy = Probe(args.mib * 2**20, args.tensors)
    feed = WeightFeed(
        aiosync.TCPWeightSyncScheme(address), model=policy, gate=AdmissionGate(mode=args.mode)
    )
    ticker, spans = Ticker(), watch_everything() if args.blame else Spans()
    ticking: list[asyncio.Task[None]] = []

    async def act(request: Any) -> Any:
        observation = torch.tensor(await request.json())
        with torch.no_grad():
            return JSONResponse(policy(observation).tolist())

    async def twice(request: Any) -> Any:
        observation = torch.tensor(await request.json())
        with torch.no_grad():
            answer = policy(observation).tolist()
            await asyncio.sleep(PAUSE)
            return JSONResponse(answer + policy(observation).tolist())

    async def measured(request: Any) -> Any:
        if not ticking:
            ticking.append(asyncio.ensure_future(ticker.run()))
        found = {
            "lag_ms": ticker.take(),
            "callbacks_ms": spans.take(),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "feed": feed.status.as_dict(),
        }
        return JSONResponse(found)

    routes = [
        Route("/act", act, methods=["POST"]),
        Route("/twice", twice, methods=["POST"]),
        Route("/measured", measured),
    ]
    app = WeightsMiddleware(Starlette(routes=routes), feed, exempt=("/measured",))
    config = uvicorn.Config(
        app, loop=args.loop, log_level="warning", access_log=False, timeout_keep_alive=600
    )
    uvicorn.Server(config).run(sockets=[sock])


# -- the load ---------------------------------------------------------------------------------


class Client:
    """Client with as little HTTP as possible: on a small machine it takes time from the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.connections = 0

    async def ask(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.connections += 1
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            headers = {
                key.lower(): value.strip() for key, _, value in (x.partition(b":") for x in lines)
            }
            answer = await reader.readexactly(int(headers[b"content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return int(status.split()[1]), headers, answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class Load:
    """Load that sends requests at a steady rate, and checks every answer."""

    def __init__(self, client: Client, args: Any) -> None:
        self.client = client
        self.rate = args.rate
        self.tensors = args.tensors
        self.failures: list[str] = []
        self.mixed: list[str] = []
        self.latencies: list[float] = []
        self.versions: set[int] = set()

    async def run(self, seconds: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        self.failures, self.mixed, self.latencies, self.versions = [], [], [], set()
        began = loop.time()
        running: set[asyncio.Task[None]] = set()
        for number in range(int(seconds * self.rate)):
            due = began + number / self.rate
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            task = loop.create_task(self._one(number, due))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)
        return {
            "requests": len(self.latencies) + len(self.failures),
            "failed": len(self.failures),
            "mixed": len(self.mixed),
            "examples": (self.failures + self.mixed)[:5],
            "versions": len(self.versions),
            "latency_ms": summary(sorted(self.latencies)),
            "connections": self.client.connections,
        }

    async def _one(self, number: int, due: float) -> None:
        path = "/twice" if number % 2 else "/act"
        body = json.dumps([float(number * 7919 % 100_003), 0.0]).encode()
        try:
            async with asyncio.timeout(30):
                status, headers, answer = await self.client.ask("POST", path, body)
        except (OSError, TimeoutError, EOFError) as exc:
            self.failures.append(f"{type(exc).__name__}: {exc}")
            return
        if status != 200:
            self.failures.append(f"{status}: {answer[:200]!r}")
            return
        self.latencies.append((asyncio.get_running_loop().time() - due) * 1e3)
        version = int(headers[b"x-weight-version"])
        self.versions.add(version)
        values = json.loads(answer)
        if len(values) != self.tensors * (1 + number % 2) or set(values) != {float(version)}:
            self.mixed.append(f"{path}: {version} says the header, {set(values)} the answer")


# -- the benchmark ----------------------------------------------------------------------------


@contextlib.contextmanager
def started(processes: Any, target: Any, *args: Any) -> Iterator[Any]:
    process = processes.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(10)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


async def hear(conn: Any) -> Any:
    """Return the next message of a process.

    Raises:
        TimeoutError: The process has not sent one in time.
    """
    if not await asyncio.to_thread(conn.poll, PATIENCE):
        raise TimeoutError("a process of the benchmark says nothing")
    return conn.recv()


async def measure(args: Any, processes: Any = SPAWN) -> dict[str, Any]:
    """Run the benchmark; ``processes`` is a context of ``multiprocessing``."""
    mine, theirs = processes.Pipe()
    with (
        contextlib.ExitStack() as stack,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as sock,
    ):
        stack.callback(mine.close)
        # Accepted sockets inherit this option, which asyncio's loop does not set on a socket of
        # this kind.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stack.enter_context(started(processes, train, args, theirs))
        theirs.close()
        stack.enter_context(started(processes, serve, sock, await hear(mine), args))
        client = Client(sock.getsockname()[1])
        stack.callback(client.close)
        sock.close()
        async with asyncio.timeout(PATIENCE):
            while (await client.ask("GET", "/readyz"))[0] != 200:
                await asyncio.sleep(0.1)
        assert await hear(mine) == "connected"
        load = Load(client, args)
        # This load only warms up the server.
        await load.run(min(2.0, args.seconds))
        found: dict[str, Any] = {"cores": os.cpu_count(), **vars(args), "json": None}
        found["start"] = json.loads((await client.ask("GET", "/measured"))[2])
        found["without"] = await load.run(args.seconds)
        found["without"]["server"] = json.loads((await client.ask("GET", "/measured"))[2])
        mine.send("send")
        await client.ask("GET", "/measured")
        found["with"] = await load.run(args.seconds)
        found["with"]["server"] = json.loads((await client.ask("GET", "/measured"))[2])
        mine.send("end")
        last, took = await hear(mine)
        found["updates"] = {
            "sent": last - 1,
            "seconds": summary(sorted(took)),
            "gib_per_s": round(args.mib / 1024 / (sum(took) / len(took)), 2) if took else 0.0,
        }
    return found


def show(found: dict[str, Any]) -> None:
    updates = found["updates"]
    print(
        f"{found['loop']}, {found['cores']} cores, {found['rate']:g} requests/s, "
        f"{updates['sent']} updates of {found['mib']} MiB in {found['tensors']} tensors "
        f"at {updates['gib_per_s']} GiB/s"
    )
    row = "{:<8} {:>8} {:>6} {:>5} {:>8} | {:>7} {:>7} {:>7} | {:>7} {:>7} {:>7}"
    print(row.format("updates", "requests", "failed", "mixed", "versions", "p50 ms", "p99", "max",
                     "lag p50", "p99", "max"))  # fmt: skip
    for name in ("without", "with"):
        part = found[name]
        took, lag = part["latency_ms"], part["server"]["lag_ms"]
        cells = [name, part["requests"], part["failed"], part["mixed"], part["versions"]]
        cells += [took["p50"], took["p99"], took["max"], lag["p50"], lag["p99"], lag["max"]]
        print(row.format(*cells))
        for example in part["examples"]:
            print(f"  {example}")
    held = found["with"]["server"]["callbacks_ms"]
    if held["count"]:
        print(f"all callbacks, {held['share']:.0%} of the time:")
        for each in ({"what": "together", **held}, *held["parts"]):
            cells = [each["what"], each["count"]]
            cells += [each[key][part] for key in ("wall", "busy") for part in PERCENTILES]
            print(SPAN.format(*cells))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An ASGI server under load, with updates.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two runs")
    parser.add_argument(
        "--mode", choices=["between_requests", "immediate"], default="between_requests"
    )
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--blame", action="store_true", help="with --loop asyncio")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    # An exit by SystemExit also ends the processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = aiosync.run(measure(args))
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2))
    good = all(found[name]["failed"] == found[name]["mixed"] == 0 for name in ("without", "with"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

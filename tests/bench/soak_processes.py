"""The processes of a soak: trainers, workers and a weight server; see `tests.bench.soak`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch

import aiosync
from aiosync.server import WeightServer
from tests.bench.come_and_go import Stack

# By name: the number of tensors, the values in each, and the seconds between two sends.
MODELS = {"small": (4, 64, 0.05), "large": (4, 2**18, 2.0)}
PATIENCE = 60.0
# A generation of a trainer has at most as many versions; float32 holds the numbers of 15 of them.
_GENERATION = 2**20
_TOKEN = "a token of the soak, for all of its processes"
# A link that a fault has ended explains these errors.
_EXPLAINED = (aiosync.PeerClosed, aiosync.TransportBroken)


class Line:
    """One end of a pipe between two event loops; `heard` gets each message, None at the end."""

    def __init__(self, connection: Any, heard: Callable[[Any], None]) -> None:
        self._connection, self._heard = connection, heard
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message, unless the other process has ended."""
        with contextlib.suppress(OSError):
            self._connection.send((kind, value))

    def close(self) -> None:
        """Close this end. Idempotent."""
        if not self._connection.closed:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()

    def _read(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            message = None
            self.close()
        self._heard(message)


class Role:
    """Life of a process that is not the script's own, until it is told to close."""

    def __init__(self, connection: Any, transport: str, index: int, urls: dict[str, str]) -> None:
        self.transport, self.index, self.urls = transport, index, urls
        self.count: Counter[str] = Counter()
        self.values = dict.fromkeys(MODELS, 0.0)
        self.line = Line(connection, self.heard)
        self._main = asyncio.current_task()

    def heard(self, message: Any) -> None:
        """Obey a message of the script."""
        match message:
            case ("report", _):
                tasks = len(asyncio.all_tasks())
                self.line.send("answer", (tasks, self.values, self.count))
            case ("close", _) | None:
                assert self._main is not None
                self._main.cancel()
            case (kind, value):
                self.obey(kind, value)

    def obey(self, kind: str, value: Any) -> None:
        """Obey a message of this role."""

    async def live(self) -> None:
        """Do the work of this role until cancelled."""
        raise NotImplementedError

    def scheme(self, url: str, require: Literal["all"] | int = "all") -> Any:
        """Return a new scheme of this process's transport."""
        if self.transport == "shared memory":
            return aiosync.SharedMemWeightSyncScheme(timeout=PATIENCE, require=require)
        return aiosync.TCPWeightSyncScheme(
            url or "tcp://127.0.0.1:0",
            token=_TOKEN,
            dial="both" if self.transport == "weight server" else "receiver",
            reconnect=None,
            timeout=PATIENCE,
            require=require,
        )


class Server(Role):
    """A weight server with a store."""

    async def live(self) -> None:
        async with WeightServer(
            "tcp://127.0.0.1:0", token=_TOKEN, store=self.urls["store"]
        ) as server:
            self.line.send("ready", server.url)
            await asyncio.Event().wait()


class Trainer(Role):
    """A trainer that sends all models, each with a scheme of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._faults = dict.fromkeys(MODELS, "")
        self._chance, self._is_quiet = random.Random(self.index), False

    def obey(self, kind: str, value: Any) -> None:
        if kind == "quiet":
            self._is_quiet = True
        else:
            self._faults[value] = kind

    async def live(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            schemes, models = {}, {}
            for name, (count, width, _) in MODELS.items():
                models[name] = Stack(count, width)
                models[name].fill(self.index * _GENERATION + 1)
                require = "all" if name == "small" else 1
                schemes[name] = scheme = self.scheme(self.urls.get(name, ""), require)
                scheme.init_on_sender(model_id=name, model=models[name])
                await stack.enter_async_context(scheme)
                await scheme.connect()
            local = self.transport == "shared memory"
            told = {name: each if local else each.address for name, each in schemes.items()}
            self.line.send("ready", told)
            async with asyncio.TaskGroup() as group:
                for name, scheme in schemes.items():
                    group.create_task(self._send_all(name, scheme, models[name]))
            self.line.send("final", self.values)
            await asyncio.Event().wait()

    async def _send_all(self, name: str, scheme: Any, model: Stack) -> None:
        """Send until the faults have stopped, and one of the sends after that was good."""
        is_last = False
        while not is_last:
            is_last = self._is_quiet
            self.values[name] = self.index * _GENERATION + scheme.version + 1
            model.fill(self.values[name])
            fault, self._faults[name] = self._faults[name], ""
            is_last = await self._send(scheme, model, fault) and is_last
            self.count["sends"] += 1
            await asyncio.sleep(MODELS[name][2])

    async def _send(self, scheme: Any, model: Stack, fault: str) -> bool:
        """Send once; return True if every worker that counts has the version."""
        misfit = {name: torch.zeros(3) for name in model.state_dict()}
        sending = asyncio.ensure_future(scheme.send(misfit if fault == "misfit" else None))
        if fault == "cancel":
            await asyncio.sleep(self._chance.uniform(0, 0.003))
            sending.cancel()
        await asyncio.wait([sending], timeout=2 * PATIENCE)
        if not sending.done():
            self.line.send("violation", f"stuck: send(), {fault or 'no'} fault")
        elif not sending.cancelled() and sending.exception() is not None:
            self._note(sending.exception(), fault)
            return False
        return not fault

    def _note(self, error: BaseException | None, fault: str) -> None:
        errors = error.failed.values() if isinstance(error, aiosync.PartialSyncError) else [error]
        for each in errors:
            self.count[type(each).__name__] += 1
            expected = isinstance(each, _EXPLAINED)
            if not expected and not (fault == "misfit" and isinstance(each, aiosync.ApplyError)):
                self.line.send("violation", f"failed: send(): {each!r}")


class Worker(Role):
    """A worker that computes with all models, and checks each forward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._models = {name: Stack(count, width) for name, (count, width, _) in MODELS.items()}
        self._sources: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def obey(self, kind: str, value: Any) -> None:
        self._sources.put_nowait(value)

    async def live(self) -> None:
        """Connect to the trainer, and again to one that takes its place, in the same process."""
        sources = await self._sources.get()
        while True:
            try:
                await self._follow(sources)
            except aiosync.AiosyncError as exc:
                self.count[f"connect: {type(exc).__name__}"] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    sources = await self._sources.get()

    async def _follow(self, sources: dict[str, Any]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            schemes = {}
            for name, source in sources.items():
                scheme = self.scheme(source) if isinstance(source, str) else copy.copy(source)
                model = self._models[name]
                scheme.init_on_receiver(model_id=name, model=model, worker_idx=self.index)
                schemes[name] = await stack.enter_async_context(scheme)
            await asyncio.gather(*(each.connect() for each in schemes.values()))
            self.line.send("ready")
            # Over the other transports a lost link is replaced by the scheme.
            while self.transport != "shared memory" or not any(
                each.link_lost for each in schemes.values()
            ):
                for name, scheme in schemes.items():
                    await self._compute(name, scheme)
                await asyncio.sleep(0.02)

    async def _compute(self, name: str, scheme: Any) -> None:
        """Compute once; every tenth time twice in one read, with a pause between."""
        self.count["forwards"] += 1
        model = self._models[name]
        try:
            if self.count["forwards"] % 20 > 1:
                seen = model()
            else:
                async with scheme.reading():
                    seen = model()
                    await asyncio.sleep(0.005)
                    seen |= model()
        except aiosync.ApplyError:
            self.count["refused"] += 1
            return
        if len(seen) != 1:
            self.line.send("violation", f"mixed: {name} has {sorted(seen)}")
        if min(seen) < self.values[name]:
            self.line.send("violation", f"gone back: {name} {self.values[name]} to {min(seen)}")
        self.values[name] = max(seen)


def begin(role: type[Role], *args: Any) -> None:
    """Run a process of the soak."""
    # A terminal's Ctrl-C reaches every process, but the script ends the others in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Workers and trainers warn of every fault.
    logging.getLogger("aiosync").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    async def live() -> None:
        await role(*args).live()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(live())

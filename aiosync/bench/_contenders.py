"""Who takes part: aiosync, and the least that the machine must do for the same bytes.

The work is models by the number and sizes of their tensors. Each contender has a trainer's half,
and workers in processes of their own. The names of limits begin with :data:`LIMIT`; nothing is
named, checked or applied there.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import multiprocessing
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import aiosync
from aiosync._run import new_event_loop, usable_cores

__all__ = [
    "LIMIT",
    "PATIENCE",
    "SCHEMES",
    "WORKLOADS",
    "AsyncTrainer",
    "Case",
    "Crew",
    "Desk",
    "Handle",
    "Limit",
    "Workload",
    "ask_all",
    "contenders_of",
    "fill",
    "wake_up",
    "work_async",
]

LIMIT = "limit/"
"""What the names of limits begin with. A limit is a contender that only moves the bytes."""

PATIENCE = 120.0
"""Seconds after which something that should be there is taken to have failed."""

_CALM_SECONDS = 0.005

# -- models -------------------------------------------------------------------------------------


class _Tensors(nn.Module):
    """``count`` parameters of ``numel`` elements each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel)))


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, in float32.

    Attributes:
        build: Makes the model; its values do not matter.
        nbytes: Bytes of all its parameters.
        sends: Of a block. A block ends after a second of sends in any case; for a quick contender
            it takes some tenths, as cores that slept need 20 to 50 ms of work to be quick again.
    """

    build: Callable[[], nn.Module]
    nbytes: int
    sends: int


WORKLOADS = {
    "4x2": Workload(lambda: nn.Linear(4, 2), 40, 3000),
    "1MB": Workload(  # a policy
        lambda: nn.Sequential(
            nn.Linear(64, 464), nn.ReLU(), nn.Linear(464, 464), nn.ReLU(), nn.Linear(464, 16)
        ),
        1_013_440,
        1200,
    ),
    "1000x4KiB": Workload(lambda: _Tensors(1000, 1024), 4_096_000, 500),
    "1000-layers": Workload(  # as many tensors in as many modules, as models have them
        lambda: nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(1000)]), 4_096_000, 500
    ),
    "64MiB": Workload(lambda: _Tensors(16, 2**20), 2**26, 8),
    "512MiB": Workload(lambda: _Tensors(16, 2**23), 2**29, 3),
}
"""By name, which says the number and the size of the tensors."""


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work that contenders do.

    Attributes:
        transport: How the weights travel: ``"shm"``, ``"pipe"``, ``"tcp"``, ``"unix"``,
            ``"gloo"``, ``"rpc"`` or ``"ray"``.
        workload: Name of the model.
        workers: Worker processes.
        busy: Workers compute forwards without pause.
    """

    transport: str
    workload: str
    workers: int
    busy: bool = False

    def __str__(self) -> str:
        busy = ", busy" if self.busy else ""
        return f"{self.transport} {self.workload} to {self.workers}{busy}"


def fill(model: nn.Module, value: float) -> None:
    """Give every element of every parameter that value, in place: an optimizer's step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _check(model: nn.Module, value: float) -> None:
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter.detach())
        if low != value or high != value:  # old weights, or a mix of two versions
            raise AssertionError(
                f"{name} has values from {float(low)} to {float(high)}, the trainer sent {value}"
            )


# -- the worker's side --------------------------------------------------------------------------


class Desk:
    """What a worker answers, and the forwards that it computes when it is busy.

    Args:
        model: The model that receives; ``None`` for a worker without one.
        reading: Enters the scheme's guard around a forward; a peer that has none needs none.

    Attributes:
        forwards: How many it has computed.
        busy: It computes them without a pause.
        calm: It computes one now and then, as whoever waits for an environment.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        reading: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model
        self.busy: bool = False
        self.calm: bool = False
        self.forwards: int = 0
        self._reading = reading
        self._work = torch.rand(192, 192)

    @property
    def computes(self) -> bool:
        """Whether there are forwards between two questions."""
        return self.model is not None and (self.busy or self.calm)

    @property
    def pause(self) -> float:
        """Seconds from one forward to the next."""
        return 0.0 if self.busy else _CALM_SECONDS

    def forward(self) -> None:
        """Look at the weights, and compute for about a third of a millisecond if busy."""
        assert self.model is not None
        with self._reading():
            if self.busy:
                torch.mm(self._work, self._work)
            next(self.model.parameters()).detach()[:1].sum()
        self.forwards += 1

    def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        """Answer: whether it was good, and the answer or the text of the error.

        ``"check"`` (a value) looks at every element, ``"busy"`` turns forwards on or off, and
        ``"calm"`` those of one in 5 ms. ``"cpu"`` is this process's CPU time in seconds, ``"call"``
        is what a function returns for this desk.
        """
        try:
            match question:
                case "check" if self.model is not None:
                    with self._reading():
                        _check(self.model, argument)
                case "busy":
                    self.busy = argument
                case "calm":
                    self.calm = argument
                case "cpu":
                    return True, time.process_time()
                case "call":
                    return True, argument(self)
        except Exception as exc:  # noqa: BLE001  # raised again in the trainer, by answer()
            return False, f"{type(exc).__name__}: {exc}"
        return True, None

    def serve(self, pipe: Connection) -> None:
        """Answer what comes through a pipe, with forwards meanwhile if busy, until it says end.

        For workers whose weights are applied by another thread; blocks.
        """
        while True:
            while self.computes and not pipe.poll(self.pause):
                self.forward()
            if not self.serve_one(pipe):
                return

    def serve_one(self, pipe: Connection) -> bool:
        """Answer one question; whether there will be more."""
        try:
            question, argument = pipe.recv()
        except EOFError:  # the trainer is gone
            return False
        if question != "end":
            pipe.send(self.reply(question, argument))
        return bool(question != "end")


def work_async(
    idx: int, pipe: Connection, scheme: Any, workload: str, loop: Callable[[], Any]
) -> None:
    """A worker with an event loop, on which updates arrive and forwards are computed."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_work(idx, pipe, scheme, WORKLOADS[workload].build()))


async def _work(idx: int, pipe: Connection, scheme: Any, model: nn.Module) -> None:
    async with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect()
        desk = Desk(model, scheme.reading)
        asked = True
        while asked:
            while desk.computes and not pipe.poll():
                desk.forward()
                await asyncio.sleep(desk.pause)
            await asyncio.to_thread(pipe.poll, None)
            asked = desk.serve_one(pipe)


# -- the trainer's side -------------------------------------------------------------------------


class Handle:
    """How the trainer asks one worker."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def ask(self, question: str, argument: Any = None) -> None:
        """Put a question; see :meth:`Desk.reply`. Does not wait."""
        self._pipe.send((question, argument))

    def answer(self) -> Any:
        """Wait for the answer to it, at most :data:`PATIENCE`.

        Raises:
            RuntimeError: The worker answered with an error, is gone, or says nothing.
        """
        if not self._pipe.poll(PATIENCE):
            raise RuntimeError(f"a worker gave no answer in {PATIENCE:g} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise RuntimeError("a worker ended before it answered") from exc
        if not good:
            raise RuntimeError(f"a worker: {value}")
        return value


def ask_all(handles: Sequence[Handle], question: str, argument: Any = None) -> list[Any]:
    """Ask every worker the same, at the same time, and return their answers in order."""
    for handle in handles:
        handle.ask(question, argument)
    return [handle.answer() for handle in handles]


def _begin(target: Callable[..., None], *args: Any) -> None:
    # A terminal's Ctrl-C reaches every process: the benchmark's own ends the others in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    target(*args)


class Crew:
    """Worker processes and the pipes to ask them.

    They come from a fork server that has imported torch once, so that eight of them start as
    quickly as one.

    Args:
        preload: Modules that the fork server imports before the first worker, besides aiosync.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "aiosync", "aiosync.sync", *preload])

    def start(self, target: Callable[..., None], workers: int, *args: Any) -> list[Handle]:
        """Start processes that run ``target(worker_idx, pipe, *args)``; return all handles."""
        for idx in range(workers):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_begin, args=(target, idx, theirs, *args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        return [Handle(pipe) for pipe in self._pipes]

    def stop(self, timeout: float = 5.0) -> None:
        """Ask every process to end, wait for that, and kill those that do not."""
        for pipe in self._pipes:
            try:
                pipe.send(("end", None))
            except OSError:  # it is gone already
                continue
        for process in self.processes:
            process.join(timeout)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self.processes.clear()
        self._pipes.clear()


# -- aiosync's trainer, over transports to processes of this host ---------------------------------

SCHEMES: dict[str, Callable[[Any, str], Any]] = {
    "shm": lambda package, _: package.SharedMemWeightSyncScheme(),
    "pipe": lambda package, _: package.MultiProcessWeightSyncScheme(),
    "tcp": lambda package, _: package.TCPWeightSyncScheme("tcp://127.0.0.1:0"),
    "unix": lambda package, folder: package.TCPWeightSyncScheme(f"unix://{folder}/socket"),
    "gloo": lambda package, _: package.DistributedWeightSyncScheme(),
}
"""Makes a transport's scheme: of ``aiosync`` or ``aiosync.sync``, with a folder for sockets."""


class AsyncTrainer:
    """The async API in trainer and workers.

    Args:
        transport: Name of the transport.

    Attributes:
        model: What it sends.
        scheme: The scheme, from :meth:`open` on.
        crew: The worker processes.
    """

    model: nn.Module

    def __init__(self, transport: str) -> None:
        self.crew: Crew = Crew()
        self.scheme: Any = None
        self._transport = transport

    async def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers, on loops of the same kind as this one, and join them."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self._folder = tempfile.TemporaryDirectory(prefix="aiosync-bench-")
        self.scheme = self.new_scheme(self._folder.name)
        self.scheme.init_on_sender(model_id="policy", model=self.model, num_workers=case.workers)
        plain = isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
        loop = asyncio.new_event_loop if plain else new_event_loop
        handles = self.crew.start(work_async, case.workers, self.scheme, case.workload, loop)
        await self.scheme.connect(processes=self.crew.processes, timeout=PATIENCE)
        return handles

    def new_scheme(self, folder: str) -> Any:
        """Make the scheme; ``folder`` is for sockets."""
        return SCHEMES[self._transport](aiosync, folder)

    async def send(self) -> None:
        """Return when every worker has applied."""
        await self.scheme.send()

    async def close(self) -> None:
        """End workers and scheme."""
        if self.scheme is not None:
            await asyncio.to_thread(self.crew.stop)
            await self.scheme.aclose()
            self.scheme = None
            self._folder.cleanup()


# -- limits: each does the least that could move a model's bytes in its way ------------------------

_Bytes = NDArray[np.uint8]


_SMALL = 2**16  # bytes up to which a memoryview's copy costs less than a call of numpy
_WINDOW = 2**20
_IOV_MAX = 1024
_UNIX_BUFFER = 4 * 2**20


class Limit:
    """The trainer's half of a limit, for subclasses, which have ``send()``.

    Attributes:
        model: What is sent.
        sources: The memory of its parameters.
        crew: Worker processes, where some take part.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.sources: list[_Bytes] = []
        self.crew: Crew = Crew()

    def open(self, case: Case) -> Sequence[Handle]:
        """Build the model and start what takes part."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.sources = [
            parameter.detach().view(-1).numpy().view(np.uint8)
            for parameter in self.model.parameters()
        ]
        return self.start(case)

    def start(self, case: Case) -> Sequence[Handle]:
        """Start workers, if there are any, and return their handles."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers and let go of the memory."""
        self.crew.stop()
        self.sources = []


class Memcpy(Limit):
    """One copy into memory that has been written before; however many workers would look at it.

    By as many threads as there are cores to use.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(usable_cores())
        self._small: list[tuple[memoryview, memoryview]] = []
        self._shares: list[list[tuple[_Bytes, _Bytes]]] = [[] for _ in range(usable_cores())]

    def start(self, case: Case) -> Sequence[Handle]:
        """Divide the copies of large tensors among the threads."""
        for source in self.sources:
            target = _written(len(source))
            if len(source) <= _SMALL:
                self._small.append((_view(target), _view(source)))
            else:
                bounds = np.linspace(0, len(source), len(self._shares) + 1, dtype=int)
                for share, (low, high) in zip(
                    self._shares, itertools.pairwise(bounds), strict=True
                ):
                    share.append((target[low:high], source[low:high]))
        return []

    def send(self) -> None:
        """Copy."""
        first, *others = self._shares
        running = [self._pool.submit(_copy, share) for share in others if share]
        for target, source in self._small:
            target[:] = source
        _copy(first)
        for share in running:
            share.result()

    def close(self) -> None:
        """Let go of the memory."""
        super().close()
        self._small.clear()
        for share in self._shares:
            share.clear()


def _copy(pairs: list[tuple[_Bytes, _Bytes]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)  # without the GIL


def _written(nbytes: int) -> _Bytes:
    return np.ones(nbytes, np.uint8)  # zeros alone would be memory that is not there yet


def _view(memory: _Bytes) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # Buffer is only known from 3.12 on


class Stream(Limit):
    """All tensors to one worker after the other through blocking sockets; then a byte from each.

    Args:
        family: ``"tcp"`` or ``"unix"``.
        wake_up: Send a byte instead of the tensors.
    """

    def __init__(self, family: str = "unix", *, wake_up: bool = False) -> None:
        super().__init__()
        self._family = family
        self._wake_up = wake_up
        self._sockets: list[socket.socket] = []
        self._pieces: list[tuple[list[memoryview], int]] = []

    def start(self, case: Case) -> Sequence[Handle]:
        """Connect to as many processes as there are workers."""
        views = [memoryview(b"x")] if self._wake_up else [_view(each) for each in self.sources]
        cut = [views[at : at + _IOV_MAX] for at in range(0, len(views), _IOV_MAX)]
        self._pieces = [(piece, sum(map(len, piece))) for piece in cut]
        handles: Sequence[Handle] = []
        for _ in range(case.workers):
            ours, theirs = _pair(self._family)
            self._sockets.append(ours)
            handles = self.crew.start(_receive, 1, theirs, sum(map(len, views)))
            theirs.close()
        return handles

    def send(self) -> None:
        """Return when every worker has said that it has everything."""
        for sock in self._sockets:
            for views, nbytes in self._pieces:
                if sock.sendmsg(views) != nbytes:
                    raise RuntimeError(f"a worker took nothing for {PATIENCE:g} s")
        for sock in self._sockets:
            if not sock.recv(1):
                raise RuntimeError("a worker ended before it answered")

    def close(self) -> None:
        """End the workers and close the sockets."""
        super().close()
        for sock in self._sockets:
            sock.close()
        self._sockets, self._pieces = [], []


wake_up: Callable[..., Stream] = functools.partial(Stream, wake_up=True)
"""One byte to each worker, which sleeps, and one back."""


def _pair(family: str) -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname(), PATIENCE)
            theirs, _ = server.accept()
    for sock in (ours, theirs):
        sock.settimeout(None)  # Python's own timeouts would cost a poll() at every call
        if family == "unix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(PATIENCE), 0))
    return ours, theirs


def _receive(idx: int, pipe: Connection, sock: socket.socket, nbytes: int) -> None:
    def take() -> None:
        block = _view(_written(nbytes))
        got = 0
        while count := sock.recv_into(block[got : got + _WINDOW]):  # until the trainer closes it
            got += count
            if got == nbytes:
                got = 0
                sock.send(b"x")

    Thread(target=take, daemon=True).start()
    Desk().serve(pipe)


# -- who takes part in what -----------------------------------------------------------------------

_LIMITS: dict[str, tuple[str, Callable[[], Limit]]] = {
    "shm": ("memcpy all threads", Memcpy),
    "pipe": ("raw unix socket", Stream),
    "tcp": ("raw socket", functools.partial(Stream, "tcp")),
    "unix": ("raw unix socket", Stream),
    "gloo": ("memcpy all threads", Memcpy),
}


def contenders_of(case: Case) -> dict[str, Callable[[], Any]]:
    """What makes the trainer's halves that take turns on a case, by name: aiosync and limits.

    A half has ``open(case)``, which returns a handle for each worker, ``send()``, ``close()`` and
    ``model``; the methods may be coroutine functions. No limit is measured with busy workers.
    """
    found: dict[str, Callable[[], Any]] = {
        "aiosync": functools.partial(AsyncTrainer, case.transport)
    }
    if not case.busy:
        name, make = _LIMITS[case.transport]
        found |= {f"{LIMIT}round trip": wake_up, f"{LIMIT}{name}": make}
    return found

"""The contenders of the benchmark: aiosync, and the least that the machine must do for its bytes.

The work is a set of models, named by the number and the size of their tensors. Each contender has
a trainer's half, and workers in processes of their own. The names of limits begin with
:data:`LIMIT`; a limit names, checks and applies nothing.
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
"""Prefix of the names of limits. A limit is a contender that only moves the bytes."""

PATIENCE = 120.0
"""Seconds to wait for a worker's connection or answer before the worker counts as failed."""

# Time from one forward to the next of a worker that is not busy.
_CALM_SECONDS = 0.005

# -- models -------------------------------------------------------------------------------------


class _Tensors(nn.Module):
    """A module with ``count`` parameters of ``numel`` elements each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel)))


@dataclass(frozen=True, slots=True)
class Workload:
    """A model in float32, and the number of sends that measure it.

    Attributes:
        build: Makes the model; its values do not matter.
        nbytes: Bytes of all its parameters.
        sends: Sends of one block. A block ends after a second of sends in any case. For a quick
            contender it takes some tenths of a second, because cores that slept need 20 to 50 ms
            of work before they run at full speed.
    """

    build: Callable[[], nn.Module]
    nbytes: int
    sends: int


WORKLOADS = {
    "4x2": Workload(lambda: nn.Linear(4, 2), 40, 3000),
    "1MB": Workload(  # the size of a small policy
        lambda: nn.Sequential(
            nn.Linear(64, 464), nn.ReLU(), nn.Linear(464, 464), nn.ReLU(), nn.Linear(464, 16)
        ),
        1_013_440,
        1200,
    ),
    "1000x4KiB": Workload(lambda: _Tensors(1000, 1024), 4_096_000, 500),
    "1000-layers": Workload(  # each tensor lies in a module of its own, as in real models
        lambda: nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(1000)]), 4_096_000, 500
    ),
    "64MiB": Workload(lambda: _Tensors(16, 2**20), 2**26, 8),
    "512MiB": Workload(lambda: _Tensors(16, 2**23), 2**29, 3),
}
"""Workloads by name; the name says the number and the size of the tensors."""


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work that every contender of a transport does.

    Attributes:
        transport: Transport of the weights: ``"shm"``, ``"pipe"``, ``"tcp"``, ``"unix"``,
            ``"gloo"``, ``"rpc"`` or ``"ray"``.
        workload: Name of the model, a key of :data:`WORKLOADS`.
        workers: Number of worker processes.
        busy: True if the workers compute forwards without pause.
    """

    transport: str
    workload: str
    workers: int
    busy: bool = False

    def __str__(self) -> str:
        busy = ", busy" if self.busy else ""
        return f"{self.transport} {self.workload} to {self.workers}{busy}"


def fill(model: nn.Module, value: float) -> None:
    """Set every element of every parameter to ``value``, in place, as an optimizer's step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _check(model: nn.Module, value: float) -> None:
    """Raise unless every element of every parameter is ``value``."""
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter.detach())
        # Another value means old weights, or a mix of two versions.
        if low != value or high != value:
            raise AssertionError(
                f"{name} has values from {float(low)} to {float(high)}, the trainer sent {value}"
            )


# -- the worker's side --------------------------------------------------------------------------


class Desk:
    """The worker's side: answers the trainer's questions, and computes forwards between them.

    Args:
        model: The model that receives the weights; ``None`` for a worker without one.
        reading: Returns the scheme's guard, which is entered around each forward. The default is
            for contenders that have no guard.

    Attributes:
        forwards: Number of forwards computed so far.
        busy: True if the worker computes forwards without a pause.
        calm: True if the worker computes a forward every 5 ms, like a worker that waits for an
            environment.
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
        """True if the worker computes forwards between two questions."""
        return self.model is not None and (self.busy or self.calm)

    @property
    def pause(self) -> float:
        """Seconds from one forward to the next."""
        return 0.0 if self.busy else _CALM_SECONDS

    def forward(self) -> None:
        """Read one weight under the guard; if busy, compute for about a third of a millisecond."""
        assert self.model is not None
        with self._reading():
            if self.busy:
                torch.mm(self._work, self._work)
            next(self.model.parameters()).detach()[:1].sum()
        self.forwards += 1

    def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        """Return ``(True, answer)``, or ``(False, text of the error)``.

        ``"check"`` compares every element of the weights with ``argument``. ``"busy"`` turns
        forwards without a pause on or off, ``"calm"`` one forward every 5 ms. ``"cpu"`` asks for
        this process's CPU time in seconds. ``"call"`` calls the function ``argument`` with this
        desk and returns its result.
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
        """Answer questions from a pipe, with forwards between them, until ``"end"`` or its close.

        Blocks. It is for workers whose weights are applied by another thread.
        """
        while True:
            while self.computes and not pipe.poll(self.pause):
                self.forward()
            if not self.serve_one(pipe):
                return

    def serve_one(self, pipe: Connection) -> bool:
        """Receive and answer one question; return True if more may follow."""
        try:
            question, argument = pipe.recv()
        except EOFError:  # the trainer's process has ended
            return False
        if question != "end":
            pipe.send(self.reply(question, argument))
        return bool(question != "end")


def work_async(
    idx: int, pipe: Connection, scheme: Any, workload: str, loop: Callable[[], Any]
) -> None:
    """Run a worker whose event loop receives the updates and computes the forwards."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_work(idx, pipe, scheme, WORKLOADS[workload].build()))


async def _work(idx: int, pipe: Connection, scheme: Any, model: nn.Module) -> None:
    """Connect, then answer questions, with forwards between them, until the trainer ends it."""
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
    """The trainer's end of the pipe to one worker."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def ask(self, question: str, argument: Any = None) -> None:
        """Send a question without waiting for the answer; see :meth:`Desk.reply`."""
        self._pipe.send((question, argument))

    def answer(self) -> Any:
        """Wait for the answer to the question, at most :data:`PATIENCE` seconds.

        Raises:
            RuntimeError: The worker answered with an error, has ended, or did not answer in time.
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
    """Ask every worker the same question at the same time; return their answers in order."""
    for handle in handles:
        handle.ask(question, argument)
    return [handle.answer() for handle in handles]


def _begin(target: Callable[..., None], *args: Any) -> None:
    """Prepare a worker's process, and run ``target`` in it."""
    # A terminal's Ctrl-C reaches every process. The workers ignore it, because the benchmark's own
    # process ends them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    target(*args)


def _end(process: BaseProcess, timeout: float) -> None:
    """Wait for a process to end, and kill it if it has not after ``timeout`` seconds."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


class Crew:
    """Worker processes, and the pipes that the trainer asks them through.

    The processes come from a fork server that has imported torch once, so that eight of them start
    as quickly as one.

    Args:
        preload: Modules that the fork server imports before the first worker, besides aiosync.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "aiosync", "aiosync.sync", *preload])

    def start(self, target: Callable[..., None], workers: int, *args: Any) -> list[Handle]:
        """Start processes that run ``target(worker_idx, pipe, *args)``.

        Returns:
            The handles of all workers of this crew, those of earlier calls included.
        """
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
        """Ask every process to end; kill a process that has not ended after ``timeout`` seconds."""
        for pipe in self._pipes:
            try:
                pipe.send(("end", None))
            except OSError:  # the process has ended already
                continue
        for process in self.processes:
            _end(process, timeout)
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
"""Factories of schemes, by transport; each takes a package and a folder for sockets.

The package is ``aiosync`` or ``aiosync.sync``.
"""


class AsyncTrainer:
    """The trainer's half of aiosync, with the async API in trainer and workers.

    Args:
        transport: Name of the transport.

    Attributes:
        model: The model whose weights are sent.
        scheme: The scheme from :meth:`open` to :meth:`close`; otherwise ``None``.
        crew: The worker processes.
    """

    model: nn.Module

    def __init__(self, transport: str) -> None:
        self.crew: Crew = Crew()
        self.scheme: Any = None
        self._transport = transport

    async def open(self, case: Case) -> Sequence[Handle]:
        """Start the workers, on event loops of the same kind as this one, and connect to them."""
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
        """Make the scheme; its sockets lie in ``folder``."""
        return SCHEMES[self._transport](aiosync, folder)

    async def send(self) -> None:
        """Send the weights; return when every worker has applied them."""
        await self.scheme.send()

    async def close(self) -> None:
        """End the workers, then close the scheme."""
        if self.scheme is not None:
            await asyncio.to_thread(self.crew.stop)
            await self.scheme.aclose()
            self.scheme = None
            self._folder.cleanup()


# -- limits: each does the least work that moves a model's bytes in its way -----------------------

_Bytes = NDArray[np.uint8]


# Bytes up to which the copy of a memoryview costs less than a call of numpy.
_SMALL = 2**16
# Most bytes of one read.
_WINDOW = 2**20
# Most buffers that Linux takes in one call.
_IOV_MAX = 1024
# Bytes of the kernel's buffer of a Unix socket.
_UNIX_BUFFER = 4 * 2**20


class Limit:
    """Base class for the trainer's half of a limit; subclasses add ``send()``.

    Attributes:
        model: The model whose weights are sent.
        sources: The memory of its parameters, one array of bytes for each.
        crew: The worker processes, if the limit has any.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.sources: list[_Bytes] = []
        self.crew: Crew = Crew()

    def open(self, case: Case) -> Sequence[Handle]:
        """Build the model and start the workers of the limit; return their handles."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.sources = [
            parameter.detach().view(-1).numpy().view(np.uint8)
            for parameter in self.model.parameters()
        ]
        return self.start(case)

    def start(self, case: Case) -> Sequence[Handle]:
        """Start the workers, if the limit has any, and return their handles."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers and release the memory."""
        self.crew.stop()
        self.sources = []


class Memcpy(Limit):
    """One copy into memory that has been written before, for any number of workers.

    As many threads as there are usable cores share the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(usable_cores())
        # (target, source) of each small tensor, and of each thread's share of the large ones.
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
        """Copy all tensors; return when every thread is done."""
        first, *others = self._shares
        running = [self._pool.submit(_copy, share) for share in others if share]
        for target, source in self._small:
            target[:] = source
        _copy(first)
        for share in running:
            share.result()

    def close(self) -> None:
        """Release the memory."""
        super().close()
        self._small.clear()
        for share in self._shares:
            share.clear()


def _copy(pairs: list[tuple[_Bytes, _Bytes]]) -> None:
    """Copy each (target, source) of one thread."""
    for target, source in pairs:
        np.copyto(target, source)  # numpy releases the GIL, so that the threads run in parallel


def _written(nbytes: int) -> _Bytes:
    """Return memory that has been written."""
    # The system maps zeroed memory only at the first write, so the memory has to be written.
    return np.ones(nbytes, np.uint8)


def _view(memory: _Bytes) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # Buffer is only known from 3.12 on


class Stream(Limit):
    """Blocking sockets: all tensors to one worker after the other, then a byte back from each.

    Args:
        family: ``"tcp"`` or ``"unix"``.
        wake_up: Send one byte instead of the tensors.
    """

    def __init__(self, family: str = "unix", *, wake_up: bool = False) -> None:
        super().__init__()
        self._family = family
        self._wake_up = wake_up
        self._sockets: list[socket.socket] = []
        # Buffers of each call that sends, and their bytes.
        self._pieces: list[tuple[list[memoryview], int]] = []

    def start(self, case: Case) -> Sequence[Handle]:
        """Start one process for each worker of the case, each with a socket to this process."""
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
        """Send to every worker; return when every worker has answered that it has everything."""
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
"""Limit that sends one byte to each worker, which sleeps until then, and waits for one back."""


def _connected(family: str) -> tuple[socket.socket, socket.socket]:
    """Return two sockets of a family that are connected to each other."""
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), PATIENCE)
        theirs, _ = server.accept()
    return ours, theirs


def _pair(family: str) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets with the buffers and time limits of a measurement."""
    ours, theirs = _connected(family)
    for sock in (ours, theirs):
        # A timeout of Python's would cost a poll() at every call; the kernel's own, below, do not.
        sock.settimeout(None)
        if family == "unix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(PATIENCE), 0))
    return ours, theirs


def _receive(idx: int, pipe: Connection, sock: socket.socket, nbytes: int) -> None:
    """Run the worker of a stream: send a byte back for every ``nbytes`` bytes that arrive."""

    def take() -> None:
        block = _view(_written(nbytes))
        got = 0
        # The loop ends when the trainer closes the socket.
        while count := sock.recv_into(block[got : got + _WINDOW]):
            got += count
            if got == nbytes:
                got = 0
                sock.send(b"x")

    Thread(target=take, daemon=True).start()
    Desk().serve(pipe)


# -- contenders by transport ----------------------------------------------------------------------

# Name and factory of the limit of each transport.
_LIMITS: dict[str, tuple[str, Callable[[], Limit]]] = {
    "shm": ("memcpy all threads", Memcpy),
    "pipe": ("raw unix socket", Stream),
    "tcp": ("raw socket", functools.partial(Stream, "tcp")),
    "unix": ("raw unix socket", Stream),
    "gloo": ("memcpy all threads", Memcpy),
}


def contenders_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Return factories of the trainers' halves that take turns on a case, by contender.

    The contenders are aiosync and the limits of the transport. A half has ``open(case)``, which
    returns a handle for each worker, ``send()``, ``close()`` and ``model``; the methods may be
    coroutine functions. No limit is measured with busy workers.
    """
    found: dict[str, Callable[[], Any]] = {
        "aiosync": functools.partial(AsyncTrainer, case.transport)
    }
    if not case.busy:
        name, make = _LIMITS[case.transport]
        found |= {f"{LIMIT}round trip": wake_up, f"{LIMIT}{name}": make}
    return found

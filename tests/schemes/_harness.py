"""Worker processes that tests drive: each has a receiver on an event loop and obeys calls.

A call names a function of an importable module, which gets the worker's :class:`State`. Answers
travel as plain pickles, so tensors are copied and errors keep their type.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import aiosync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

PATIENCE = float(os.environ.get("PATIENCE", "40"))
"""Seconds that anything may take on a busy machine before a test fails."""

_PRELOAD = ["pytest", "aiosync", "aiosync.sync", "tests.schemes._harness", "tests.schemes._models"]

SCHEMES = [aiosync.MultiProcessWeightSyncScheme, aiosync.SharedMemWeightSyncScheme]


# -- in the worker ----------------------------------------------------------------------------


@dataclass
class State:
    """What a worker process has."""

    scheme: aiosync.WeightSyncScheme
    model: Any
    kept: dict[str, Any] = field(default_factory=dict)


def serve(conn: Connection, scheme: Any, build: Callable[[], Any] | None, loop: str) -> None:
    """Run a worker until the test closes its end of ``conn``."""
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(_serve(conn, scheme, build))


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop == "asyncio":
        return asyncio.SelectorEventLoop
    import uvloop

    return uvloop.new_event_loop


async def _serve(conn: Connection, scheme: Any, build: Callable[[], Any] | None) -> None:
    state = State(scheme, build() if build is not None else None)
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[bytes | None] = asyncio.Queue()

    def readable() -> None:
        try:
            requests.put_nowait(_blocking(conn).recv_bytes() or None)
        except (EOFError, OSError):
            loop.remove_reader(conn.fileno())
            requests.put_nowait(None)

    loop.add_reader(conn.fileno(), readable)
    try:
        while (data := await requests.get()) is not None:
            answer = await _obey(state, data)
            _blocking(conn).send_bytes(answer)
    finally:
        loop.remove_reader(conn.fileno())
        await state.scheme.aclose()


def _blocking(conn: Connection) -> Connection:
    os.set_blocking(conn.fileno(), True)  # uvloop changes it
    return conn


async def _obey(state: State, data: bytes) -> bytes:
    function, args, kwargs = pickle.loads(data)
    try:
        result = function(state, *args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return pickle.dumps((True, result))
    except Exception as exc:  # noqa: BLE001 - the test sees it
        return pickle.dumps((False, exc))


async def join(
    state: State, worker_idx: int | None = None, timeout: float = 30, **init: Any
) -> int:
    """Become a receiver of the worker's model."""
    init = {"model_id": "policy", "model": state.model, **init}
    state.scheme.init_on_receiver(worker_idx=worker_idx, **init)
    await state.scheme.connect(timeout=timeout)
    return state.scheme.version


def version(state: State) -> int:
    return state.scheme.version


def weights(state: State) -> dict[str, torch.Tensor]:
    """A copy of the model's state dict."""
    return {
        name: value.detach().clone()
        for name, value in state.model.state_dict().items()
        if isinstance(value, torch.Tensor)  # and not an extra state
    }


async def receive(state: State, timeout: float | None = PATIENCE) -> int | None:
    update = await state.scheme.receive(timeout=timeout)
    return None if update is None else update.version


async def wait_for_version(state: State, wanted: int, timeout: float = PATIENCE) -> int:
    return await state.scheme.wait_for_version(wanted, timeout=timeout)


async def close(state: State) -> None:
    await state.scheme.aclose()


# -- in the test ------------------------------------------------------------------------------


class Worker:
    """One worker process, from the test's side."""

    def __init__(self, process: BaseProcess | subprocess.Popen[bytes], conn: Connection) -> None:
        self.process = process
        self.conn = conn

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def post(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call without waiting for the answer."""
        _blocking(self.conn).send_bytes(pickle.dumps((function, args, kwargs)))

    async def answer(self) -> Any:
        """Wait for the answer to the oldest call."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.conn.fileno(), readable.set)
        try:
            async with asyncio.timeout(PATIENCE):
                await readable.wait()
        finally:
            loop.remove_reader(self.conn.fileno())
        good, result = pickle.loads(_blocking(self.conn).recv_bytes())
        if not good:
            raise result
        return result

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.post(function, *args, **kwargs)
        return await self.answer()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Let the process end by itself, or kill it; wait for it."""
        with contextlib.suppress(OSError, ValueError):
            self.cont()
            self.conn.send_bytes(b"")  # a forked sibling may keep the pipe open
        self.conn.close()
        if isinstance(self.process, subprocess.Popen):
            try:
                self.process.wait(PATIENCE)
            finally:
                self.process.kill()
                self.process.wait()
            return
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()


def this_loop() -> str:
    """Name of the running loop's kind, for workers to use the same."""
    return "uvloop" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "asyncio"


def run(loop: str, main: Coroutine[Any, Any, Any]) -> None:
    """Run a test on one kind of loop, where both would take too long."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(main)


def context(method: str) -> Any:
    ctx = multiprocessing.get_context(method)
    if method == "forkserver":
        ctx.set_forkserver_preload(_PRELOAD)
    return ctx


def start(
    scheme: Any,
    build: Callable[[], Any] | None = None,
    *,
    method: str = "forkserver",
    loop: str | None = None,
) -> Worker:
    """Start a worker process with a pickle of ``scheme``, or a fork of it."""
    mine, theirs = multiprocessing.Pipe()
    if method == "subprocess":
        return _start_subprocess(mine, theirs, scheme, build)
    args = (theirs, scheme, build, loop or this_loop())
    process = context(method).Process(target=serve, args=args, daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine)


_SUBPROCESS = """
import pickle, sys
from multiprocessing.connection import Connection
from tests.schemes import _harness
scheme, build, loop = pickle.load(sys.stdin.buffer)
_harness.serve(Connection(int(sys.argv[1])), scheme, build, loop)
"""


def _start_subprocess(mine: Connection, theirs: Connection, scheme: Any, build: Any) -> Worker:
    process = subprocess.Popen(
        [sys.executable, "-c", _SUBPROCESS, str(theirs.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        pickle.dump((scheme, build, this_loop()), stdin)
    theirs.close()
    return Worker(process, mine)


@contextlib.asynccontextmanager
async def workers(
    scheme: Any,
    build: Callable[[], Any] | None,
    count: int = 1,
    *,
    method: str = "forkserver",
    connect: bool = True,
    init: Sequence[dict[str, Any]] | dict[str, Any] | None = None,
) -> AsyncIterator[list[Worker]]:
    """``count`` worker processes of a sender; connected, unless the test does that itself.

    The sender has its role already. It is closed at the end, and so are the workers.
    """
    crew: list[Worker] = []
    try:
        for _ in range(count):
            crew.append(start(scheme, build, method=method))
        if connect:
            for idx, worker in enumerate(crew):
                each = init[idx] if isinstance(init, (list, tuple)) else init or {}
                worker.post(join, idx, **each)
            await scheme.connect(timeout=PATIENCE, processes=[worker.pid for worker in crew])
            for worker in crew:
                await worker.answer()
        yield crew
    finally:
        await scheme.aclose()
        for worker in crew:
            worker.end()


@contextlib.asynccontextmanager
async def here(
    scheme: Any, target: Any, *, sender: dict[str, Any], receiver: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """A connected sender and one receiver in this process, over the scheme's real link."""
    scheme.init_on_sender(**{"model_id": "policy", "num_workers": 1, **sender})
    other = type(scheme).__new__(type(scheme))
    other.__setstate__(scheme.__getstate__())
    init = {"model_id": "policy", "worker_idx": 0, "model": target, **(receiver or {})}
    try:
        other.init_on_receiver(**init)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(scheme.connect(), other.connect())
        yield scheme, other
    finally:
        await other.aclose()
        await scheme.aclose()


def twin(scheme: Any) -> Any:
    """What arrives when ``scheme`` is pickled into a worker."""
    return pickle.loads(pickle.dumps(scheme))


@contextlib.asynccontextmanager
async def crowd(
    scheme: Any,
    targets: Sequence[Any],
    *,
    sender: dict[str, Any],
    receiver: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[Any, list[Any]]]:
    """A connected sender and one receiver for each target in this process."""
    scheme.init_on_sender(**{"model_id": "policy", "num_workers": len(targets), **sender})
    others = [twin(scheme) for _ in targets]
    try:
        for idx, (other, target) in enumerate(zip(others, targets, strict=True)):
            init = {"model_id": "policy", "worker_idx": idx, "model": target, **(receiver or {})}
            other.init_on_receiver(**init)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(scheme.connect(), *(other.connect() for other in others))
        yield scheme, others
    finally:
        for other in others:
            await other.aclose()
        await scheme.aclose()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until ``condition()``."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


# -- workers with a pipe that the user made -----------------------------------------------------


def serve_with_pipe(
    conn: Connection, scheme: Any, build: Callable[[], Any], loop: str, pipe: Connection
) -> None:
    """As :func:`serve`, with the worker's end of a pipe."""
    global _pipe
    _pipe = pipe
    serve(conn, scheme, build, loop)


_pipe: Connection | None = None


async def join_through_pipe(state: State, worker_idx: int) -> int:
    return await join(state, worker_idx, pipe=_pipe)


def start_with_pipe(
    scheme: Any, build: Callable[[], Any], pipe: Connection, *, method: str
) -> Worker:
    mine, theirs = multiprocessing.Pipe()
    args = (theirs, scheme, build, this_loop(), pipe)
    process = context(method).Process(target=serve_with_pipe, args=args, daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine)

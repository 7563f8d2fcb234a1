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
import select
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import aiosync
from tests.schemes import _models as models
from tests.support.waiting import PATIENCE as PATIENCE
from tests.support.waiting import stop
from tests.support.waiting import until as until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


_PRELOAD = ["pytest", "aiosync", "aiosync.sync", "tests.schemes._harness", "tests.schemes._models"]

SCHEMES = [aiosync.MultiProcessWeightSyncScheme, aiosync.SharedMemWeightSyncScheme]


class AnsweringScheme(aiosync.SharedMemWeightSyncScheme):
    """Shared memory scheme whose workers answer to each update, as their models have no hooks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"guard": "reading", **options})


ANSWERING = [aiosync.MultiProcessWeightSyncScheme, AnsweringScheme]
"""Schemes whose sends end when each worker has answered."""


# -- in the worker ----------------------------------------------------------------------------


@dataclass
class State:
    """State of a worker process, the first argument of its functions."""

    scheme: aiosync.WeightSyncScheme
    model: Any
    link: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


def serve(
    conn: Connection,
    scheme: Any,
    build: Callable[[], Any] | None,
    loop: str,
    pipe: Connection | None = None,
) -> None:
    """Run a worker until the test closes its end of ``conn``."""
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(_serve(conn, scheme, build, {} if pipe is None else {"pipe": pipe}))


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop == "asyncio":
        return asyncio.SelectorEventLoop
    import uvloop

    return uvloop.new_event_loop


async def _serve(
    conn: Connection, scheme: Any, build: Callable[[], Any] | None, link: dict[str, Any]
) -> None:
    state = State(scheme, build() if build is not None else None, link)
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
    # uvloop makes the descriptor non-blocking.
    os.set_blocking(conn.fileno(), True)
    return conn


async def _obey(state: State, data: bytes) -> bytes:
    function, args, kwargs = pickle.loads(data)
    try:
        result = function(state, *args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return pickle.dumps((True, result))
    except Exception as exc:  # noqa: BLE001 - the test gets it
        return pickle.dumps((False, exc))


async def join(
    state: State, worker_idx: int | None = None, timeout: float = 30, **init: Any
) -> int:
    """Connect as a receiver of the worker's model, through its pipe if it has one."""
    init = {"model_id": "policy", "model": state.model, **state.link, **init}
    state.scheme.init_on_receiver(worker_idx=worker_idx, **init)
    await state.scheme.connect(timeout=timeout)
    return state.scheme.version


def version(state: State) -> int:
    """Return the version that a read finds."""
    with state.scheme.reading():
        version: int = state.scheme.version
        return version


def weights(state: State) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of the model's state dict, as a read finds them."""
    with state.scheme.reading():
        return {
            name: value.detach().clone()
            for name, value in state.model.state_dict().items()
            # An extra state is no tensor.
            if isinstance(value, torch.Tensor)
        }


async def wait_for_version(state: State, wanted: int, timeout: float = PATIENCE) -> int:
    return await state.scheme.wait_for_version(wanted, timeout=timeout)


async def close(state: State) -> None:
    await state.scheme.aclose()


# -- in the test ------------------------------------------------------------------------------


@dataclass
class Worker:
    """One worker process, from the test's side."""

    process: BaseProcess
    conn: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def post(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function in the worker without waiting for the answer."""
        _blocking(self.conn).send_bytes(pickle.dumps((function, args, kwargs)))

    async def answer(self) -> Any:
        """Wait for the answer to the oldest call; return its result, or raise its error."""
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

    async def value(self) -> float:
        """Return the one value of all the worker's weights; fail for a mix of versions."""
        [found] = {float(x) for each in (await self.call(weights)).values() for x in each.unique()}
        return found

    def kill(self) -> None:
        """Kill the process, and wait until the system says that it has ended."""
        pidfd = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        select.select([pidfd], [], [], PATIENCE)
        os.close(pidfd)

    def stop(self) -> None:
        stop(self.pid)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Tell the process to end, and wait for its end; kill it if it does not end in time."""
        with contextlib.suppress(OSError, ValueError):
            self.cont()
            # The process may not see the pipe close, because a forked sibling may keep it open.
            self.conn.send_bytes(b"")
        self.conn.close()
        end(self.process)


def end(process: BaseProcess) -> None:
    """Wait for the end of a process; kill it if it does not end in time."""
    process.join(PATIENCE)
    process.kill()
    process.join()
    process.close()


def this_loop() -> str:
    """Return the name of the running loop's kind, so that workers can use the same."""
    return "uvloop" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "asyncio"


def run(loop: str, main: Coroutine[Any, Any, Any]) -> None:
    """Run a test on one kind of loop, because both kinds would take too long."""
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
    pipe: Connection | None = None,
) -> Worker:
    """Start a worker process that has a pickle or a fork of ``scheme``."""
    mine, theirs = multiprocessing.Pipe()
    args = (theirs, scheme, build, loop or this_loop(), pipe)
    process = context(method).Process(target=serve, args=args, daemon=True)
    process.start()
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
    """``count`` worker processes of a sender, connected unless ``connect`` is False.

    The sender has its role already. The end closes the sender and ends the workers.
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


def twin(scheme: Any) -> Any:
    """Return the scheme that a worker gets by a pickle of ``scheme``."""
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


@contextlib.asynccontextmanager
async def here(
    scheme: Any, target: Any, *, sender: dict[str, Any], receiver: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """A connected sender and one receiver in this process, over the scheme's real link."""
    async with crowd(scheme, [target], sender=sender, receiver=receiver) as (_, [other]):
        yield scheme, other


async def deliver(
    sender: Any, receiver: Any, value: float, weights: Any = None, **options: Any
) -> aiosync.SendReport:
    """Fill the sender's model, send it (or ``weights``), and check the receiver's weights."""
    if weights is None:
        models.fill(sender.model, value)
    report: aiosync.SendReport = await sender.send(weights, **options)
    assert report.acked == {receiver.worker_idx}
    assert models.holds(receiver, value)
    assert receiver.version == report.version
    return report


async def stage(
    sender: Any, receiver: Any, weights: Any = None, **options: Any
) -> aiosync.SendHandle:
    """Send, and wait until the receiver has the whole update, applied or not."""
    handle: aiosync.SendHandle = sender.send_nowait(weights, **options)
    await receiver.wait_staged(handle.version, timeout=PATIENCE)
    return handle


@contextlib.contextmanager
def read_elsewhere(
    receiver: Any, read: Callable[[Callable[..., None]], Any] | None = None
) -> Iterator[None]:
    """Keep another thread inside a read, or inside ``read(wait)``, which calls ``wait()``."""
    inside, leave = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        leave.wait(PATIENCE)

    def reading(wait: Callable[..., None]) -> None:
        with receiver.reading():
            wait()

    thread = threading.Thread(target=read or reading, args=[wait])
    thread.start()
    try:
        assert inside.wait(PATIENCE)
        yield
    finally:
        leave.set()
        thread.join()

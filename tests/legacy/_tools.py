"""What the tests of the older generation's names share: worker processes that obey calls."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore

from aiosync import legacy
from tests.schemes import _harness as harness
from tests.sync import _tools as tools

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

PATIENCE = tools.PATIENCE


class OldContext:
    """What a collector of that generation offered."""

    def __init__(self, model: Any = None, **attributes: Any) -> None:
        self.policy = model
        vars(self).update(attributes)

    def get_model(self, model_id: str) -> Any:
        return {"policy": self.policy}[model_id]


class State:
    """What a worker process has."""

    def __init__(self, scheme: Any, pipe: Connection) -> None:
        self.scheme = scheme
        self.pipe: Any = pipe
        self.model = tools.filled(0.0)
        self.receiver: Any = None
        self.transport: Any = None
        self.context: Any = None

    def attach(self, model_id: str = "policy") -> None:
        self.scheme.init_on_worker(model_id=model_id, pipe=self.pipe, model=self.model)
        self.receiver = self.scheme.get_receiver()

    def attach_context(self) -> None:
        self.context = OldContext(self.model, pipe=self.pipe)
        self.scheme.init_on_worker(model_id="policy", context=self.context)
        self.receiver = self.scheme.get_receiver()

    def attach_without_model(self) -> None:
        self.scheme.init_on_worker(model_id="policy", pipe=self.pipe)
        self.receiver = self.scheme.get_receiver()

    def grow(self) -> None:
        self.model = torch.nn.Linear(3, 3)

    def receive(self, timeout: float | None = PATIENCE) -> bool:
        return self.receiver.receive(timeout=timeout)

    def look(self) -> bool:
        return self.receiver.receive()

    def value(self) -> float:
        return tools.value_of(self.model)

    def fill(self, value: float) -> None:
        tools.fill(self.model, value)

    def shutdown(self) -> None:
        self.scheme.shutdown()

    # transports

    def open(self, kind: str) -> None:
        if kind == "MPTransport":
            self.transport = legacy.MPTransport(self.pipe)
        else:
            self.transport = legacy.SharedMemTransport()
            self.transport.register_pipe(self.pipe)

    def open_store(self, port: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.transport = legacy.DistributedTransport(store, 1)

    def take(self, timeout: float = PATIENCE) -> Any:
        found = self.transport.receive_weights(timeout=timeout)
        if found is None:
            return None
        model_id, weights = found
        return model_id, type(weights).__name__, float(weights["weight"].sum())

    def answer(self, message: str = "updated") -> None:
        self.transport.send_ack(message)

    def shared(self, model_id: str) -> float:
        self.transport.receive_weights(timeout=PATIENCE)
        return float(self.transport.policy_weights[model_id]["weight"].sum())

    def close(self) -> None:
        self.transport.close()


def _serve(conn: Connection, scheme: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = State(scheme, pipe)
    while True:
        name, args = conn.recv()
        if name == "stop":
            return
        try:
            conn.send((None, getattr(state, name)(*args)))
        except BaseException as exc:  # noqa: BLE001 - the test sees it
            conn.send(((type(exc).__name__, str(exc), traceback.format_exc()), None))


class WorkerError(Exception):
    """Something that a call in a worker raised."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind = kind
        self.text = text


class Worker:
    """A worker process, as the test sees it."""

    def __init__(self, process: Any, conn: Connection) -> None:
        self.process = process
        self.conn = conn

    def start(self, name: str, *args: Any) -> None:
        self.conn.send((name, args))

    def result(self) -> Any:
        error, value = tools.recv(self.conn)
        if error is not None:
            raise WorkerError(*error)
        return value

    def __call__(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.result()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def worker(scheme: Any, pipe: Connection, method: str = "fork") -> Iterator[Worker]:
    """A process that has ``scheme`` and its end of a pipe; it attaches when it is told to."""
    ctx: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        ctx = harness.context(method)
    mine, theirs = multiprocessing.Pipe()
    process = ctx.Process(target=_serve, args=(theirs, scheme, pipe))
    process.start()
    theirs.close()
    pipe.close()
    try:
        yield Worker(process, mine)
    finally:
        with contextlib.suppress(BrokenPipeError):  # it was killed
            mine.send(("stop", ()))
        process.join(5)
        mine.close()
        process.kill()
        process.join()
        process.close()


def is_quick(started: float, seconds: float) -> bool:
    return time.monotonic() - started < seconds

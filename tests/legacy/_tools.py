"""Tools for tests of the older generation's names: pairs in one process, and worker processes."""

from __future__ import annotations

import contextlib
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from aiosync import legacy
from tests.schemes import _harness as harness
from tests.sync import _tools as tools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

PATIENCE = tools.PATIENCE
MP = legacy.MultiProcessWeightSyncScheme
SHM = legacy.SharedMemWeightSyncScheme
BOTH = pytest.mark.parametrize("make", [MP, SHM])
STRATEGIES = ["state_dict", "tensordict"]


class OldContext:
    """Context with the interface of that generation's collectors."""

    def __init__(self, model: Any, **attributes: Any) -> None:
        vars(self).update(attributes, policy=model)

    def get_model(self, model_id: str) -> Any:
        return {"policy": self.policy}[model_id]


def ones(value: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the state dict of ``tools.filled(value)``."""
    return dict(tools.filled(value).state_dict())


def td(value: float = 1.0) -> TensorDict:
    """Return the state dict of ``tools.filled(value)`` as a TensorDict."""
    return TensorDict(ones(value), [])


def transport(kind: str, pipe: Any) -> Any:
    """Return a context that yields a transport over one end of a pipe, and closes it."""
    made: Any = legacy.MPTransport(pipe) if kind == "MPTransport" else legacy.SharedMemTransport()
    if kind != "MPTransport":
        made.register_pipe(pipe)
    return contextlib.closing(made)


def refuses(*mistakes: tuple[type[Exception], str, Callable[[], Any]]) -> None:
    """Check that each call raises the given error, with a text that matches the given pattern."""
    for kind, text, call in mistakes:
        with pytest.raises(kind, match=text or None):
            call()


@contextlib.contextmanager
def pair(
    make: Any, model: Any, /, **source: Any
) -> Iterator[tuple[legacy.WeightSender, legacy.WeightReceiver]]:
    """Yield a sender and a receiver of two schemes in this process, with a pipe between them."""
    mine, theirs = Pipe()
    with make() as scheme, make() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine], **source)
        other.init_on_worker(model_id="policy", pipe=theirs, model=model)
        yield scheme.get_sender(), other.get_receiver()


def deliver(sender: Any, receiver: Any, weights: Any = None) -> None:
    """Send weights to one worker, which has applied them afterwards."""
    sender.send_async(weights)
    assert receiver.receive(timeout=PATIENCE)
    sender.wait_async()


# -- other processes --------------------------------------------------------------------------


class State:
    """State of a worker process, and the methods that the test calls there."""

    def __init__(self, scheme: Any, pipe: Connection) -> None:
        self.scheme, self.pipe = scheme, pipe
        self.model = tools.filled(0.0)

    def attach(self) -> None:
        self.scheme.init_on_worker(model_id="policy", pipe=self.pipe, model=self.model)

    def receive(self, timeout: float = PATIENCE) -> bool:
        return bool(self.scheme.get_receiver().receive(timeout=timeout))

    def value(self) -> float:
        return tools.value_of(self.model)

    def fill(self, value: float) -> None:
        tools.fill(self.model, value)


def _serve(conn: Connection, scheme: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = State(scheme, pipe)
    for name, args in iter(conn.recv, None):
        conn.send(getattr(state, name)(*args))
    scheme.shutdown()


@contextlib.contextmanager
def process(target: Callable[..., Any], *args: Any, method: str = "fork") -> Iterator[Any]:
    """Run ``target`` in another process, which is killed at the end if it still runs."""
    started = harness.context(method).Process(target=target, args=args)
    started.start()
    try:
        yield started
        started.join(5)
    finally:
        started.kill()
        started.join()
        started.close()


class Worker:
    """A worker process, as the test sees it."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def __call__(self, name: str, *args: Any) -> Any:
        self._conn.send((name, args))
        return tools.recv(self._conn)

    def receives(self, send: Callable[[], Any]) -> None:
        """Check that the worker receives the update that ``send()`` sends."""
        self._conn.send(("receive", ()))
        send()
        assert tools.recv(self._conn) is True


@contextlib.contextmanager
def worker(scheme: Any, pipe: Connection, method: str = "fork") -> Iterator[Worker]:
    """Yield a process with ``scheme`` and its end of a pipe; it attaches when the test says so."""
    mine, theirs = Pipe()
    with mine, process(_serve, theirs, scheme, pipe, method=method):
        theirs.close()
        pipe.close()
        yield Worker(mine)
        mine.send(None)

"""Workers in other processes, which tests call directly, by RPC or by Ray."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiosync.tensors.accelerator import use_accelerator
from tests.contract import bench
from tests.schemes import _harness as harness
from tests.support.accelerator import Deferred

held: dict[int, bench.Worker] = {}
"""Workers of this process by key; used in the processes of workers only."""
_keys = itertools.count()


async def act(key: int, name: str, data: bytes) -> Any:
    """Make a worker, or call its method ``name``; runs in the worker's process."""
    args = pickle.loads(data)
    if name == "hire":
        held[key] = bench.hire(*args)
        return None
    return await getattr(held[key], name)(*args)


class Remote:
    """A worker in another process, with the coroutines of :class:`tests.contract.bench.Worker`.

    Args:
        scheme: Scheme of the worker.
        init: Arguments of the worker's ``init_on_receiver()``.
        call: Runs :func:`act` in the worker's process.
        end: Ends the worker's process; ``None`` if it is not the worker's own.
    """

    def __init__(
        self,
        scheme: Any,
        init: dict[str, Any],
        call: Callable[..., Awaitable[Any]],
        end: Callable[[], None] | None = None,
    ) -> None:
        self._key, self._call, self._end = next(_keys), call, end
        self._made = pickle.dumps((scheme, init))
        self._gone = False

    async def connect(self) -> None:
        await self._call(self._key, "hire", self._made)
        await self._call(self._key, "connect", pickle.dumps(()))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(self._key, name, pickle.dumps(args))

    async def leave(self) -> None:
        try:
            if not self._gone:
                # The worker was never made.
                with contextlib.suppress(KeyError):
                    await self._call(self._key, "leave", pickle.dumps(()))
        finally:
            await self._ended()

    async def die(self) -> None:
        if self._end is None:
            await self._call(self._key, "die", pickle.dumps(()))
        await self._ended()

    async def _ended(self) -> None:
        if self._end is not None and not self._gone:
            self._end()
        self._gone = True


class Hired(Remote):
    """A worker in a process of its own."""

    def __init__(self, scheme: Any, init: dict[str, Any]) -> None:
        self._worker = worker = harness.start(None, None)
        super().__init__(scheme, init, partial(worker.call, _acting), partial(_end, worker))
        self.pid, self.stop, self.cont = worker.pid, worker.stop, worker.cont


async def _acting(state: harness.State, *args: Any) -> Any:
    return await act(*args)


def _end(worker: harness.Worker) -> None:
    worker.kill()
    worker.end()


class Pretending(Hired):
    """A worker in a process of its own, whose models are on a fake accelerator."""

    async def connect(self) -> None:
        await self._worker.call(_pretend)
        await super().connect()


async def _pretend(state: harness.State) -> None:
    use_accelerator(Deferred())

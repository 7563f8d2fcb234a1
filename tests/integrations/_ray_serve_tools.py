"""What the scenarios of the Ray Serve tests share; runs in the process of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayActorError

import aiosync
from aiosync.errors import PartialSyncError
from tests.integrations import _ray_serve_apps as apps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ray.serve.handle import DeploymentHandle

    from aiosync.integrations.ray_serve import Answer

APP = "policy"
PATIENCE = float(os.environ.get("PATIENCE", "40"))

_ports: dict[str, int] = {}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="births")  # removed when the driver ends


def births() -> str:
    """Folder in which each replica leaves a file when it is born, and one when it is shut down."""
    return _folder().name


def free_port(name: str) -> int:
    if name not in _ports:
        for port in range(20000 + os.getpid() % 10000, 32000):
            with socket.socket() as sock:
                with contextlib.suppress(OSError):
                    sock.bind(("127.0.0.1", port))
                    if port not in _ports.values():
                        _ports[name] = port
                        break
    return _ports[name]


class Trainer:
    """Sends versions whose every element is the version."""

    def __init__(self) -> None:
        self.model = apps.Constant(1.0)
        self.scheme = aiosync.TCPWeightSyncScheme(
            f"tcp://127.0.0.1:{free_port('trainer')}", token=apps.TOKEN
        )
        self.scheme.init_on_sender(model_id="policy", model=self.model)

        self.epoch = 0  # known after the first push

    async def push(self) -> int:
        self.model.fill(self.scheme.version + 1)
        # A replica that dies fails a send; the others have it.
        with contextlib.suppress(PartialSyncError):
            self.epoch = (await self.scheme.send(timeout=10)).epoch
        return self.scheme.version


@asynccontextmanager
async def trainer(*, pushing: bool = False) -> AsyncIterator[Trainer]:
    """A trainer, which sends back to back if it is told so."""
    it = Trainer()
    async with it.scheme:
        await it.scheme.connect()

        async def push() -> None:
            while True:
                await it.push()
                await asyncio.sleep(0.01)

        task = asyncio.create_task(push()) if pushing else None
        try:
            yield it
        finally:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE - 2
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.02)


async def running() -> DeploymentHandle:
    """The app, whose replicas have found the trainer of this scenario."""
    handle = serve.get_app_handle(APP)
    await connected(handle, 2)
    return handle


async def statuses(handle: DeploymentHandle) -> dict[str, dict[str, Any]]:
    """What the replicas say of themselves, those that happen to be asked."""
    answers = await asyncio.gather(*(handle.weight_status.remote() for _ in range(8)))
    return {answer["replica"]: answer for answer in answers}


async def connected(handle: DeploymentHandle, replicas: int) -> None:
    """Wait until all replicas have found the trainer of this scenario."""
    seen: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + PATIENCE - 2
    while sum(status["connected"] for status in seen.values()) < replicas:
        assert time.monotonic() < deadline, f"not {replicas} replicas: {seen}"
        seen.update(await statuses(handle))


def check(answer: Answer[tuple[int, float, float]]) -> int:
    """No answer is mixed, and each says with which version it was computed."""
    pid, least, greatest = answer.value
    assert (least, greatest, answer.versions) == (answer.version, answer.version, (answer.version,))
    return pid


async def ask_all(handle: DeploymentHandle, count: int, **options: Any) -> list[Answer[Any]]:
    """Answers to so many calls; repeats those to a replica that nobody knew to be dead yet."""

    async def ask() -> Answer[Any]:
        while True:
            with contextlib.suppress(RayActorError):
                return await handle.on_loop.remote(0.01, **options)

    return await asyncio.gather(*(ask() for _ in range(count)))


async def ask_both(handle: DeploymentHandle, **options: Any) -> list[Answer[Any]]:
    """Answers, of which each of two replicas has given some: Serve sends calls where it likes."""
    answers: list[Answer[Any]] = []
    deadline = time.monotonic() + PATIENCE / 2
    while len({check(answer) for answer in answers}) < 2:
        assert time.monotonic() < deadline, "only one replica answers"
        answers += await ask_all(handle, 10, **options)
    return answers


async def get(path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    def call() -> tuple[int, Any, Any]:
        url = f"http://127.0.0.1:{free_port('http')}/{path}"
        request = urllib.request.Request(url, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, response.headers, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, json.loads(error.read())

    return await asyncio.to_thread(call)

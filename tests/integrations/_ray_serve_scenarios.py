"""Scenarios of the Ray Serve tests, in the driver's process; one app stays up for most of them.

Each scenario has a trainer of its own, always at the same address. So the replicas see one trainer
go and another one come between two scenarios.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
import urllib.error
import urllib.request
from contextlib import AbstractAsyncContextManager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray import serve
from ray.exceptions import RayActorError

from aiosync.errors import AdmissionTimeout
from tests.integrations import _ray_serve_apps as apps
from tests.schemes._harness import PATIENCE, until

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from aiosync.integrations.ray_serve import Answer

APP = "policy"


@cache
def free_port(name: str) -> int:
    """Return a port for this name, from a range that the system does not assign by itself."""
    while True:
        port = random.randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def source() -> str:
    return f"tcp://127.0.0.1:{free_port('trainer')}"


def trainer() -> AbstractAsyncContextManager[apps.Trainer]:
    return apps.trainer(source(), apps.TOKEN)


async def deploy(name: str, *args: Any, options: Any = None, **kwargs: Any) -> DeploymentHandle:
    app = apps.Policy.options(**(options or {})).bind(*args, **kwargs)
    prefix = "/" if name == APP else f"/{name}"
    return await asyncio.to_thread(serve.run, app, name=name, route_prefix=prefix)


def status_of(name: str) -> Any:
    """Return Serve's status of the deployment of an app."""
    return serve.status().applications[name].deployments["Policy"]


async def running() -> DeploymentHandle:
    """Return the handle of the app, whose replicas have found the trainer of this scenario."""
    handle = serve.get_app_handle(APP)
    await both(handle, connected=True)
    return handle


async def both(handle: DeploymentHandle, **expected: Any) -> None:
    """Wait until each of two replicas reports the expected status."""
    seen: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(PATIENCE - 2):
        while [expected.items() <= each.items() for each in seen.values()] != [True, True]:
            for status in await asyncio.gather(*(handle.weight_status.remote() for _ in range(8))):
                seen[status["replica"]] = status


def check(answer: Answer[tuple[int, float, float]]) -> int:
    """Check that an answer is not mixed, and names the version that computed it."""
    pid, least, greatest = answer.value
    assert (least, greatest, answer.versions) == (answer.version, answer.version, (answer.version,))
    return pid


async def ask(handle: DeploymentHandle, **options: Any) -> Answer[Any]:
    """Return an answer; retry a call that went to a replica before Serve knew it to be dead."""
    while True:
        with suppress(RayActorError):
            return await handle.on_loop.remote(0.01, **options)


async def ask_both(handle: DeploymentHandle, **options: Any) -> list[Answer[Any]]:
    """Return answers until both replicas have given some, as Serve chooses the replica."""
    answers: list[Answer[Any]] = []
    async with asyncio.timeout(PATIENCE / 2):
        while len({check(answer) for answer in answers}) < 2:
            answers += await asyncio.gather(*(ask(handle, **options) for _ in range(10)))
    return answers


async def get(path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    def call() -> tuple[int, Any, Any]:
        url = f"http://127.0.0.1:{free_port('http')}/{path}"
        request = urllib.request.Request(url, headers=headers or {})
        try:
            response = urllib.request.urlopen(request, timeout=20)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return response.status, response.headers, json.loads(response.read())

    return await asyncio.to_thread(call)


# -- scenarios ---------------------------------------------------------------------------------


async def start_serve() -> None:
    """Start Serve, in a step of its own: the start of processes takes long on a busy machine."""
    options = {"port": free_port("http"), "location": "HeadOnly"}
    await asyncio.to_thread(serve.start, http_options=options)


async def start_app() -> None:
    async with trainer():
        await deploy(APP, source(), timeout=30)


async def versions() -> None:
    """Answers name the version that computed them, and callers may ask for a version."""
    async with trainer() as it:
        handle = await running()
        await it.push()
        version = await it.push()
        # This call has to wait for its version.
        asked = handle.on_loop.remote(min_version=version + 1)
        answers = await ask_both(handle)
        assert {(each.version, each.epoch) for each in answers} == {(version, it.epoch)}
        assert await it.push() == version + 1
        later = await handle.in_thread.remote(min_version=version + 1, epoch=it.epoch)
        for answer in (await asked, later):
            check(answer)
            assert answer.version == version + 1
        with pytest.raises(AdmissionTimeout, match="version 99 was requested") as caught:
            await handle.impatient.remote(min_version=99)
        # The error's class is derived from Ray's and from aiosync's.
        error: Any = caught.value
        assert (error.version, error.min_version, error.retry_after > 0) == (version + 1, 99, True)
        with pytest.raises(AdmissionTimeout, match="epoch 0*5 was requested"):
            await handle.impatient.remote(epoch=5)
        items = [item async for item in handle.options(stream=True).items.remote(3)]
        assert [(item.value, item.version) for item in items] == [(version + 1, version + 1)] * 3


async def under_load() -> None:
    """Updates arrive back to back while all kinds of methods compute: none fails, none is mixed."""
    async with trainer() as it:
        handle = await running()
        last, end = it.scheme.version + 10, time.monotonic() + 2.0
        seen: dict[str, set[int]] = {"on_loop": set(), "in_thread": set(), "together": set()}
        pids: set[int] = set()

        def goes_on() -> bool:
            return time.monotonic() < end or it.scheme.version < last

        async def push() -> None:
            while goes_on():
                await it.push()
                await asyncio.sleep(0.01)

        async def call(name: str, *args: Any) -> None:
            while goes_on():
                answer = await getattr(handle, name).remote(*args)
                pids.add(check(answer))
                seen[name].add(answer.version)

        async def stream() -> None:
            while goes_on():
                items = [item async for item in handle.options(stream=True).items.remote(5)]
                assert len({item.version for item in items}) == 1
                assert {item.value for item in items} == {items[0].version}

        async def guarded() -> None:
            while goes_on():
                least, greatest = await handle.plain.remote(0.01)
                assert least == greatest

        calls = [call("on_loop", 0.003), call("in_thread", 0.003), call("together")]
        await asyncio.gather(push(), *calls, call("together"), stream(), guarded())
        assert len(pids) == 2
        assert all(len(each) > 3 for each in seen.values())


async def ingress() -> None:
    """An HTTP header names the version, another one asks for it; methods may be async or not."""
    async with trainer() as it:
        await running()
        version = await it.push()
        for path in ("on_loop", "in_thread"):
            status, headers, body = await get(path, {"x-min-weight-version": str(version)})
            assert (status, headers["x-weight-version"]) == (200, str(version))
            assert headers["x-weight-epoch"] == f"{it.epoch:016x}"
            assert body[1:] == [version, version]
        status, _, body = await get("readyz")
        assert (status, body["state"], body["version"]) == (200, "live", version)
        status, _, body = await get("on_loop", {"x-weight-epoch": f"{5:016x}"})
        assert (status, body["error"]) == (503, "weight_version")
        status, headers, _ = await get("pid")
        assert (status, "x-weight-version" in headers) == (200, False)


async def restarted() -> None:
    """A replica that died gets no requests until it has caught up; the others go on, stale."""
    async with trainer() as it:
        handle = await running()
        await it.push()
        old = (it.epoch, it.scheme.version)
        pids = {check(answer) for answer in await ask_both(handle)}
    await both(handle, state="stale")
    with pytest.raises(RayActorError):
        await handle.die.remote()
    await until(lambda: status_of(APP).replica_states.get("STARTING"))
    answers = await asyncio.gather(*(ask(handle) for _ in range(40)))
    (survivor,) = {check(answer) for answer in answers}
    assert survivor in pids
    assert {(answer.epoch, answer.version) for answer in answers} == {old}
    async with trainer() as it:
        await both(handle, connected=True)
        version = await it.push()
        answers = await ask_both(handle, min_version=version, epoch=it.epoch)
        assert {check(answer) for answer in answers} & pids == {survivor}
        assert {(answer.epoch, answer.version) for answer in answers} == {(it.epoch, version)}
        await both(handle, state="live")


async def deleted() -> None:
    """Nothing is left of a deleted deployment: its links are closed, its processes have ended."""
    async with trainer() as it:
        handle = await running()
        pids = {check(answer) for answer in await ask_both(handle)}
        workers = set((await it.scheme.send()).acked)
        assert len(workers) == 2
        await asyncio.to_thread(serve.delete, APP)
        report = await it.scheme.send(timeout=5)
        assert (report.left, report.failed) == (workers, {})
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def never_ready() -> None:
    """Without a source a deployment fails in time, and says why."""
    nobody = f"tcp://127.0.0.1:{free_port('nobody')}"
    with pytest.raises(RuntimeError, match="failed"):
        await deploy("lonely", nobody, timeout=0.5, options={"num_replicas": 1})
    message = status_of("lonely").message
    assert f"has no version of the weights from {nobody} to start with after 0.5 s" in message
    assert "the source was not reached yet" in message
    await asyncio.to_thread(serve.delete, "lonely")


async def too_stale() -> None:
    """With max_staleness Serve replaces a replica whose source is gone."""
    async with trainer():
        handle = await deploy("fresh", source(), max_staleness=0.5, options={"num_replicas": 1})
        pid = check(await ask(handle))
    await until(lambda: status_of("fresh").replica_states.get("STARTING"))
    # Otherwise the old replica would find the new trainer, too.
    await until(lambda: not Path(f"/proc/{pid}").exists())
    async with trainer() as it:
        await it.push()
        assert check(await ask(handle, epoch=it.epoch)) != pid
    await asyncio.to_thread(serve.delete, "fresh")

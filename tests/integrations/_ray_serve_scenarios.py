"""What the Ray Serve tests do, in the process of the driver; one app stays up for most of them.

Each scenario has a trainer of its own, always at the same address, so that the replicas see it
go and another one come between two scenarios.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray import serve
from ray.exceptions import RayActorError

import aiosync
from aiosync.errors import AdmissionTimeout, PartialSyncError
from tests.integrations import _ray_serve_apps as apps
from tests.integrations._ray_serve_tools import (
    APP,
    PATIENCE,
    ask_all,
    ask_both,
    births,
    check,
    connected,
    free_port,
    get,
    running,
    statuses,
    trainer,
    until,
)

if TYPE_CHECKING:
    from aiosync.integrations.ray_serve import Answer


async def start_serve() -> None:
    """A part of its own, because the start of processes takes its time on a busy machine."""
    options = {"port": free_port("http"), "location": "HeadOnly"}
    await asyncio.to_thread(serve.start, http_options=options)


async def start_app() -> None:
    async with trainer():
        source = f"tcp://127.0.0.1:{free_port('trainer')}"
        app = apps.Policy.bind(source, births(), timeout=30)
        await asyncio.to_thread(serve.run, app, name=APP)


async def versions() -> None:
    """Answers name the version that they were computed with; callers may ask for one."""
    async with trainer() as it:
        handle = await running()
        await it.push()
        version = await it.push()
        asked = handle.on_loop.remote(min_version=version + 1)  # has to wait
        answers = await ask_both(handle)
        assert {answer.version for answer in answers} == {version}
        assert {answer.epoch for answer in answers} == {it.epoch}
        assert await it.push() == version + 1
        answer = await asked
        check(answer)
        assert answer.version == version + 1
        answer = await handle.in_thread.remote(min_version=version + 1, epoch=it.epoch)
        check(answer)
        with pytest.raises(AdmissionTimeout, match="version 99 was requested") as caught:
            await handle.impatient.remote(min_version=99)
        error: Any = caught.value  # of Ray's, and ours
        assert (error.version, error.min_version, error.retry_after > 0) == (version + 1, 99, True)
        with pytest.raises(AdmissionTimeout, match="epoch 0*5 was requested"):
            await handle.impatient.remote(epoch=5)
        async with asyncio.timeout(10):
            items = [item async for item in handle.options(stream=True).items.remote(3)]
        assert [(item.value, item.version) for item in items] == [(version + 1, version + 1)] * 3


async def under_load() -> None:
    """Updates back to back while all kinds of methods compute: nothing fails, nothing is mixed."""
    async with trainer(pushing=True) as it:
        handle = await running()
        first = it.scheme.version
        seen: dict[str, set[int]] = {"on_loop": set(), "in_thread": set(), "together": set()}
        pids: set[int] = set()
        end = time.monotonic() + 2.0

        async def ask(name: str, *args: Any) -> None:
            while time.monotonic() < end or it.scheme.version < first + 10:
                answer = await getattr(handle, name).remote(*args)
                pids.add(check(answer))
                seen[name].add(answer.version)

        async def stream() -> None:
            while time.monotonic() < end:
                items = [item async for item in handle.options(stream=True).items.remote(5)]
                assert len({item.version for item in items}) == 1
                assert {item.value for item in items} == {items[0].version}

        async def guarded() -> None:
            while time.monotonic() < end:
                least, greatest = await handle.plain.remote(0.01)
                assert least == greatest

        calls = [ask("on_loop", 0.003), ask("in_thread", 0.003), ask("together")]
        await asyncio.gather(*calls, *calls[:0], ask("together"), stream(), guarded())
        assert len(pids) == 2
        for name, versions in seen.items():
            assert len(versions) > 3, name


async def restarted() -> None:
    """A replica that died takes no requests before it has caught up; the others go on, stale."""
    async with trainer() as it:
        handle = await running()
        await it.push()
        old_epoch, old_version = it.epoch, it.scheme.version
        pids = {check(answer) for answer in await ask_both(handle)}
    # The trainer is gone.
    seen: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + PATIENCE / 2
    while {status["state"] for status in seen.values()} != {"stale"} or len(seen) < 2:
        assert time.monotonic() < deadline, seen
        seen.update(await statuses(handle))
    assert all("link to the source" in status["reason"] for status in seen.values())
    born = set(os.listdir(births()))
    with pytest.raises(RayActorError):
        await handle.die.remote()
    await until(lambda: set(os.listdir(births())) - born, "another replica")
    (newcomer,) = {int(name) for name in set(os.listdir(births())) - born}
    answers = await ask_all(handle, 40)
    (survivor,) = {check(answer) for answer in answers}
    assert survivor in pids
    assert {(answer.epoch, answer.version) for answer in answers} == {(old_epoch, old_version)}
    async with trainer() as it:
        await connected(handle, 2)
        version = await it.push()
        assert it.epoch != old_epoch
        answers = await ask_both(handle, min_version=version, epoch=it.epoch)
        assert {check(answer) for answer in answers} == {survivor, newcomer}
        assert {answer.version for answer in answers} == {version}
        assert {s["state"] for s in (await statuses(handle)).values()} == {"live"}


async def scaled_up() -> None:
    """One more replica under load: its first answer is of a version that there was already."""
    async with trainer(pushing=True) as it:
        source = f"tcp://127.0.0.1:{free_port('trainer')}"
        scaling = {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 1,
            "upscale_delay_s": 0.1,
            "metrics_interval_s": 0.1,
            "look_back_period_s": 0.3,
        }
        policy = apps.Policy.options(num_replicas=None, autoscaling_config=scaling)
        app = policy.bind(source, births(), timeout=30)
        handle = await asyncio.to_thread(serve.run, app, name="wide", route_prefix="/wide")
        first = check(await handle.on_loop.remote())
        version = it.scheme.version
        late: list[Answer[Any]] = []
        deadline = time.monotonic() + PATIENCE - 2
        while not late:
            assert time.monotonic() < deadline, "one replica was enough"
            late += [each for each in await ask_all(handle, 8) if check(each) != first]
        assert min(answer.version for answer in late) > version
        assert {answer.epoch for answer in late} == {it.epoch}
        await asyncio.to_thread(serve.delete, "wide")


async def ingress() -> None:
    """HTTP: the version in a header, and asked for in one; methods with and without async."""
    async with trainer() as it:
        handle = await running()
        version = await it.push()
        await connected(handle, 2)
        for path in ("on_loop", "in_thread"):
            status, headers, body = await get(path, {"x-min-weight-version": str(version)})
            assert (status, headers["x-weight-version"]) == (200, str(version))
            assert headers["x-weight-epoch"] == f"{it.epoch:016x}"
            assert body[1:] == [version, version]
        status, headers, body = await get("readyz")
        assert (status, body["state"], body["version"]) == (200, "live", version)
        status, headers, body = await get("on_loop", {"x-min-weight-version": "seven"})
        assert status == 400
        status, headers, body = await get("on_loop", {"x-weight-epoch": f"{5:016x}"})
        assert (status, body["error"]) == (503, "weight_version")
        assert "retry-after" in headers
        status, headers, _ = await get("pid")
        assert (status, "x-weight-version" in headers) == (200, False)


async def deleted() -> None:
    """Nothing is left of a deployment: its links are closed, its processes have ended."""
    async with trainer() as it:
        handle = await running()
        pids = {check(answer) for answer in await ask_both(handle)}
        workers = set((await it.scheme.send()).acked)
        assert len(workers) == 2
        await asyncio.to_thread(serve.delete, APP)
        with pytest.raises(PartialSyncError, match="PeerClosed") as caught:
            await it.scheme.send(timeout=5)
        assert set(caught.value.failed) == workers
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "their end")
        # The user's destructor ran first, while the feed was still there.
        ends = {f"{pid}.{state}" for pid in pids for state in ("live", "closed")}
        assert ends <= set(os.listdir(births()))


async def never_ready() -> None:
    """Without a source a deployment fails in time, and says why."""
    source = f"tcp://127.0.0.1:{free_port('nobody')}"
    app = apps.Policy.options(num_replicas=1).bind(source, births(), timeout=0.5)
    with pytest.raises(RuntimeError, match="failed"):
        await asyncio.to_thread(serve.run, app, name="lonely", route_prefix="/lonely")
    message = serve.status().applications["lonely"].deployments["Policy"].message
    assert f"has no version of the weights from {source} to start with after 0.5 s" in message
    assert "the source was not reached yet" in message
    await asyncio.to_thread(serve.delete, "lonely")


async def too_stale() -> None:
    """With max_staleness a replica whose source is gone is replaced."""
    async with trainer():
        source = f"tcp://127.0.0.1:{free_port('trainer')}"
        app = apps.Policy.options(num_replicas=1).bind(source, births(), max_staleness=0.5)
        handle = await asyncio.to_thread(serve.run, app, name="fresh", route_prefix="/fresh")
        born = set(os.listdir(births()))
    await until(lambda: set(os.listdir(births())) - born, "another replica")
    async with trainer() as it:
        await it.push()
        answer = await handle.on_loop.remote(epoch=it.epoch)
        assert check(answer) != int(max(born, key=len).partition(".")[0])
    await asyncio.to_thread(serve.delete, "fresh")


async def other_sources() -> None:
    """A scheme that was made in the trainer travels to the replicas."""
    for kind in (aiosync.RayWeightSyncScheme, aiosync.SharedMemWeightSyncScheme):
        model = apps.Constant(1.0)
        async with kind() as scheme:
            scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
            app = apps.Policy.bind(scheme, births(), timeout=20)
            connecting = asyncio.create_task(scheme.connect(timeout=PATIENCE))
            handle = await asyncio.to_thread(serve.run, app, name="other", route_prefix="/other")
            await connecting
            model.fill(2.0)
            version = (await scheme.send()).version
            answers = await ask_both(handle)
            assert {answer.version for answer in answers} == {version}
        await asyncio.to_thread(serve.delete, "other")


async def on_the_actors_loop() -> None:
    """Serve may run the code of a deployment on the loop of its actor, and without threads."""
    variables = {
        "AIOSYNC_TOKEN": apps.TOKEN,
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL": "0",
    }
    where = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    async with trainer() as it:
        source = f"tcp://127.0.0.1:{free_port('trainer')}"
        app = apps.Policy.options(ray_actor_options=where).bind(source, births(), timeout=30)
        handle = await asyncio.to_thread(serve.run, app, name="actor", route_prefix="/actor")
        version = await it.push()
        for answer in await ask_both(handle, min_version=version):
            assert answer.version == version
        check(await handle.in_thread.remote())
        check(await handle.together.remote())
        items = [item async for item in handle.options(stream=True).items.remote(3)]
        assert [(item.value, item.version) for item in items] == [(version, version)] * 3
        await asyncio.to_thread(serve.delete, "actor")

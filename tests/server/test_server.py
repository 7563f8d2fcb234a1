"""The weight server in one process with its trainers and workers, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
    RecvTimeout,
    TransportError,
)
from aiosync.sender import admission
from aiosync.server import WeightClient, WeightServer, WeightStore
from aiosync.testing import FaultProxy
from aiosync.wire import encode_values
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import fill, filled, holds, linear, medium
from tests.server._tools import URL, described, refused, send, trainer, without, worker

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]


# -- models and their trainers ----------------------------------------------------------------


async def test_a_second_trainer_is_refused_until_the_first_has_gone() -> None:
    async with WeightServer(URL) as server:
        async with trainer(server) as first:
            await send(first, 1.0)
            await refused(
                trainer(server, timeout=0.3), ConnectTimeout, "is already pushing model 'policy'"
            )
            await send(first, 2.0)
            assert server.status()["ended"]["ConnectError"] >= 1
        async with trainer(server) as second:
            report = await send(second, 3.0)
            assert described(server)["epoch"] == report.epoch


async def refusal(scheme: Any) -> AiosyncError:
    """Return the error for which the server refuses a trainer that dials again.

    A send of that trainer raises it.
    """
    while True:
        with pytest.raises(PartialSyncError) as caught:
            await send(scheme, 9.0)
        if not isinstance(caught.value.failed[0], TransportError):
            return caught.value.failed[0]
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kept", ["memory", "disk", "restarted"])
@pytest.mark.parametrize("newer", ["ended", "under way"])
async def test_a_run_that_was_replaced_does_not_come_back(
    kept: str, newer: str, tmp_path: Path
) -> None:
    """A trainer is cut off, another run takes its place, and the first one dials again."""
    options = {} if kept == "memory" else {"store": tmp_path / "store"}
    url = f"unix://{tmp_path / 'socket'}"
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(WeightServer(url, **options))
        proxy = await stack.enter_async_context(FaultProxy(url))
        old = await stack.enter_async_context(trainer(proxy.url))
        scheme = await stack.enter_async_context(worker(url, initial=False))
        await send(old, 1.0)
        proxy.upstream = f"unix://{tmp_path / 'nobody'}"
        proxy.cut()
        await until(lambda: described(server)["trainer"] is None)
        async with contextlib.AsyncExitStack() as until_then:
            new = await until_then.enter_async_context(trainer(url))
            report = await send(new, 2.0)
            if newer == "ended":
                await until_then.aclose()
                await until(lambda: described(server)["trainer"] is None)
            if kept == "restarted":
                await server.aclose()
                server = await stack.enter_async_context(WeightServer(url, **options))
            proxy.upstream = url
            with pytest.raises(PartialSyncError, match="take_over=True"):
                await old.wait_for_version(1)
            assert "take_over=True" in str(await refusal(old))
            assert described(server)["epoch"] == report.epoch
            await until(lambda: holds(scheme, 2.0))


async def test_a_run_that_was_replaced_takes_over_when_it_is_told_to() -> None:
    """Trainer A takes over from B when it is told to, but B does not take over from A."""
    async with (
        WeightServer(URL) as server,
        FaultProxy(server.url) as first,
        FaultProxy(server.url) as second,
        trainer(first.url, take_over=True) as a,
        worker(server, initial=False) as scheme,
    ):
        await send(a, 1.0)
        first.upstream = "tcp://127.0.0.1:1"
        first.cut()
        await until(lambda: described(server)["trainer"] is None)
        async with trainer(second.url) as b:
            await send(b, 2.0)
            await until(lambda: holds(scheme, 2.0))
            second.upstream = "tcp://127.0.0.1:1"
            second.cut()
            await until(lambda: described(server)["trainer"] is None)
            first.upstream = server.url
            await until(lambda: described(server)["trainer"] is not None)
            await a.wait_for_version(1)
            await send(a, 3.0)
            assert described(server)["epoch"] == a.epoch
            await until(lambda: holds(scheme, 3.0))
            first.cut()
            first.upstream = "tcp://127.0.0.1:1"
            await until(lambda: described(server)["trainer"] is None)
            second.upstream = server.url
            assert "take_over=True" in str(await refusal(b))
            assert described(server)["epoch"] == a.epoch


async def test_a_worker_that_is_ready_has_weights() -> None:
    async with WeightServer(URL) as server:
        await refused(
            worker(server, timeout=0.2), ConnectTimeout, "got no version of 'policy' within 0.2 s"
        )
        # A scheme without dial="both" can also dial a weight server, as it would dial a trainer.
        plain = aiosync.TCPWeightSyncScheme(server.url)
        plain.init_on_receiver(model=linear())
        async with plain:
            with pytest.raises(ConnectTimeout, match="weights of: none yet"):
                await plain.connect(timeout=0.2)
        scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", timeout=PATIENCE)
        scheme.init_on_receiver(model=linear())
        async with trainer(server) as source, scheme:
            joining = asyncio.create_task(scheme.connect())
            while not described(server)["workers"]:
                await asyncio.sleep(0.001)
            assert not joining.done()
            await send(source, 1.0)
            await joining
            assert (scheme.version, scheme.epoch) == (1, source.epoch)
            assert holds(scheme, 1.0)


async def test_weights_of_any_strategy_are_for_every_worker() -> None:
    async with (
        WeightServer(URL) as server,
        worker(server, strategy="state_dict", initial=False) as one,
    ):
        source = aiosync.TCPWeightSyncScheme(server.url, "state_dict", dial="both")
        source.strategy_str = "any"
        source.init_on_sender()
        model = linear()
        fill(model, 5.0)
        async with source:
            await source.connect()
            await source.send(model.state_dict())
            await one.wait_for_version(1)
            async with worker(server, strategy="tensordict") as two:
                assert holds(one, 5.0)
                assert holds(two, 5.0)
        async with trainer(server, strategy="state_dict") as other:
            await send(other, 6.0)
            await refused(
                worker(server, strategy="tensordict"),
                ConfigError,
                r"the sender's strategy is 'state_dict'",
            )


async def test_only_the_models_that_are_listed_are_served() -> None:
    async with WeightServer(URL, model_ids=["actor"]) as server:
        await refused(
            worker(server), ConfigError, "does not serve model 'policy'; it serves: actor"
        )
        await refused(trainer(server), PartialSyncError, "does not serve model 'policy'")
        async with (
            trainer(server, "actor") as source,
            worker(server, "actor", initial=False) as scheme,
        ):
            await send(source, 1.0)
            await scheme.wait_for_version(1)
        assert len(server.status()["models"]) == 1


async def test_there_are_at_most_so_many_models() -> None:
    async with (
        WeightServer(URL, max_models=2) as server,
        trainer(server, "a") as source,
        trainer(server, "b"),
    ):
        await send(source, 1.0)
        await refused(
            worker(server, "c"), ConfigError, "has 2 models and accepts no more; .* of: 'a'"
        )
        await refused(trainer(server, "c"), PartialSyncError, "has 2 models and accepts no more")


async def test_models_that_workers_ask_for_keep_no_trainer_out() -> None:
    async with WeightServer(URL, max_models=2) as server, contextlib.AsyncExitStack() as stack:
        for number in range(5):
            asking = worker(server, f"nothing {number}", "state_dict", initial=False)
            await stack.enter_async_context(asking)
        async with trainer(server) as source, worker(server, initial=False) as scheme:
            await send(source, 1.0)
            await scheme.wait_for_version(1)
        await stack.aclose()
        # The server forgets models that no worker asks for any more.
        async with worker(server, "other", initial=False):
            names = {each["model_id"] for each in server.status()["models"]}
            assert {"policy", "other"} <= names and len(names) <= 3


async def test_a_worker_that_comes_first_does_not_choose_the_strategy() -> None:
    async with (
        WeightServer(URL) as server,
        worker(server, strategy="state_dict", reconnect=0.3, initial=False) as wrong,
        worker(server, initial=False) as right,
    ):
        async with trainer(server, strategy="tensordict") as source:
            await send(source, 1.0)
            await right.wait_for_version(1)
            assert holds(right, 1.0)
            with pytest.raises(PeerClosed, match="the sender's strategy is 'tensordict'"):
                await wrong.wait_for_version(1)


async def push(server: WeightServer, value: float) -> None:
    """Push weights of any strategy, as ``aiosync push`` does."""
    source = aiosync.TCPWeightSyncScheme(server.url, "state_dict", dial="both")
    source.strategy_str = "any"
    source.init_on_sender(model=linear(value))
    async with source:
        await source.connect()


async def test_a_worker_does_not_get_the_versions_of_another_strategy() -> None:
    """It came while weights of any strategy were served."""
    async with WeightServer(URL) as server:
        await push(server, 5.0)
        async with worker(server, strategy="state_dict", reconnect=0.3) as wrong:
            async with trainer(server, strategy="tensordict") as other:
                await send(other, 6.0)
                with pytest.raises(PeerClosed, match="the sender's strategy is 'tensordict'"):
                    await wrong.wait_for_version(9)
            assert filled(wrong.model, 5.0)


async def test_a_worker_in_its_handshake_is_told_of_another_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, admit, calls = asyncio.Event(), admission.admit, itertools.count()

    async def slow(*args: Any, **options: Any) -> Any:
        is_first = next(calls) == 0
        found = await admit(*args, **options)
        if is_first:
            await go.wait()
        return found

    monkeypatch.setattr(admission, "admit", slow)
    async with (
        WeightServer(URL) as server,
        worker(server, strategy="state_dict", reconnect=0.3, initial=False) as wrong,
        trainer(server, strategy="tensordict") as source,
    ):
        go.set()
        await send(source, 1.0)
        with pytest.raises(PeerClosed, match="the sender's strategy is 'tensordict'"):
            await wrong.wait_for_version(9)
        assert not filled(wrong.model, 1.0)


async def test_a_trainer_is_told_the_strategy_of_the_version_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WeightServer(URL, store=tmp_path) as server:
        await push(server, 5.0)
        slow = SlowStore(monkeypatch)
        async with trainer(server, strategy="state_dict", reconnect=0) as source:
            handle = source.send_nowait(source.it)
            await until(lambda: slow.versions == [1])
        with contextlib.suppress(AiosyncError):
            await handle
        await until(lambda: described(server)["trainer"] is None)
        wrong = asyncio.ensure_future(
            refused(trainer(server, timeout=1.0), ConnectTimeout, "strategy is 'tensordict'")
        )
        await until(lambda: described(server)["trainer"] is not None)
        slow.go()
        await wrong
        assert described(server)["strategy"] == "state_dict"


# -- versions of a part of the names, with ``strict=False`` ------------------------------------

BOTH = {"weight": 2.0, "bias": 3.0}


def part(**values: float) -> dict[str, torch.Tensor]:
    shapes = {name: each.shape for name, each in linear().state_dict().items()}
    return {name: torch.full(shapes[name], value) for name, value in values.items()}


def held(mapping: Any) -> dict[str, float]:
    assert all((each == each.flatten()[0]).all() for each in mapping.values())
    return {name: each.flatten()[0].item() for name, each in mapping.items()}


def model_of(receiver: Any) -> dict[str, float]:
    with receiver.reading():
        return held(receiver.it.state_dict())


@pytest.mark.parametrize("stored", [False, True])
async def test_who_comes_later_gets_the_newest_of_each_name(tmp_path: Path, stored: bool) -> None:
    async with WeightServer(URL, store=tmp_path if stored else None) as server:
        async with (
            trainer(server, strict=False) as scheme,
            worker(server, strict=False, initial=False) as early,
        ):
            await send(scheme, 1.0)
            await scheme.send(part(weight=2.0))
            last = await scheme.send(part(bias=3.0))
            await early.wait_for_version(last.version, timeout=PATIENCE)
            assert model_of(early) == BOTH
            async with worker(server, strict=False) as late:
                assert late.version == last.version
                assert model_of(late) == BOTH
            async with worker(server, strict=False, subscribe=False) as asking:
                assert await asking.pull(timeout=PATIENCE) == last.version
                assert model_of(asking) == BOTH
            pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
            assert (pulled.version, held(pulled.mapping())) == (last.version, BOTH)
        # The trainer has left, and the server still has its weights.
        pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
        assert held(pulled.mapping()) == BOTH


PAIR = torch.tensor([1.0, 1.0])
TIED = {"a": PAIR, "b": PAIR, "c": torch.tensor([5.0])}


def vectors(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([TIED, vectors(b=[2.0, 2.0])], {"a": [2, 2], "b": [2, 2], "c": [5]}),
        ([TIED, vectors(c=[6.0])], {"a": [1, 1], "b": [1, 1], "c": [6]}),
        ([vectors(a=[], b=[1.0]), vectors(b=[2.0])], {"a": [], "b": [2]}),
        (
            [vectors(a=[1.0]), vectors(b=[2.0]), vectors(b=[3.0]), vectors(c=[4.0], a=[5.0])],
            {"a": [5], "b": [3], "c": [4]},
        ),
        (
            [TIED, vectors(a=[2.0, 2.0]), vectors(b=[3.0, 3.0])],
            {"a": [3, 3], "b": [3, 3], "c": [5]},
        ),
        (
            [TIED, vectors(d=[1.0]), vectors(a=[3.0, 3.0], d=[2.0])],
            {"a": [3, 3], "b": [3, 3], "c": [5], "d": [2]},
        ),
    ],
)
async def test_a_client_gets_the_newest_of_each_name(parts: list[Any], expected: Any) -> None:
    async with WeightServer(URL) as server, trainer(server, strict=False) as source:
        for each in parts:
            await source.send(each)
        pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
    assert {name: tensor.tolist() for name, tensor in pulled.mapping().items()} == expected


async def test_the_status_tells_the_size_of_the_whole_model(tmp_path: Path) -> None:
    """Also behind another server, and after a restart."""

    def told(server: WeightServer) -> list[int]:
        return [described(server)[key] for key in ("version", "tensors", "nbytes")]

    updates = part(**BOTH), part(weight=4.0), TIED, vectors(b=[2.0, 2.0], d=[1.0])
    async with (
        WeightServer(URL, store=tmp_path) as first,
        WeightServer(URL, model_ids=["policy"], upstream=first.url) as second,
        trainer(first, strict=False) as source,
    ):
        for each in updates:
            report = await source.send(each)
            pulled = await WeightClient(first.url).pull(timeout=PATIENCE)
            size = [report.version, len(pulled.layout.manifest.leaves), pulled.nbytes]
            assert told(first) == size
            await until(lambda size=size: told(second) == size)
    assert size == [4, 5, 5 * 64]
    async with WeightServer(URL, store=tmp_path) as first:
        assert told(first) == size


# -- peers that may only read -----------------------------------------------------------------

TOKEN, PULL_TOKEN = "a secret of the trainers", "a secret of the workers"


async def test_the_pull_token_reads_and_does_not_push(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        WeightServer(URL, token=TOKEN, pull_token=PULL_TOKEN) as server,
        trainer(server, token=TOKEN) as source,
        worker(server, token=PULL_TOKEN, initial=False) as scheme,
        worker(server, token=TOKEN, initial=False),
    ):
        await send(source, 1.0)
        await scheme.wait_for_version(1)
        reader = WeightClient(server.url, token=PULL_TOKEN)
        assert (await reader.pull()).version == 1
        pushing = trainer(server, "other", token=PULL_TOKEN)
        await refused(
            pushing, PartialSyncError, "AuthError: .*may pull and subscribe, not push 'other'"
        )
        assert "may pull and subscribe, not push 'other'" in caplog.text
        with pytest.raises(aiosync.AuthError):
            await WeightClient(server.url, token="neither").status()
        told = await reader.status()
        assert told["ended"]["AuthError"] == 1
        assert told["refused"] == {"AuthError": 1}
        assert [each["model_id"] for each in told["models"]] == ["policy"]
        for secret in (TOKEN, PULL_TOKEN):
            assert secret not in json.dumps(told) + caplog.text + repr(server)


@pytest.mark.parametrize("token", [None, PULL_TOKEN])
async def test_a_pull_token_needs_another_token_beside_it(token: str | None) -> None:
    with pytest.raises(ConfigError, match="pull_token needs another token beside it"):
        WeightServer(URL, token=token, pull_token=PULL_TOKEN)


# -- the store --------------------------------------------------------------------------------


async def test_a_trainer_does_not_repeat_what_a_restarted_server_has(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'socket'}"
    first = WeightServer(url, store=tmp_path / "store")
    await first.start()
    async with trainer(url) as source, worker(url, initial=False) as scheme:
        await send(source, 1.0)
        before = source.sender_transports[0]
        await asyncio.sleep(0.1)
        await first.aclose()
        async with WeightServer(url, store=tmp_path / "store") as second:
            await until(lambda: source.sender_transports.get(0) not in (None, before))
            await until(lambda: bool(described(second)["workers"]))
            found = second.stats()["policy"]
            # The age counts from the time of the send, and not from the restart.
            assert min(found.age, found.workers[0].age) > 0.1
            assert (await send(source, 2.0)).version == 2
            await scheme.wait_for_version(2)
            # Only version 2 has arrived, as version 1 came from the disk.
            assert described(second)["updates"] == 1
            await until(lambda: described(second)["workers"][0]["lag"] == 0)


async def test_a_version_that_the_disk_refused_is_not_served(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with (
        WeightServer(URL, store=store) as server,
        trainer(server) as source,
        worker(server, initial=False) as scheme,
    ):
        await send(source, 1.0)
        await scheme.wait_for_version(1)
        with without(store):
            with pytest.raises(PartialSyncError) as caught:
                await send(source, 2.0)
            error = caught.value.failed[0]
            assert isinstance(error, ApplyError)
            assert error.remote_type == "StoreError"
            assert "No such file or directory" in str(error)
            told = described(server)
            assert (told["version"], told["refused"]) == (1, 1)
            assert f"version 2 of epoch {told['epoch']:016x}: " in told["refusal"]
            assert "No such file or directory" in told["refusal"]
            pulled = await WeightClient(server.url).pull()
            assert pulled.version == 1
            assert all(bool((each == 1.0).all()) for each in pulled.mapping().values())
            async with worker(server) as late:
                assert holds(late, 1.0)
            assert scheme.version == 1 and holds(scheme, 1.0)
        await send(source, 3.0)
        await scheme.wait_for_version(3)
        assert holds(scheme, 3.0)
        told = described(server)
        assert (told["version"], told["refused"], told["refusal"]) == (3, 1, None)
        stored = WeightStore(store).load("policy")
        assert stored is not None and stored.version == 3


async def test_a_version_that_there_is_no_memory_to_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no thread."""
    async with WeightServer(URL, store=tmp_path) as server, trainer(server) as source:
        await send(source, 1.0)
        save, errors = WeightStore.save, [MemoryError(), RuntimeError("can't start new thread")]

        def fail_first(*args: Any) -> None:
            if errors:
                raise errors.pop()
            save(*args)

        monkeypatch.setattr(WeightStore, "save", fail_first)
        for text in ("can't start new thread", "MemoryError"):
            with pytest.raises(PartialSyncError, match=text):
                await send(source, 2.0)
            assert described(server)["version"] == 1
        report = await send(source, 3.0)
        assert described(server)["version"] == report.version


class SlowStore:
    """A patch of ``WeightStore.save()`` that waits for :meth:`go`, and keeps the versions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions: list[int] = []
        self._go = threading.Event()
        save = WeightStore.save

        def slow(store: WeightStore, model_id: str, update: Any, *args: Any) -> None:
            self.versions.append(update.version)
            assert self._go.wait(PATIENCE)
            save(store, model_id, update, *args)

        monkeypatch.setattr(WeightStore, "save", slow)

    def go(self) -> None:
        self._go.set()


async def test_versions_that_come_faster_than_the_disk_are_saved_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStore(monkeypatch)
    async with (
        WeightServer(URL, store=tmp_path) as server,
        trainer(server) as source,
        worker(server, initial=False) as scheme,
    ):
        handles = []
        for number in range(1, 7):
            fill(source.it, float(number))
            handles.append(source.send_nowait(source.it))
            await until(lambda number=number: described(server)["updates"] == number)  # type: ignore[misc]
        assert slow.versions == [1]
        # Versions 2 to 5 have been replaced, and the trainer hears of that.
        ended = [False, True, True, True, True, False]
        await until(lambda: [handle.done() for handle in handles] == ended)
        # The disk may still refuse a version, so none is served yet.
        assert described(server)["version"] == 0
        slow.go()
        reports = [await handle for handle in handles]
        assert slow.versions == [1, 6]
        assert reports[0].acked and reports[5].acked
        assert [dict(report.skipped) for report in reports[1:5]] == [{0: n} for n in (3, 4, 5, 6)]
        stored = WeightStore(tmp_path).load("policy")
        assert stored is not None and stored.version == 6
        await scheme.wait_for_version(6)


# -- the status -------------------------------------------------------------------------------


async def test_stats_count_what_came_and_traces_pass_through() -> None:
    class Tracer:
        def __init__(self) -> None:
            self.events: list[aiosync.SyncEvent] = []

        def on_sync(self, event: aiosync.SyncEvent) -> None:
            self.events.append(event)

        def traceparent(self, started_at: float) -> str:
            return f"00-{'1' * 32}-{'2' * 16}-00"

    seen = Tracer()
    async with WeightServer(URL) as server, worker(server, initial=False) as scheme:
        assert server.stats()["policy"].version == 0
        scheme.add_observer(seen)
        async with trainer(server) as source:
            source.add_observer(seen)
            for number in (1.0, 2.0):
                report = await send(source, number)
                await scheme.wait_for_version(report.version)
            await until(lambda: server.stats()["policy"].lag == 0)
            found = await asyncio.to_thread(server.stats)
            told = await WeightClient(server.url).status()
            # The status has only plain values.
            assert encode_values(told) == told
            (model,) = told["models"]
            (row,) = model["workers"]
            assert (model["tensors"], row["version"], row["lag"]) == (2, 2, 0)
            assert row["sent_nbytes"] == 2 * model["nbytes"] > 0
        stats = found["policy"]
        assert (stats.role, stats.transport, stats.epoch) == ("server", "tcp", report.epoch)
        assert (stats.version, stats.newest_version) == (2, 2)
        assert (stats.started, stats.finished["ok"], stats.nbytes) == (2, 2, 2 * report.nbytes)
        assert stats.wire_nbytes == 2 * report.nbytes
        assert [(each.version, each.state) for each in stats.workers] == [(2, "ready")]
        assert 0 <= stats.age < PATIENCE
        await until(lambda: len(seen.events) == 4)
        assert sorted(each.role for each in seen.events) == 2 * ["receiver"] + 2 * ["sender"]
        assert {each.trace for each in seen.events} == {seen.traceparent(0.0)}
        assert {each.wire_nbytes for each in seen.events} == {report.nbytes}
        assert all("stage" in each.seconds for each in seen.events if each.role == "receiver")


async def test_workers_that_went_before_another_run_have_none_of_its_versions() -> None:
    async with WeightServer(URL) as server:
        async with trainer(server) as source, worker(server, initial=False) as scheme:
            for number in (1.0, 2.0, 3.0):
                await send(source, number)
            await scheme.wait_for_version(3)
        await until(lambda: [each.state for each in server.stats()["policy"].workers] == ["left"])
        async with trainer(server) as source:
            await send(source, 1.0)
            [left] = server.stats()["policy"].workers
            assert (left.version, left.lag, left.age, left.state) == (0, 1, 0.0, "left")


@pytest.mark.parametrize("limit", ["max_payload_nbytes", "max_tensors"])
async def test_a_trainer_is_told_what_is_beyond_the_limits_of_the_server(limit: str) -> None:
    limits = aiosync.Limits(**{limit: 1 if limit == "max_tensors" else 64})
    async with WeightServer(URL, limits=limits) as server, trainer(server) as source:
        with pytest.raises(PartialSyncError, match="ended the link: .*at most (64|1) "):
            await send(source, 1.0)
        await until(lambda: sum(server.status()["ended"].values()) >= 1)


TOGETHER: list[tuple[aiosync.Limits, Any]] = [
    (aiosync.Limits(max_tensors=1), torch.ones(4)),
    (aiosync.Limits(max_payload_nbytes=2**12), torch.ones(600)),
    # Values that are no tensors are in the header of their message.
    (aiosync.Limits(max_header_nbytes=2**12), "x" * 3000),
]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("limits", "value"), TOGETHER)
async def test_a_part_that_makes_the_whole_too_large_is_refused(
    limits: aiosync.Limits, value: Any, stored: bool, tmp_path: Path
) -> None:
    store = tmp_path if stored else None
    async with (
        WeightServer(URL, limits=limits, store=store) as server,
        trainer(server, strict=False) as source,
    ):
        await source.send({"a": value})
        for _ in range(3):
            with pytest.raises(PartialSyncError, match="at most .* are allowed"):
                await source.send({"b": value})
        told = described(server)
        assert (told["version"], told["refused"]) == (1, 3)
        assert "at most" in told["refusal"]
        pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
        assert (pulled.version, [*pulled.mapping()]) == (1, ["a"])
        # The same name takes the place of the old part, so that the whole stays as small.
        last = await source.send({"a": value})
        assert described(server)["refusal"] is None
        pulled = await WeightClient(server.url).pull(timeout=PATIENCE)
        assert (pulled.version, [*pulled.mapping()]) == (last.version, ["a"])


async def test_a_part_with_too_many_lists_for_the_whole_is_refused() -> None:
    many = [[[]]] * 2**16
    async with WeightServer(URL) as server, trainer(server, strict=False) as source:
        await source.send({"a": many})
        with pytest.raises(PartialSyncError, match="more than 262144 lists and maps"):
            await source.send({"b": many})
        assert (await WeightClient(server.url).pull(timeout=PATIENCE)).version == 1


@pytest.mark.parametrize(("limits", "value"), TOGETHER)
async def test_parts_that_cannot_be_put_together_are_told_to_who_asks(
    limits: aiosync.Limits, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that listens has no server before it that refuses such a part."""
    source = aiosync.TCPWeightSyncScheme(URL, strict=False, limits=limits, timeout=PATIENCE)
    source.init_on_sender("policy", weights={"a": value, "b": value})
    async with source:
        await source.connect()
        await source.send({"a": value})
        await source.send({"b": value})
        for seconds in (1, 10):  # a busy machine needs more for the refusal
            with pytest.raises(RecvTimeout) as late:
                await WeightClient(source.address).pull(timeout=seconds)
            if "are allowed" in str(late.value):
                break
        assert re.search("at most .* are allowed", str(late.value))
        options = {"strict": False, "subscribe": False, "dial": "receiver"}
        async with worker(source.address, initial=False, **options) as asking:
            caplog.set_level(logging.INFO, "aiosync")
            pulling = asyncio.ensure_future(asking.pull(timeout=None))
            told = re.compile("the trainer ended the link: .*at most .* are allowed")
            await until(lambda: bool(told.search(caplog.text)))
            pulling.cancel()
            await asyncio.wait({pulling})


# -- the end ----------------------------------------------------------------------------------


async def pour(source: Any) -> None:
    """Send again and again until the task is cancelled."""
    handles = []
    try:
        while True:
            handles.append(source.send_nowait(source.it))
            await asyncio.sleep(0.001)
    finally:
        await asyncio.gather(*handles, return_exceptions=True)


@pytest.mark.parametrize("stored", [False, True])
async def test_closing_with_everything_under_way_leaves_nothing(
    stored: bool, tmp_path: Path
) -> None:
    server = WeightServer(URL, store=tmp_path if stored else None)
    await server.start()
    async with (
        trainer(server, reconnect=0) as source,
        trainer(server, "big", reconnect=0) as big,
        worker(server, reconnect=0, initial=False) as scheme,
        worker(server, "big", model=medium(), reconnect=0, initial=False),
    ):
        big.it = medium()
        tasks = [
            asyncio.ensure_future(pour(source)),
            asyncio.ensure_future(pour(big)),
            asyncio.ensure_future(WeightClient(server.url).pull("nothing", timeout=PATIENCE)),
        ]
        await scheme.wait_for_version(5)
        strangers = [await asyncio.open_connection(*address(server)) for _ in range(3)]
        tasks.append(asyncio.ensure_future(WeightClient(server.url).status()))
        async with asyncio.timeout(PATIENCE / 2):
            await server.aclose()
            await server.aclose()
            await server.wait_closed()
        assert "closed" in repr(server)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _, writer in strangers:
            writer.close()
            await writer.wait_closed()
    for task in tasks:
        if not task.cancelled():
            task.exception()


def address(server: WeightServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_second_close_ends_with_the_first(
    cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStore(monkeypatch)
    server = WeightServer(URL, store=tmp_path)
    await server.start()
    async with trainer(server, reconnect=0) as source:
        handle = source.send_nowait(source.it)
        await until(lambda: slow.versions == [1])
        first = asyncio.ensure_future(server.aclose())
        await until(lambda: "closed" in repr(server))
        second = asyncio.ensure_future(server.aclose())
        if cancelled:
            first.cancel()
        else:
            assert not (await asyncio.wait({first, second}, timeout=0.1))[0]
            slow.go()
        async with asyncio.timeout(PATIENCE / 2):
            await asyncio.wait({first})
            assert first.cancelled() is cancelled
            await second
            await server.wait_closed()
            await server.aclose()
        stored = WeightStore(tmp_path).load("policy")
        assert (stored is None) is cancelled
        slow.go()
        with contextlib.suppress(PartialSyncError):
            await handle


async def test_a_server_that_never_started_can_be_closed() -> None:
    server = WeightServer(URL)
    with pytest.raises(LocalProtocolError, match="not started"):
        await server.wait_closed()
    await server.aclose()
    with pytest.raises(LocalProtocolError, match="only once"):
        await server.start()

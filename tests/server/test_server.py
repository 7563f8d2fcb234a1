"""The weight server in one process with its trainers and workers, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.errors import (
    ApplyError,
    ConfigError,
    ConnectTimeout,
    LocalProtocolError,
    PartialSyncError,
    RemoteProtocolError,
)
from aiosync.schemes._handshake import ANY_STRATEGY
from aiosync.server import StoreError, WeightClient, WeightServer, WeightStore
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Fetch, Hello, Refuse, encode_values
from tests._certificates import without_certificate
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import fill, filled, linear, medium
from tests.server._tools import URL, answer, described, dialled, send, trainer, worker

pytestmark = pytest.mark.asyncio


# -- models and who brings them ---------------------------------------------------------------


async def test_each_model_has_versions_of_its_own() -> None:
    async with (
        WeightServer(URL) as server,
        trainer(server, "actor") as actor,
        trainer(server, "critic") as critic,
        worker(server, "actor") as one,
        worker(server, "critic") as two,
    ):
        for value in (1.0, 2.0, 3.0):
            await send(actor, value)
        await send(critic, 9.0)
        assert await one.wait_for_version(3) == 3
        assert await two.wait_for_version(1) == 1
        assert filled(one.it, 3.0)
        assert filled(two.it, 9.0)
        assert [each["model_id"] for each in server.status()["models"]] == ["actor", "critic"]
        assert described(server, "actor")["epoch"] == actor._clock.epoch
        assert described(server, "critic")["epoch"] == critic._clock.epoch


async def test_a_trainer_that_restarts_is_a_new_epoch_and_workers_keep_their_links() -> None:
    async with WeightServer(URL) as server, worker(server) as scheme:
        for epoch in range(3):
            async with trainer(server) as source:
                for number in range(3 - epoch):  # the new epoch has fewer versions than the old
                    await send(source, 10.0 * epoch + number)
                last = 10.0 * epoch + 2 - epoch
                await until(lambda last=last: filled(scheme.it, last))  # type: ignore[misc]
                assert scheme._receiver.inbox.version == 3 - epoch
                assert described(server)["epoch"] == source._clock.epoch
            await until(lambda: described(server)["trainer"] is None)
        assert scheme.reconnects == 0
        await until(lambda: described(server)["workers"][0]["version"] == 1)
        assert described(server)["workers"][0]["lag"] == 0


async def test_a_second_trainer_is_refused_until_the_first_has_gone() -> None:
    async with WeightServer(URL) as server:
        async with trainer(server) as first:
            await send(first, 1.0)
            async with dialled(server, "sender") as link:
                refusal = await answer(link)
                assert isinstance(refusal, Refuse)
                assert refusal.error_type == "ConfigError"
                assert "is already pushing model 'policy'" in refusal.error_text
            await send(first, 2.0)
            assert server.status()["ended"]["ConfigError"] == 1
        async with trainer(server) as second:
            await send(second, 3.0)
            assert described(server)["epoch"] == second._clock.epoch


async def test_workers_may_come_before_the_trainer() -> None:
    async with WeightServer(URL) as server, worker(server) as early:
        assert early._receiver.inbox.version == 0
        assert described(server)["version"] == 0
        async with trainer(server) as source:
            await send(source, 1.0)
            await early.wait_for_version(1)
            assert filled(early.it, 1.0)
            async with worker(server) as late:  # gets what is there with the welcome
                assert filled(late.it, 1.0)
                assert {each["worker_idx"] for each in described(server)["workers"]} == {0, 1}


async def test_a_worker_of_another_strategy_is_refused() -> None:
    async with WeightServer(URL) as server, trainer(server, strategy="state_dict") as source:
        await send(source, 1.0)
        with pytest.raises(ConfigError, match=r"the sender's strategy is 'state_dict'"):
            async with worker(server, strategy="tensordict"):
                pass
        async with worker(server, strategy="state_dict") as fits:
            assert filled(fits.it, 1.0)


async def test_the_strategy_that_counts_is_that_of_the_trainer() -> None:
    async with WeightServer(URL) as server:
        # Somebody who takes any is there first.
        async with dialled(server, "receiver", strategy=ANY_STRATEGY) as link:
            await answer(link)
            async with trainer(server, strategy="state_dict") as source:
                await send(source, 1.0)
                assert described(server)["strategy"] == "state_dict"
                with pytest.raises(ConfigError, match="the sender's strategy is 'state_dict'"):
                    async with worker(server, strategy="tensordict"):
                        pass


async def test_weights_of_any_strategy_are_for_every_worker() -> None:
    async with (
        WeightServer(URL) as server,
        worker(server, strategy="state_dict") as one,
    ):
        source = aiosync.TCPWeightSyncScheme(server.url, "state_dict", dial="both")
        source.strategy_str = ANY_STRATEGY
        source.init_on_sender()
        model = linear()
        fill(model, 5.0)
        async with source:
            await source.connect()
            await source.send(model.state_dict())
            await one.wait_for_version(1)
            async with worker(server, strategy="tensordict") as two:
                assert filled(one.it, 5.0)
                assert filled(two.it, 5.0)


async def test_only_the_models_that_are_listed_are_served() -> None:
    async with WeightServer(URL, model_ids=["actor"]) as server:
        with pytest.raises(ConfigError, match="does not serve model 'policy'; it serves: actor"):
            async with worker(server):
                pass
        async with dialled(server, "sender") as link:
            assert isinstance(await answer(link), Refuse)
        async with trainer(server, "actor") as source, worker(server, "actor") as scheme:
            await send(source, 1.0)
            await scheme.wait_for_version(1)
        assert server.status()["model_ids"] == ["actor"]
        assert len(server.status()["models"]) == 1


async def test_there_are_at_most_so_many_models() -> None:
    async with (
        WeightServer(URL, max_models=2) as server,
        trainer(server, "a") as source,
        worker(server, "b"),
    ):
        await send(source, 1.0)
        with pytest.raises(ConfigError, match="has 2 models and accepts no more"):
            async with worker(server, "c"):
                pass


async def test_models_that_nobody_uses_do_not_count() -> None:
    async with WeightServer(URL, max_models=2) as server, trainer(server, "a") as source:
        await send(source, 1.0)
        for name in ("typo", "typpo", "tyypo"):
            async with worker(server, name):
                pass
            await until(lambda name=name: not described(server, name)["workers"])  # type: ignore[misc]
        async with trainer(server, "b") as other:
            await send(other, 2.0)
        assert [each["model_id"] for each in server.status()["models"]] == ["a", "b"]


# -- who asks, and who gets everything --------------------------------------------------------


async def test_pulls_and_subscriptions_side_by_side() -> None:
    async with (
        WeightServer(URL) as server,
        trainer(server) as source,
        worker(server) as subscriber,
        worker(server, subscribe=False) as puller,
    ):
        await send(source, 1.0)
        await subscriber.wait_for_version(1)
        assert filled(puller.it, -1.0)
        assert await puller.pull() == 1
        assert filled(puller.it, 1.0)
        waiting = asyncio.ensure_future(puller.pull(min_version=3))
        for value in (2.0, 3.0, 4.0):
            await send(source, value)
        assert await waiting in (3, 4)
        await subscriber.wait_for_version(4)
        assert await puller.pull() == 4
        assert filled(puller.it, 4.0) and filled(subscriber.it, 4.0)
        pulled = await WeightClient(server.url).pull()
        assert pulled.version == 4
        assert pulled.epoch == source._clock.epoch
        assert all(bool((each == 4.0).all()) for each in pulled.mapping().values())
        assert await puller.pull() == 4  # nothing newer: the answer is a word


async def test_a_pull_waits_for_the_first_version() -> None:
    async with WeightServer(URL) as server:
        pull = asyncio.ensure_future(WeightClient(server.url).pull(timeout=PATIENCE))
        await until(lambda: bool(server.status()["models"]))
        async with trainer(server) as source:
            await send(source, 7.0)
        assert (await pull).version == 1


# -- the store --------------------------------------------------------------------------------


async def test_a_restarted_server_goes_on_with_what_it_had(tmp_path: Path) -> None:
    async with WeightServer(URL, store=tmp_path / "store") as server:
        async with trainer(server, "a") as one, trainer(server, "b", "state_dict") as two:
            for value in (1.0, 2.0):
                await send(one, value)
            await send(two, 3.0)
            epochs = {"a": one._clock.epoch, "b": two._clock.epoch}
    async with WeightServer(URL, store=tmp_path / "store") as server:
        assert {each["model_id"]: each["epoch"] for each in server.status()["models"]} == epochs
        async with worker(server, "a") as scheme, worker(server, "b", "state_dict") as other:
            assert filled(scheme.it, 2.0) and scheme._receiver.inbox.version == 2
            assert filled(other.it, 3.0)


async def test_a_trainer_does_not_repeat_what_a_restarted_server_has(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'socket'}"
    first = WeightServer(url, store=tmp_path / "store")
    await first.start()
    async with trainer(url) as source, worker(url) as scheme:
        await send(source, 1.0)
        before = source._sender.peers[0]
        await first.aclose()
        async with WeightServer(url, store=tmp_path / "store") as second:
            await until(lambda: source._sender.peers.get(0) not in (None, before))
            await until(lambda: bool(described(second)["workers"]))
            assert (await send(source, 2.0)).version == 2
            await scheme.wait_for_version(2)
            assert described(second)["updates"] == 1  # version 1 came from the disk alone
            await until(lambda: described(second)["workers"][0]["lag"] == 0)


async def test_a_damaged_store_is_an_error_at_the_start(tmp_path: Path) -> None:
    async with WeightServer(URL, store=tmp_path) as server, trainer(server) as source:
        await send(source, 1.0)
    path = tmp_path / "policy.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    server = WeightServer(URL, store=tmp_path)
    with pytest.raises(StoreError, match=r"policy\.safetensors.*checksum"):
        await server.start()
    with pytest.raises(LocalProtocolError):
        await server.start()


@contextlib.contextmanager
def without(store: Path) -> Iterator[None]:
    """The directory of a store is gone meanwhile: whatever is written there fails."""
    away = store.with_name("away")
    store.rename(away)
    try:
        yield
    finally:
        away.rename(store)


async def test_a_version_that_the_disk_refused_is_not_served(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with (
        WeightServer(URL, store=store) as server,
        trainer(server) as source,
        worker(server) as scheme,
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
            assert f"version 2 of epoch {source._clock.epoch}: " in told["refusal"]
            assert "No such file or directory" in told["refusal"]
            pulled = await WeightClient(server.url).pull()
            assert pulled.version == 1
            assert all(bool((each == 1.0).all()) for each in pulled.mapping().values())
            async with worker(server) as late:
                assert filled(late.it, 1.0)
            assert scheme.version == 1 and filled(scheme.it, 1.0)
        await send(source, 3.0)
        await scheme.wait_for_version(3)
        assert filled(scheme.it, 3.0)
        told = described(server)
        assert (told["version"], told["refused"], told["refusal"]) == (3, 1, None)
        stored = server._store.load("policy")  # type: ignore[union-attr]
        assert stored is not None and stored.version == 3


async def test_what_a_refused_trainer_would_have_served_is_forgotten(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with WeightServer(URL, store=store) as server:
        async with trainer(server, strategy="state_dict") as first:
            await send(first, 1.0)
        epoch = described(server)["epoch"]
        pushed = aiosync.TCPWeightSyncScheme(server.url, "state_dict", dial="both")
        pushed.strategy_str = ANY_STRATEGY
        pushed.init_on_sender()
        async with pushed:
            await pushed.connect()
            with without(store), pytest.raises(PartialSyncError):
                await pushed.send(linear().state_dict())
        await until(lambda: described(server)["trainer"] is None)
        told = described(server)
        assert (told["epoch"], told["version"], told["strategy"]) == (epoch, 1, "state_dict")
        with pytest.raises(ConfigError, match="the sender's strategy is 'state_dict'"):
            async with worker(server, strategy="tensordict"):
                pass


async def test_versions_that_waited_are_refused_with_the_one_that_replaced_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStore(monkeypatch)
    store = tmp_path / "store"
    async with WeightServer(URL, store=store) as server, trainer(server) as source:
        handles = []
        for number in range(1, 5):
            handles.append(source.send_nowait(source.it))
            await until(lambda number=number: described(server)["updates"] == number)  # type: ignore[misc]
        with without(store):
            slow.go()
            async with asyncio.timeout(PATIENCE):
                for handle in handles:
                    with pytest.raises(PartialSyncError, match="No such file or directory"):
                        await handle
        assert slow.versions == [1, 4]


async def test_what_the_disk_refused_is_not_called_known(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with WeightServer(URL, store=store) as server, trainer(server) as source:
        with without(store), pytest.raises(PartialSyncError):
            await send(source, 1.0)
        server._models["policy"]._trainer.abort()  # type: ignore[union-attr]
        await until(lambda: source._sender.peers == {})
        await until(lambda: bool(source._sender.peers))
        await source.wait_for_version(1)  # the trainer offers it again
        stored = server._store.load("policy")  # type: ignore[union-attr]
        assert stored is not None and stored.version == 1
        assert described(server)["version"] == 1


async def test_a_model_whose_first_version_is_being_written_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStore(monkeypatch)
    async with WeightServer(URL, store=tmp_path, max_models=1) as server:
        async with trainer(server, reconnect=0) as source:
            handle = source.send_nowait(source.it)
            await until(lambda: bool(slow.versions))
        with contextlib.suppress(aiosync.AiosyncError):
            await handle
        await until(lambda: described(server)["trainer"] is None)
        with pytest.raises(ConfigError, match="has 1 models and accepts no more"):
            async with worker(server, "another"):
                pass
        slow.go()
        await until(lambda: described(server)["version"] == 1)


async def test_a_restarted_server_knows_how_old_a_version_is(tmp_path: Path) -> None:
    async with WeightServer(URL, store=tmp_path) as server, trainer(server) as source:
        await send(source, 1.0)
    written = os.stat(tmp_path / "policy.safetensors").st_mtime - 3600
    os.utime(tmp_path / "policy.safetensors", (written, written))
    async with WeightServer(URL, store=tmp_path) as server:
        assert described(server)["updated_at"] == pytest.approx(written)
        async with trainer(server) as source:
            await send(source, 2.0)
        assert described(server)["updated_at"] > written + 3000


class SlowStore:
    """Holds every save until :meth:`go`, and notes the versions."""

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
        worker(server) as scheme,
    ):
        handles = []
        for number in range(1, 7):
            fill(source.it, float(number))
            handles.append(source.send_nowait(source.it))
            await until(lambda number=number: described(server)["updates"] == number)  # type: ignore[misc]
        assert slow.versions == [1]
        assert not any(handle.done() for handle in handles)
        assert described(server)["version"] == 0  # what is not on disk yet may be refused
        slow.go()
        reports = [await handle for handle in handles]
        assert slow.versions == [1, 6]
        assert reports[0].acked and reports[5].acked
        assert [dict(report.skipped) for report in reports[1:5]] == [{0: 6}] * 4
        stored = server._store.load("policy")  # type: ignore[union-attr]
        assert stored is not None and stored.version == 6
        await scheme.wait_for_version(6)


# -- the status -------------------------------------------------------------------------------


async def test_the_status_is_plain_and_has_no_secret() -> None:
    token = "a very secret token"
    async with (
        WeightServer(URL, token=token) as server,
        trainer(server, token=token) as source,
        worker(server, token=token) as scheme,
    ):
        with pytest.raises(aiosync.AuthError):
            await WeightClient(server.url, token="wrong").status()
        await send(source, 1.0)
        await scheme.wait_for_version(1)
        await until(lambda: described(server)["workers"][0]["version"] == 1)
        told = await WeightClient(server.url, token=token).status()
        assert token not in json.dumps(told)
        assert encode_values(told) == told
        assert told["refused"] == {"AuthError": 1}
        assert told["url"] == server.url
        (model,) = told["models"]
        assert (model["model_id"], model["version"], model["tensors"]) == ("policy", 1, 2)
        assert model["trainer"].startswith("127.0.0.1:")
        (row,) = model["workers"]
        assert (row["worker_idx"], row["version"], row["lag"]) == (0, 1, 0)
        assert row["sent_nbytes"] == model["nbytes"] > 0
        assert row["name"].startswith("127.0.0.1:")


async def test_a_worker_with_small_limits_says_why_it_gave_up() -> None:
    async with WeightServer(URL) as server, trainer(server) as source:
        await send(source, 1.0)
        limits = aiosync.Limits(max_payload_nbytes=64)
        scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", limits=limits)
        scheme.init_on_receiver("policy", model=linear())
        async with scheme:
            with pytest.raises(ConnectTimeout, match="at most 64 are allowed") as caught:
                await scheme.connect(timeout=1.0)
            assert isinstance(caught.value.__cause__, RemoteProtocolError)


@pytest.mark.parametrize("limit", ["max_payload_nbytes", "max_tensors"])
async def test_a_trainer_is_told_what_is_beyond_the_limits_of_the_server(limit: str) -> None:
    limits = aiosync.Limits(**{limit: 1 if limit == "max_tensors" else 64})
    async with WeightServer(URL, limits=limits) as server, trainer(server) as source:
        with pytest.raises(PartialSyncError, match="ended the link: .*at most (64|1) "):
            await send(source, 1.0)
        await until(lambda: sum(server.status()["ended"].values()) >= 1)


async def test_a_peer_that_talks_nonsense_ends_its_own_link_only() -> None:
    async with WeightServer(URL) as server, trainer(server) as source:
        for role in ("dancer", "sender"):
            async with dialled(server, role, model_id="other") as link:
                if role == "sender":
                    assert isinstance(await answer(link), Hello)
                    await link.send(Fetch(1))
                with pytest.raises(aiosync.TransportError):
                    while True:
                        await answer(link)
        async with await TCPTransport.connect(server.url) as link:
            await link.send(Fetch(1))
            with pytest.raises(aiosync.TransportError):
                await answer(link)
        await send(source, 1.0)
        assert server.status()["ended"]["RemoteProtocolError"] == 3


# -- the end ----------------------------------------------------------------------------------


async def forever(source: Any) -> None:
    value = 0.0
    while True:
        value += 1
        try:
            await send(source, value)
        except (PartialSyncError, aiosync.TransportError):
            return


@pytest.mark.parametrize("stored", [False, True])
async def test_closing_with_everything_under_way_leaves_nothing(
    stored: bool, tmp_path: Path
) -> None:
    server = WeightServer(URL, store=tmp_path if stored else None)
    await server.start()
    async with (
        trainer(server, reconnect=0) as source,
        trainer(server, "big", reconnect=0) as big,
        worker(server, reconnect=0) as scheme,
        worker(server, "big", model=medium(), reconnect=0),
    ):
        big.it = medium()
        tasks = [
            asyncio.ensure_future(forever(source)),
            asyncio.ensure_future(forever(big)),
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
        for task in tasks[2:]:
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


async def test_a_trainer_that_never_pauses_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = WeightStore.save
    versions: list[int] = []

    def slow(store: WeightStore, model_id: str, update: Any, *args: Any) -> None:
        versions.append(update.version)
        threading.Event().wait(0.02)  # long enough for the next version to come
        save(store, model_id, update, *args)

    monkeypatch.setattr(WeightStore, "save", slow)
    server = WeightServer(URL, store=tmp_path)
    await server.start()
    async with trainer(server, reconnect=0) as source:
        handles = []

        async def pour() -> None:
            with contextlib.suppress(aiosync.AiosyncError):  # the server has ended
                while True:
                    handles.append(source.send_nowait(source.it))
                    await asyncio.sleep(0.001)

        pouring = asyncio.ensure_future(pour())
        await until(lambda: len(versions) > 3)
        saved = len(versions)
        async with asyncio.timeout(PATIENCE / 2):
            await server.aclose()
        assert len(versions) <= saved + 3  # what was being saved, what waited, and no more
        pouring.cancel()
        await asyncio.wait({pouring})
    for handle in handles:
        with contextlib.suppress(aiosync.AiosyncError):
            await handle
    stored = WeightStore(tmp_path).load("policy")
    assert stored is not None and stored.version == versions[-1]


async def test_nobody_new_is_served_while_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStore(monkeypatch)
    server = WeightServer(URL, store=tmp_path)
    await server.start()
    async with (
        trainer(server, reconnect=0) as source,
        await TCPTransport.connect(server.url) as link,
    ):
        await until(lambda: server.status()["accepted"] == 2)
        sending = asyncio.ensure_future(send(source, 1.0))
        await until(lambda: bool(slow.versions))
        closing = asyncio.ensure_future(server.aclose())
        await asyncio.sleep(0)  # it waits for the disk now
        await link.send(Hello(role="receiver", model_id="another", pid=1))
        with pytest.raises(aiosync.PeerClosed):
            await answer(link)
        assert not closing.done()
        slow.go()
        await closing
        assert len(server.status()["models"]) == 1
        assert (await sending).version == 1  # what was on its way to the disk is answered


async def test_a_link_that_came_last_is_closed_as_well() -> None:
    server = WeightServer(URL)
    await server.start()
    async with TCPTransport.pair() as (mine, theirs):
        server._on_link(theirs)  # and its task never gets to run
        await server.aclose()
        await until(lambda: theirs.channel.ended)
        with pytest.raises(aiosync.TransportError):
            await answer(mine)


async def test_a_server_that_never_started_can_be_closed() -> None:
    server = WeightServer(URL)
    with pytest.raises(LocalProtocolError, match="not started"):
        await server.wait_closed()
    await server.aclose()
    with pytest.raises(LocalProtocolError, match="only once"):
        await server.start()


async def test_a_context_of_the_other_side_is_refused_at_once() -> None:
    for context, text in (
        (ssl.create_default_context(), "for the side that dials"),
        (without_certificate(), "no certificate to show"),
    ):
        with pytest.raises(ConfigError, match=text):
            WeightServer(URL, tls=context)
        scheme = aiosync.TCPWeightSyncScheme(URL, tls=context)
        with pytest.raises(ConfigError, match=text):
            scheme.init_on_sender(model=linear())


async def test_a_changed_layout_reaches_everybody() -> None:
    async with (
        WeightServer(URL) as server,
        trainer(server) as source,
        worker(server, strategy="tensordict") as scheme,
    ):
        await send(source, 1.0)
        await scheme.wait_for_version(1)
        source.it = nn.Linear(8, 3)
        with torch.no_grad():
            await send(source, 2.0)
        async with worker(server, model=nn.Linear(8, 3)) as other:
            assert filled(other.it, 2.0)
        assert filled(scheme.it, 1.0)  # it does not fit there
        assert described(server)["nbytes"] > 0


async def test_limits_that_are_raised_hold_from_the_trainer_to_the_store(tmp_path: Path) -> None:
    limits = aiosync.Limits(max_name_nbytes=4096, max_ndim=40)
    long, deep = "n" * 3000, (1,) * 35
    weights = {long: torch.ones(2, dtype=torch.float64), "deep": torch.ones(deep)}
    for wire_dtype in (None, torch.float32):
        options: dict[str, Any] = {"limits": limits, "wire_dtype": wire_dtype}
        async with WeightServer(URL, store=tmp_path, limits=limits) as server:
            scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", **options)
            scheme.init_on_sender(model_id="policy", weights=weights)
            async with scheme:
                await scheme.connect(timeout=PATIENCE)
        async with WeightServer(URL, store=tmp_path, limits=limits) as server:
            pulled = await WeightClient(server.url, limits=limits).pull(timeout=PATIENCE)
            mapping = pulled.mapping()
            assert mapping[long].dtype is (wire_dtype or torch.float64)
            assert mapping["deep"].shape == deep


async def test_a_sender_keeps_to_limits_that_are_lower() -> None:
    scheme = aiosync.TCPWeightSyncScheme(URL, limits=aiosync.Limits(max_tensors=1))
    scheme.init_on_sender(weights={"a": torch.ones(2), "b": torch.ones(2)})
    async with scheme:
        with pytest.raises(ConfigError, match="2 tensors; at most 1"):
            await scheme.connect(timeout=PATIENCE)

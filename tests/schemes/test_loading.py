"""Functions in the place of models, transforms, and updates that are staged but not applied."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import CancelledError

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models


def _free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


every = pytest.mark.parametrize(
    "make",
    [*harness.SCHEMES, lambda **options: aiosync.TCPWeightSyncScheme(_free_address(), **options)],
    ids=["pipe", "shared", "tcp"],
)


class Engine:
    """Loads weights in a way of its own."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.loads = 0
        self.error: Exception | None = None
        self.thread = ""

    def load(self, weights) -> None:
        self.loads += 1
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error
        self.weights = {name: tensor.clone() for name, tensor in weights}


def here(scheme, source, receiver):
    return harness.here(scheme, None, sender={"model": source}, receiver=receiver)


@every
@pytest.mark.asyncio
async def test_a_function_gets_every_version(make) -> None:
    source, engine = models.linear(), Engine()
    scheme = make(guard="reading")
    async with here(scheme, source, {"load": engine.load}) as (sender, receiver):
        assert set(engine.weights) == {"weight", "bias"}
        for value in (2.0, 3.0, 4.0):
            models.fill(source, value)
            report = await sender.send()
            assert receiver.version == report.version
            assert all((each == value).all() for each in engine.weights.values())
        assert engine.loads == 4


@every
@pytest.mark.asyncio
async def test_what_a_function_keeps_is_never_written_to(make) -> None:
    source = models.linear()
    kept: list[torch.Tensor] = []
    scheme = make(guard="reading")
    init = {"load": lambda weights: kept.append(dict(weights)["weight"])}
    async with here(scheme, source, init) as (sender, _):
        for value in range(1, 8):
            models.fill(source, float(value))
            await sender.send()
        assert [each.unique().tolist() for each in kept] == [[float(v)] for v in [-1, *range(1, 8)]]
        kept.clear()


@every
@pytest.mark.asyncio
async def test_a_function_that_raises_refuses_the_update(make) -> None:
    source, engine = models.linear(), Engine()
    async with here(make(guard="reading"), source, {"load": engine.load}) as (sender, receiver):
        engine.error = KeyError("no layer of that name")
        with pytest.raises(aiosync.PartialSyncError, match="no layer of that name"):
            await sender.send()
        assert receiver.version == 1
        engine.error = None
        models.fill(source, 5.0)
        report = await sender.send()
        assert receiver.version == report.version == 3
        assert (engine.weights["bias"] == 5.0).all()


@pytest.mark.asyncio
async def test_a_function_gets_tied_tensors_under_each_name_and_no_other_values() -> None:
    engine = Engine()
    scheme = aiosync.SharedMemWeightSyncScheme(guard="reading")
    async with here(scheme, models.Tied(), {"load": engine.load}) as (sender, _):
        names = set(models.Tied().state_dict())
        assert set(engine.weights) == names
        with pytest.raises(aiosync.PartialSyncError, match="also has other values: extra"):
            await sender.send({**{n: torch.zeros(2) for n in names}, "extra": 7})


def test_options_that_exclude_each_other() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme(guard="reading")
    with pytest.raises(aiosync.ConfigError, match="load cannot be provided"):
        scheme.init_on_receiver(model=nn.Linear(2, 2), load=print)
    with pytest.raises(aiosync.ConfigError, match="load must be a function"):
        scheme.init_on_receiver(load=7)
    with pytest.raises(aiosync.ConfigError, match="transform must be callable"):
        scheme.init_on_receiver(model=nn.Linear(2, 2), transform=7)
    with pytest.raises(aiosync.ConfigError, match="no forward pass to guard"):
        aiosync.SharedMemWeightSyncScheme().init_on_receiver(load=print)


@every
@pytest.mark.asyncio
async def test_staged_and_applied_by_hand(make) -> None:
    source, engine = models.linear(), Engine()
    async with here(make(apply="manual"), source, {"load": engine.load}) as (sender, receiver):
        assert receiver.staged_version == 0
        models.fill(source, 2.0)
        handle = sender.send_nowait()
        assert await sender.wait_staged(handle.version) == handle.version
        assert await receiver.wait_staged(handle.version) == handle.version
        assert receiver.staged_version == handle.version
        assert receiver.version == 1
        assert not handle.done()
        assert (engine.weights["weight"] == -1.0).all()
        assert receiver.apply_pending() == handle.version
        await handle
        assert (engine.weights["weight"] == 2.0).all()
        assert receiver.staged_version == 0
        assert (
            await receiver.wait_staged(handle.version) == handle.version
        )  # applied: more than staged
        with pytest.raises(aiosync.RecvTimeout, match="version 9 was not complete"):
            await receiver.wait_staged(9, timeout=0.01)
        with pytest.raises(aiosync.RecvTimeout, match="version 9 was not complete"):
            await sender.wait_staged(9, timeout=0.01)


@every
@pytest.mark.asyncio
async def test_waiting_for_what_a_worker_refuses_or_takes_to_its_grave(make) -> None:
    source = models.linear()
    refuse = threading.Event()

    def transform(weights):
        if refuse.is_set():
            raise RuntimeError("not this one")
        return weights

    scheme = make(apply="manual")
    init = {"model": models.linear(), "transform": transform}
    async with here(scheme, source, init) as (sender, receiver):
        refuse.set()
        handle = sender.send_nowait()
        with pytest.raises(aiosync.PartialSyncError, match="not this one"):
            await sender.wait_staged(handle.version)
        with pytest.raises(aiosync.PartialSyncError, match="not this one"):
            await handle
        with pytest.raises(aiosync.ApplyError, match="not this one"):
            await receiver.wait_staged(handle.version)
        refuse.clear()
        handle = sender.send_nowait()
        await sender.wait_staged(handle.version)
        waiting = asyncio.ensure_future(sender.wait_staged(handle.version + 1, timeout=30))
        await asyncio.sleep(0)
        await sender.aclose()
        with pytest.raises(aiosync.TransportClosed):
            await waiting
        with pytest.raises(aiosync.AiosyncError):
            await handle


@every
@pytest.mark.asyncio
async def test_a_transform_renames_casts_and_merges(make) -> None:
    source = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2))
    target = nn.Linear(4, 4).bfloat16()
    threads = set()

    def fuse(weights):
        threads.add(threading.current_thread().name)
        found = dict(weights)
        for name in ("weight", "bias"):
            parts = [found[f"0.{name}"], found[f"1.{name}"]]
            yield name, torch.cat(parts).to(torch.bfloat16)

    async with here(make(), source, {"model": target, "transform": fuse}) as (sender, receiver):
        for value in (1.5, 2.5, 3.5):
            models.fill(source[0], value)
            models.fill(source[1], -value)
            report = await sender.send()
            assert receiver.version == report.version
            for parameter in target.parameters():
                assert parameter.dtype is torch.bfloat16
                assert parameter.flatten()[0] == value
                assert parameter.flatten()[-1] == -value
        assert all("aiosync-mapping" in name for name in threads)
        assert threading.current_thread().name not in threads
    assert not [each for each in threading.enumerate() if "mapping" in each.name]


@every
@pytest.mark.asyncio
async def test_what_was_transformed_shares_no_memory_with_what_comes(make) -> None:
    source, target = models.linear(), models.linear()
    init = {"model": target, "transform": lambda weights: weights}
    async with here(make(), source, init) as (sender, _):
        kept = []
        for value in range(6):
            models.fill(source, float(value))
            await sender.send()
            kept.append((value, target.weight.data))
        assert all((tensor == value).all() for value, tensor in kept)
        kept.clear()


@pytest.mark.asyncio
async def test_a_transform_may_give_something_else_each_time() -> None:
    source, engine = models.linear(), Engine()
    results = iter(
        [
            [("a", torch.ones(3))],
            [("a", torch.ones(3)), ("b", torch.ones(2, 2, dtype=torch.int64))],
            [("a", torch.full((3,), 2.0)), ("b", torch.zeros(2, 2, dtype=torch.int64))],
            [("a", torch.full((3,), 4.0)), ("c", torch.zeros(0)), ("d", torch.ones(4)[::2])],
            [],
        ]
    )
    scheme = aiosync.SharedMemWeightSyncScheme(guard="reading")
    init = {"load": engine.load, "transform": lambda _: next(results)}
    async with here(scheme, source, init) as (sender, receiver):
        assert {name: t.tolist() for name, t in engine.weights.items()} == {"a": [1.0] * 3}
        await sender.send()
        assert engine.weights["b"].tolist() == [[1, 1], [1, 1]]
        await sender.send()
        assert engine.weights["a"].tolist() == [2.0] * 3
        assert engine.weights["b"].tolist() == [[0, 0], [0, 0]]
        await sender.send()
        assert {name: t.tolist() for name, t in engine.weights.items()} == {
            "a": [4.0] * 3, "c": [], "d": [1.0, 1.0],
        }  # fmt: skip
        await sender.send()
        assert engine.weights == {}
        with pytest.raises(aiosync.PartialSyncError, match="StopIteration|generator"):
            await sender.send()
        assert receiver.version == 5


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' twice"),
        ([("a", 7)], "pairs of a name and a tensor"),
        (7, "not iterable"),
        ([("a", torch.ones(1).to_sparse())], "parse"),
    ],
)
@pytest.mark.asyncio
async def test_results_that_are_no_weights(result, text) -> None:
    source, target = models.linear(), models.linear()
    good = threading.Event()
    good.set()
    init = {"model": target, "transform": lambda w: w if good.is_set() else result}
    scheme = aiosync.SharedMemWeightSyncScheme()
    async with here(scheme, source, init) as (sender, receiver):
        good.clear()
        with pytest.raises(aiosync.PartialSyncError, match=text):
            await sender.send()
        good.set()
        models.fill(source, 3.0)
        await sender.send()
        assert models.filled(target, 3.0)
        assert receiver.version == 3


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_a_transform_works_and_the_newest_wins() -> None:
    source, target = models.linear(), models.linear()
    started, go_on = threading.Event(), threading.Event()
    seen: list[float] = []

    def slow(weights):
        found = dict(weights)
        seen.append(float(found["bias"][0]))
        if len(seen) > 1:
            started.set()
            assert go_on.wait(30)
        return found.items()

    init = {"model": target, "transform": slow}
    async with here(aiosync.SharedMemWeightSyncScheme(), source, init) as (sender, receiver):
        handles = []
        for value in (1.0, 2.0, 3.0):
            models.fill(source, value)
            handles.append(sender.send_nowait())
        await asyncio.to_thread(started.wait, 30)
        turns = 0
        async with asyncio.timeout(30):
            while turns < 100:  # the loop is free
                await asyncio.sleep(0)
                turns += 1
        assert receiver.version == 1
        assert receiver.staged_version == 0
        go_on.set()
        assert (await handles[-1]).version == 4
        assert models.filled(target, 3.0)
        assert seen[-1] == 3.0


@pytest.mark.asyncio
async def test_closing_while_a_transform_works() -> None:
    source, target = models.linear(), models.linear()
    started, go_on = threading.Event(), threading.Event()

    def slow(weights):
        if not started.is_set() and go_on.is_set():
            started.set()
            assert threading.Event().wait(0.3) is False
        return weights

    init = {"model": target, "transform": slow}
    async with here(aiosync.SharedMemWeightSyncScheme(), source, init) as (sender, receiver):
        go_on.set()
        handle = sender.send_nowait()
        await asyncio.to_thread(started.wait, 30)
        await receiver.aclose()
        with pytest.raises(aiosync.PartialSyncError):
            await handle
        assert models.filled(target, -1.0)


@pytest.mark.asyncio
async def test_a_new_trainer_comes_while_a_version_of_the_old_one_is_transformed() -> None:
    address, source, target = _free_address(), models.linear(), models.linear()
    started, go_on = threading.Event(), threading.Event()

    def slow(weights):
        found = dict(weights)
        if (found["bias"] == 5.0).all():
            started.set()
            assert go_on.wait(30)
        return found.items()

    scheme = aiosync.TCPWeightSyncScheme(address, reconnect=None)
    async with harness.here(
        scheme, target, sender={"model": source}, receiver={"transform": slow}
    ) as (sender, receiver):
        models.fill(source, 5.0)
        handle = sender.send_nowait()
        await asyncio.to_thread(started.wait, 30)
        await sender.aclose()
        with pytest.raises(aiosync.TransportClosed):
            await handle
        models.fill(source, 9.0)
        again = aiosync.TCPWeightSyncScheme(address)
        again.init_on_sender(model=source)
        async with again:
            await again.connect()
            await harness.until(lambda: again.worker_versions == {0: 0})
            go_on.set()
            await again.wait_for_version(1)
            assert receiver.version == 1
            assert models.filled(target, 9.0)


@pytest.mark.parametrize("error", [asyncio.CancelledError, CancelledError, SystemExit])
@pytest.mark.asyncio
async def test_whatever_a_transform_raises_refuses_the_update(error) -> None:
    source, target = models.linear(), models.linear()
    raises = threading.Event()

    def transform(weights):
        if raises.is_set():
            raise error
        return weights

    init = {"model": target, "transform": transform}
    async with here(aiosync.SharedMemWeightSyncScheme(), source, init) as (sender, receiver):
        raises.set()
        with pytest.raises(aiosync.PartialSyncError, match=error.__name__):
            await sender.send()
        raises.clear()
        report = await sender.send()
        assert receiver.version == report.version


@pytest.mark.asyncio
async def test_waiting_for_what_a_refusing_worker_has_and_has_not() -> None:
    source, target = models.linear(), models.linear()
    refuse = threading.Event()

    def transform(weights):
        if refuse.is_set():
            raise RuntimeError("not this one")
        return weights

    init = {"model": target, "transform": transform}
    async with here(aiosync.SharedMemWeightSyncScheme(), source, init) as (sender, receiver):
        refuse.set()
        for _ in range(2):
            with pytest.raises(aiosync.PartialSyncError):
                await sender.send()
        assert await sender.wait_staged(1) == 1
        for version in (2, 3):
            with pytest.raises(aiosync.PartialSyncError, match="not this one"):
                await sender.wait_staged(version)
        refuse.clear()
        await sender.send()
        for version in (2, 3, 4):
            assert await sender.wait_staged(version) == 4
            assert await receiver.wait_staged(version) == 4
            assert await receiver.wait_for_version(version) == 4


@pytest.mark.asyncio
async def test_extra_states_pass_a_transform_by() -> None:
    class Counted(nn.Linear):
        extra: object = torch.full((2,), 1.001)

        def get_extra_state(self) -> object:
            return {"inner": self.extra}

        def set_extra_state(self, state: object) -> None:
            assert isinstance(state, dict)
            self.extra = state["inner"]

    source, target = Counted(2, 2), Counted(2, 2).bfloat16()
    source.extra = torch.full((2,), 2.003)
    init = {"model": target, "transform": aiosync.WeightMap(dtype=torch.bfloat16)}
    async with here(aiosync.SharedMemWeightSyncScheme(), source, init):
        assert target.weight.dtype is torch.bfloat16
        assert isinstance(target.extra, torch.Tensor)
        assert target.extra.dtype is torch.float32
        assert target.extra.tolist() == source.extra.tolist()


@pytest.mark.asyncio
async def test_the_link_of_a_receiver_that_looks_for_its_trainer() -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.TCPWeightSyncScheme(_free_address(), reconnect=None)
    async with harness.here(scheme, target, sender={"model": source}) as (sender, receiver):
        assert receiver.link_lost is None
        address = sender.address
        await sender.aclose()
        await harness.until(lambda: receiver.link_lost is not None)
        assert isinstance(receiver.link_lost, aiosync.TransportError)
        models.fill(source, 6.0)
        again = aiosync.TCPWeightSyncScheme(address)
        again.init_on_sender(model=source, num_workers=1)
        async with again:
            await again.connect()
            assert receiver.link_lost is None
            assert models.filled(target, 6.0)


def test_blocking_twins() -> None:
    source, engine = models.linear(), Engine()
    sender = aiosync.sync.TCPWeightSyncScheme(apply="manual")
    sender.init_on_sender(model=source)
    receiver = aiosync.sync.TCPWeightSyncScheme(sender.address, apply="manual")
    receiver.init_on_receiver(load=engine.load)
    with sender, receiver:
        sender.connect()
        receiver.connect()
        models.fill(source, 2.0)
        version = sender.send_async()
        assert sender.wait_staged(version, timeout=30) == version
        assert receiver.wait_staged(version, timeout=30) == version
        assert receiver.staged_version == version
        assert receiver.link_lost is None
        assert receiver.apply_pending() == version
        assert engine.thread == threading.current_thread().name
        sender.wait_async()
        assert (engine.weights["weight"] == 2.0).all()

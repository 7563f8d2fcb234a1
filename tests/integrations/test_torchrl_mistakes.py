"""What a TorchRL program may get wrong, or do elsewhere: it is said early, or it works."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")

from torchrl.modules import RandomPolicy

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import Collector, ask, collecting, seen

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM = aiosync.sync.SharedMemWeightSyncScheme
PIPE = aiosync.sync.MultiProcessWeightSyncScheme
TCP = aiosync.sync.TCPWeightSyncScheme
SCHEMES = [SHM, PIPE, TCP]

pytestmark = [
    pytest.mark.slow,
    # TorchRL says what its next versions will do; it is nothing that a scheme could change.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Fork the workers, which takes a tenth of a second; spawning them takes five."""
    with workers.start_method("fork"):
        yield


# -- buffers that are in no state dict --------------------------------------------------------


class Scaled(nn.Module):
    """Has a buffer that is in no state dict."""

    def __init__(self, value: float = 0.0, scale: float = 2.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((worlds.WIDTH,), value))
        self.register_buffer("scale", torch.full((worlds.WIDTH,), scale), persistent=False)
        self.register_buffer("nothing", None, persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value * self.scale + 0 * observation


def make_scaled(value: float = 0.0, scale: float = 2.0) -> TensorDictModule:
    return TensorDictModule(Scaled(value, scale), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("make", SCHEMES)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_state_dicts_and_a_buffer_that_is_in_none(make: Any, method: str) -> None:
    policy = make_scaled(1.0)
    scheme = make(strategy="state_dict")
    with workers.start_method(method), collecting(scheme, policy) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == [(2.0, 0)] * 2
        worlds.set_value(policy, 3.0)
        policy.module.scale.fill_(7.0)  # in no state dict: each side has its own from now on
        collector.update_policy_weights_()
        assert seen(next(batches)) == [(6.0, 1)] * 2
        scales = [ask(collector, idx, "policy.module.scale.tolist") for idx in range(2)]
        assert scales == [[2.0] * worlds.WIDTH] * 2


def test_such_a_buffer_that_cannot_be_brought_is_named() -> None:
    """Whoever gave the scheme its role did it before there was a collector to look into."""
    policy = make_scaled(1.0)
    scheme = SHM(strategy="state_dict", timeout=5.0)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    with scheme, pytest.raises(Exception, match=r"module\.scale.*strategy='tensordict'"):
        with collecting(scheme, policy):
            pass


# -- where an event loop runs, as in a notebook -----------------------------------------------


@pytest.mark.parametrize("make", SCHEMES)
def test_a_collector_made_and_used_where_an_event_loop_runs(make: Any) -> None:
    async def cell() -> None:
        policy = worlds.make_policy(1.0)
        with collecting(make(), policy) as collector:
            batches = iter(collector)
            assert seen(next(batches)) == [(1.0, 0)] * 2
            worlds.set_value(policy, 2.0)
            collector.update_policy_weights_()
            assert seen(next(batches)) == [(2.0, 1)] * 2
        await asyncio.sleep(0)

    asyncio.run(cell())


def test_a_collector_of_one_process_where_an_event_loop_runs() -> None:
    async def cell() -> None:
        scheme = SHM()
        collector = Collector(
            worlds.World,
            worlds.make_policy(1.0),
            frames_per_batch=4,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
        )
        collector.update_policy_weights_(worlds.make_policy(2.0))
        assert worlds.actions(next(iter(collector))).unique().tolist() == [2.0]
        scheme.send_async(worlds.make_policy(3.0))
        scheme.wait_async()
        collector.shutdown()
        scheme.shutdown()

    asyncio.run(cell())


def test_a_scheme_of_its_own_still_refuses_to_block_a_loop() -> None:
    async def program() -> None:
        with SHM() as scheme:
            scheme.init_on_sender(model=worlds.make_policy(1.0), num_workers=0)
            with pytest.raises(aiosync.LocalProtocolError, match="running event loop"):
                scheme.connect()

    asyncio.run(program())


def test_the_loop_of_the_schemes_is_never_blocked() -> None:
    """It would wait for itself for ever."""
    scheme = SHM()
    with collecting(scheme, worlds.make_policy(1.0)):
        held = scheme._lease
        assert held is not None

        async def inside() -> None:
            scheme.send()

        with pytest.raises(aiosync.LocalProtocolError, match="running event loop"):
            held.call(inside())


# -- the wrong class --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        aiosync.SharedMemWeightSyncScheme,
        aiosync.MultiProcessWeightSyncScheme,
        aiosync.TCPWeightSyncScheme,
        aiosync.NoWeightSyncScheme,
    ],
)
def test_the_async_class_names_its_blocking_twin(make: Any) -> None:
    started = time.monotonic()
    with pytest.raises(aiosync.ConfigError, match=rf"aiosync\.sync\.{make.__name__}"):
        with collecting(make(), worlds.make_policy(1.0)):
            pass
    assert time.monotonic() - started < workers.PATIENCE / 2
    with pytest.raises(aiosync.ConfigError, match=rf"aiosync\.sync\.{make.__name__}"):
        Collector(
            worlds.World,
            worlds.make_policy(1.0),
            frames_per_batch=4,
            total_frames=-1,
            weight_sync_schemes={"policy": make()},
        )


def test_the_blocking_twin_of_a_class_of_the_users_own_is_that_of_its_base() -> None:
    class Mine(aiosync.SharedMemWeightSyncScheme):
        pass

    with pytest.raises(aiosync.ConfigError, match=r"aiosync\.sync\.SharedMemWeightSyncScheme"):
        with collecting(Mine(), worlds.make_policy(1.0)):
            pass


def test_an_async_scheme_by_hand_beside_a_collector() -> None:
    """Only TorchRL's own calls would never be awaited."""

    async def program() -> None:
        collector = Collector(
            worlds.World, worlds.make_policy(1.0), frames_per_batch=4, total_frames=-1
        )
        async with aiosync.SharedMemWeightSyncScheme() as scheme:
            scheme.init_on_sender(model_id="policy", context=collector)
            await scheme.connect()
            await scheme.send()
        collector.shutdown()

    asyncio.run(program())


# -- a policy that is no module ---------------------------------------------------------------


class Constant:
    """A policy that is no module."""

    def __call__(self, data: Any) -> Any:
        return data.set("action", torch.ones(worlds.WIDTH))


@pytest.mark.parametrize("make", [*SCHEMES, aiosync.sync.DistributedWeightSyncScheme])
@pytest.mark.parametrize("kind", ["random", "callable"])
def test_a_policy_that_is_no_module_needs_no_scheme(make: Any, kind: str) -> None:
    policy: Any = RandomPolicy(worlds.World().action_spec) if kind == "random" else Constant()
    name = type(policy).__name__
    before = len(multiprocessing.active_children())
    with pytest.raises(aiosync.ConfigError, match=f"{name}.*nn.Module.*weight_sync_schemes"):
        with collecting(make(), policy, track_policy_version=False):
            pass
    assert len(multiprocessing.active_children()) == before
    with pytest.raises(aiosync.ConfigError, match=f"{name}.*nn.Module"):
        Collector(
            worlds.World,
            policy,
            frames_per_batch=4,
            total_frames=-1,
            trust_policy=True,
            weight_sync_schemes={"policy": make()},
        )


def test_no_synchronization_takes_a_policy_that_is_no_module() -> None:
    scheme = aiosync.sync.NoWeightSyncScheme()
    collector = Collector(
        worlds.World,
        Constant(),
        frames_per_batch=4,
        total_frames=-1,
        trust_policy=True,
        weight_sync_schemes={"policy": scheme},
    )
    with scheme:
        next(iter(collector))
        collector.update_policy_weights_()
        collector.shutdown()

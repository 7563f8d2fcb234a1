"""Models on a GPU: work that is queued on any stream counts as done when weights move.

The whole contract runs there with ``DEVICE=cuda pytest tests/contract``.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.one_loop, pytest.mark.asyncio]

SCHEMES = {
    "shm": aiosync.SharedMemWeightSyncScheme,
    "device": partial(aiosync.SharedMemWeightSyncScheme, memory="device"),
    "pipe": aiosync.MultiProcessWeightSyncScheme,
    "tcp": aiosync.TCPWeightSyncScheme,
}
_HALF_A_SECOND = 800_000_000
"""Half a second in cycles of a GPU."""


@pytest.fixture(scope="module", autouse=True)
def _driver() -> None:
    """Let CUDA open the descriptors that it keeps for the life of the process."""
    torch.zeros(1, device="cuda").cpu()
    torch.cuda.Stream().synchronize()


def work(cycles: int) -> None:
    """Keep the current stream busy for some cycles of the GPU."""
    torch.cuda._sleep(cycles)  # noqa: SLF001 - torch's own tests use it, and none is public


class Net(nn.Module):
    """Model whose ``forward`` reads its first layer, and its last layer some time later."""

    def __init__(self, value: float, size: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((size,), value, device="cuda") for _ in range(4))

    def forward(self, cycles: int = 0) -> torch.Tensor:
        first = self.layers[0].mean()
        if cycles:
            work(cycles)
        return torch.stack([first, self.layers[-1].mean()])


@contextlib.asynccontextmanager
async def pair(scheme: str, source: Any, target: Any, **options: Any) -> AsyncIterator[Any]:
    """A connected sender and receiver in this process."""
    sender = SCHEMES[scheme](timeout=60, **options)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    async with sender, receiver:
        await asyncio.gather(sender.connect(), receiver.connect())
        yield sender, receiver


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(receiver: Any, model: nn.Module) -> set[float]:
    with receiver.reading():
        return {float(each) for p in model.parameters() for each in p.detach().aminmax()}


@pytest.mark.parametrize("size", [1000, 2_000_000])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_what_another_stream_has_to_write_yet_is_sent(scheme: str, size: int) -> None:
    source, target, side = Net(0.0, size), Net(-1.0, size), torch.cuda.Stream()
    async with pair(scheme, source, target) as (sender, receiver):
        for value in (1.0, 2.0, 3.0):
            with torch.cuda.stream(side):
                work(_HALF_A_SECOND // 5)
                fill(source, value)
            await sender.send()
            await receiver.wait_for_version(sender.version, timeout=20)
            assert values(receiver, target) == {value}


@pytest.mark.parametrize("size", [1000, 2_000_000])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_forward_that_another_stream_has_to_run_yet_sees_one_version(
    scheme: str, size: int
) -> None:
    source, target, side = Net(0.0, size), Net(-1.0, size), torch.cuda.Stream()
    async with pair(scheme, source, target) as (sender, receiver):
        assert values(receiver, target) == {0.0}
        torch.cuda.synchronize()
        with torch.cuda.stream(side), torch.no_grad():
            seen = target(_HALF_A_SECOND)
        fill(source, 1.0)
        await sender.send()
        await receiver.wait_for_version(1, timeout=20)
        later = target()
        side.synchronize()
        assert seen.tolist() == [0.0, 0.0]
        assert later.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_cuda_graph_sees_new_weights(scheme: str) -> None:
    source, target = Net(0.0, 1000), Net(-1.0, 1000)
    async with pair(scheme, source, target) as (sender, receiver):
        target()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            seen = target()
        for value in (1.0, 2.0):
            fill(source, value)
            await sender.send()
            await receiver.wait_for_version(sender.version, timeout=20)
            with receiver.reading():
                graph.replay()
            assert seen.tolist() == [value, value]


@pytest.mark.parametrize("sides", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("scheme", sorted(SCHEMES.keys() - {"device"}))
async def test_models_on_either_side_stay_on_their_devices(
    scheme: str, sides: tuple[str, str]
) -> None:
    build = lambda device: nn.Sequential(nn.Linear(99, 7), nn.BatchNorm1d(7)).to(device)  # noqa: E731
    source, target = map(build, sides)
    async with pair(scheme, source, target) as (sender, receiver):
        for value in (1.0, 2.0, 4.0):
            fill(source, value)
            await sender.send()
            await receiver.wait_for_version(sender.version, timeout=20)
            assert values(receiver, target) == {value}
            assert {each.device.type for each in target.state_dict().values()} == {sides[1]}


async def test_slots_in_device_memory_are_for_workers_on_that_device() -> None:
    """No weight passes the host, and a worker on the CPU is refused."""
    with pytest.raises(aiosync.AiosyncError, match="this worker's model is on the CPU"):
        async with pair("device", Net(0.0, 1000), Net(0.0, 1000).cpu()):
            pass
    with pytest.raises(aiosync.ConfigError, match="and these are on the CPU"):
        async with pair("device", Net(0.0, 1000).cpu(), Net(0.0, 1000)):
            pass

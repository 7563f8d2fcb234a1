"""Large weights go out from the tensors themselves: when may those change, and who notices."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

import aiosync
from aiosync.testing import FaultProxy
from tests.schemes import _harness as h

pytestmark = pytest.mark.one_loop

MIB = 2**20


def _model(value: float) -> nn.ParameterDict:
    return nn.ParameterDict(
        {f"w{i}": nn.Parameter(torch.full((MIB,), value)) for i in range(4)}  # 16 MiB
    )


def _fill(model: nn.ParameterDict, value: float) -> None:
    with torch.no_grad():
        for parameter in model.values():
            parameter.fill_(value)


def _values(model: nn.ParameterDict) -> set[float]:
    return {float(each) for p in model.values() for each in p.detach().aminmax()}


async def _pair(through: FaultProxy | None, model: nn.Module, **options):
    """A connected sender and receiver; the link goes through a proxy if there is one."""
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)
    scheme.init_on_sender(model=model)
    other = h.twin(scheme)
    if through is not None:
        through.upstream = scheme.address
        other._addresses = [type(other._addresses[0]).parse(through.url)]
    return scheme, other


@pytest.mark.slow
@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.asyncio
async def test_a_worker_that_is_not_done_gets_what_was_sent(how: str) -> None:
    """The call is over, the weights change, and the rest of the version is still on its way."""
    model, target = _model(1.0), _model(0.0)
    async with FaultProxy("tcp://127.0.0.1:1") as proxy:
        scheme, other = await _pair(proxy, model, chunk_nbytes=16 * MIB)
        try:
            other.init_on_receiver(model=target)
            await asyncio.gather(scheme.connect(), other.connect())
            await other.wait_for_version(1, timeout=h.PATIENCE)
            await scheme.wait_for_version(1)  # its answer is not stuck in the proxy
            _fill(model, 2.0)
            proxy.stall()
            if how == "timeout":
                with pytest.raises(aiosync.PartialSyncError):
                    await scheme.send(timeout=0.3)
            else:
                sending = asyncio.create_task(scheme.send())
                await h.until(lambda: scheme.version == 2)
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
            _fill(model, 3.0)  # allowed now
            proxy.resume()
            await other.wait_for_version(2, timeout=h.PATIENCE)
            assert _values(target) == {2.0}
            assert other.damaged_chunks > 0  # the rest of a chunk had changed on its way
        finally:
            await other.aclose()
            await scheme.aclose()


@pytest.mark.asyncio
async def test_a_late_joiner_gets_the_version_and_not_the_weights_of_now() -> None:
    model = _model(1.0)
    scheme, first = await _pair(None, model)
    late, target = h.twin(scheme), _model(0.0)
    try:
        first.init_on_receiver(model=_model(0.0))
        await asyncio.gather(scheme.connect(), first.connect())
        _fill(model, 2.0)
        await scheme.send()
        _fill(model, 3.0)
        late.init_on_receiver(model=target)
        await late.connect(timeout=h.PATIENCE)
        assert (late.version, _values(target)) == (2, {2.0})
    finally:
        await late.aclose()
        await first.aclose()
        await scheme.aclose()


@pytest.mark.asyncio
async def test_closing_in_the_middle_of_a_send_leaves_no_thread() -> None:
    model, target = _model(1.0), _model(0.0)
    async with FaultProxy("tcp://127.0.0.1:1") as proxy:
        scheme, other = await _pair(proxy, model)
        try:
            other.init_on_receiver(model=target)
            await asyncio.gather(scheme.connect(), other.connect())
            proxy.stall()
            sending = asyncio.create_task(scheme.send())
            await h.until(lambda: scheme.version == 2)
            await scheme.aclose()
            with pytest.raises(aiosync.TransportClosed):
                await sending
        finally:
            proxy.resume()
            await other.aclose()
            await scheme.aclose()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_cancelled_send_of_several_weights_borrows_none_of_them_any_more() -> None:
    first, second = _model(1.0), _model(1.0)
    targets = [_model(0.0), _model(0.0)]
    async with FaultProxy("tcp://127.0.0.1:1") as proxy:
        scheme, one = await _pair(proxy, first, per_worker_weights=True)
        two = h.twin(one)
        try:
            for idx, other in enumerate((one, two)):
                other.init_on_receiver(model=targets[idx], worker_idx=idx)
            await asyncio.gather(scheme.connect(), one.connect(), two.connect())
            await scheme.wait_for_version(1)
            proxy.stall()
            sending = asyncio.create_task(scheme.send({0: first, 1: second}))
            await h.until(lambda: scheme.version == 2)
            for _ in range(50):  # the first cancels the wait, the others the copies
                sending.cancel()
                await asyncio.sleep(0.001)
            with pytest.raises(asyncio.CancelledError):
                await sending
            kept = [scheme._sender.workers.newest_for(idx) for idx in (0, 1)]
            assert [snapshot.version for snapshot in kept] == [2, 2]
            assert all(snapshot.live is None for snapshot in kept)
            for model in (first, second):
                _fill(model, 9.0)
            proxy.resume()
            for other in (one, two):
                await other.wait_for_version(2, timeout=h.PATIENCE)
            assert [_values(target) for target in targets] == [{1.0}, {1.0}]
        finally:
            proxy.resume()
            await one.aclose()
            await two.aclose()
            await scheme.aclose()

"""The blocking scheme over process groups: small updates in the stream, large ones over Gloo."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch import distributed as dist
from torch import nn

import aiosync
import aiosync.sync
from tests.sync import _tools as tools


def big(value: float) -> nn.Module:
    """8 MiB: over a group."""
    model = nn.Module()
    model.block = nn.Parameter(torch.full((2, 2**20), value))
    return model


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("make", [tools.filled, big])
def test_weights_arrive(make, shared_memory) -> None:
    source, targets = make(1.0), [make(-1.0) for _ in range(2)]
    sender = aiosync.sync.DistributedWeightSyncScheme(
        timeout=tools.PATIENCE, shared_memory=shared_memory
    )
    sender.init_on_sender(model_id="policy", model=source)
    with sender:
        sender.connect()
        receivers = [pickle.loads(pickle.dumps(sender)) for _ in targets]
        try:
            for idx, (receiver, target) in enumerate(zip(receivers, targets, strict=True)):
                receiver.init_on_receiver(model_id="policy", model=target, worker_idx=idx)
                receiver.connect()
                assert receiver.version == 1
            for value in (2.0, 3.0):
                tools.fill(source, value)
                assert sender.send().acked == {0, 1}
                assert [tools.value_of(target) for target in targets] == [value] * 2
            names = [t.name for t in threading.enumerate() if t.name.startswith("aiosync-gloo")]
            assert bool(names) == (make is big and not shared_memory)
            assert not dist.is_initialized()
        finally:
            for receiver in receivers:
                receiver.shutdown()


def test_options_are_those_of_the_async_class() -> None:
    scheme = aiosync.sync.DistributedWeightSyncScheme("gloo", True, 5.0, patience=3.0)
    assert (scheme.backend, scheme.timeout, scheme.patience) == ("gloo", 5.0, 3.0)
    scheme.patience = 4.0
    assert pickle.loads(pickle.dumps(scheme)).patience == 4.0
    named = aiosync.sync.WeightSyncScheme.from_backend("distributed", patience=2.0)
    assert isinstance(named, aiosync.sync.DistributedWeightSyncScheme)
    assert named.patience == 2.0

"""The blocking scheme over process groups: small updates in the stream, large ones over Gloo."""

from __future__ import annotations

import contextlib
import pickle
import threading

import pytest
from torch import distributed as dist

import aiosync.sync
from tests.schemes import _models as models
from tests.sync import _tools as tools


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("make", [models.linear, models.medium])
def test_weights_arrive(make, shared_memory) -> None:
    source, targets = make(), [make() for _ in range(2)]
    sender = aiosync.sync.DistributedWeightSyncScheme(
        timeout=tools.PATIENCE, shared_memory=shared_memory
    )
    sender.init_on_sender(model_id="policy", model=source)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sender)
        sender.connect()
        receivers = [stack.enter_context(pickle.loads(pickle.dumps(sender))) for _ in targets]
        for idx, (receiver, target) in enumerate(zip(receivers, targets, strict=True)):
            receiver.init_on_receiver(model_id="policy", model=target, worker_idx=idx)
            receiver.connect()
            assert receiver.version == 1
        for value in (2.0, 3.0):
            tools.fill(source, value)
            assert sender.send().acked == {0, 1}
            assert [tools.value_at(each) for each in receivers] == [value] * 2
        names = [t.name for t in threading.enumerate() if t.name.startswith("aiosync-gloo")]
        assert bool(names) == (make is models.medium and not shared_memory)
        assert not dist.is_initialized()

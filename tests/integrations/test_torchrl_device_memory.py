"""TorchRL's collectors with slots in the memory of a device, which all processes imitate."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrl")

from aiosync.tensors.accelerator import use_accelerator
from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.support.accelerator import Deferred, deferred

pytestmark = workers.FORKED


def make_world() -> worlds.World:
    """Make an environment, in the process of a worker, whose models are on a fake accelerator."""
    use_accelerator(Deferred())
    return worlds.World()


def test_a_collector_on_one_device() -> None:
    policy = worlds.make_policy(1.0)
    with deferred() as device:
        scheme = workers.SHM(memory="device")
        with scheme, workers.collecting(scheme, policy, envs=make_world) as collector:
            batches = iter(collector)
            next(batches)
            for value in (2.0, 3.0, 4.0, 5.0):
                worlds.set_value(policy, value)
                collector.update_policy_weights_()
                next(batches)  # it may have begun before
                assert {found for found, _ in workers.seen(next(batches))} == {value}
            assert device.num_transfers == 0
            assert len(device.fake_driver.mapped) == 2
    workers.until(lambda: not device.fake_driver.mapped)

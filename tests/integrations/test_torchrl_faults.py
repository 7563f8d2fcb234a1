"""Faults of TorchRL's own schemes with process workers, each of which must not happen here.

Four more have their tests beside the contract, in ``test_torchrl_multi.py``: ``worker_ids`` that
are only a hint, models of other names, torn forwards, and no synchronization with a policy.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync

pytest.importorskip("torchrl")

from tests.integrations import _multi_workers as workers
from tests.integrations import _worlds as worlds
from tests.integrations._multi_workers import (
    SCHEMES,
    SHM,
    ask,
    collecting,
    held,
    until,
)
from tests.support.waiting import stop

# A fault has to be reported within so many seconds.
SOON = 5.0

pytestmark = workers.FORKED


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(workers.PATIENCE)


# -- workers that die -------------------------------------------------------------------------


@pytest.mark.parametrize("make", SCHEMES)
def test_03_a_dead_worker_is_named_and_the_other_is_updated(make: Any) -> None:
    scheme = make()
    with collecting(scheme, worlds.make_policy(1.0)) as collector:
        kill(collector.procs[0])
        started = time.monotonic()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            collector.update_policy_weights_(worlds.make_policy(2.0))
        assert time.monotonic() - started < SOON
        assert set(caught.value.failed) == {0}
        assert caught.value.acked == {1}
        until(lambda: held(collector, 1) == 2.0)
        assert ask(collector, 1, "policy_version") == 1
        # The dead worker is reported only once.
        collector.update_policy_weights_(worlds.make_policy(3.0))
        until(lambda: held(collector, 1) == 3.0)


@pytest.mark.parametrize("make", SCHEMES)
def test_12_shutdown_after_a_death_with_updates_that_nobody_took(make: Any) -> None:
    scheme = make()
    with collecting(scheme, worlds.make_policy(1.0)) as collector:
        stop(collector.procs[1].pid)
        for value in range(12):
            scheme.send_async(worlds.make_policy(float(value)))
        kill(collector.procs[1])
        started = time.monotonic()
        collector.shutdown()
        scheme.shutdown()
        assert time.monotonic() - started < 15.0


# -- workers that are silent ------------------------------------------------------------------


def test_the_start_may_take_longer_than_an_update() -> None:
    scheme = aiosync.sync.MultiProcessWeightSyncScheme(timeout=workers.PATIENCE)
    with collecting(scheme, worlds.make_policy(1.0)) as collector:
        scheme.timeout = 3.0
        stop(collector.procs[1].pid)
        try:
            with pytest.raises(aiosync.PartialSyncError, match="within 3 s") as caught:
                collector.update_policy_weights_()
        finally:
            os.kill(collector.procs[1].pid, signal.SIGCONT)
        assert {idx: type(each) for idx, each in caught.value.failed.items()} == {
            1: aiosync.AckTimeout
        }


# -- workers that never begin -----------------------------------------------------------------


class Broken(worlds.World):
    """Environment that cannot be made."""

    def __init__(self) -> None:
        raise LookupError("there is no such world")


class BrokenFactory(workers.Factory):
    """Factory that makes policies in the trainer only."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.trainer = os.getpid()

    def __call__(self) -> Any:
        if os.getpid() != self.trainer:
            raise LookupError("there is no such world")
        return super().__call__()


@pytest.mark.parametrize(
    ("what", "broken"),
    [("env", [0, 1]), ("env", [1]), ("policy", [0])],
)
def test_the_constructor_raises_what_a_worker_raised(what: str, broken: list[int]) -> None:
    """The error is the worker's own and comes soon, instead of one about a missing worker."""
    scheme = SHM(timeout=workers.PATIENCE)
    factories = [BrokenFactory() if idx in broken else workers.Factory(1.0) for idx in range(2)]
    options: dict[str, Any] = {"policy_factory": factories}
    envs: list[Any] = [worlds.World] * 2
    if what == "env":
        envs = [Broken if idx in broken else worlds.World for idx in range(2)]
        options = {"policy": worlds.make_policy(1.0)}
    started = time.monotonic()
    try:
        with pytest.raises(LookupError, match="there is no such world"):
            workers.MultiSyncCollector(
                envs,
                frames_per_batch=workers.FRAMES,
                total_frames=-1,
                weight_sync_schemes={"policy": scheme},
                cat_results="stack",
                **options,
            )
        assert time.monotonic() - started < workers.PATIENCE / 2
    finally:
        scheme.shutdown()


# -- collectors that have workers of their own -------------------------------------------------


class Between(workers.BaseCollector):
    """Collector with workers, as far as it passes weights on to them."""

    procs = ()

    def __init__(self) -> None:
        self.busy = False
        self.passed: list[float] = []

    def update_policy_weights_(self, policy_or_weights: Any, model_id: str) -> None:
        assert model_id == "policy"
        if self.busy:
            self.busy = False
            raise TimeoutError("a worker was busy")
        self.passed.append(policy_or_weights["values", "0"].item())

    def nothing(self, *_: object) -> None:
        """Do nothing; the methods of these names have to exist, but are not called."""

    iterator = shutdown = set_seed = state_dict = load_state_dict = nothing


@contextmanager
def passing(
    between: Between, trained: worlds.Values, model: worlds.Values | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield a connected trainer, and the errors that its connect() raised."""
    sender = SHM()
    sender.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiver = copy.copy(sender)
    model = worlds.Values() if model is None else model
    receiver.init_on_receiver(model_id="policy", model=model, context=between)
    raised: list[BaseException] = []

    def connect() -> None:
        try:
            sender.connect()
        except aiosync.PartialSyncError as exc:
            raised.append(exc)

    connecting = threading.Thread(target=connect)
    connecting.start()
    try:
        receiver.connect()
        connecting.join(workers.PATIENCE)
        yield sender, raised
    finally:
        receiver.shutdown()
        sender.shutdown()


def test_errors_on_the_way_reach_the_trainer_and_are_made_up_for() -> None:
    between, trained = Between(), worlds.Values(1.0)
    between.busy = True
    with passing(between, trained) as (sender, raised):
        assert "a worker was busy" in str(raised[0])
        assert sender.send().acked == {0}
        assert between.passed == [1.0]
        between.busy = True
        with pytest.raises(aiosync.PartialSyncError, match="a worker was busy"):
            sender.send()
        assert sender.send().acked == {0}


class Tallied(worlds.Values):
    """Module with any extra state."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, 5.0),
        ({"seen": 1, "mean": torch.zeros(1)}, {"seen": 2, "mean": torch.zeros(1)}),
        ({"seen": 1, "mean": torch.zeros(1)}, {"seen": 1, "mean": torch.ones(1)}),
        (None, torch.ones(1)),
        (torch.ones(1), 5.0),
    ],
)
def test_an_update_that_changes_only_extra_state_is_passed_on(before: Any, after: Any) -> None:
    trained, between = Tallied(1.0), Between()
    trained.state = before
    with passing(between, trained, copy.deepcopy(trained)) as (_, raised):
        assert not raised
        assert not between.passed, "the workers began with these weights"
    held = copy.deepcopy(trained)
    trained.state = after
    with passing(between, trained, held) as (sender, raised):
        assert not raised
        assert between.passed == [1.0]
        trained.state = before
        sender.send()
        assert between.passed == [1.0] * 2

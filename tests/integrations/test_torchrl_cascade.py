"""Collectors that have workers of their own: what is passed on, and what is not."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import aiosync.sync
from aiosync.errors import PartialSyncError
from aiosync.integrations.torchrl._cascade import Cascade
from tests.integrations._worlds import Values, set_value

if TYPE_CHECKING:
    from torch import nn

PATIENCE = 20.0


class Between:
    """What a cascade needs of a collector with workers."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.passed: list[float] = []

    def update_policy_weights_(self, policy_or_weights: Any, model_id: str) -> None:
        assert model_id == "policy"
        if self.failures:
            self.failures -= 1
            raise TimeoutError("a worker was busy")
        self.passed.append(policy_or_weights["values", "0"].item())


@contextmanager
def passing(between: Between, trained: nn.Module, first: float) -> Iterator[tuple[Any, Any]]:
    """A connected trainer; and what its connect() raised."""
    sender = aiosync.sync.SharedMemWeightSyncScheme()
    sender.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=Values(first))
    receiver._scheme._relay = Cascade(between, receiver).pass_on
    raised: list[BaseException] = []

    def connect() -> None:
        try:
            sender.connect()
        except PartialSyncError as exc:
            raised.append(exc)

    connecting = threading.Thread(target=connect)
    connecting.start()
    try:
        receiver.connect()
        connecting.join(PATIENCE)
        yield sender, raised
    finally:
        receiver.shutdown()
        sender.shutdown()


def test_what_the_workers_have_is_not_passed_on() -> None:
    between, trained = Between(), Values(1.0)
    with passing(between, trained, 1.0) as (sender, raised):
        assert not raised
        assert between.passed == []
        sender.send()
        assert between.passed == [1.0], "an update of the user's counts, the same or not"
        set_value(trained, 2.0)
        sender.send()
        assert between.passed == [1.0, 2.0]


def test_the_same_right_after_the_first_weights_is_not_passed_on_twice() -> None:
    between, trained = Between(), Values(1.0)
    with passing(between, trained, 0.0) as (sender, raised):
        assert not raised
        assert between.passed == [1.0]
        sender.send()
        assert between.passed == [1.0]
        sender.send()
        assert between.passed == [1.0, 1.0]


def test_what_failed_on_the_way_is_passed_on_again() -> None:
    between, trained = Between(failures=1), Values(1.0)
    with passing(between, trained, 0.0) as (sender, raised):
        assert "a worker was busy" in str(raised[0])
        assert sender.send().acked == {0}
        assert between.passed == [1.0]


def test_an_error_of_the_innermost_reaches_the_trainer() -> None:
    between, trained = Between(), Values(1.0)
    with passing(between, trained, 1.0) as (sender, _):
        between.failures = 1
        with pytest.raises(PartialSyncError, match="a worker was busy"):
            sender.send()
        assert sender.send().acked == {0}

"""Collectors that have workers of their own: what is passed on, and what is not."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import aiosync.sync
from aiosync.errors import PartialSyncError

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    # It warns of its own classes while it is being imported.
    warnings.simplefilter("ignore")
    from torchrl.collectors import BaseCollector

from tests.integrations._worlds import Values

PATIENCE = 20.0


class Between(BaseCollector):
    """A collector with workers, as far as passing weights on to them goes."""

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
        """For what it has to have, and nobody calls."""

    iterator = shutdown = set_seed = state_dict = load_state_dict = nothing


@contextmanager
def passing(between: Between, trained: Values, first: float) -> Iterator[tuple[Any, Any]]:
    """A connected trainer; and what its connect() raised."""
    sender = aiosync.sync.SharedMemWeightSyncScheme()
    sender.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=Values(first), context=between)
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


def test_errors_on_the_way_reach_the_trainer_and_are_made_up_for() -> None:
    between, trained = Between(), Values(1.0)
    between.busy = True
    with passing(between, trained, 0.0) as (sender, raised):
        assert "a worker was busy" in str(raised[0])
        assert sender.send().acked == {0}
        assert between.passed == [1.0]
        between.busy = True
        with pytest.raises(PartialSyncError, match="a worker was busy"):
            sender.send()
        assert sender.send().acked == {0}

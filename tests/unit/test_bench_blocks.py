"""Blocks of the benchmark: when workers are busy, and how many sends there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiosync.bench import _trainer
from aiosync.bench._contender import Desk
from aiosync.bench._results import Case
from aiosync.bench._trainer import Block, _BlockingRounds
from aiosync.bench._workloads import WORKLOADS, fill

if TYPE_CHECKING:
    import torch


class Half:
    """A contender whose only worker is in this process; notes at each send whether it is busy."""

    def __init__(self) -> None:
        self.model: torch.nn.Module
        self.desk: Desk
        self.busy: list[bool] = []
        self.fails = False
        self._asked: tuple[str, Any] = ("usage", None)

    def open(self, case: Case) -> list[Any]:
        self.model, worker = (WORKLOADS[case.workload].build() for _ in range(2))
        fill(self.model, 1.0)
        self.desk = Desk(worker)
        return [self]

    def send(self) -> None:
        self.busy.append(self.desk.busy)
        if self.fails:
            raise OSError("no network")
        self.desk.model.load_state_dict(self.model.state_dict())

    def ask(self, question: str, argument: Any = None) -> None:
        self._asked = (question, argument)

    def answer(self) -> Any:
        return self.desk.answer(*self._asked)

    def close(self) -> None: ...


@pytest.mark.parametrize("busy", [False, True])
def test_workers_are_busy_in_the_blocks_of_their_own_contender_alone(busy: bool) -> None:
    half = Half()
    rounds = _BlockingRounds(half)
    rounds.answer("open", Case("shm", "4x2", 1, busy=busy))
    assert not half.desk.busy
    block = rounds.answer("block", 3)
    assert isinstance(block, Block)
    assert (len(block.seconds), half.busy) == (3, [busy] * 3)
    assert not half.desk.busy
    half.fails = True
    with pytest.raises(OSError, match="no network"):
        rounds.answer("block", 3)
    assert half.busy[3:] == [busy]
    assert not half.desk.busy


@pytest.mark.parametrize(("most", "sends"), [(0.0, 2), (60.0, 5)])
def test_a_block_ends_after_its_time_or_its_sends(
    most: float, sends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_trainer, "BLOCK_SECONDS", most)
    rounds = _BlockingRounds(Half())
    rounds.answer("open", Case("shm", "4x2", 1))
    for _ in range(2):  # the time of one block is none of the next one's
        assert len(rounds.answer("block", 5).seconds) == sends

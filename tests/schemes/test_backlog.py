"""A worker that is much slower than the trainer: memory stays flat, and it gets the newest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop

SENDS = 1000


class _Slow(models.Extra):
    """1 MiB; an apply takes 20 ms."""

    def __init__(self) -> None:
        super().__init__(0.02)
        self.block = torch.nn.Parameter(torch.zeros(2**18), requires_grad=False)


def _build() -> torch.nn.Module:
    return _Slow()


def _rss_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_a_thousand_sends_to_a_slow_worker(make) -> None:
    source, scheme = _build(), make()
    source.seconds = 0.0
    scheme.init_on_sender(model=source, num_workers=1)
    async with harness.workers(scheme, _build, 1) as crew:
        handles = []
        for number in range(SENDS):
            source.counter = number
            source.block.fill_(number)
            handles.append(scheme.send_nowait())
            await asyncio.sleep(0.001)
            if number == 50:
                before = _rss_nbytes()
        grown = _rss_nbytes() - before
        assert grown < 8 * 2**20, f"grew by {grown / 2**20:.1f} MiB"
        arena = getattr(scheme, "_arena", None)
        assert arena is None or arena.num_slots <= 5
        reports = [await handle for handle in handles]
        assert reports[-1].acked == {0}
        skipped = sum(len(report.skipped) for report in reports)
        acked = sum(len(report.acked) for report in reports)
        assert skipped + acked == SENDS
        assert skipped > SENDS / 10  # the trainer itself is slow on a busy machine
        assert scheme._sender.skipped == skipped
        for report in reports:
            for by in report.skipped.values():
                assert by > report.version
        assert await crew[0].call(harness.version) == reports[-1].version
        got = await crew[0].call(harness.weights)
        assert (got["block"] == SENDS - 1).all()

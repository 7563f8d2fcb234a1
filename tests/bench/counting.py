"""What counting and telling cost: ``python -m tests.bench.counting [--sends N]``.

One trainer sends a 4x2 layer through shared memory to one worker, in turns with nobody who listens
and with an observer on both sides. It prints how long a send takes, and how much memory the
process has then: that does not grow with the number of sends.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import statistics
import time

from torch import nn

import aiosync
from tests.support.waiting import resident_nbytes

_TURNS = 10


class Counter:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told = 0

    def on_sync(self, event: aiosync.SyncEvent) -> None:
        self.told += 1


async def main(num_sends: int) -> None:
    """Send, and print what it takes."""
    trainer = aiosync.SharedMemWeightSyncScheme()
    trainer.init_on_sender(model=nn.Linear(4, 2), num_workers=1)
    worker = copy.copy(trainer)
    worker.init_on_receiver(model=nn.Linear(4, 2))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counter = Counter()
    async with trainer, worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        for _ in range(1000):
            await trainer.send()
        for turn in range(2 * _TURNS):
            listens = bool(turn % 2)
            for scheme in (trainer, worker):
                (scheme.add_observer if listens else scheme.remove_observer)(counter)
            began = time.perf_counter()
            for _ in range(num_sends // _TURNS // 2):
                await trainer.send()
            seconds[listens].append((time.perf_counter() - began) / (num_sends // _TURNS // 2))
            if listens:
                gc.collect()
                done = trainer.stats().finished["ok"]
                print(f"{done:>10,} sends: {resident_nbytes() / 2**20:.1f} MiB")
        print(trainer.stats())
        print(worker.stats())
    off, on = (1e6 * statistics.median(seconds[listens]) for listens in (False, True))
    print(f"told {counter.told:,} times; a send takes {off:.1f} us, with observers {on:.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sends", type=int, default=200_000)
    asyncio.run(main(parser.parse_args().sends))

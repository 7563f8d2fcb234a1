"""Cost of counting and of observers: ``python -m tests.bench.counting [--sends N]``.

One trainer sends a 4x2 layer through shared memory to one worker process, in turns without an
observer and with one on its side. The program prints how long a send takes, and how much memory the
trainer has then. That does not grow with the number of sends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import time
from typing import Any

from torch import nn

import aiosync
from tests.support.waiting import resident_nbytes

_TURNS = 20


class Counter:
    """Observer that counts its events."""

    def __init__(self) -> None:
        self.told = 0

    def on_sync(self, event: aiosync.SyncEvent) -> None:
        self.told += 1


def work(scheme: Any) -> None:
    """Run a worker until its trainer has gone."""

    async def follow() -> None:
        scheme.init_on_receiver(model=nn.Linear(4, 2))
        scheme.add_observer(Counter())
        async with scheme:
            await scheme.connect()
            # The worker is idle, as one that waits in receive() would be rung at each send.
            while scheme.link_lost is None:
                await asyncio.sleep(0.05)
            print(scheme.stats())

    asyncio.run(follow())


async def main(num_sends: int) -> None:
    """Send, and print the times and the memory."""
    trainer = aiosync.SharedMemWeightSyncScheme()
    trainer.init_on_sender(model=nn.Linear(4, 2), num_workers=1)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(trainer,))
    worker.start()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counter, each = Counter(), max(1, num_sends // _TURNS // 2)
    async with trainer:
        await trainer.connect()
        for _ in range(1000):
            await trainer.send()
        for turn in range(2 * _TURNS):
            listens = bool(turn % 2)
            (trainer.add_observer if listens else trainer.remove_observer)(counter)
            began = time.perf_counter()
            for _ in range(each):
                await trainer.send()
            seconds[listens].append((time.perf_counter() - began) / each)
            if turn % 10 == 9:
                gc.collect()
                done = trainer.stats().finished["ok"]
                print(f"{done:>10,} sends: {resident_nbytes() / 2**20:.1f} MiB")
        print(trainer.stats())
    worker.join()
    off, on = (1e6 * statistics.median(seconds[listens]) for listens in (False, True))
    print(f"told {counter.told:,} times; a send takes {off:.1f} us, with an observer {on:.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sends", type=int, default=200_000)
    asyncio.run(main(parser.parse_args().sends))

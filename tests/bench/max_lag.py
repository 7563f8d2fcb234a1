"""Lag of workers, of which one is delayed: with ``send(max_lag=)`` and without.

``python -m tests.bench.max_lag --batches 10000``. A batch is computed in one block, which keeps
updates out, and says how far behind it was at its end. Weights encode their version. The program
exits with 1 if a span is wrong, if a batch was further behind than allowed, or if the bound never
mattered.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn

import aiosync.sync

PATIENCE = 120.0


class Net(nn.Module):
    """Network that also returns its version."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("version", torch.ones((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the logits and the version."""
        return self.head(inputs), int(self.version)


def work(scheme: Any, pause: float, trainer: Connection) -> None:
    """Compute batches until the trainer has enough."""
    torch.set_num_threads(1)
    net = Net()
    scheme.init_on_receiver(model=net)
    with scheme, torch.no_grad():
        scheme.connect(timeout=PATIENCE)
        while True:
            with scheme.reading() as read:
                made_with = {net(torch.randn(4))[1] for _ in range(4)}
                time.sleep(pause)
                made_with.add(net(torch.randn(4))[1])
                lag = scheme.lag
            try:
                trainer.send((read.span, made_with, lag))
                trainer.recv()
            except (EOFError, OSError):
                # The trainer has enough batches.
                return


def run(batches: int, pause: float, max_lag: int | None) -> dict[str, Any]:
    """Learn from so many batches, with a new version after each."""
    context = multiprocessing.get_context("spawn")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scheme = aiosync.sync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model=net, num_workers=2)
    links, processes = [], []
    for idx in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(scheme, idx * pause, theirs), daemon=True)
        process.start()
        theirs.close()
        links.append(ours)
        processes.append(process)
    lags, found = [Counter[int](), Counter[int]()], {"wrong": 0, "oldest": 0.0}
    began = time.perf_counter()
    with scheme:
        scheme.connect(processes=processes)
        done = 0
        while done < batches:
            for link in wait(links, PATIENCE):
                assert isinstance(link, Connection)
                span, made_with, lag = link.recv()
                done += 1
                age = scheme.staleness(span)
                found["wrong"] += made_with != {span.first} or span.first != span.last
                found["wrong"] += age is None or age != scheme.version - min(made_with)
                found["oldest"] = max(found["oldest"], age or 0.0)
                lags[links.index(link)][lag] += 1
                optimizer.zero_grad()
                net(torch.randn(4))[0].square().sum().backward()
                optimizer.step()
                net.version.fill_(scheme.version + 1)
                scheme.send(max_lag=max_lag)
                link.send("next")
        for link in links:
            link.close()
    for process in processes:
        process.join(PATIENCE)
    return {**found, "batches": done, "lags": lags, "seconds": time.perf_counter() - began}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--max-lag", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds a batch is delayed")
    args = parser.parse_args()
    failed = False
    for batches, max_lag in ((args.batches, args.max_lag), (args.batches // 10, None)):
        found = run(batches, args.pause, max_lag)
        most = [max(each, default=0) for each in found["lags"]]
        print(
            f"max_lag={max_lag}: {found['batches']} batches in {found['seconds']:.0f} s, "
            f"{found['wrong']} wrong; at most {most[0]} behind, the delayed worker {most[1]}; "
            f"oldest that was learned from {found['oldest']:.0f}"
        )
        bounded = max(most) <= args.max_lag
        failed |= found["wrong"] > 0 or bounded != (max_lag is not None)
    sys.exit(failed)


if __name__ == "__main__":
    main()

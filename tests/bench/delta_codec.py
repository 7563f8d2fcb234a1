"""The cost of the codec of deltas: bytes for each change of real trainings, and its speed.

``python -m tests.bench.delta_codec`` runs the trainings of ``tests.bench.deltas`` and writes the
bytes for each changed weight, beside those of the best encoding of that table. Then it measures
the speed of the comparison, of encoding and of decoding on synthetic weights, in GB of weights for
each second of one core: CPU time, so that other programs count less. ``--only speed`` leaves the
trainings out.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch

from aiosync.tensors import delta
from aiosync.tensors.delta import apply_delta, encode_delta
from aiosync.wire import checksum
from tests.bench.deltas import BETWEEN, OPTIMIZERS, RATES, TRAININGS, Bits, sizes, training_bits

SHARES = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
_SKIPPED, _SENDS, _ROUNDS = 3, 6, 3


def real(training: str, optimizer: str, rate: float, between: int) -> str:
    """Return one row: what the changes of a real training take."""
    changed = encoded = by_one = 0
    others = dict[str, int]()
    states = training_bits(training, optimizer, rate, between)
    for send, (old, new) in enumerate(itertools.pairwise(states)):
        if send == _SKIPPED + _SENDS:
            break
        if send < _SKIPPED:
            continue
        data = encode_delta(old, new, "bfloat16")
        made = np.empty_like(new)
        apply_delta(data, old, made, "bfloat16")
        assert (made == new).all()
        encoded += len(data)
        changed += int((old != new).sum())
        by_one += int((np.abs(old.astype(np.int32) - new.astype(np.int32)) == 1).sum())
        for name, nbytes in sizes(old, new).items():
            others[name] = others.get(name, 0) + nbytes
    best = min(others, key=lambda name: others[name])
    return (
        f"| {training} | {optimizer}, {rate:g} | {between} "
        f"| {100 * changed / old.size / _SENDS:.3g} % | {100 * by_one / changed:.0f} % "
        f"| {encoded / changed:.2f} | {others[best] / changed:.2f} ({best}) "
        f"| {others['all weights'] / encoded:.0f} |"
    )


def weights(nbytes: int, share: float) -> tuple[Bits, Bits]:
    """Return weights in bfloat16, and the same with a share changed, nine in ten by one step."""
    rng = np.random.default_rng(0)
    old = (torch.randn(nbytes // 2) * 0.02).bfloat16().view(torch.int16).numpy().view(np.uint16)
    new = old.copy()
    moved = np.flatnonzero(rng.random(old.size) < share)
    far = np.where(rng.random(moved.size) < 0.9, 1, 2)
    new[moved] += (far * rng.choice([-1, 1], moved.size)).astype(np.uint16)
    return old, new


def _best(call: Callable[[], object]) -> float:
    found = []
    for _ in range(_ROUNDS):
        before = time.thread_time()
        call()
        found.append(time.thread_time() - before)
    return min(found)


def speed(nbytes: int, share: float) -> str:
    """Return one row: GB of weights for each second of one core."""
    old, new = weights(nbytes, share)
    data, made = encode_delta(old, new, "bfloat16"), np.empty_like(new)

    def compare() -> None:
        for block in delta._blocks(old):
            delta._changed(old[block], new[block])

    calls: list[Callable[[], object]] = [
        compare,
        lambda: encode_delta(old, new, "bfloat16", known=bytes(16)),
        lambda: apply_delta(data, old, made, "bfloat16"),
        lambda: checksum(new),
        lambda: np.copyto(made, new),
    ]
    apply_delta(data, old, made, "bfloat16")
    assert (made == new).all()
    cells = [f"{nbytes / _best(call) / 1e9:.2f}" for call in calls]
    return f"| {100 * share:g} % | {nbytes / len(data):.0f} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="'speed', or trainings whose name contains it")
    parser.add_argument("--mib", type=int, default=128, help="size of the weights for the speed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only != "speed":
        print("| training | optimizer | steps | changed | by 1 ULP | codec | smallest of the table")
        for row in itertools.product(TRAININGS, OPTIMIZERS, RATES, BETWEEN):
            if given.only in row[0]:
                print(real(*row), flush=True)
    print("| changed | times smaller | compare | encode | decode | checksum | copy |")
    for share in SHARES:
        print(speed(given.mib * 2**20, share), flush=True)


if __name__ == "__main__":
    main()

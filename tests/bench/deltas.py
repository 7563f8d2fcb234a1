"""How the weights of real trainings change between two sends, and what a change costs to send.

``python -m tests.bench.deltas`` trains a small PPO agent on CartPole and a small transformer with a
loss like GRPO's, for each optimizer and learning rate. After every step, and after every eighth, it
compares the weights in bfloat16 with those of the send before. It writes one line of JSON for each
training, and then the tables of ``docs/deltas.md``: how many weights changed, by how many units in
the last place, and bytes for each changed weight in several encodings. Each encoding is lossless.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

Bits = NDArray[np.uint16]

RATES = (1e-6, 1e-5, 1e-4, 3e-4)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}
BETWEEN = (1, 8)
"""Steps between two sends."""
_SKIPPED, _SENDS = 3, 6
_compress = zstandard.ZstdCompressor(level=1).compress


# -- encodings -------------------------------------------------------------------------------------


def in_order(bits: Bits) -> Bits:
    """Map the bits of bfloat16 to integers in the order of the numbers; one to one."""
    return np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.uint16)


def steps_between(old: Bits, new: Bits) -> Bits:
    """Return the units in the last place of each change, its sign in the lowest bit."""
    step = (in_order(new) - in_order(old)).astype(np.int16).astype(np.int32)
    return ((step << 1) ^ (step >> 31)).astype(np.uint16)


def gaps(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the distances between places as bytes; 255 adds to the next one."""
    gap = np.diff(places, prepend=-1) - 1
    whole = gap // 255
    found = np.full(int((whole + 1).sum()), 255, np.uint8)
    found[np.cumsum(whole + 1) - 1] = gap % 255
    return found


def _zstd(*parts: NDArray[Any]) -> int:
    return sum(len(_compress(np.ascontiguousarray(part).tobytes())) for part in parts)


def _planes(values: Bits) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return (values & 255).astype(np.uint8), (values >> 8).astype(np.uint8)


def sizes(old: Bits, new: Bits) -> dict[str, int]:
    """Return the bytes of a change in each encoding."""
    xor, step = old ^ new, steps_between(old, new)
    places = np.flatnonzero(step)
    changed = step[places] - 1
    distances = np.minimum(np.diff(places, prepend=-1), 65535).astype(np.uint16)
    return {
        "all weights": 2 * old.size,
        "int32 places and values": 6 * places.size,
        "XOR of all, zstd": _zstd(xor),
        "16-bit gaps and XOR, zstd": _zstd(distances) + _zstd(xor[places]),
        "gaps and steps, zstd": _zstd(gaps(places), *_planes(changed)),
        "bitmap and steps, zstd": _zstd(np.packbits(step != 0), *_planes(changed)),
        "steps of all, zstd": _zstd(*_planes(step)),
    }


# -- trainings -------------------------------------------------------------------------------------


def _bits(model: nn.Module) -> Bits:
    with torch.no_grad():
        flat = torch.cat([each.flatten() for each in model.parameters()]).to(torch.bfloat16)
    return flat.view(torch.int16).numpy().view(np.uint16).copy()


class Transformer(nn.Module):
    """Small decoder over 64 tokens."""

    def __init__(self, width: int = 192, layers: int = 4, context: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)
        for each in self.parameters():
            if each.ndim > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.tokens(tokens) + self.places(torch.arange(length))
        logits: torch.Tensor = self.head(self.layers(inputs, mask=mask, is_causal=True))
        return logits


def grpo(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Train a transformer to answer a prompt with small tokens; yield after each step."""
    groups, size, answer = 4, 8, 12
    while True:
        tokens = torch.randint(64, (groups, 1, 4)).expand(-1, size, -1).reshape(groups * size, 4)
        with torch.no_grad():
            for _ in range(answer):
                logits = model(tokens)[:, -1]
                tokens = torch.cat(
                    [tokens, torch.distributions.Categorical(logits=logits).sample()[:, None]], 1
                )
        reward = (tokens[:, 4:] < 16).float().mean(1).view(groups, size)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        logits = model(tokens[:, :-1])[:, 3:]
        chosen = -F.cross_entropy(logits.transpose(1, 2), tokens[:, 4:], reduction="none")
        optimizer.zero_grad()
        (-(advantage.view(-1, 1) * chosen).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


class Agent(nn.Module):
    """Policy and value for CartPole."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.policy, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(seen)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def ppo(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Train an agent by PPO on CartPole; yield after each step of the optimizer."""
    import gymnasium

    envs = gymnasium.make_vec("CartPole-v1", num_envs=8)
    seen = torch.from_numpy(envs.reset(seed=0)[0])
    while True:
        batch = defaultdict[str, list[torch.Tensor]](list)
        for _ in range(32):
            with torch.no_grad():
                logits, value = model(seen)
                choice = torch.distributions.Categorical(logits=logits)
                action = choice.sample()
            after, reward, ended, cut, _ = envs.step(action.numpy())
            row = (seen, action, choice.log_prob(action), value)
            for name, each in zip(("seen", "action", "log_prob", "value"), row, strict=True):
                batch[name].append(each)
            batch["reward"].append(torch.from_numpy(reward).float())
            batch["goes_on"].append(torch.from_numpy(~(ended | cut)).float())
            seen = torch.from_numpy(after)
        with torch.no_grad():
            after_value, gain, gains = model(seen)[1], torch.zeros(8), list[torch.Tensor]()
        for reward, value, goes_on in zip(
            *(reversed(batch[name]) for name in ("reward", "value", "goes_on")), strict=True
        ):
            error = reward + 0.99 * after_value * goes_on - value
            gain = error + 0.99 * 0.95 * goes_on * gain
            gains.insert(0, gain)
            after_value = value
        flat = {name: torch.cat(each) for name, each in batch.items()}
        advantage = torch.cat(gains)
        target = advantage + flat["value"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for part in itertools.chain.from_iterable(torch.randperm(256).split(64) for _ in range(4)):
            logits, value = model(flat["seen"][part])
            log_prob = torch.distributions.Categorical(logits=logits).log_prob(flat["action"][part])
            ratio = (log_prob - flat["log_prob"][part]).exp()
            surrogate = torch.min(
                ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]
            ).mean()
            optimizer.zero_grad()
            (0.5 * (value - target[part]).pow(2).mean() - surrogate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "PPO, CartPole": (Agent, ppo),
    "GRPO, transformer": (Transformer, grpo),
}


def training_bits(training: str, optimizer: str, rate: float, between: int) -> Iterator[Bits]:
    """Train, and yield the weights of each send without end."""
    torch.manual_seed(0)
    build, train = TRAININGS[training]
    model = build()
    steps = train(model, OPTIMIZERS[optimizer](model.parameters(), lr=rate))
    while True:
        yield _bits(model)
        for _ in range(between):
            next(steps)


def measure(training: str, optimizer: str, rate: float, between: int) -> dict[str, Any]:
    """Train, and return the means of all sends after the first few."""
    states = training_bits(training, optimizer, rate, between)
    old, found = next(states), defaultdict[str, float](float)
    for send in range(_SKIPPED + _SENDS):
        new = next(states)
        if send >= _SKIPPED:
            step = steps_between(old, new)
            sizes_now = sizes(old, new)
            for name, nbytes in sizes_now.items():
                found[name] += nbytes
            size = (step.astype(np.int32) + 1) >> 1
            for least, most in ((1, 1), (2, 3), (4, 15), (16, 65535)):
                found[f"{least} to {most}"] += int(((size >= least) & (size <= most)).sum())
            found["changed"] += int((step != 0).sum())
        old = new
    return {
        "training": training,
        "optimizer": optimizer,
        "rate": rate,
        "between": between,
        "weights": old.size,
        **{name: value / _SENDS for name, value in found.items()},
    }


# -- tables ----------------------------------------------------------------------------------------


def _row(result: dict[str, Any], names: tuple[str, ...]) -> str:
    changed = result["changed"]
    cells = [
        result["training"],
        f"{result['optimizer']}, {result['rate']:g}",
        str(result["between"]),
        f"{100 * changed / result['weights']:.3g} %",
        f"{100 * result['1 to 1'] / changed:.0f} %" if changed else "-",
    ]
    best = min(result[name] for name in names)
    for name in names:
        value = result[name] / changed if changed else math.nan
        text = "-" if not changed else f"{value:.2f}"
        cells.append(f"**{text}**" if changed and result[name] == best else text)
    cells.append(f"{result['all weights'] / best:.0f}" if best else "-")
    return f"| {' | '.join(cells)} |"


def tables(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    names = tuple(name for name in sizes(np.zeros(8, np.uint16), np.ones(8, np.uint16)))[1:]
    head = ("training", "optimizer", "steps", "changed", "by 1 ULP", *names, "times smaller")
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * 3}{'---:|' * (len(head) - 3)}"
    for result in results:
        yield _row(result, names)


def draw(page: str, path: str) -> None:
    """Draw the table in a page: bytes for each change over the share of changed weights."""
    import matplotlib as mpl

    mpl.use("svg")
    # With a fixed salt, the same picture has the same bytes.
    mpl.rcParams["svg.hashsalt"] = "aiosync"
    from matplotlib import pyplot

    lines = [line.strip("| \n") for line in Path(page).read_text().splitlines() if "|" in line]
    table = [[cell.strip(" *") for cell in line.split(" | ")] for line in lines]
    head = next(row for row in table if row[0] == "training")
    rows = [row for row in table if len(row) == len(head) and row[0].startswith(("PPO", "GRPO"))]
    figure, axis = pyplot.subplots(figsize=(7, 3.6), facecolor="#fbfbf8", layout="constrained")
    for column, name in list(enumerate(head))[5:-1]:
        points = sorted((float(row[3].split()[0]), float(row[column])) for row in rows)
        axis.plot(*zip(*points, strict=True), "o-", markersize=3, linewidth=0.8, label=name)
    axis.set_facecolor("#fbfbf8")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("% of the weights that changed")
    axis.set_ylabel("bytes for each change")
    axis.grid(True, alpha=0.3)
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run all trainings, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", nargs=2, metavar=("PAGE", "SVG"), help="only draw a page's table")
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    given = parser.parse_args()
    if given.draw:
        draw(*given.draw)
        return
    torch.set_num_threads(1)
    every = np.arange(2**16, dtype=np.uint16)
    assert np.unique(in_order(every)).size == every.size, "two numbers have one place"
    results, started = [], time.monotonic()
    for training, optimizer, rate, between in itertools.product(
        TRAININGS, OPTIMIZERS, RATES, BETWEEN
    ):
        if given.only in training:
            results.append(measure(training, optimizer, rate, between))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print("\n".join(tables(results)))
    print(f"\n{time.monotonic() - started:.0f} s, torch {torch.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Forwards beside sends without a pause, over streams and shared memory: not one mixes versions.

``python -m tests.bench.forwards`` runs trainer and workers in processes of their own, for shared
memory, pipe and TCP, the async API and the facade, and a model that is eager or compiled. Every
value of version v is the number v. So a forward is wrong if it finds two numbers, or a smaller one
than the forward before it, or one that is not the version of its span. The program exits with 1 if
a forward was wrong, or if hardly anything was sent meanwhile.

With ``--agent`` the model has no ``forward()``, and the workers call one of its methods, with no
option set. With ``--keep 50`` each worker keeps what programs keep of that many versions: state
dicts, assigned to another model too, detached TensorDicts, activations, and outputs that view
buffers. All of that has to stay as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import threading
from collections import deque
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

import aiosync
import aiosync.sync

PATIENCE = 3600.0
SCHEMES = {
    "shm": lambda of: of.SharedMemWeightSyncScheme(),
    "pipe": lambda of: of.MultiProcessWeightSyncScheme(),
    "tcp": lambda of: of.TCPWeightSyncScheme("tcp://127.0.0.1:0"),
}


class Agent(nn.Module):
    """Layers that all hold one number, without a forward."""

    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.register_buffer("level", torch.zeros(16))

    def peek(self) -> Any:
        """Return a view of a buffer."""
        return self.level.view(4, 4)[1:]

    def act(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one number for each layer: sixteen weights by a sixteenth, without the bias."""
        return torch.stack([(layer(inputs) - layer.bias).mean() for layer in self.layers])


class Stack(Agent):
    """The same layers with a forward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.act(inputs)


class Case(NamedTuple):
    """A way to send and to compute."""

    transport: str
    api: str
    compiled: bool
    agent: bool
    keep: int

    def model(self) -> nn.Module:
        """Make a model."""
        return Agent() if self.agent else Stack()

    def computes(self, model: Any) -> Any:
        """Return the function that computes with a connected model."""
        called = model.act if self.agent else model
        return torch.compile(called, backend="aot_eager") if self.compiled else called


def fill(model: nn.Module, value: float) -> None:
    """Set all parameters and buffers, like an optimizer's step."""
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.fill_(value)


class Kept(NamedTuple):
    """Tensors that a program keeps of one version."""

    value: float
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, model: Any) -> Kept:
        """Keep the tensors of a model, within one read."""
        state, assigned = model.state_dict(), Agent()
        assigned.load_state_dict(model.state_dict(), assign=True)
        weights = TensorDict.from_module(model).detach()
        with torch.enable_grad():
            saved = model.act(torch.full((16,), 1 / 16))
        tensors = [
            *state.values(),
            *assigned.state_dict().values(),
            *weights.values(include_nested=True, leaves_only=True),
            model.peek(),
            saved,
        ]
        return cls(float(state["level"][0]), tensors)

    def has_changed(self) -> bool:
        """Return True if one of the tensors has changed."""
        return not all(bool((each == self.value).all()) for each in self.tensors)


def look(scheme: Any, model: Any, computes: Any, forwards: int, keep: int) -> dict[str, int]:
    """Compute; return the counts of forwards, of errors of each kind, and of versions."""
    found = dict.fromkeys(("forwards", "mixed", "older", "mislabelled", "versions", "changed"), 0)
    newest, inputs = 0.0, torch.full((16,), 1 / 16)
    kept: deque[Kept] = deque()
    scheme.span()
    with torch.no_grad():
        for number in range(forwards):
            if number % 4:
                numbers = computes(inputs).tolist()
            else:
                with scheme.reading() as read:
                    numbers = computes(inputs).tolist()
                    found["mislabelled"] += numbers[0] != scheme.version
                found["mislabelled"] += numbers[0] != read.span.last
            span = scheme.span()
            found["mislabelled"] += span.runs != ((int(numbers[0]), 1),)
            found["forwards"] += 1
            found["mixed"] += len(set(numbers)) > 1
            found["older"] += numbers[0] < newest
            found["versions"] += numbers[0] > newest
            if keep and numbers[0] > newest:
                with scheme.reading():
                    kept.append(Kept.of(model))
                scheme.span()
                if len(kept) > keep:
                    found["changed"] += kept.popleft().has_changed()
            newest = numbers[0]
    found["changed"] += sum(each.has_changed() for each in kept)
    return found


def work(scheme: Any, case: Case, idx: int, forwards: int, said: Any) -> None:
    """Run a worker."""
    torch.set_num_threads(1)
    if case.api == "async":
        said.put(aiosync.run(work_async(scheme, case, idx, forwards)))
        return
    model = case.model()
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        scheme.connect(timeout=PATIENCE)
        said.put(look(scheme, model, case.computes(model), forwards, case.keep))


async def work_async(scheme: Any, case: Case, idx: int, forwards: int) -> dict[str, int]:
    """Run a worker with an event loop, which computes in a thread."""
    model = case.model()
    async with scheme:
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect(timeout=PATIENCE)
        computes = case.computes(model)
        return await asyncio.to_thread(look, scheme, model, computes, forwards, case.keep)


def run(case: Case, workers: int, forwards: int) -> dict[str, int]:
    """Run one trainer that sends until its workers have computed all forwards."""
    context = multiprocessing.get_context("spawn")
    model, said = case.model(), context.Queue()
    of = aiosync if case.api == "async" else aiosync.sync
    scheme = SCHEMES[case.transport](of)
    fill(model, 1.0)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=workers)
    processes = [
        context.Process(target=work, args=(scheme, case, idx, forwards, said))
        for idx in range(workers)
    ]
    for process in processes:
        process.start()
    over = threading.Event()
    answers: list[dict[str, int]] = []

    def collect() -> None:
        answers.extend(said.get(timeout=PATIENCE) for _ in range(workers))
        over.set()

    threading.Thread(target=collect, daemon=True).start()
    sends = (
        aiosync.run(send_async(scheme, model, over))
        if case.api == "async"
        else send(scheme, model, over)
    )
    for process in processes:
        process.join(PATIENCE)
    total = {key: sum(answer[key] for answer in answers) for key in answers[0]}
    return {**total, "sends": sends}


async def send_async(scheme: Any, model: nn.Module, over: threading.Event) -> int:
    """Send until ``over`` is set; return the last version."""
    async with scheme:
        await scheme.connect(timeout=PATIENCE)
        while not over.is_set():
            fill(model, float(scheme.version + 1))
            try:
                await scheme.send()
            except aiosync.PartialSyncError:
                # Workers leave when they are done.
                await asyncio.to_thread(over.wait, PATIENCE)
        return int(scheme.version)


def send(scheme: Any, model: nn.Module, over: threading.Event) -> int:
    """Send until ``over`` is set, by the blocking API; return the last version."""
    with scheme:
        scheme.connect(timeout=PATIENCE)
        while not over.is_set():
            fill(model, float(scheme.version + 1))
            try:
                scheme.send()
            except aiosync.PartialSyncError:
                over.wait(PATIENCE)
        return int(scheme.version)


def main() -> None:
    """Run all cases, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forwards", type=int, default=100_000, help="of all cases together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--agent", action="store_true", help="of a model without a forward")
    parser.add_argument("--keep", type=int, default=0, help="versions of which workers keep all")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    kinds = itertools.product(
        SCHEMES, ("async", "facade"), (False, True), [given.agent], [given.keep]
    )
    cases = list(itertools.starmap(Case, kinds))
    each = -(-given.forwards // len(cases) // given.workers)
    wrong = 0
    for case in cases:
        name = f"{case.transport}, {case.api}, {'compiled' if case.compiled else 'eager'}"
        if given.only not in name:
            continue
        found = run(case, given.workers, each)
        wrong += sum(found[each] for each in ("mixed", "older", "mislabelled", "changed"))
        wrong += found["versions"] < 20
        print(
            f"{name:>24}: {', '.join(f'{value} {key}' for key, value in found.items())}", flush=True
        )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

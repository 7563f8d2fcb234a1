"""Program: two ranks of an engine, one of which gets the next version before it loads this one.

With the argument ``without-copy`` the ranks have no copy of their weights.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import aiosync
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo, register

SECONDS = 60.0


class Model(torch.nn.Module):
    def __init__(self, loading: Any) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self._loading = loading

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.bias.data.copy_(tensor)
        self._loading.set()


def run_rank(rank: int, folder: Path, pipe: Connection, loading: Any, staged: Any) -> None:
    """Call the methods that arrive on a pipe, and answer with the error and the bias.

    Args:
        rank: Rank of this process. Rank 0 goes on from its first comparison of versions only when
            the next version is staged.
        folder: Folder for the rendezvous.
        pipe: Takes pairs of a method's name and its argument; ``None`` ends this process.
        loading: Event that rank 1 sets when it has loaded weights.
        staged: Event that says that the next version is staged.
    """
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    register()
    init_distributed_environment(2, rank, f"file://{folder}/world", rank, "gloo")
    model = Model(loading if rank == 1 else SimpleNamespace(set=int))
    engine = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="aiosync"),
        SimpleNamespace(
            parallel_config=SimpleNamespace(
                rank=rank, world_size=2, data_parallel_index=0, data_parallel_size=1
            ),
            model_config=SimpleNamespace(dtype=torch.float32, quantization=None),
        ),
        torch.device("cpu"),
        model,
    )
    gather = dist.all_gather

    def gather_late(*args: Any, **options: Any) -> None:
        gather(*args, **options)
        staged.wait(SECONDS)

    while (call := pipe.recv()) is not None:
        name, argument = call
        if name == "init_transfer_engine":
            argument = engine.parse_init_info(argument)
        elif rank == 0:
            dist.all_gather = gather_late
        try:
            getattr(engine, name)(argument)
            error = ""
        except aiosync.AiosyncError as exc:
            error = f"{type(exc).__name__}: {exc}"
        pipe.send((error, model.bias.tolist()))
    engine.shutdown()


class Client:
    """Client that calls both ranks, and fails like an engine: only if the last rank fails."""

    def __init__(self, pipes: list[Connection], staged: Any) -> None:
        self._pipes, self._staged = pipes, staged
        # Answers to the first update, and to the newest call.
        self.first: list[Any] = []
        self.answers: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.start("init_transfer_engine", init_info)
        self.finish()

    def start(self, name: str, argument: dict[str, Any]) -> None:
        for pipe in self._pipes:
            pipe.send((name, argument))

    def finish(self) -> None:
        self.answers = [pipe.recv() for pipe in self._pipes]
        if self.answers[-1][0]:
            raise RuntimeError(self.answers[-1][0])

    def start_weight_update(self) -> None:
        # The trainer calls this when both ranks have staged the next version.
        if not self._staged.is_set():
            self._staged.set()
            self.first = [pipe.recv() for pipe in self._pipes]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.start("update_weights", update_info)
        self.finish()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: no update is to be kept."""


def main(folder: Path, *, rollback: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    loading, staged = context.Event(), context.Event()
    ends = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=run_rank, args=(rank, folder, theirs, loading, staged), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    for each in ranks:
        each.start()
    client = Client([mine for mine, _ in ends], staged)
    info = AiosyncTrainerInitInfo(
        rank=0,
        address=f"unix://{folder}/s",
        num_workers=2,
        pause=None,
        check="none",
        timeout=SECONDS,
        activation_timeout=SECONDS,
        rollback=rollback,
    )
    seen: dict[str, Any] = {}
    with AiosyncTrainerEngine.trainer_init(info, client=client) as trainer:
        trainer.stage({"bias": torch.full((4,), 1.0)})
        client.start("update_weights", {"version": 1, "timeout": SECONDS})
        assert loading.wait(SECONDS)
        trainer.stage({"bias": torch.full((4,), 2.0)})
        # The first call lets rank 0 go on, which has version 2 now. No rank keeps it.
        with contextlib.suppress(aiosync.AiosyncError):
            trainer.activate()
        seen["first"] = client.first
        trainer.send_weights({"bias": torch.full((4,), 3.0)})
        seen["third"] = client.answers
    for pipe, _ in ends:
        pipe.send(None)
    for each in ranks:
        each.join(SECONDS)
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        report = json.dumps(main(Path(made), rollback="without-copy" not in sys.argv))
        sys.stdout.write(f"SEEN {report}\n")

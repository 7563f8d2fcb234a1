"""What the limits share: the model's memory, copies out of it, and workers that only answer.

Must not import aiosync's schemes, torchrl, ray, typer or rich.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aiosync.bench._contender import PATIENCE, Desk, Handle
from aiosync.bench._results import Case
from aiosync.bench._worker import Crew
from aiosync.bench._workloads import WORKLOADS, fill

__all__ = ["Answers", "Bytes", "Copy", "Limit", "Stub", "simplex", "view_of"]

Bytes = NDArray[np.uint8]
"""Memory, as an array of bytes."""

_SMALL = 2**16  # bytes up to which a memoryview's copy costs less than a call of numpy


class Limit:
    """The trainer's half of a limit: what a :class:`Blocking` contender has, for subclasses.

    Attributes:
        model: What is sent.
        sources: The memory of its parameters.
        crew: Worker processes, where some take part.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.sources: list[Bytes] = []
        self.crew = Crew()

    def open(self, case: Case) -> Sequence[Handle]:
        """Build the model and start what takes part."""
        self.model = WORKLOADS[case.workload].build()
        fill(self.model, 1.0)
        self.sources = [
            parameter.detach().view(-1).numpy().view(np.uint8)
            for parameter in self.model.parameters()
        ]
        return self.start(case)

    def start(self, case: Case) -> Sequence[Handle]:
        """Start workers, if there are any, and return their handles."""
        raise NotImplementedError

    def send(self) -> None:
        """Move the bytes; return when they are where they should be."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers and let go of the memory."""
        self.crew.stop()
        self.sources = []


class Copy:
    """Copies part of a model into part of a flat block, as fast as one thread can.

    Args:
        sources: The memory of the parameters, which the block holds one after the other.
        block: Where to.
        low: First byte of the block to write.
        high: The byte after the last one.
    """

    def __init__(
        self, sources: Sequence[Bytes], block: Bytes, low: int = 0, high: int | None = None
    ) -> None:
        end = len(block) if high is None else high
        self._large: list[tuple[Bytes, Bytes]] = []
        self._small: list[tuple[memoryview, memoryview]] = []
        at = 0
        for source in sources:
            first, last = max(low, at), min(end, at + len(source))
            if first < last:
                pair = block[first:last], source[first - at : last - at]
                if last - first > _SMALL:
                    self._large.append(pair)
                else:
                    self._small.append((view_of(pair[0]), view_of(pair[1])))
            at += len(source)

    def run(self) -> None:
        """Copy. The GIL is only held for small tensors."""
        for to, source in self._small:
            to[:] = source
        for target, origin in self._large:
            np.copyto(target, origin)


class Answers:
    """One byte from each of several workers, read by one loop over ``poll``."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._poll = select.poll()

    def add(self, end: Any) -> None:
        """Expect the bytes of one more worker: a pipe's end or a socket; closed by close()."""
        self._ends.append(end)
        self._poll.register(end.fileno(), select.POLLIN)

    def wait(self) -> None:
        """Return when every worker has written one byte.

        Raises:
            RuntimeError: One is gone, or says nothing.
        """
        left = len(self._ends)
        deadline = time.monotonic() + PATIENCE
        while left:
            for fd, _ in self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                if not os.read(fd, 1):
                    raise RuntimeError("a worker ended before it answered")
                left -= 1
            if left and time.monotonic() > deadline:
                raise RuntimeError(f"a worker gave no answer in {PATIENCE:g} s")

    def close(self) -> None:
        """Close the ends."""
        for end in self._ends:
            self._poll.unregister(end.fileno())
            end.close()
        self._ends = []


class Stub(Desk):
    """The desk of a worker that has no weights to check."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        super().__init__(nn.Linear(1, 1))

    def answer(self, question: str, argument: Any) -> Any:
        """Answer ``"usage"`` and ``"reset peak"``; there is nothing to say to the rest."""
        if question in ("check", "busy"):
            return None
        return super().answer(question, argument)

    def serve_one(self, pipe: Connection) -> bool:
        """Answer one question; whether there will be more."""
        try:
            question, argument = pipe.recv()
        except EOFError:  # the trainer is gone
            return False
        if question == "end":
            return False
        pipe.send(self.reply(question, argument))
        return True


def simplex() -> tuple[Connection, Connection]:
    """Make a pipe for one direction: the end to read from, and the end to write to."""
    read, write = multiprocessing.Pipe(duplex=False)
    return read, write


def view_of(memory: Bytes) -> memoryview:
    """Look at the same memory without numpy, whose own slices cost more."""
    return memoryview(memory)  # type: ignore[arg-type]  # Buffer is only known from 3.12 on

"""What a contender is: the two halves of one way to move weights, and how they are asked.

Must not import aiosync's schemes, torchrl, ray, typer or rich.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import nn

from aiosync.bench._results import Case
from aiosync.bench._workloads import check

__all__ = [
    "PATIENCE",
    "Awaited",
    "Blocking",
    "Desk",
    "Handle",
    "PipeHandle",
    "Usage",
    "ask_all",
    "reset_peak",
    "usage",
]

PATIENCE = 120.0
"""Seconds after which something that should be there is taken to have failed."""


class Blocking(Protocol):
    """The trainer's half of a contender with calls that block.

    Attributes:
        model: What it sends; there from :meth:`open` on, in memory that only the trainer has
            unless the contender is one that shares it, and says so by its name.
    """

    model: nn.Module

    def open(self, case: Case) -> Sequence[Handle]:
        """Build the model, start the workers and join them; return one handle for each."""

    def send(self) -> None:
        """Send the model's weights; return when every worker has applied them."""

    def close(self) -> None:
        """End the workers and let go of everything. Also after an :meth:`open` that failed."""


class Awaited(Protocol):
    """The trainer's half of a contender with calls to await; see :class:`Blocking`.

    Attributes:
        model: What it sends.
    """

    model: nn.Module

    async def open(self, case: Case) -> Sequence[Handle]:
        """Build the model, start the workers and join them; return one handle for each."""

    async def send(self) -> None:
        """Send the model's weights; return when every worker has applied them."""

    async def close(self) -> None:
        """End the workers and let go of everything. Also after an :meth:`open` that failed."""


# -- asking workers -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker's process has used so far.

    Attributes:
        cpu: CPU seconds of all its threads.
        switches: Voluntary context switches of all its threads: each ended a time awake.
        peak_rss: Most resident memory since the last reset, in bytes.
        pss: Its share of resident memory now, in bytes: what several processes map is divided.
        forwards: Forwards so far, of a busy worker.
        rss: Resident memory now, in bytes.
    """

    cpu: float
    switches: int
    peak_rss: int
    pss: int
    forwards: int = 0
    rss: int = 0


class Handle(Protocol):
    """How the trainer asks one worker."""

    def ask(self, question: str, argument: Any = None) -> None:
        """Put a question; see :meth:`Desk.answer`. Does not wait."""

    def answer(self) -> Any:
        """Wait for the answer to it, at most :data:`PATIENCE`.

        Raises:
            RuntimeError: The worker answered with an error, is gone, or says nothing.
        """


class PipeHandle:
    """A worker at the other end of a pipe, which :meth:`Desk.serve` or one like it reads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def ask(self, question: str, argument: Any = None) -> None:
        """Put a question. Does not wait."""
        self._pipe.send((question, argument))

    def answer(self) -> Any:
        """Wait for the answer to it."""
        if not self._pipe.poll(PATIENCE):
            raise RuntimeError(f"a worker gave no answer in {PATIENCE:g} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise RuntimeError("a worker ended before it answered") from exc
        if not good:
            raise RuntimeError(f"a worker: {value}")
        return value


def ask_all(handles: Sequence[Handle], question: str, argument: Any = None) -> list[Any]:
    """Ask every worker the same, at the same time, and return their answers in order."""
    for handle in handles:
        handle.ask(question, argument)
    return [handle.answer() for handle in handles]


# -- the worker's side --------------------------------------------------------------------------


class Desk:
    """What a worker answers, and the forwards that it computes when it is busy.

    Args:
        model: The model that receives.
        reading: Enters the scheme's guard around a forward; a peer that has none needs none.
    """

    def __init__(
        self,
        model: nn.Module,
        reading: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model
        self.busy = False
        self._reading = reading
        self._parameter = next(model.parameters())
        self._work = torch.rand(192, 192)
        self._forwards = 0

    def forward(self) -> None:
        """Compute for about a third of a millisecond, and look at the weights."""
        with self._reading():
            torch.mm(self._work, self._work)
            self._parameter.detach()[:1].sum()
        self._forwards += 1

    def answer(self, question: str, argument: Any) -> Any:
        """Answer one of the questions below; all others are errors.

        ``"check"`` (a value) looks at every element, ``"busy"`` turns forwards on or off, ``"cpu"``
        is this process's CPU time in seconds, ``"usage"`` all of :class:`Usage`, which takes
        some CPU time itself, and ``"reset peak"`` what its name says.

        Raises:
            AssertionError: The weights are others than asked for.
        """
        match question:
            case "check":
                return check(self.model, argument)
            case "busy":
                self.busy = argument
            case "cpu":
                return time.process_time()
            case "usage":
                return usage(self._forwards)
            case "reset peak":
                reset_peak()
            case _:
                raise ValueError(f"no such question: {question!r}")
        return None

    def serve(self, pipe: Connection) -> None:
        """Answer what comes through a pipe, with forwards meanwhile if busy, until it says end.

        For workers whose weights are applied by another thread; blocks.
        """
        while True:
            while self.busy and not pipe.poll():
                self.forward()
            try:
                question, argument = pipe.recv()
            except EOFError:  # the trainer is gone
                return
            if question == "end":
                return
            pipe.send(self.reply(question, argument))

    def reply(self, question: str, argument: Any) -> tuple[bool, Any]:
        """Answer in the form that :class:`PipeHandle` expects, errors included."""
        try:
            return True, self.answer(question, argument)
        except Exception as exc:  # noqa: BLE001  # raised again in the trainer, by answer()
            return False, f"{type(exc).__name__}: {exc}"


def usage(forwards: int = 0) -> Usage:
    """Look at what this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = _fields("/proc/self/status")
    return Usage(
        cpu=time.process_time(),
        switches=used.ru_nvcsw,  # the others only say that somebody else had the core
        peak_rss=status.get("VmHWM", 0),
        pss=_fields("/proc/self/smaps_rollup").get("Pss", 0),
        forwards=forwards,
        rss=status.get("VmRSS", 0),
    )


def reset_peak() -> None:
    """Let the peak of resident memory start again from what it is now. Linux only."""
    if os.path.exists("/proc/self/clear_refs"):
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")


def _fields(path: str) -> dict[str, int]:
    """The fields in kB of a file of /proc, in bytes; none where there is no such file."""
    found = {}
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                words = rest.split()
                if words[1:] == ["kB"]:
                    found[name] = int(words[0]) * 1024
    return found

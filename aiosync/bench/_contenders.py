"""Who takes part, by transport. Names only: a trainer's process imports what it needs.

Must not import torch, aiosync's schemes, torchrl, ray, typer or rich.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Literal

from aiosync.bench._results import LIMIT

__all__ = ["CONTENDERS", "TRANSPORTS", "Contender", "Loop"]

Loop = Literal["uvloop", "asyncio", "blocking"]
"""What drives the trainer: an event loop, or nothing, where calls block."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to move weights over one transport.

    Attributes:
        name: ``"aiosync"``, ``"aiosync/asyncio"``, ``"aiosync/facade"``, ``"aiosync/network"``,
            ``"torchrl"``, ``"torchrl/aliased"``, or that of a limit: it begins with ``"limit/"``.
        loop: What drives its trainer, and its workers if they are async.
        factory: ``"module:name"`` of what makes its trainer's half.
        needs: Packages that must be installed.
        lasting: Its trainer's process serves one case after another; otherwise one only.
    """

    name: str
    loop: Loop
    factory: str
    needs: tuple[str, ...] = ()
    lasting: bool = True

    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def _ours(transport: str, module: str, needs: tuple[str, ...] = ()) -> list[Contender]:
    factory = f"aiosync.bench.{module}:{transport}"
    return [
        Contender("aiosync", "uvloop", factory, ("uvloop", *needs)),
        Contender("aiosync/asyncio", "asyncio", factory, needs),
        Contender("aiosync/facade", "blocking", f"{factory}_facade", needs),
    ]


def _network(transport: str, module: str, needs: tuple[str, ...] = ()) -> Contender:
    """Workers as if on other hosts, where a scheme treats those of its own differently."""
    factory = f"aiosync.bench.{module}:{transport}_network"
    return Contender("aiosync/network", "uvloop", factory, ("uvloop", *needs))


def _theirs(factory: str, name: str = "torchrl", needs: tuple[str, ...] = ()) -> Contender:
    return Contender(name, "blocking", f"aiosync.bench.{factory}", ("torchrl", *needs))


def _limit(name: str, needs: tuple[str, ...] = ()) -> Contender:
    """Names such as ``"memcpy all threads"``; made by a function such as memcpy_all_threads."""
    function = name.replace(" ", "_").replace("+", "_")
    return Contender(f"{LIMIT}{name}", "blocking", f"aiosync.bench._limits:{function}", needs)


_GLOO = "_torchrl_local:gloo"
_WAKE_UP = _limit("round trip")
_COPIES = [_limit("memcpy"), _limit("memcpy all threads")]
CONTENDERS: dict[str, list[Contender]] = {
    "shm": [
        *_ours("shm", "_aiosync_local"),
        _theirs("_torchrl_local:shm"),
        _theirs("_torchrl_local:shm_aliased", "torchrl/aliased"),
        _WAKE_UP,
        *_COPIES,
    ],
    "pipe": [
        *_ours("pipe", "_aiosync_local"),
        _theirs("_torchrl_local:pipe"),
        _theirs("_torchrl_local:pipe_aliased", "torchrl/aliased"),
        _WAKE_UP,
        _limit("raw unix socket"),
    ],
    # TorchRL has no streams: what it offers between machines is Gloo.
    "tcp": [
        *_ours("tcp", "_aiosync_local"),
        _theirs(_GLOO),
        _WAKE_UP,
        _limit("raw socket"),
    ],
    "unix": [
        *_ours("unix", "_aiosync_local"),
        _theirs(_GLOO),
        _WAKE_UP,
        _limit("raw unix socket"),
    ],
    "gloo": [
        *_ours("gloo", "_aiosync_local"),
        _network("gloo", "_aiosync_local"),
        _theirs(_GLOO),
        _WAKE_UP,
        _limit("gloo broadcast"),
    ],
    "rpc": [
        *_ours("rpc", "_aiosync_rpc"),
        _network("rpc", "_aiosync_rpc"),
        # References of torch's RPC belong to the first group that a process joins.
        replace(_theirs("_torchrl_rpc:rpc"), lasting=False),
        _WAKE_UP,
        _limit("gloo broadcast"),
    ],
    "ray": [
        *_ours("ray", "_aiosync_ray", ("ray",)),
        _network("ray", "_aiosync_ray", ("ray",)),
        _theirs("_torchrl_ray:ray", needs=("ray",)),
        _limit("ray put+get", ("ray",)),
    ],
}
"""By transport, in the order in which they take turns."""

TRANSPORTS = tuple(CONTENDERS)
"""Names of the transports."""

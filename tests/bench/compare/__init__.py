"""More contenders: TorchRL, and aiosync over RPC and Ray, with their limits.

The import of this package registers them.
"""

from __future__ import annotations

from aiosync.bench import LIMIT, wake_up
from tests.bench.contenders import Contender, NetworkTrainer, register
from tests.bench.processes import Lazy, OneCase

_HERE = "tests.bench.compare"


def _theirs(
    factory: str, name: str = "torchrl", needs: tuple[str, ...] = (), kind: type = Contender
) -> Contender:
    make = Lazy(f"{_HERE}.{factory}")
    return kind(name, "blocking", make, needs=("torchrl", *needs), surface=name != "torchrl")


def _ours(module: str, function: str, needs: tuple[str, ...] = ()) -> list[Contender]:
    make, facade, network = (
        Lazy(f"{_HERE}.{module}:{function}{kind}") for kind in ("", "_facade", "_network")
    )
    fast = ("uvloop", *needs)
    return [
        Contender("aiosync", "uvloop", make, needs=fast),
        Contender("aiosync/asyncio", "asyncio", make, needs=needs, surface=True),
        Contender("aiosync/facade", "blocking", facade, needs=needs, surface=True),
        Contender("aiosync/network", "uvloop", network, needs=fast),
    ]


def _limit(name: str, factory: str, needs: tuple[str, ...] = ()) -> Contender:
    return Contender(f"{LIMIT}{name}", "blocking", Lazy(f"{_HERE}.limits:{factory}"), needs=needs)


_WAKE_UP = Contender(f"{LIMIT}round trip", "blocking", wake_up)
_BROADCAST = _limit("gloo broadcast", "GlooBroadcast")
_GLOO = _theirs("torchrl_local:gloo")

register("shm", _theirs("torchrl_local:shm"))
register("shm", _theirs("torchrl_local:shm_aliased", "torchrl/aliased"))
register("pipe", _theirs("torchrl_local:pipe"))
register("pipe", _theirs("torchrl_local:pipe_aliased", "torchrl/aliased"))
# TorchRL has no streams: between machines it offers Gloo.
register("tcp", _GLOO)
register("unix", _GLOO)
# This scheme treats its workers as if they were on other hosts.
register(
    "gloo",
    Contender("aiosync/network", "uvloop", NetworkTrainer, ("uvloop",)),
    _GLOO,
    _BROADCAST,
)
register(
    "rpc",
    *_ours("aiosync_rpc", "rpc"),
    # References of torch's RPC belong to the first group that a process joins.
    _theirs("torchrl_rpc:rpc", kind=OneCase),
    _WAKE_UP,
    _BROADCAST,
)
register(
    "ray",
    *_ours("aiosync_ray", "ray", ("ray",)),
    _theirs("torchrl_ray:ray", needs=("ray",)),
    _limit("ray put+get", "RayPutGet", ("ray",)),
)

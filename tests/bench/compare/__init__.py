"""More contenders: TorchRL, and aiosync over RPC and Ray, with their limits.

Importing this registers them.
"""

from __future__ import annotations

from aiosync.bench import LIMIT, Contender, register

_HERE = "tests.bench.compare"


def _theirs(factory: str, name: str = "torchrl", **more: object) -> Contender:
    needs = ("torchrl", *more.pop("needs", ()))
    surface = name != "torchrl"
    return Contender(name, "blocking", f"{_HERE}.{factory}", needs=needs, surface=surface, **more)


def _ours(module: str, function: str, needs: tuple[str, ...] = ()) -> list[Contender]:
    factory = f"{_HERE}.{module}:{function}"
    fast = ("uvloop", *needs)
    return [
        Contender("aiosync", "uvloop", factory, needs=fast),
        Contender("aiosync/asyncio", "asyncio", factory, needs=needs, surface=True),
        Contender("aiosync/facade", "blocking", f"{factory}_facade", needs=needs, surface=True),
        Contender("aiosync/network", "uvloop", f"{factory}_network", needs=fast),
    ]


def _limit(name: str, factory: str, needs: tuple[str, ...] = ()) -> Contender:
    return Contender(f"{LIMIT}{name}", "blocking", f"{_HERE}.limits:{factory}", needs=needs)


_WAKE_UP = Contender(f"{LIMIT}round trip", "blocking", "aiosync.bench:wake_up")
_BROADCAST = _limit("gloo broadcast", "GlooBroadcast")
_GLOO = _theirs("torchrl_local:gloo")

register("shm", _theirs("torchrl_local:shm"))
register("shm", _theirs("torchrl_local:shm_aliased", "torchrl/aliased"))
register("pipe", _theirs("torchrl_local:pipe"))
register("pipe", _theirs("torchrl_local:pipe_aliased", "torchrl/aliased"))
# TorchRL has no streams: what it offers between machines is Gloo.
register("tcp", _GLOO)
register("unix", _GLOO)
# Workers as if on other hosts, which a scheme treats differently.
_NETWORK = "aiosync.bench:AsyncTrainer"
register(
    "gloo",
    Contender("aiosync/network", "uvloop", _NETWORK, ("gloo_network",), ("uvloop",)),
    _GLOO,
    _BROADCAST,
)
register(
    "rpc",
    *_ours("aiosync_rpc", "rpc"),
    # References of torch's RPC belong to the first group that a process joins.
    _theirs("torchrl_rpc:rpc", lasting=False),
    _WAKE_UP,
    _BROADCAST,
)
register(
    "ray",
    *_ours("aiosync_ray", "ray", ("ray",)),
    _theirs("torchrl_ray:ray", needs=("ray",)),
    _limit("ray put+get", "RayPutGet", ("ray",)),
)

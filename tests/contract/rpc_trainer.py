"""Runs checks of the contract in the trainer of an RPC group."""

from __future__ import annotations

from functools import partial

import aiosync
from tests.contract.bench import PATIENCE, Hooks
from tests.contract.suite import ANYWHERE
from tests.schemes import _rpc_group

make = partial(aiosync.RPCWeightSyncScheme, timeout=PATIENCE, shared_memory=False)


async def run(number: int) -> None:
    hooks = Hooks(hire=_rpc_group.group.hire)
    await ANYWHERE[number].run(make, hooks, leaks=("tasks",))

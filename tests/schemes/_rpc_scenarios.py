"""What happens in an RPC group; each function is the trainer of one test of ``test_rpc``."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import Any

from torch.distributed import rpc

import aiosync
from aiosync.schemes.rpc import RPCWeightSyncScheme
from tests.contract.bench import Bench, Hooks, fill, large, raises, until
from tests.schemes import _rpc_group


class Collector:
    """What a scheme looks at in TorchRL's RPCCollector."""

    def __init__(self, infos: list[Any], policy: Any) -> None:
        self.collector_infos, self.policy = infos, policy


async def told_where() -> None:
    """Workers with early copies, which come first, are told by name; also after a lost link."""
    names, model = _rpc_group.group.names, large()
    collector = Collector([rpc.get_worker_info(name) for name in names], model)
    nobody = [*names, "nobody"]  # delays no other
    for shared, known in (
        (True, {"context": collector}),
        (False, {"model": model, "workers": nobody, "num_workers": 3}),
    ):
        fill(model, 5.0)
        async with RPCWeightSyncScheme("state_dict", shared_memory=shared) as scheme:
            init = {"model_id": "policy", "model": large(), "worker_idx": None}
            workers = [_rpc_group.group.hire(scheme, init) for _ in names]
            joining = asyncio.gather(*(worker.connect() for worker in workers))
            scheme.init_on_sender(model_id="policy", **known)
            await scheme.connect(timeout=_rpc_group.MAX_SECONDS)
            await joining
            assert [await worker.value() for worker in workers] == [5.0] * 3
            scheme.sender_transports[1].abort()
            await until(lambda scheme=scheme: 1 not in scheme.sender_transports)
            await until(lambda scheme=scheme: 1 in scheme.sender_transports)
            fill(model, 6.0)
            assert (await scheme.send()).acked == {0, 1, 2}
            assert [await worker.value() for worker in workers] == [6.0] * 3
            for worker in workers:
                await worker.leave()


async def killed() -> None:
    """A worker stands still and dies in mid-transfer; the others have what they got."""
    make = partial(RPCWeightSyncScheme, shared_memory=False)
    bench = Bench(make, Hooks(hire=_rpc_group.group.hire))
    async with bench.crew(large(1.0), [large() for _ in range(3)]) as crew:
        dead = crew.workers.pop(1)
        os.kill(dead.process.pid, signal.SIGSTOP)
        sending = asyncio.ensure_future(crew.send(2.0))
        await until(lambda: crew.sender.worker_versions == {0: 2, 1: 1, 2: 2})
        dead.process.kill()
        error = await raises(aiosync.PartialSyncError, asyncio.wait_for(sending, 5.0))
        assert (set(error.failed), error.acked) == ({1}, {0, 2})
        assert isinstance(error.failed[1], (aiosync.TransportBroken, aiosync.PeerClosed))
        report = await crew.send(3.0)
        assert (report.acked, set(report.lost)) == ({0, 2}, {1})
        assert await crew.values() == [3.0, 3.0]

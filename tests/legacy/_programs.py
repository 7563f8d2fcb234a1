"""Programs that tests run in processes of their own, since Ray and RPC never leave a process."""

from __future__ import annotations

import math
import os
import tempfile
import time
import warnings
from typing import Any

import torch
from tensordict import TensorDict

import aiosync
from aiosync import legacy


def expect(kind: type[BaseException], call: Any, *args: Any) -> BaseException:
    try:
        call(*args)
    except kind as exc:
        return exc
    raise AssertionError(f"{call} did not raise {kind.__name__}")


_SLOW = 1000.0


class Collector:
    """Remote object with the methods that the older generation's transports call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.model = torch.nn.Linear(2, 1)

    def update_policy_weights_(self, weights: Any, model_id: str = "policy") -> None:
        value = float(weights["weight"].sum())
        if value < 0:
            raise ValueError("negative weights")
        if value > _SLOW:
            time.sleep(8.0)
        self.seen.append((model_id, value))

    def _update_weights_tensordict(self, params: Any) -> None:
        params.to_module(self.model, preserve_module_state=False)

    def _update_weights_state_dict(self, state_dict: Any) -> None:
        self.model.load_state_dict(state_dict)

    def told(self) -> list[tuple[str, float]]:
        return self.seen

    def value(self) -> float:
        return float(self.model.weight.detach().sum())


def check_timeout(sender: Any) -> None:
    """Check that a scheme's ``timeout=`` limits its transports; this sender has a short one."""
    started = time.monotonic()
    error = expect(aiosync.PartialSyncError, sender.send, td(_SLOW))
    assert "AckTimeout" in str(error), error
    assert time.monotonic() - started < 8.0


def td(value: float) -> TensorDict:
    return TensorDict({"weight": torch.full((1, 2), value), "bias": torch.zeros(1)}, [])


def check_calls(sender: Any, transport: Any, told: Any) -> None:
    """Check the behaviour that all transports that call ``update_policy_weights_`` share."""
    sender.send(td(1.0))
    weights = td(2.0)
    sender.send_async(weights)
    weights["weight"].zero_()
    expect(RuntimeError, sender.send, td(3.0))
    sender.wait_async()
    expect(RuntimeError, sender.wait_async)
    sender.send({"weight": torch.ones(1, 2)})
    assert told() == [("policy", 2.0), ("policy", 4.0), ("policy", 2.0)], told()
    error = expect(aiosync.PartialSyncError, sender.send, td(-1.0))
    assert "negative weights" in str(error), error
    assert isinstance(transport, legacy.TransportBackend)
    assert transport.check_connection()
    assert transport.receive_weights() is None
    transport.send_weights("critic", td(4.0))
    assert told()[-1] == ("critic", 8.0)
    transport.timeout = math.inf
    transport.send_weights("policy", td(5.0))
    transport.send_weights_async("policy", td(6.0))
    transport.wait_ack(timeout=math.inf)
    assert told()[-2:] == [("policy", 10.0), ("policy", 12.0)]


def ray_program() -> None:
    import ray

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _temp_dir=folder,
        )
        try:
            _call_actors(ray)
        finally:
            ray.shutdown()


def _call_actors(ray: Any) -> None:
    actors = [ray.remote(num_cpus=0)(Collector).remote()]
    scheme = legacy.RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", remote_collectors=actors, num_collectors=1)
    transport = scheme.create_transport(actors[0])
    check_calls(scheme.get_sender(), transport, lambda: ray.get(actors[0].told.remote()))
    hasty = legacy.RayWeightSyncScheme(timeout=0.2)
    hasty.init_on_sender(model_id="policy", remote_collectors=actors)
    check_timeout(hasty.get_sender())
    for strategy in ("tensordict", "state_dict"):
        wrapped = legacy.RayModuleTransformScheme(strategy)
        wrapped.init_on_sender(model_id="policy", actor_refs=actors)
        sender = wrapped.get_sender()
        assert isinstance(sender, legacy.RayModuleTransformSender)
        model = torch.nn.Linear(2, 1)
        sender.send(model)
        assert ray.get(actors[0].value.remote()) == float(model.weight.detach().sum())
    ray.kill(actors[0])
    error = expect(aiosync.PartialSyncError, scheme.get_sender().send, td(5.0))
    assert "PeerClosed" in str(error), error
    assert not transport.check_connection()


def distributed_program(rank: int, port: int) -> None:
    """Run a sender, and a worker that has TorchRL's loop, in the program's default group."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    if rank == 0:
        transport = legacy.DistributedWeightSyncScheme().create_transport((store, 1))
        assert isinstance(transport, legacy.TransportBackend)
        assert transport.receive_weights() is None
        weights = td(1.0)
        transport.send_weights_async("policy", weights)
        # The send has taken a snapshot, so the worker must not get this value.
        weights["weight"].zero_()
        transport.wait_ack(timeout=math.inf)
        transport.send_weights("policy", {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
        expect(aiosync.ApplyError, transport.send_weights, "policy", td(-1.0))
        assert transport.check_connection()
        transport.timeout = 10.0
        for value in (1.0, -1.0, 2.0):
            transport.send_weights_async("policy", td(value))
        # The answers come in the order of the sends.
        transport.wait_ack()
        expect(aiosync.ApplyError, transport.wait_ack)
        transport.wait_ack()
        transport.timeout = 0.2
        expect(TimeoutError, transport.send_weights, "policy", td(3.0))
    else:
        answers = [(2.0, "updated"), (0.0, "updated"), (-2.0, "no")]
        answers += [(2.0, "updated"), (-2.0, "no"), (4.0, "updated")]
        for expected, answer in answers:
            assert store.get("NODE_1_in") == b"update_weights"
            store.delete_key("NODE_1_in")
            received = td(9.0)
            received.recv(0)
            assert float(received["weight"].sum()) == expected
            store.set("NODE_1_out", answer)
    dist.barrier()
    dist.destroy_process_group()


def stuck_program(rank: int, port: int) -> None:
    """Run an updater whose first worker takes no order, and whose second one takes each."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=3)
    if rank == 0:
        updater = legacy.DistributedWeightUpdater(store, td(1.0), num_workers=2, timeout=2.0)
        for _ in range(2):
            error = expect(aiosync.PartialSyncError, updater)
            assert isinstance(error, aiosync.PartialSyncError)
            assert (set(error.acked), set(error.failed)) == ({1}, {0}), error
        store.set("end", b"")
    elif rank == 2:
        for _ in range(2):
            assert store.get("NODE_2_in") == b"update_weights"
            store.delete_key("NODE_2_in")
            td(9.0).recv(0)
            store.set("NODE_2_out", b"updated")
    if rank:
        store.wait(["end"])
        store.set(f"ended {rank}", b"")
    else:
        store.wait(["ended 1", "ended 2"])
    # A normal exit would wait for the group, which waits for messages that were never received.
    os._exit(0)


def rpc_program(rank: int, port: int) -> None:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    # torch warns about its own deprecations.
    warnings.simplefilter("ignore", UserWarning)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=30)
    rpc.init_rpc(f"process{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        rref = rpc.remote("process1", Collector)
        scheme = legacy.RPCWeightSyncScheme()
        assert scheme.strategy == "state_dict"
        expect(TypeError, scheme.create_transport, rref)
        end = (rpc.get_worker_info("process1"), rref, Collector)
        sender = scheme.create_sender()
        sender.register_worker(0, end)
        check_calls(sender, scheme.create_transport(end), lambda: rref.rpc_sync().told())
        hasty = legacy.RPCWeightSyncScheme(timeout=0.2).create_sender()
        hasty.register_worker(0, end)
        check_timeout(hasty)
        del rref, end, sender, hasty
    rpc.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ray_program()

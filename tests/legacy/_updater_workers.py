"""Programs of the tests of the updaters: real collectors of TorchRL, each in a process apart."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchrl.collectors as theirs
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

import aiosync
import aiosync.legacy.updaters as legacy
from aiosync.legacy import RayTransport, RPCTransport
from tests.support.waiting import free_port
from tests.sync._tools import portal_threads

BIG = 1000.0
FRAMES = 20


class Line(EnvBase):
    """Environment without end: its observation is always one, its reward is ``reward``."""

    def __init__(self, reward: int = 0) -> None:
        super().__init__()
        self.reward = reward
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        return TensorDict({"observation": torch.ones(1)}, [])

    def _step(self, tensordict: TensorDict) -> TensorDict:
        done, reward = torch.zeros(1, dtype=torch.bool), torch.full((1,), float(self.reward))
        return TensorDict({"observation": torch.ones(1), "reward": reward, "done": done}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


def policy_of(value: float) -> TensorDictModule:
    """Return a policy whose actions are ``value``."""
    policy = TensorDictModule(nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])
    fill(policy, value)
    return policy


def fill(policy: nn.Module, value: float) -> None:
    """Make the actions of a policy ``value``.

    An action is the sum of the weight and the bias. If these are of two versions, the sum is far
    from either value.
    """
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            tensor.fill_(value * BIG if name.endswith("weight") else value - value * BIG)


def actions(data: TensorDict) -> set[float]:
    return set(data["action"].flatten().tolist())


def by_worker(data: TensorDict) -> list[set[float]]:
    """Return the actions of each worker in a batch of a synchronous collector."""
    return [set(part.flatten().tolist()) for part in data["action"].flatten().split(FRAMES // 2)]


def raised(call: Any, *args: Any, **kwargs: Any) -> tuple[BaseException, float]:
    """Return the exception that a call raises, and the seconds that the call took."""
    started = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as exc:  # noqa: BLE001 - the caller checks it
        return exc, time.monotonic() - started
    raise AssertionError("nothing was raised")


def assert_lost(call: Any, pid: int) -> None:
    """Kill worker 0; check that the call reports its loss at once, and names it."""
    os.kill(pid, signal.SIGKILL)
    error, seconds = raised(call)
    assert isinstance(error, aiosync.PartialSyncError), error
    assert set(error.failed) == {0}, error
    assert isinstance(error.failed[0], aiosync.PeerClosed | aiosync.TransportBroken), error
    assert error.acked == {1}
    assert seconds < 5, seconds


def assert_unreached(updater: Any, weights: Any, kind: type[Exception]) -> None:
    """Check that an update reaches worker 0, and that its error names worker 1."""
    error, _ = raised(updater, weights)
    assert isinstance(error, aiosync.PartialSyncError), error
    assert set(error.failed) == {1}, error
    assert isinstance(error.failed[1], kind), error
    assert error.acked == {0}, error


# -- scenarios --------------------------------------------------------------------------------


def vanilla() -> None:
    source = policy_of(2.0)
    policy = policy_of(1.0)
    calls = []
    updater = legacy.VanillaWeightUpdater(
        weight_getter=lambda: TensorDict.from_module(source),
        policy_weights=TensorDict.from_module(policy),
    )
    assert isinstance(updater, theirs.WeightUpdaterBase)
    updater.register_post_hook(lambda: calls.append(1))
    collector = theirs.Collector(
        Line(), policy, frames_per_batch=FRAMES, total_frames=-1, weight_updater=updater
    )
    assert updater.collector is collector
    batches = iter(collector)
    assert actions(next(batches)) == {1.0}
    assert actions(next(batches)) == {1.0}
    collector.update_policy_weights_()
    assert actions(next(batches)) == {2.0}
    fill(source, 3.0)
    assert actions(next(batches)) == {2.0}
    collector.update_policy_weights_(source)
    assert actions(next(batches)) == {3.0}
    assert calls == [1, 1]
    assert legacy.VanillaWeightUpdater.from_policy(policy).policy_weights.is_locked
    collector.shutdown()


def multi(kind: str, policy: Any, updater: Any, count: int = 2, **options: Any) -> Any:
    return getattr(theirs, kind)(
        [partial(Line, idx) for idx in range(count)],
        policy,
        frames_per_batch=FRAMES,
        total_frames=-1,
        weight_updater=updater,
        **options,
    )


def sync() -> None:
    policy = policy_of(1.0)
    hooks = []
    updater = legacy.MultiProcessedWeightUpdater(
        get_server_weights=lambda: TensorDict.from_module(policy).data,
        policy_weights={0: None, 1: None},
    )
    updater.register_post_hook(lambda: hooks.append(1))
    # TorchRL puts the trainer's policy into shared memory for this device.
    collector = multi(
        "MultiSyncCollector", policy, updater, policy_device="cpu", track_policy_version=True
    )
    batches = iter(collector)
    assert next(policy.parameters()).is_shared()
    assert by_worker(next(batches)) == [{1.0}, {1.0}]
    fill(policy, 2.0)
    assert by_worker(next(batches)) == [{1.0}, {1.0}]
    collector.update_policy_weights_()
    data = next(batches)
    assert by_worker(data) == [{2.0}, {2.0}]
    assert set(next(batches)["policy_version"].flatten().tolist()) == {1}
    fill(policy, 3.0)
    collector.update_policy_weights_(worker_ids=1)
    assert by_worker(next(batches)) == [{2.0}, {3.0}]
    collector.update_policy_weights_(policy_of(4.0), worker_ids=[0])
    assert by_worker(next(batches)) == [{4.0}, {3.0}]
    collector.update_policy_weights_(worker_ids=torch.device("cpu"))
    assert by_worker(next(batches)) == [{3.0}, {3.0}]
    assert actions(policy(TensorDict({"observation": torch.ones(1)}, []))) == {3.0}
    assert len(hooks) == 4
    assert updater.last_report is not None
    assert updater.last_report.acked == {0, 1}

    before = collector.policy_version
    updater.increment_version()
    assert collector.policy_version == before + 1
    for wrong in (2, torch.device("meta")):
        assert isinstance(
            raised(collector.update_policy_weights_, worker_ids=wrong)[0], aiosync.ConfigError
        )
    refuse(collector)
    assert by_worker(next(batches)) == [{3.0}, {3.0}]
    assert len(hooks) == 4
    late = legacy.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={})
    for registering, kind in ((late, aiosync.LocalProtocolError), (updater, ValueError)):
        # The collector's workers run already: too late for the first updater. The second one has a
        # collector.
        error, _ = raised(registering.register_collector, collector)
        assert isinstance(error, kind), error
    assert_lost(collector.update_policy_weights_, collector.procs[0].pid)
    # The updater goes on with the other worker.
    collector.update_policy_weights_()
    assert updater.last_report.acked == {1}
    updater.shutdown()
    updater.shutdown()
    assert portal_threads() == []
    assert isinstance(raised(updater)[0], aiosync.LocalProtocolError)
    collector.shutdown(timeout=5)


def moved() -> None:
    # TorchRL copies the policy for its workers, because ``cpu`` is not ``cpu:0`` to it.
    policy = policy_of(1.0)
    updater = legacy.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={})
    collector = multi("MultiSyncCollector", policy, updater, policy_device="cpu:0")
    batches = iter(collector)
    assert by_worker(next(batches)) == [{1.0}, {1.0}]
    fill(policy, 2.0)
    collector.update_policy_weights_()
    assert by_worker(next(batches)) == [{2.0}, {2.0}]
    collector.shutdown(timeout=5)


def remote(kind: str, policy: Any, updater: Any, **options: Any) -> Any:
    from torchrl.collectors import distributed as collectors

    return getattr(collectors, kind)(
        [Line, Line],
        policy,
        frames_per_batch=FRAMES,
        total_frames=10**6,
        weight_updater=updater,
        sync=True,
        **options,
    )


def distributed() -> None:
    # A pickle for a process of this host puts the policy into shared memory, too.
    policy = policy_of(1.0).share_memory()
    updater = legacy.DistributedWeightUpdater()
    options = {"launcher": "mp", "tcp_port": free_port()}
    collector = remote("DistributedCollector", policy, updater, **options)
    check_remote(collector, policy, rank=1)
    partial = {"module": {"bias": torch.full((1,), 9.0 - 6.0 * BIG)}}
    collector.update_policy_weights_(partial)
    assert_lost(collector.update_policy_weights_, collector.jobs[0].pid)
    collector.jobs[1].kill()


def rpc() -> None:
    policy = policy_of(1.0)
    updater = legacy.RPCWeightUpdater()
    collector = remote("RPCCollector", policy, updater, launcher="mp", tcp_port=free_port())
    check_remote(collector, policy)
    later = policy_of(7.0)
    collector.update_policy_weights_(later, wait=False)
    # The update has taken a snapshot, so the workers must not get this value.
    fill(later, 8.0)
    # This call has no workers of its own; it waits for the update before.
    collector.update_policy_weights_(worker_ids=[], wait=True)
    assert updater.last_report is not None
    assert updater.last_report.acked == {0, 1}
    assert actions(collector.next()) == {7.0}
    refuse(collector)
    assert actions(collector.next()) == {7.0}
    assert_lost(collector.update_policy_weights_, collector.jobs[0].pid)
    updater.shutdown()
    collector.jobs[1].kill()


def start_rpc() -> None:
    """Make this process the only one of RPC."""
    from torch.distributed import rpc as calls

    options = calls.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
    calls.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


def told_by_rpc() -> None:
    from torch.distributed import rpc as calls

    start_rpc()
    collector = Actor()
    info, reference = calls.get_worker_info(), calls.RRef(collector)
    transport = RPCTransport(info, reference, Actor, timeout=2.0)
    collector.fail(RuntimeError("an environment met its timeout"))
    error, _ = raised(transport.send_weights, "policy", {})
    assert isinstance(error, aiosync.ApplyError), error
    assert "met its timeout" in str(error)
    collector.fail(None, after=4.0)
    error, _ = raised(transport.send_weights, "policy", {})
    assert isinstance(error, aiosync.AckTimeout), error


def told_by_ray() -> None:
    cluster = start_cluster()
    actor = cluster.remote(num_cpus=0)(Actor).remote()
    cluster.get(actor.value.remote(), timeout=30)
    transport = RayTransport(actor, timeout=2.0)
    for kind in (cluster.exceptions.GetTimeoutError, cluster.exceptions.RayActorError):
        # The actor has met this in a call of its own; it is alive, and has answered.
        actor.fail.remote(kind)
        error, _ = raised(transport.send_weights, "policy", {})
        assert isinstance(error, aiosync.ApplyError), error
        assert error.remote_type == kind.__name__
    actor.fail.remote(None, after=4.0)
    error, _ = raised(transport.send_weights, "policy", {})
    assert isinstance(error, aiosync.AckTimeout), error
    cluster.kill(actor)
    error, _ = raised(transport.send_weights, "policy", {})
    assert isinstance(error, aiosync.PeerClosed), error
    cluster.shutdown()


def refused_by_rpc() -> None:
    from torch.distributed import rpc as calls

    start_rpc()
    collectors = [Actor(), Actor()]
    collectors[1].policy = None
    updater = legacy.RPCWeightUpdater(
        collector_rrefs=[calls.RRef(each) for each in collectors], timeout=20.0
    )
    for number in (1.0, 2.0):
        # It is refused with each update, and keeps none from the other.
        assert_unreached(updater, policy_of(number), aiosync.ApplyError)
        assert collectors[0].value() == number
    error, _ = raised(updater, policy_of(3.0), worker_ids=[1])
    assert isinstance(error, aiosync.PartialSyncError), error
    assert (set(error.acked), set(error.failed)) == (set(), {1})
    # Worker 0 refuses these weights, and worker 1 its receiver.
    error, _ = raised(updater, {"module": {"bias": torch.zeros(7)}})
    assert isinstance(error, aiosync.PartialSyncError), error
    assert "module.bias" in str(error.failed[0]), error
    assert "has no weights" in str(error.failed[1]), error
    assert_unreached(updater, policy_of(4.0), aiosync.ApplyError)
    # From now on the worker accepts: the next update is for both.
    collectors[1].policy = policy_of(0.0)
    updater(policy_of(5.0))
    assert [each.value() for each in collectors] == [5.0, 5.0]
    updater.shutdown()


class Halves(legacy.RPCWeightUpdater):
    """Updater whose hook skips worker 0, and sends half of the weights to the others."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if worker_id:
            halves = server_weights.apply(lambda each: each / 2)
            super()._sync_weights_with_worker(worker_id=worker_id, server_weights=halves)


def overridden() -> None:
    from torch.distributed import rpc as calls

    start_rpc()
    collectors = [Actor(), Actor(), Actor()]
    updater = Halves(collector_rrefs=[calls.RRef(each) for each in collectors], timeout=20.0)
    collectors[1].policy = None
    weights = TensorDict.from_module(policy_of(4.0)).data
    # Worker 1 refuses its receiver; worker 2, which comes after it, has the weights.
    error, _ = raised(updater, weights)
    assert isinstance(error, aiosync.PartialSyncError), error
    assert (set(error.acked), set(error.failed)) == ({2}, {1})
    assert collectors[2].value() == 2.0
    collectors[1].policy = policy_of(1.0)
    updater(weights)
    assert [each.value() for each in collectors] == [0.0, 2.0, 2.0]
    updater.shutdown()


def ray() -> None:
    cluster = start_cluster()
    policy = policy_of(1.0)
    updater = legacy.RayWeightUpdater()
    collector = remote("RayCollector", policy, updater, remote_configs={"num_cpus": 1})
    check_remote(collector, policy)
    refuse(collector)
    updater.max_interval = 1
    collector.update_policy_weights_(policy_of(7.0))
    assert actions(collector.next()) == {6.0}
    collector.update_policy_weights_(policy_of(7.0))
    assert actions(collector.next()) == {7.0}
    updater.max_interval = 0
    actor = collector.remote_collectors[0]
    pid = cluster.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=20)
    assert_lost(collector.update_policy_weights_, pid)
    updater.shutdown()
    collector.shutdown(shutdown_ray=True)


class Actor:
    """The attributes of a collector that an updater uses, in an actor that Ray restarts."""

    def __init__(self) -> None:
        self.policy = policy_of(0.0)

    def increment_version(self) -> None:
        pass

    def set_policy(self, policy: nn.Module | None) -> None:
        self.policy = policy

    def value(self) -> float:
        with torch.no_grad():
            return float(self.policy(TensorDict({"observation": torch.ones(1)}, []))["action"])

    def fail(self, error: Any, after: float = 0.0) -> None:
        """Let calls with weights raise an error or class of errors, or take some seconds."""
        self.error, self.seconds = error, after

    def update_policy_weights_(self, weights: Any) -> None:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def hold(self, until: Path) -> None:
        """Stay busy until a file exists."""
        while not until.exists():
            time.sleep(0.05)

    def end(self) -> None:
        os._exit(1)


def start_cluster() -> Any:
    """Start Ray, and return its module."""
    import ray as cluster

    cluster.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=128 * 2**20
    )
    return cluster


def unreachable() -> None:
    cluster = start_cluster()
    actors = [cluster.remote(num_cpus=0)(Actor).remote() for _ in range(2)]
    cluster.kill(actors[1])
    updater = legacy.RayWeightUpdater(policy_of(1.0), actors, timeout=20.0)
    for number in (1.0, 2.0):
        assert_unreached(updater, policy_of(number), aiosync.PeerClosed)
        assert cluster.get(actors[0].value.remote(), timeout=20) == number
    # An update for the dead one alone reaches no other.
    error, _ = raised(updater, policy_of(3.0), worker_ids=[1])
    assert isinstance(error, aiosync.PartialSyncError), error
    assert (set(error.acked), set(error.failed)) == (set(), {1})
    assert cluster.get(actors[0].value.remote(), timeout=20) == 2.0
    cluster.kill(actors[0])
    error, _ = raised(legacy.RayWeightUpdater(policy_of(1.0), actors, timeout=20.0))
    assert isinstance(error, aiosync.PartialSyncError), error
    assert (set(error.acked), set(error.failed)) == (set(), {0, 1})
    updater.shutdown()
    cluster.shutdown()


def busy() -> None:
    cluster = start_cluster()
    actors = [cluster.remote(num_cpus=0)(Actor).remote() for _ in range(2)]
    cluster.get([each.value.remote() for each in actors], timeout=30)
    for actor, waits in zip(actors, (True, False), strict=True):
        updater = legacy.RayWeightUpdater(policy_of(1.0), [actor], timeout=4.0)
        actor.sleep.remote(6.0)
        error, _ = raised(updater)
        assert isinstance(error, aiosync.PartialSyncError), error
        assert isinstance(error.failed[0], aiosync.AckTimeout), error
        if waits:
            # The actor has connected as soon as it gets to the updater's call.
            cluster.get(actor.value.remote(), timeout=20)
        for number in (2.0, 3.0):
            updater(policy_of(number))
            assert cluster.get(actor.value.remote(), timeout=20) == number
        updater.shutdown()
    cluster.shutdown()


def busy_beside_another() -> None:
    cluster = start_cluster()
    actors = [cluster.remote(num_cpus=0)(Actor).remote() for _ in range(2)]
    cluster.get([each.value.remote() for each in actors], timeout=30)
    limit, end = 6.0, Path(tempfile.mkdtemp()) / "end"
    updater = legacy.RayWeightUpdater(policy_of(1.0), actors, timeout=limit)
    actors[0].hold.remote(end)
    for number in (1.0, 2.0, 3.0):
        error, seconds = raised(updater, policy_of(number))
        assert isinstance(error, aiosync.PartialSyncError), error
        assert (set(error.acked), set(error.failed)) == ({1}, {0})
        assert isinstance(error.failed[0], aiosync.AckTimeout), error
        # Only the first update waits for the busy actor.
        assert number == 1.0 or seconds < limit
        assert cluster.get(actors[1].value.remote(), timeout=20) == number
    # An update for the busy one alone waits for it.
    error, seconds = raised(updater, policy_of(9.0), worker_ids=[0])
    assert isinstance(error, aiosync.PartialSyncError), error
    assert seconds > limit / 2
    end.touch()
    # The actor has connected as soon as it gets to the updater's call.
    assert cluster.get(actors[0].value.remote(), timeout=20) == 3.0
    updater(policy_of(4.0))
    assert cluster.get([each.value.remote() for each in actors], timeout=20) == [4.0, 4.0]
    updater.shutdown()
    cluster.shutdown()


def two_busy() -> None:
    cluster = start_cluster()
    actors = [cluster.remote(num_cpus=0)(Actor).remote() for _ in range(2)]
    cluster.get([each.value.remote() for each in actors], timeout=30)
    limit, folder = 6.0, Path(tempfile.mkdtemp())
    updater = legacy.RayWeightUpdater(policy_of(1.0), actors, timeout=limit)
    cluster.get(actors[1].set_policy.remote(None), timeout=30)
    for idx, actor in enumerate(actors):
        actor.hold.remote(folder / str(idx))
    error, _ = raised(updater, policy_of(1.0))
    assert isinstance(error, aiosync.PartialSyncError), error
    assert {type(each) for each in error.failed.values()} == {aiosync.AckTimeout}, error
    # The next update ends as soon as one of the two has answered, here with a refusal.
    threading.Timer(0.5, (folder / "1").touch).start()
    error, seconds = raised(updater, policy_of(2.0))
    assert isinstance(error, aiosync.PartialSyncError), error
    assert isinstance(error.failed[0], aiosync.AckTimeout), error
    assert isinstance(error.failed[1], aiosync.ApplyError), error
    assert seconds < limit and "within 0 s" not in str(error), (seconds, error)
    # The actor that has answered has as long for a new call as any other.
    cluster.get(actors[1].set_policy.remote(policy_of(0.0)), timeout=30)
    actors[1].sleep.remote(1.0)
    error, seconds = raised(updater, policy_of(3.0))
    assert isinstance(error, aiosync.PartialSyncError), error
    assert (set(error.acked), set(error.failed)) == ({1}, {0})
    assert seconds < limit, seconds
    (folder / "0").touch()
    assert cluster.get(actors[0].value.remote(), timeout=20) == 3.0
    updater(policy_of(4.0))
    assert cluster.get([each.value.remote() for each in actors], timeout=20) == [4.0, 4.0]
    updater.shutdown()
    cluster.shutdown()


def restarted() -> None:
    cluster = start_cluster()
    remote_class = cluster.remote(num_cpus=0, max_restarts=1)(Actor)
    actors = [remote_class.remote() for _ in range(2)]
    updater = legacy.RayWeightUpdater(policy_of(1.0), actors, timeout=20.0)

    def values() -> list[float]:
        return cluster.get([each.value.remote() for each in actors], timeout=20)

    updater()
    assert values() == [1.0, 1.0]
    actors[1].end.remote()
    deadline, number = time.monotonic() + 30.0, 1.0
    try:
        # The first updates may come before its end.
        while time.monotonic() < deadline:
            number += 1.0
            updater(policy_of(number))
        raise AssertionError("no update told of the actor's end")
    except aiosync.PartialSyncError as error:
        assert set(error.failed) == {1}
    while True:
        number += 1.0
        updater(policy_of(number))
        # The living actor has each update at once.
        assert cluster.get(actors[0].value.remote(), timeout=20) == number
        with contextlib.suppress(cluster.exceptions.RayActorError):
            if values() == [number, number]:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    updater.shutdown()
    cluster.shutdown()


def refuse(collector: Any) -> None:
    """Check that every worker refuses weights that do not fit, and that the error says why."""
    wrong = {"module": {"bias": torch.zeros(7)}}
    error, _ = raised(collector.update_policy_weights_, wrong)
    assert isinstance(error, aiosync.PartialSyncError), error
    assert set(error.failed) == {0, 1}
    assert all(isinstance(each, aiosync.ApplyError) for each in error.failed.values())
    assert "module.bias" in str(error)


def check_remote(collector: Any, policy: nn.Module, rank: int = 0) -> None:
    """Check that workers change with an update, and not before it; leave them with actions of 6."""
    assert actions(collector.next()) == {1.0}
    fill(policy, 2.0)
    assert actions(collector.next()) == {1.0}
    collector.update_policy_weights_()
    assert actions(collector.next()) == {2.0}
    collector.update_policy_weights_(policy_of(5.0), worker_ids=[1])
    assert actions(collector.next()) == {2.0, 5.0}
    collector.update_policy_weights_(policy_of(4.0), worker_ids=rank)
    assert actions(collector.next()) == {4.0, 5.0}
    collector.update_policy_weights_(TensorDict.from_module(policy_of(6.0)))
    assert actions(collector.next()) == {6.0}


def main(name: str, method: str, report: str) -> None:
    """Run one scenario; write a report if it passed."""
    faulthandler.enable()
    torch.set_num_threads(1)
    multiprocessing.set_start_method(method, force=True)
    code = 1
    try:
        globals()[name]()
        Path(report).write_text(json.dumps({"passed": name}))
        code = 0
    except BaseException:  # noqa: BLE001 - the test shows the log, which has it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for TorchRL's workers; the test kills those that are left.
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])

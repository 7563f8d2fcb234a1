"""RLlib's own algorithms, whose weights travel by aiosync. In an environment with Ray's RLlib."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import aiosync

pytest.importorskip("ray.rllib", reason="needs RLlib: pip install 'ray[rllib]==2.60.0'")

import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from aiosync.integrations.rllib import AiosyncCallback, AiosyncEnvRunner
from tests.integrations.rllib._watched import Watching, digest
from tests.support.waiting import free_address, stop, wait_until

pytestmark = pytest.mark.timeout(400)
UPDATES = 20
PATIENCE = 60.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start a cluster of Ray on this host."""
    # The paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="rllib-") as folder:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Check that the loop of aiosync has ended: the connections to its workers are Ray's own."""
    yield
    assert "aiosync-portal" not in {thread.name for thread in threading.enumerate()}


class OverTCP(AiosyncCallback):
    """Callback over TCP, with a short timeout."""

    def make_scheme(self) -> aiosync.sync.WeightSyncScheme:
        """Return a scheme that needs no Ray."""
        return aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0", timeout=PATIENCE)


@contextlib.contextmanager
def running(config_class: Any = PPOConfig, callback: Any = AiosyncCallback, **options: Any) -> Any:
    """Build an algorithm on CartPole with two runners, and stop it at the end."""
    config = (
        config_class()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, env_runner_cls=AiosyncEnvRunner)
        .callbacks(callback)
        .training(train_batch_size_per_learner=200)
        .learners(num_learners=0)
    )
    if config_class is PPOConfig:
        config.training(num_epochs=1, minibatch_size=100)
    for method, arguments in options.items():
        getattr(config, method)(**arguments)
    algorithm = config.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()


def on_runners(algorithm: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Return a function's results on the runners that train."""
    found: list[Any] = algorithm.env_runner_group.foreach_env_runner(
        function, local_env_runner=False
    )
    return found


def learner_of(algorithm: Any) -> Any:
    """Return the learner's state, with the weights that runners have."""
    return algorithm.learner_group.get_state(["learner/rl_module"], inference_only=True)["learner"]


def number_of(algorithm: Any) -> int:
    """Return the number of the learner's updates."""
    return int(learner_of(algorithm)["weights_seq_no"])


def weights_of(algorithm: Any) -> Any:
    """Return the learner's weights as the runners have them."""
    return learner_of(algorithm)["rl_module"]["default_policy"]


def logits(module: Any) -> Any:
    """Return a module's outputs for fixed observations."""
    with torch.no_grad():
        batch = {"obs": torch.linspace(-1, 1, 12).reshape(3, 4)}
        return module.forward_inference(batch)["action_dist_inputs"].numpy()


def without_grown(module: Any) -> Any:
    """Return a module's state without the parameter that a test adds."""
    state = module.get_state(inference_only=True)
    return {name: value for name, value in state.items() if name != "grown"}


@pytest.mark.parametrize(
    "callback", [AiosyncCallback, pytest.param(OverTCP, marks=pytest.mark.heavy)]
)
def test_ppo(callback: Any) -> None:
    with running(callback=callback) as algorithm:
        for number in range(1, UPDATES + 1):
            results = algorithm.train()
            seen = results["learners"]["default_policy"]
            assert seen["weights_seq_no"] == number
            # The column of each step says which weights acted: those before this update.
            assert seen["diff_num_grad_updates_vs_sampler_policy"] == 1.0
            weights = weights_of(algorithm)
            fresh = algorithm.env_runner_group.local_env_runner.module
            fresh.set_state(weights)
            answers = on_runners(
                algorithm,
                lambda runner: runner.sample(num_timesteps=1) and logits(runner.module),
            )
            assert len(answers) == 2
            for answer in answers:
                assert (answer == logits(fresh)).all()
        digests = on_runners(algorithm, lambda r: digest(r.module.get_state(inference_only=True)))
        assert digests == [digest(weights)] * 2


@pytest.mark.parametrize("server", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_impala(server: bool) -> None:
    with running(
        IMPALAConfig,
        Watching,
        reporting={"min_time_s_per_iteration": 0.2},
        env_runners={"use_env_runner_state_server": server},
    ) as algorithm:
        until = time.monotonic() + 5 * PATIENCE
        updates = 0
        while updates < UPDATES and time.monotonic() < until:
            algorithm.train()
            updates = number_of(algorithm)
        assert updates >= UPDATES
        fragments = [each for seen in on_runners(algorithm, lambda r: r.fragments) for each in seen]
    # A fragment has one version, and a version one set of weights, whichever runner had it.
    weights: dict[int, set[str]] = {}
    for numbers, found in fragments:
        assert len(numbers) <= 1
        for number in numbers:
            weights.setdefault(number, set()).add(found)
    assert len(weights) >= 5 and max(weights) >= UPDATES // 2
    assert all(len(found) == 1 for found in weights.values())


def test_an_update_that_does_not_fit() -> None:
    with running() as algorithm:
        algorithm.train()
        before = on_runners(algorithm, lambda r: digest(r.module.get_state(inference_only=True)))

        def grow(runner: Any) -> None:
            if runner.worker_index == 2:
                runner.module.grown = torch.nn.Parameter(torch.zeros(3))

        on_runners(algorithm, grow)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            algorithm.train()
        assert list(caught.value.failed) == [1]
        assert "grown" in str(caught.value)
        kept = on_runners(algorithm, lambda r: digest(without_grown(r.module)))
        # The first has the update, and the second what it had.
        assert kept == [digest(weights_of(algorithm)), before[1]]


def test_a_runner_that_dies_is_replaced() -> None:
    with running(
        fault_tolerance={
            "restart_failed_env_runners": True,
            "delay_between_env_runner_restarts_s": 0.0,
        }
    ) as algorithm:
        algorithm.train()
        [first, _] = on_runners(algorithm, lambda _: os.getpid())
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + 2 * PATIENCE
        alive: list[str] = []
        while time.monotonic() < until:
            algorithm.train()
            alive = on_runners(algorithm, lambda r: digest(r.module.get_state(inference_only=True)))
            if len(alive) == 2 and set(alive) == {digest(weights_of(algorithm))}:
                break
        assert alive == [digest(weights_of(algorithm))] * 2


class Severed(AiosyncCallback):
    """Callback over TCP whose runners do not restore a lost link."""

    def make_scheme(self) -> aiosync.sync.WeightSyncScheme:
        """Return a scheme that needs no Ray."""
        return aiosync.sync.TCPWeightSyncScheme(SEVERED, timeout=PATIENCE, reconnect=0.0)


SEVERED = free_address()


def sever(runner: Any, port: int) -> None:
    """Reset the link of the first runner to the trainer, which listens at this port."""
    if runner.worker_index != 1:
        return
    unspecified = bytes(16)
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            # A connect() without an address makes the kernel send a reset.
            if found.family == socket.AF_INET and found.getpeername()[1] == port:
                assert libc.connect(fd, unspecified, len(unspecified)) == 0


def test_a_living_runner_that_has_lost_its_link_is_no_dead_one() -> None:
    with running(callback=Severed) as algorithm:
        algorithm.train()
        on_runners(algorithm, functools.partial(sever, port=int(SEVERED.rpartition(":")[2])))
        with pytest.raises(aiosync.PartialSyncError) as caught:
            algorithm.train()
        assert list(caught.value.failed) == [0]
        assert isinstance(caught.value.failed[0], aiosync.TransportError)


class Watched(Severed):
    """The same, which keeps the trainer's scheme for the test."""

    made: ClassVar[list[aiosync.sync.WeightSyncScheme]] = []

    def make_scheme(self) -> aiosync.sync.WeightSyncScheme:
        """Return a scheme that needs no Ray, and keep it."""
        self.made[:] = [super().make_scheme()]
        return self.made[0]


def wait_for_links(count: int) -> None:
    """Wait until the trainer of the running algorithm has this many links."""
    [scheme] = Watched.made
    wait_until(lambda: len(scheme.worker_versions) == count, PATIENCE)


def test_a_send_that_fails_at_once_is_raised_by_the_same_update() -> None:
    with running(callback=Watched, env_runners={"num_env_runners": 1}) as algorithm:
        algorithm.train()
        on_runners(algorithm, functools.partial(sever, port=int(SEVERED.rpartition(":")[2])))
        # There is no worker left that the send could wait for.
        wait_for_links(0)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            algorithm.train()
        assert list(caught.value.failed) == [0]


def test_a_runner_that_ray_restarts_between_two_calls_gets_weights_again() -> None:
    with running(fault_tolerance={"restart_failed_env_runners": True}) as algorithm:
        algorithm.train()
        [actor, _] = on_runners(algorithm, lambda _: ray.get_runtime_context().current_actor)
        [killed, _] = on_runners(algorithm, lambda _: os.getpid())
        os.kill(killed, signal.SIGKILL)

        def has_restarted() -> bool:
            # RLlib does not see these calls, and takes the runner for one that never died.
            try:
                return bool(ray.get(actor.apply.remote(lambda _: os.getpid())) != killed)
            except ray.exceptions.RayError:
                return False

        wait_until(has_restarted, 2 * PATIENCE)
        for _ in range(3):
            algorithm.train()
        found = on_runners(
            algorithm,
            lambda r: (r.sample(num_timesteps=1), digest(r.module.get_state(inference_only=True))),
        )
        assert [each for _, each in found] == [digest(weights_of(algorithm))] * 2


def test_two_failures_one_after_the_other_are_tolerated() -> None:
    with running(
        callback=Watched,
        fault_tolerance={"ignore_env_runner_failures": True, "restart_failed_env_runners": False},
    ) as algorithm:
        algorithm.train()
        group, state = algorithm.env_runner_group, learner_of(algorithm)
        config = algorithm.config.copy(copy_frozen=False)
        config.env_runners(merge_env_runner_states=False, broadcast_env_runner_states=False)

        def send() -> None:
            group.sync_env_runner_states(config=config, rl_module_state=state)

        [first, second] = pids_of(algorithm)
        stop(second)
        # The second runner answers none of these, and a later one overtakes an earlier one.
        send()
        os.kill(first, signal.SIGKILL)
        wait_for_links(1)
        send()
        send()
        ask = group.foreach_env_runner

        def ask_when_another_has_died(*args: Any, **kwargs: Any) -> Any:
            group.foreach_env_runner = ask
            os.kill(second, signal.SIGKILL)
            wait_for_links(0)
            return ask(*args, **kwargs)

        group.foreach_env_runner = ask_when_another_has_died
        send()
        assert group.foreach_env_runner is ask


# -- failures of IMPALA, which goes on while runners sample --------------------------------------

OFTEN = {"min_time_s_per_iteration": 0.2}


def train_until(algorithm: Any, condition: Callable[[], bool]) -> None:
    """Train until a condition is true, in bounded time."""
    until = time.monotonic() + 2 * PATIENCE
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        algorithm.train()


def pids_of(algorithm: Any) -> list[int]:
    """Return the processes of the runners that are alive."""
    return on_runners(algorithm, lambda _: os.getpid())


def assert_ended(pids: set[int]) -> None:
    """Check that processes end within a while."""
    until = time.monotonic() + PATIENCE
    while pids := {pid for pid in pids if Path(f"/proc/{pid}/exe").exists()}:
        assert time.monotonic() < until, pids
        time.sleep(0.1)


def fragments_of(algorithm: Any) -> dict[int, list[Any]]:
    """Return the fragments of each runner by its process."""
    return dict(on_runners(algorithm, lambda r: (os.getpid(), getattr(r, "fragments", []))))


def test_impala_goes_on_when_a_runner_is_killed() -> None:
    with running(
        IMPALAConfig,
        Watching,
        reporting=OFTEN,
        fault_tolerance={
            "restart_failed_env_runners": True,
            "delay_between_env_runner_restarts_s": 0.0,
        },
    ) as algorithm:
        train_until(algorithm, lambda: number_of(algorithm) >= 3)
        fragments = fragments_of(algorithm)
        [killed, other] = fragments
        had = max(number for numbers, _ in fragments[killed] for number in numbers)
        os.kill(killed, signal.SIGKILL)
        before = number_of(algorithm)

        def has_replacement() -> bool:
            new = fragments_of(algorithm)
            new.pop(other, None)
            return killed not in new and any(len(seen) >= 3 for seen in new.values())

        train_until(algorithm, has_replacement)
        train_until(algorithm, lambda: number_of(algorithm) >= before + 10)
        fragments = fragments_of(algorithm)
        assert other in fragments and len(fragments) == 2
        replacement = next(pid for pid in fragments if pid != other)
        numbers = [number for numbers, _ in fragments[replacement] for number in numbers]
        # It never acts with weights that are older than those of the runner that it replaces.
        assert numbers == sorted(numbers) and numbers[0] >= had
        assert numbers[-1] > before
        weights: dict[int, set[str]] = {}
        for seen in fragments.values():
            for each, found in seen:
                assert len(each) <= 1
                for number in each:
                    weights.setdefault(number, set()).add(found)
        assert all(len(found) == 1 for found in weights.values())
    assert_ended({killed, other, replacement})


def test_impala_states_of_rllib_travel_beside_the_weights() -> None:
    with running(IMPALAConfig, reporting=OFTEN) as algorithm:
        train_until(algorithm, lambda: number_of(algorithm) >= 3)
        steps = algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"]
        after = number_of(algorithm) + 5
        train_until(algorithm, lambda: number_of(algorithm) >= after)
        found = on_runners(
            algorithm, lambda r: r.sample(num_timesteps=1) and r.num_env_steps_sampled_lifetime
        )
        assert len(found) == 2 and min(found) >= steps > 0


@pytest.mark.parametrize("server", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_impala_goes_on_with_its_local_runner(server: bool) -> None:
    with running(
        IMPALAConfig,
        Watching,
        reporting=OFTEN,
        env_runners={
            "num_env_runners": 1,
            "create_env_on_local_worker": True,
            "use_env_runner_state_server": server,
        },
        fault_tolerance={"ignore_env_runner_failures": True, "restart_failed_env_runners": False},
    ) as algorithm:
        train_until(algorithm, lambda: number_of(algorithm) >= 3)
        before = number_of(algorithm)
        local = algorithm.env_runner_group.local_env_runner
        initial = digest(local.module.get_state(inference_only=True))
        [killed] = pids_of(algorithm)
        os.kill(killed, signal.SIGKILL)
        train_until(algorithm, lambda: len(vars(local).get("fragments", [])) >= 10)
        train_until(algorithm, lambda: number_of(algorithm) >= before + 3)
        numbers, found = local.fragments[-1]
        assert min(numbers) >= before and found != initial


def test_impala_ends_with_a_cause_when_a_runner_is_not_replaced() -> None:
    with running(
        IMPALAConfig,
        reporting=OFTEN,
        fault_tolerance={"restart_failed_env_runners": False, "ignore_env_runner_failures": False},
    ) as algorithm:
        train_until(algorithm, lambda: number_of(algorithm) >= 3)
        pids = pids_of(algorithm)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises((aiosync.PartialSyncError, ray.exceptions.RayError)) as caught:
            train_until(algorithm, lambda: False)
        if isinstance(caught.value, aiosync.PartialSyncError):
            assert isinstance(caught.value.failed[0], aiosync.PeerClosed)
        else:
            assert isinstance(caught.value, ray.exceptions.ActorDiedError)
    assert_ended(set(pids))


def test_impala_ends_with_the_cause_of_an_update_that_does_not_fit() -> None:
    with running(IMPALAConfig, Watching, reporting=OFTEN) as algorithm:
        train_until(algorithm, lambda: number_of(algorithm) >= 3)

        def grow(runner: Any) -> str | None:
            if runner.worker_index == 1:
                return None
            runner.module.grown = torch.nn.Parameter(torch.zeros(3))
            return digest(without_grown(runner.module))

        [_, before] = on_runners(algorithm, grow)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            train_until(algorithm, lambda: False)
        assert list(caught.value.failed) == [1]
        assert "grown" in str(caught.value)
        kept = on_runners(algorithm, lambda r: digest(without_grown(r.module)))
        # The second has what it had, and the first goes on.
        assert kept[1] == before != kept[0]
        pids = pids_of(algorithm)
    assert_ended(set(pids))


def test_a_checkpoint_is_restored(tmp_path: Any) -> None:
    with running() as algorithm:
        algorithm.train()
        algorithm.save_to_path(tmp_path)
        saved = digest(weights_of(algorithm))
        algorithm.train()
        assert digest(weights_of(algorithm)) != saved
        algorithm.restore_from_path(tmp_path)
        found = on_runners(
            algorithm,
            lambda r: (r.sample(num_timesteps=1), digest(r.module.get_state(inference_only=True))),
        )
        assert [each for _, each in found] == [saved] * 2


def test_evaluation() -> None:
    with running(
        evaluation={
            "evaluation_interval": 1,
            "evaluation_num_env_runners": 1,
            "evaluation_duration": 1,
        }
    ) as algorithm:
        results = algorithm.train()
        assert results["evaluation"]["env_runners"]["num_episodes"] >= 1


def test_without_runners_of_its_own() -> None:
    with running(env_runners={"num_env_runners": 0}) as algorithm:
        assert algorithm.train()["env_runners"]["num_env_steps_sampled"] >= 200


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(aiosync.ConfigError, match="env_runner_cls=AiosyncEnvRunner"):
        with running(env_runners={"env_runner_cls": SingleAgentEnvRunner}):
            pass
    monkeypatch.setattr(ray, "__version__", "2.59.0")
    with pytest.raises(aiosync.ConfigError, match=r"needs Ray 2\.60 or newer, and this is 2\.59"):
        with running(env_runners={"num_env_runners": 0}):
            pass

"""Weights of an RLlib algorithm by aiosync: a class of runners and a callback.

RLlib hands weights to three methods of its ``EnvRunnerGroup``, and has no setting that puts another
transport there. The callback takes these methods over, for the group of the algorithm that trains,
and its ``stop()``.
States of connectors and counters travel as before. Written for Ray 2.60 and its new API stack. See
``docs/topics/rllib.md``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import ray
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    PartialSyncError,
    PeerClosed,
    TransportBroken,
)
from aiosync.sync import RayWeightSyncScheme, WeightSyncScheme

__all__ = ["AiosyncCallback", "AiosyncEnvRunner"]

_WRITTEN_FOR = (2, 60)
_MODEL = "rl_module"
# Time for a runner whose link ended to answer that it lives; it may be in a long fragment.
_ANSWER_SECONDS = 10.0
# Pause between two looks for a runner that dials again.
_LOOK_SECONDS = 0.05


class _Weights(torch.nn.Module):
    """An RL module together with the number of its update, so that both change at once."""

    number: torch.Tensor

    def __init__(self, module: torch.nn.Module, number: int) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("number", torch.tensor(number, device="cpu"))


class AiosyncEnvRunner(SingleAgentEnvRunner):
    """Runner whose weights arrive by aiosync: ``config.env_runners(env_runner_cls=...)``.

    Updates arrive while the runner samples, and are applied before its next :meth:`sample`, so a
    fragment has one version. Each step in its episodes has the number of the weights that acted, in
    RLlib's own column ``WEIGHTS_SEQ_NO``. Without :class:`AiosyncCallback`, and in a group for
    evaluation, it is a ``SingleAgentEnvRunner``.
    """

    _scheme: WeightSyncScheme | None = None
    _weights: _Weights
    # RLlib's number of the newest state that this runner was given.
    _state_seq_no = 0

    def join(self, scheme: WeightSyncScheme) -> None:
        """Receive weights by this scheme from now on. Called by :class:`AiosyncCallback`.

        Args:
            scheme: Copy of the trainer's scheme.

        Raises:
            ConnectError: The trainer cannot be reached.
        """
        self.leave()
        scheme.guard = "reading"
        assert isinstance(self.module, torch.nn.Module)
        self._weights = _Weights(self.module, self._weights_seq_no)
        scheme.init_on_receiver(_MODEL, worker_idx=self.worker_index - 1, model=self._weights)
        scheme.connect()
        self._scheme = scheme

    def sample(self, **kwargs: Any) -> list[Any]:
        """Sample with the newest weights that have arrived; see ``SingleAgentEnvRunner.sample``.

        Raises:
            AiosyncError: The link ended with an error, and weights that arrived are not whole.
        """
        if self._scheme is None:
            return super().sample(**kwargs)
        server = self._env_runner_state_server
        if not isinstance(server, _StateServer | None):
            self._env_runner_state_server = _StateServer(server, self)
        with self._scheme.reading():
            self._weights_seq_no = int(self._weights.number)
            return super().sample(**kwargs)

    def set_state(self, state: dict[str, Any]) -> None:
        """Take a state of RLlib, without the weights if those arrive by aiosync."""
        self._state_seq_no = state.get(WEIGHTS_SEQ_NO, self._state_seq_no)
        if self._scheme is not None:
            without = (COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)
            state = {key: value for key, value in state.items() if key not in without}
        super().set_state(state)

    def leave(self) -> None:
        """Close the link, if there is one, and keep the weights."""
        scheme, self._scheme = self._scheme, None
        if scheme is not None:
            scheme.shutdown()

    def stop(self) -> None:
        """Close the link and the environments."""
        self.leave()
        stop: Callable[[], None] = super().stop
        stop()


class _StateServer:
    """RLlib's server of states, which a runner asks by the number of the state that it has.

    RLlib asks by the number of the weights, and these arrive before the state of the same number.
    """

    def __init__(self, server: Any, runner: AiosyncEnvRunner) -> None:
        self._server, self._runner = server, runner

    @property
    def pull_if_newer(self) -> _StateServer:
        """The method of Ray's actor, of which RLlib calls :meth:`remote`."""
        return self

    def remote(self, weights_seq_no: int) -> Any:
        """Ask for a newer state. After a checkpoint is restored the weights have a lower number."""
        number = min(weights_seq_no, self._runner._state_seq_no)
        return self._server.pull_if_newer.remote(number)


class AiosyncCallback(RLlibCallback):
    """Callback that sends an algorithm's weights by aiosync: ``config.callbacks(...)``.

    ::

        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=2, env_runner_cls=AiosyncEnvRunner)
            .callbacks(AiosyncCallback)
        )

    RLlib decides when weights are sent, and to which runners. ``sync_weights()``, which PPO calls,
    waits until the runners have the weights, and raises what failed. IMPALA and APPO do not wait:
    there the next update raises it. A runner that refuses an update keeps the weights that it has.
    A runner that dies is left to RLlib's fault tolerance; one that takes its place gets the newest
    weights. A runner that lives and has lost its link is an error.

    Derive a class to change :meth:`make_scheme`.
    """

    def make_scheme(self) -> WeightSyncScheme:
        """Return the scheme of the trainer; by default one for Ray actors."""
        return RayWeightSyncScheme()

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Connect the runners, and send what RLlib would send to them.

        Raises:
            ConfigError: RLlib is too old, or the algorithm has other runners.
            ConnectError: A runner could not connect.
        """
        _check(algorithm.config)
        if algorithm.config.num_env_runners == 0:
            return
        self._sender = _Sender(self.make_scheme(), algorithm)

    def on_env_runners_recreated(
        self, *, env_runner_group: Any, env_runner_indices: list[int], **kwargs: Any
    ) -> None:
        """Connect the runners that RLlib has made anew."""
        if not kwargs.get("is_evaluation"):
            self._sender.admit(env_runner_group, env_runner_indices)


def _check(config: Any) -> None:
    """Raise if Ray is too old, or the runners of the algorithm cannot receive by aiosync."""
    version = tuple(map(int, ray.__version__.split(".")[:2]))
    if version < _WRITTEN_FOR:
        raise ConfigError(
            f"aiosync.integrations.rllib needs Ray 2.60 or newer, and this is {ray.__version__}"
        )
    runner = config.env_runner_cls
    if config.is_multi_agent or not issubclass(runner or object, AiosyncEnvRunner):
        raise ConfigError(
            "AiosyncCallback needs `config.env_runners(env_runner_cls=AiosyncEnvRunner)`, and one "
            "agent with RLlib's new API stack"
        )


class _Sender:
    """The trainer's end: it sends what RLlib gives to the group of runners."""

    def __init__(self, scheme: WeightSyncScheme, algorithm: Any) -> None:
        self._scheme, self._group = scheme, algorithm.env_runner_group
        group = self._group
        # send() does not wait for runners: IMPALA and APPO go on while they sample.
        scheme.sync = False
        first = self._tensors_of(self._state_of(algorithm.learner_group))
        scheme.init_on_sender(_MODEL, weights=first)
        scheme.connect()
        # True if RLlib is to go on without runners that died.
        self._tolerates = algorithm.config.ignore_env_runner_failures
        self._tolerates |= algorithm.config.restart_failed_env_runners
        try:
            self.admit(group, list(range(1, algorithm.config.num_env_runners + 1)))
        except BaseException:  # The error goes on to the caller of build_algo().
            scheme.shutdown()
            raise
        # RLlib gives weights to these methods of its group, which send them by aiosync from now on.
        group.sync_weights = functools.partial(self.sync_weights, group)
        for name in ("sync_env_runner_states", "get_merged_env_runner_state"):
            setattr(group, name, functools.partial(self._send_first, getattr(group, name)))
        group.stop = functools.partial(self._stop, group.stop)

    def _stop(self, stop_group: Callable[[], None]) -> None:
        """Stop the group of runners as RLlib does, then end the links."""
        try:
            stop_group()
        finally:
            self._scheme.shutdown()

    def admit(self, group: Any, indices: list[int]) -> None:
        """Connect the runners with these numbers, which RLlib counts from 1.

        Raises:
            ConnectError: One could not connect.
        """
        joined = group.foreach_env_runner(
            functools.partial(_join, scheme=self._scheme),
            local_env_runner=False,
            remote_worker_ids=indices,
        )
        failed = [each for each in joined if each is not None]
        if failed:
            raise ConnectError(f"{len(failed)} runners did not connect: {failed[0]}") from failed[0]

    def sync_weights(
        self,
        group: Any,
        policies: Iterable[str] | None = None,
        from_worker_or_learner_group: Any = None,
        to_worker_indices: list[int] | None = None,
        global_vars: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = 0.0,
        inference_only: bool = True,
    ) -> None:
        """Send weights in place of ``EnvRunnerGroup.sync_weights``, and wait for the runners."""
        source = from_worker_or_learner_group
        state = self._state_of(group.local_env_runner if source is None else source)
        # The next sample() uses these weights, as it does where RLlib sends them.
        self._send(state, to_worker_indices, waits=True)
        if group.local_env_runner is not None:
            group.local_env_runner.set_state(state)

    def _send_first(
        self,
        original: Any,
        *,
        rl_module_state: Mapping[str, Any] | None = None,
        env_runner_indices_to_update: list[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Send the weights of a state, then let RLlib's own method send the rest of it."""
        if rl_module_state:
            self._send(rl_module_state, env_runner_indices_to_update)
            # IMPALA samples with a local runner if there is no other: RLlib gives it the weights.
            local = self._group.local_env_runner
            if local is None or local.env is None:
                rl_module_state = {WEIGHTS_SEQ_NO: rl_module_state[WEIGHTS_SEQ_NO]}
        if env_runner_indices_to_update is not None:
            kwargs["env_runner_indices_to_update"] = env_runner_indices_to_update
        return original(rl_module_state=rl_module_state, **kwargs)

    def _send(
        self, state: Mapping[str, Any], indices: list[int] | None, *, waits: bool = False
    ) -> None:
        """Send weights to runners by RLlib's numbers, or to all; ``waits`` until they have them."""
        meant = None if indices is None else [index - 1 for index in indices]
        weights = self._tensors_of(state)
        report, version = None, self._scheme.version
        while report is None:
            try:
                report = self._scheme.send(weights, meant)
            except PartialSyncError as exc:
                self._tolerate(exc)
                # Otherwise an earlier update failed, and this one was not sent yet.
                if (exc.version or 0) > version:
                    return
        # A send that has failed at once names no worker in its report: wait_async() raises it.
        if waits and not report.acked:
            try:
                self._scheme.wait_async()
            except PartialSyncError as exc:
                self._tolerate(exc)

    def _tolerate(self, error: PartialSyncError) -> None:
        """Raise the error, unless it is of runners that died and RLlib is to go on without them."""
        gone = all(isinstance(each, PeerClosed | TransportBroken) for each in error.failed.values())
        if not (gone and self._tolerates):
            raise error
        # A link may also break while its runner lives. A runner with a link again has the newest
        # weights; one that does not answer has died.
        lost = self._without_link(error.failed)
        if not lost:
            return
        living = self._group.foreach_env_runner(
            _joined_as,
            local_env_runner=False,
            remote_worker_ids=lost,
            timeout_seconds=_ANSWER_SECONDS,
        )
        # RLlib takes a runner that Ray restarted between two of its calls for the old one.
        if restarted := [index for index, has_joined in living if not has_joined]:
            self.admit(self._group, restarted)
        # A runner that dials again gets the weights.
        if not self._have_links([index - 1 for index, has_joined in living if has_joined]):
            raise error

    def _have_links(self, indices: list[int]) -> bool:
        """Return True once all of these runners have links again; False if that takes too long."""
        ends = time.monotonic() + _ANSWER_SECONDS
        while self._without_link(indices):
            if time.monotonic() > ends:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _without_link(self, indices: Iterable[int]) -> list[int]:
        """Return RLlib's numbers of the runners among these that have no link."""
        return [idx + 1 for idx in indices if idx not in self._scheme.worker_versions]

    @staticmethod
    def _state_of(source: Any) -> Mapping[str, Any]:
        """Return the state of learners, or of a runner, with its weights and their number."""
        if not isinstance(source, LearnerGroup):
            state: Mapping[str, Any] = source.get_state([COMPONENT_RL_MODULE], inference_only=True)
            return state
        path = f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"
        state = source.get_state([path], inference_only=True)[COMPONENT_LEARNER]
        return {key: state[key] for key in (COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)}

    @staticmethod
    def _tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the weights of a state and their number, by the names of :class:`_Weights`."""
        module = state[COMPONENT_RL_MODULE]
        if isinstance(module, ray.ObjectRef):
            module = ray.get(module)
        module = module.get(DEFAULT_MODULE_ID, module)
        # Arrays of Ray's object store are read-only, which torch warns of: those are copied.
        named = {
            f"module.{name}": torch.as_tensor(numpy.require(value, requirements="W"), device="cpu")
            for name, value in module.items()
        }
        return {**named, "number": torch.tensor(state.get(WEIGHTS_SEQ_NO, 0), device="cpu")}


def _joined_as(runner: AiosyncEnvRunner) -> tuple[int, bool]:
    """Return RLlib's number of the runner, and False if it was restarted and has not joined."""
    return runner.worker_index, runner._scheme is not None


def _join(runner: AiosyncEnvRunner, scheme: WeightSyncScheme) -> AiosyncError | None:
    """Have a runner connect; return its error, as RLlib would only log one that is raised."""
    try:
        runner.join(scheme)
    except AiosyncError as exc:
        return exc
    return None

"""verl: a checkpoint engine with the name ``aiosync``, which configuration alone switches on.

``actor_rollout_ref.rollout.checkpoint_engine.backend=aiosync`` chooses it once
``….custom_backend_module=aiosync.integrations.verl`` has imported this module in every worker.
Weights travel in buckets over TCP, from rank 0 of the actor to each rollout worker, over links that
outlive a sync. Written for verl 0.9; nothing else in aiosync imports it. See
``docs/topics/verl.md``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from aiosync._repr import text_of
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.integrations._bucket_links import (
    BucketReceiver,
    BucketSender,
    Options,
    Source,
    process_name,
)
from aiosync.integrations._buckets import NamedTensor, Weights, each_of

__all__ = ["AiosyncCheckpointEngine", "StagingManager"]


def _check_version() -> None:
    """Raise unless verl is installed in a release that this module is written for."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        found = "none"
    if found.split(".")[:2] != ["0", "9"] or found.startswith("0.9.0"):
        raise ConfigError(
            f"aiosync.integrations.verl is written for verl 0.9.1, and this environment has {found}"
            ": install verl==0.9.1"
        )


_check_version()

import ray  # noqa: E402
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup  # noqa: E402
from verl.utils.ray_utils import auto_await  # noqa: E402

if TYPE_CHECKING:
    # verl has no types, and is not installed where the types of aiosync are checked.
    _Engine = object
    _Manager = object
else:
    from verl.checkpoint_engine import CheckpointEngine as _Engine
    from verl.checkpoint_engine import CheckpointEngineManager as _Manager


@CheckpointEngineRegistry.register("aiosync")
class AiosyncCheckpointEngine(_Engine):
    """verl's end of the links: rank 0 of the actor sends, each rollout worker receives.

    verl makes one in each worker, with ``checkpoint_engine.engine_kwargs.aiosync`` as options. The
    other ranks of the actor take part in gathering the weights, and send nothing.

    Args:
        bucket_size: Size of a bucket in bytes: ``update_weights_bucket_megabytes`` of verl. During
            a sync the actor has two buckets in host memory, and a rollout worker three.
        is_master: True in rank 0 of the actor.
        address: Address that the actor listens at, ``tcp://host:port``; by default a free port of
            its node's address in Ray.
        token: Token of both sides. Without one here, in ``token_file`` or in ``AIOSYNC_TOKEN``, the
            actor makes one, and verl carries it to the rollout workers through Ray.
        token_file: File with the token, on each host.
        tls: Arguments of :class:`aiosync.TLS` for both sides; ``None`` does not encrypt.
        timeout: Seconds to connect, and for each bucket to be made, to travel and to be consumed.
            A receiver waits twice as long, as the sender may have to wait for other receivers.

    Raises:
        ConfigError: An option has an illegal value.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        address: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        tls: dict[str, Any] | None = None,
        timeout: float = 300.0,
    ) -> None:
        options = Options(
            address=address, token=token, token_file=token_file, tls=tls, timeout=timeout
        )
        self._sender: BucketSender | None = None
        self._receiver: BucketReceiver | None = None
        self._staged: list[NamedTensor] | None = None
        if is_master:
            self._sender = BucketSender(bucket_size, options, "actor rank 0")
            weakref.finalize(self, self._sender.close)
        else:
            self._receiver = BucketReceiver(bucket_size, options)
            weakref.finalize(self, self._receiver.close)

    def prepare(self) -> dict[str, Any]:
        """Return what :meth:`build_topology` needs of this worker."""
        if self._sender is not None:
            return {"source": self._sender.source}
        assert self._receiver is not None
        # The braces are for the rank, which build_topology() puts in.
        return {"session": self._receiver.session, "name": process_name("rollout rank {}")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the members for rank 0 of the actor, and the actor's address for each member.

        Raises:
            ConfigError: Rank 0 of the actor was not made with ``is_master=True``.
        """
        source = metadata[0].get("source")
        if source is None:
            raise ConfigError("rank 0 of the actor is no master: verl makes it with is_master=True")
        members = {
            each["session"]: (rank, each["name"].format(rank))
            for rank, each in enumerate(metadata[actor_wg_world_size:])
        }
        # verl gives each worker its own item of these lists, as arguments of init_process_group().
        idle = [None] * (actor_wg_world_size - 1)
        ranks = list(range(rollout_world_size))
        return (
            {"members": [members, *idle]},
            {"source": [source] * rollout_world_size, "rank": ranks},
        )

    def init_process_group(
        self,
        *,
        members: dict[bytes, tuple[int, str]] | None = None,
        source: Source | None = None,
        rank: int = 0,
    ) -> None:
        """Connect to the actor, or set the members; nothing waits if the links are there already.

        Raises:
            ConnectError: The actor cannot be reached, or refused this worker.
            ConnectTimeout: The actor did not answer in time.
        """
        if self._sender is not None:
            self._sender.expect(members or {})
        elif source is not None:
            assert self._receiver is not None
            self._receiver.connect(source, rank)

    def finalize(self) -> None:
        """Give the memory of the buckets back. The links stay."""
        self._staged = None
        if self._receiver is not None:
            self._receiver.clear()

    def stage(self) -> None:
        """Receive the weights into host memory, for the next :meth:`receive_weights` to yield.

        Blocks until all of them are there. The rollout goes on with the weights that it has.

        Raises:
            PeerClosed: The actor ended, or gave this sync up; the text says why.
            RecvTimeout: The actor made no progress in time.
        """
        if self._receiver is not None:
            self._staged = None
            self._staged = self._receiver.stage()

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None
    ) -> dict[str, float]:
        """Send the weights to all rollout workers; in other ranks of the actor only gather them.

        Args:
            weights: Names and tensors, iterated to their end in any case.
            global_steps: Version for errors.

        Returns:
            Figures for verl's metrics: ``aiosync/seconds``, ``aiosync/nbytes``,
            ``aiosync/members``.

        Raises:
            PartialSyncError: Some rollout workers did not take them; the text says which, and why.
                The others have them.
            ConfigError: A tensor cannot travel.
        """
        if self._sender is None:
            async for _ in each_of(weights):
                pass
            return {}
        found = await self._sender.send(weights, global_steps)
        return {f"aiosync/{name}": value for name, value in found.items()}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[NamedTensor, None]:
        """Yield names and tensors in the order in which they were sent.

        The tensors are on the CPU, and the consumer's: their memory is used again only when no
        tensor refers to it any more.

        Args:
            global_steps: Ignored: verl gives it to both sides.

        Raises:
            PeerClosed: The actor ended, or gave this sync up; the text says why.
            RecvTimeout: The actor made no progress in time.
        """
        if self._receiver is None:
            raise LocalProtocolError("rank 0 of the actor sends weights, and receives none")
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.reverse()
            while staged:
                yield staged.pop()
            return
        async with aclosing(self._receiver.buckets()) as buckets:
            async for bucket in buckets:
                # A tensor that the consumer has dropped must not stay here.
                bucket.reverse()
                while bucket:
                    yield bucket.pop()


class StagingManager(_Manager):
    """Manager that transfers weights while the rollouts generate, and pauses them only to load.

    ``actor_rollout_ref.rollout.checkpoint_manager_class`` names it:
    ``aiosync.integrations.verl.StagingManager``. Each rollout worker needs host memory for the
    whole model. A transfer that fails leaves every rollout running, with the weights that it has.
    """

    @auto_await  # type: ignore[untyped-decorator]  # verl has no types
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Transfer the weights, then pause the rollouts, load, and let them go on.

        Args:
            global_steps: Step of the trainer that the weights are of.

        Returns:
            The actor's metrics of the transfer.

        Raises:
            RayTaskError: The transfer or a load failed; the cause is the worker's error. The
                rollouts go on in any case.
        """
        manager: Any = self
        if manager.backend != "aiosync":
            raise ConfigError(
                f"StagingManager needs checkpoint_engine.backend=aiosync, not {manager.backend!r}"
            )
        workers = [worker for replica in manager.replicas for worker in replica.workers]
        rollout = RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker)),
        )
        manager.build_process_group(rollout)
        actor, size = manager.actor_wg, rollout.world_size
        sending = actor.update_weights(global_steps=global_steps, mode=manager.backend)
        staging = rollout.execute_checkpoint_engine(["stage"] * size)
        found = await asyncio.to_thread(ray.get, sending + staging)
        try:
            await manager.abort_replicas()
            await manager.release_kv_cache_replicas()
            await asyncio.to_thread(ray.get, rollout.update_weights(global_steps=global_steps))
        except BaseException as exc:  # raised again after the rollouts were asked to go on
            try:
                await _resume(manager)
            except Exception as late:  # noqa: BLE001 - the first error says more
                exc.add_note(f"Some rollouts may still be paused: {text_of(late)}")
            raise
        await _resume(manager)
        await asyncio.to_thread(ray.get, rollout.execute_checkpoint_engine(["finalize"] * size))
        # The results of the actor's ranks come before those of the rollouts.
        return {name: value for each in found[: actor.world_size] for name, value in each.items()}


async def _resume(manager: Any) -> None:
    """Let the rollouts of a manager go on, also those that could not restore their caches."""
    try:
        await manager.resume_kv_cache_replicas()
    finally:
        await manager.resume_generation_replicas()

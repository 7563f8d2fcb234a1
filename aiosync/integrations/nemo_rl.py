"""NeMo-RL: a checkpoint engine for ``refit_transport: "aiosync.integrations.nemo_rl:Engine"``.

It has the interface of NeMo-RL's ``CheckpointEngine``, but is no subclass of it, so that this
module needs no NeMo-RL. Weights travel in buckets over TCP, over links that outlive a refit.
Written for NeMo-RL of August 2026, after its release 0.7. See ``docs/topics/nemo-rl.md``.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from aiosync.errors import LocalProtocolError
from aiosync.integrations._bucket_links import (
    BucketReceiver,
    BucketSender,
    Options,
    Source,
    process_name,
)
from aiosync.integrations._buckets import NamedTensor, Weights, each_of

__all__ = ["Engine"]


class Engine:
    """One worker's end of the links. Policy ranks send, rollout ranks receive.

    NeMo-RL makes one in each worker. Policy rank ``p`` sends to the rollout ranks ``r`` with ``r %
    train_world_size == p``, so that the load is shared. Any loop may run the methods, also a new
    one for each call.

    Args:
        bucket_size: Size of a bucket in bytes. During a refit a policy rank has two buckets in host
            memory, and a rollout rank three.
        address: Address that a policy rank listens at, ``tcp://host:port``; by default a free port
            of its node's address in Ray.
        token: Token of both sides. Without one here, in ``token_file`` or in ``AIOSYNC_TOKEN``,
            each policy rank makes one, and NeMo-RL carries it to the rollout ranks through Ray.
        token_file: File with the token, on each host.
        tls: Arguments of :class:`aiosync.TLS` for both sides; ``None`` does not encrypt.
        timeout: Seconds to connect, and for each bucket to be made, to travel and to be consumed.
            A receiver waits twice as long, as the sender may have to wait for other receivers.
        release_after_refit: NeMo-RL's own setting, which it gives to every engine: it calls
            :meth:`finalize` after each refit, and :meth:`prepare` before the next one. Links stay
            in any case.

    Attributes:
        cleanup_after_load: False: NeMo-RL need not collect garbage after each refit.
        shard_expert_weights: False: every rollout rank gets whole tensors.

    Raises:
        ConfigError: An option has an illegal value.
    """

    cleanup_after_load: bool = False
    shard_expert_weights: bool = False

    def __init__(
        self,
        bucket_size: int,
        *,
        address: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        tls: dict[str, Any] | None = None,
        timeout: float = 300.0,
        release_after_refit: bool = False,
    ) -> None:
        del release_after_refit
        options = Options(
            address=address, token=token, token_file=token_file, tls=tls, timeout=timeout
        )
        self._bucket_size, self._options = bucket_size, options
        # Which of the two this worker is becomes known after prepare().
        self._sender: BucketSender | None = None
        self._close_sender: Callable[[], object] | None = None
        self._receiver = BucketReceiver(bucket_size, options)
        # True once NeMo-RL has made this worker a policy rank.
        self._sends = False
        weakref.finalize(self, self._receiver.close)

    def prepare(self) -> dict[str, Any]:
        """Listen, as this may be a policy rank. Return what the workers need of each other.

        Raises:
            ConfigError: The address, the token file or a certificate cannot be used.
        """
        # The braces are for the rank, which init_policy_process_group() puts in.
        found = {"session": self._receiver.session, "name": process_name("rollout rank {}")}
        if self._sender is None:
            self._sender = BucketSender(self._bucket_size, self._options, "policy rank")
            self._close_sender = weakref.finalize(self, self._sender.close)
        return {**found, "source": self._sender.source}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[dict[str, Any]],
    ) -> None:
        """Set the rollout ranks that this policy rank sends to.

        Args:
            worker_rank: Rank of this policy worker.
            train_world_size: Number of policy ranks.
            rollout_world_size: Number of rollout ranks.
            metadata: Results of :meth:`prepare`: of the policy ranks, then of the rollout ranks.

        Raises:
            LocalProtocolError: :meth:`prepare` was not called before.
        """
        if self._sender is None:
            raise LocalProtocolError("call prepare() before init_policy_process_group()")
        self._sends = True
        theirs = metadata[train_world_size:]
        self._sender.expect(
            {
                theirs[rank]["session"]: (rank, theirs[rank]["name"].format(rank))
                for rank in range(worker_rank, rollout_world_size, train_world_size)
            }
        )

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[dict[str, Any]],
    ) -> None:
        """Connect this rollout rank to its policy rank, unless the link is still there.

        Args:
            rollout_rank: Rank of this rollout worker.
            train_world_size: Number of policy ranks.
            rollout_world_size: Number of rollout ranks.
            metadata: As for :meth:`init_policy_process_group`.

        Raises:
            ConnectError: The policy rank cannot be reached, or refused this worker.
            ConnectTimeout: The policy rank did not answer in time.
        """
        del rollout_world_size
        if self._close_sender is not None:
            # A finalizer that was called keeps the sender no longer.
            self._close_sender()
            self._sender = self._close_sender = None
        source = metadata[rollout_rank % train_world_size]["source"]
        if not isinstance(source, Source):
            # vLLM's asynchronous engine hands its workers a mapping for a dataclass.
            source = Source(**source)
        self._receiver.connect(source, rollout_rank)

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """Return None: NeMo-RL's Megatron workers have to send every weight, whole.

        Raises:
            NotImplementedError: ``shard_expert_weights`` was set.
        """
        if self.shard_expert_weights:
            raise NotImplementedError(
                "aiosync sends whole tensors, and has no get_target_weight_layout() for "
                "shard_expert_weights=True"
            )
        return None

    def finalize(self) -> None:
        """Give the memory of the buckets back. The links stay."""
        self._receiver.clear()

    async def send_weights(self, weights: Weights) -> None:
        """Send the weights to the rollout ranks of this policy rank, if it has any.

        Args:
            weights: Names and tensors, iterated to their end in any case.

        Raises:
            PartialSyncError: Some rollout ranks did not take them; the text says which, and why.
                The others have them.
            ConfigError: A tensor cannot travel.
        """
        if self._sender is not None and self._sends:
            await self._sender.send(weights)
            return
        async for _ in each_of(weights):
            pass

    async def receive_weight_batches(self) -> AsyncGenerator[list[NamedTensor], None]:
        """Yield names and tensors bucket by bucket, in the order in which they were sent.

        The tensors are on the CPU, and the consumer's: their memory is used again only when no
        tensor refers to it any more.

        Raises:
            PeerClosed: The policy rank ended, or gave this refit up; the text says why.
            RecvTimeout: The policy rank made no progress in time.
        """
        async with aclosing(self._receiver.buckets()) as buckets:
            async for bucket in buckets:
                yield bucket

"""The base of a deployment that follows a source of weights, and what Serve asks it.

Must not import a web framework.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from aiosync.errors import AdmissionTimeout, ConfigError, LocalProtocolError, RecvTimeout
from aiosync.protocol import validate_seconds
from aiosync.receiver.transform import Transform
from aiosync.schemes import TCPWeightSyncScheme, WeightSyncScheme
from aiosync.serving import AdmissionGate, WeightFeed
from aiosync.tensors.apply import Loader

__all__ = ["TOKEN_VARIABLE", "WeightsMixin"]

TOKEN_VARIABLE = "AIOSYNC_TOKEN"
"""Variable of a replica's environment with the token for a source that is given as an address."""

_logger = logging.getLogger(__name__)


class WeightsMixin:
    """Base of a Ray Serve deployment whose model follows a source of weights.

    ::

        @serve.deployment(num_replicas=2)
        class Policy(WeightsMixin):
            async def __init__(self, source: str) -> None:
                self.policy = make_policy()
                await self.follow_weights(source, model=self.policy)  # no requests before this

            @admitted
            async def act(self, observation: torch.Tensor) -> torch.Tensor:
                return self.policy(observation)

        answer = await handle.act.remote(observation, min_version=7)
        answer.value, answer.version

    A replica that is started, or started again after a crash, takes requests once
    :meth:`follow_weights` has returned. When the source is lost it answers with the version that
    it has; :meth:`weight_status` says so. The feed ends when Serve shuts the replica down.
    """

    _weight_feed: WeightFeed | None = None
    _max_staleness: float | None = None
    _was_stale: bool = False

    async def follow_weights(
        self,
        source: str | WeightSyncScheme,
        *,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        model_id: str | None = None,
        gate: AdmissionGate | None = None,
        min_version: int = 1,
        timeout: float | None = 60.0,
        max_staleness: float | None = None,
    ) -> int:
        """Start to follow the source, and wait until there is a complete version.

        To be awaited in the deployment's ``async def __init__``, which Serve calls on the loop
        of the replica's code: no request arrives before it is over. If it raises, Serve starts
        the replica again after a pause, up to its ``max_constructor_retry_count``.

        Args:
            source: A scheme without a role; or an address of a trainer, as for
                :class:`aiosync.TCPWeightSyncScheme`, with the token in the variable
                ``AIOSYNC_TOKEN`` of the replica's environment, if there is one.
            model: Module to keep up to date.
            weights: TensorDict or dict of tensors to keep up to date instead.
            load: Function that loads versions, instead.
            transform: What to do with updates before. All four as for
                :class:`~aiosync.serving.WeightFeed`.
            model_id: Name of the model, as the sender calls it.
            gate: The gate; the feed makes its own if ``None``.
            min_version: The least version to take requests with.
            timeout: Seconds to wait for it; ``None`` for ever.
            max_staleness: Seconds without a source after which the replica is unhealthy, so that
                Serve replaces it; ``None`` for never. What replaces it has to find the source.

        Returns:
            The version that the model has.

        Raises:
            RecvTimeout: There was no such version in time; the text says what the feed says.
            ConfigError: The arguments exclude each other, or the scheme already has a role.
            LocalProtocolError: It was called before.

        Cancellation:
            Ends the feed; nothing is followed.
        """
        if self._weight_feed is not None:
            raise LocalProtocolError("a replica follows only one source, and this one already does")
        if min_version < 1:
            raise ConfigError(f"min_version must be at least 1, got {min_version!r}")
        for name, value in (("timeout", timeout), ("max_staleness", max_staleness)):
            validate_seconds(name, value, endless=True, none=True)
        if isinstance(source, str):
            source = TCPWeightSyncScheme(source, token=os.environ.get(TOKEN_VARIABLE) or None)
        feed = WeightFeed(
            source,
            model=model,
            weights=weights,
            load=load,
            transform=transform,
            model_id=model_id,
            gate=gate,
        )
        await feed.start()
        try:
            limit = math.inf if timeout is None else timeout
            async with feed.request(min_version=min_version, timeout=limit) as version:
                pass
        except AdmissionTimeout as exc:
            status = feed.status
            await feed.aclose()
            where = f" from {source.address}" if isinstance(source, TCPWeightSyncScheme) else ""
            raise RecvTimeout(
                f"{_replica_name()} has no version of the weights{where} to start with after "
                f"{limit:g} s: it has version {status.version} and needs {min_version}; "
                f"{status.reason or 'the source has nothing newer'}"
            ) from exc
        except BaseException:  # cancelled: raised again
            await feed.aclose()
            raise
        self._weight_feed = feed
        self._max_staleness = max_staleness
        self._close_with_the_replica()
        return version

    def _close_with_the_replica(self) -> None:
        # Serve looks `__del__` up on the instance, and awaits it on the loop of the feed. One of
        # the class would be called by the garbage collector, too, where nothing can be awaited.
        inner: Any = getattr(type(self), "__del__", None)

        async def close() -> None:
            try:
                if inner is not None:
                    result = inner(self)
                    if inspect.isawaitable(result):
                        await result
            finally:
                if self._weight_feed is not None:
                    await self._weight_feed.aclose()

        self.__dict__["__del__"] = close

    @property
    def weight_feed(self) -> WeightFeed:
        """The feed of this replica: its ``request()``, ``batch()``, ``version`` and ``gate``.

        Only for coroutines of the deployment: it belongs to their event loop.
        """
        if self._weight_feed is None:
            raise LocalProtocolError("await follow_weights() in __init__ first")
        return self._weight_feed

    async def weight_status(self) -> dict[str, Any]:
        """How the replica that answers stands with its source, as plain values, and its name.

        Through a handle: ``await handle.weight_status.remote()``; see
        :class:`~aiosync.serving.FeedStatus`.
        """
        return {"replica": _replica_name(), **self.weight_feed.status.as_dict()}

    async def check_health(self) -> None:
        """What Serve asks every ``health_check_period_s``; extend it with ``super()``.

        A replica whose source is lost is healthy, unless ``max_staleness`` says otherwise.

        Raises:
            RecvTimeout: It is stale for longer than ``max_staleness``.
            LocalProtocolError: The feed itself has ended with an error.
        """
        if self._weight_feed is None:
            return
        status = self._weight_feed.status
        if status.state == "failed":
            raise LocalProtocolError(f"the weight feed has ended: {status.reason}")
        stale = status.stale_for > 0
        if stale != self._was_stale:
            self._was_stale = stale
            if stale:
                _logger.warning(
                    "%s answers with version %d, which is stale: %s",
                    *(_replica_name(), status.version, status.reason),
                )
            else:
                _logger.warning("%s is live again", _replica_name())
        limit = self._max_staleness
        if limit is not None and status.stale_for > limit:
            raise RecvTimeout(
                f"version {status.version} has been stale for {status.stale_for:.1f} s, and "
                f"max_staleness is {limit:g} s: {status.reason}"
            )


def _replica_name() -> str:
    try:
        replica = serve.get_replica_context()
    except RayServeException:  # not in a replica, as in a test of the deployment's class
        return f"process {os.getpid()}"
    return f"replica {replica.replica_tag} of {replica.app_name}#{replica.deployment}"

"""The weight feed: a receiver that lives in a server, and switches weights under its gate.

Must not import a web framework, nor a concrete scheme.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiosync.errors import ConfigError
from aiosync.protocol import validate_seconds
from aiosync.schemes import NoWeightSyncScheme, WeightSyncScheme
from aiosync.schemes.inside import follow
from aiosync.serving.following import Following
from aiosync.serving.gate import Admission, AdmissionGate

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from aiosync.receiver.transform import Transform
    from aiosync.schemes import Ready
    from aiosync.tensors.apply import Loader

__all__ = ["FeedStatus", "WeightFeed"]


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The state of a served model with respect to its source.

    Attributes:
        state: ``"starting"`` before the first version; ``"live"``; ``"stale"`` when the source
            is lost, or its newest version could not be put to use; ``"failed"`` when the feed
            itself has ended with an error; ``"closed"`` when it is not running.
        reason: Why it is not live, as text; empty when it is.
        epoch: Epoch of the version that is served; ``None`` before the first.
        version: Version that requests are answered with; 0 before the first.
        newest: Newest version that is known of, of the newest epoch.
        connected: Whether there is a link to the source.
        age: Seconds since :attr:`version` was put to use; ``None`` before the first.
        stale_for: Seconds since it stopped being live; 0 when it is. A new link ends this only
            once an update has come, or it is known that there is nothing newer.
        refused: The last version that could not be put to use, ``None`` if a newer one could.
        reconnects: How often a lost link was restored.
        swaps: How many versions were put to use.
    """

    state: Literal["starting", "live", "stale", "failed", "closed"]
    reason: str
    epoch: int | None
    version: int
    newest: int
    connected: bool
    age: float | None
    stale_for: float
    refused: int | None
    reconnects: int
    swaps: int

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON; the epoch in hexadecimal, as in headers."""
        values = asdict(self)
        values["epoch"] = None if self.epoch is None else f"{self.epoch:016x}"
        for name in ("age", "stale_for"):
            if values[name] is not None:
                values[name] = round(values[name], 3)
        return values


class WeightFeed:
    """Keeps the model of a server on the newest version.

    Updates arrive in the background, on the server's own event loop, and are complete and
    verified before anything waits for them. Then they are switched to under the gate. When the
    source is lost, the server goes on with what it has; :attr:`status` says so, and the feed
    looks for the source until it is found.

    ::

        feed = WeightFeed(aiosync.TCPWeightSyncScheme("tcp://trainer:5555"), model=model)
        async with feed:                      # does not wait for the trainer
            await feed.ready                  # but this does
            async with feed.request() as version:
                answer = model(observation)

    Belongs to the event loop that it was started on; not thread-safe.

    Args:
        scheme: A scheme without a role: how the source is reached. The feed works on copies of
            it, with ``apply="manual"`` and, over streams, ``reconnect=None``.
        model: Module to keep up to date.
        weights: TensorDict or dict of tensors to keep up to date instead.
        load: Function that loads versions, instead; see
            :meth:`aiosync.WeightSyncScheme.init_on_receiver`. It runs in a thread of its own,
            while the gate keeps requests out.
        transform: What to do with updates before that; see there.
        model_id: Name of the model, as the sender calls it.
        worker_idx: Index of this server among the workers; ``None`` lets the sender choose.
        gate: The gate; the feed makes its own if ``None``.
        max_pause: Seconds between two attempts to reach the source, at most.

    Raises:
        ConfigError: The arguments exclude each other, or the scheme already has a role.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        *,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        model_id: str | None = None,
        worker_idx: int | None = None,
        gate: AdmissionGate | None = None,
        max_pause: float = 5.0,
    ) -> None:
        if not isinstance(scheme, WeightSyncScheme) or isinstance(scheme, NoWeightSyncScheme):
            raise ConfigError(
                "a feed runs on an event loop and needs an async scheme that receives weights, "
                "such as aiosync.TCPWeightSyncScheme, not "
                f"{type(scheme).__module__}.{type(scheme).__name__}"
            )
        if scheme.initialized_on_sender or scheme.initialized_on_receiver:
            raise ConfigError(
                "a feed initialises its scheme itself: pass a scheme that has not been initialised"
            )
        if sum(each is not None for each in (model, weights, load)) != 1:
            raise ConfigError("a feed needs exactly one of model, weights and load")
        validate_seconds("max_pause", max_pause, endless=True)
        self.gate: AdmissionGate = AdmissionGate() if gate is None else gate
        self.max_pause = max_pause
        self._init: dict[str, Any] = {
            "model": model,
            "weights": weights,
            "load": load,
            "transform": transform,
            "model_id": model_id,
            "worker_idx": worker_idx,
        }
        self._config = copy.copy(scheme)
        # What is more than a change of pointers must not hold the loop.
        self._in_thread = model is None or scheme.apply_copy or not scheme.strict
        self._make().abort()  # says now what is wrong with the arguments
        self._users = 0
        self._following: Following | None = None

    def _make(self) -> WeightSyncScheme:
        scheme = copy.copy(self._config)
        scheme.apply = "manual"
        follow(scheme, longest_pause=self.max_pause)
        scheme.init_on_receiver(**self._init)
        return scheme

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to receive in the background. Does not wait for the source.

        Counted: each call needs its own :meth:`aclose`, and the last one ends the feed, which
        may then be started again.
        """
        self._users += 1
        if self._users == 1:
            self._following = Following(
                self._make(),
                gate=self.gate,
                memory=self._memory,
                max_pause=self.max_pause,
                in_thread=self._in_thread,
            )
            self._following.start()

    async def aclose(self) -> None:
        """Stop the feed, unless another :meth:`start` is still active.

        Bounded; the model keeps its weights.
        """
        if self._users == 0:
            return
        self._users -= 1
        if self._users == 0 and self._following is not None:
            await self._following.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # -- looking -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version that requests are answered with; 0 before the first."""
        return self.gate.version

    @property
    def epoch(self) -> int | None:
        """Epoch of :attr:`version`."""
        return self.gate.epoch

    @property
    def lag(self) -> int:
        """How far :attr:`version` is behind the newest version that the feed has heard of.

        If that newest version is of another epoch, all of its versions count.
        0 while no source is reached, because no newer version is known then: see :attr:`status`.
        """
        receiver = None if self._following is None else self._following.receiver
        if receiver is None:
            return 0
        inbox = receiver.inbox
        if inbox.newest_epoch != self.gate.epoch:
            return inbox.newest
        return max(inbox.newest - self.gate.version, 0)

    @property
    def ready(self) -> Ready:
        """The condition that there is a complete version, to look at or to await."""
        return self.gate.ready

    def request(
        self, *, min_version: int = 0, epoch: int | None = None, timeout: float | None = None
    ) -> Admission:
        """:meth:`AdmissionGate.request` of the feed's gate."""
        return self.gate.request(min_version=min_version, epoch=epoch, timeout=timeout)

    def batch(self, *, timeout: float | None = None) -> Admission:
        """:meth:`AdmissionGate.batch` of the feed's gate."""
        return self.gate.batch(timeout=timeout)

    @property
    def status(self) -> FeedStatus:
        """The state of the feed and its link to the source, at this moment."""
        now, following, version = time.monotonic(), self._following, self.gate.version
        if self._users == 0 or following is None:
            following, receiver, causes = None, None, []
            state: Any = "closed"
            reason = "the feed is not running: start it with `async with feed`"
        else:
            receiver, causes = following.receiver, following.causes(now)
            state = "starting" if version == 0 else "stale" if causes else "live"
            reason = "; ".join(text for _, text in causes)
            if following.crash is not None:
                state, reason = "failed", f"{type(following.crash).__name__}: {following.crash}"
        refusing = None if receiver is None else receiver.refusing
        at = None if self._following is None else self._following.activated_at
        return FeedStatus(
            state=state,
            reason=reason,
            epoch=self.gate.epoch,
            version=version,
            newest=version if receiver is None else receiver.inbox.newest or version,
            connected=following is not None and following.connected,
            age=None if at is None else now - at,
            stale_for=max((now - since for since, _ in causes), default=0.0),
            refused=None if refusing is None else refusing.version,
            reconnects=0 if receiver is None else receiver.reconnects,
            swaps=self.gate.swaps,
        )

    def _memory(self) -> list[Any]:
        """What keeps the memory alive that the model has now."""
        model, weights = self._init["model"], self._init["weights"]
        if model is None or not hasattr(model, "parameters"):
            return list(weights.values()) if isinstance(weights, dict) else []
        return [tensor.data for tensor in (*model.parameters(), *model.buffers())]

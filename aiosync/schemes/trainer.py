"""Role of a scheme in the trainer, which sends weights. Must not import a concrete scheme."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aiosync.errors import ConfigError
from aiosync.protocol import as_index, as_indices, validate_timeout
from aiosync.schemes.fabric import Fabric
from aiosync.schemes.lifecycle import ConnectArguments, Life
from aiosync.schemes.properties import SchemeState
from aiosync.schemes.sources import Given, is_per_worker
from aiosync.sender import WeightSender
from aiosync.sender.snapshots import SnapshotCopier
from aiosync.sender.waits import WorkerWaits
from aiosync.tensors import Prepared, check_dtypes
from aiosync.transports.base import Transport
from aiosync.types import SendReport

__all__ = ["Trainer", "addressed_workers"]


class Trainer:
    """Role of a scheme in the trainer. Refers to no scheme, so that a forgotten one is closed.

    Args:
        given: Weights to send, the number of workers, and the model or its context.
        links: Links that were given, by worker.

    Attributes:
        links: As given.
        runtime: The sender, once the scheme connects.
    """

    role: Final = "sender"

    def __init__(self, given: Given, links: Mapping[int, Transport]) -> None:
        self.links = links
        self.runtime: WeightSender | None = None
        self._given = given
        # Processes that this one had started when connect() began; their ends are logged.
        self._children: list[multiprocessing.process.BaseProcess] = []

    @property
    def waits(self) -> WorkerWaits:
        """The waits of a connected trainer."""
        assert self.runtime is not None
        return self.runtime.waits

    def assign(self, scheme: SchemeState, life: Life, name: str, value: Any) -> None:
        """Send another model or other weights from now on; or look for the model in a context."""
        del scheme, life
        if name != "context":
            self._given.sources.replace(value)
            self._given.model = self._given.weights = None
        setattr(self._given, name, value)

    async def connect(
        self,
        scheme: SchemeState,
        life: Life,
        fabric: Fabric[Any],
        timeout: float | None,
        arguments: ConnectArguments,
    ) -> None:
        """Let workers in, and bring them to the initial weights."""
        sources = self._given.sources
        self._children = multiprocessing.active_children()
        # The user's own links may carry more than those that this scheme makes.
        limits = getattr(scheme, "limits", None) if self.links else fabric.limits(scheme)
        copier = SnapshotCopier(
            fabric.arena(scheme),
            scheme.strategy.extract_as,
            # A mapping may have been changed since it was checked.
            check_dtypes(scheme.wire_dtype, "wire_dtype"),
            limits,
        )
        self.runtime = sender = WeightSender(
            model_id=self._given.model_id or "policy",
            strategy=scheme.strategy_str,
            num_workers=sources.num_workers,
            expected=sources.expected,
            require=scheme.require,
            copier=copier,
            meter=life.meter,
            # Without strict, an update may hold only some of the names.
            parts=not scheme.strict,
            streaming=fabric.streaming(scheme),
            how=fabric.how(scheme),
            first_version=scheme.first_version,
        )
        planned = self.prepare_send(scheme, arguments.weights, initial=True)
        for idx, link in self.links.items():
            sender.workers.admission.welcome(link, idx, from_user=True)
        for idx, pipe in enumerate(sources.pipes or ()):
            sender.workers.admission.welcome(fabric.wrap(scheme, pipe), idx, from_user=True)
        given = bool(self.links) or sources.pipes is not None
        fabric.listen(scheme, sender, given=given)
        try:
            await sender.connect(planned, timeout=timeout, processes=arguments.processes)
        finally:
            # Process objects that are kept would keep their pipes open.
            self._children.clear()

    def awaited(self) -> str:
        """Return a text that says what ``connect()`` waits for."""
        assert self.runtime is not None
        ended = (
            f"; process {each.pid}, which this one had started, ended with exit code "
            f"{each.exitcode}"
            for each in self._children
            if each.exitcode
        )
        return self.runtime.workers.expected.awaited(self.runtime.version) + "".join(ended)

    def versions_text(self) -> str:
        """Return the workers' versions as text, for the log of a call that waits long for one."""
        return f"the workers that are connected have versions {self.versions}"

    @property
    def versions(self) -> dict[int, int]:
        """Version that each connected worker is known to have applied."""
        links = {} if self.runtime is None else self.runtime.workers.links
        return {idx: link.applied for idx, link in links.items()}

    def prepare_send(
        self, scheme: SchemeState, weights: Any, *, initial: bool = False
    ) -> dict[int | None, Prepared]:
        """Set the sender's ``require``; return what to copy by worker, under ``None`` for all.

        Without any weights it raises; if ``initial``, it returns none: a later send may bring some.
        """
        assert self.runtime is not None
        # The user may have assigned this option since the last send.
        self.runtime.require = scheme.require
        sources = self._given.sources
        mapped = sources.per_worker or sources.device_map
        # This is nearly always the case.
        if weights is None and sources.weights is not None and not mapped:
            return {None: self.runtime.copier.flatteners[-1].prepare(sources.weights)}
        return self._prepare_found(scheme, self.runtime, weights, initial=initial)

    def _prepare_found(
        self, scheme: SchemeState, runtime: WeightSender, weights: Any, *, initial: bool
    ) -> dict[int | None, Prepared]:
        """Find the weights, and those of each worker; return what :meth:`prepare_send` does."""
        flatteners, given = runtime.copier.flatteners, self._given
        sources = given.sources
        weights = sources.resolve(weights, given.context, given.model_id or "policy")
        if weights is None and initial:
            return {}
        if weights is None:
            raise self._nothing_to_send()
        each = sources.plan(weights, scheme.per_worker_weights, scheme.strategy)
        if runtime.workers.deltas is not None and None not in each:
            raise ConfigError(
                "delta= compares one state of the weights, and params_map or device_map_fn makes "
                "one for each worker: choose one of them"
            )
        return {
            idx: flatteners[-1 if idx is None else idx].prepare(value)
            for idx, value in each.items()
        }

    def _nothing_to_send(self) -> ConfigError:
        """Return the error of a send without any weights."""
        lacks = self._given.lacks()
        why = f" ({lacks})" if lacks else ""
        return ConfigError(
            f"there is nothing to send{why}: pass weights to send(), or model=, weights= or "
            "context= to init_on_sender()"
        )

    def publish(
        self,
        scheme: SchemeState,
        life: Life,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        timeout: float | None = None,
        max_lag: int | None = None,
    ) -> tuple[SendReport | None, Callable[[], None] | None]:
        """Send without waiting, on another thread than the loop's; the loop rests meanwhile.

        Returns:
            The report, or ``None`` with nothing done if the send has to wait; and a function that
            is to be called on the loop, or ``None``.
        """
        started, sender = time.perf_counter(), self.runtime
        if sender is None or not life.connected or life.closed or not sender.reads_slots:
            return None, None
        sources = self._given.sources
        if sources.device_map or sources.per_worker or max_lag is not None:
            # send() may have to follow, and a device map is called only once for each send.
            return None, None
        if timeout is not None:
            validate_timeout(timeout)
        planned, targets = (
            self.prepare_send(scheme, weights),
            addressed_workers(weights, worker_ids),
        )
        # The loop first has to read a message of a worker, or see the end of one.
        if not sender.is_quiet():
            return None, None
        sent = sender.start(planned, targets, None, started, off_loop=True)
        if not isinstance(sent, SendReport):
            return None, None
        return sent, sender.tell if sender.has_to_tell() else None

    def abort_links(self) -> None:
        """End the links that were given, if no runtime has taken them."""
        for link in self.links.values():
            link.abort()


def addressed_workers(weights: Any, worker_ids: int | Iterable[int] | None) -> set[int] | None:
    """Return the workers that ``worker_ids`` or the weights' keys name; ``None`` for all."""
    if worker_ids is not None:
        targets = as_indices("worker_ids", worker_ids)
        if not targets:
            raise ConfigError("worker_ids names nobody: leave it out to send to every worker")
        return targets
    if weights is None or not is_per_worker(weights):
        return None
    return {as_index("a worker's index", idx) for idx in weights}

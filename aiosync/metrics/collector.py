"""Gathers what schemes, weight servers and gates say, for whoever asks."""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from aiosync import SyncEvent, VersionSpan
from aiosync._version import __version__
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.metrics.table import METRICS, optional
from aiosync.schemes import WeightSyncScheme
from aiosync.schemes.inside import life_of
from aiosync.server.server import WeightServer
from aiosync.serving import AdmissionGate
from aiosync.sync import WeightSyncScheme as BlockingScheme
from aiosync.sync._schemes import core_of
from aiosync.wire import WIRE_VERSION

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

__all__ = ["Metrics", "Source"]

Source: TypeAlias = WeightSyncScheme | BlockingScheme | WeightServer | AdmissionGate
"""What there are metrics of: schemes of either API and role, weight servers, gates."""

_Labels: TypeAlias = tuple[str, ...]


class Metrics:
    """What :data:`METRICS` show, of all sources in this process together.

    A collector for ``prometheus_client``: give it to :func:`aiosync.metrics.serve`, or to
    ``prometheus_client.REGISTRY.register()``. Sources are asked when somebody looks; histograms
    are filled as things happen. Counters of several sources with the same labels add up, of gauges
    the worst is shown. Of a scheme that was closed the counters stay, and nothing else.

    Args:
        *sources: As for :meth:`add`.

    Threads:
        Any thread may use it; with a weight server among the sources, only that of its loop may ask
        for :meth:`values` and :meth:`collect`.
    """

    def __init__(self, *sources: Source) -> None:
        self._sources: list[Source] = []
        # Re-entrant: a signal's handler may send, too.
        self._lock = threading.RLock()
        # Counts of each bucket, of what is beyond the last one, and the sum.
        self._histograms: dict[str, dict[_Labels, list[float]]] = {
            name: defaultdict(([0.0] * (len(metric.buckets) + 2)).copy)
            for name, metric in METRICS.items()
            if metric.buckets
        }
        self._unversioned: Counter[str] = Counter()
        self._logged: dict[str, tuple[int, float, float]] = {}  # count, sum, maximum
        self._listeners: list[Callable[[str, _Labels, float], None]] = []
        for source in sources:
            self.add(source)

    def add(self, source: Source, model: str = "policy") -> None:
        """Take in another source, for good.

        Args:
            source: A scheme, a weight server or a gate.
            model: What the requests of a gate are for.

        Raises:
            ConfigError: A gate tells somebody else of its requests.
        """
        if isinstance(source, AdmissionGate):
            if source.on_admission is not None:
                raise ConfigError("this gate tells others already: its on_admission is set")
            source.on_admission = functools.partial(
                self._observe, "aiosync_gate_wait_seconds", (model,)
            )
        elif not isinstance(source, WeightServer):
            source.add_observer(self)
        self._sources.append(source)

    def unready(self) -> list[Source]:
        """Those that an orchestrator should wait for.

        Receivers and gates that have no weights, and senders that lack an expected worker, or a
        worker of which lacks weights. Never a weight server: who brings weights has to reach it;
        nor a scheme that was closed.
        """
        return [
            source
            for source in self._sources
            if not isinstance(source, WeightServer) and not source.ready and not _is_closed(source)
        ]

    # -- what happens --------------------------------------------------------------------------

    def on_sync(self, event: SyncEvent) -> None:
        """Take in what a scheme tells its observers."""
        labels, phases = (event.model, event.role, event.transport), event.seconds
        for phase, seconds in phases.items():
            self._observe("aiosync_sync_seconds", (*labels, phase), seconds)
        if event.outcome != "ok":  # its time is no sync's
            return
        # A pause is a part of another phase.
        self._log("perf/weight_sync_s", sum(phases.values()) - phases.get("pause", 0.0))
        self._log("perf/weight_sync_pause_s", phases.get("pause"))
        self._log("perf/weight_sync_transfer_s", phases.get("wire"))

    def sampled(
        self,
        scheme: WeightSyncScheme | BlockingScheme,
        span: VersionSpan | None,
        weight: Literal["sample", "token"] = "sample",
    ) -> float | None:
        """Note how stale a sample is that a trainer got, and say it.

        Args:
            scheme: The trainer's.
            span: The versions that the sample was computed with; ``None`` if nobody knows.
            weight: As for :func:`aiosync.staleness`.

        Returns:
            Versions; ``None`` if it is unknown.

        Raises:
            ConfigError: There is no such weight.
        """
        stale, model = scheme.staleness(span, weight=weight), scheme.model_id or "policy"
        self._log("sample/staleness", stale)
        if stale is not None:
            self._observe("aiosync_sample_staleness_versions", (model, weight), stale)
        else:
            with self._lock:
                self._unversioned[model] += 1
        return stale

    def as_log(self) -> dict[str, float]:
        """What happened since the last call, under the names that trainers' loggers use.

        Returns:
            Means, in seconds, of ``perf/weight_sync_s``, ``perf/weight_sync_pause_s`` and
            ``perf/weight_sync_transfer_s``; in versions ``sample/staleness_mean`` and
            ``sample/staleness_max``. What was not measured is left out.
        """
        with self._lock:
            logged, self._logged = self._logged, {}
        found = {name: total / count for name, (count, total, _) in logged.items()}
        if "sample/staleness" in found:
            found["sample/staleness_mean"] = found.pop("sample/staleness")
            found["sample/staleness_max"] = logged["sample/staleness"][2]
        return found

    def _log(self, name: str, value: float | None) -> None:
        if value is not None:
            with self._lock:
                count, total, largest = self._logged.get(name, (0, 0.0, value))
                self._logged[name] = count + 1, total + value, max(largest, value)

    def _observe(self, name: str, labels: _Labels, value: float) -> None:
        with self._lock:
            counts = self._histograms[name][labels]
            counts[bisect.bisect_left(METRICS[name].buckets, value)] += 1
            counts[-1] += value
        for listener in self._listeners:
            listener(name, labels, value)

    # -- whoever asks --------------------------------------------------------------------------

    def on_observe(self, listener: Callable[[str, tuple[str, ...], float], None]) -> None:
        """Have each value of a histogram told, too: the metric's name, labels' values, value."""
        self._listeners.append(listener)

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """What each counter and gauge shows now, by the values of its labels."""
        found: dict[str, dict[_Labels, float]] = {
            name: {} for name, metric in METRICS.items() if not metric.buckets
        }

        def put(name: str, labels: _Labels, value: float) -> None:
            known = found[name]
            known[labels] = METRICS[name].join(known[labels], value) if labels in known else value

        put("aiosync_build_info", (__version__, str(WIRE_VERSION)), 1)
        for model, count in tuple(self._unversioned.items()):
            put("aiosync_samples_unversioned_total", (model,), count)
        for source in self._sources:
            if isinstance(source, WeightServer):
                everything, refused = tuple(source.stats().values()), source.status()["refused"]
            elif not isinstance(source, AdmissionGate):
                try:
                    everything, refused = (source.stats(),), getattr(source, "refused", {})
                except LocalProtocolError:  # it has no role yet
                    continue
            else:
                continue
            for reason, count in refused.items():
                put("aiosync_refused_total", (reason,), count)
            for stats, name in itertools.product(everything, found):
                if METRICS[name].kind == "counter" or not _is_closed(source):
                    for labels, value in METRICS[name].read(stats).items():
                        put(name, labels, value)
        return found

    def collect(self) -> Iterator[Family]:
        """What ``prometheus_client`` calls.

        Raises:
            ConfigError: It is not installed.
        """
        client = optional("prometheus_client.core")
        values = self.values()
        with self._lock:
            counted = {
                name: {labels: tuple(counts) for labels, counts in known.items()}
                for name, known in self._histograms.items()
            }
        for name, metric in METRICS.items():
            family = getattr(client, f"{metric.kind.title()}MetricFamily")(
                name, metric.help, labels=metric.labels, unit=metric.unit
            )
            for labels, value in values.get(name, {}).items():
                family.add_metric(labels, value)
            bounds = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
            for labels, (*counts, total) in counted.get(name, {}).items():
                buckets = zip(bounds, itertools.accumulate(counts), strict=True)
                family.add_metric(labels, list(buckets), total)
            yield family


def _is_closed(source: Source) -> bool:
    """Whether it is a scheme, and closed."""
    scheme = core_of(source) if isinstance(source, BlockingScheme) else source
    return isinstance(scheme, WeightSyncScheme) and life_of(scheme).closed

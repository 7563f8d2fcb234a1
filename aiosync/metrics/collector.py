"""The table of metrics, and the collector of their values from schemes, weight servers and gates.

The metrics of Prometheus and the instruments of OpenTelemetry are both made from the table.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import add
from types import ModuleType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aiosync import SyncEvent, VersionSpan
from aiosync._version import __version__
from aiosync.errors import ConfigError, LocalProtocolError, TransportClosed
from aiosync.events import SyncStats
from aiosync.schemes import WeightSyncScheme
from aiosync.schemes.internal import life_of
from aiosync.server.server import WeightServer, count_refusals
from aiosync.serving import AdmissionGate, WeightFeed
from aiosync.sync import WeightSyncScheme as BlockingScheme
from aiosync.sync._schemes import core_of
from aiosync.wire import WIRE_VERSION

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

__all__ = ["METRICS", "Metric", "Metrics", "Source", "optional"]

Source: TypeAlias = WeightSyncScheme | BlockingScheme | WeightServer | WeightFeed | AdmissionGate
"""Objects with metrics: schemes of either API and role, weight servers, weight feeds, gates."""

_Labels: TypeAlias = tuple[str, ...]

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)
_STATES = ("joining", "ready", "lagging", "lost")  # a worker that has left is no receiver
_DIRECTIONS = {"sender": "sent", "server": "sent", "receiver": "received"}
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the table.

    Attributes:
        name: Name in Prometheus.
        kind: Type of the metric.
        help: Meaning of the metric, in a sentence.
        labels: Names of its labels. None of them is a worker or a process.
        unit: Base unit, which the name ends in; empty for none.
        buckets: Upper bounds of a histogram, without the infinite one.
        read: Returns the values in a scheme's statistics, by the values of the labels; nothing for
            a metric that :class:`Metrics` counts itself.
        join: Joins the values of two sources with the same labels into one.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...]
    unit: str = ""
    buckets: tuple[float, ...] = ()
    read: Callable[[SyncStats], Mapping[tuple[str, ...], float]] = lambda stats: {}
    join: Callable[[float, float], float] = max

    @property
    def dotted(self) -> str:
        """Name in OpenTelemetry; exporters to Prometheus turn it into :attr:`name` again."""
        return self.name.removesuffix("_total").replace("_", ".", 1)


_TABLE = (
    Metric(
        "aiosync_build_info",
        "gauge",
        "Always 1: the release, and the version of the wire format.",
        ("version", "protocol"),
    ),
    Metric(
        "aiosync_sync_seconds",
        "histogram",
        "Time of each phase of an update; pause is for how long it kept the model from computing.",
        ("model", "role", "transport", "phase"),
        "seconds",
        _SECONDS,
    ),
    Metric(
        "aiosync_syncs_started_total",
        "counter",
        "Updates that began.",
        ("model", "role", "transport"),
        read=lambda stats: {(stats.model, stats.role, stats.transport): stats.started},
        join=add,
    ),
    Metric(
        "aiosync_syncs_finished_total",
        "counter",
        "Updates that ended, and how.",
        ("model", "role", "transport", "outcome"),
        read=lambda stats: {
            (stats.model, stats.role, stats.transport, outcome): count
            for outcome, count in stats.finished.items()
        },
        join=add,
    ),
    Metric(
        "aiosync_version",
        "gauge",
        "Version that was sent (sender), that is served (server) or applied (receiver).",
        ("model", "role"),
        read=lambda stats: {(stats.model, stats.role): stats.version},
        join=min,
    ),
    Metric(
        "aiosync_newest_version",
        "gauge",
        "Newest version that is known to exist.",
        ("model",),
        read=lambda stats: {(stats.model,): stats.newest_version},
    ),
    Metric(
        "aiosync_publish_lag_versions",
        "gauge",
        "How far weights are behind the newest version; of a sender those of its slowest worker.",
        ("model",),
        "versions",
        read=lambda stats: {(stats.model,): stats.lag},
    ),
    Metric(
        "aiosync_weights_age_seconds",
        "gauge",
        "Time since the version that is there was published.",
        ("model",),
        "seconds",
        read=lambda stats: {(stats.model,): stats.age} if stats.version else {},
    ),
    Metric(
        "aiosync_bytes_total",
        "counter",
        "Bytes of updates: of the weights (logical), and of what travelled (wire).",
        ("direction", "kind"),
        "bytes",
        read=lambda stats: {
            (_DIRECTIONS[stats.role], "logical"): stats.nbytes,
            (_DIRECTIONS[stats.role], "wire"): stats.wire_nbytes,
        },
        join=add,
    ),
    Metric(
        "aiosync_skipped_versions_total",
        "counter",
        "Versions that a newer one overtook before they were applied.",
        ("model",),
        "versions",
        read=lambda stats: {(stats.model,): stats.skipped},
        join=add,
    ),
    Metric(
        "aiosync_receivers",
        "gauge",
        "Workers of the senders and weight servers here.",
        ("state",),
        read=lambda stats: {
            (state,): sum(each.state == state for each in stats.workers)
            for state in _STATES
            if stats.role != "receiver"
        },
        join=add,
    ),
    Metric(
        "aiosync_refused_total",
        "counter",
        "Updates and connections that were refused.",
        ("reason",),
        read=lambda stats: {("update",): stats.refused},
        join=add,
    ),
    Metric(
        "aiosync_retries_total",
        "counter",
        "What was done again, such as links that were lost and made anew.",
        ("reason",),
        read=lambda stats: {("reconnect",): stats.reconnects},
        join=add,
    ),
    Metric(
        "aiosync_gate_wait_seconds",
        "histogram",
        "How long requests waited until a gate admitted them or turned them away.",
        ("model",),
        "seconds",
        _SECONDS,
    ),
    Metric(
        "aiosync_sample_staleness_versions",
        "histogram",
        "How many versions older than the trainer's the weights were that made a sample.",
        ("model", "weight"),
        "versions",
        _VERSIONS,
    ),
    Metric(
        "aiosync_samples_unversioned_total",
        "counter",
        "Samples of which nobody knows how stale they are.",
        ("model",),
        join=add,
    ),
)

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _TABLE}
"""Every metric, by its name. ``docs/topics/metrics.md`` lists figures that have no metric."""


def optional(module: str) -> ModuleType:
    """Import a module that comes with the extra ``metrics``.

    Raises:
        ConfigError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"this needs {module.partition('.')[0]}, which cannot be imported ({exc}): "
            "pip install 'aiosync[metrics]'"
        ) from exc


class Metrics:
    """Values of :data:`METRICS`, of all sources in this process together.

    It is a collector for ``prometheus_client``: give it to :func:`aiosync.metrics.serve`, or to
    ``prometheus_client.REGISTRY.register()``. Counters and gauges are read from the sources at each
    request; histograms are filled at each update, request and sample. Counters of several sources
    with the same labels add up; of gauges the worst value is shown. A closed scheme keeps its
    counters and loses its gauges.

    Args:
        *sources: Sources as for :meth:`add`.

    Threads:
        Any thread may use it. With a weight server among the sources, only the thread of the
        server's loop may call :meth:`values` and :meth:`collect`.
    """

    def __init__(self, *sources: Source) -> None:
        self._sources: list[Source] = []
        # The lock is re-entrant because a signal's handler may send while this thread holds it.
        self._lock = threading.RLock()
        # For each histogram and its labels: the count of each bucket, the count of the values
        # beyond the last bucket, and the sum of all values.
        self._histograms: dict[str, dict[_Labels, list[float]]] = {
            name: defaultdict(([0.0] * (len(metric.buckets) + 2)).copy)
            for name, metric in METRICS.items()
            if metric.buckets
        }
        # By model, the number of samples of which nobody knows how stale they are.
        self._unversioned: Counter[str] = Counter()
        # The measurements since the last as_log(), by name: their count, sum and maximum.
        self._logged: dict[str, tuple[int, float, float]] = {}
        self._listeners: list[Callable[[str, _Labels, float], None]] = []
        for source in sources:
            self.add(source)

    def add(self, source: Source, model: str = "policy") -> None:
        """Add a source; it cannot be removed.

        Args:
            source: A scheme, a weight server, a weight feed or a gate. A feed's gate is a source of
                its own; the scheme that a feed was given is none, as the feed works on copies.
            model: Name of the model that the requests at a gate are for.

        Raises:
            ConfigError: The gate has an ``on_admission`` callback already.
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
        """Return the sources that an orchestrator should wait for.

        These are receivers, feeds and gates without weights, and senders with a missing expected
        worker or a worker without weights. A weight server is never among them, because the trainer
        that pushes to it has to reach it first; nor is a closed scheme.
        """
        return [
            source
            for source in self._sources
            if not isinstance(source, WeightServer) and not source.ready and not _is_closed(source)
        ]

    # -- events --------------------------------------------------------------------------------

    def on_sync(self, event: SyncEvent) -> None:
        """Record the event of an update that ended; schemes call it as an observer."""
        labels, phases = (event.model, event.role, event.transport), event.seconds
        for phase, seconds in phases.items():
            self._observe("aiosync_sync_seconds", (*labels, phase), seconds)
        if event.outcome != "ok":  # the log shows the times of completed updates only
            return
        # The pause is a part of another phase and must not count twice.
        self._log("perf/weight_sync_s", sum(phases.values()) - phases.get("pause", 0.0))
        self._log("perf/weight_sync_pause_s", phases.get("pause"))
        self._log("perf/weight_sync_transfer_s", phases.get("wire"))

    def sampled(
        self,
        scheme: WeightSyncScheme | BlockingScheme,
        span: VersionSpan | None,
        weight: Literal["sample", "token"] = "sample",
    ) -> float | None:
        """Record the staleness of a sample that a trainer received, and return it.

        Args:
            scheme: The trainer's scheme.
            span: The versions that the sample was computed with; ``None`` if they are unknown.
            weight: ``"sample"`` or ``"token"``, as for :func:`aiosync.staleness`.

        Returns:
            Staleness in versions; ``None`` if it is unknown.

        Raises:
            ConfigError: ``weight`` has an illegal value.
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
        """Return the measurements since the last call, under the names of trainers' loggers.

        Returns:
            Means, in seconds, of ``perf/weight_sync_s``, ``perf/weight_sync_pause_s`` and
            ``perf/weight_sync_transfer_s``; in versions ``sample/staleness_mean`` and
            ``sample/staleness_max``. Names without a measurement are left out.
        """
        with self._lock:
            logged, self._logged = self._logged, {}
        found = {name: total / count for name, (count, total, _) in logged.items()}
        if "sample/staleness" in found:
            found["sample/staleness_mean"] = found.pop("sample/staleness")
            found["sample/staleness_max"] = logged["sample/staleness"][2]
        return found

    def _log(self, name: str, value: float | None) -> None:
        """Add a measurement to those of :meth:`as_log`; ``None`` stands for no measurement."""
        if value is not None:
            with self._lock:
                count, total, largest = self._logged.get(name, (0, 0.0, value))
                self._logged[name] = count + 1, total + value, max(largest, value)

    def _observe(self, name: str, labels: _Labels, value: float) -> None:
        """Add a value to a histogram, and tell the listeners of it."""
        with self._lock:
            counts = self._histograms[name][labels]
            counts[bisect.bisect_left(METRICS[name].buckets, value)] += 1
            counts[-1] += value
        for listener in self._listeners:
            listener(name, labels, value)

    # -- values --------------------------------------------------------------------------------

    def on_observe(self, listener: Callable[[str, tuple[str, ...], float], None]) -> None:
        """Call ``listener`` with each value of a histogram: name, values of the labels, value."""
        self._listeners.append(listener)

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the present value of each counter and gauge, by the values of its labels."""
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
            for name, labels, value in _values_of(source, found):
                put(name, labels, value)
        return found

    def collect(self) -> Iterator[Family]:
        """Yield every metric with its values; ``prometheus_client`` calls it.

        Raises:
            ConfigError: ``prometheus_client`` is not installed.
        """
        client = optional("prometheus_client.core")
        values = self.values()
        counted = self._copy_histograms()
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

    def _copy_histograms(self) -> dict[str, dict[_Labels, tuple[float, ...]]]:
        """Return the counts, and the sum of the values, of each histogram at this moment."""
        with self._lock:
            return {
                name: {labels: tuple(counts) for labels, counts in known.items()}
                for name, known in self._histograms.items()
            }


def _read(source: Source) -> tuple[tuple[SyncStats, ...], Mapping[str, int]]:
    """Return a source's statistics, and its refused connections by reason; none of a gate."""
    if isinstance(source, AdmissionGate):
        return (), {}
    if isinstance(source, WeightServer):
        return tuple(source.stats().values()), count_refusals(source)
    try:
        return (source.stats(),), getattr(source, "refused", {})
    except (LocalProtocolError, TransportClosed):  # a scheme that never had a role has none
        return (), {}


def _values_of(source: Source, names: Iterable[str]) -> Iterator[tuple[str, _Labels, float]]:
    """Yield the values that a source has for these metrics: name, labels and value of each."""
    all_stats, refused = _read(source)
    for reason, count in refused.items():
        yield "aiosync_refused_total", (reason,), count
    for stats, name in itertools.product(all_stats, names):
        # A closed scheme keeps its counters, and has no gauges: its present state means nothing.
        if METRICS[name].kind == "counter" or not _is_closed(source):
            for labels, value in METRICS[name].read(stats).items():
                yield name, labels, value


def _is_closed(source: Source) -> bool:
    """Return True if the source is a closed scheme."""
    scheme = core_of(source) if isinstance(source, BlockingScheme) else source
    return isinstance(scheme, WeightSyncScheme) and life_of(scheme).closed

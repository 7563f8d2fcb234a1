"""The metrics, as a table, and what gathers them from schemes, weight servers and gates.

Prometheus' and OpenTelemetry's are both made from the table.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import add
from types import ModuleType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aiosync import SyncEvent, VersionSpan
from aiosync._version import __version__
from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.events import SyncStats
from aiosync.schemes import WeightSyncScheme
from aiosync.schemes.inside import life_of
from aiosync.server.server import WeightServer
from aiosync.serving import AdmissionGate
from aiosync.sync import WeightSyncScheme as BlockingScheme
from aiosync.sync._schemes import core_of
from aiosync.wire import WIRE_VERSION

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

__all__ = ["METRICS", "Metric", "Metrics", "Source", "optional"]

Source: TypeAlias = WeightSyncScheme | BlockingScheme | WeightServer | AdmissionGate
"""What there are metrics of: schemes of either API and role, weight servers, gates."""

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
_STATES = ("joining", "ready", "lagging", "lost")  # who has left is no receiver any more
_DIRECTIONS = {"sender": "sent", "server": "sent", "receiver": "received"}
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: As Prometheus has it.
        kind: Its type.
        help: What it says, in a sentence.
        labels: Names of its labels. None of them is a worker or a process.
        unit: Its base unit, which the name ends in.
        buckets: Upper bounds of a histogram, without the infinite one.
        read: Its values, by those of the labels, in what a scheme says of itself; nothing for
            what is counted here.
        join: What several sources with the same labels show together.
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
        """As OpenTelemetry has it; exporters to Prometheus make :attr:`name` of it again."""
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
"""Every metric there is, by its name. See ``docs/topics/metrics.md`` for what has no source."""


def optional(module: str) -> ModuleType:
    """Import what only the extra brings.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"this needs {module.partition('.')[0]}, which cannot be imported ({exc}): "
            "pip install 'aiosync[metrics]'"
        ) from exc


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

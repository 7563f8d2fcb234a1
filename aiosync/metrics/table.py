"""The metrics, as a table: Prometheus' and OpenTelemetry's are both made from it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add
from types import ModuleType
from typing import Final, Literal

from aiosync.errors import ConfigError
from aiosync.events import SyncStats

__all__ = ["METRICS", "Metric", "optional"]

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

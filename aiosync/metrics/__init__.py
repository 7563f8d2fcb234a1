"""Metrics of weight sync, its cost and its lag, for Prometheus, OpenTelemetry and trainers' logs.

::

    metrics = aiosync.metrics.Metrics(scheme)
    async with aiosync.metrics.serve(metrics, "127.0.0.1:9464"):   # /metrics /healthz /readyz
        ...

Names and labels are those of :data:`METRICS`; see ``docs/topics/metrics.md``. Needs
``aiosync[metrics]``, except for :meth:`Metrics.as_log`.
"""

from aiosync.metrics.collector import METRICS, Metric, Metrics, Source
from aiosync.metrics.http import serve
from aiosync.metrics.telemetry import Tracing, instrument

__all__ = ["METRICS", "Metric", "Metrics", "Source", "Tracing", "instrument", "serve"]

"""OpenTelemetry: instruments made from the table of metrics, and spans made from sync events."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from aiosync import SyncEvent
from aiosync._version import __version__
from aiosync.metrics.collector import METRICS, Metrics, optional

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["Tracing", "instrument"]

# Collectors add "_ratio" to the name of a gauge with the unit "1".
_UNITS = {"seconds": "s", "bytes": "By", "versions": "{version}", "": ""}
_PHASES = ("snapshot", "wire", "stage", "apply")  # in the order of time
_MOST_OPEN = 1024


def instrument(metrics: Metrics, meter_provider: MeterProvider | None = None) -> None:
    """Make an OpenTelemetry instrument of each metric, named :attr:`Metric.dotted`.

    Args:
        metrics: The values that the instruments show.
        meter_provider: Provider of the instruments; ``None`` for the program's own.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    api = optional("opentelemetry.metrics")
    meter = api.get_meter("aiosync", __version__, meter_provider)

    def attributes(name: str, labels: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(METRICS[name].labels, labels, strict=True))

    def observe(name: str, _options: object) -> list[Any]:
        values = metrics.values()[name].items()
        return [api.Observation(value, attributes(name, labels)) for labels, value in values]

    histograms: dict[str, Any] = {}
    for name, metric in METRICS.items():
        create = functools.partial(
            getattr(meter, f"create_{'' if metric.buckets else 'observable_'}{metric.kind}"),
            metric.dotted,
            unit=_UNITS[metric.unit],
            description=metric.help,
        )
        if metric.buckets:
            histograms[name] = create(explicit_bucket_boundaries_advisory=metric.buckets)
        else:
            create(callbacks=[functools.partial(observe, name)])
    metrics.on_observe(
        lambda name, labels, value: histograms[name].record(value, attributes(name, labels))
    )


class Tracing:
    """Observer that makes spans: give it to the ``add_observer()`` of schemes on both sides.

    A trainer's send is a span ``aiosync.send`` within the span that is current where ``send()`` is
    called, with the children ``aiosync.snapshot`` and ``aiosync.wire``. Its context travels with
    the update, so that it is the parent of each worker's span ``aiosync.receive``, whose children
    are ``aiosync.stage`` and ``aiosync.apply``. Spans have the attributes ``aiosync.model``,
    ``aiosync.transport``, ``aiosync.weight.version``, ``aiosync.weight.epoch`` and
    ``aiosync.outcome``, and ``aiosync.pause`` in seconds if it was measured.

    Args:
        tracer_provider: Provider of the spans; ``None`` for the program's own.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._api = optional("opentelemetry.trace")
        context = optional("opentelemetry.trace.propagation.tracecontext")
        self._propagator = context.TraceContextTextMapPropagator()
        self._tracer = self._api.get_tracer("aiosync", __version__, tracer_provider)
        self._open: dict[str, Span] = {}  # spans of sends that are under way, by traceparent

    def traceparent(self, started_at: float) -> str | None:
        """Begin the span of a send; return the traceparent that travels with the update."""
        span = self._tracer.start_span("aiosync.send", start_time=_nanoseconds(started_at))
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span))
        trace = carrier.get("traceparent")
        if trace is not None:
            self._open[trace] = span
            # Sends whose end no event reported would keep their spans for ever.
            if len(self._open) > _MOST_OPEN:
                self._open.pop(next(iter(self._open))).end()
        return trace

    def on_sync(self, event: SyncEvent) -> None:
        """End the span of a send, or make the span of an update that a worker received."""
        span = self._take_span(event)
        span.set_attributes(
            {
                "aiosync.model": event.model,
                "aiosync.transport": event.transport,
                "aiosync.weight.version": event.version,
                "aiosync.weight.epoch": f"{event.epoch:016x}",
                "aiosync.outcome": event.outcome,
            }
        )
        if "pause" in event.seconds:
            span.set_attribute("aiosync.pause", event.seconds["pause"])
        if event.outcome not in ("ok", "skipped"):
            span.set_status(self._api.StatusCode.ERROR, event.outcome)
        span.end(_nanoseconds(self._add_phases(span, event)))

    def _take_span(self, event: SyncEvent) -> Any:
        """Return the open span of a send, or start the span of an update."""
        sent = event.role == "sender"
        span = self._open.pop(event.trace or "", None) if sent else None
        if span is None:
            carrier = {} if event.trace is None else {"traceparent": event.trace}
            name = "aiosync.send" if sent else "aiosync.receive"
            parent = self._propagator.extract(carrier)
            span = self._tracer.start_span(name, parent, start_time=_nanoseconds(event.started_at))
        return span

    def _add_phases(self, span: Any, event: SyncEvent) -> float:
        """Add a span for each phase below the span of an update; return the time of their end."""
        at, context = event.started_at, self._api.set_span_in_context(span)
        for phase in _PHASES:
            if phase in event.seconds:
                child = self._tracer.start_span(
                    f"aiosync.{phase}", context, start_time=_nanoseconds(at)
                )
                at += event.seconds[phase]
                child.end(_nanoseconds(at))
        return at


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

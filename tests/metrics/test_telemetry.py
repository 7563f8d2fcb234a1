"""OpenTelemetry: the same metrics, and one trace across a trainer and its workers."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("prometheus_client")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aiosync
import aiosync.sync
from aiosync import SyncEvent
from aiosync.metrics import METRICS, Metrics, Tracing, instrument
from tests.metrics._tools import SENDS, everything, samples
from tests.schemes._harness import (
    PATIENCE,
    State,
    here,
    twin,
    until,
    wait_for_version,
    workers,
)
from tests.schemes._models import linear, wide

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


def described(span: ReadableSpan) -> dict[str, Any]:
    assert span.start_time is not None and span.end_time is not None
    return {
        "name": span.name,
        "trace": f"{span.context.trace_id:032x}",
        "id": span.context.span_id,
        "parent": None if span.parent is None else span.parent.span_id,
        "attributes": dict(span.attributes or {}),
        "error": not span.status.is_ok and not span.status.is_unset,
        "times": (span.start_time, span.end_time),
    }


def exported(exporter: InMemorySpanExporter) -> list[dict[str, Any]]:
    return [described(each) for each in exporter.get_finished_spans()]


# -- in a worker -------------------------------------------------------------------------------


def trace(state: State) -> None:
    state.kept["exporter"] = InMemorySpanExporter()
    state.scheme.add_observer(Tracing(provider(state.kept["exporter"])))


async def traced(state: State, version: int) -> list[dict[str, Any]]:
    """Return the spans of this worker process once one of them has the version."""
    await wait_for_version(state, version)

    def found() -> list[dict[str, Any]]:
        return exported(state.kept["exporter"])

    wanted = "aiosync.weight.version"
    await until(lambda: any(each["attributes"].get(wanted) == version for each in found()))
    return found()


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [aiosync.SharedMemWeightSyncScheme, aiosync.MultiProcessWeightSyncScheme]
)
async def test_one_trace_goes_through_the_trainer_and_its_workers(scheme, exporter) -> None:
    sender, traces = scheme(), provider(exporter)
    sender.init_on_sender(model=linear(), num_workers=2)
    async with workers(sender, linear, 2) as crew:
        for worker in crew:
            await worker.call(trace)
        sender.add_observer(Tracing(traces))
        with traces.get_tracer("trainer").start_as_current_span("a training step"):
            report = await sender.send()
        theirs = [await worker.call(traced, report.version) for worker in crew]
        await until(lambda: len(exporter.get_finished_spans()) == 4)
    ours = {each["name"]: each for each in exported(exporter)}
    step, send = ours["a training step"], ours["aiosync.send"]
    assert send["parent"] == step["id"]
    assert ours["aiosync.snapshot"]["parent"] == ours["aiosync.wire"]["parent"] == send["id"]
    for spans in theirs:
        named = {each["name"]: each for each in spans}
        receive = named.pop("aiosync.receive")
        assert receive["parent"] == send["id"]
        assert receive["attributes"]["aiosync.weight.version"] == report.version
        assert receive["attributes"]["aiosync.outcome"] == "ok"
        assert receive["attributes"]["aiosync.pause"] >= 0
        assert "aiosync.apply" in named
        assert {each["parent"] for each in named.values()} == {receive["id"]}
    everyone = [*ours.values(), *(each for spans in theirs for each in spans)]
    assert {each["trace"] for each in everyone} == {step["trace"]}
    for each in everyone:
        started, ended = each["times"]
        assert started <= ended
    assert send["attributes"] == {
        "aiosync.model": "policy",
        "aiosync.transport": send["attributes"]["aiosync.transport"],
        "aiosync.weight.version": report.version,
        "aiosync.weight.epoch": f"{report.epoch:016x}",
        "aiosync.outcome": "ok",
    }


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", None])
def test_a_send_of_the_blocking_api_is_within_the_callers_span(address, exporter) -> None:
    """The parent is right even if another thread than the caller's sends."""
    made, sync = provider(exporter), aiosync.sync
    scheme = sync.TCPWeightSyncScheme(address) if address else sync.SharedMemWeightSyncScheme()
    with scheme:
        scheme.init_on_sender(model=linear())
        with twin(scheme) as other, ThreadPoolExecutor(1) as pool:
            other.init_on_receiver(model=linear())
            connecting = pool.submit(other.connect)
            scheme.connect()
            connecting.result()
            scheme.wait_for_version(1)
            scheme.add_observer(Tracing(made))
            with made.get_tracer("trainer").start_as_current_span("a training step") as step:
                scheme.send()
                scheme.send()
            give_up = time.monotonic() + PATIENCE
            # Observers are called on the event loop, so the spans may end later than the sends.
            while len(exporter.get_finished_spans()) < 7:
                assert time.monotonic() < give_up
                time.sleep(0.001)
    sends = [each for each in exported(exporter) if each["name"] == "aiosync.send"]
    assert [each["parent"] for each in sends] == [step.get_span_context().span_id] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_send_that_fails_before_its_copy_is_within_the_callers_span(
    at_once, exporter
) -> None:
    source, made = linear(), provider(exporter)
    optimizer, began, go = torch.optim.SGD(source.parameters()), Event(), Event()

    def closure() -> float:
        began.set()
        go.wait(PATIENCE)
        return 0.0

    scheme = aiosync.MultiProcessWeightSyncScheme()
    async with here(scheme, linear(), sender={"model": source}) as (sender, _):
        sender.add_observer(Tracing(made))
        stepping = asyncio.create_task(asyncio.to_thread(optimizer.step, closure))
        try:
            await asyncio.to_thread(began.wait, PATIENCE)
            with (
                made.get_tracer("trainer").start_as_current_span("a training step") as step,
                pytest.raises(aiosync.SyncTimeout),
            ):
                if at_once:
                    sender.send_nowait(timeout=0.1)
                await sender.send(timeout=0.1)
        finally:
            go.set()
            await stepping
        await until(lambda: len(exporter.get_finished_spans()) == 2)
    [send] = [each for each in exported(exporter) if each["name"] == "aiosync.send"]
    assert send["parent"] == step.get_span_context().span_id
    assert (send["error"], send["attributes"]["aiosync.outcome"]) == (True, "timeout")


@pytest.mark.asyncio
async def test_the_span_of_a_send_that_was_refused_is_an_error(exporter) -> None:
    async with here(
        aiosync.MultiProcessWeightSyncScheme(), linear(), sender={"model": linear()}
    ) as (sender, receiver):
        # One observer may serve both sides.
        tracing = Tracing(provider(exporter))
        for each in (sender, receiver):
            each.add_observer(tracing)
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send(wide())
        await until(
            lambda: (
                {each["name"] for each in exported(exporter)} >= {"aiosync.send", "aiosync.receive"}
            )
        )
    for name in ("aiosync.send", "aiosync.receive"):
        [span] = [each for each in exported(exporter) if each["name"] == name]
        assert span["error"]
        assert span["attributes"]["aiosync.outcome"] == "refused"


def test_spans_of_sends_without_an_end_are_bounded(exporter) -> None:
    tracing = Tracing(provider(exporter))
    trace = ""
    for _ in range(3000):
        trace = tracing.traceparent(1.0) or ""
    assert 1000 < len(exporter.get_finished_spans()) < 3000
    tracing.on_sync(SyncEvent("sender", "policy", "tcp", 1, 7, "ok", started_at=2.0, trace=trace))
    last = exported(exporter)[-1]
    assert (last["trace"], last["attributes"]["aiosync.weight.version"]) == (trace[3:35], 7)


def test_without_a_provider_nothing_travels() -> None:
    assert Tracing().traceparent(1.0) is None


@pytest.mark.asyncio
async def test_instruments_say_what_prometheus_is_told() -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    async with everything() as it:
        instrument(it.metrics, meters)
        await it.sender.send()
        it.metrics.sampled(it.sender, aiosync.VersionSpan(1, 1))
        async with it.gate.request():
            pass
        await until(lambda: it.receiver.stats().finished["ok"] >= SENDS + 1)
        told = samples(it.metrics)
        data = reader.get_metrics_data()
    meters.shutdown()
    [scope] = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    assert set(found) == {metric.dotted for metric in METRICS.values()}
    # A gauge of this unit would get another name in Prometheus.
    assert "1" not in {metric.unit for metric in found.values()}
    for name, metric in METRICS.items():
        for point in found[metric.dotted].data.data_points:
            labels = frozenset(point.attributes.items())
            assert set(point.attributes) == set(metric.labels)
            if metric.buckets:
                assert tuple(point.explicit_bounds) == metric.buckets
                assert point.count <= told[f"{name}_count", labels]
            elif "age" not in name:
                assert point.value == told[name, labels]


def test_exporters_make_the_names_of_prometheus_again() -> None:
    exporters = pytest.importorskip("opentelemetry.exporter.prometheus")
    client = pytest.importorskip("prometheus_client")
    metrics, meters = Metrics(), MeterProvider([exporters.PrometheusMetricReader()])
    try:
        instrument(metrics, meters)
        metrics.on_sync(SyncEvent("sender", "policy", "tcp", 1, 1, "ok", {"wire": 1.0}))
        names = {each.name for each in client.REGISTRY.collect()}
    finally:
        meters.shutdown()
    assert names >= {"aiosync_build_info", "aiosync_sync_seconds"}

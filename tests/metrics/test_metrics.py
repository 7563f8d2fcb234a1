"""Values of the metrics, read by Prometheus' own parsers, and entries for trainers' logs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import aiosync
from aiosync import SyncEvent, VersionSpan
from aiosync.metrics import METRICS, Metrics, serve
from aiosync.serving import AdmissionGate
from tests.metrics._tools import SENDS, everything, get, samples, total
from tests.schemes._harness import PATIENCE, crowd, here, until
from tests.schemes._models import linear

DOCS = Path(__file__).parents[2] / "docs" / "topics"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("accept", "parse"),
    [
        ("", text_string_to_metric_families),
        ("text/plain;version=0.0.4", text_string_to_metric_families),
        (
            "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5",
            openmetrics.text_string_to_metric_families,
        ),
    ],
)
async def test_prometheus_reads_what_is_served(accept, parse) -> None:
    async with everything() as it, serve(it.metrics, "127.0.0.1:0") as url:
        answer = await get(url, "/metrics", accept)
    assert answer.status == 200
    wanted = "application/openmetrics-text" if "open" in accept else "text/plain"
    assert answer.headers["content-type"].startswith(wanted)
    families = {family.name: family for family in parse(answer.body)}
    for name, metric in METRICS.items():
        family = families.pop(name if name in families else name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    assert families == {}


@pytest.mark.asyncio
async def test_values_are_those_of_the_sources() -> None:
    async with everything() as it:
        found, version = it.metrics, it.sender.version
        for role in ("sender", "receiver"):
            by = {"model": "policy", "role": role, "transport": "tcp"}
            assert total(found, "aiosync_version", model="policy", role=role) == version
            finished = total(found, "aiosync_syncs_finished_total", outcome="ok", **by)
            assert finished == total(found, "aiosync_syncs_started_total", **by)
            assert finished >= SENDS
        assert total(found, "aiosync_syncs_finished_total", outcome="error") == 0
        assert total(found, "aiosync_newest_version", model="policy") == version
        assert total(found, "aiosync_publish_lag_versions", model="policy") == 0
        assert 0 < total(found, "aiosync_weights_age_seconds", model="policy") < PATIENCE
        assert total(found, "aiosync_receivers", state="ready") == 1
        assert total(found, "aiosync_receivers") == 1
        for direction in ("sent", "received"):
            logical = total(found, "aiosync_bytes_total", direction=direction, kind="logical")
            assert logical >= SENDS * 40
            assert total(found, "aiosync_bytes_total", direction=direction, kind="wire") > 0
        for phase in ("snapshot", "wire", "stage", "apply", "pause"):
            assert total(found, "aiosync_sync_seconds_count", phase=phase) == SENDS
            assert total(found, "aiosync_sync_seconds_sum", phase=phase) >= 0
        assert total(found, "aiosync_gate_wait_seconds_count") == 1
        assert total(found, "aiosync_sample_staleness_versions_count", weight="sample") == 1
        assert total(found, "aiosync_sample_staleness_versions_sum") == version - 1
        assert total(found, "aiosync_samples_unversioned_total", model="policy") == 1
        assert total(found, "aiosync_build_info", version=aiosync.__version__) == 1


@pytest.mark.asyncio
async def test_sources_with_the_same_labels_are_one_series() -> None:
    """Counters of sources with the same labels add up, and gauges show the worst value."""
    scheme = aiosync.MultiProcessWeightSyncScheme()
    async with crowd(scheme, [linear(), linear()], sender={"model": linear()}) as (sender, two):
        metrics = Metrics(*two)
        report = await sender.send(worker_ids=[0])
        await until(lambda: two[0].version == report.version)
        assert two[1].version < report.version
        assert total(metrics, "aiosync_version", role="receiver") == two[1].version
        assert total(metrics, "aiosync_newest_version") == report.version
        each = sum(source.stats().started for source in two)
        assert total(metrics, "aiosync_syncs_started_total") == each > 2
        assert "aiosync_receivers" not in {name for name, _ in samples(metrics)}
        registry = CollectorRegistry()
        registry.register(metrics)
        assert len(samples(metrics)) == sum(len(each.samples) for each in registry.collect())


@pytest.mark.asyncio
async def test_a_gate_says_how_long_requests_waited() -> None:
    gate = AdmissionGate()
    metrics = Metrics()
    metrics.add(gate, "critic")
    with pytest.raises(aiosync.ConfigError, match="on_admission"):
        Metrics(gate)
    assert metrics.unready() == [gate]
    with pytest.raises(aiosync.AdmissionTimeout):
        async with gate.request(timeout=0.03):  # a loop's timer may fire early
            pass
    assert total(metrics, "aiosync_gate_wait_seconds_count", model="critic") == 1
    assert total(metrics, "aiosync_gate_wait_seconds_sum", model="critic") >= 0.02
    async with gate.swap():
        pass
    async with gate.request():
        pass
    assert metrics.unready() == []
    assert total(metrics, "aiosync_gate_wait_seconds_count", model="critic") == 2
    assert total(metrics, "aiosync_gate_wait_seconds_bucket", model="critic", le="0.001") == 1


# -- trainers' logs ----------------------------------------------------------------------------


def _event(role: str = "sender", **seconds: float) -> SyncEvent:
    return SyncEvent(role, "policy", "shared", 1, 1, "ok", seconds)


def test_the_log_has_what_happened_since_it_was_asked() -> None:
    metrics = Metrics()
    assert metrics.as_log() == {}
    metrics.on_sync(_event(snapshot=1.0, wire=2.0))
    metrics.on_sync(_event(snapshot=2.0, wire=3.0))
    assert metrics.as_log() == {"perf/weight_sync_s": 4.0, "perf/weight_sync_transfer_s": 2.5}
    assert metrics.as_log() == {}
    # A skipped update does not count as a sync, so its time is not in the log.
    metrics.on_sync(dataclasses.replace(_event(wire=9.0), outcome="skipped"))
    assert metrics.as_log() == {}
    metrics.on_sync(_event("receiver", stage=1.0, apply=0.5, pause=0.25))
    assert metrics.as_log() == {"perf/weight_sync_s": 1.5, "perf/weight_sync_pause_s": 0.25}


@pytest.mark.asyncio
async def test_the_log_has_the_staleness_of_samples() -> None:
    async with here(aiosync.SharedMemWeightSyncScheme(), linear(), sender={"model": linear()}) as (
        sender,
        _,
    ):
        for _ in range(5):
            await sender.send()
        metrics, now = Metrics(sender), sender.version
        assert metrics.sampled(sender, VersionSpan(now - 3, now)) == 3
        assert metrics.sampled(sender, VersionSpan(now, now)) == 0
        assert metrics.sampled(sender, None) is None
        assert metrics.as_log() == {"sample/staleness_mean": 1.5, "sample/staleness_max": 3.0}
        runs = VersionSpan.from_runs([(now - 2, 1), (now, 1)])
        assert metrics.sampled(sender, runs, "token") == 1
        stale = "aiosync_sample_staleness_versions_sum"
        assert (total(metrics, stale, weight="sample"), total(metrics, stale, weight="token")) == (
            3,
            1,
        )
        with pytest.raises(aiosync.ConfigError, match="weight must be"):
            metrics.sampled(sender, runs, "tokens")


# -- bounds ------------------------------------------------------------------------------------


def test_events_from_several_threads_are_all_counted() -> None:
    metrics, threads, each = Metrics(), 4, 3000

    def work(_: int) -> None:
        for _ in range(each):
            metrics.on_sync(_event(snapshot=0.001, wire=0.002, pause=400.0))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    wanted = threads * each
    assert total(metrics, "aiosync_sync_seconds_count") == 3 * wanted
    assert total(metrics, "aiosync_sync_seconds_bucket", phase="pause", le="300.0") == 0
    assert total(metrics, "aiosync_sync_seconds_bucket", phase="pause", le="+Inf") == wanted
    assert metrics.as_log()["perf/weight_sync_pause_s"] == 400.0


def test_without_the_extra_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(aiosync.ConfigError, match=r"pip install 'aiosync\[metrics\]'"):
        list(Metrics().collect())
    assert Metrics().as_log() == {}


# -- pages -------------------------------------------------------------------------------------


def test_the_page_has_the_table() -> None:
    rows = re.findall(
        r"^\| `(aiosync_\w+)` \| (\w+).* \| ([\w, ]+) \|$", (DOCS / "metrics.md").read_text(), re.M
    )
    assert rows == [(name, each.kind, ", ".join(each.labels)) for name, each in METRICS.items()]


SELECTOR = re.compile(r"(aiosync_\w+)(?:\{([^}]*)\})?")
# A histogram has samples with these endings.
PARTS = r"_(?:bucket|count|sum)$"


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    asked = set()
    for target in targets:
        query = target["expr"]
        labels = set()
        for found, matchers in SELECTOR.findall(query):
            metric = METRICS.get(found) or METRICS[re.sub(PARTS, "", found)]
            asked.add(metric.name)
            labels |= set(metric.labels)
            assert set(re.findall(r"(\w+)=", matchers)) <= set(metric.labels), query
        grouped = ", ".join(re.findall(r"(?:by|without) \(([^)]*)\)", query))
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {*re.findall(r"\w+", grouped), *shown} <= labels | {"le"}, query
    assert asked == set(METRICS)
    assert "Pause" in board["panels"][0]["title"]
    [query] = [each["query"] for each in board["templating"]["list"] if each["name"] == "model"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
    assert label in METRICS[name].labels

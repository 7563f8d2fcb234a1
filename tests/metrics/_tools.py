"""Sources of metrics with some activity, and a client that reads the served metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiosync
from aiosync.metrics import Metrics
from aiosync.serving import AdmissionGate
from tests.schemes._harness import PATIENCE, here, until
from tests.schemes._models import fill, linear

SENDS = 3


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


async def ask(url: str, request: str) -> Answer:
    """Send text to a server, and return its answer, read until it ends the link."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            writer.write(request.encode())
            data = await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()
    head, _, body = data.decode().partition("\r\n\r\n")
    line, *fields = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in fields)}
    assert int(headers["content-length"]) == len(body.encode())
    return Answer(int(line.split()[1]), headers, body)


async def get(url: str, path: str, accept: str = "") -> Answer:
    fields = f"Accept: {accept}\r\n" if accept else ""
    return await ask(url, f"GET {path} HTTP/1.1\r\nHost: it\r\n{fields}\r\n")


class Everything(NamedTuple):
    metrics: Metrics
    sender: aiosync.WeightSyncScheme
    receiver: aiosync.WeightSyncScheme
    gate: AdmissionGate


@contextlib.asynccontextmanager
async def everything() -> AsyncIterator[Everything]:
    """A trainer and a worker with some sends, a gate that admitted a request, and two samples."""
    model, gate = linear(), AdmissionGate(initial_version=1)
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    async with here(scheme, linear(), sender={"model": model}) as (sender, receiver):
        metrics = Metrics(sender, receiver, gate)
        for number in range(SENDS):
            fill(model, float(number))
            await sender.send()
        async with gate.request():
            pass
        metrics.sampled(sender, aiosync.VersionSpan(1, 1))
        metrics.sampled(sender, None)
        await until(lambda: counted(metrics, "sender") == counted(metrics, "receiver") == SENDS)
        yield Everything(metrics, sender, receiver, gate)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the value of each time series by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of a sample over all series that have these labels."""
    return sum(
        value
        for (found, has), value in samples(metrics).items()
        if found == name and labels.items() <= dict(has).items()
    )


def counted(metrics: Metrics, role: str) -> float:
    phase = "wire" if role == "sender" else "apply"
    return total(metrics, "aiosync_sync_seconds_count", role=role, phase=phase)

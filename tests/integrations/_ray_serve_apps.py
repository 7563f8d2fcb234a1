"""Deployments of the Ray Serve tests, which replicas import, too; and trainers for them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
from fastapi import FastAPI
from ray import serve
from torch import nn

import aiosync
from aiosync.integrations.ray_serve import ReplicaWeightsMiddleware, WeightsMixin, admitted

TOKEN = "a token of these tests"
QUICK = {
    "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": {"AIOSYNC_TOKEN": TOKEN}}},
    "health_check_period_s": 0.25,
    "graceful_shutdown_wait_loop_s": 0.05,
    "graceful_shutdown_timeout_s": 10,
    "max_constructor_retry_count": 1,
}


class Constant(nn.Module):
    """Model whose every element is its version, if the trainer fills it so."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((257,), value) for _ in range(8))

    def forward(self, pause: float = 0.0) -> tuple[float, float]:
        """Return the least and the greatest element, read with pauses."""
        ends = []
        for weight in self.weights:
            ends += [weight.min().item(), weight.max().item()]
            time.sleep(pause / len(self.weights))
        return min(ends), max(ends)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(value)


class Trainer:
    """Trainer that sends versions whose every element is the version."""

    def __init__(self, address: str, token: str | None) -> None:
        self.model = Constant(1.0)
        # The epoch is known after the first push.
        self.epoch = 0
        self.scheme = aiosync.TCPWeightSyncScheme(address, token=token)
        self.scheme.init_on_sender(model_id="policy", model=self.model)

    async def push(self) -> int:
        self.model.fill(self.scheme.version + 1)
        # A replica that dies fails the send, but the others have the version.
        with suppress(aiosync.PartialSyncError):
            self.epoch = (await self.scheme.send(timeout=10)).epoch
        return self.scheme.version


@asynccontextmanager
async def trainer(
    address: str = "tcp://127.0.0.1:0", token: str | None = None
) -> AsyncIterator[Trainer]:
    it = Trainer(address, token)
    async with it.scheme:
        await it.scheme.connect()
        yield it


http = FastAPI()
http.add_middleware(ReplicaWeightsMiddleware, exempt=("/pid",), timeout=0.5)


@serve.deployment(num_replicas=2, max_ongoing_requests=20, **QUICK)
@serve.ingress(http)
class Policy(WeightsMixin):
    """Deployment that computes in all the ways that there are."""

    async def __init__(self, source: Any, **options: Any) -> None:
        torch.set_num_threads(1)
        self.model = Constant()
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        await self.follow_weights(source, model=self.model, model_id="policy", **options)

    def outcome(self, *passes: tuple[float, float]) -> tuple[int, float, float]:
        return os.getpid(), min(least for least, _ in passes), max(most for _, most in passes)

    @admitted
    async def on_loop(self, pause: float = 0.0) -> tuple[int, float, float]:
        """Run two forwards, between which the loop is free."""
        first = self.model()
        await asyncio.sleep(pause)
        assert asyncio.get_running_loop() is self.loop
        return self.outcome(first, self.model())

    @admitted
    def in_thread(self, pause: float = 0.0) -> tuple[int, float, float]:
        first = self.model()
        time.sleep(pause)
        assert threading.get_ident() != self.thread
        return self.outcome(first, self.model())

    @admitted(timeout=0.5)
    async def impatient(self) -> int:
        return os.getpid()

    @admitted
    async def items(self, count: int) -> AsyncIterator[float]:
        for _ in range(count):
            await asyncio.sleep(0.001)
            yield self.model()[1]

    @admitted
    async def together(self) -> tuple[int, float, float]:
        return await self.batch(None)

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.005)
    async def batch(self, inputs: list[None]) -> list[tuple[int, float, float]]:
        first = self.model()
        await asyncio.sleep(0.002)
        return [self.outcome(first, self.model())] * len(inputs)

    def plain(self, pause: float) -> tuple[float, float]:
        """Compute without admission, in a thread of Serve; only the guard protects the model."""
        return self.model(pause)

    async def die(self) -> None:
        os._exit(1)

    @http.get("/on_loop")
    async def http_on_loop(self) -> tuple[int, float, float]:
        return (await self.on_loop()).value

    @http.get("/in_thread")
    def http_in_thread(self) -> tuple[int, float, float]:
        return self.outcome(self.model())

    @http.get("/pid")
    async def http_pid(self) -> int:
        return os.getpid()

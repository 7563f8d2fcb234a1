"""Deployments of the Ray Serve tests; imported by replicas, too."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI
from ray import serve
from torch import nn

from aiosync.integrations.ray_serve import ReplicaWeightsMiddleware, WeightsMixin, admitted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = "a token of these tests"
QUICK = {
    "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": {"AIOSYNC_TOKEN": TOKEN}}},
    "health_check_period_s": 0.25,
    "graceful_shutdown_wait_loop_s": 0.05,
    "graceful_shutdown_timeout_s": 10,
    "max_constructor_retry_count": 1,
}


class Constant(nn.Module):
    """Every element of its weights is the version that it has, if the trainer makes it so."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((257,), value) for _ in range(8))

    def forward(self, pause: float = 0.0) -> tuple[float, float]:
        """The least and the greatest element, looked at with pauses."""
        ends = []
        for weight in self.weights:
            ends += [weight.min().item(), weight.max().item()]
            time.sleep(pause / len(self.weights))
        return min(ends), max(ends)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(value)


http = FastAPI()
http.add_middleware(ReplicaWeightsMiddleware, exempt=("/pid",), timeout=0.5)


@serve.deployment(num_replicas=2, max_ongoing_requests=20, **QUICK)
@serve.ingress(http)
class Policy(WeightsMixin):
    """Computes in all the ways that there are."""

    async def __init__(self, source: Any, births: str, **options: Any) -> None:
        torch.set_num_threads(1)
        (Path(births) / str(os.getpid())).touch()
        self.births = births
        self.model = Constant()
        self.loop = asyncio.get_running_loop()
        await self.follow_weights(source, model=self.model, model_id="policy", **options)
        self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        feed = self.weight_feed
        aclose = feed.aclose

        async def tell() -> None:
            await aclose()
            (Path(self.births) / f"{os.getpid()}.{feed.status.state}").touch()

        feed.aclose = tell  # type: ignore[method-assign]  # still the same, and a file

    def _outcome(self, ends: tuple[float, float]) -> tuple[int, float, float]:
        return (os.getpid(), *ends)

    @admitted
    async def on_loop(self, pause: float = 0.0) -> tuple[int, float, float]:
        """Two forwards with the loop free between them."""
        first = self.model()
        await asyncio.sleep(pause)
        second = self.model()
        assert asyncio.get_running_loop() is self.loop
        return self._outcome((min(first[0], second[0]), max(first[1], second[1])))

    @admitted
    def in_thread(self, pause: float = 0.0) -> tuple[int, float, float]:
        first = self.model()
        time.sleep(pause)
        second = self.model()
        assert threading.get_ident() != getattr(self.loop, "_thread_id", None)
        return self._outcome((min(first[0], second[0]), max(first[1], second[1])))

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
        return await self._batch(None)

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.005)
    async def _batch(self, inputs: list[None]) -> list[tuple[int, float, float]]:
        first = self.model()
        await asyncio.sleep(0.002)
        second = self.model()
        outcome = self._outcome((min(first[0], second[0]), max(first[1], second[1])))
        return [outcome for _ in inputs]

    def plain(self, pause: float) -> tuple[float, float]:
        """Not admitted, in a thread of Serve's: only the guard of the model is there."""
        return self.model(pause)

    async def die(self) -> None:
        os._exit(1)

    async def __del__(self) -> None:
        # The feed is closed after this.
        (Path(self.births) / f"{os.getpid()}.{self.weight_feed.status.state}").touch()

    @http.get("/on_loop")
    async def http_on_loop(self, pause: float = 0.0) -> tuple[int, float, float]:
        return (await self.on_loop(pause)).value

    @http.get("/in_thread")
    def http_in_thread(self, pause: float = 0.0) -> tuple[int, float, float]:
        return self._outcome(self.model(pause))

    @http.get("/pid")
    async def http_pid(self) -> int:
        return os.getpid()

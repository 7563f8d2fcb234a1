"""Servers behind the middleware of vLLM's four phases, and what their callers ask."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiosync.integrations.four_phase import FourPhaseMiddleware
from aiosync.integrations.vllm import AiosyncTrainerInitInfo
from tests.integrations._asgi_calls import uvicorn_of
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def answering(model: torch.nn.Module) -> Any:
    """Return an application that answers with the model, in two steps."""

    @torch.no_grad()
    def act() -> float:
        # The mode is the thread's: another request must not begin before it is restored.
        return float(model(torch.ones(1, 4))[0, 0])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise RuntimeError("this application has no lifespan")
        first = act()
        await asyncio.sleep(0.002)
        second = act()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps([first, second]).encode()})

    return app


@contextlib.asynccontextmanager
async def serving(
    *, loading: Callable[[torch.nn.Module, Any], None] | None = None, **options: Any
) -> AsyncIterator[tuple[str, FourPhaseMiddleware]]:
    """Serve a model; ``loading`` gets it with the names and tensors of each version."""
    pytest.importorskip("uvicorn")
    model = models.linear()
    target = {"model": model} if loading is None else {"load": functools.partial(loading, model)}
    app = FourPhaseMiddleware(answering(model), **target, **options)
    async with uvicorn_of(app) as url:
        yield url, app


def ask(url: str, path: str = "act") -> tuple[Any, str | None]:
    """Return the answer of a server, and the version in its headers. In a thread."""
    with urllib.request.urlopen(f"{url}/{path}", timeout=PATIENCE) as reply:
        return json.loads(reply.read()), reply.headers["x-weight-version"]


async def get(url: str, path: str = "act") -> tuple[Any, str | None]:
    """Return the answer of a server, and the version in its headers."""
    return await asyncio.to_thread(ask, url, path)


def init_of(**options: Any) -> AiosyncTrainerInitInfo:
    return AiosyncTrainerInitInfo(rank=0, timeout=PATIENCE, **options)

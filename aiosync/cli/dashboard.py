"""The page that shows what ``aiosync top`` shows, and the events that keep it up to date.

Must not import torch, but where a page is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from aiosync.cli._common import plain
from aiosync.cli.figures import Look, counts, facts, look_again, worker_facts, workers
from aiosync.events import SyncStats

__all__ = ["serve_page"]


@contextlib.asynccontextmanager
async def serve_page(
    listen: str, name: str, ask: Callable[[], Awaitable[Sequence[SyncStats]]], interval: float
) -> AsyncIterator[str]:
    """Serve the page, and its events to whoever looks at it.

    Args:
        listen: ``HOST:PORT``; port 0 for any free one.
        name: What it shows.
        ask: Returns the newest statistics; asked for all who look together, while anybody does.
        interval: Seconds between two events.

    Yields:
        The address of the page.

    Raises:
        ConfigError: The address cannot be bound.
    """
    from aiosync.metrics.http import HttpServer, Page

    page = (importlib.resources.files(__package__) / "dashboard.html").read_bytes()

    look, event, due, looking = Look(time.monotonic()), b"", 0.0, asyncio.Lock()

    async def events() -> AsyncGenerator[bytes]:
        nonlocal look, event, due
        while True:
            async with looking:
                if time.monotonic() >= due:  # otherwise another reader has just looked
                    look = await look_again(ask, look)
                    event = f"data: {json.dumps(_said(name, look))}\n\n".encode()
                    due = time.monotonic() + interval
            yield event
            await asyncio.sleep(interval)

    pages: dict[str, Page] = {
        "/": lambda _: (HTTPStatus.OK, "text/html; charset=utf-8", page),
        "/events": lambda _: events(),
    }
    async with HttpServer(listen, pages) as url:
        yield f"{url}/"


def _said(name: str, look: Look) -> dict[str, Any]:
    """A look as the page takes it: texts only, which it never takes for markup."""
    return {
        "about": plain(name),
        "trouble": look.trouble,
        "models": [
            {
                "name": plain(model.model),
                "about": f"{model.role} over {plain(model.transport)}, epoch {model.epoch}",
                "facts": list(facts(look, model).items()),
                "counts": list(counts(workers([model])).items()),
                "workers": [
                    {
                        "name": f"worker {worker.index}",
                        "state": worker.state,
                        "facts": list(worker_facts(worker).items()),
                    }
                    for _, worker in workers([model])
                ],
            }
            for model in look.models
        ],
    }

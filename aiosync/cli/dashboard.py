"""The page that shows what ``aiosync top`` shows, and the events that keep it up to date.

Must not import torch, but where a page is served.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from aiosync.cli._common import plain
from aiosync.cli.figures import Look, counts, facts, looks, worker_facts, workers
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
        ask: Returns the newest statistics.
        interval: Seconds between two events.

    Yields:
        The address of the page.

    Raises:
        ConfigError: The address cannot be bound.
    """
    from aiosync.metrics.http import HttpServer, Page

    page = (importlib.resources.files(__package__) / "dashboard.html").read_bytes()

    last: Look | None = None  # of all readers: the next one begins with rates

    async def events() -> AsyncGenerator[bytes]:
        nonlocal last
        async with contextlib.aclosing(looks(ask, interval, last)) as seen:
            async for look in seen:
                last = look
                yield f"data: {json.dumps(_said(name, look))}\n\n".encode()

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

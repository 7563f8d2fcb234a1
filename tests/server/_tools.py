"""Trainers and workers for the tests of the weight server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from aiosync.server import WeightServer
from tests.schemes._harness import PATIENCE
from tests.schemes._models import fill, linear

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

URL = "tcp://127.0.0.1:0"


@contextlib.asynccontextmanager
async def trainer(
    server: WeightServer | str | list[str],
    model_id: str = "policy",
    strategy: Any = "tensordict",
    **options: Any,
) -> AsyncIterator[Any]:
    """A connected trainer that sends ``scheme.it``, all of whose elements are 0 at first."""
    url = server.url if isinstance(server, WeightServer) else server
    options = {"timeout": PATIENCE, "dial": "both", **options}
    scheme = aiosync.TCPWeightSyncScheme(url, strategy, **options)
    model = linear()
    fill(model, 0.0)
    scheme.it = model
    scheme.init_on_sender(model_id)
    async with scheme:
        await scheme.connect()
        yield scheme


async def send(scheme: Any, value: float) -> Any:
    """Send a version whose elements are all ``value``; return its report."""
    fill(scheme.it, value)
    return await scheme.send(scheme.it)


@contextlib.asynccontextmanager
async def worker(
    server: WeightServer | str | list[str],
    model_id: str = "policy",
    strategy: Any = "tensordict",
    model: nn.Module | None = None,
    initial: bool = True,
    **options: Any,
) -> AsyncIterator[Any]:
    """A connected worker; its model is ``scheme.it``."""
    url = server.url if isinstance(server, WeightServer) else server
    options = {"timeout": PATIENCE, "dial": "both", **options}
    scheme = aiosync.TCPWeightSyncScheme(url, strategy, **options)
    scheme.it = linear() if model is None else model
    scheme.init_on_receiver(model_id, model=scheme.it)
    async with scheme:
        await scheme.connect(initial=initial)
        yield scheme


async def refused(joining: Any, error: type[Exception], text: str) -> None:
    """Check that a trainer or a worker cannot connect, because of this error."""
    with pytest.raises(error, match=text):
        async with joining:
            pytest.fail("was let in")


def described(server: WeightServer, model_id: str = "policy") -> dict[str, Any]:
    """Return the status of one model, as the server tells it."""
    found = [each for each in server.status()["models"] if each["model_id"] == model_id]
    assert len(found) == 1
    return found[0]


@contextlib.contextmanager
def without(store: Path) -> Iterator[None]:
    """Move the directory of a store away during a block, so that writing to it fails."""
    away = store.with_name("away")
    store.rename(away)
    try:
        yield
    finally:
        away.rename(store)

"""A trainer that wants the place of one that does not answer, or a server that does not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import aiosync
from aiosync.errors import ConnectTimeout
from aiosync.server import WeightServer, WeightStore
from tests.schemes._harness import PATIENCE, until
from tests.schemes._models import linear
from tests.server._tools import URL, described, trainer

pytestmark = pytest.mark.asyncio


def _new_trainer(server: WeightServer) -> Any:
    scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", timeout=PATIENCE)
    scheme.it = linear()
    scheme.init_on_sender("policy", model=scheme.it)
    return scheme


async def test_a_trainer_that_was_answered_too_late_says_that_the_server_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, save = threading.Event(), WeightStore.save

    def slow(*args: Any) -> Any:
        ready.wait(PATIENCE)
        return save(*args)

    monkeypatch.setattr(WeightStore, "save", slow)
    async with WeightServer(URL, store=tmp_path) as server:
        try:
            async with trainer(server) as first:
                first.it = linear()
                first.send_nowait(first.it)
                await until(lambda: described(server)["updates"] == 1)
            async with _new_trainer(server) as second:
                with pytest.raises(ConnectTimeout) as caught:
                    await second.connect(timeout=0.5)
        finally:
            ready.set()
        assert "was reached, but has not let this trainer in" in str(caught.value)
        assert "has to run there" not in str(caught.value)

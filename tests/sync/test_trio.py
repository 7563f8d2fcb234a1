"""Under trio: refused with words of aiosync's own, where nothing could work."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import aiosync
import aiosync.sync
from tests.schemes import _models as models


@pytest.mark.parametrize(
    "make", [aiosync.SharedMemWeightSyncScheme, aiosync.NoWeightSyncScheme], ids=["shm", "none"]
)
def test_connect_without_an_asyncio_loop_says_what_to_use(make) -> None:
    scheme = make()
    scheme.init_on_sender(model_id="policy", model=models.linear())
    connecting = scheme.connect()
    with pytest.raises(aiosync.LocalProtocolError, match="asyncio event loop"):
        connecting.send(None)  # as trio steps it: no asyncio loop runs
    scheme.abort()


class _NotFoundError(RuntimeError):
    pass


def _not_async() -> str:
    raise _NotFoundError


def test_a_blocking_call_inside_trio_is_refused(monkeypatch) -> None:
    sniffio = SimpleNamespace(
        current_async_library=lambda: "trio", AsyncLibraryNotFoundError=_NotFoundError
    )
    monkeypatch.setitem(sys.modules, "sniffio", sniffio)
    with aiosync.sync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", model=models.linear())
        with pytest.raises(aiosync.LocalProtocolError, match="trio"):
            scheme.connect()
        sniffio.current_async_library = _not_async  # in a thread of its own
        scheme.connect()

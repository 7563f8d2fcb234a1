"""``repr()`` of public objects in every state: debuggers, logs and tracebacks ask at any time."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

import aiosync
import aiosync.legacy
import aiosync.metrics
import aiosync.server
import aiosync.serving
import aiosync.sync
import aiosync.testing
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.framed_link import MPTransport
from aiosync.transports.tcp import TCPTransport
from tests.schemes._models import linear

MODULES = (aiosync, aiosync.sync, aiosync.server, aiosync.serving, aiosync.metrics, aiosync.legacy)
CLASSES = {
    each
    for module in MODULES
    for each in (getattr(module, name) for name in module.__all__)
    if inspect.isclass(each)
    and not inspect.isabstract(each)
    and "__dataclass_fields__" not in vars(each)
} | {MPTransport, TCPTransport, DistributedTransport}


@pytest.mark.parametrize("cls", sorted(CLASSES, key=str), ids=str)
def test_a_constructor_that_raised(cls: Any) -> None:
    """An object that only ``__new__()`` has made has a repr: a debugger finds it in a frame."""
    if issubclass(cls, BaseException | int | str | tuple):
        return
    unfinished = cls.__new__(cls)
    assert repr(unfinished)
    del unfinished
    gc.collect()


@pytest.mark.parametrize("package", [aiosync, aiosync.sync], ids=["async", "blocking"])
@pytest.mark.parametrize("name", ["MultiProcess", "SharedMem", "TCP", "Distributed", "RPC", "Ray"])
def test_a_scheme_with_a_wrong_option(package: Any, name: str) -> None:
    cls = getattr(package, f"{name}WeightSyncScheme")
    with pytest.raises(aiosync.ConfigError) as caught:
        cls(timeout="never")
    seen = [frame.frame.f_locals for frame in inspect.getinnerframes(caught.tb)]
    found = [each["self"] for each in seen if isinstance(each.get("self"), cls)]
    assert found
    assert all(map(repr, found))


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("name", ["SharedMem", "TCP", "MultiProcess"])
async def test_a_scheme_from_its_constructor_to_its_end(name: str) -> None:
    scheme = getattr(aiosync, f"{name}WeightSyncScheme")(timeout=0.05)
    states = [repr(scheme), repr(scheme.ready)]
    for each in (copy.copy(scheme), pickle.loads(pickle.dumps(scheme))):
        states.append(repr(each))
        await each.aclose()
    scheme.init_on_sender(model=linear(), num_workers=1)
    states.append(repr(scheme))
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    states.append(repr(scheme))
    with pytest.raises(aiosync.AiosyncError):
        await connecting
    states.append(repr(scheme))
    await scheme.aclose()
    states += [repr(scheme), repr(scheme.ready)]
    assert all(states)
    assert "closed" in repr(scheme)


def test_servers_and_clients_that_were_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for make in (
        lambda: aiosync.server.WeightServer("nonsense"),
        lambda: aiosync.server.WeightServer("tcp://127.0.0.1:0", store=tmp_path / "file"),
        lambda: aiosync.server.WeightClient("tcp://127.0.0.1"),
        lambda: aiosync.server.WeightStore(tmp_path / "file"),
        lambda: aiosync.WeightStrategy("nothing"),
    ):
        with pytest.raises(aiosync.AiosyncError) as caught:
            make()
        for frame in inspect.getinnerframes(caught.tb):
            assert all(map(repr, frame.frame.f_locals.values()))

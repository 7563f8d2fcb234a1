"""Weights that are wanted by who reads shared memory after they were sent to somebody else.

Workers of the scheme of RPC know the address here, so RPC only has to seem to be there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.sender import Snapshot, SnapshotCopier
from aiosync.tensors import LiveBytes
from tests.schemes import _harness as harness
from tests.schemes import _models as models

PATIENCE = harness.PATIENCE

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.one_loop]


def large() -> nn.Module:
    """16 MiB: copied in a thread, and more than sockets hold."""
    return nn.ParameterDict({f"w{i}": nn.Parameter(torch.full((2**20,), -1.0)) for i in range(4)})


# -- what was left in the tensors, as over Ray --------------------------------------------------


def holds(snapshot: Snapshot, value: float) -> bool:
    [payload] = snapshot.views(0, snapshot.nbytes)
    return bool((torch.frombuffer(payload, dtype=torch.float32) == value).all())


# -- where slots are taken at once -------------------------------------------------------------


async def test_an_update_that_is_too_large_does_no_harm_to_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And room for a large one is not made on the loop."""
    take, most, threads = os.posix_fallocate, 2**20, []

    def limited(fd: int, offset: int, nbytes: int) -> None:
        if nbytes > most:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if nbytes > 2**20:
            threads.append(threading.current_thread())
        take(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    target = {"small": torch.zeros(16), "large": torch.zeros(2**22)}
    async with harness.here(
        aiosync.SharedMemWeightSyncScheme(strict=False, guard="reading", timeout=PATIENCE),
        None,
        sender={"weights": {"small": torch.ones(16)}},
        receiver={"weights": target},
    ) as (sender, receiver):
        for number in (2.0, 3.0):
            large = {"large": torch.full((2**22,), number)}
            for call in (sender.send, sender.send_nowait):
                with pytest.raises(aiosync.ConfigError, match="cannot allocate shared memory"):
                    await call(large)
            assert (await sender.send({"small": torch.full((16,), number)})).acked == {0}
        most = 2**30
        assert (await sender.send(large)).acked == {0}
        async with receiver.reading():
            found = receiver.weights.values()
            assert {float(x) for each in found for x in each.aminmax()} == {3.0}
    assert threads
    assert threading.main_thread() not in threads


# -- what was left in the tensors, as over Ray --------------------------------------------------


@pytest.mark.parametrize("cut", [None, "before it is copied", "while it is copied"])
async def test_what_was_borrowed_is_copied_before_the_call_ends(
    cut: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    views, begun, going = LiveBytes.views, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        begun.set()
        assert going.wait(PATIENCE)
        return views(*args)

    source = large()
    models.fill(source, 1.0)
    copier = SnapshotCopier(None, "state_dict")
    try:
        snapshot = await copier.take(copier.prepare(source), "borrow")
        waiting = [asyncio.ensure_future(snapshot.filled()) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(LiveBytes, "views", held)
            settling = asyncio.ensure_future(copier.settle(snapshot))
            await asyncio.sleep(0)
            if cut != "before it is copied":
                await asyncio.to_thread(begun.wait, PATIENCE)
            if cut is not None:
                settling.cancel()
            await asyncio.sleep(0.01)
            assert not any(each.done() for each in (settling, *waiting))
            going.set()
            await asyncio.wait({settling})
        assert settling.cancelled() == (cut is not None)
        models.fill(source, -9.0)  # the caller's again
        await asyncio.gather(*waiting)
        assert holds(snapshot, 1.0)
        snapshot.release()
    finally:
        await copier.aclose()

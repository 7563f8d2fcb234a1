"""The base that a worker keeps for deltas: what a trainer may send, and what makes it useless."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from aiosync.errors import TransportBroken
from aiosync.receiver.kept_base import KeptBase
from aiosync.tensors import FlatBuffer, Layout
from aiosync.tensors.delta import DeltaLayout
from aiosync.wire import RunningChecksum, Update, checksum, plan_manifest

SIZE, CHUNK = 4096, 1024
LAYOUT = Layout(plan_manifest([("a", "bfloat16", (SIZE // 2,), "param", ())]))
OTHER = Layout(plan_manifest([("a", "float32", (SIZE // 4,), "param", ())]))
EPOCH = 7


def state(version: int) -> bytes:
    """Return the bytes of a version; some differ from the version before."""
    array = np.arange(SIZE // 2, dtype=np.uint16)
    array[::10] += version
    return array.tobytes()


def parts(version: int, base: int = 0, layout: Layout = LAYOUT) -> Any:
    """Yield the messages of a version, and the payload of each."""
    new, old = state(version), state(base)
    for index, start in enumerate(range(0, SIZE, CHUNK)):
        stop = start + CHUNK
        update = Update(
            EPOCH,
            version,
            layout.digest,
            chunk=(index, SIZE // CHUNK),
            checksum=checksum(new[start:stop]),
        )
        payload = new[start:stop]
        if base:
            update = dataclasses.replace(update, codec="delta", base=(base, CHUNK))
            views = memoryview(old), memoryview(new)
            payload = DeltaLayout(layout.manifest).encode(start, stop, *views)
        yield update, payload


class Worker:
    """A kept base, and memory for an update."""

    def __init__(self) -> None:
        self.kept = KeptBase()
        self.landing = FlatBuffer(SIZE)

    def put(self, update: Update, payload: bytes, layout: Layout = LAYOUT) -> bool:
        """Let one part arrive; return True if its checksum is right."""
        start = (update.chunk or (0, 1))[0] * CHUNK
        encoded = None
        if update.base is not None:
            encoded = self.kept.lend(update, len(payload))
            encoded[:] = payload
        else:
            self.landing.memoryview()[start : start + CHUNK] = payload
        running = RunningChecksum()
        self.kept.take(update, layout, self.landing, (start, start + CHUNK), encoded, running)
        return running.digest() == update.checksum

    def receive(self, version: int, base: int = 0, layout: Layout = LAYOUT) -> None:
        for update, payload in parts(version, base, layout):
            assert self.put(update, payload, layout)
        self.kept.complete(update)
        assert self.landing.memoryview() == state(version)
        assert self.kept.held == (EPOCH, version)


def test_each_update_is_the_base_of_the_next() -> None:
    worker = Worker()
    assert worker.kept.held == (0, 0)
    worker.receive(1)
    worker.receive(2, 1)
    worker.receive(5, 2)
    # Later writes to the landing memory do not matter.
    worker.landing.memoryview()[:] = bytes(SIZE)
    worker.receive(6, 5)
    worker.receive(7)
    worker.receive(9, 7)


def test_without_a_base_a_delta_is_refused() -> None:
    worker = Worker()
    update, payload = next(parts(2, 1))
    with pytest.raises(TransportBroken, match="version 2 is a delta to version 1, which is no bas"):
        worker.put(update, payload)
    worker.receive(1)
    for changes in ({"base": (3, CHUNK)}, {"digest": OTHER.digest}, {"epoch": EPOCH + 1}):
        worker.receive(1)
        with pytest.raises(TransportBroken, match="which is no base here"):
            worker.put(dataclasses.replace(update, **changes), payload)
        assert worker.kept.held == (0, 0)


@pytest.mark.parametrize("nbytes", [CHUNK, CHUNK + 1, 2**60])
def test_a_delta_is_smaller_than_what_it_makes(nbytes: int) -> None:
    worker = Worker()
    worker.receive(1)
    update, _ = next(parts(2, 1))
    with pytest.raises(TransportBroken, match="is no smaller than 1024 bytes"):
        worker.kept.lend(update, nbytes)


def test_an_update_that_stops_in_between_leaves_no_base() -> None:
    worker = Worker()
    worker.receive(1)
    worker.put(*next(parts(2, 1)))
    assert worker.kept.held == (0, 0)
    update, payload = next(parts(3, 1))
    with pytest.raises(TransportBroken, match="which is no base here"):
        worker.put(update, payload)
    worker.receive(3)
    worker.receive(4, 3)


def test_an_update_that_goes_on_may_be_a_delta_in_part() -> None:
    worker = Worker()
    worker.receive(1)
    whole, changes = list(parts(2)), list(parts(2, 1))
    for update, payload in (changes[0], whole[1], changes[2], whole[3]):
        assert worker.put(update, payload)
    worker.kept.complete(update)
    worker.receive(3, 2)


def test_a_damaged_part_leaves_no_base() -> None:
    for base in (0, 1):
        worker = Worker()
        worker.receive(1)
        update, payload = next(parts(2, base))
        damaged = bytes([payload[0] ^ 1]) + payload[1:]
        if base:
            with pytest.raises(TransportBroken, match="version 2 cannot be decoded: a delta "):
                worker.put(update, damaged)
        else:
            assert not worker.put(update, damaged)
        assert worker.kept.held == (0, 0)
        worker.receive(2)


def test_layouts_of_one_size_are_told_apart() -> None:
    worker = Worker()
    worker.receive(1)
    worker.receive(2, 1)
    worker.receive(3, 0, OTHER)
    worker.receive(4, 3, OTHER)


def test_no_memory_for_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> FlatBuffer:
        raise MemoryError(nbytes)

    worker = Worker()
    monkeypatch.setattr("aiosync.receiver.kept_base.FlatBuffer", refuse)
    with pytest.raises(TransportBroken, match="no memory for a base of 4096 bytes"):
        worker.put(*next(parts(1)))


def test_no_memory_for_a_delta() -> None:
    worker = Worker()
    worker.receive(1)
    update, _ = next(parts(2, 1))
    with pytest.raises(TransportBroken, match="no memory for a delta of"):
        worker.kept.lend(dataclasses.replace(update, base=(1, 2**62)), 2**61)
    worker.receive(2, 1)

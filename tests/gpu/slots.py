"""Prototype of slots in device memory: their cost, and fences that keep forwards whole.

aiosync does not do this today. A trainer fills one of two slots while a reader, another process,
holds the other. The reader copies a slot into its parameters, or points these at it.
"""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from tests.gpu.driver import READ, Driver, Mapping
from tests.gpu.facts import Child
from tests.gpu.report import attempt, begin, row

MODELS = {"1,000 x 4 KiB": (1000, 1024), "16 MiB": (16, 2**18), "512 MiB": (16, 2**23)}
_STRESS = (4, 2**22)
_SECONDS = 4.0
_WANT, _STOP, _HELD = 0, 1, 2
_page = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
"""Page of both processes: twice the version plus the slot, the end, and the reads of each slot."""
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _size(count: int, numel: int) -> int:
    granule = 2 * 2**20
    return -(-count * numel * 4 // granule) * granule


def _views(mapping: Mapping, count: int, numel: int) -> list[torch.Tensor]:
    return list(mapping.tensor()[: count * numel].split(numel))


class _Reader:
    """The reader's two slots and its parameters."""

    def __init__(self, driver: Driver, fds: list[int], count: int, numel: int) -> None:
        self.driver = driver
        self.mappings = [Mapping(driver, _size(count, numel), fd, READ) for fd in fds]
        self.slots = [_views(each, count, numel) for each in self.mappings]
        self.own = [torch.zeros(numel, device="cuda") for _ in range(count)]
        self.params = [torch.nn.Parameter(each, requires_grad=False) for each in self.own]
        self.event = driver.new_event()
        self.seen = 0

    def fence(self) -> None:
        """Wait for all work that is queued in this process."""
        self.driver.record_all(self.event)
        self.driver.wait(self.event)

    def hold(self) -> int | None:
        """Hold the newest slot and return it; return ``None`` without news.

        From then on the trainer does not write to the slot.
        """
        while True:
            want = int(_page[_WANT])
            if want == self.seen:
                return None
            slot = want & 1
            _page[_HELD + slot] += 1
            if int(_page[_WANT]) == want:
                self.seen = want
                return slot
            _page[_HELD + slot] -= 1

    def copy(self, slot: int, fenced: bool = True) -> None:
        """Copy a slot into the parameters, after all queued work if ``fenced``."""
        if fenced:
            self.fence()
        torch._foreach_copy_([each.data for each in self.params], self.slots[slot])
        torch.cuda.synchronize()

    def flip(self, slot: int) -> None:
        """Point the parameters at a slot, without waiting for queued work."""
        deque(map(_set_data, self.params, self.slots[slot]), maxlen=0)


def _timed(call: Callable[[], object], repeats: int = 30) -> str:
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    return f"{statistics.median(taken):.3f}"


def _serve_times(sock: socket.socket) -> None:
    """Measure each model: a copy, a flip, and a flip until the old slot is free."""
    driver = Driver()
    while True:
        text, fds, _, _ = socket.recv_fds(sock, 64, 2)
        if not text:
            return
        count, numel = map(int, text.split())
        reader = _Reader(driver, fds, count, numel)
        for fd in fds:
            os.close(fd)

        def flip(reader: _Reader = reader) -> None:
            reader.flip(0)
            reader.fence()

        reader.copy(0)
        good = all(float(each[-1]) == 5.0 for each in reader.params)
        found = [
            _timed(lambda reader=reader: reader.copy(0)),
            _timed(lambda reader=reader: reader.flip(0)),
            _timed(flip),
        ]
        sock.send(f"{found[0]} | {found[1]} | {found[2]} | {good}".encode())


def _serve_stress(sock: socket.socket) -> None:
    """Run forwards on two streams beside updates; answer how many computed with two versions."""
    driver = Driver()
    _, fds, _, _ = socket.recv_fds(sock, 64, 2)
    reader = _Reader(driver, fds, *_STRESS)
    sock.send(b"ready")
    while mode := sock.recv(64).decode():
        sock.send(_stress(reader, *mode.split()).encode())


def _stress(reader: _Reader, how: str, fence: str) -> str:
    fenced, streams = fence == "fence", [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    deque(map(_set_data, reader.params, reader.own), maxlen=0)
    rows, updates, waiting = [], 0, deque[tuple[int, object]]()
    held: int | None = None
    while not _page[_STOP]:
        for stream in streams:
            with torch.cuda.stream(stream):
                first = reader.params[0].amax()
                torch.cuda._sleep(1_000_000)
                rows.append(torch.stack([first, reader.params[-1].amin()]))
        while waiting and reader.driver.is_done(waiting[0][1]):  # type: ignore[arg-type]
            _page[_HELD + waiting.popleft()[0]] -= 1
        if len(rows) % 64 == 0:
            # This bounds the work that is queued.
            torch.cuda.synchronize()
        slot = reader.hold()
        if slot is None:
            continue
        updates += 1
        if how == "copy":
            reader.copy(slot, fenced)
            _page[_HELD + slot] -= 1
        else:
            reader.flip(slot)
            if held is not None:
                if fenced:
                    event = reader.driver.new_event()
                    reader.driver.record_all(event)
                    waiting.append((held, event))
                else:
                    _page[_HELD + held] -= 1
            held = slot
    torch.cuda.synchronize()
    _page[_HELD : _HELD + 2] = 0
    seen = torch.stack(rows).cpu()
    torn = int((seen[:, 0] != seen[:, 1]).sum())
    versions = len(seen[:, 0].unique())
    return f"{torn} torn of {len(rows)} forwards, {updates} updates, {versions} versions seen"


class _Trainer:
    """The trainer's two slots and its parameters."""

    def __init__(self, driver: Driver, count: int, numel: int) -> None:
        self.mappings = [Mapping(driver, _size(count, numel)) for _ in range(2)]
        self.slots = [_views(each, count, numel) for each in self.mappings]
        self.params = [torch.full((numel,), 5.0, device="cuda") for _ in range(count)]
        self.version = int(_page[_WANT]) >> 1

    def fill(self, slot: int) -> None:
        """Copy the parameters into a slot."""
        torch.cuda.synchronize()
        torch._foreach_copy_(self.slots[slot], self.params)
        torch.cuda.synchronize()

    def publish(self) -> bool:
        """Fill the other slot and name it as the newest, unless the reader holds it."""
        slot = 1 - (int(_page[_WANT]) & 1)
        if _page[_HELD + slot]:
            return False
        self.fill(slot)
        self.version += 1
        _page[_WANT] = 2 * self.version + slot
        return True


def _times(driver: Driver, child: Child, name: str) -> None:
    trainer = _Trainer(driver, *MODELS[name])
    trainer.fill(0)
    trainer.fill(1)
    fds = [driver.export(each.handle) for each in trainer.mappings]
    published = _timed(lambda: trainer.fill(1))
    count, numel = MODELS[name]
    socket.send_fds(child.socket, [f"{count} {numel}".encode()], fds)
    row(name, published, child.socket.recv(4096).decode())
    for fd in fds:
        os.close(fd)


def _run_stress(trainer: _Trainer, child: Child, mode: str) -> str:
    _page[_STOP] = 0
    child.socket.send(mode.encode())
    published, value, end = 0, 0.0, time.monotonic() + _SECONDS
    while time.monotonic() < end:
        value = value % 1000 + 1
        torch._foreach_zero_(trainer.params)
        torch._foreach_add_(trainer.params, value)
        published += trainer.publish()
    _page[_STOP] = 1
    return f"{child.socket.recv(4096).decode()}, {published} published"


def run() -> None:
    """Print the tables."""
    timer, stressed = Child(_serve_times), Child(_serve_stress)
    driver = Driver()
    begin(
        f"slots in device memory, a prototype: {torch.cuda.get_device_name()}, idle",
        "weights",
        "publish, ms",
        "copy, with both fences",
        "flip",
        "flip until the old slot is free",
        "right values",
    )
    for name in MODELS:
        try:
            _times(driver, timer, name)
        except Exception as exc:  # noqa: BLE001 - the table shows it
            row(name, f"{type(exc).__name__}: {exc}", "", "", "", "")
    timer.kill()
    begin(f"torn forwards in {_SECONDS:g} s, 64 MiB, two streams", "reader", "result")
    trainer = _Trainer(driver, *_STRESS)
    trainer.fill(0)
    trainer.fill(1)
    fds = [driver.export(each.handle) for each in trainer.mappings]
    socket.send_fds(stressed.socket, [b"here"], fds)
    stressed.socket.recv(16)
    for mode in ("copy fence", "copy none", "flip fence", "flip none"):
        attempt(
            mode.replace("none", "without a fence"),
            lambda m=mode: _run_stress(trainer, stressed, m),
        )
    stressed.kill()

"""Bandwidth of copies out of a GPU, into it, and on it."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from tests.gpu.report import attempt, begin, median_ms

_MIB = 2**20
_NBYTES = 512 * _MIB


def _speed(nbytes: int, ms: float) -> str:
    return f"{ms:.2f} ms, {nbytes / ms / 1e6:.1f} GB/s"


def _memory(kind: str, nbytes: int) -> torch.Tensor:
    if kind == "pinned":
        return torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    if kind == "memfd":
        fd = os.memfd_create("tests.gpu")
        os.ftruncate(fd, nbytes)
        host = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        os.close(fd)
        return host.fill_(1)
    return torch.ones(nbytes, dtype=torch.uint8)


def _moves(kind: str, chunk: int) -> str:
    device = torch.ones(_NBYTES, dtype=torch.uint8, device="cuda")
    host = _memory(kind, _NBYTES)
    pieces = list(zip(host.split(chunk), device.split(chunk), strict=True))

    def out() -> None:
        for there, here in pieces:
            there.copy_(here, non_blocking=True)

    def into() -> None:
        for there, here in pieces:
            here.copy_(there, non_blocking=True)

    return f"out {_speed(_NBYTES, median_ms(out))}; into {_speed(_NBYTES, median_ms(into))}"


def _both_ways() -> str:
    """Measure both directions at once, with pinned memory."""
    ones = [torch.ones(_NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    hosts = [_memory("pinned", _NBYTES) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            hosts[0].copy_(ones[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            ones[1].copy_(hosts[1], non_blocking=True)

    return _speed(2 * _NBYTES, median_ms(both))


def _copy_parts(parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in parts:
        np.copyto(target, source)


def _host_copy(threads: int) -> str:
    """Measure copies by threads from a memfd into the same 32 MiB of pinned memory."""
    source, ring = _memory("memfd", _NBYTES).numpy(), _memory("pinned", 32 * _MIB).numpy()
    step = 32 * _MIB // threads
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            for start in range(0, _NBYTES, 32 * _MIB):
                work = [
                    [(ring[at : at + step], source[start + at : start + at + step])]
                    for at in range(0, 32 * _MIB, step)
                ]
                list(pool.map(_copy_parts, work))

        return _speed(_NBYTES, median_ms(copy, 5))


def _ring(direction: str, chunk: int, threads: int) -> str:
    """Measure copies through two pinned chunks in turn, which threads fill or empty."""
    device = torch.ones(_NBYTES, dtype=torch.uint8, device="cuda")
    host = _memory("memfd", _NBYTES)
    rings = [_memory("pinned", chunk) for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]
    stream = torch.cuda.Stream()
    step = chunk // threads
    starts = range(0, _NBYTES, chunk)
    with ThreadPoolExecutor(threads) as pool:

        def spread(target: torch.Tensor, source: torch.Tensor) -> None:
            to, of = target.numpy(), source.numpy()
            work = [[(to[at : at + step], of[at : at + step])] for at in range(0, chunk, step)]
            list(pool.map(_copy_parts, work))

        def into() -> None:
            for turn, at in enumerate(starts):
                ring, event = rings[turn % 2], events[turn % 2]
                event.synchronize()
                spread(ring, host[at : at + chunk])
                with torch.cuda.stream(stream):
                    device[at : at + chunk].copy_(ring, non_blocking=True)
                    event.record()
            stream.synchronize()

        def out() -> None:
            for turn, at in enumerate([*starts, -1]):
                if at >= 0:
                    with torch.cuda.stream(stream):
                        rings[turn % 2].copy_(device[at : at + chunk], non_blocking=True)
                        events[turn % 2].record()
                if turn:
                    before = (turn - 1) * chunk
                    events[(turn - 1) % 2].synchronize()
                    spread(host[before : before + chunk], rings[(turn - 1) % 2])

        return _speed(_NBYTES, median_ms(into if direction == "into" else out, 5))


def _small(how: str) -> str:
    """Measure one way to copy 1,000 tensors of 4 KiB on the device, with or without a buffer."""
    tensors = [torch.ones(1024, device="cuda") for _ in range(1000)]
    flat = torch.empty(1000 * 1024, device="cuda")
    views = list(flat.split(1024))
    host = torch.empty(1000 * 1024).pin_memory()
    hosts = list(host.split(1024))
    plain = list(torch.empty(1000 * 1024).split(1024))

    def one_by_one(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        for target, source in zip(to, of, strict=True):
            target.copy_(source, non_blocking=True)

    def through() -> None:
        torch._foreach_copy_(views, tensors)
        host.copy_(flat, non_blocking=True)

    def back() -> None:
        flat.copy_(host, non_blocking=True)
        torch._foreach_copy_(tensors, views)

    calls = {
        "gather on the device, foreach": lambda: torch._foreach_copy_(views, tensors),
        "gather on the device, one by one": lambda: one_by_one(views, tensors),
        "foreach to pageable memory": lambda: torch._foreach_copy_(plain, tensors),
        "foreach to pinned memory": lambda: torch._foreach_copy_(hosts, tensors),
        "foreach from pageable memory": lambda: torch._foreach_copy_(tensors, plain),
        "gather, and one transfer to pinned memory": through,
        "one transfer from pinned memory, and scatter": back,
        "torch.cat": lambda: torch.cat(tensors, out=flat),
        "1,000 views of a buffer": lambda: flat.split(1024),
    }
    return f"{median_ms(calls[how]):.3f} ms"


SMALL = (
    "gather on the device, foreach",
    "gather on the device, one by one",
    "torch.cat",
    "1,000 views of a buffer",
    "foreach to pageable memory",
    "foreach to pinned memory",
    "foreach from pageable memory",
    "gather, and one transfer to pinned memory",
    "one transfer from pinned memory, and scatter",
)


def _on_device() -> str:
    one, other = (torch.ones(_NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return _speed(2 * _NBYTES, median_ms(lambda: other.copy_(one), 20)) + ", read and written"


def _gather_large(chunk: int) -> str:
    """Measure the gathering of 16 tensors of 32 MiB into chunks, piece by piece."""
    tensors = [torch.ones(2**23, device="cuda") for _ in range(16)]
    flat = torch.empty(_NBYTES // 4, device="cuda")
    pairs = [*zip(flat.split(chunk), torch.cat(tensors).split(chunk), strict=True)]

    def gather() -> None:
        for target, source in pairs:
            torch._foreach_copy_([target], [source])

    return f"{median_ms(gather):.3f} ms"


def run() -> None:
    """Print the table."""
    begin(f"bandwidth: {torch.cuda.get_device_name()}, 512 MiB", "what", "result")
    for kind in ("pageable", "memfd", "pinned"):
        for chunk in (512, 64, 32, 8) if kind != "memfd" else (512, 32):
            attempt(f"{kind}, in pieces of {chunk} MiB", partial(_moves, kind, chunk * _MIB))
    attempt("pinned, both ways at once", _both_ways)
    for threads in (1, 2, 4, 8):
        attempt(f"memfd to pinned memory, {threads} threads", partial(_host_copy, threads))
    for direction in ("out", "into"):
        for mib, threads in ((32, 1), (32, 2), (32, 4), (8, 2), (8, 4)):
            attempt(
                f"{direction}, two pinned chunks of {mib} MiB, {threads} threads",
                partial(_ring, direction, mib * _MIB, threads),
            )
    attempt("on the device", _on_device)
    attempt("gather in chunks of 32 MiB on the device", partial(_gather_large, 2**23))
    for how in SMALL:
        attempt(f"1,000 x 4 KiB, {how}", partial(_small, how))

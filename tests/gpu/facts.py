"""Facts about the driver, for slots in device memory."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import torch

from tests.gpu.driver import FABRIC_SUPPORTED, FD_SUPPORTED, READ, VMM_SUPPORTED, Driver, Mapping
from tests.gpu.report import attempt, begin, median_ms, once_ms, row

NBYTES = 2**29
# So many cycles take about a tenth of a second.
_CYCLES = 200_000_000
_PATIENCE = 30


class Child:
    """A process that is forked before this one uses the GPU, at the other end of a socket."""

    def __init__(self, target: Callable[[socket.socket], None]) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(_PATIENCE)
        theirs.settimeout(_PATIENCE)
        context = multiprocessing.get_context("fork")
        self.process: BaseProcess = context.Process(target=target, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, text: str, fd: int | None = None) -> str:
        """Send a word, with a descriptor if there is one; return the answer."""
        if fd is None:
            self.socket.send(text.encode())
        else:
            socket.send_fds(self.socket, [text.encode()], [fd])
        return self.socket.recv(4096).decode()

    def kill(self) -> None:
        """Kill the process, which ends it as a crash would."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(_PATIENCE)


def _read(sock: socket.socket) -> None:
    """Map the memory that arrives read-only, and answer questions about it."""
    _, fds, _, _ = socket.recv_fds(sock, 16, 1)
    start = time.perf_counter()
    driver = Driver()
    context = time.perf_counter()
    mapping = Mapping(driver, NBYTES, fds[0], READ)
    end = time.perf_counter()
    os.close(fds[0])
    tensor = mapping.tensor()
    own = torch.empty_like(tensor)
    sock.send(
        f"context {(context - start) * 1e3:.0f} ms, import and map {(end - context) * 1e3:.2f} ms, "
        f"mean {float(tensor.mean()):g}, copy to own memory "
        f"{median_ms(lambda: own.copy_(tensor)):.3f} ms".encode()
    )
    while word := sock.recv(16).decode():
        if word == "mean":
            sock.send(f"{float(tensor.mean()):g}".encode())
        elif word == "write":
            try:
                tensor.fill_(7.0)
                torch.cuda.synchronize()
                sock.send(b"the write went through")
            except Exception as exc:  # noqa: BLE001 - the error is the answer
                sock.send(f"{type(exc).__name__}: {str(exc).splitlines()[0]}".encode())


def _export(sock: socket.socket) -> None:
    """Export memory full of threes, and wait for the end."""
    sock.recv(16)
    driver = Driver()
    mapping = Mapping(driver, NBYTES)
    mapping.tensor().fill_(3.0)
    torch.cuda.synchronize()
    fd = driver.export(mapping.handle)
    socket.send_fds(sock, [b"here"], [fd])
    sock.recv(16)


def _expandable(sock: socket.socket) -> None:
    """Import memory while torch's allocator uses expandable segments."""
    _, fds, _, _ = socket.recv_fds(sock, 16, 1)
    try:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        other = torch.ones(2**24, device="cuda")
        tensor = Mapping(Driver(), NBYTES, fds[0], READ).tensor()
        total = float((tensor[: 2**24] + other).mean())
        sock.send(f"works, mean {total:g}".encode())
    except Exception as exc:  # noqa: BLE001 - the error is the answer
        sock.send(f"{type(exc).__name__}: {exc}".encode()[:300])


def _back(driver: Driver, free: int) -> str:
    start = time.perf_counter()
    while driver.free_nbytes() < free and time.perf_counter() - start < 5:
        time.sleep(0.005)
    missing = (free - driver.free_nbytes()) / 2**20
    return f"{missing:.0f} MiB missing after {(time.perf_counter() - start) * 1e3:.0f} ms"


def _all_streams(driver: Driver) -> str:
    event, side = driver.new_event(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_CYCLES)
    record = once_ms(lambda: driver.record_all(event))
    pending = not driver.is_done(event)
    wait = once_ms(lambda: driver.wait(event))
    return f"record {record:.3f} ms, pending {pending}, waited {wait:.0f} ms"


def _event_costs(driver: Driver) -> str:
    event, plain = driver.new_event(), torch.cuda.Event()
    torch.cuda.synchronize()
    rounds = 1000
    recorded = once_ms(lambda: [driver.record_all(event) for _ in range(rounds)])
    asked = once_ms(lambda: [driver.is_done(event) for _ in range(rounds)])
    torch_recorded = once_ms(lambda: [plain.record() for _ in range(rounds)])
    waited = once_ms(lambda: [torch.cuda.synchronize() for _ in range(rounds)])
    return (
        f"record {recorded:.2f} us, query {asked:.2f} us, an event of one stream "
        f"{torch_recorded:.2f} us, synchronize() {waited:.2f} us"
    )


def _while_capturing(driver: Driver) -> str:
    event, graph = driver.new_event(), torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    said = "recorded"
    try:
        with torch.cuda.graph(graph):
            x.add_(1)
            try:
                driver.record_all(event)
            except Exception as exc:  # noqa: BLE001 - the error is the answer
                said = str(exc)
    except Exception as exc:  # noqa: BLE001 - the error is the answer
        return f"{said}; the capture failed: {str(exc).splitlines()[0]}"
    return f"{said}; the capture is valid"


def _register(flags: int, kind: int, access: int) -> str:
    fd = os.memfd_create("tests.gpu")
    os.ftruncate(fd, NBYTES)
    shared = mmap.mmap(fd, NBYTES)
    shared[:: mmap.PAGESIZE] = b"\1" * (NBYTES // mmap.PAGESIZE)
    mapping = mmap.mmap(fd, NBYTES, kind, access)
    os.close(fd)
    host = torch.frombuffer(mapping, dtype=torch.uint8)
    address, cudart, status = host.data_ptr(), torch.cuda.cudart(), list[int]()
    register = lambda: status.append(int(cudart.cudaHostRegister(address, NBYTES, flags)))  # noqa: E731
    taken = once_ms(register)
    if status[0]:
        with contextlib.suppress(RuntimeError):
            # This call reports the error once more.
            torch.zeros(1, device="cuda").add_(1)
        return f"refused with error {status[0]} after {taken:.0f} ms"
    device = torch.ones(NBYTES, dtype=torch.uint8, device="cuda")
    out = ""
    if access & mmap.PROT_WRITE and kind == mmap.MAP_SHARED:
        taken_out = median_ms(lambda: host.copy_(device, non_blocking=True))
        out = f", out of the GPU {taken_out:.1f} ms"
    into = median_ms(lambda: device.copy_(host, non_blocking=True))
    shared[0:1] = b"\x55"
    device.copy_(host, non_blocking=True)
    sees = (int(host[0]) == 0x55, int(device[0]) == 0x55)
    gone = once_ms(lambda: cudart.cudaHostUnregister(address))
    return (
        f"{taken:.0f} ms, unregister {gone:.0f} ms, into the GPU {into:.1f} ms{out}, "
        f"later writes are seen by (process, GPU): {sees}"
    )


def _remap(driver: Driver) -> str:
    handles = [driver.create(NBYTES) for _ in range(2)]
    address = driver.reserve(NBYTES)
    driver.map(address, NBYTES, handles[0], READ)
    taken = []
    for at in range(6):
        start = time.perf_counter()
        driver.unmap(address, NBYTES)
        driver.map(address, NBYTES, handles[(at + 1) % 2], READ)
        taken.append((time.perf_counter() - start) * 1e3)
    driver.unmap(address, NBYTES)
    for handle in handles:
        driver.release(handle)
    driver.unreserve(address, NBYTES)
    return f"{min(taken):.3f} to {max(taken):.3f} ms"


def _pinned() -> str:
    found = []
    for mib in (4, 32, 64, 256):
        made = once_ms(lambda mib=mib: torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True))
        found.append(f"{mib} MiB {made:.1f} ms")
    return ", ".join(found)


def _steps(driver: Driver) -> str:
    found = []
    for mib in (2, 16, 512):
        nbytes, start = mib * 2**20, time.perf_counter()
        handle = driver.create(nbytes)
        created = time.perf_counter()
        address = driver.reserve(nbytes)
        driver.map(address, nbytes, handle, 3)
        mapped = time.perf_counter()
        os.close(driver.export(handle))
        exported = time.perf_counter()
        driver.unmap(address, nbytes)
        driver.release(handle)
        driver.unreserve(address, nbytes)
        freed = time.perf_counter()
        times = (created - start, mapped - created, exported - mapped, freed - exported)
        found.append(f"{mib} MiB " + " / ".join(f"{each * 1e3:.2f}" for each in times))
    return ", ".join(found)


def run() -> None:
    """Print the table."""
    reader, writer, exporter, expandable = map(Child, (_read, _read, _export, _expandable))
    begin(f"driver: {torch.cuda.get_device_name()}, torch {torch.__version__}", "what", "result")
    driver = Driver()
    row("CUDA version of the driver", driver.version())
    attempt("virtual memory API (attribute 102)", lambda: driver.attribute(VMM_SUPPORTED))
    attempt("file descriptors (103)", lambda: driver.attribute(FD_SUPPORTED))
    attempt("fabric handles (128)", lambda: driver.attribute(FABRIC_SUPPORTED))
    attempt("host memory registered read-only (113)", lambda: driver.attribute(113))
    attempt("MPS (see the environment)", lambda: os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "no"))
    attempt("UUID", lambda: torch.cuda.get_device_properties(0).uuid)
    attempt(
        "granularity, least and recommended",
        lambda: (driver.granularity(), driver.granularity(recommended=True)),
    )
    attempt("create / map / export / free, in ms", lambda: _steps(driver))
    attempt("other memory at the same address, 512 MiB", lambda: _remap(driver))
    torch.cuda.synchronize()
    free = driver.free_nbytes()
    mapping = Mapping(driver, NBYTES)
    try:
        tensor = mapping.tensor()
        row("tensor by `__cuda_array_interface__`", tensor.data_ptr() == mapping.address)
        tensor.fill_(1.0)
        torch.cuda.synchronize()
        fd = driver.export(mapping.handle)
        attempt("reader in another process, 512 MiB", lambda: reader.ask("fd", fd))
        tensor.fill_(2.0)
        torch.cuda.synchronize()
        attempt("reader sees a later write (2)", lambda: reader.ask("mean"))
        attempt("second reader", lambda: writer.ask("fd", fd))
        attempt("write through a read-only mapping", lambda: writer.ask("write"))
        attempt("first reader after that", lambda: reader.ask("mean"))
        attempt("this process after that", lambda: float(tensor.mean()))
        attempt("reader with expandable segments", lambda: expandable.ask("fd", fd))
        os.close(fd)
    finally:
        writer.kill()
        expandable.kill()
        mapping.close()
    attempt("reader after the exporter has freed", lambda: reader.ask("mean"))
    reader.kill()
    attempt("memory after the kill of the readers", lambda: _back(driver, free))
    try:
        exporter.socket.send(b"go")
        _, fds, _, _ = socket.recv_fds(exporter.socket, 16, 1)
        kept = Mapping(driver, NBYTES, fds[0], READ)
        os.close(fds[0])
        exporter.kill()
        attempt("importer after the kill of the exporter", lambda: float(kept.tensor().mean()))
        kept.close()
    except Exception as exc:  # noqa: BLE001 - the table shows it
        row("importer after the kill of the exporter", f"{type(exc).__name__}: {exc}")
    attempt("memory after that", lambda: _back(driver, free))
    attempt("context-wide event: work on another stream", lambda: _all_streams(driver))
    attempt("cost of an event", lambda: _event_costs(driver))
    attempt("context-wide event during a capture", lambda: _while_capturing(driver))
    attempt("pinned memory from torch", _pinned)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    attempt(
        "cudaHostRegister of 512 MiB of a memfd, shared",
        lambda: _register(0, mmap.MAP_SHARED, both),
    )
    attempt("the same, private", lambda: _register(0, mmap.MAP_PRIVATE, both))
    attempt("the same, private, flag ReadOnly", lambda: _register(8, mmap.MAP_PRIVATE, both))
    attempt(
        "the same, shared but mapped to be read, flag ReadOnly",
        lambda: _register(8, mmap.MAP_SHARED, mmap.PROT_READ),
    )

"""Sends through shared memory beside everything that may go wrong.

``python -m tests.bench.stress_publishing --seconds 300 --seed 1`` starts one trainer after the
other, each with workers that compute in one or two threads. Workers join, leave, are stopped and
killed at random, and so is the trainer. Alarms raise at any moment of some workers' forwards, and
Ctrl-C at any moment of some trainers' ``send()``. Every value of version v is the number v, and the
trainer writes down which version's send has returned. A forward must find one number everywhere,
that of the version that the scheme reports, and none that is older than the one that was written
down before it began. The weights of a version that workers keep must stay as they are. Memory is
bounded, no process computes while there is nothing to do, and nothing is left behind.

Some trainers fork in between, and send the same weights in another order. Some workers compute on
an event loop and end without closing their schemes. In some workers foreign code closes
descriptors, whose numbers then go to other files.

With ``--churn`` one trainer has workers that stay for a second or two: its memory and its
descriptors must not grow. With ``--workers 100`` that many connect and get 200 sends.

The program exits with 1 if anything of that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import faulthandler
import gc
import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aiosync
import aiosync.sync

WORKERS, MOST = 8, 12
# Each pair is a number of tensors, and the number of values in each.
SIZES = ((2, 64), (20, 64), (200, 64), (2000, 64), (20, 2**16))
BAD = (
    *("mixed", "mislabelled", "old", "early", "refused", "changed", "silent", "failed", "hung"),
    *("spins", "too much memory", "left", "grew"),
)
# These are the words of the clock.
_RETURNED, _BEGUN, _READY, _REST, _OVER, _LOOK, _SEEN = range(7)
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Stack(nn.Module):
    """Parameters and buffers that hold one number; a forward returns the numbers that it finds."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.pause = 0.0
        for number in range(size):
            if number % 5 == 4:
                self.register_buffer(f"t{number}", torch.zeros(8))
            else:
                setattr(self, f"t{number}", nn.Parameter(torch.zeros(width)))

    def fill(self, value: float) -> None:
        """Set all parameters and buffers, like an optimizer's step."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)

    def forward(self, scheme: Any = None) -> tuple[set[float], float]:
        tensors = [t.detach() for t in (*self.parameters(), *self.buffers())]
        seen = {float(t[0]) for t in tensors}
        if self.pause:
            time.sleep(self.pause)
        seen.update(float(t[-1]) for t in tensors)
        return seen, 0.0 if scheme is None else float(scheme.version)


class Clock:
    """Words in memory that all processes share."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        self.words = memoryview(self._map).cast("Q")


class Alarm(Exception):
    """Error that the timer raises."""


class Watch:
    """Findings of the forwards of one worker."""

    def __init__(self, scheme: Any, model: Stack, clock: Clock) -> None:
        self.count: Counter[str] = Counter()
        # A forward beside another one did not see these versions.
        self.missed: set[int] = set()
        self.kept: list[tuple[float, list[torch.Tensor]]] = []
        # If this is set, no update needs to arrive any more.
        self.is_cut_off = False
        self._scheme, self._model, self._clock = scheme, model, clock
        # For each thread: True while it is in a forward.
        self._open: dict[int, bool] = {}

    def look(self) -> None:
        """Compute once, and count the findings."""
        me, words = threading.get_ident(), self._clock.words
        before = words[_RETURNED]
        self._open[me] = True
        # If another forward is open, this one may join it.
        alone = not any(is_open for thread, is_open in self._open.items() if thread != me)
        try:
            seen, version = self._model(self._scheme)
        except aiosync.ApplyError:
            self.count["refused"] += not self.is_cut_off
            return
        finally:
            self._open[me] = False
        self.count["forwards"] += 1
        self.count["mixed"] += len(seen) != 1
        self.count["mislabelled"] += version not in seen
        self.count["early"] += max(seen) > words[_BEGUN]
        if self.is_cut_off:
            return
        if min(seen) < before and alone:
            self.count["old"] += 1
        elif min(seen) < before:
            self.count["beside"] += 1
            self.missed.add(before)

    def keep(self, most: int) -> None:
        """Keep the model's present weights, and check that those kept before have not changed."""
        with self._scheme.reading():
            tensors = [each.detach() for each in self._model.parameters()]
            self.kept.append((float(tensors[0][0]), tensors))
        for value, tensors in self.kept:
            self.count["changed"] += not all(bool((each == value).all()) for each in tensors)
        del tensors, self.kept[: len(self.kept) - most]


def shared_memory(pid: int | str = "self") -> dict[int, int]:
    """Return the bytes of each file of aiosync's shared memory that a process has open."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if "memfd:aiosync" in os.readlink(path):
                stat = os.stat(path)
                found[stat.st_ino] = stat.st_blocks * 512
    return found


def private_nbytes() -> int:
    """Return the bytes of slot mappings that this process has for itself."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            ours = "memfd:aiosync" in line
        elif ours and line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK
    return 0.0


def is_alive(pid: int) -> bool:
    """Return True if a process has not ended."""
    with contextlib.suppress(OSError):
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return False


def tell(pid: int | None, what: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, what)


def write(report: str, **counts: float) -> None:
    """Add a line to a report; several processes share it, and any of them may be killed."""
    with open(report, "a") as file:
        file.write(json.dumps(counts) + "\n")


def begin_worker(report: str) -> None:
    """Set up the process of a worker, and write its pid to the report."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    # Otherwise a send has to wait until each worker has computed for a while.
    os.nice(9)
    write(report, pid=os.getpid())


def work(
    scheme: Any, idx: int, shape: tuple[int, int], path: str, report: str, seed: float
) -> None:
    """Run one worker, which computes until its trainer goes, or for as long as it stays."""
    begin_worker(report)
    chance, clock, model = random.Random(seed), Clock(path), Stack(*shape)
    watch = Watch(scheme, model, clock)
    stay = chance.uniform(0.2, 3) if seed < 0.3 else 3600.0
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    try:
        scheme.connect(timeout=20)
    except aiosync.AiosyncError:
        # The worker's trainer went before.
        scheme.shutdown()
        return
    gone, until = threading.Event(), time.monotonic() + stay

    def wait() -> None:
        with contextlib.suppress(aiosync.AiosyncError):
            scheme.wait_for_version(2**62, timeout=stay)
        gone.set()

    def runs() -> bool:
        while clock.words[_REST] and not (gone.is_set() or clock.words[_OVER]):
            gone.wait(0.2)
        return not (gone.is_set() or clock.words[_OVER] or time.monotonic() > until)

    def compute() -> None:
        while runs():
            watch.look()

    # Some workers are told of each version, the others look for themselves.
    threads = [threading.Thread(target=wait)] if chance.random() < 0.5 else []
    if chance.random() < 0.25:
        threads.append(threading.Thread(target=compute))
    for thread in threads:
        thread.start()
    armed, alarms = False, chance.random() < 0.5

    def ring(*_: Any) -> None:
        if armed:
            raise Alarm

    signal.signal(signal.SIGALRM, ring)
    while runs():
        model.pause = chance.uniform(0, 0.05) if chance.random() < 0.003 else 0.0
        try:
            if alarms:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-3))
            watch.look()
            armed = False
        except Alarm:
            armed = False
            watch.count["alarms"] += 1
        if chance.random() < 0.001:
            # An idle worker follows, too.
            time.sleep(chance.uniform(0, 0.05))
        if chance.random() < 0.001:
            watch.keep(chance.randrange(3))
    for thread in threads:
        thread.join()
    model.pause = 0.0
    nbytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    # These bytes are for alignment and header.
    nbytes += 64 * shape[0] + 2 * mmap.PAGESIZE
    watch.count["too much memory"] += private_nbytes() > (len(watch.kept) + 1) * nbytes
    if stay == 3600:
        watch.look()
        try:
            scheme.wait_for_version(2**62, timeout=20)
        except aiosync.SyncTimeout:
            watch.count["silent"] += 1
        except aiosync.AiosyncError:
            # The error says that the trainer has gone.
            pass
    scheme.shutdown()
    watch.kept.clear()
    gc.collect()
    watch.count["left"] += len(shared_memory())
    write(report, **watch.count, **{"max missed beside": len(watch.missed), "workers": 1})


def replace_descriptors(chance: random.Random, folder: str) -> None:
    """Close some descriptors of aiosync, as foreign code may; files without locks get the numbers.

    Pipes stay open, as multiprocessing knows by them that this process is alive.
    """
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{name}")
            if fd > 2 and kind.startswith(("socket:", "anon_inode:", "/memfd:aiosync")):
                if chance.random() < 0.5:
                    with tempfile.TemporaryFile(dir=folder) as other:
                        os.dup2(other.fileno(), fd)


def work_carelessly(
    scheme: Any, idx: int, shape: tuple[int, int], path: str, report: str, seed: float
) -> None:
    """Run a worker in which foreign code closes descriptors; it computes until told to end."""
    begin_worker(report)
    chance, clock, model = random.Random(seed), Clock(path), Stack(*shape)
    watch = Watch(scheme, model, clock)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    try:
        scheme.connect(timeout=20)
    except aiosync.AiosyncError:
        # The worker's trainer went before.
        scheme.shutdown()
        return
    closes = time.monotonic() + chance.uniform(0, 1)
    until = closes + chance.uniform(0, 1)
    with contextlib.suppress(aiosync.AiosyncError):
        while not (clock.words[_REST] or clock.words[_OVER]) and time.monotonic() < until:
            watch.look()
            if not watch.is_cut_off and time.monotonic() > closes:
                watch.is_cut_off = True
                replace_descriptors(chance, os.path.dirname(path))
    write(report, **watch.count, workers=1, careless=1)
    # Closing the scheme would close the descriptors of others.
    os._exit(0)


def work_on_loop(
    scheme: Any, idx: int, shape: tuple[int, int], path: str, report: str, seed: float
) -> None:
    """Run a worker that computes on its event loop, and leaves without closing its scheme."""
    begin_worker(report)
    count = asyncio.run(_compute_on_loop(scheme, idx, shape, path, random.Random(seed)))
    if count is not None:
        gc.collect()
        count["left"] += len(shared_memory())
        write(report, **count, workers=1)


async def _compute_on_loop(
    trainer: Any, idx: int, shape: tuple[int, int], path: str, chance: random.Random
) -> Counter[str] | None:
    scheme, clock, model = copy.copy(trainer), Clock(path), Stack(*shape)
    watch = Watch(scheme, model, clock)
    stay = chance.uniform(0.2, 3) if chance.random() < 0.5 else 3600.0
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    try:
        await scheme.connect(timeout=20)
    except aiosync.AiosyncError:
        # The worker's trainer went before.
        await scheme.aclose()
        return None
    gone = asyncio.ensure_future(scheme.wait_for_version(2**62, timeout=stay))
    while not (gone.done() or clock.words[_OVER]):
        if clock.words[_REST]:
            await asyncio.sleep(0.2)
            continue
        # The loop has no turn during these forwards, whose updates nobody answers meanwhile.
        ends = time.monotonic() + 0.5
        for _ in range(chance.randrange(200)):
            if time.monotonic() < ends:
                watch.look()
        await asyncio.sleep(0)
        if chance.random() < 0.01:
            watch.keep(chance.randrange(3))
    if stay == 3600 and not gone.done():
        await asyncio.wait([gone], timeout=20)
        watch.count["silent"] += not gone.done()
    gone.cancel()
    await asyncio.wait([gone])
    if not gone.cancelled():
        gone.exception()
    watch.kept.clear()
    return watch.count


class Runs:
    """An async scheme with blocking calls, on a loop that rests between calls."""

    def __init__(self, scheme: aiosync.WeightSyncScheme) -> None:
        self.scheme, self._runner = scheme, asyncio.Runner()

    @property
    def version(self) -> int:
        """Version of the scheme."""
        return self.scheme.version

    def connect(self) -> None:
        """Connect the scheme."""
        self._runner.run(self.scheme.connect())

    def send(self, weights: Any = None) -> aiosync.SendReport:
        """Send the weights of the scheme, or these."""
        return self._runner.run(_send(self.scheme, weights))

    def shutdown(self) -> None:
        """Close the scheme and its loop."""
        self._runner.run(self.scheme.aclose())
        self._runner.close()


async def _send(scheme: aiosync.WeightSyncScheme, weights: Any) -> aiosync.SendReport:
    return await scheme.send(weights)


def train(path: str, report: str, seed: float, seconds: float, churn: bool) -> None:
    """Run one trainer, until its time is over or it is killed."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    chance, clock = random.Random(seed), Clock(path)
    shape = (20, 2**16) if churn else chance.choice(SIZES)
    model, context = Stack(*shape), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "aiosync.sync"])
    on_loop = not churn and chance.random() < 0.3
    of: Any = aiosync if on_loop else aiosync.sync
    configured = of.SharedMemWeightSyncScheme(timeout=60)
    configured.init_on_sender(model_id="policy", model=model)
    scheme: Any = Runs(configured) if on_loop else configured
    model.fill(1.0)
    clock.words[_BEGUN] = 1
    scheme.connect()
    crew: dict[int, Any] = {}
    count: Counter[str] = Counter()

    def hire(idx: int) -> None:
        args = (configured, idx, shape, path, report, chance.random() * (0.3 if churn else 1))
        careless = not churn and chance.random() < 0.1
        target = work_on_loop if on_loop else work_carelessly if careless else work
        crew[idx] = context.Process(target=target, args=args, daemon=True)
        crew[idx].start()
        count["hired"] += 1

    def look_after() -> None:
        for idx, process in crew.items():
            if process.exitcode is not None:
                count["failed"] += process.exitcode not in (0, -signal.SIGKILL)
                hire(idx)

    armed, over, main = False, threading.Event(), threading.get_ident()

    def on_interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def interrupt() -> None:
        dice = random.Random(seed)
        while not over.wait(dice.uniform(0, 0.1)):
            signal.pthread_kill(main, signal.SIGINT)

    def send() -> None:
        nonlocal armed
        version = scheme.version + 1
        model.fill(float(version))
        clock.words[_BEGUN] = version
        count["sends"] += 1
        weights: dict[str, Any] | None = None
        if reorders and chance.random() < 0.2:
            weights = dict(sorted(model.state_dict().items(), key=lambda _: chance.random()))
            count["reordered"] += 1
        try:
            armed = True
            try:
                clock.words[_RETURNED] = scheme.send(weights).version
            except aiosync.PartialSyncError as exc:
                armed = False
                assert not any(isinstance(e, aiosync.AckTimeout) for e in exc.failed.values()), exc
            finally:
                armed = False
        except KeyboardInterrupt:
            count["interrupts"] += 1

    def fork() -> None:
        nonlocal armed
        count["forks"] += 1
        try:
            armed = True
            try:
                if not os.fork():
                    os._exit(0)
            finally:
                armed = False
        except KeyboardInterrupt:
            if os.getpid() != me:
                os._exit(0)
            count["interrupted forks"] += 1

    me = os.getpid()
    reorders, forks = (not churn and chance.random() < 0.5 for _ in range(2))
    signal.signal(signal.SIGINT, on_interrupt)
    if not (churn or on_loop) and chance.random() < 0.5:
        threading.Thread(target=interrupt, daemon=True).start()
    pauses, events = not churn and chance.random() < 0.5, 0.05 if churn else 0.002
    for idx in range(WORKERS):
        hire(idx)
    clock.words[_READY] = 1
    started = shown = time.monotonic()
    first: list[int] = []
    while (now := time.monotonic()) < started + seconds:
        send()
        if forks and chance.random() < 0.1:
            fork()
        if churn or chance.random() < (0.3 if pauses else 0.005):
            time.sleep(chance.uniform(0, 0.01))
        if chance.random() < events:
            idx, what = chance.choice(list(crew)), chance.random()
            if what < 0.1 and len(crew) < MOST and not churn:
                hire(len(crew))
            elif what < 0.5:
                crew[idx].kill()
                crew[idx].join()
            elif crew[idx].exitcode is None:
                # A send may wait for the answer of the stopped worker.
                tell(crew[idx].pid, signal.SIGSTOP)
                wake = (crew[idx].pid, signal.SIGCONT)
                threading.Timer(chance.uniform(0, 0.5), tell, wake).start()
        if count["sends"] % 20 == 0:
            look_after()
        if churn and now > shown + 10:
            shown = now
            figures = [sum(shared_memory().values()), len(os.listdir("/proc/self/fd"))]
            first = first or figures
            count["grew"] = figures[0] > 2 * first[0] or figures[1] > first[1] + 3 * MOST
            text = f"{count['hired']} hired, {count['sends']} sends; {figures[1]} descriptors"
            print(f"{now - started:.0f} s: {text}, {figures[0] >> 20} MiB of segments", flush=True)
    over.set()
    # From here on no process has anything to do.
    clock.words[_REST] = 1
    # Some workers have just come, and a busy machine lets them wait.
    for _ in range(5):
        time.sleep(1.0)
        pids = [os.getpid(), *(each.pid for each in crew.values() if each.exitcode is None)]
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(2.0)
        after = [cpu_seconds(pid) for pid in pids]
        count["spins"] = sum(b - a > 0.04 for a, b in zip(before, after, strict=True))
        if not count["spins"]:
            break
    nbytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    nbytes += 64 * shape[0] + 2 * mmap.PAGESIZE
    # Each worker may have been in a read of another version, and on its way to the next.
    count["too much memory"] += sum(shared_memory().values()) > (2 * len(crew) + 6) * nbytes
    scheme.shutdown()
    clock.words[_OVER] = 1
    for process in crew.values():
        process.join(60)
        count["failed"] += process.exitcode not in (0, -signal.SIGKILL, None)
    # The traceback of an interrupt may be part of a cycle.
    gc.collect()
    count["left"] += len(shared_memory())
    write(report, **count)


def rounds(seconds: float, seed: int, churn: bool, folder: str) -> Iterator[Counter[str]]:
    """Run trainers, one after the other; yield the findings of all of them so far."""
    chance, until = random.Random(seed), time.monotonic() + seconds
    context, total = multiprocessing.get_context("spawn"), Counter[str]()
    while time.monotonic() < until:
        total["trainers"] += 1
        path, report = f"{folder}/clock{total['trainers']}", f"{folder}/report{total['trainers']}"
        Path(path).write_bytes(bytes(4096))
        Path(report).touch()
        clock, length = Clock(path), chance.uniform(5, 25)
        length = seconds if churn else min(length, max(3.0, until - time.monotonic()))
        args = (path, report, chance.random(), length, churn)
        trainer = context.Process(target=train, args=args)
        trainer.start()
        while not clock.words[_READY] and trainer.is_alive():
            time.sleep(0.01)
        end = time.monotonic() + length
        if killed := not churn and chance.random() < 0.4:
            end -= chance.uniform(0, length)
        while not churn and time.monotonic() < end:
            time.sleep(max(0.0, min(chance.uniform(0, 3), end - time.monotonic())))
            tell(trainer.pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.7 or time.monotonic() < end:
                tell(trainer.pid, signal.SIGCONT)
            total["trainers stopped"] += 1
        if not killed:
            tell(trainer.pid, signal.SIGCONT)
            trainer.join(length + 120)
        total["trainers killed"] += killed
        if not killed and trainer.exitcode is None:
            total["hung"] += 1
            # The trainer then prints where it hangs.
            tell(trainer.pid, signal.SIGUSR1)
            time.sleep(1.0)
        trainer.kill()
        trainer.join()
        total["failed"] += trainer.exitcode not in (0, -signal.SIGKILL)
        clock.words[_OVER] = 1
        pids = [json.loads(x)["pid"] for x in Path(report).read_text().splitlines() if "pid" in x]
        for pid in pids:
            tell(pid, signal.SIGCONT)
        patience = time.monotonic() + 30
        while any(map(is_alive, pids)) and time.monotonic() < patience:
            time.sleep(0.05)
        for pid in filter(is_alive, pids):
            total["hung"] += 1
            tell(pid, signal.SIGKILL)
        for line in Path(report).read_text().splitlines():
            for key, value in json.loads(line).items():
                total[key] = max(total[key], value) if "max" in key else total[key] + value
        del total["pid"]
        yield total


# -- many workers --------------------------------------------------------------------------------


def attend(scheme: Any, idx: int, path: str) -> None:
    """Run one of many workers, which reports the version that a forward found when it is asked."""
    torch.set_num_threads(1)

    async def main() -> None:
        clock, model = Clock(path), nn.Linear(4, 2)
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        await scheme.connect(timeout=120)
        while not clock.words[_OVER]:
            if clock.words[_LOOK] and not clock.words[_SEEN + idx]:
                clock.words[_SEEN + idx] = int(model(torch.zeros(4))[0])
            await asyncio.sleep(1.0)
        await scheme.aclose()

    asyncio.run(main())


async def crowd(num_workers: int, path: str) -> Counter[str]:
    """Connect many workers, send 200 times, and kill one."""
    clock, model, total = Clock(path), nn.Linear(4, 2), Counter[str]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "aiosync.sync"])
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=60)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=num_workers)
    before = len(os.listdir("/proc/self/fd"))
    crew = [
        context.Process(target=attend, args=(scheme, idx, path), daemon=True)
        for idx in range(num_workers)
    ]
    started, processes = time.monotonic(), len(os.listdir("/proc/self/fd"))
    for process in crew:
        process.start()
    # These descriptors are multiprocessing's own.
    processes = len(os.listdir("/proc/self/fd")) - processes
    await scheme.connect(timeout=300)
    print(f"{num_workers} workers came in {time.monotonic() - started:.1f} s")
    took = []
    for _ in range(200):
        with torch.no_grad():
            model.bias.fill_(float(scheme.version + 1))
            model.weight.zero_()
        begun = time.perf_counter()
        report = await scheme.send()
        took.append((time.perf_counter() - begun) * 1e6)
        total["failed"] += report.acked != set(range(num_workers))
        await asyncio.sleep(0.02)
    took.sort()
    descriptors = (len(os.listdir("/proc/self/fd")) - before - processes) / num_workers
    print("a send: {:.0f} / {:.0f} / {:.0f} us (p10 p50 p90)".format(*took[20:181:80]))
    print(f"{descriptors:.2f} descriptors and {len(shared_memory())} files of shared memory")
    await asyncio.sleep(2.0)
    total["old"] += sum(version != scheme.version for version in scheme.worker_versions.values())
    clock.words[_LOOK] = 1
    await asyncio.sleep(3.0)
    seen = [clock.words[_SEEN + idx] for idx in range(num_workers)]
    total["old"] += sum(version != scheme.version for version in seen)
    crew[7].kill()
    crew[7].join()
    await asyncio.sleep(0.1)
    try:
        report = await scheme.send()
        total["silent"] += set(report.lost) != {7}
    except aiosync.PartialSyncError as exc:
        total["silent"] += set(exc.failed) != {7} or len(exc.acked) != num_workers - 1
    await scheme.aclose()
    clock.words[_OVER] = 1
    for process in crew:
        process.join(60)
        total["hung"] += process.exitcode is None
    total["left"] += len(shared_memory())
    return total


def main() -> int:
    """Run the stress test; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--churn", action="store_true", help="one trainer, workers that go soon")
    parser.add_argument("--workers", type=int, default=0, help="at most 500, for 200 sends")
    args = parser.parse_args()
    there, total = set(os.listdir("/dev/shm")), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        if args.workers:
            path = f"{folder}/clock"
            Path(path).write_bytes(bytes(4096))
            total = asyncio.run(crowd(args.workers, path))
        else:
            for total in rounds(args.seconds, args.seed, args.churn, folder):
                print(dict(total), flush=True)
    total["left"] += sum("aiosync" in name for name in set(os.listdir("/dev/shm")) - there)
    bad = {key: total[key] for key in BAD if total[key]}
    print(f"bad: {bad or 'nothing'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

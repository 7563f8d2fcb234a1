"""Sends through shared memory without pause, beside everything that may go wrong.

``python -m tests.bench.stress_publishing --seconds 300`` starts one trainer after the other, each
with workers that compute in one or two threads, some with alarms that raise at any moment. Workers
are killed, stopped and replaced at random, and so is the trainer. Every parameter of version v
holds the number v, and the trainer writes down which version's send has returned: a forward must
find one number everywhere, and none that is older than what was written down before it began.

Exits with 1 if any forward did, if a process is left that should have ended, or one hangs.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aiosync
import aiosync.sync

WORKERS = 8
SIZES = (2, 20, 200, 2000)
_CLOCK = 0  # the word that the trainer writes


class Stack(nn.Module):
    """Parameters and buffers that hold one number; a forward says which numbers it found."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for number in range(size):
            if number % 5 == 4:
                self.register_buffer(f"t{number}", torch.zeros(8))
            else:
                setattr(self, f"t{number}", nn.Parameter(torch.zeros(64)))

    def fill(self, value: float) -> None:
        """What an optimizer's step does."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)

    def forward(self) -> set[float]:
        return {float(t.detach()[-1]) for t in (*self.parameters(), *self.buffers())}


class Clock:
    """The version whose send returned last, in memory that all processes share."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        self.words = memoryview(self._map).cast("Q")


class Alarm(Exception):
    """Of the timer."""


class Watch:
    """What the forwards of one worker found."""

    def __init__(self) -> None:
        self.forwards = self.mixed = self.old = self.beside = self.alarms = self.refused = 0
        self.open = 0  # threads inside a forward

    _lock = threading.Lock()

    def look(self, model: nn.Module, clock: Clock) -> None:
        """Compute once."""
        with self._lock:
            alone, before = self.open == 0, clock.words[_CLOCK]
            self.open += 1
        try:
            seen = model()
        except aiosync.ApplyError:
            self.refused += 1
            return
        finally:
            with self._lock:
                self.open -= 1
        self.forwards += 1
        self.mixed += len(seen) != 1
        if min(seen) < before:
            # Where another forward was open, this one may have joined it.
            if alone:
                self.old += 1
            else:
                self.beside += 1


def work(scheme: Any, idx: int, size: int, path: str, report: str, seed: int) -> None:
    """One worker: computes until its trainer goes."""
    torch.set_num_threads(1)
    chance, clock, model, watch = random.Random(seed), Clock(path), Stack(size), Watch()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    try:
        scheme.connect(timeout=20)
    except aiosync.AiosyncError:  # its trainer went before
        scheme.shutdown()
        return
    gone = threading.Event()

    def wait() -> None:
        with contextlib.suppress(aiosync.AiosyncError):
            scheme.wait_for_version(2**62, timeout=3600)
        gone.set()

    def compute() -> None:
        while not gone.is_set():
            watch.look(model, clock)

    threads = [threading.Thread(target=wait)]
    if chance.random() < 0.25:
        threads.append(threading.Thread(target=compute))
    for thread in threads:
        thread.start()
    armed, alarms = False, chance.random() < 0.5

    def ring(*_: Any) -> None:
        if armed:
            raise Alarm

    signal.signal(signal.SIGALRM, ring)
    while not gone.is_set():
        try:
            if alarms:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-3))
            watch.look(model, clock)
            armed = False
        except Alarm:
            armed = False
            watch.alarms += 1
        if chance.random() < 0.001:
            time.sleep(chance.uniform(0, 0.05))  # an idle worker follows, too
    for thread in threads:
        thread.join()
    with open(report, "a") as file:
        file.write(json.dumps({**vars(watch), "threads": len(threads)}) + "\n")
    scheme.shutdown()


def train(path: str, report: str, seed: int, seconds: float) -> None:
    """One trainer, until its time is over or it is killed."""
    torch.set_num_threads(1)
    chance, clock = random.Random(seed), Clock(path)
    size = chance.choice(SIZES)
    model, context = Stack(size), multiprocessing.get_context("forkserver")
    scheme = aiosync.sync.SharedMemWeightSyncScheme(timeout=60)
    scheme.init_on_sender(model_id="policy", model=model)
    scheme.connect()
    crew: dict[int, Any] = {}

    def hire(idx: int) -> None:
        args = (scheme, idx, size, path, report, chance.random())
        crew[idx] = context.Process(target=work, args=args, daemon=True)
        crew[idx].start()

    for idx in range(WORKERS):
        hire(idx)
    until, sends, stopped = time.monotonic() + seconds, 0, dict[int, float]()
    while time.monotonic() < until:
        version = scheme.version + 1
        model.fill(float(version))
        try:
            report_of = scheme.send()
        except aiosync.PartialSyncError as exc:
            assert all(not isinstance(e, aiosync.AckTimeout) for e in exc.failed.values()), exc
            version = exc.version
        else:
            version = report_of.version
            clock.words[_CLOCK] = version
        sends += 1
        if chance.random() < 0.01:
            time.sleep(chance.uniform(0, 0.02))
        if chance.random() < 0.002:
            idx = chance.choice(list(crew))
            if chance.random() < 0.5 and idx not in stopped:
                os.kill(crew[idx].pid, signal.SIGKILL)
                crew[idx].join()
                hire(idx)
            elif idx not in stopped:
                os.kill(crew[idx].pid, signal.SIGSTOP)
                stopped[idx] = time.monotonic() + chance.uniform(0, 0.5)
        for idx, when in list(stopped.items()):
            if time.monotonic() > when:
                os.kill(crew[idx].pid, signal.SIGCONT)
                del stopped[idx]
    for idx in stopped:
        os.kill(crew[idx].pid, signal.SIGCONT)
    scheme.shutdown()
    for process in crew.values():
        process.join(60)
        if process.exitcode is None:
            process.kill()
            with open(report, "a") as file:
                file.write(json.dumps({"hung": 1}) + "\n")
    with open(report, "a") as file:
        file.write(json.dumps({"sends": sends, "size": size}) + "\n")


def main() -> int:
    """Run trainers, one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance, until, rounds = random.Random(args.seed), time.monotonic() + args.seconds, 0
    context = multiprocessing.get_context("spawn")
    total: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            rounds += 1
            path, report = f"{folder}/clock{rounds}", f"{folder}/report{rounds}"
            Path(path).write_bytes(bytes(4096))
            Path(report).touch()
            length = min(chance.uniform(5, 25), max(3.0, until - time.monotonic()))
            trainer = context.Process(target=train, args=(path, report, chance.random(), length))
            trainer.start()
            killed = chance.random() < 0.3
            trainer.join(length * 0.7 if killed else length + 120)
            if trainer.exitcode is None:
                total["trainers killed"] = total.get("trainers killed", 0) + killed
                total["hung"] = total.get("hung", 0) + (not killed)
                trainer.kill()
                trainer.join()
                time.sleep(3)  # workers see it, and say what they found
            elif trainer.exitcode:
                total["failed"] = total.get("failed", 0) + 1
            for line in Path(report).read_text().splitlines():
                for key, value in json.loads(line).items():
                    if key not in ("size", "threads", "open"):
                        total[key] = total.get(key, 0) + value
            print(f"{rounds} trainers: {total}", flush=True)
    left = [each for each in os.listdir("/dev/shm") if "aiosync" in each]
    bad = {key: total.get(key, 0) for key in ("mixed", "old", "hung", "failed", "refused")}
    print(f"bad: {bad}; left in /dev/shm: {left}")
    return int(any(bad.values()) or bool(left))


if __name__ == "__main__":
    sys.exit(main())

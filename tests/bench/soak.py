"""Faults at random for an hour: memory, descriptors, tasks and threads have to stay as they are.

``python -m tests.bench.soak --minutes 60 --out soak.jsonl`` runs three trainers, each with three
workers, in processes of their own: through shared memory, over TCP, and through a weight server
that has a store. Each trainer sends a small model 20 times a second, and one of 4 MiB every two
seconds. Workers are killed, stopped, closed and started anew, links are cut, reset and stalled,
sends are cancelled and updates refused. In the first quarter trainers and the server are killed
as well. The first worker of each trainer lives as long as the run: only its links are cut.

Every value of a version is one number, which grows from version to version and from trainer to
trainer. The program prints a line for each forward that is mixed or that went back, for each call
or process that is stuck, for each error that no fault explains, for each worker that lacks the
newest version once the faults have stopped, and for all that is left over. It exits with 1 then,
or if a process has grown: see :func:`judge`.

``--from soak.jsonl --plot docs/benchmarks/soak.svg`` judges and draws a run again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from aiosync.testing import FaultProxy, LeakError, assert_no_leaks
from tests.bench.soak_processes import MODELS, PATIENCE, Line, Role, Server, Trainer, Worker, begin
from tests.bench.stress_publishing import shared_memory, tell

TRANSPORTS, WORKERS = ("shared memory", "TCP", "weight server"), 3
SERIES = {"memory": "MiB", "descriptors": "descriptors", "tasks": "tasks", "threads": "threads"}
# A process may grow by this share, and by this much besides.
SLACK = {"memory": (0.1, 8.0), "descriptors": (0.0, 2), "tasks": (0.0, 2), "threads": (0.0, 2)}


class Member:
    """A process of the soak, as the script sees it."""

    def __init__(self, soak: Soak, name: str, role: type[Role], *args: Any) -> None:
        self.soak, self.name, self.is_ending = soak, name, False
        self.report: tuple[int, dict[str, float], Counter[str]] = (0, {}, Counter())
        self._moved_at = time.monotonic()
        self._told: dict[str, asyncio.Future[Any]] = defaultdict(asyncio.Future)
        mine, theirs = soak.context.Pipe()
        self.process = soak.context.Process(target=begin, args=(role, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.line = Line(mine, self._heard)

    def _heard(self, message: Any) -> None:
        match message:
            case ("violation", text):
                self.soak.violation(f"{text} ({self.name})")
            case (kind, value) if not self._told[kind].done():
                self._told[kind].set_result(value)

    async def told(self, kind: str) -> Any:
        """Wait for a message of the process; None if there is none in time."""
        for _ in range(int(2 * PATIENCE / 0.02)):
            if self._told[kind].done():
                return self._told.pop(kind).result()
            if self.is_ending or not self.process.is_alive():
                return None
            await asyncio.sleep(0.02)
        self.soak.violation(f"stuck: no {kind!r} of {self.name}")
        return None

    async def ask(self) -> bool:
        """Have the process report; return False if it has ended."""
        self.line.send("report")
        answer = await self.told("answer")
        if answer is not None:
            self._check_progress(answer[1])
            self.report = answer
        elif not self.is_ending and not self.process.is_alive():
            self.is_ending = True
            self.soak.violation(f"failed: {self.name} ended with {self.process.exitcode}")
        return answer is not None

    def _check_progress(self, values: dict[str, float]) -> None:
        """Note a process that has had no new version for long; a server reports none."""
        now = time.monotonic()
        if values != self.report[1] or not any(values.values()):
            self._moved_at = now
        elif now > self._moved_at + PATIENCE:
            self._moved_at = now
            self.soak.violation(f"stuck: {self.name} is still at {values}")

    async def end(self, *, by_kill: bool) -> None:
        """End the process, and wait until it is gone."""
        self.is_ending = True
        if by_kill:
            self.process.kill()
        else:
            self.line.send("close")
        until = time.monotonic() + PATIENCE
        while self.process.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self.process.is_alive():
            self.soak.violation(f"stuck: {self.name} does not close")
            self.process.kill()
            self.process.join()
        if not by_kill and self.process.exitcode:
            self.soak.violation(f"failed: {self.name} ended with {self.process.exitcode}")
        self.line.close()
        self.soak.total.update(self.report[2])
        self.process.close()


def held(pid: int, tasks: int) -> dict[str, float]:
    """Return what a process holds; memory is what no file and no other process has."""
    private = nbytes = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        what, _, rest = line.partition(":")
        if what == "Rss":
            private = 0
        elif what in {"Private_Clean", "Private_Dirty"}:
            private += int(rest.split()[0])
        elif what == "Anonymous":
            # A slot that no other process maps at the moment is private, but not anonymous.
            nbytes += 1024 * min(private, int(rest.split()[0]))
    return {
        "memory": nbytes / 2**20,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "tasks": tasks,
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


class Soak:
    """All processes, the proxies of their links, and the faults."""

    def __init__(self, seconds: float, seed: int, every: float, out: Any) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["tests.bench.soak_processes", "tests.bench.stress_publishing"]
        )
        self.total: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.violations = 0
        self._seconds, self._every, self._out = seconds, every, out
        self._chance, self._began = random.Random(seed), time.monotonic()
        self._members: dict[tuple[str, str], Member] = {}
        self._generations: Counter[str] = Counter()
        self._proxies: dict[tuple[str, str], FaultProxy] = {}
        self._sources: dict[str, dict[str, Any]] = {}
        self._store = ""
        self._write(seed=seed, seconds=seconds, every=every)

    def violation(self, text: str) -> None:
        """Print and count something that must not be."""
        self.violations += 1
        print(f"VIOLATION after {self._elapsed():.0f} s: {text}", flush=True)
        self._write(violation=text)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _write(self, **row: Any) -> None:
        print(json.dumps({"at": round(self._elapsed(), 1), **row}), file=self._out, flush=True)

    async def main(self) -> None:
        """Run everything, and check that nothing is left."""
        try:
            async with assert_no_leaks(grace=10), contextlib.AsyncExitStack() as stack:
                self._store = stack.enter_context(tempfile.TemporaryDirectory())
                for transport in TRANSPORTS[1:]:
                    for name in MODELS:
                        proxy = FaultProxy("tcp://127.0.0.1:1")
                        await stack.enter_async_context(proxy)
                        self._proxies[transport, name] = proxy
                await self._run()
        except LeakError as exc:
            self.violation(f"left over: {exc}")
        self._write(total=self.total, faults=self.faults, violations=self.violations)

    async def _run(self) -> None:
        await self._start_server()
        for transport in TRANSPORTS:
            await self._start_trainer(transport)
            for index in range(WORKERS):
                await self._start_worker(transport, index)
        self._began = time.monotonic()
        sampling = asyncio.ensure_future(self._sample())
        await self._make_faults()
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
        await self._settle()
        for kind in ("worker", "trainer", "server"):
            for key in [key for key in self._members if key[1].startswith(kind)]:
                await self._members.pop(key).end(by_kill=False)

    async def _start_server(self) -> None:
        self._generations["server"] += 1
        name = f"server {self._generations['server']}"
        member = Member(self, name, Server, "weight server", 0, {"store": self._store})
        self._members["server", "server"] = member
        url = await member.told("ready")
        for model in MODELS:
            self._proxies["weight server", model].upstream = url

    async def _start_trainer(self, transport: str) -> None:
        self._generations[transport] += 1
        generation = self._generations[transport]
        urls = {name: proxy.url for (of, name), proxy in self._proxies.items() if of == transport}
        args = (transport, generation, urls if transport == "weight server" else {})
        member = Member(self, f"{transport}, trainer {generation}", Trainer, *args)
        self._members[transport, "trainer"] = member
        told = await member.told("ready")
        self._sources[transport] = urls or told
        if transport == "TCP":
            for name, url in told.items():
                self._proxies[transport, name].upstream = url
        for (of, who), each in self._members.items():
            if of == transport == "shared memory" and who != "trainer":
                each.line.send("sources", told)

    async def _start_worker(self, transport: str, index: int) -> None:
        name = f"{transport}, worker {index}"
        member = Member(self, name, Worker, transport, index, {})
        self._members[transport, f"worker {index}"] = member
        member.line.send("sources", self._sources[transport])
        await member.told("ready")

    # -- faults --------------------------------------------------------------------------------

    async def _make_faults(self) -> None:
        """Make one fault after the other until the time is over."""
        kinds = [self._replace, self._replace, self._pause, self._cut, self._cut, self._spoil]
        # A process that is to be judged has to live through the second quarter.
        ends = [("server", "server")] * 2 + [(transport, "trainer") for transport in TRANSPORTS]
        self._chance.shuffle(ends)
        times = sorted(self._chance.uniform(0.03, 0.24) * self._seconds for _ in ends)
        while self._elapsed() < self._seconds:
            if times and self._elapsed() > times[0]:
                times.pop(0)
                await self._kill_elder(*ends.pop())
            else:
                await self._chance.choice(kinds)()
            await asyncio.sleep(self._chance.uniform(1, 5))

    def _note(self, fault: str, transport: str) -> None:
        self.faults[fault] += 1
        self._write(fault=fault, transport=transport)

    async def _kill_elder(self, transport: str, who: str) -> None:
        self._note(f"{who} killed", transport)
        await self._members.pop((transport, who)).end(by_kill=True)
        await (self._start_server() if who == "server" else self._start_trainer(transport))

    async def _replace(self) -> None:
        transport, index = self._chance.choice(TRANSPORTS), self._chance.randrange(1, WORKERS)
        by_kill = self._chance.random() < 0.5
        self._note("worker killed" if by_kill else "worker closed", transport)
        await self._members.pop((transport, f"worker {index}")).end(by_kill=by_kill)
        await self._start_worker(transport, index)

    async def _pause(self) -> None:
        transport, index = self._chance.choice(TRANSPORTS), self._chance.randrange(1, WORKERS)
        self._note("worker stopped", transport)
        pid = self._members[transport, f"worker {index}"].process.pid
        tell(pid, signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(1, 3))
        tell(pid, signal.SIGCONT)

    async def _cut(self) -> None:
        (transport, _), proxy = self._chance.choice([*self._proxies.items()])
        how = self._chance.choice(["cut", "reset", "stall"])
        self._note(f"link {how}", transport)
        getattr(proxy, how)()
        if how == "stall":
            await asyncio.sleep(self._chance.uniform(0.2, 3))
            proxy.resume()

    async def _spoil(self) -> None:
        transport = self._chance.choice(TRANSPORTS)
        fault = self._chance.choice(["cancel", "misfit"])
        self._note("send cancelled" if fault == "cancel" else "update refused", transport)
        self._members[transport, "trainer"].line.send(fault, self._chance.choice([*MODELS]))

    # -- samples -------------------------------------------------------------------------------

    async def _sample(self) -> None:
        minute = 1
        while True:
            members = [*self._members.items()]
            for (_, who), member in members:
                if await member.ask() and who not in {f"worker {i}" for i in range(1, WORKERS)}:
                    with contextlib.suppress(OSError, ValueError):
                        row = held(member.process.pid or 0, member.report[0])
                        self._write(name=member.name, **row)
            self._write(name="script", **held(os.getpid(), len(asyncio.all_tasks())))
            self._write(shm=len(os.listdir("/dev/shm")), segments=self._segments())
            if self._elapsed() > 60 * minute:
                minute += 1
                self._print_progress()
            await asyncio.sleep(self._every)

    def _segments(self) -> float:
        """Return the MiB of all segments of shared memory."""
        found: dict[int, int] = {}
        for each in self._members.values():
            with contextlib.suppress(OSError, ValueError):
                found |= shared_memory(each.process.pid or 0)
        return sum(found.values()) / 2**20

    def _print_progress(self) -> None:
        total = sum((each.report[2] for each in self._members.values()), self.total)
        print(
            f"{self._elapsed() / 60:5.1f} min: {total['sends']} sends, {total['forwards']} "
            f"forwards, {self.faults.total()} faults, {self.violations} violations",
            flush=True,
        )

    async def _settle(self) -> None:
        """Check that every worker gets the newest version, now that the faults have stopped."""
        for transport in TRANSPORTS:
            trainer = self._members[transport, "trainer"]
            trainer.line.send("quiet")
            final = await trainer.told("final")
            until = time.monotonic() + PATIENCE
            for index in range(WORKERS):
                worker = self._members[transport, f"worker {index}"]
                while await worker.ask() and worker.report[1] != final:
                    if time.monotonic() > until:
                        text = f"stuck: {worker.name} has {worker.report[1]}, not {final}"
                        self.violation(text)
                        break
                    await asyncio.sleep(0.05)
            await trainer.ask()


# -- judging and drawing ---------------------------------------------------------------------------


def judge(rows: list[dict[str, Any]]) -> int:
    """Print how much each process grew; return how many grew too much.

    The median of the second quarter of the time is compared with that of the last quarter.
    """
    seconds, grown = rows[0]["seconds"], 0
    for name, own in by_process(rows).items():
        early = [each for each in own if 0.25 <= each["at"] / seconds < 0.5]
        late = [each for each in own if each["at"] / seconds >= 0.75]
        if not early or not late:
            continue
        told = []
        for what, (share, more) in SLACK.items():
            before, after = (statistics.median(e[what] for e in part) for part in (early, late))
            is_flat = after - before <= share * before + more
            grown += not is_flat
            told.append(f"{what} {before:.4g} to {after:.4g}{'' if is_flat else ' NOT FLAT'}")
        print(f"{name}: {', '.join(told)}")
    return grown


def by_process(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of each process."""
    found = defaultdict(list)
    for row in rows:
        if "name" in row:
            found[row["name"]].append(row)
    return found


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the median of each minute, with one panel for each series. Needs matplotlib.

    A process that takes another's place has the same line. The script's own are not drawn.
    """
    import matplotlib as mpl

    mpl.use("svg")
    # With a fixed salt, the same picture has the same bytes.
    mpl.rcParams["svg.hashsalt"] = "aiosync"
    from matplotlib import pyplot

    colors = {"shared": "#1f5fbf", "TCP,": "#1a7f37", "weight": "#cf6a1b", "server": "#9a6700"}
    figure, axes = pyplot.subplots(
        4, 1, figsize=(7, 9), sharex=True, facecolor="#fbfbf8", layout="constrained"
    )
    for axis, (what, unit) in zip(axes, SERIES.items(), strict=True):
        for name, own in by_process(rows).items():
            if name == "script":
                continue
            minutes = defaultdict(list)
            for row in own:
                minutes[row["at"] // 60].append(row[what])
            points = [statistics.median(each) for each in minutes.values()]
            color = colors.get(name.split()[0], "#57606a")
            style = "--" if "worker" in name else "-"
            label = name.rstrip("0123456789 ")
            axis.plot([*minutes], points, style, color=color, linewidth=1, label=label)
        axis.set_facecolor("#fbfbf8")
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes")
    handles, labels = axes[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Run a soak or read one, judge it, and draw it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples")
    parser.add_argument("--out", metavar="FILE", default="soak.jsonl", help="for JSON lines")
    parser.add_argument("--from", dest="source", metavar="FILE", help="read a run, and run none")
    parser.add_argument("--plot", metavar="FILE", help="where to draw, as SVG")
    args = parser.parse_args()
    source = args.source or args.out
    if not args.source:
        torch.set_num_threads(1)
        with open(source, "w", encoding="utf-8") as out:
            asyncio.run(Soak(60 * args.minutes, args.seed, args.every, out).main())
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    grown = judge(rows)
    print(json.dumps(rows[-1]))
    if args.plot:
        draw(rows, args.plot)
    return int(bool(grown or rows[-1]["violations"]))


if __name__ == "__main__":
    sys.exit(main())

"""The simulated programs, and what has to be true after every step of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Awaitable
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import nn

import aiosync
from aiosync.server import WeightServer
from aiosync.testing.sim import Process, SimulationError, World, simulate
from aiosync.transports import striped_stream
from tests.sim.cancelling import CancelledAt
from tests.sim.plans import Plan

URL = "tcp://127.0.0.1:7000"
RELAY_URLS = (URL, "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
_TOKEN = b"a token of a simulated run"
_FAULT_SECONDS = 25.0
_CALM_SECONDS = 600.0
# A step takes a little time, and a call ends a few steps after its deadline.
_SLACK_SECONDS = 0.3
_CLOSE_SECONDS = 20.0
_PER_RUN = 1000


class Net(nn.Module):
    """A model whose elements all have the number of a version."""

    def __init__(self, floats: int, value: float) -> None:
        super().__init__()
        for name, count in (("a", floats), ("b", floats // 2), ("c", 1)):
            data = torch.full((count,), value)
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def forward(self) -> None:
        """Do nothing. The programs read the parameters themselves."""


def look(model: Net) -> dict[str, float]:
    """Return the value of each parameter; of one that mixes values, not a number."""
    found = {}
    for name, tensor in model.named_parameters():
        low, high = tensor.aminmax()
        found[name] = low.item() if low.equal(high) else float("nan")
    return found


class Worker:
    """A worker as the checks see it."""

    def __init__(self, idx: int, scheme: aiosync.TCPWeightSyncScheme, model: Net) -> None:
        self.idx = idx
        self.scheme = scheme
        self.model = model
        self.newest = (0, 0)
        self.seen = (0, 0)
        # The elements that its model had when it was last found to be right.
        self.right: list[torch.Tensor] = []
        # Tensors that it has kept of a few versions, and what they had.
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_unchanged(self) -> bool:
        """Return True if every element is as it was when the model was last found to be right."""
        model = self.model
        return bool(self.right) and all(map(torch.equal, self.right, (model.a, model.b, model.c)))


class Bed:
    """One simulated run: its processes, and what is true of them."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.random = Random(f"programs {plan.seed}")
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, Worker] = {}
        self.runs = 0
        self.epochs: dict[int, int] = {}
        # The values of the parameters at each version, by run and version.
        self.contents: dict[tuple[int, int], dict[str, float]] = {}
        # The newest version that each worker ever had.
        self.reached: dict[int, tuple[int, int]] = {}
        self.newest = (0, 0)
        # The scheme of which all have a copy, and the versions that reads of workers have to take.
        self.local = aiosync.SharedMemWeightSyncScheme(
            timeout=20.0, require=plan.require, apply="manual" if plan.manual else "auto"
        )
        self.promised: dict[int, tuple[int, int]] = {}
        # The versions that workers had when they left.
        self.left: dict[int, tuple[int, int]] = {}
        self.is_known = False
        self.calm = asyncio.Event()
        self.closing = asyncio.Event()
        self.stopped: dict[str, float] = {}
        self.leaving: dict[str, asyncio.Event] = {}
        self.down: set[str] = set()
        # The awaits in calls of a process after which the call is cancelled, by name.
        self.cancels: dict[str, int] = {}
        self.may_cancel = any(event.what == "cancel" for event in plan.events)
        world.checks.append(self.check)

    # -- invariants --------------------------------------------------------------------------------

    def check(self, process: Process) -> None:
        worker = self.workers.get(process.name)
        if worker is None:
            return
        version = worker.scheme.version
        if not version:
            return
        seen = (worker.scheme.epoch, version)
        if seen != worker.seen:
            worker.seen = seen
            self.look(worker, version)
        elif self.world.steps % 8 == 0 and not worker.is_unchanged():
            self.look(worker, version)

    def look(self, worker: Worker, version: int) -> None:
        """Check that a worker's model has one version, and no older one than before."""
        found, name = look(worker.model), f"worker {worker.idx}"
        run = int(max(found.values(), default=0.0)) // _PER_RUN
        wanted = self.contents.get((run, version))
        if wanted is None:
            raise SimulationError(f"{name} has version {version} of {found}, never sent")
        shift = 0.25 * worker.idx if self.plan.kind == "per worker" else 0.0
        if found != {each: value + shift for each, value in wanted.items()}:
            raise SimulationError(f"{name} at version {version} has {found}, not {wanted}")
        if (run, version) < worker.newest:
            raise SimulationError(f"{name} went back from {worker.newest} to {(run, version)}")
        epoch = self.epochs.setdefault(run, worker.scheme.epoch)
        if epoch != worker.scheme.epoch:
            raise SimulationError(f"{name} takes run {run} for another epoch")
        worker.newest = (run, version)
        worker.right = [tensor.detach().clone() for tensor in worker.model.parameters()]
        self.reached[worker.idx] = max(self.reached.get(worker.idx, (0, 0)), (run, version))

    async def bounded(self, what: str, call: Awaitable[Any], seconds: float) -> Any:
        """Await a call that has to end within so many seconds, however it ends."""
        world, name = self.world, what.partition(":")[0]
        began, stopped = world.now, self.stopped.get(name, 0.0)
        world.note(f"{what} begins")
        text = "ends"
        try:
            return await call
        except BaseException as exc:
            text = f"raises {type(exc).__name__}: {exc}"
            raise
        finally:
            took = world.now - began
            world.note(f"{what} {text}")
            stopped = self.stopped.get(name, 0.0) - stopped
            if took > seconds + stopped + _SLACK_SECONDS:
                world.fail(f"{what} took {took:.3f} s, not {seconds:g}")

    def cancelled(self, what: str, call: Awaitable[Any]) -> Awaitable[Any]:
        """Return a call that an event of the plan may cancel."""
        name = what.partition(":")[0]

        def is_due() -> bool:
            left = 0 if self.calm.is_set() else self.cancels.pop(name, 0)
            if left > 1:
                self.cancels[name] = left - 1
            return left == 1

        return CancelledAt(call, is_due) if self.may_cancel else call

    async def disturbed(self, what: str, call: Awaitable[Any], seconds: float) -> Any:
        """Await a call as :meth:`bounded` does, and sometimes cancel it. None if it was."""
        # Inside of wait_for(), which may lose a cancellation from outside.
        call = self.cancelled(what, call)
        if not self.calm.is_set() and self.random.random() < self.plan.cancels:
            patience = self.random.random() * self.random.choice([0.001, 0.05, 1])
            call = asyncio.wait_for(call, patience)
        try:
            return await self.bounded(what, call, seconds)
        except TimeoutError as exc:
            if isinstance(exc, aiosync.AiosyncError):
                raise
        return None

    async def close(self, name: str, scheme: aiosync.TCPWeightSyncScheme) -> None:
        """Close a scheme. Where that is cancelled, it is done again."""
        await self.disturbed(f"{name}: aclose", scheme.aclose(), _CLOSE_SECONDS)
        await self.bounded(f"{name}: aclose again", scheme.aclose(), _CLOSE_SECONDS)

    # -- programs ----------------------------------------------------------------------------------

    def scheme(self, url: str = URL, **options: Any) -> Any:
        plan = self.plan
        if plan.kind == "shared memory":
            return copy.copy(self.local)
        return aiosync.TCPWeightSyncScheme(
            url,
            token=_TOKEN if plan.token else None,
            chunk_nbytes=plan.chunk_nbytes,
            strict=plan.kind != "parts",
            per_worker_weights=plan.kind == "per worker",
            dial="both" if plan.server else "receiver",
            delta="always" if plan.kind == "deltas" else "off",
            streams=plan.streams,
            **options,
        )

    async def serve(self, number: int = 0) -> None:
        name, plan = f"relay {number}" if number else "server", self.plan
        token = _TOKEN if plan.token else None
        options: dict[str, Any] = {}
        if number:
            upstream = RELAY_URLS[number - 1]
            options = {"model_ids": ["policy"], "upstream": upstream, "upstream_token": token}
            options["streams"] = plan.streams
        while not self.closing.is_set():
            server = WeightServer(
                RELAY_URLS[number],
                token=token,
                chunk_nbytes=plan.chunk_nbytes,
                delta="always" if plan.kind == "deltas" else "off",
                **options,
            )
            async with server:
                await self.away(name)
            await self.pause(name)

    async def away(self, name: str) -> None:
        """Wait until a process is to leave in order, or everything is over."""
        leave = self.leaving[name] = asyncio.Event()
        tasks = {asyncio.ensure_future(each.wait()) for each in (leave, self.closing)}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def pause(self, name: str) -> None:
        if not self.closing.is_set():
            await asyncio.sleep(self.random.uniform(0.1, 1))

    def is_over(self, name: str) -> bool:
        return self.closing.is_set() or self.leaving[name].is_set()

    async def train(self) -> None:
        while not self.closing.is_set():
            self.leaving["trainer"] = asyncio.Event()
            self.runs += 1
            run, model = self.runs, Net(self.plan.floats, 0.0)
            stall = self.plan.stall_timeout
            scheme = self.scheme(
                timeout=20.0, reconnect=None, stall_timeout=stall, require=self.plan.require
            )
            self.fill(model, run, 1)
            num_workers = self.plan.workers if self.plan.kind == "shared memory" else None
            scheme.init_on_sender(model_id="policy", model=model, num_workers=num_workers)
            try:
                try:
                    await self.train_with(scheme, model, run)
                finally:
                    await self.close("trainer", scheme)
            except aiosync.AiosyncError as exc:
                self.world.note(f"trainer: {type(exc).__name__}: {exc}")
            await self.pause("trainer")

    def fill(
        self, model: Net, run: int, version: int, names: tuple[str, ...] = ("a", "b", "c")
    ) -> None:
        for name in names:
            model.get_parameter(name).fill_(run * _PER_RUN + version)
        self.contents[run, version] = look(model)

    def weights(self, model: Net, names: tuple[str, ...]) -> Any:
        state = model.state_dict()
        if self.plan.kind == "per worker":
            return {
                idx: {name: tensor + 0.25 * idx for name, tensor in state.items()}
                for idx in range(self.plan.workers)
            }
        if self.plan.kind == "parts":
            return {name: state[name] for name in names}
        return None

    async def train_with(self, scheme: aiosync.TCPWeightSyncScheme, model: Net, run: int) -> None:
        connected = False
        while not connected and not self.is_over("trainer"):
            with contextlib.suppress(aiosync.ConnectTimeout, aiosync.PartialSyncError):
                given = self.weights(model, ("a", "b", "c"))
                call = scheme.connect(weights=given, timeout=5.0)
                await self.disturbed("trainer: connect", call, 5.0)
                connected = scheme.synchronized_on_sender
        for _ in range(self.plan.sends):
            if self.calm.is_set() or self.is_over("trainer"):
                break
            await asyncio.sleep(self.random.choice([0, 0.001, 0.1, 3]) * self.random.random())
            if self.random.random() < 0.15:
                await self.wait(scheme)
            await self.send(scheme, model, run)
        tasks = [asyncio.ensure_future(self.calm.wait()), asyncio.ensure_future(self.away_now())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        while not self.is_over("trainer"):
            await self.send(scheme, model, run, last=True)
            if self.newest[0] == run:
                if self.plan.kind != "pull" or self.plan.server:
                    await self.reach(scheme)
                self.is_known = True
                # From here on every worker has to get this version, without another send.
                await self.away_now()
            await asyncio.sleep(0.5)

    async def wait(self, scheme: aiosync.TCPWeightSyncScheme) -> None:
        """Wait for workers in one of the ways in which a trainer can."""
        timeout = self.random.choice([0.01, 1, 5])
        call = self.random.choice(
            [
                lambda: scheme.wait_for_version(scheme.version, timeout=timeout),
                lambda: scheme.wait_staged(scheme.version, timeout=timeout),
                lambda: scheme.wait_lag_below(self.random.randint(1, 2), timeout=timeout),
                lambda: scheme.ready.wait(timeout=timeout),
            ]
        )
        with contextlib.suppress(aiosync.RecvTimeout, aiosync.PartialSyncError):
            await self.disturbed("trainer: wait", call(), timeout)

    async def reach(self, scheme: aiosync.TCPWeightSyncScheme) -> None:
        """Wait until the trainer knows that every subscriber has its newest version."""
        call = scheme.wait_for_version(self.newest[1], timeout=_CALM_SECONDS)
        try:
            await self.bounded("trainer: wait", call, _CALM_SECONDS)
        except aiosync.RecvTimeout as exc:
            self.world.fail(f"no more faults, and yet: {exc}")
        except aiosync.PartialSyncError as exc:
            self.world.note(f"trainer: {exc}")

    async def away_now(self) -> None:
        while not self.is_over("trainer"):
            await asyncio.sleep(1.0)

    async def send(
        self, scheme: aiosync.TCPWeightSyncScheme, model: Net, run: int, *, last: bool = False
    ) -> None:
        random, version = self.random, scheme.version + 1
        names = ("a", "b", "c")
        if self.plan.kind == "parts" and not last:
            names = tuple(random.sample(names, random.randint(1, 3)))
        self.fill(model, run, version, names)
        weights = self.weights(model, names)
        ids = None
        may_name = self.plan.kind in ("push", "deltas", "shared memory") and not self.plan.server
        if may_name and not last and random.random() < 0.2:
            ids = random.sample(range(self.plan.workers), random.randint(1, self.plan.workers))
        if self.plan.kind == "shared memory" and not last and random.random() < 0.2:
            # A worker that leaves at the moment of a send, without a read.
            self.leaving[f"worker {random.randrange(self.plan.workers)}"].set()
        timeout = 30.0 if last else random.choice([0.01, 0.2, 2, 20])
        what = f"trainer: send of version {version}"
        how = random.random()
        try:
            send = scheme.send_nowait if not last and how < 0.2 else scheme.send
            call = self.cancelled(what, send(weights, ids, timeout=timeout))
            if not last and 0.2 <= how < 0.4:
                patience = random.random() * random.choice([0.001, 0.05, 1])
                call = asyncio.wait_for(call, patience)
            report = await self.bounded(what, call, timeout)
        except TimeoutError as exc:
            if isinstance(exc, aiosync.AiosyncError):
                self.world.note(f"{what}: {exc}")
        except (aiosync.PartialSyncError, aiosync.ConfigError) as exc:
            self.world.note(f"{what}: {type(exc).__name__}: {exc}")
        else:
            self.acked(report, run, version, ids)
        if last and scheme.version == version:
            self.newest = (run, version)

    def acked(self, report: Any, run: int, version: int, ids: Any) -> None:
        """Check that a version is visible wherever a report says so."""
        if report.version != version:
            self.world.fail(f"send() of version {version} reported {report.version}")
        if self.plan.kind == "shared memory":
            # A read that begins has to take it, or the end of the worker.
            self.promised |= dict.fromkeys(report.acked, (run, version))
            for idx in report.acked & self.left.keys():
                self.check_promise(idx, self.left[idx])
        elif not self.plan.server:
            having = {idx for idx, has in self.reached.items() if has >= (run, version)}
            missing = report.acked - having if self.plan.named else set()
            if missing or len(report.acked) > len(having):
                text = f"version {version} of run {run} was acked by {set(report.acked)}"
                self.world.fail(f"{text}; the workers have {self.reached}")
        for idx in report.acked:
            if ids is not None and idx not in ids:
                self.world.fail(f"version {version} was acked by {idx}, which is none of {ids}")

    async def work(self, idx: int) -> None:
        name, plan = f"worker {idx}", self.plan
        while not self.closing.is_set():
            self.leaving[name] = asyncio.Event()
            model = Net(plan.floats, -1.0)
            scheme = self.scheme(
                RELAY_URLS[idx % (plan.relays + 1)],
                apply="manual" if plan.manual else "auto",
                timeout=20.0,
                reconnect=plan.reconnect,
                subscribe=plan.kind != "pull",
            )
            scheme.init_on_receiver(
                model_id="policy",
                model=model,
                worker_idx=idx if plan.named else None,
                hooks=aiosync.SchemeHooks(applied=self.hook) if plan.hooks else None,
            )
            self.workers[name] = Worker(idx, scheme, model)
            for known in (self.promised, self.left):
                known.pop(idx, None)
            try:
                try:
                    call = scheme.connect(timeout=10.0)
                    await self.disturbed(f"{name}: connect", call, 10.0)
                    while scheme.synchronized_on_receiver and not self.is_over(name):
                        if self.random.random() < 0.05:
                            self.world.note(f"{name} has another model")
                            model = Net(plan.floats, -1.0)
                            self.workers[name].model = scheme.model = model
                        await self.act(name, scheme, model)
                finally:
                    await self.close(name, scheme)
                    worker = self.workers.pop(name, None)
                    if plan.kind == "shared memory" and worker is not None:
                        self.left[idx] = (self.runs, scheme.version)
                        self.check_promise(idx, self.left[idx])
            except aiosync.AiosyncError as exc:
                self.world.note(f"{name}: {type(exc).__name__}: {exc}")
            await self.pause(name)

    async def hook(self, epoch: int, version: int) -> None:
        """Take some time over a version that was applied, and refuse some."""
        await asyncio.sleep(self.random.random() * self.random.choice([0, 0.001, 0.5]))
        if not self.calm.is_set() and self.random.random() < 0.1:
            raise RuntimeError("of the hook")

    async def act(self, name: str, scheme: aiosync.TCPWeightSyncScheme, model: Net) -> None:
        random, timeout = self.random, self.random.choice([0, 0.1, 2.0, 5.0])
        choice = random.random()
        if self.plan.kind == "shared memory":
            self.read(self.workers[name])
        if self.plan.manual:
            await asyncio.sleep(timeout / 10)
            scheme.apply_pending()
        try:
            if choice < 0.2:
                await self.disturbed(f"{name}: receive", scheme.receive(timeout), timeout)
            elif choice < 0.4:
                call = scheme.wait_for_version(scheme.version + 1, timeout=timeout)
                await self.disturbed(f"{name}: wait", call, timeout)
            elif choice < 0.5 or self.plan.kind == "pull":
                await self.disturbed(f"{name}: pull", scheme.pull(timeout=timeout), timeout)
            elif choice < 0.6:
                reads = [self.read_long(name, scheme, model, timeout / 10)]
                if self.plan.kind == "shared memory" and random.random() < 0.5:
                    reads.append(self.read_long(name, scheme, model, timeout / 20))
                await asyncio.gather(*reads)
            elif choice < 0.7:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(scheme.receive(), timeout)
            elif self.plan.kind == "shared memory":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.leaving[name].wait(), timeout)
            else:
                await asyncio.sleep(timeout)
        except aiosync.RecvTimeout:
            await asyncio.sleep(0.01)

    async def read_long(self, name: str, scheme: Any, model: Net, seconds: float) -> None:
        """Check that a block sees one version, however long it takes."""
        async with scheme.reading():
            before = look(model)
            await asyncio.sleep(seconds)
            after = look(model)
            if after != before:
                self.world.fail(f"{name}: {before} became {after} in a read")

    def read(self, worker: Worker) -> None:
        """Have a forward take the version that the word names; keep some of its weights."""
        worker.model()
        for kept, before in worker.kept:
            if not kept.equal(before):
                self.world.fail(f"worker {worker.idx} kept {before[0]}, which became {kept[0]}")
        if self.random.random() < 0.3:
            kept = worker.model.get_parameter(self.random.choice("abc")).detach()
            worker.kept = [*worker.kept[-2:], (kept, kept.clone())]
        if worker.scheme.version:
            self.look(worker, worker.scheme.version)
        self.check_promise(worker.idx, worker.newest)

    def check_promise(self, idx: int, found: tuple[int, int]) -> None:
        """Check that a worker has what a report has said of it."""
        wanted = self.promised.get(idx)
        if wanted is not None and found < wanted:
            self.world.fail(f"worker {idx} has {found}, and acked {wanted}")

    # -- what goes wrong ---------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.leaving[name] = asyncio.Event()
        if name == "trainer":
            program = self.train()
        elif name == "server":
            program = self.serve()
        elif name.startswith("relay"):
            program = self.serve(int(name[6:]))
        else:
            program = self.work(int(name[7:]))
        process = self.processes[name] = self.world.start(name, program)
        # Links that are lost without a sign stay until keep-alive ends them, at whoever listens.
        is_worker, workers = name.startswith("worker"), self.plan.workers
        most = 3 if is_worker else 10 + 10 * workers
        process.most_sockets = most * self.plan.streams
        process.most_tasks = (8 if is_worker else 10 + 10 * workers) * self.plan.streams
        self.down.discard(name)

    async def restart(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.start(name)

    async def go_wrong(self) -> None:
        world, restarts = self.world, list[asyncio.Task[None]]()
        for event in self.plan.events:
            await asyncio.sleep(max(0.0, event.at - world.now))
            name, process = event.who, self.processes[event.who]
            if name in self.down:
                continue
            if event.what in ("kill", "lose"):
                world.kill(process, silently=event.what == "lose")
                self.down.add(name)
                self.workers.pop(name, None)
                restarts.append(asyncio.ensure_future(self.restart(name, event.seconds)))
            elif event.what == "cancel":
                self.cancels[name] = event.awaits
            elif event.what == "stop":
                self.stopped[name] = self.stopped.get(name, 0.0) + event.seconds
                world.stop(process, event.seconds)
            elif event.what == "part":
                others = [each for each in self.processes if each != name]
                other = self.random.choice(others)
                world.network.part(name, other)
            elif event.what == "reset":
                ends = world.network.connections()
                if ends:
                    world.network.reset(self.random.choice(ends))
            else:
                world.note(f"{name} is to leave")
                self.leaving[name].set()
        await asyncio.sleep(max(0.0, _FAULT_SECONDS - world.now))
        await asyncio.gather(*restarts)

    async def main(self) -> None:
        for name in self.names():
            self.start(name)
        await self.go_wrong()
        self.world.note("no more faults")
        self.world.network.calm()
        self.calm.set()
        began = self.world.now
        while not self.is_settled():
            if self.world.now - began > _CALM_SECONDS:
                raise SimulationError(
                    f"not every worker has version {self.newest} long after the last fault: "
                    f"{self.reached}"
                )
            await asyncio.sleep(0.5)
        self.closing.set()
        for name, process in self.processes.items():
            ended = asyncio.ensure_future(self.world.ended(process))
            await asyncio.wait({ended}, timeout=100)
            if not ended.done():
                raise SimulationError(f"{name} does not end")

    def names(self) -> list[str]:
        names = ["trainer", *(f"worker {idx}" for idx in range(self.plan.workers))]
        relays = (f"relay {number}" for number in range(1, self.plan.relays + 1))
        return [*names, "server", *relays] if self.plan.server else names

    def is_settled(self) -> bool:
        return self.is_known and all(
            name in self.workers and self.workers[name].newest >= self.newest
            for name in (f"worker {idx}" for idx in range(self.plan.workers))
        )


def run(plan: Plan, keep: list[World] | None = None) -> World:
    """Run a plan. Raises SimulationError if something is wrong."""

    async def main(world: World) -> World:
        if keep is not None:
            keep.append(world)
        await Bed(world, plan).main()
        return world

    # Updates are small here, and have to go over all connections of a link.
    stripe = Random(f"stripe {plan.seed}").choice([50, 700, 4000])
    with mock.patch.object(striped_stream, "STRIPE_NBYTES", stripe):
        return simulate(main, seed=plan.seed, weather=plan.weather, max_seconds=3600.0)

"""The guard between forwards and updates, and what depends on the thread that applies."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync.schemes.guard import Guard, Reading
from aiosync.tensors import FlatBuffer, Flattener
from tests.schemes import _harness as harness
from tests.schemes import _models as models


class _MeddledLock:
    """Runs ``meddle`` once, right after the lock was released for the first time."""

    def __init__(self, lock, meddle) -> None:
        self._lock = lock
        self._meddle = meddle

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *exc_info) -> None:
        self._lock.__exit__(*exc_info)
        meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()


def test_an_update_that_arrives_while_a_read_begins_waits_for_its_end() -> None:
    guard = Guard()
    applying, go_on = threading.Event(), threading.Event()

    def apply() -> None:
        applying.set()
        go_on.wait(10)

    def submit() -> None:
        guard.submit(apply)
        submitted.set()

    submitted = threading.Event()
    other = threading.Thread(target=submit)

    def meddle() -> None:
        other.start()
        while not applying.is_set() and not submitted.wait(0.01):
            pass

    guard._lock = _MeddledLock(guard._lock, meddle)
    guard.enter()
    try:
        assert not applying.is_set(), "an update is being applied inside a read"
    finally:
        go_on.set()
        guard.leave()
        other.join()
    assert applying.is_set()


def test_a_read_ends_on_whatever_thread_its_block_ends() -> None:
    """A thread pool steps a generator wherever there is room."""
    guard = Guard()
    applied: list[int] = []

    def stream():
        with Reading(guard):
            yield

    steps = stream()
    with ThreadPoolExecutor(1) as beginning, ThreadPoolExecutor(1) as ending:
        beginning.submit(next, steps).result()
        assert not guard.submit(lambda: applied.append(1))
        ending.submit(next, steps, None).result()
    assert applied == [1]
    assert not guard.reading_here
    assert not guard.tasks


def test_one_reading_object_may_be_in_use_several_times() -> None:
    guard = Guard()
    reading = Reading(guard)
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with reading, reading:
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with reading:
        assert guard.reading_here
    assert not guard.reading_here
    applied: list[int] = []
    assert not guard.submit(lambda: applied.append(1))
    go_on.set()
    thread.join()
    assert applied == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["tasks", "threads"])
async def test_reads_whose_forwards_run_in_other_threads_let_an_update_in(kind: str) -> None:
    guard, model = Guard(), torch.nn.Identity()
    guard.install(model)
    stop = threading.Event()
    longest = [0.0]
    pool = ThreadPoolExecutor(8)

    def forward() -> None:
        model(torch.zeros(1))
        time.sleep(0.01)

    async def task() -> None:
        while not stop.is_set():
            began = time.monotonic()
            async with Reading(guard):
                for _ in range(2):
                    await asyncio.get_running_loop().run_in_executor(pool, forward)
            longest[0] = max(longest[0], time.monotonic() - began)

    def block() -> None:
        while not stop.is_set():
            began = time.monotonic()
            with Reading(guard):
                for _ in range(2):
                    pool.submit(forward).result()
            longest[0] = max(longest[0], time.monotonic() - began)

    async def update() -> None:
        applied, loop = asyncio.Event(), asyncio.get_running_loop()
        if not guard.submit(lambda: loop.call_soon_threadsafe(applied.set)):
            guard.retry()
        async with asyncio.timeout(2.0):
            await applied.wait()

    read = task if kind == "tasks" else lambda: asyncio.to_thread(block)
    readers = [asyncio.ensure_future(read()) for _ in range(3)]
    try:
        for _ in range(5):
            await asyncio.sleep(0.05)
            await update()
    finally:
        stop.set()
        await asyncio.gather(*readers)
        await asyncio.to_thread(pool.shutdown)
    assert longest[0] < 1.0


def test_an_action_that_raises_leaves_the_guard_open() -> None:
    guard = Guard()
    applied = []

    def action() -> None:
        guard.submit(lambda: applied.append(1))  # arrives meanwhile
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        guard.exclusively(action, timeout=1.0)
    assert guard.exclusively(lambda: None, timeout=0.0)
    assert applied == [1]


def test_an_update_waits_for_the_last_of_several_readers() -> None:
    guard = Guard()
    applied = []
    guard.enter()
    guard.enter()
    assert not guard.submit(lambda: applied.append(1))
    guard.leave()
    assert not applied
    guard.leave()
    assert applied == [1]


def test_a_newer_update_replaces_the_one_that_waits() -> None:
    guard = Guard()
    applied = []
    guard.enter()
    guard.submit(lambda: applied.append(1))
    guard.submit(lambda: applied.append(2))
    guard.leave()
    assert applied == [2]
    assert not guard.withdraw()


def test_a_forward_that_raises_ends_its_read() -> None:
    guard = Guard()
    module = models.linear()
    guard.install(module)
    with pytest.raises(RuntimeError):
        module(torch.zeros(5))
    assert not guard.reading_here
    applied = []
    assert guard.submit(lambda: applied.append(1))
    guard.uninstall()


class _Interrupting(torch.nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_a_forward_ended_by_ctrl_c_does_not_block_updates_for_ever() -> None:
    guard = Guard()
    module = _Interrupting()
    guard.install(module)
    with pytest.raises(KeyboardInterrupt):
        module(1)
    with pytest.raises(KeyboardInterrupt):
        module(1)  # the next forward of the thread notices what the one before left
    guard.uninstall()
    with pytest.raises(KeyboardInterrupt):
        module(1)
    guard.install(models.linear())
    applied = []
    guard.enter()
    guard.leave()
    guard.submit(lambda: applied.append(1))
    assert guard.exclusively(lambda: None, timeout=10.0)
    assert applied == [1]
    guard.uninstall()


def test_a_copied_module_is_not_guarded() -> None:
    guard = Guard()
    module = models.linear()
    guard.install(module)
    twin = copy.deepcopy(module)
    guard.enter()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (twin(torch.zeros(4)), done.set()))
    guard.submit(lambda: None)
    thread.start()
    assert done.wait(10)
    thread.join()
    guard.leave()
    guard.uninstall()


def test_a_copy_can_be_compiled_and_exported_as_a_whole() -> None:
    guard = Guard()
    module = models.linear()
    guard.install(module)
    twin = copy.deepcopy(module)
    guard.uninstall()
    given = torch.ones(1, 4)
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    assert torch.equal(compiled(given), module(given))
    exported = torch.export.export(twin, (given,), strict=True)
    assert torch.equal(exported.module()(given), module(given))


class _Model(nn.Module):
    """Calls itself, as models with a ``generate()`` do; notes what is not guarded."""

    config = SimpleNamespace(is_encoder_decoder=True)  # but it has no get_encoder()

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        self.unguarded = self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.unguarded += self.guard.submit(lambda: None)
        return x

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


class _Around(nn.Module):
    """As an adapter around a model: what generates is the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"model": model})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base["model"](x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.base["model"].generate(x)


class _EncoderDecoder(nn.Module):
    """Calls a part of itself before it calls itself."""

    config = SimpleNamespace(is_encoder_decoder=True)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.get_encoder()(x))


@pytest.mark.parametrize("kind", ["plain", "around", "compiled", "encoder"])
def test_what_generates_inside_of_a_wrapper_is_guarded(kind: str) -> None:
    guard = Guard()
    model = _Model(guard)
    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: model,
        "around": lambda: _Around(model),
        "compiled": lambda: torch.compile(model, backend="eager"),
        "encoder": lambda: _EncoderDecoder(model),
    }
    module = kinds[kind]()
    guard.install(module)
    module.generate(torch.zeros(4))
    assert (model.num_calls > 0, model.unguarded) == (True, 0)
    guard.uninstall()
    module.generate(torch.zeros(4))
    assert model.unguarded > 0


# -- updates applied by another thread than the loop's ------------------------------------------


class _Reader:
    """A thread that reads until it is told to stop; then it applies what waited."""

    def __init__(self, scheme: aiosync.WeightSyncScheme) -> None:
        self._scheme = scheme
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._inside.wait(10)

    def _run(self) -> None:
        with self._scheme.reading():
            self._inside.set()
            self._leave.wait(30)

    def end(self) -> None:
        self._leave.set()
        self._thread.join()


async def _staged_behind_a_reader(sender, receiver, model) -> tuple[_Reader, aiosync.SendHandle]:
    reader = _Reader(receiver)
    models.fill(model, 2.0)
    handle = sender.send_nowait()
    async with asyncio.timeout(harness.PATIENCE):
        while not receiver._receiver.has_staged:
            await asyncio.sleep(0)
    return reader, handle


@pytest.mark.asyncio
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_the_version_is_right_as_soon_as_the_weights_are(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        reader, handle = await _staged_behind_a_reader(sender, receiver, source)
        assert (receiver.version, receiver.lag) == (1, 1)
        assert models.filled(target, 1.0)
        reader.end()  # the loop does not run between here and the checks
        assert models.filled(target, 2.0)
        assert (receiver.version, receiver.lag) == (2, 0)
        await handle


@pytest.mark.asyncio
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_outcomes_of_two_threads_stay_in_order(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        reader, handle = await _staged_behind_a_reader(sender, receiver, source)
        runtime = receiver._receiver
        staged = copy.copy(runtime._staged)
        flattener = Flattener("tensordict")
        models.fill(source, 3.0)
        prepared = flattener.prepare(source)
        staged.version, staged.flat, staged.key = 3, FlatBuffer(staged.layout.nbytes), None
        staged.give_back = lambda: None
        flattener.copy_into(prepared, staged.flat)
        reader.end()  # version 2 is applied in that thread; the loop does not know yet
        runtime._stage(staged)  # version 3 arrives
        assert models.filled(target, 3.0)
        assert receiver.version == 3
        await handle
        assert receiver.version == 3
        assert runtime._current is staged


@pytest.mark.asyncio
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_closing_right_after_another_thread_applied(make) -> None:
    source, target = models.linear(), models.linear()
    models.fill(source, 1.0)
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        reader, handle = await _staged_behind_a_reader(sender, receiver, source)
        flat = receiver._receiver._staged.flat
        reader.end()
        receiver.abort()
        assert models.filled(target, 2.0)
        for parameter in target.parameters():
            assert not flat.address <= parameter.data_ptr() < flat.address + flat.nbytes
        assert (await handle).acked == {0}  # it says so before it goes


@pytest.mark.parametrize("kind", ["reading", "forward"])
@pytest.mark.asyncio
async def test_weights_are_not_changed_by_hand_inside_a_read(kind) -> None:
    target = _Inside()
    async with harness.here(
        aiosync.SharedMemWeightSyncScheme(), target, sender={"model": _Inside()}
    ) as (_, receiver):

        def change() -> None:
            for inplace in (True, False):
                with pytest.raises(aiosync.LocalProtocolError, match="between two of them"):
                    receiver.apply_weights({"weight": torch.full((1,), 7.0)}, inplace=inplace)
            assert target.weight.item() == 1.0

        if kind == "forward":
            target(change)
        else:
            with receiver.reading():
                change()
        receiver.apply_weights({"weight": torch.full((1,), 7.0)})
        assert target.weight.item() == 7.0


class _Inside(torch.nn.Module):
    """Calls in its forward what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, call):
        return call()


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_nobody_waits_for_an_update_that_its_own_read_holds_back(asynchronous) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(
        aiosync.SharedMemWeightSyncScheme(), target, sender={"model": source}
    ) as (sender, receiver):
        async with contextlib.AsyncExitStack() as stack:
            if asynchronous:
                await stack.enter_async_context(receiver.reading())
            else:
                stack.enter_context(receiver.reading())
            assert (await receiver.receive(timeout=0)) is None
            assert (await receiver.wait_for_version(1)) == 1
            assert (await receiver.pull(timeout=harness.PATIENCE)) == 1  # there is nothing newer
            async with receiver.reading():
                pass  # a nested block ends nothing
            handle = sender.send_nowait()
            async with asyncio.timeout(harness.PATIENCE):
                for call in (
                    receiver.receive,
                    lambda: receiver.receive(timeout=harness.PATIENCE),
                    lambda: receiver.wait_for_version(2),
                    lambda: receiver.pull(min_version=2),
                    receiver.pull,
                ):
                    with pytest.raises(aiosync.LocalProtocolError, match="after the block"):
                        await call()
            assert (await receiver.receive(timeout=0)) is None
            with pytest.raises(aiosync.RecvTimeout):
                await receiver.wait_for_version(2, timeout=0)
        await handle
        update = await receiver.receive(timeout=harness.PATIENCE)
        assert update is not None
        assert update.version == 2


@pytest.mark.asyncio
async def test_another_task_waits_for_the_end_of_a_read() -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(
        aiosync.SharedMemWeightSyncScheme(), target, sender={"model": source}
    ) as (sender, receiver):
        async with receiver.reading():
            handle = sender.send_nowait()
            # One that was started inside of the block knows of it, but does not hold it.
            waiting = [
                asyncio.ensure_future(receiver.receive()),
                asyncio.ensure_future(receiver.wait_for_version(2)),
                asyncio.ensure_future(receiver.pull(min_version=2)),
            ]
            await receiver.wait_staged(2)
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in waiting)
        await asyncio.gather(handle, *waiting)


@pytest.mark.asyncio
async def test_a_read_that_another_task_ended_keeps_nobody_from_waiting() -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(
        aiosync.SharedMemWeightSyncScheme(), target, sender={"model": source}
    ) as (sender, receiver):
        reading = receiver.reading()
        await reading.__aenter__()
        await asyncio.create_task(reading.__aexit__(None, None, None))
        other = receiver.reading()
        await asyncio.create_task(other.__aenter__())
        handle = sender.send_nowait()
        waiting = asyncio.create_task(other.__aexit__(None, None, None))
        assert (await receiver.wait_for_version(2, timeout=harness.PATIENCE)) == 2
        await asyncio.gather(handle, waiting)

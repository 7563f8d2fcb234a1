"""The guard under threads, interrupts and copies; the torn-read tests are in test_portal.py."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

import aiosync
from aiosync.schemes.guard import Guard, Reading
from tests.sync import _tools as tools


class Probe(torch.nn.Module):
    """Runs ``inside`` in its forward pass."""

    def __init__(self, inside: Any = None) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Any = None) -> Any:
        if self.inside is not None:
            self.inside()
        return x


class Count:
    """An apply that counts its runs, and the forwards that it ran into."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.runs = 0
        self.threads: list[int] = []

    def __call__(self) -> None:
        self.runs += 1
        self.threads.append(threading.get_ident())


def _guarded(module: torch.nn.Module) -> Guard:
    guard = Guard()
    guard.install(module)
    return guard


# -- forwards ---------------------------------------------------------------------------------


def test_an_update_during_a_forward_is_applied_by_its_thread() -> None:
    module = Probe(lambda: inside())
    guard = _guarded(module)
    apply = Count(guard)

    def inside() -> None:
        thread = tools.in_thread(lambda: guard.submit(apply))
        thread.join()
        assert apply.runs == 0

    module()
    assert apply.threads == [threading.get_ident()]


def test_a_nested_forward_does_not_end_the_outer_one() -> None:
    depth = 0
    module = Probe(lambda: inside())
    guard = _guarded(module)
    apply = Count(guard)

    def inside() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            guard.submit(apply)
        if depth < 4:
            module()  # recursion
        assert apply.runs == 0
        assert guard.reading_here

    module()
    assert (depth, apply.runs) == (4, 1)
    assert not guard.reading_here


def test_an_update_waits_for_forwards_of_every_thread() -> None:
    barrier, leave = threading.Barrier(4), [threading.Event() for _ in range(3)]
    number = iter(range(3))

    def inside() -> None:
        mine = next(number)
        barrier.wait()
        leave[mine].wait(tools.PATIENCE)

    module = Probe(inside)
    guard = _guarded(module)
    apply = Count(guard)
    threads = [tools.in_thread(module) for _ in range(3)]
    barrier.wait()
    assert not guard.submit(apply)
    for event in leave:
        assert apply.runs == 0
        assert guard.retry()
        event.set()
        tools.until(lambda: sum(thread.is_alive() for thread in threads) < 3)
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert apply.runs == 1
    assert apply.threads[0] in {thread.ident for thread in threads}


def test_an_exception_in_a_nested_forward_ends_only_that_one() -> None:
    def inside() -> None:
        if guard_depth():
            return
        with pytest.raises(ZeroDivisionError):
            failing()
        guard.submit(apply)
        assert apply.runs == 0

    def guard_depth() -> bool:
        return len(next(iter(guard._open.values()))) > 1

    def fail() -> None:
        raise ZeroDivisionError

    module, failing = Probe(inside), Probe(fail)
    guard = _guarded(module)
    handles = failing.register_forward_pre_hook(lambda *_: guard.enter())
    after = failing.register_forward_hook(lambda *_: guard.leave(), always_call=True)
    apply = Count(guard)
    module()
    assert apply.runs == 1
    handles.remove()
    after.remove()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_hooks_do_not_see_blocks_nothing(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind

    module = Probe(fail)
    guard = _guarded(module)
    for use in ("submit", "retry", "reading", "exclusively", "enter"):
        apply = Count(guard)
        with pytest.raises(kind):
            module()
        if use == "submit":
            assert guard.submit(apply)
        elif use == "retry":
            module.inside = lambda apply=apply: (guard.submit(apply), fail())
            with pytest.raises(kind):
                module()
            assert apply.runs == 0
            assert not guard.retry()
            module.inside = fail
        elif use == "reading":
            assert not guard.reading_here
            assert guard.submit(apply)
        elif use == "exclusively":
            assert guard.exclusively(apply, timeout=0.0)
        else:
            guard.enter()
            guard.submit(apply)
            guard.leave()
        assert apply.runs == 1, use


def test_a_thread_that_died_in_a_forward_blocks_nothing() -> None:
    def fail() -> None:
        raise SystemExit

    module = Probe(fail)
    guard = _guarded(module)

    def run() -> None:
        with contextlib.suppress(SystemExit):
            module()

    tools.in_thread(run).join()
    apply = Count(guard)
    assert guard.submit(apply)
    assert apply.runs == 1


def test_an_interrupted_update_is_applied_once_more() -> None:
    guard = Guard()
    runs = 0

    def apply() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.submit(apply)
    assert not guard.retry()
    assert runs == 2
    assert guard.exclusively(lambda: None, timeout=0.0)


def test_an_interrupted_action_is_not() -> None:
    guard = Guard()

    def action() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.exclusively(action, timeout=0.0)
    apply = Count(guard)
    assert guard.submit(apply)
    assert apply.runs == 1


def test_a_forward_inside_an_update_does_not_wait_for_it() -> None:
    """``set_extra_state()`` may call the model."""
    module = Probe()
    guard = _guarded(module)
    ran = []
    assert guard.submit(lambda: ran.append(module(1)))
    assert ran == [1]
    assert guard.submit(lambda: None)


def test_nobody_inside_keeps_exclusively_waiting() -> None:
    guard = Guard()
    guard.enter()
    assert guard.exclusively(lambda: None, timeout=0.0)  # its own reads do not count
    refused: list[bool] = []
    thread = tools.in_thread(lambda: refused.append(guard.exclusively(lambda: None, timeout=0.05)))
    thread.join()
    assert refused == [False]
    guard.leave()


def test_a_signal_handler_may_use_the_guard_at_any_point() -> None:
    """It runs between two byte codes of a method that holds the lock."""
    module = Probe()
    guard = _guarded(module)
    count, ending = 0, False

    def handler(*_: Any) -> None:
        nonlocal count
        count += 1
        guard.withdraw()
        guard.retry()
        if not ending:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-4))

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        deadline = time.monotonic() + tools.PATIENCE
        while count < 500 and time.monotonic() < deadline:
            module()
            guard.submit(lambda: None)
    finally:
        ending = True  # a signal that is pending must not start the timer again
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the old handler ends a test that hangs
        signal.signal(signal.SIGALRM, old)
    assert count >= 500
    assert guard.exclusively(lambda: None, timeout=1.0)


@pytest.mark.slow
def test_interrupts_at_any_point_block_nothing() -> None:
    """Each Ctrl-C lands somewhere in a hook, in the forward, or in an update."""
    module = Probe()
    guard = _guarded(module)
    caught = 0
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        deadline = time.monotonic() + tools.PATIENCE
        while caught < 500 and time.monotonic() < deadline:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
                while True:
                    guard.submit(lambda: None)
                    module()
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert caught >= 500
    apply = Count(guard)
    assert guard.submit(apply)
    assert apply.runs == 1
    assert guard.exclusively(lambda: None, timeout=0.0)
    assert guard._open == {}


# -- waiting for one another ------------------------------------------------------------------


def test_a_reader_may_wait_for_the_forward_of_another_thread() -> None:
    """Batches in a pool, inside one ``reading()`` block: letting an update go first would hang."""
    module = Probe()
    guard = _guarded(module)
    apply = Count(guard)
    with Reading(guard):
        guard.submit(apply)
        for _ in range(3):
            thread = tools.in_thread(module)
            thread.join(tools.PATIENCE)
            assert not thread.is_alive()
        assert apply.runs == 0
    assert apply.runs == 1


def test_an_update_gets_its_turn_among_overlapping_forwards() -> None:
    over = threading.Event()
    turn = threading.Semaphore(2)

    def inside() -> None:
        turn.release()  # the other one starts before this one ends
        turn.acquire()

    module = Probe(inside)
    guard = _guarded(module)

    def forwards() -> None:
        while not over.is_set():
            module()

    threads = [tools.in_thread(forwards) for _ in range(3)]
    try:
        for _ in range(20):
            apply = Count(guard)
            guard.submit(apply)
            tools.until(lambda apply=apply: apply.runs == 1)
    finally:
        over.set()
        for thread in threads:
            thread.join(tools.PATIENCE)
            assert not thread.is_alive()


@pytest.mark.slow
def test_threads_neither_deadlock_nor_tear() -> None:
    deadline = time.monotonic() + 1.0
    guard = Guard()
    values = [0, 0]
    module = Probe(lambda: check())
    guard.install(module)
    torn: list[tuple[int, ...]] = []
    applied = 0
    crashes: list[BaseException] = []

    def check() -> None:
        first = values[0]
        for _ in range(random.randrange(20)):
            pass
        if values[1] != first:
            torn.append(tuple(values))

    def apply() -> None:
        nonlocal applied
        applied += 1
        values[0] += 1
        for _ in range(50):
            pass
        values[1] += 1

    def forwards() -> None:
        module()

    def reads() -> None:
        with Reading(guard):
            check()
            module()

    def submits() -> None:
        guard.submit(apply)

    def acts() -> None:
        guard.exclusively(apply, timeout=1.0)

    def withdraws() -> None:
        guard.withdraw()
        guard.retry()

    async def _tasks() -> None:
        async def one() -> None:
            async with Reading(guard):
                first = values[0]
                await asyncio.sleep(0)
                if values[1] != first:
                    torn.append(tuple(values))

        await asyncio.gather(*(one() for _ in range(5)))

    def tasks() -> None:
        asyncio.run(_tasks())

    def run(what: Any) -> None:
        try:
            while time.monotonic() < deadline:
                what()
        except BaseException as exc:  # noqa: BLE001 - checked below
            crashes.append(exc)

    kinds = [forwards, forwards, reads, reads, submits, acts, withdraws, tasks]
    threads = [tools.in_thread(lambda what=what: run(what)) for what in kinds]
    for thread in threads:
        thread.join(tools.PATIENCE)
        assert not thread.is_alive(), "a deadlock"
    assert torn == []
    assert crashes == []
    assert applied > 0
    assert guard.exclusively(lambda: None, timeout=0.0)


# -- reading() in coroutines ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_interleaved_tasks_see_one_version_each() -> None:
    guard = Guard()
    apply = Count(guard)
    events = [asyncio.Event() for _ in range(2)]

    async def read(number: int) -> None:
        async with Reading(guard):
            before = apply.runs
            await events[number].wait()
            assert apply.runs == before

    tasks = [asyncio.create_task(read(number)) for number in range(2)]
    for _ in range(2):  # a read begins after a turn of the loop
        await asyncio.sleep(0)
    assert not guard.submit(apply)
    events[0].set()
    await tasks[0]
    assert apply.runs == 0
    events[1].set()
    await tasks[1]
    assert apply.runs == 1


@pytest.mark.asyncio
async def test_a_new_task_lets_the_update_go_first() -> None:
    guard = Guard()
    apply = Count(guard)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with Reading(guard):
            entered.set()
            await leave.wait()

    async def second() -> int:
        async with Reading(guard):
            return apply.runs

    one = asyncio.create_task(first())
    await entered.wait()
    guard.submit(apply)
    two = asyncio.create_task(second())
    await asyncio.sleep(0)
    assert not two.done()
    leave.set()
    assert await two == 1
    await one


@pytest.mark.asyncio
async def test_nested_reads_of_one_task_do_not_wait_for_themselves() -> None:
    guard = Guard()
    apply = Count(guard)

    async def helper() -> None:
        async with Reading(guard):
            assert apply.runs == 0

    async with asyncio.timeout(tools.PATIENCE):
        async with Reading(guard):
            guard.submit(apply)
            await helper()
            await asyncio.create_task(helper())  # a child of the task that reads
            with Reading(guard):
                pass
        assert apply.runs == 1


@pytest.mark.asyncio
async def test_a_task_may_wait_for_an_unrelated_reader() -> None:
    guard = Guard()
    apply = Count(guard)
    work: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def server() -> None:
        done = await work.get()
        async with Reading(guard):
            done.set_result(None)

    serving = asyncio.create_task(server())
    await asyncio.sleep(0)
    async with asyncio.timeout(tools.PATIENCE), Reading(guard):
        guard.submit(apply)
        done = asyncio.get_running_loop().create_future()
        work.put_nowait(done)
        await done  # the server reads as well before this read ends
    await serving
    assert apply.runs == 1


@pytest.mark.asyncio
async def test_a_withdrawn_update_wakes_who_let_it_go_first() -> None:
    guard = Guard()
    over = threading.Event()
    inside = threading.Event()

    def read() -> None:
        with Reading(guard):
            inside.set()
            over.wait(tools.PATIENCE)

    thread = tools.in_thread(read)
    assert inside.wait(tools.PATIENCE)
    guard._patience = tools.PATIENCE
    guard.submit(lambda: None)
    guard._patient_until = time.monotonic() + tools.PATIENCE

    async def enter() -> None:
        async with Reading(guard):
            pass

    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    assert not task.done()
    started = time.monotonic()
    guard.withdraw()
    await task
    assert time.monotonic() - started < tools.PATIENCE / 2
    over.set()
    thread.join()


@pytest.mark.asyncio
async def test_a_cancelled_reader_leaves_nothing() -> None:
    guard = Guard()
    apply = Count(guard)
    guard.enter()
    guard.submit(apply)

    async def enter() -> None:
        async with Reading(guard):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert guard._watchers == []
    guard.leave()
    assert apply.runs == 1


# -- copies and compilation -------------------------------------------------------------------


def _is_guarded(module: torch.nn.Module, guard: Guard) -> bool:
    seen = []
    first = next(child for child in module.modules() if isinstance(child, torch.nn.Linear))
    handle = first.register_forward_hook(lambda *_: seen.append(guard.reading_here))
    module(torch.zeros(1, 4))
    handle.remove()
    return seen.pop()


def _copies(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(module),
        "pickle": pickle.loads(pickle.dumps(module)),
        "torch.save": torch.load(file, weights_only=False),
    }


def test_copies_work_and_are_not_guarded() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    guard = _guarded(module)
    assert _is_guarded(module, guard)
    for how, twin in _copies(module).items():
        assert not _is_guarded(twin, guard), how
        for again in _copies(twin).values():  # copies of copies
            torch.testing.assert_close(again(torch.ones(1, 4)), module(torch.ones(1, 4)))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert torch.load(file).keys() == module.state_dict().keys()
    guard.uninstall()
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not _is_guarded(module, guard)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["function", "method"])
@pytest.mark.filterwarnings("default:.*torch\\.jit.*:DeprecationWarning")
def test_a_compiled_module_is_guarded(backend: str, how: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    x = torch.ones(1, 4)
    expected = module(x)
    calls: list[str] = []

    class Spy(Guard):
        def enter(self, frame: Any = None) -> None:
            calls.append("enter")
            super().enter(frame)

        def leave(self, *, forward: bool = False) -> None:
            calls.append("leave")
            super().leave(forward=forward)

    guard = Spy()
    guard.install(module)
    torch._dynamo.reset()
    if how == "function":
        compiled = torch.compile(module, backend=backend)
    else:
        module.compile(backend=backend)
        compiled = module
    for _ in range(3):
        calls.clear()
        torch.testing.assert_close(compiled(x), expected)
        assert calls == ["enter", "leave"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = torch.full_like(parameter, 2.0)  # as an update does
    assert compiled(x).unique().item() == (4 * 2 + 2) * 4 * 2 + 2
    assert guard._open == {}
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["reading", "forward"])
def test_nobody_waits_for_an_update_that_its_own_thread_holds_back(kind: str) -> None:
    source, target = Probe(), Probe()
    for module in (source, target):
        module.weight = torch.nn.Parameter(torch.ones(1))
    sender, receiver = tools.roles(tools.SHM, source, target)
    with sender, receiver:
        tools.join(sender, receiver)

        def inside() -> None:
            sender.send_async()
            assert receiver.receive(timeout=0) is None
            assert receiver.wait_for_version(1) == 1
            assert receiver.wait_staged(2) == 2
            for call in (
                receiver.receive,
                lambda: receiver.wait_for_version(2),
                lambda: receiver.pull(min_version=2),
                receiver.pull,
            ):
                with pytest.raises(aiosync.LocalProtocolError, match="after the block"):
                    call()
            with pytest.raises(aiosync.LocalProtocolError, match="between two of them"):
                receiver.apply_weights({"weight": torch.zeros(1)})

        if kind == "forward":
            target.inside = inside
            target()
        else:
            with receiver.reading():
                inside()
        sender.wait_async()
        assert receiver.receive().version == 2


def test_another_thread_waits_for_the_end_of_a_read() -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    sender, receiver = tools.roles(tools.SHM, source, target)
    with sender, receiver:
        tools.join(sender, receiver)
        versions: list[int] = []
        with receiver.reading():
            sender.send_async()
            thread = tools.in_thread(lambda: versions.append(receiver.wait_for_version(2)))
            receiver.wait_staged(2)
            assert not versions
        thread.join(tools.PATIENCE)
        assert versions == [2]
        sender.wait_async()

"""The guard under threads, interrupts and copies."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import pickle
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync
from aiosync.schemes import Guard, Reading
from tests.sync import _tools as tools

if TYPE_CHECKING:
    from collections.abc import Iterator


class Probe(torch.nn.Module):
    """Runs ``inside`` in its forward pass."""

    def __init__(self, inside: Any = lambda: None) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Any = None) -> Any:
        self.inside()
        return x


class Count:
    """An apply that notes the threads in which it ran."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    @property
    def runs(self) -> int:
        return len(self.threads)

    def __call__(self) -> None:
        self.threads.append(threading.get_ident())


def _guarded(module: torch.nn.Module) -> Guard:
    guard = Guard()
    guard.install(module)
    return guard


def _blocks_nothing(guard: Guard) -> None:
    apply = Count()
    assert guard.submit(apply)
    assert apply.runs == 1
    assert guard.exclusively(lambda: None, timeout=0.0)


# -- forwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_waits_for_the_outermost_forward_whose_thread_applies_it(fails: bool) -> None:
    """A nested one does not end the outer one, whether or not it raises."""
    depth = 0
    module = Probe(lambda: inside())
    guard, apply = _guarded(module), Count()

    def inside() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            tools.in_thread(lambda: guard.submit(apply)).join()
        if depth == 4 and fails:
            raise ZeroDivisionError
        if depth < 4:
            with pytest.raises(ZeroDivisionError) if fails and depth == 3 else no_error:
                module()  # recursion
        assert apply.runs == 0
        assert guard.reading_here

    no_error = contextlib.nullcontext()
    module()
    assert (depth, apply.threads) == (4, [threading.get_ident()])
    assert not guard.reading_here


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_hooks_do_not_see_blocks_nothing(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind

    module = Probe(fail)
    guard = _guarded(module)

    def enter(apply: Count) -> None:
        with Reading(guard):
            guard.submit(apply)

    def retry(apply: Count) -> None:
        module.inside = lambda: (guard.submit(apply), fail())
        with pytest.raises(kind):
            module()
        assert apply.runs == 0
        guard.retry()
        module.inside = fail

    def look(apply: Count) -> None:
        assert not guard.reading_here
        guard.submit(apply)

    for use in (
        guard.submit,
        retry,
        look,
        lambda apply: guard.exclusively(apply, timeout=0.0),
        enter,
    ):
        apply = Count()
        with pytest.raises(kind):
            module()
        use(apply)
        assert apply.runs == 1, use


def test_no_thread_looks_at_the_stack_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 collects garbage in ``f_back``, and meanwhile the other thread goes on: what is
    found then is a Tensor, a dict, or the end of the process."""
    monkeypatch.setattr(sys, "_current_frames", lambda: pytest.fail("it looks at all stacks"))
    began, ends, fails = threading.Event(), threading.Event(), threading.Event()

    def inside() -> None:
        began.set()
        assert ends.wait(5.0)
        raise KeyboardInterrupt

    def forward() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            module()
        fails.set()

    module, apply = Probe(inside), Count()
    guard = _guarded(module)
    reading = tools.in_thread(forward)
    assert began.wait(5.0)
    guard.submit(apply)
    assert guard.retry() and apply.runs == 0
    ends.set()
    assert fails.wait(5.0)
    guard.retry()
    assert apply.runs == 1
    reading.join()


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
    _blocks_nothing(guard)


def test_a_forward_inside_an_update_does_not_wait_for_it() -> None:
    """``set_extra_state()`` may call the model."""
    module = Probe()
    guard = _guarded(module)
    ran = []
    assert guard.submit(lambda: ran.append(module(1)))
    assert ran == [1]
    _blocks_nothing(guard)


@contextlib.contextmanager
def _alarms(handler: Any) -> Iterator[None]:
    old = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the old handler ends a test that hangs
        signal.signal(signal.SIGALRM, old)


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [False, True])
def test_signals_at_any_point_block_nothing(interrupts: bool) -> None:
    """A handler may use the guard, or raise as that of Ctrl-C does, between any two byte codes."""
    module = Probe()
    guard = _guarded(module)
    count = 0

    def handler(*_: Any) -> None:
        nonlocal count
        count += 1
        if interrupts:
            raise KeyboardInterrupt
        guard.withdraw()
        guard.retry()

    deadline = time.monotonic() + tools.PATIENCE
    with _alarms(handler):
        while count < 500 and time.monotonic() < deadline:
            seen = count
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
                while count == seen:
                    guard.submit(lambda: None)
                    module()
    assert count >= 500
    _blocks_nothing(guard)


# -- waiting for one another ------------------------------------------------------------------


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

    with tools.threads(*[forwards] * 3):
        try:
            for _ in range(20):
                apply = Count()
                guard.submit(apply)
                tools.until(lambda apply=apply: apply.runs == 1)
        finally:
            over.set()


@pytest.mark.slow
def test_threads_neither_deadlock_nor_tear() -> None:
    values = [0, 0]
    module = Probe(lambda: check())
    guard = _guarded(module)

    def check() -> None:
        first = values[0]
        for _ in range(random.randrange(20)):
            pass
        assert values[1] == first, "torn"

    def apply() -> None:
        values[0] += 1
        for _ in range(50):
            pass
        values[1] += 1

    def reads() -> None:
        with Reading(guard):
            check()
            module()

    def withdraws() -> None:
        guard.withdraw()
        guard.retry()

    async def one() -> None:
        async with Reading(guard):
            first = values[0]
            await asyncio.sleep(0)
            assert values[1] == first, "torn"

    async def several() -> None:
        await asyncio.gather(*(one() for _ in range(5)))

    def again(call: Any) -> Any:
        def calls() -> None:
            while time.monotonic() < deadline:
                call()

        return calls

    def submits() -> None:
        guard.submit(apply)

    def acts() -> None:
        guard.exclusively(apply, timeout=1.0)

    deadline = time.monotonic() + 1.0
    calls = [module, module, reads, reads, submits, acts, withdraws, lambda: asyncio.run(several())]
    with tools.threads(*map(again, calls)):
        pass
    assert values[0] > 0
    _blocks_nothing(guard)


# -- reading() in coroutines ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_tasks_see_one_version_each_and_a_new_one_lets_the_update_go_first() -> None:
    guard, apply = Guard(), Count()
    events = [asyncio.Event() for _ in range(2)]

    async def read(leave: asyncio.Event) -> int:
        async with Reading(guard):
            before = apply.runs
            await leave.wait()
            assert apply.runs == before
            return before

    tasks = [asyncio.create_task(read(event)) for event in events]
    for _ in range(2):  # a read begins after a turn of the loop
        await asyncio.sleep(0)
    assert not guard.submit(apply)
    late = asyncio.create_task(read(events[0]))
    for task, event in zip(tasks, events, strict=True):
        event.set()
        assert apply.runs == 0
        assert await task == 0
    assert await late == 1


@pytest.mark.asyncio
async def test_nested_reads_of_one_task_do_not_wait_for_themselves() -> None:
    guard, apply = Guard(), Count()

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
async def test_a_cancelled_reader_leaves_nothing() -> None:
    guard, apply = Guard(), Count()
    guard.enter()
    guard.submit(apply)
    task = asyncio.ensure_future(Reading(guard).__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
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


def _saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_copies_work_and_are_not_guarded() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    guard = _guarded(module)
    assert _is_guarded(module, guard)
    copies = (
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: _saved(module, weights_only=False),
    )
    for make in copies:
        twin = make(module)
        assert not _is_guarded(twin, guard)
        for again in copies:  # copies of copies
            torch.testing.assert_close(again(twin)(torch.ones(1, 4)), module(torch.ones(1, 4)))
    assert _saved(module.state_dict()).keys() == module.state_dict().keys()
    guard.uninstall()
    assert not _is_guarded(module, guard)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "how"), [("eager", "function"), ("aot_eager", "method")])
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

        def leave(self, frame: Any = None, *, thread: int | None = None) -> None:
            calls.append("leave")
            super().leave(frame, thread=thread)

    guard = Spy()
    guard.install(module)
    torch.compiler.reset()
    compiled: Any = module
    if how == "function":
        compiled = torch.compile(module, backend=backend)
    else:
        module.compile(backend=backend)
    for _ in range(3):
        calls.clear()
        torch.testing.assert_close(compiled(x), expected)
        assert calls == ["enter", "leave"]
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 2.0)  # as an update does
    assert compiled(x).unique().item() == (4 * 2 + 2) * 4 * 2 + 2
    _blocks_nothing(guard)
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["reading", "forward"])
def test_nobody_waits_for_an_update_that_its_own_thread_holds_back(kind: str) -> None:
    source, target = Probe(), Probe()
    for module in (source, target):
        module.weight = torch.nn.Parameter(torch.ones(1))
    with tools.pair(tools.SHM, source, target) as (sender, receiver):

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
                lambda: receiver.apply_weights({"weight": torch.zeros(1)}),
            ):
                with pytest.raises(aiosync.LocalProtocolError):
                    call()

        if kind == "forward":
            target.inside = inside
            target()
        else:
            with receiver.reading():
                inside()
        sender.wait_async()
        assert receiver.receive().version == 2


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_may_not_begin_ends_no_other_read(kind: type[BaseException]) -> None:
    """torch calls the hooks after a forward also where those before it raised."""
    inner, guard, count = Probe(), Guard(), Count()
    outer = Probe(inside=lambda: attempt())
    raising = False

    def attempt() -> None:
        nonlocal raising
        raising = True
        with pytest.raises(kind):
            inner()
        raising = False
        assert not guard.submit(count)
        assert count.runs == 0, "it was applied inside the outer forward"

    class Refusing(Guard):
        def enter(self, frame: Any = None) -> None:
            if raising:
                raise kind
            super().enter(frame)

    guard = Refusing()
    guard.install(torch.nn.ModuleDict({"outer": outer, "inner": inner}))
    outer()
    assert count.runs == 1
    _blocks_nothing(guard)

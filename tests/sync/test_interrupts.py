"""Interrupts: Ctrl-C ends a blocking call at once, and leaves nothing running in the background."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import aiosync
import aiosync.sync
from aiosync.serving import AdmissionGate, WeightFeed
from aiosync.tensors import FlatBuffer, Layout, Target, collect
from aiosync.transports.shared_memory import SlotReader
from tests.support.waiting import mapped_nbytes
from tests.sync import _tools as tools


def _interrupt(call: Any) -> float:
    """Interrupt a call with Ctrl-C; return the seconds from the signal to the exception."""
    sent = tools.interrupt_when_blocked()
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - sent[0]


def interrupted_connect(role: str) -> float:
    sender, receiver = tools.roles(tools.SHM, tools.filled(1.0), tools.filled(0.0))
    scheme = sender if role == "sender" else receiver
    seconds = _interrupt(scheme.connect)
    assert tools.portal_threads() == []
    # An interrupted scheme cannot connect any more.
    with pytest.raises(aiosync.TransportClosed):
        scheme.connect()
    sender.shutdown()
    receiver.shutdown()
    return seconds


def interrupted_receive(make: Any) -> float:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target) as (sender, receiver):
        seconds = _interrupt(receiver.receive)
        seconds = max(seconds, _interrupt(lambda: receiver.wait_for_version(9)))
        tools.fill(source, 2.0)
        assert sender.send().acked == {0}
        update = receiver.receive()
        assert update is not None
        assert update.version == 2
    assert tools.portal_threads() == []
    return seconds


def interrupted_send(make: Any) -> float:
    source, target = tools.filled(1.0), tools.filled(0.0)
    with tools.pair(make, source, target) as (sender, receiver):
        tools.fill(source, 2.0)
        # No update is applied while this thread reads.
        with receiver.reading():
            seconds = _interrupt(sender.send)
            version = sender.send_async()
            seconds = max(seconds, _interrupt(sender.wait_async))
            assert tools.value_at(receiver) == 1.0
        # The interrupt has ended the wait, and not the send.
        assert sender.wait_async().version == version
        assert tools.value_at(receiver) == 2.0
        assert receiver.version == version
    assert tools.portal_threads() == []
    return seconds


def interrupted_forward() -> float:
    """An update that waits for a forward is applied when Ctrl-C ends that forward.

    There is no later forward that could apply it.
    """

    class Slow(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            version = sender.send_async()
            tools.until(lambda: receiver.lag == 1)
            assert receiver.version == version - 1
            signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    source, target = tools.filled(1.0), Slow(4, 2)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        tools.fill(source, 2.0)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            target(torch.zeros(1, 4))
        assert sender.wait_async().acked == {0}
        assert tools.value_at(receiver) == 2.0
        return time.monotonic() - started


def interrupted_shutdown() -> float:
    """Ctrl-C during shutdown() leaves a scheme that a second shutdown() can close."""
    with tools.pair(tools.SHM, tools.filled(1.0), tools.filled(0.0)) as (sender, receiver):
        started = time.monotonic()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for scheme in (sender, receiver):
            try:
                # On a busy machine the alarm may go off before shutdown() begins.
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                scheme.shutdown()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                scheme.shutdown()
    tools.until(lambda: not tools.portal_threads())
    return time.monotonic() - started


class Alarm(Exception):
    """An error that a program's own handler of SIGALRM raises."""


SECONDS = float(os.environ.get("INTERRUPTED_SECONDS", "2.5"))
"""Seconds for which alarms go off. For longer runs:
``INTERRUPTED_SECONDS=60 pytest tests/sync/test_interrupts.py``.
"""
FEWEST = 20 * SECONDS
"""A test shows something if there were more interrupts than this."""


class Alarms:
    """Alarms that raise an error of ``kind`` at random moments of calls of the main thread."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.armed, self.interrupts = kind, False, 0
        self.until = time.monotonic() + SECONDS
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, *_: Any) -> None:
        if self.armed:
            raise self.kind

    def set(self, most: float, again: float = 0.0) -> None:
        """Let an alarm go off within ``most`` seconds; if ``again``, repeat it at that interval."""
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, most), again)

    def results(self, call: Any, most: float, before: Any = bool) -> Iterator[Any]:
        """Repeat a call; yield the results of calls that no alarm has interrupted.

        No alarm goes off in ``before``, which is called before each call.
        """
        # A busy machine makes fewer calls in that time, and gets up to ten times as much.
        late = self.until + 9 * SECONDS
        while (now := time.monotonic()) < self.until or (self.interrupts <= FEWEST and now < late):
            before()
            try:
                self.set(most)
                result = call()
                self.armed = False
            except self.kind:
                self.armed = False
                self.interrupts += 1
            else:
                yield result


class Trainer:
    """A trainer that sends versions with growing values, here or in a thread."""

    def __init__(self, sender: Any, source: tools.Spread) -> None:
        self.sender, self.source, self.value = sender, source, 0.0
        self.stopped = threading.Event()

    def fill(self) -> None:
        self.value += 1.0
        self.source.fill(self.value)

    def send(self) -> int:
        report = self.sender.send()
        # The worker has not refused the version.
        assert report.acked == {0}
        return int(report.version)

    def until_stopped(self) -> None:
        while not self.stopped.is_set():
            self.fill()
            self.send()


def interrupted_takes(make: Any, kind: type[BaseException]) -> tuple[int, int]:
    """Interrupt a worker's forwards at random moments.

    Returns:
        The number of forwards that mixed versions, and that of interrupts.
    """
    source, target = tools.Spread(0.0), tools.Spread(-1.0)
    mixed, newest = 0, 0.0
    with tools.pair(make, source, target) as (sender, _):
        trainer, alarms = Trainer(sender, source), Alarms(kind)
        with tools.threads(trainer.until_stopped):
            try:
                # Even on a slow machine some alarms have to come too late, so that forwards end.
                began = time.monotonic()
                for _ in range(10):
                    target()
                most = max(6e-3, 0.4 * (time.monotonic() - began))
                alarms.until += time.monotonic() - began
                for seen in alarms.results(target, most):
                    mixed += len(seen) != 1
                    assert max(seen) >= newest
                    newest = max(seen)
            finally:
                trainer.stopped.set()
    assert newest > 20
    return mixed, alarms.interrupts


def interrupted_hook() -> tuple[int, int]:
    """Interrupt a hook, in a read that takes a version.

    Returns:
        The number of interrupts, and that of refusals that the trainer saw.
    """
    source, target = tools.filled(0.0), tools.filled(-1.0)
    interrupts = refusals = 0

    def ring(*_: Any) -> None:
        raise Alarm

    def applied(epoch: int, version: int) -> None:
        if threading.current_thread() is threading.main_thread() and not interrupts:
            signal.raise_signal(signal.SIGALRM)

    signal.signal(signal.SIGALRM, ring)
    sender = tools.SHM(timeout=20.0)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = copy.copy(sender)
    hooks = aiosync.SchemeHooks(applied=applied)
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0, hooks=hooks)
    with sender, receiver:
        tools.join(sender, receiver)
        for value in range(1, 30):
            tools.fill(source, float(value))
            try:
                assert sender.send().acked == {0}
            except aiosync.PartialSyncError:
                refusals += 1
            for _ in range(2):
                try:
                    assert tools.value_at(receiver) == value
                    break
                except Alarm:
                    interrupts += 1
    return interrupts, refusals


class Bell:
    """Has a handler of SIGALRM raise an error of ``kind`` in the main thread, once it is armed."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.armed = kind, False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, *_: Any) -> None:
        raise self.kind

    def ring(self) -> None:
        if self.armed and threading.current_thread() is threading.main_thread():
            self.armed = False
            signal.raise_signal(signal.SIGALRM)

    def hang_on(self, owner: Any, name: str) -> None:
        """Ring when this function of a class or a module begins."""
        usual = getattr(owner, name)

        @functools.wraps(usual)
        def ringing(*args: Any) -> Any:
            self.ring()
            return usual(*args)

        setattr(owner, name, ringing)

    def interrupts(self, call: Any) -> bool:
        """Return True if a call raises the error of an alarm that goes off in it."""
        self.armed = True
        try:
            call()
        except self.kind:
            return not self.armed
        finally:
            self.armed = False
        return False


def interrupted_reading(kind: type[BaseException], name: str) -> tuple[bool, float]:
    """Interrupt a forward that takes a version, in a method of the slot reader or in one of ``os``.

    Returns:
        True if the forward raised the error, and the value after another send.
    """
    source, target, bell = tools.filled(0.0), tools.filled(-1.0), Bell(kind)
    bell.hang_on(SlotReader if hasattr(SlotReader, name) else os, name)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        for value in range(1, 6):
            tools.fill(source, float(value))
            assert sender.send().acked == {0}
            assert tools.value_at(receiver) == value
        # The thread of the loop may take a version before the forward does.
        for _ in range(20):
            tools.fill(source, 6.0)
            sender.send()
            raised = bell.interrupts(lambda: target(torch.zeros(1, 4)))
            assert tools.value_at(receiver) == 6.0
            if raised:
                break
            tools.fill(source, 5.0)
            assert sender.send().acked == {0}
            assert tools.value_at(receiver) == 5.0
        tools.fill(source, 7.0)
        assert sender.send().acked == {0}
        return raised, tools.value_at(receiver)


def interrupted_look(kind: type[BaseException], name: str) -> tuple[bool, int]:
    """Interrupt a function of ``os`` with which ``lag`` looks at the slot.

    Returns:
        True if that raised the error, and the lag that the worker saw after it.
    """
    source, target, bell = tools.filled(0.0), tools.filled(-1.0), Bell(kind)
    bell.hang_on(os, name)
    with tools.pair(tools.SHM, source, target) as (sender, receiver):
        for _ in range(5):
            sender.send()
            target(torch.zeros(1, 4))
        # The thread of the loop takes no version during a read.
        with receiver.reading():
            sender.send()
            return bell.interrupts(lambda: receiver.lag), receiver.lag


class Stateful(torch.nn.Linear):
    """A module with a tensor in its extra state."""

    def __init__(self, value: float) -> None:
        super().__init__(1, 1, bias=False)
        self.state: dict[str, torch.Tensor] = {}
        self.fill(value)

    def fill(self, value: float) -> None:
        tools.fill(self, value)
        self.state = {"value": torch.tensor(value)}

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return self.state

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def interrupted_state(kind: type[BaseException]) -> tuple[bool, list[float]]:
    """Interrupt the unpacking of an extra state, at the end of a read.

    Returns:
        True if the read raised the error, and the extra states after the next read and after
        another send.
    """
    source, target, bell = Stateful(0.0), Stateful(-1.0), Bell(kind)
    bell.hang_on(torch.Tensor, "clone")
    with tools.pair(tools.PIPE, source, target) as (sender, receiver):

        def update() -> None:
            with receiver.reading():
                sender.send_async()
                tools.until(lambda: receiver.lag == 1)
                # The tensors are copied before the state is unpacked.
                bell.armed = True

        source.fill(6.0)
        raised = bell.interrupts(update)
        assert tools.value_at(receiver) == 6.0
        values = [float(target.state["value"])]
        assert sender.wait_async().acked == {0}
        source.fill(7.0)
        assert sender.send().acked == {0}
        return raised, [*values, float(target.state["value"])]


def interrupted_submit(kind: type[BaseException]) -> bool:
    """Interrupt a send as it is handed to the facade's loop; return True if it raised the error."""
    bell = Bell(kind)
    bell.hang_on(asyncio.SelectorEventLoop, "call_soon_threadsafe")
    source, target = tools.filled(0.0), tools.filled(-1.0)
    with tools.pair(tools.PIPE, source, target) as (sender, _):
        raised = bell.interrupts(sender.send)
        assert sender.send().acked == {0}
    return raised


def interrupted_comparison(kind: type[BaseException]) -> tuple[bool, str]:
    """Interrupt the comparison of a module with the tensors that it had at the last update.

    Returns:
        True if the update raised the error, and the name of that of the next one.
    """
    bell = Bell(kind)

    class Loud(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, *args: Any, **more: Any) -> Any:
            bell.ring()
            return super().__torch_function__(*args, **more)

    model = tools.filled(0.0)
    leaves = collect(tools.filled(1.0)).leaves
    layout, target = Layout.plan(leaves), Target(model)
    flat = FlatBuffer(layout.nbytes)
    target.apply_(layout, flat, {}, copy=True)
    model.weight = Loud(torch.zeros(model.weight.shape))
    raised = bell.interrupts(lambda: target.apply_(layout, flat, {}, copy=True))
    try:
        target.apply_(layout, flat, {}, copy=True)
    except aiosync.ManifestMismatch as exc:
        return raised, type(exc).__name__
    return raised, ""


class Context:
    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy


def interrupted_move(kind: type[BaseException]) -> tuple[bool, float, float]:
    """Interrupt the check of another model, at the end of a read, when the weights move there.

    Returns:
        True if the read raised the error, the other model's value after the next forward, and
        the value after another send.
    """
    source, old, new = tools.filled(0.0), tools.filled(-1.0), tools.filled(-1.0)
    bell, context = Bell(kind), Context(old)
    bell.hang_on(Target, "check")
    sender = tools.SHM(timeout=tools.PATIENCE)
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", context=context, worker_idx=0)
    with sender, receiver:
        tools.join(sender, receiver)
        for _ in range(5):
            assert sender.send().acked == {0}
            old(torch.zeros(1, 4))
        tools.fill(source, 6.0)

        def move() -> None:
            with receiver.reading():
                sender.send_async()
                tools.until(lambda: receiver.lag == 1)
                context.policy = new

        raised = bell.interrupts(move)
        old(torch.zeros(1, 4))
        value = tools.value_of(new)
        sender.wait_async()
        tools.fill(source, 7.0)
        assert sender.send().acked == {0}
        return raised, value, tools.value_at(receiver)


class Ringing(AdmissionGate):
    """A gate that sends SIGALRM to this process once, during a switch, if ``rings`` is set."""

    rings = False

    @property
    def waits_for(self) -> int:
        if self.rings:
            self.rings = False
            signal.raise_signal(signal.SIGALRM)
        return super().waits_for


def interrupted_switch(kind: type[BaseException]) -> tuple[str, int, list[type[BaseException]]]:
    """Interrupt a feed's switch in the middle.

    Returns:
        The feed's state and the model's value after another send, and the errors that reached the
        event loop.
    """
    source, target, gate = tools.filled(0.0), tools.filled(-1.0), Ringing()
    raised = list[type[BaseException]]()

    def ring(*_: Any) -> None:
        raise kind

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        raised.append(type(context["exception"]))

    signal.signal(signal.SIGALRM, ring)
    sender = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", timeout=20.0)
    sender.init_on_sender(model=source, num_workers=1)
    feed = WeightFeed(aiosync.TCPWeightSyncScheme(sender.address), model=target, gate=gate)

    async def start() -> None:
        asyncio.get_running_loop().set_exception_handler(note)
        await feed.start()
        await sender.connect()
        await feed.ready.wait(timeout=20.0)

    async def send() -> None:
        tools.fill(source, 2.0)
        handle, gate.rings = sender.send_nowait(), True
        await handle

    async def end() -> tuple[str, int]:
        await sender.send()
        state, value = feed.status.state, tools.value_of(target)
        assert feed.version == 3
        await feed.aclose()
        await sender.aclose()
        return state, int(value)

    with asyncio.Runner() as runner:
        runner.run(start())
        try:
            runner.run(send())
        except KeyboardInterrupt as exc:
            raised.append(type(exc))
        return *runner.run(end()), raised


def interrupted_sends(make: Any, kind: type[BaseException]) -> tuple[int, int, int]:
    """Interrupt a trainer's sends at random moments.

    Returns:
        The number of wrong forwards, that of interrupts, and the mapped bytes of segments.
    """
    source, target = tools.Spread(0.0), tools.Spread(-1.0)
    wrong, returned = 0, 0.0
    stopped = threading.Event()

    def compute() -> None:
        nonlocal wrong
        while not stopped.is_set():
            at_least = returned
            seen = target()
            wrong += len(seen) != 1 or max(seen) < at_least

    with tools.pair(make, source, target) as (sender, receiver), tools.threads(compute):
        trainer, alarms = Trainer(sender, source), Alarms(kind)
        try:
            for _ in alarms.results(trainer.send, 1e-3, trainer.fill):
                returned = trainer.value
        finally:
            stopped.set()
        trainer.fill()
        receiver.wait_for_version(trainer.send(), timeout=tools.PATIENCE)
        assert target() == {trainer.value}
        segments = mapped_nbytes("memfd:aiosync")
    return wrong, alarms.interrupts, segments


TCP = aiosync.sync.TCPWeightSyncScheme
# Each case takes seconds, so the pipe and TCP run the second kind only with --heavy.
ALARMS = {
    (tools.SHM, KeyboardInterrupt): [],
    (tools.SHM, Alarm): [],
    (tools.PIPE, Alarm): [],
    (tools.PIPE, KeyboardInterrupt): [pytest.mark.heavy],
    (TCP, KeyboardInterrupt): [],
    (TCP, Alarm): [pytest.mark.heavy],
}
alarms = [pytest.param(*each, marks=marks) for each, marks in ALARMS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), alarms)
def test_an_interrupted_send_harms_no_other(make: Any, kind: type[BaseException]) -> None:
    wrong, interrupts, segments = tools.in_process(interrupted_sends, make, kind)
    assert wrong == 0
    assert interrupts > FEWEST
    # This has room for a few slots of 0.7 MB.
    assert segments < 8 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), alarms)
def test_an_interrupt_splits_no_update(make: Any, kind: type[BaseException]) -> None:
    mixed, interrupts = tools.in_process(interrupted_takes, make, kind)
    assert mixed == 0
    assert interrupts > FEWEST


@pytest.mark.slow
def test_an_interrupt_of_a_hook_is_no_refusal() -> None:
    assert tools.in_process(interrupted_hook) == (1, 0)


KINDS = [KeyboardInterrupt, TimeoutError, ValueError]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["open", "lseek"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_of_a_read_ends_no_link(kind: type[BaseException], name: str) -> None:
    assert tools.in_process(interrupted_reading, kind, name) == (True, 7.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pread", "fstat"])
def test_an_interrupt_of_a_look_is_not_lost(name: str) -> None:
    assert tools.in_process(interrupted_look, TimeoutError, name) == (True, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_of_a_state_refuses_no_update(kind: type[BaseException]) -> None:
    assert tools.in_process(interrupted_state, kind) == (True, [6.0, 7.0])


@pytest.mark.slow
def test_an_interrupt_of_a_submit_is_not_lost() -> None:
    assert tools.in_process(interrupted_submit, RuntimeError)


@pytest.mark.slow
def test_an_interrupt_of_a_comparison_is_not_lost() -> None:
    assert tools.in_process(interrupted_comparison, TimeoutError) == (True, "ManifestMismatch")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_of_a_move_refuses_no_model(kind: type[BaseException]) -> None:
    assert tools.in_process(interrupted_move, kind) == (True, 6.0, 7.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Alarm])
def test_an_interrupt_of_a_switch_ends_no_feed(kind: type[BaseException]) -> None:
    assert tools.in_process(interrupted_switch, kind) == ("live", 2, [kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "args"),
    [
        (interrupted_connect, ("sender",)),
        (interrupted_connect, ("receiver",)),
        (interrupted_receive, (tools.SHM,)),
        (interrupted_receive, (tools.PIPE,)),
        (interrupted_send, (functools.partial(tools.SHM, guard="reading"),)),
        (interrupted_send, (tools.PIPE,)),
        (interrupted_forward, ()),
        (interrupted_shutdown, ()),
    ],
)
def test_ctrl_c(scenario: Any, args: tuple[Any, ...]) -> None:
    assert tools.in_process(scenario, *args) < tools.PATIENCE / 4


@pytest.mark.slow
def test_ctrl_c_ends_a_script_with_its_traceback(fresh: tools.Fresh) -> None:
    done = fresh.script(
        """
import signal, threading
import aiosync.sync
from tests.sync import _tools as tools

scheme = aiosync.sync.SharedMemWeightSyncScheme()
scheme.init_on_sender(model=tools.filled(1.0), num_workers=1)
tools.interrupt_when_blocked()
scheme.connect()
"""
    )
    assert done.returncode == -signal.SIGINT, done
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "Task was destroyed" not in done.stderr
    assert "never awaited" not in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr

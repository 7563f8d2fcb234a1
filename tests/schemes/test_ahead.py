"""The word ahead of an update: what the link does with it, who says it, and what a worker does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync._cores import usable_cores
from aiosync.schemes import _ahead
from aiosync.schemes._ahead import Foresight, tell_ahead
from aiosync.tensors import FlatBuffer, Flattener, Target
from aiosync.tensors._plan import Plan
from aiosync.transports._publishing import AHEAD
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.types import AckStatus
from aiosync.wire import Ack, Release, encode_frame
from tests.schemes import _harness as harness

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

WORD = encode_frame(Release(0, 0, 1), 0, ext={AHEAD: 1})


def ack(version: int) -> bytes:
    return encode_frame(Ack(1, version, AckStatus.APPLIED), 0)


def many() -> nn.Module:
    """More tensors than an update needs to have a word."""
    return nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(300)])


def values_of(model: nn.Module) -> set[float]:
    return set(torch.cat([param.detach().flatten() for param in model.parameters()]).tolist())


@contextlib.contextmanager
def saying(sock: socket.socket, *frames: bytes, after: float = 0.02):
    """Another thread says these, one after the other."""

    def say() -> None:
        for frame in frames:
            time.sleep(after)
            sock.send(frame)

    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Heard:
    """A link whose peer is this test, and what it brought."""

    def __init__(self, sock: socket.socket, link: SharedMemTransport) -> None:
        self.sock, self.link = sock, link
        self.versions: list[int] = []
        link.subscribe(lambda received: self.versions.append(received.message.version))

    async def get(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(harness.PATIENCE):
            while not condition():
                await asyncio.sleep(0.001)

    async def know_words(self) -> None:
        """The first one is only remembered, as that of an ack is."""
        self.sock.send(WORD)
        self.sock.send(ack(1))
        await self.get(lambda: self.versions == [1])
        self.versions.clear()


@contextlib.asynccontextmanager
async def heard():
    ours, theirs = socket.socketpair()
    with ours:
        async with SharedMemTransport(theirs) as link:
            yield Heard(ours, link)


# -- the link ------------------------------------------------------------------------------------


async def test_what_follows_a_word_is_handled_before_the_loop_runs_on() -> None:
    async with heard() as peer:
        await peer.know_words()
        seen: list[Any] = []

        def on_ahead(read_next: Callable[[float], None]) -> None:
            with saying(peer.sock, ack(2)):
                read_next(harness.PATIENCE)
            seen.append(list(peer.versions))

        peer.link.on_ahead = on_ahead
        peer.sock.send(WORD)
        await peer.get(lambda: bool(seen))
        assert seen == [[2]]
        peer.sock.send(ack(3))  # and the link goes on
        await peer.get(lambda: peer.versions == [2, 3])


async def test_a_word_that_nothing_follows_is_waited_for_no_longer_than_said() -> None:
    async with heard() as peer:
        await peer.know_words()
        seen: list[Any] = []

        def on_ahead(read_next: Callable[[float], None]) -> None:
            started = time.monotonic()
            read_next(0.01)
            seen.append(time.monotonic() - started)

        peer.link.on_ahead = on_ahead
        peer.sock.send(WORD)
        await peer.get(lambda: bool(seen))
        assert 0.009 < seen[0] < 2.0
        peer.sock.send(ack(2))
        await peer.get(lambda: peer.versions == [2])


async def test_words_upon_words_neither_nest_nor_keep_the_loop() -> None:
    async with heard() as peer:
        await peer.know_words()
        calls = depth = 0

        def on_ahead(read_next: Callable[[float], None]) -> None:
            nonlocal calls, depth
            assert depth == 0
            calls, depth = calls + 1, 1
            with saying(peer.sock, WORD, ack(2), after=0.01):
                started = time.monotonic()
                read_next(harness.PATIENCE)  # it is the word that comes
                read_next(0.0)
                assert time.monotonic() - started < harness.PATIENCE / 2
            depth = 0

        peer.link.on_ahead = on_ahead
        peer.sock.send(WORD)
        await peer.get(lambda: peer.versions == [2])
        assert calls == 1


async def test_a_word_that_came_with_more_is_of_no_use() -> None:
    async with heard() as peer:
        await peer.know_words()
        seen: list[Any] = []
        peer.link.on_ahead = seen.append
        peer.sock.send(WORD + ack(2))
        await peer.get(lambda: peer.versions == [2])
        assert seen == []
        peer.link.channel.read_next(harness.PATIENCE)  # nor is there anything to wait for


async def test_a_link_that_ends_after_a_word_says_so() -> None:
    async with heard() as peer:
        await peer.know_words()
        seen: list[bool] = []

        def on_ahead(read_next: Callable[[float], None]) -> None:
            peer.sock.close()
            read_next(harness.PATIENCE)
            seen.append(True)

        peer.link.on_ahead = on_ahead
        peer.sock.send(WORD)
        with pytest.raises(aiosync.PeerClosed):
            await peer.link.recv(timeout=harness.PATIENCE)
        assert seen == [True]


async def test_nobody_has_to_listen_to_words() -> None:
    async with heard() as peer:
        for version in range(1, 5):
            peer.sock.send(WORD)
            peer.sock.send(ack(version))
        await peer.get(lambda: peer.versions == [1, 2, 3, 4])


async def test_a_word_to_a_link_that_has_ended_raises_nothing() -> None:
    ours, theirs = socket.socketpair()
    async with SharedMemTransport(theirs) as link:
        link.publisher.tell_ahead()
        assert ours.recv(1000) == WORD
        ours.close()
        for _ in range(3):
            link.publisher.tell_ahead()
    link.publisher.tell_ahead()


# -- who says it ---------------------------------------------------------------------------------


def planned(num_tensors: int, nbytes: int) -> Any:
    manifest = SimpleNamespace(leaves=[None] * num_tensors)
    layout = SimpleNamespace(manifest=manifest, nbytes=nbytes)
    return SimpleNamespace(prepared=SimpleNamespace(layout=layout))


async def test_words_are_for_idle_workers_with_cores_and_updates_of_many_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    monkeypatch.setattr(_ahead, "usable_cores", lambda: 3)

    def said() -> bool:
        try:
            return ours.recv(1000) == WORD
        except BlockingIOError:
            return False

    with ours:
        async with SharedMemTransport(theirs) as link:
            peer: Any = SimpleNamespace(
                transport=link, has_target=True, outbox=SimpleNamespace(in_flight=[])
            )
            good = planned(1000, 2**22)
            tell_ahead({None: good}, {0}, {0: peer})
            assert said()
            tell_ahead({None: good}, {0, 1}, {1: peer})  # beside one that was lost
            assert said()
            tell_ahead({None: good}, {0, 1, 2}, {0: peer})  # more workers than cores for them
            assert not said()
            tell_ahead({None: planned(10, 2**22)}, {0}, {0: peer})
            assert not said()
            tell_ahead({None: planned(1000, 2**23)}, {0}, {0: peer})  # not copied on the loop
            assert not said()
            tell_ahead({0: good, 1: good}, {0}, {0: peer})
            assert not said()
            peer.outbox.in_flight = [7]
            tell_ahead({None: good}, {0}, {0: peer})
            assert not said()
            peer.outbox.in_flight, peer.has_target = [], False
            tell_ahead({None: good}, {0}, {0: peer})
            assert not said()


# -- what a worker does --------------------------------------------------------------------------


class Target300:
    """A target that has its plan, and how often it was looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = many()
        self.target = Target(self.model)
        self.looks = 0
        valid = Plan.valid

        def look(plan: Plan, target: Any) -> bool:
            self.looks += 1
            return valid(plan, target)

        monkeypatch.setattr(Plan, "valid", look)
        self._flattener = Flattener()
        self._flats = [FlatBuffer(300 * 64) for _ in range(2)]
        self.apply(1.0)
        self.apply(2.0)
        self.looks = 0

    def apply(self, value: float) -> None:
        source = many()
        with torch.no_grad():
            for param in source.parameters():
                param.fill_(value)
        prepared = self._flattener.prepare(source)
        self._flats.reverse()
        flat = self._flats[0]
        self._flattener.copy_into(prepared, flat)
        self.layout = prepared.layout if not hasattr(self, "layout") else self.layout
        self.target.apply_(self.layout, flat, {}, copy=False)

    def values(self) -> set[float]:
        return values_of(self.model)


async def test_what_was_foreseen_is_not_looked_at_again_and_what_was_not_is(monkeypatch) -> None:
    here = Target300(monkeypatch)
    with here.target.foreseeing():
        assert here.target.foresees
        assert here.looks == 1
        here.apply(3.0)
        assert not here.target.foresees
        assert here.looks == 1
        assert here.values() == {3.0}
        here.apply(4.0)  # the first one is all that was foreseen
        assert here.looks == 2
    with here.target.foreseeing():
        pass
    here.apply(5.0)
    assert here.looks == 4
    assert here.values() == {5.0}


async def test_a_target_that_changed_is_not_foreseen(monkeypatch) -> None:
    here = Target300(monkeypatch)
    here.model[7].weight = nn.Parameter(torch.zeros(4, 4))
    with here.target.foreseeing():
        assert not here.target.foresees
        here.apply(3.0)
    assert here.values() == {3.0}


async def test_a_look_that_raises_leaves_that_to_the_update(monkeypatch) -> None:
    here = Target300(monkeypatch)

    def fail(*_args: Any) -> bool:
        raise RuntimeError("looks bad")

    monkeypatch.setattr(Plan, "valid", fail)
    with here.target.foreseeing():
        assert not here.target.foresees
        with pytest.raises(RuntimeError, match="looks bad"):
            here.apply(3.0)


async def test_a_worker_looks_and_waits_unless_it_waited_in_vain(monkeypatch) -> None:
    here = Target300(monkeypatch)
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: None})
    link = SimpleNamespace()
    foresight = Foresight(lambda: here.target)
    foresight.listen(link)  # type: ignore[arg-type]
    assert not hasattr(link, "on_ahead")  # not a link through shared memory
    came, waits = True, []

    def read_next(seconds: float) -> None:
        waits.append(seconds)
        if came:
            here.apply(3.0)

    for _ in range(3):
        foresight._on_word(read_next)
    assert here.looks == len(waits) == 3
    came = False
    for _ in range(_ahead._IGNORED + 1):
        foresight._on_word(read_next)
    assert here.looks == len(waits) == 4
    foresight._on_word(read_next)
    assert here.looks == len(waits) == 5
    assert max(waits) < 0.01


async def test_a_worker_with_threads_or_nothing_to_apply_to_does_not_wait(monkeypatch) -> None:
    here = Target300(monkeypatch)

    def read_next(seconds: float) -> None:
        raise AssertionError(f"waited for {seconds} s")

    Foresight(lambda: None)._on_word(read_next)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        Foresight(lambda: here.target)._on_word(read_next)
    finally:
        done.set()
        thread.join()
    assert here.looks == 0


# -- all of it -----------------------------------------------------------------------------------


def _count(state: harness.State) -> None:
    foreseeing = Target.foreseeing
    state.kept["foreseen"] = 0

    @contextlib.contextmanager
    def counting(target: Target):
        with foreseeing(target):
            foreseen = target.foresees
            yield
            if foreseen and not target.foresees:  # it was made use of
                state.kept["foreseen"] += 1

    Target.foreseeing = counting  # type: ignore[method-assign]


def _replace(state: harness.State, index: int) -> None:
    state.model[index].weight = nn.Parameter(torch.zeros(4, 4))


def _foreseen(state: harness.State) -> int:
    return state.kept["foreseen"]


def _values(state: harness.State) -> set[float]:
    return values_of(state.model)


@pytest.mark.skipif(
    usable_cores() < 2,
    reason="the worker needs a core beside that of the trainer",
)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_workers_look_while_the_trainer_copies_and_get_every_version(loop) -> None:
    source = many()
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    async with harness.workers(scheme, many, 0, connect=False) as crew:
        crew.append(harness.start(scheme, many, loop=loop))
        [worker] = crew
        worker.post(harness.join, 0)
        await scheme.connect(timeout=harness.PATIENCE, processes=[worker.pid])
        await worker.answer()
        await worker.call(_count)
        for step in range(1, 301):
            with torch.no_grad():
                for param in source.parameters():
                    param.fill_(float(step))
            await scheme.send(timeout=harness.PATIENCE)
            if step % 10 == 0:  # what is replaced between two updates is seen
                assert await worker.call(_values) == {float(step)}
                await worker.call(_replace, step % 300)
        assert await worker.call(_foreseen) > 0


async def test_a_word_to_a_worker_that_has_died_ends_in_the_same_error() -> None:
    source = many()
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    async with harness.workers(scheme, many) as [worker]:
        await scheme.send(timeout=harness.PATIENCE)
        worker.kill()
        worker.process.join(harness.PATIENCE)  # the loop does not run: only the word can find out
        started = time.monotonic()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await scheme.send(timeout=harness.PATIENCE)
        assert caught.value.failed.keys() == {0}
        assert time.monotonic() - started < 1.0

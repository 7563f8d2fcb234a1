"""Programs as that generation's users wrote them: each side with whatever it liked.

A transport on one side and a scheme on the other, pipes that are read by hand, other strategies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
from aiosync import legacy
from aiosync.wire import Setup, encode_frame
from tests.sync import _tools as tools

FORK: Any = multiprocessing.get_context("fork")
MP = legacy.MultiProcessWeightSyncScheme
SHM = legacy.SharedMemWeightSyncScheme
STRATEGIES = ["state_dict", "tensordict"]


def _ones(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}


def _td(value: float = 1.0) -> TensorDict:
    return TensorDict(_ones(value), [])


# -- workers: each says what it has, and ends at once -------------------------------------------


def _receiver(pipe: Any, strategy: str, how: str, model: Any, make: Any = MP) -> Any:
    scheme = make(strategy=strategy)
    if how == "init":
        scheme.init_on_worker(model_id="policy", pipe=pipe, model=model)
        return scheme.get_receiver()
    receiver = scheme.create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(pipe)
    return receiver


def _by_hand(pipe: Any, say: Any, strategy: str, how: str) -> None:
    model = tools.filled(0.0)
    receiver = _receiver(pipe, strategy, how, model)
    if receiver._transport.pipe.poll(tools.PATIENCE):
        data, message = receiver._transport.pipe.recv()
        assert message == "update_weights"
        model_id, weights = data
        assert model_id == "policy"
        receiver.apply_weights(weights)
    say.send(tools.value_of(model))
    os._exit(0)


def _receives(pipe: Any, say: Any, strategy: str, how: str, count: int = 1, make: Any = MP) -> None:
    model = tools.filled(0.0)
    receiver = _receiver(pipe, strategy, how, model, make)
    seen = []
    for _ in range(count):
        assert receiver.receive(timeout=tools.PATIENCE)
        seen.append(tools.value_of(model))
    say.send(seen)
    os._exit(0)


def _bare(pipe: Any, say: Any) -> None:
    transport = legacy.MPTransport(pipe)
    found = transport.receive_weights(timeout=tools.PATIENCE)
    assert found is not None
    transport.send_ack("updated")
    say.send((found[0], isinstance(found[1], dict), found[1]["bias"].tolist()))
    os._exit(0)


def _bare_memory(pipe: Any, say: Any) -> None:
    transport = legacy.SharedMemTransport()
    transport.register_pipe(pipe)
    transport.receive_weights(timeout=tools.PATIENCE)
    say.send(transport.policy_weights["policy"]["bias"].tolist())
    os._exit(0)


class _Worker:
    """A forked process that runs one of these functions; :meth:`said` is what it said."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.pipe, child = Pipe()
        self._mine, theirs = Pipe()
        self.process = FORK.Process(target=target, args=(child, theirs, *args))
        self.process.start()
        child.close()
        theirs.close()

    def said(self) -> Any:
        said = tools.recv(self._mine)
        self.process.join(tools.PATIENCE)
        assert self.process.exitcode == 0
        return said

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._mine.close()
        self.process.kill()
        self.process.join()
        self.process.close()


# -- one side has a transport, the other a scheme -----------------------------------------------


@pytest.mark.parametrize("how", ["init", "create"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_transport_sends_and_a_worker_reads_the_pipe(
    how: str, strategy: str, asynchronous: bool
) -> None:
    with _Worker(_by_hand, strategy, how) as work, legacy.MPTransport(work.pipe) as transport:
        assert transport.check_connection()
        if asynchronous:
            transport.send_weights_async("policy", _ones())
            transport.wait_ack()
        else:
            transport.send_weights("policy", _ones())
        assert work.said() == 1.0


@pytest.mark.parametrize("how", ["init", "create"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_scheme_sends_and_a_worker_reads_the_pipe(how: str, strategy: str) -> None:
    with _Worker(_by_hand, strategy, how) as work, MP(strategy=strategy) as scheme:  # type: ignore[arg-type]
        scheme.init_on_sender(model_id="policy", pipes=[work.pipe])
        scheme.get_sender().send(_ones() if strategy == "state_dict" else _td())
        assert work.said() == 1.0


@pytest.mark.parametrize("how", ["init", "create"])
def test_a_worker_gets_all_that_a_transport_sends(how: str) -> None:
    with _Worker(_receives, "state_dict", how, 4) as work:
        with legacy.MPTransport(work.pipe) as transport:
            for value in (1.0, 2.0, 3.0):  # none is skipped, and each is answered
                transport.send_weights_async("policy", _ones(value))
            for _ in range(3):
                transport.wait_ack()
            transport.send_weights("policy", _td(4.0))
            assert work.said() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("how", ["init", "create"])
def test_a_sender_with_workers_of_its_own(how: str) -> None:
    with _Worker(_receives, "tensordict", how, 2) as work:
        sender = MP(strategy="state_dict").create_sender()
        sender.register_worker(0, work.pipe)
        sender.update_weights(_ones())
        sender.send_async(_ones(2.0))
        sender.wait_async()
        assert work.said() == [1.0, 2.0]
        sender._close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [MP, SHM])
def test_a_scheme_sends_and_a_transport_receives(make: Any, strategy: str) -> None:
    with _Worker(_bare) as work, make(strategy=strategy) as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[work.pipe])
        scheme.get_sender().send(_ones() if strategy == "state_dict" else _td())
        assert work.said() == ("policy", strategy == "state_dict", [1.0, 1.0])


@pytest.mark.parametrize("make", [MP, SHM])
def test_a_scheme_sends_and_shared_memory_receives(make: Any) -> None:
    with _Worker(_bare_memory) as work, make(strategy="tensordict") as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[work.pipe])
        scheme.get_sender().send(_td())
        assert work.said() == [1.0, 1.0]


@pytest.mark.parametrize("make", [MP, SHM])
@pytest.mark.parametrize("kind", ["pipe", "memory"])
def test_a_transport_sends_and_a_scheme_receives(make: Any, kind: str) -> None:
    with _Worker(_receives, "tensordict", "init", 1, make) as work:
        if kind == "pipe":
            transport: Any = legacy.MPTransport(work.pipe)
        else:
            transport = legacy.SharedMemTransport()
            transport.register_pipe(work.pipe)
        with transport:
            transport.send_weights("policy", _td())
            assert work.said() == [1.0]


def test_shared_memory_changes_a_worker_without_its_help() -> None:
    mine, theirs = Pipe()
    model = tools.filled(0.0)
    with SHM() as scheme, legacy.SharedMemTransport() as transport:
        transport.register_pipe(mine)
        scheme.init_on_worker(model_id="policy", pipe=theirs, model=model)
        for value in (1.0, 2.0):
            transport.send_weights("policy", _td(value))
            assert tools.value_of(model) == value
        with pytest.raises(RuntimeError, match="Expected acknowledgment 'updated', got"):
            transport.send_weights("policy", TensorDict({"weight": torch.zeros(1)}, []))
        assert tools.value_of(model) == 2.0
    assert tools.portal_threads() == []


def test_a_transport_that_comes_late_gets_the_newest() -> None:
    mine, theirs = Pipe()
    with MP() as scheme, legacy.MPTransport(theirs) as transport:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        for value in (1.0, 2.0):
            with pytest.warns(UserWarning, match="no worker has attached"):
                sender.send(_ones(value))
        found = transport.receive_weights(timeout=tools.PATIENCE)
        assert found is not None
        assert found[1]["bias"].tolist() == [2.0, 2.0]
        transport.send_ack()
        assert transport.receive_weights(timeout=0.05) is None
        sender.send_async(_ones(3.0))
        found = transport.receive_weights(timeout=tools.PATIENCE)
        transport.send_ack("no")
        with pytest.raises(aiosync.PartialSyncError, match="no"):
            sender.wait_async()


# -- what goes wrong ----------------------------------------------------------------------------


def _keep_open(pipe: Any, make: Any, ends: tuple[int, int]) -> None:
    """Send once, while a forked process keeps a copy of the pipe, and be killed."""
    os.close(ends[1])
    if os.fork() == 0:
        os.read(ends[0], 1)  # until the test has ended
        os._exit(0)
    if make is legacy.MPTransport:
        make(pipe).send_weights("policy", _ones())
    else:
        scheme = make()
        scheme.init_on_sender(model_id="policy", pipes=[pipe])
        scheme.get_sender().send(_ones())
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("make", [legacy.MPTransport, MP])
@pytest.mark.parametrize("how", ["init", "create"])
def test_the_trainer_is_killed(how: str, make: Any) -> None:
    mine, theirs = Pipe()
    ends = os.pipe()
    trainer = FORK.Process(target=_keep_open, args=(mine, make, ends))
    trainer.start()
    mine.close()
    model = tools.filled(0.0)
    receiver = _receiver(theirs, "state_dict", how, model)
    try:
        assert receiver.receive(timeout=tools.PATIENCE)
        assert tools.value_of(model) == 1.0
        assert receiver._transport.pipe.poll(tools.PATIENCE)
        with pytest.raises(EOFError):
            receiver._transport.pipe.recv()
        with pytest.raises(aiosync.PeerClosed):
            receiver.receive(timeout=tools.PATIENCE)
        assert not receiver._transport.check_connection()
    finally:
        receiver._close()
        receiver._scheme.shutdown()
        trainer.join()
        trainer.close()
        for end in ends:
            os.close(end)


def _never_answers(pipe: Any, say: Any) -> None:
    transport = legacy.MPTransport(pipe)
    transport.receive_weights(timeout=tools.PATIENCE)
    say.send("has it")
    time.sleep(tools.PATIENCE)


def test_a_worker_with_a_transport_is_killed() -> None:
    with _Worker(_never_answers) as work, MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[work.pipe])
        sender = scheme.get_sender()
        sender.send_async(_ones())
        assert tools.recv(work._mine) == "has it"
        work.process.kill()
        with pytest.raises(aiosync.PartialSyncError, match="worker 0"):
            sender.wait_async()


@pytest.mark.parametrize("how", ["init", "create"])
def test_weights_that_do_not_fit_are_answered(how: str) -> None:
    mine, theirs = Pipe()
    model = tools.filled(0.0)
    with legacy.MPTransport(mine) as transport:
        receiver = _receiver(theirs, "state_dict", how, model)
        transport.send_weights_async("policy", {"weight": torch.zeros(2, 4)})
        with pytest.raises((aiosync.ApplyError, aiosync.ManifestMismatch)) as caught:
            receiver.receive(timeout=tools.PATIENCE)
        assert any("strict=False" in note for note in caught.value.__notes__)
        with pytest.raises(RuntimeError, match=r"ManifestMismatch|do not fit"):
            transport.wait_ack()
        transport.send_weights_async("policy", _ones(2.0))
        assert receiver.receive(timeout=tools.PATIENCE)
        transport.wait_ack()
        assert tools.value_of(model) == 2.0
        receiver._close()
        receiver._scheme.shutdown()
    assert tools.portal_threads() == []


@pytest.mark.parametrize("data", [b"ab", b"a message of some other program" * 5])
def test_a_pipe_with_something_else_in_it(data: bytes) -> None:
    mine, theirs = Pipe()
    with theirs, MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        theirs.send_bytes(data)
        with pytest.raises(aiosync.PartialSyncError, match="something other than weights"):
            scheme.get_sender().send(_ones())
    mine, theirs = Pipe()
    with mine, MP() as scheme:
        scheme.init_on_worker(model_id="policy", pipe=theirs, model=tools.filled(0.0))
        mine.send_bytes(data)
        with pytest.raises(aiosync.RemoteProtocolError, match="something other than weights"):
            scheme.get_receiver().receive(timeout=tools.PATIENCE)


def test_transports_of_two_kinds() -> None:
    mine, theirs = Pipe()
    with legacy.MPTransport(mine) as left, legacy.SharedMemTransport() as right:
        right.register_pipe(theirs)
        left.send_weights_async("policy", _td())
        with pytest.raises(aiosync.RemoteProtocolError, match="use the same on both sides"):
            right.receive_weights()


def test_a_worker_that_is_closed_before_the_trainer_said_anything() -> None:
    for closes in (True, False):
        mine, theirs = Pipe()
        scheme = MP()
        scheme.init_on_worker(model_id="policy", pipe=theirs, model=tools.filled(0.0))
        receiver = scheme.get_receiver()
        assert not receiver.receive()
        assert not receiver._transport.pipe.poll()
        assert receiver._transport.receive_weights(timeout=0.01) is None
        assert receiver._transport.check_connection()
        if closes:
            scheme.shutdown()
            with pytest.raises(aiosync.TransportClosed):
                receiver.receive()
        del scheme, receiver  # the fixture of every test looks for what is left
        mine.close()


def _greeting(pid: int | str, what: bytes) -> bytes:
    return encode_frame(Setup("process", f"{pid:0>10}", what))


def _waits(make: str, pipe: Any) -> tuple[Any, Any]:
    """What uses this end of a pipe, and a function that waits for the other end."""
    if make == "transport":
        transport = legacy.MPTransport(pipe)
        return transport, lambda: transport.receive_weights(timeout=tools.PATIENCE)
    scheme = MP()
    if make == "sender":
        scheme.init_on_sender(model_id="policy", pipes=[pipe])
        return scheme, lambda: scheme.get_sender().send(_ones())
    scheme.init_on_worker(model_id="policy", pipe=pipe, model=tools.filled(0.0))
    return scheme, lambda: scheme.get_receiver().receive(timeout=tools.PATIENCE)


@pytest.mark.parametrize("pid", ["9999999999", str(2**31), "9" * 1000])
@pytest.mark.parametrize("make", ["transport", "worker", "sender"])
def test_a_process_that_no_kernel_has(make: str, pid: str) -> None:
    mine, theirs = Pipe()
    os.write(theirs.fileno(), _greeting(pid, b"pipe  "))
    user, wait = _waits(make, mine)
    kind = aiosync.PartialSyncError if make == "sender" else aiosync.RemoteProtocolError
    with theirs, user:
        for _ in range(2):
            with pytest.raises(
                kind, match=r"says that it is process|unknown greeting|something other"
            ):
                wait()


@pytest.mark.parametrize("what", [b"pipe  ", b"memory"])
def test_a_worker_is_told_what_is_wrong_with_what_a_transport_sent(what: bytes) -> None:
    for late in (False, True):
        mine, theirs = Pipe()
        user, wait = _waits("worker", mine)
        with theirs, user:
            os.write(theirs.fileno(), _greeting(os.getpid(), what))
            if late:  # the worker has attached by then
                assert not user.get_receiver().receive(timeout=0.05)
            os.write(theirs.fileno(), b"garbage" * 50)
            for _ in range(2):
                with pytest.raises(aiosync.RemoteProtocolError, match="not aiosync"):
                    wait()


@pytest.mark.parametrize("make", ["worker", "sender"])
def test_half_a_greeting_on_a_pipe_that_stays_open(
    make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiosync.legacy._greeting._REST_SECONDS", 0.1)
    mine, theirs = Pipe()
    os.write(theirs.fileno(), _greeting(os.getpid(), b"scheme")[:17])
    user, wait = _waits(make, mine)
    kind = aiosync.PartialSyncError if make == "sender" else aiosync.TransportBroken
    with theirs, user, pytest.raises(kind, match="stopped in the middle of its greeting"):
        wait()


def test_both_ends_are_senders() -> None:
    mine, theirs = Pipe()
    left, send = _waits("sender", mine)
    right, _ = _waits("sender", theirs)
    with left, right:
        right.get_sender().send_async(_ones())
        for call in (send, right.get_sender().wait_async):
            with pytest.raises(aiosync.PartialSyncError, match="both ends of this pipe are sender"):
                call()


def test_both_ends_are_workers() -> None:
    mine, theirs = Pipe()
    left, receive = _waits("worker", mine)
    right, receive_too = _waits("worker", theirs)
    with left, right:
        for call in (receive, receive_too, receive):
            with pytest.raises(ValueError, match="both ends of this pipe are workers"):
                call()


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("make", [MP, SHM])
def test_a_worker_is_killed_between_its_greeting_and_its_hello(make: Any, reaped: bool) -> None:
    mine, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        with socket.socket(fileno=theirs.fileno()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # as workers do
            sock.sendall(_greeting(os.getpid(), b"worker"))
            signal.pause()
    assert mine.poll(tools.PATIENCE)
    with theirs, make(timeout=tools.PATIENCE) as scheme:  # this process keeps the worker's end
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        if reaped:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            scheme.get_sender().send_async(_td())
        else:
            scheme.get_sender().send_async(_td())
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(aiosync.PartialSyncError, match="worker 0 could not attach") as caught:
            scheme.get_sender().wait_async()
        assert isinstance(caught.value.failed[0], aiosync.PeerClosed)
    if not reaped:
        os.waitpid(pid, 0)


# -- what weights may be ------------------------------------------------------------------------


class Many(nn.Module):
    """Everything in which the two strategies differ."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.extra = value
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)

    def get_extra_state(self) -> float:
        return self.extra

    def set_extra_state(self, state: float) -> None:
        self.extra = state


@pytest.mark.parametrize("ours", STRATEGIES)
@pytest.mark.parametrize("its", STRATEGIES)
@pytest.mark.parametrize("make", [MP, SHM])
def test_each_side_has_a_strategy_of_its_own(make: Any, ours: str, its: str) -> None:
    mine, theirs = Pipe()
    source, target = Many(3.0), Many(0.0)
    with make(strategy=ours) as scheme, make(strategy=its) as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs, model=target)
        assert (other.strategy, other.strategy_str) == (its, its)
        for weights in (source, source.state_dict(), TensorDict.from_module(source)):
            with torch.no_grad():
                source.one.weight.add_(1.0)
            scheme.get_sender().send_async(weights)
            assert other.get_receiver().receive(timeout=tools.PATIENCE)
            scheme.get_sender().wait_async()
            assert torch.equal(target.one.weight, source.one.weight)
            assert target.two.weight is target.one.weight
            assert target.norm.running_var.tolist() == [3.0] * 3
        assert target.extra == 3.0


@pytest.mark.parametrize("how", ["init", "create", "SharedMem"])
def test_a_subset_and_other_dtypes_where_they_are_allowed(how: str) -> None:
    mine, theirs = Pipe()
    model = tools.filled(0.0)
    make = SHM if how == "SharedMem" else MP
    with make(strategy="state_dict") as scheme, make(strategy="state_dict", strict=False) as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        if how == "create":
            receiver = other.create_receiver()
            receiver.register_model(model)
            receiver.register_worker_transport(theirs)
        else:
            other.init_on_worker(model_id="policy", pipe=theirs, model=model)
            receiver = other.get_receiver()
        for weights, bias in (
            ({"bias": torch.ones(2)}, 1.0),
            ({"bias": torch.full((2,), 2.0, dtype=torch.float64), "more": torch.ones(1)}, 2.0),
            ({}, 2.0),
        ):
            scheme.get_sender().send_async(weights)
            assert receiver.receive(timeout=tools.PATIENCE)
            scheme.get_sender().wait_async()
            assert model.bias.tolist() == [bias] * 2
            assert model.weight.dtype == torch.float32
            assert not model.weight.any()
        receiver._close()


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"bias": torch.ones(2)},
        {**_ones(), "more": torch.ones(1)},
        {"bias": torch.ones(2).double()},
    ],
)
def test_otherwise_the_errors_say_how(weights: Any) -> None:
    mine, theirs = Pipe()
    model = tools.filled(0.0)
    with MP() as scheme, MP() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs, model=model)
        scheme.get_sender().send_async(weights)
        with pytest.raises(aiosync.ApplyError) as theirs_says:
            other.get_receiver().receive(timeout=tools.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError) as ours_says:
            scheme.get_sender().wait_async()
        for caught in (theirs_says, ours_says):
            assert any("strict=False" in note for note in caught.value.__notes__)
        assert tools.value_of(model) == 0.0
    with pytest.raises(ValueError, match="do not fit") as applied:
        legacy.WeightStrategy().apply_weights(model, weights)
    assert any("strict=False" in note for note in applied.value.__notes__)
    legacy.WeightStrategy().apply_weights(model, weights, strict=False)


@pytest.mark.parametrize("first", STRATEGIES)
def test_weights_of_one_form_for_a_strategy_of_the_other(first: Any) -> None:
    source = tools.filled(1.0)
    weights = legacy.WeightStrategy(first).extract_weights(source)
    for second in STRATEGIES:
        target = tools.filled(0.0)
        legacy.WeightStrategy(second).apply_weights(target, weights)  # type: ignore[arg-type]
        assert tools.value_of(target) == 1.0


# -- registered buffers of shared memory --------------------------------------------------------


def _buffer() -> TensorDict:
    return _td(0.0).share_memory_()


def test_a_registered_buffer_gets_what_is_sent() -> None:
    buffer = _buffer()
    with legacy.SharedMemTransport({"policy": buffer}) as transport:
        transport.send_weights("policy", _td())
        assert buffer["weight"].tolist() == [[1.0] * 4] * 2
        assert transport.policy_weights["policy"] is buffer


def test_a_registered_buffer_of_a_scheme() -> None:
    buffer = _buffer()
    scheme = SHM(policy_weights={"policy": buffer}, strategy="tensordict", auto_register=False)
    pid = os.fork()  # it has the program's own shared memory, as programs of that time had
    if pid == 0:
        while not buffer["bias"].all():
            time.sleep(0.001)
        os._exit(0)
    with scheme, scheme.create_transport(None) as transport:
        transport.send_weights("policy", _td())
        assert buffer["bias"].tolist() == [1.0, 1.0]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with pytest.raises(KeyError, match="not registered"):
            transport.send_weights("critic", _td())
        twin = pickle.loads(pickle.dumps(scheme))
        transport.send_weights("policy", _td(2.0))
        assert twin.policy_weights["policy"]["bias"].tolist() == [1.0, 1.0]  # nothing is aliased


def test_a_scheme_sees_what_its_transport_registers() -> None:
    with SHM() as scheme, scheme.create_transport(None) as transport:
        for value in (1.0, 2.0):
            transport.send_weights("policy", _td(value))
            assert scheme.policy_weights["policy"]["bias"].tolist() == [value] * 2
    with legacy.NoWeightSyncScheme() as scheme:
        scheme.create_transport(None).send_weights("policy", _ones())

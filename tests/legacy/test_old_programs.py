"""Programs in the style of that generation's users, whose two sides need not be of one kind.

There may be a transport on one side and a scheme on the other, a pipe that the program reads by
hand, or another strategy.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import ExitStack
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import aiosync
from aiosync import legacy
from tests.legacy import _tools as workers
from tests.legacy._tools import MP, SHM, STRATEGIES, ones, td
from tests.sync import _tools as tools

TRANSPORTS = ["MPTransport", "SharedMemTransport"]
SCHEMES = {"MP": MP, "SHM": SHM}
SENDERS = [*TRANSPORTS, "created", *SCHEMES]
RECEIVERS = [*SENDERS, "by hand", "created, by hand"]
# Each kind meets one fixed kind of the other side, for which any other of that side would do.
PAIRS = [
    *((sender, "MP") for sender in SENDERS[1:]),
    *(("MPTransport", each) for each in RECEIVERS),
]


def _link_of(receiver: Any) -> Any:
    return receiver._transport  # noqa: SLF001 - programs of that time used it (documented)


def _receiver(
    stack: ExitStack, kind: str, pipe: Any, model: Any, strategy: Any = "state_dict", **options: Any
) -> Any:
    """Return a receiver: of an initialised scheme, or one by itself with a transport of its own."""
    scheme = stack.enter_context(SCHEMES.get(kind, MP)(strategy=strategy, **options))
    if "created" not in kind:
        scheme.init_on_worker(model_id="policy", pipe=pipe, model=model)
        return scheme.get_receiver()
    receiver = scheme.create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(pipe)
    stack.callback(_link_of(receiver).close)
    return receiver


def _sends(stack: ExitStack, kind: str, pipe: Any, strategy: str) -> Any:
    """Return a function that sends weights and waits until they are answered."""
    if kind in TRANSPORTS:
        transport = stack.enter_context(workers.transport(kind, pipe))
        assert isinstance(transport, legacy.TransportBackend)
        assert transport.check_connection()
        return lambda weights: transport.send_weights("policy", weights)
    scheme = stack.enter_context(SCHEMES.get(kind, MP)(strategy=strategy))  # type: ignore[arg-type]
    if kind == "created":
        sender = scheme.create_sender()
        sender.register_worker(0, pipe)
        return sender.update_weights
    scheme.init_on_sender(model_id="policy", pipes=[pipe])
    return scheme.get_sender().send


def _takes(stack: ExitStack, kind: str, pipe: Any, strategy: str) -> Any:
    """Return a function that waits for weights, answers them and returns the biases."""
    if kind in TRANSPORTS:
        transport = stack.enter_context(workers.transport(kind, pipe))

        def take() -> Any:
            found = transport.receive_weights(timeout=tools.PATIENCE)
            transport.send_ack()
            return (transport.policy_weights["policy"] if found is None else found[1])["bias"]

        return take
    model = tools.filled(0.0)
    receiver = _receiver(stack, kind, pipe, model, strategy)

    def apply() -> Any:
        if "by hand" in kind:
            assert _link_of(receiver).pipe.poll(tools.PATIENCE)
            (model_id, weights), message = _link_of(receiver).pipe.recv()
            assert (model_id, message) == ("policy", "update_weights")
            receiver.apply_weights(weights)
        else:
            assert receiver.receive(timeout=tools.PATIENCE)
        return model.bias

    return apply


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_the_two_sides_may_differ(sender: str, receiver: str, strategy: str) -> None:
    mine, theirs = Pipe()
    with ExitStack() as stack:
        send = _sends(stack, sender, mine, strategy)
        take = _takes(stack, receiver, theirs, strategy)
        for value in (1.0, 2.0):
            weights = ones(value) if strategy == "state_dict" else td(value)
            sending = tools.in_thread(lambda weights=weights: send(weights))
            assert take().tolist() == [value] * 2
            sending.join(tools.PATIENCE)
            assert not sending.is_alive()


@pytest.mark.parametrize(("make", "strategy"), [(MP, "state_dict"), (SHM, "tensordict")])
def test_a_transport_that_comes_late_gets_the_newest(make: Any, strategy: str) -> None:
    mine, theirs = Pipe()
    with make(strategy=strategy) as scheme, workers.transport("MPTransport", theirs) as transport:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        for value in (1.0, 2.0):
            sender.send_async(ones(value) if strategy == "state_dict" else td(value))
            with pytest.warns(UserWarning, match="no worker has attached"):
                sender.wait_async()
        found = transport.receive_weights(timeout=tools.PATIENCE)
        assert found is not None
        assert isinstance(found[1], dict if strategy == "state_dict" else TensorDict)
        assert found[1]["bias"].tolist() == [2.0, 2.0]
        transport.send_ack()
        assert transport.receive_weights(timeout=0.05) is None
        sender.send_async(ones(3.0))
        transport.receive_weights(timeout=tools.PATIENCE)
        transport.send_ack("no")
        with pytest.raises(aiosync.PartialSyncError, match="no"):
            sender.wait_async()


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"ab", b"a message of some other program" * 5])
def test_a_pipe_with_something_else_in_it(data: bytes) -> None:
    mine, theirs = Pipe()
    with theirs, MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        theirs.send_bytes(data)
        with pytest.raises(aiosync.PartialSyncError, match="is not aiosync"):
            scheme.get_sender().send(ones())
    mine, theirs = Pipe()
    with mine, MP() as scheme:
        scheme.init_on_worker(model_id="policy", pipe=theirs, model=tools.filled(0.0))
        mine.send_bytes(data)
        with pytest.raises(aiosync.RemoteProtocolError, match="is not aiosync"):
            scheme.get_receiver().receive(timeout=tools.PATIENCE)


# -- forms of weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["MP", "SHM", "created"])
def test_a_subset_and_other_dtypes_where_they_are_allowed(kind: str) -> None:
    model = tools.filled(0.0)
    mine, theirs = Pipe()
    with SCHEMES.get(kind, MP)(strategy="state_dict") as scheme, ExitStack() as stack:
        receiver = _receiver(stack, kind, theirs, model, strict=False)
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        for weights, bias in (
            ({"bias": torch.ones(2)}, 1.0),
            ({"bias": torch.full((2,), 2.0, dtype=torch.float64), "more": torch.ones(1)}, 2.0),
            ({}, 2.0),
        ):
            workers.deliver(scheme.get_sender(), receiver, weights)
            assert model.bias.tolist() == [bias] * 2
            assert model.weight.dtype == torch.float32
            assert not model.weight.any()


# -- registered buffers of shared memory --------------------------------------------------------


def test_a_registered_buffer_of_a_scheme() -> None:
    buffer = td(0.0).share_memory_()
    scheme = SHM(policy_weights={"policy": buffer}, strategy="tensordict", auto_register=False)
    # The child has the program's own shared memory, as workers of such programs had.
    pid = os.fork()
    if pid == 0:
        while not buffer["bias"].all():
            time.sleep(0.001)
        os._exit(0)
    transport = scheme.create_transport(None)
    assert transport.policy_weights["policy"] is buffer
    transport.send_weights("policy", td())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    register = transport.register_weights
    workers.refuses(
        (KeyError, "not registered", lambda: transport.send_weights("critic", td())),
        (RuntimeError, "registered already", lambda: register("policy", td())),
        (ValueError, "TensorDict", lambda: register("critic", ones())),
    )
    twin = pickle.loads(pickle.dumps(scheme))
    transport.send_weights("policy", td(2.0))
    # The twin has a copy of the buffer, which later sends do not change.
    assert twin.policy_weights["policy"]["bias"].tolist() == [1.0, 1.0]
    scheme.auto_register = True
    scheme.create_transport(None).send_weights("critic", td(3.0))
    assert scheme.policy_weights["critic"]["bias"].tolist() == [3.0, 3.0]

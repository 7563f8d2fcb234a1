"""TorchRL's InferenceServer with the schemes of ``aiosync.sync``."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport

import aiosync.legacy
import aiosync.sync
from aiosync.errors import PartialSyncError
from tests.integrations._worlds import Values, actions, make_policy, set_value
from tests.support.accelerator import deferred
from tests.support.waiting import wait_until

PATIENCE = 20.0
SCHEMES = ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "TCPWeightSyncScheme"]


@contextmanager
def serving(
    name: str = "SharedMemWeightSyncScheme", role: str = "", **options: Any
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield a trainer's scheme and policy, a server in a thread of this process, and a client.

    With ``role`` the server gets a scheme that is "initialized" or "connected" already.
    """
    trained, served = make_policy(7.0), make_policy()
    sender = getattr(aiosync.sync, name)(**options)
    sender.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    transport = ThreadingTransport()
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    if role:
        receiver.init_on_receiver(model_id="policy", model=served)
    if role == "connected":
        receiver.connect()
    server = InferenceServer(served, transport, weight_sync=receiver, max_batch_size=8)
    server.start()
    try:
        connecting.join(PATIENCE)
        assert not connecting.is_alive()
        yield sender, trained, server, transport.client()
    finally:
        server.shutdown()
        receiver.shutdown()
        sender.shutdown()


@pytest.mark.parametrize("generation", [aiosync.sync, aiosync.legacy])
def test_servers_of_one_trainer_have_an_index_each(generation: Any) -> None:
    """The trainer chooses it, unless the program gave a server one."""
    trained, clients = make_policy(7.0), []
    with ExitStack() as opened:
        sender = generation.SharedMemWeightSyncScheme(timeout=PATIENCE)
        opened.callback(sender.shutdown)
        sender.init_on_sender(model_id="policy", model=trained, num_workers=4)
        copies = [pickle.loads(pickle.dumps(sender)) for _ in range(4)]
        connecting = threading.Thread(target=sender.connect)
        connecting.start()
        opened.callback(connecting.join, PATIENCE)
        copies[0].worker_idx = 3
        for number, receiver in enumerate(copies):
            opened.callback(receiver.shutdown)
            transport, served = ThreadingTransport(), make_policy()
            server = InferenceServer(served, transport, weight_sync=receiver)
            if number == 1:
                receiver.init_on_receiver("policy", server, model=served, worker_idx=0)
            opened.enter_context(server)
            clients.append(transport.client())
            wait_until(lambda receiver=receiver: receiver.version == 1)
        connecting.join(PATIENCE)
        assert [receiver.worker_idx for receiver in copies] == [3, 0, 1, 2]
        assert set(sender.worker_versions) == {0, 1, 2, 3}
        set_value(trained, 1.0)
        sending = threading.Thread(target=sender.send)
        sending.start()
        wait_until(lambda: [ask(client) for client in clients] == [(1.0, 1)] * 4)
        sending.join(PATIENCE)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_call_that_waits_leaves_the_update_to_the_server(name: str) -> None:
    """Every label is that of the weights, also if a call waits for them meanwhile."""
    with serving(name) as (sender, trained, server, client):
        _, before = ask(client)
        for number in range(1, 11):
            set_value(trained, float(number))
            sender.send_async()
            server.weight_sync.wait_for_version(1 + number, timeout=PATIENCE)
            assert ask(client) == (float(number), before + number)
            sender.wait_async()


@contextmanager
def warned(client: Any, text: str, answer: tuple[float, int]) -> Iterator[None]:
    """Check that the server's thread warns soon after the block, and answers as before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        give_up = time.monotonic() + PATIENCE
        while not caught and time.monotonic() < give_up:
            assert ask(client) == answer
    assert text in str(caught[0].message)
    assert [ask(client) for _ in range(5)] == [answer] * 5


def ask(client: Any) -> tuple[float, int]:
    """Return the value that computed an answer, and the version that labels it."""
    answer = client(TensorDict({"observation": torch.zeros(1)}, ()))
    return actions(answer).item(), int(answer["policy_version"])


@pytest.mark.parametrize("name", SCHEMES)
def test_every_answer_is_of_one_version_and_labelled_with_it(name: str) -> None:
    with serving(name) as (sender, trained, _server, client):
        assert ask(client) == (7.0, 0)
        stop = threading.Event()
        failed: list[BaseException] = []

        def train() -> None:
            try:
                version = 0
                while not stop.is_set():
                    version += 1
                    set_value(trained, float(version))
                    sender.send()
            except BaseException as exc:  # noqa: BLE001 - the test raises it
                failed.append(exc)

        training = threading.Thread(target=train)
        training.start()
        seen = set()
        give_up = time.monotonic() + PATIENCE
        while len(seen) < 50 and time.monotonic() < give_up and not failed:
            value, version = ask(client)
            assert value == (float(version) if version else 7.0)
            seen.add(version)
        stop.set()
        # The server polls between batches: the last send ends without a request.
        training.join(PATIENCE)
        assert not failed
        assert len(seen) >= 50


def test_the_server_goes_on_without_its_trainer() -> None:
    with serving() as (sender, trained, server, client):
        set_value(trained, 1.0)
        sender.send()
        assert ask(client) == (1.0, 1)
        with warned(client, "the trainer is gone", (1.0, 1)):
            sender.shutdown()
        assert server.policy_version == 1


def test_an_update_that_does_not_fit_is_refused_and_the_server_goes_on() -> None:
    with serving() as (sender, trained, _server, client):
        wrong = Values()
        wrong.values[0] = torch.nn.Parameter(torch.zeros(3))
        broken = make_policy()
        broken.module = wrong
        with warned(client, "the server refused an update", (7.0, 0)):
            with pytest.raises(PartialSyncError, match=r"values\.0"):
                sender.send(broken)
        set_value(trained, 5.0)
        sender.send()
        value, version = ask(client)
        assert value == 5.0
        assert version > 0


def test_an_update_of_a_slow_accelerator_is_applied_before_the_next_batch() -> None:
    with deferred() as device, serving() as (sender, trained, _server, client):
        synchronize = device.synchronize

        def slowly(of: torch.device) -> None:
            time.sleep(0.005)
            synchronize(of)

        device.synchronize = slowly  # type: ignore[method-assign]
        assert ask(client) == (7.0, 0)
        for version in range(1, 11):
            set_value(trained, float(version))
            sender.send()
            assert ask(client) == (version, version)

"""The older generation's transports, used by themselves over pipes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import TCPStore

import aiosync
from aiosync import legacy
from tests.legacy import _programs
from tests.legacy import _tools as workers
from tests.schemes import _harness as harness
from tests.schemes import _rpc_group
from tests.sync import _tools as tools

ROOT = Path(__file__).parents[2]


def _td(value: float) -> TensorDict:
    return TensorDict({"weight": torch.full((2,), value), "inner": {"bias": torch.ones(1)}}, [])


def _pair() -> tuple[legacy.MPTransport, legacy.MPTransport]:
    one, two = Pipe()
    return legacy.MPTransport(one), legacy.MPTransport(two)


@pytest.mark.slow
def test_two_processes_through_a_pipe() -> None:
    mine, theirs = Pipe()
    with legacy.MPTransport(mine) as transport, workers.worker(None, theirs) as work:
        assert isinstance(transport, legacy.TransportBackend)
        work("open", "MPTransport")
        assert transport.check_connection()
        assert work("take", 0.05) is None
        transport.send_weights_async("policy", _td(1.0))
        assert work("take") == ("policy", "TensorDict", 2.0)
        work("answer")
        transport.wait_ack()
        transport.send_weights_async("critic", {"weight": torch.ones(3)})
        assert work("take") == ("critic", "dict", 3.0)
        work("answer", "no")
        with pytest.raises(RuntimeError, match="Expected acknowledgment 'updated', got 'no'"):
            transport.check_ack()
        work.kill()
        tools.until(lambda: not transport.check_connection())
        with pytest.raises((aiosync.PeerClosed, aiosync.TransportBroken)):
            transport.send_weights("policy", _td(2.0))


def test_weights_keep_their_form_and_are_copies() -> None:
    one, two = _pair()
    with one, two:
        tied = torch.arange(3.0)
        sent = {"a.b": tied, "tied": tied, "step": torch.tensor(7), "note": "text"}
        one.send_weights_async("policy", sent)
        tied.zero_()
        found = two.receive_weights()
        assert found is not None
        model_id, weights = found
        assert (model_id, weights["note"], int(weights["step"])) == ("policy", "text", 7)
        assert weights["a.b"].tolist() == weights["tied"].tolist() == [0.0, 1.0, 2.0]
        one.send_weights_async("policy", _td(1.5))
        found = two.receive_weights()
        assert found is not None
        assert found[1]["inner", "bias"].tolist() == [1.0]
        assert weights["a.b"].tolist() == [0.0, 1.0, 2.0]  # as it was
        large = torch.arange(3_000_000, dtype=torch.float32)
        one.send_weights_async("policy", {"large": large})
        found = two.receive_weights(timeout=tools.PATIENCE)
        assert found is not None
        assert torch.equal(found[1]["large"], large)
    assert tools.portal_threads() == []


def test_nothing_is_lost_between_weights_and_answers() -> None:
    """Both ends send, and each first looks for something else than what comes first."""
    one, two = _pair()
    with one, two:
        for value in range(3):
            one.send_weights_async("policy", _td(float(value)))
            two.send_weights_async("critic", _td(float(-value)))
        for value in range(3):
            found = two.receive_weights(timeout=tools.PATIENCE)
            assert found is not None
            assert float(found[1]["weight"][0]) == value
            two.send_ack()
        for _ in range(3):
            one.wait_ack()  # reads past the weights that came before
        for value in range(3):
            found = one.receive_weights(timeout=tools.PATIENCE)
            assert found is not None
            assert (found[0], float(found[1]["weight"][0])) == ("critic", -value)
        assert one.receive_weights(timeout=0.01) is None


def test_answers_that_do_not_come() -> None:
    one, two = Pipe()
    with legacy.MPTransport(one, timeout=0.2) as left, legacy.MPTransport(two) as right:
        with pytest.raises(RuntimeError, match="No async send is pending"):
            left.wait_ack()
        with pytest.raises(RuntimeError, match="nothing to acknowledge"):
            right.send_ack()
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="not acknowledged within 0.2 s"):
            left.send_weights("policy", _td(1.0))
        assert workers.is_quick(started, 5.0)
        # A late answer does not count for the next send.
        assert right.receive_weights() is not None
        right.send_ack()
        left.send_weights_async("policy", _td(2.0))
        with pytest.raises(TimeoutError):
            left.wait_ack()


def test_what_is_not_of_this_format_is_an_error() -> None:
    one, two = Pipe()
    with legacy.MPTransport(one) as transport, two:
        two.send(("a pickle", "update"))
        with pytest.raises(aiosync.RemoteProtocolError):
            transport.receive_weights()
        assert not transport.check_connection()
    reader, writer = Pipe(duplex=False)
    with reader, writer, pytest.raises(ValueError, match="two-way"):
        legacy.MPTransport(writer)


def test_closing() -> None:
    one, two = _pair()
    two.send_weights_async("policy", _td(1.0))
    two.close()
    two.close()
    found = one.receive_weights()  # what was sent before is still there
    assert found is not None
    with pytest.raises(aiosync.PeerClosed):
        one.receive_weights(timeout=tools.PATIENCE)
    assert not one.check_connection()
    one.close()
    with pytest.raises(aiosync.TransportClosed):
        one.receive_weights()
    assert not one.check_connection()
    forgotten, other = _pair()
    assert forgotten.check_connection()
    assert other.check_connection()


@pytest.mark.slow
def test_shared_memory_between_processes() -> None:
    pipes = [Pipe() for _ in range(2)]
    transport: Any = legacy.SharedMemTransport()
    with (
        transport,
        workers.worker(None, pipes[0][1]) as one,
        workers.worker(None, pipes[1][1]) as two,
    ):
        for mine, _ in pipes:
            transport.register_pipe(mine)
        for work in (one, two):
            work("open", "SharedMemTransport")
            work.start("shared", "policy")
        weights = TensorDict({"weight": torch.ones(2000)}, [])  # more than travels in the socket
        transport.send_weights("policy", weights)
        assert (one.result(), two.result()) == (2000.0, 2000.0)
        weights["weight"].fill_(2.0)
        transport.send_weights("policy", weights)
        transport.send_weights("policy", weights)
        assert (one("shared", "policy"), two("shared", "policy")) == (4000.0, 4000.0)
        assert transport.receive_weights(timeout=0.0) is None
        assert transport.check_connection()
        two("close")
        tools.until(lambda: not transport.check_connection())
        with pytest.raises(aiosync.PeerClosed):
            transport.send_weights("policy", weights)
        assert one("shared", "policy") == 4000.0  # it was served
        one("close")


def test_registered_weights_of_shared_memory() -> None:
    one, two = Pipe()
    target = TensorDict({"weight": torch.zeros(3)}, [])
    left = legacy.SharedMemTransport({"policy": _td(0.0)}, auto_register=False)
    right = legacy.SharedMemTransport({"policy": target}, auto_register=False)
    with left, right:
        left.register_pipe(one)
        right.register_pipe(two)
        with pytest.raises(ValueError, match="must be a TensorDict"):
            left.register_weights("critic", {"a": torch.zeros(1)})  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="registered already"):
            left.register_weights("policy", target)
        with pytest.raises(ValueError, match="Unsupported weights type"):
            left.send_weights("policy", 3)
        with pytest.raises(KeyError, match="not registered"):
            left.send_weights("critic", target)
        assert right.check_connection()
        left.send_weights("policy", TensorDict({"weight": torch.ones(3)}, []))
        assert target["weight"].tolist() == [0.0] * 3  # only receive_weights() changes it
        right.receive_weights()
        assert target["weight"].tolist() == [1.0] * 3
        left.send_weights("policy", _td(2.0))
        with pytest.raises(ValueError, match="do not fit"):
            right.receive_weights()
        assert target["weight"].tolist() == [1.0] * 3
    assert tools.portal_threads() == []


# -- calls of remote objects --------------------------------------------------------------------


@pytest.mark.slow
def test_rpc_calls_the_remote_object() -> None:
    ctx = harness.context("forkserver")
    port = _rpc_group.free_port()
    crew = [ctx.Process(target=_programs.rpc_program, args=(rank, port)) for rank in range(2)]
    try:
        for process in crew:
            process.start()
        for process in crew:
            process.join(tools.PATIENCE)
            assert process.exitcode == 0
    finally:
        for process in crew:
            process.kill()
            process.join()
            process.close()


@pytest.mark.slow
def test_weights_through_a_store() -> None:
    port = _rpc_group.free_port()
    mine, theirs = Pipe()
    with mine, workers.worker(None, theirs) as work:
        work("open_store", port)
        store = TCPStore("127.0.0.1", port, is_master=False)
        transport = legacy.DistributedWeightSyncScheme().create_transport((store, 1))
        assert isinstance(transport, legacy.TransportBackend)
        assert transport.check_connection()
        work.start("take")
        weights = {"weight": torch.ones(3_000_000)}
        transport.send_weights_async("policy", weights)
        weights["weight"].zero_()
        assert work.result() == ("policy", "dict", 3_000_000.0)
        work("answer")
        transport.wait_ack()
        transport.send_weights_async("critic", _td(1.0))
        assert work("take") == ("critic", "TensorDict", 2.0)
        work("answer", "no")
        with pytest.raises(RuntimeError, match="Expected acknowledgment"):
            transport.wait_ack()
        assert work("take", 0.05) is None
        transport.timeout = 0.2
        with pytest.raises(TimeoutError, match="rank 1 did not answer within 0.2 s"):
            transport.send_weights("policy", _td(1.0))
        assert work("take") == ("policy", "TensorDict", 2.0)
        with pytest.raises(ValueError, match="expected .store, rank"):
            legacy.DistributedWeightSyncScheme().create_transport(store)


@pytest.mark.heavy  # a cluster of its own
def test_ray_calls_the_actors() -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-m", "tests.legacy._programs"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=55.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_arguments_of_remote_transports() -> None:
    with pytest.raises(ValueError, match="tensor_transport must be"):
        legacy.RayTransport(None, "carrier pigeon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="extract_as must be"):
        legacy.RayActorTransport(None, "zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected .collector_info"):
        legacy.RPCWeightSyncScheme().create_transport((1, 2))
    transport = legacy.RPCTransport(None, None, None)
    with pytest.raises(RuntimeError, match="No async send is pending"):
        transport.wait_ack()
    for make in (legacy.RPCWeightSyncScheme, legacy.RayWeightSyncScheme):
        assert make().strategy == "state_dict"
    assert legacy.RayModuleTransformScheme().strategy == "tensordict"
    scheme = legacy.DistributedWeightSyncScheme("gloo", False)
    assert (scheme.backend, scheme.sync, scheme.strategy) == ("gloo", False, "state_dict")
    assert isinstance(pickle.loads(pickle.dumps(scheme)), legacy.DistributedWeightSyncScheme)

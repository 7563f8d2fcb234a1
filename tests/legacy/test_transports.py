"""The older generation's transports, used by themselves over pipes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import HashStore, TCPStore

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
    source, target = (TensorDict({"weight": torch.zeros(3)}, []) for _ in range(2))
    left = legacy.SharedMemTransport({"policy": source})
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
            right.send_weights("critic", target)
        assert right.check_connection()
        left.send_weights("policy", TensorDict({"weight": torch.ones(3)}, []))
        assert target["weight"].tolist() == [0.0] * 3  # only receive_weights() changes it
        assert source["weight"].tolist() == [1.0] * 3
        right.receive_weights()
        assert target["weight"].tolist() == [1.0] * 3
        with pytest.raises(ValueError, match="do not fit"):
            left.send_weights("policy", _td(2.0))
        assert source["weight"].tolist() == [1.0] * 3
        left.send_weights("critic", _td(2.0))
        with pytest.raises(KeyError, match="not registered"):
            right.receive_weights()
        left.send_weights("policy", TensorDict({"weight": torch.full((3,), 3.0)}, []))
        right.receive_weights()
        assert target["weight"].tolist() == [3.0] * 3
    assert tools.portal_threads() == []


# -- what goes wrong ----------------------------------------------------------------------------


def _take_and_end(pipe: Any, kind: str) -> None:
    if kind == "MPTransport":
        transport: Any = legacy.MPTransport(pipe)
        transport.receive_weights(timeout=tools.PATIENCE)
        transport.send_ack()
    else:
        transport = legacy.SharedMemTransport()
        transport.register_pipe(pipe)
        transport.receive_weights(timeout=tools.PATIENCE)
    os._exit(0)  # at once, before anything can be sent behind our back


@pytest.mark.parametrize("kind", ["MPTransport", "SharedMemTransport"])
def test_an_answer_has_left_before_the_worker_ends(kind: str) -> None:
    for _ in range(5):
        mine, theirs = Pipe()
        process: Any = multiprocessing.get_context("fork").Process(
            target=_take_and_end, args=(theirs, kind)
        )
        process.start()
        theirs.close()
        if kind == "MPTransport":
            transport: Any = legacy.MPTransport(mine)
        else:
            transport = legacy.SharedMemTransport()
            transport.register_pipe(mine)
        with transport:
            transport.send_weights("policy", _td(1.0))
        process.join(tools.PATIENCE)
        assert process.exitcode == 0


def _sender_of(*pipes: Any) -> Any:
    sender: Any = legacy.MultiProcessWeightSyncScheme("state_dict").create_sender()
    for idx, pipe in enumerate(pipes):
        sender._register_worker(idx, pipe)
    return sender


def _receiver_of(transport: Any, model: Any) -> legacy.WeightReceiver:
    receiver = legacy.MultiProcessWeightSyncScheme("state_dict").create_receiver()
    receiver._transport = transport
    receiver.register_model(model)
    return receiver


@pytest.mark.parametrize("kind", ["pipe", "store"])
def test_what_does_not_fit_is_answered(kind: str) -> None:
    if kind == "pipe":
        mine, theirs = _pair()
    else:
        store: Any = HashStore()
        mine, theirs = (legacy.DistributedTransport(store, 1) for _ in range(2))  # type: ignore[assignment]
    mine.timeout = tools.PATIENCE
    model = tools.filled(0.0)
    receiver = _receiver_of(theirs, model)
    mine.send_weights_async("policy", {"other": torch.ones(1)})
    with pytest.raises(aiosync.ManifestMismatch):
        receiver.receive(timeout=tools.PATIENCE)
    with pytest.raises(RuntimeError, match="got 'ManifestMismatch: "):
        mine.wait_ack()
    for value in (1.0, 2.0):  # each answer belongs to its own weights
        mine.send_weights_async("policy", tools.filled(value).state_dict())
        assert receiver.receive(timeout=tools.PATIENCE)
        mine.wait_ack()
        assert tools.value_of(model) == value
    if kind == "pipe":
        mine.close()
        theirs.close()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_worker_does_not_keep_the_others_from_being_served(dead: int) -> None:
    ends = [Pipe() for _ in range(2)]
    sender = _sender_of(*(mine for mine, _ in ends))
    model = tools.filled(0.0)
    receiver = _receiver_of(legacy.MPTransport(ends[1 - dead][1]), model)
    live = sender._transports[1 - dead]
    ends[dead][1].close()
    tools.until(lambda: not sender._transports[dead].check_connection())
    sender.send_async(tools.filled(1.0))
    assert receiver.receive(timeout=tools.PATIENCE)
    with pytest.raises(aiosync.PartialSyncError) as caught:
        sender.wait_async()
    assert caught.value.acked == {1 - dead}
    assert list(caught.value.failed) == [dead]
    assert isinstance(caught.value.failed[dead], aiosync.PeerClosed)
    # No answer is left over: a send that nobody answers does not return.
    live.timeout = 0.1
    with pytest.raises(aiosync.PartialSyncError):
        sender.send(tools.filled(2.0))
    assert receiver.receive(timeout=tools.PATIENCE)
    with pytest.raises(TimeoutError):
        sender.send(tools.filled(3.0), worker_ids=1 - dead)
    with pytest.raises(ValueError, match="Worker 7 not registered"):
        sender.send(tools.filled(4.0), worker_ids=[1 - dead, 7])
    assert receiver.receive(timeout=tools.PATIENCE)
    assert not receiver.receive(timeout=0.05)  # nothing was sent to anybody
    assert tools.value_of(model) == 3.0
    sender._close()
    receiver._close()


def test_shared_memory_of_many_models_and_pipes() -> None:
    ends = [Pipe() for _ in range(2)]
    left, right = legacy.SharedMemTransport(), legacy.SharedMemTransport()
    with left, right:
        left.register_pipe(ends[1][0])
        for _, theirs in ends:
            right.register_pipe(theirs)
        right.receive_weights(timeout=0.01)
        state = {"net.weight": torch.ones(2), "net.bias": torch.zeros(1)}
        for number in range(20):  # nobody takes them meanwhile
            left.send_weights(f"model{number}", state)
        state["net.weight"].fill_(5.0)
        right.receive_weights(timeout=None)  # the other pipe stays silent
        assert len(right.policy_weights) == 20
        for transport in (left, right):
            assert transport.policy_weights["model3"]["net", "weight"].tolist() == [1.0, 1.0]
            transport.send_ack()
            transport.check_ack()
        left.send_weights("model3", state)
        assert left.policy_weights["model3"]["net", "weight"].tolist() == [5.0, 5.0]
        waiting = threading.Thread(target=right.receive_weights, args=(None,))
        right.receive_weights()
        waiting.start()  # waits for either pipe
        left.send_weights("model4", state)
        waiting.join(tools.PATIENCE)
        assert not waiting.is_alive()
        assert right.policy_weights["model4"]["net", "weight"].tolist() == [5.0, 5.0]
        ends[0][0].close()


def test_a_forked_process_has_no_connection() -> None:
    one, two = Pipe()
    transport = legacy.MPTransport(one)
    with transport, two:
        assert one.closed
        assert transport.check_connection()
        pid = os.fork()
        if pid == 0:
            os._exit(2 if transport.check_connection() else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert transport.check_connection()


# -- calls of remote objects --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("program", [_programs.rpc_program, _programs.distributed_program])
def test_two_processes_in_a_group(program: Any) -> None:
    ctx = harness.context("forkserver")
    port = _rpc_group.free_port()
    crew = [ctx.Process(target=program, args=(rank, port)) for rank in range(2)]
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

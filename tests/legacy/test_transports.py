"""The older generation's transports, used without a scheme."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tracemalloc
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

import aiosync
from aiosync import legacy
from tests.legacy import _programs
from tests.legacy import _tools as workers
from tests.schemes import _rpc_group
from tests.sync import _tools as tools

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


def _td(value: float) -> TensorDict:
    return TensorDict({"weight": torch.full((2,), value), "inner": {"bias": torch.ones(1)}}, [])


@contextlib.contextmanager
def _ends() -> Iterator[tuple[legacy.MPTransport, legacy.MPTransport]]:
    """Yield both ends of a link."""
    left, right = map(legacy.MPTransport, Pipe())
    with contextlib.closing(left), contextlib.closing(right):
        yield left, right


def test_weights_keep_their_form_and_are_copies() -> None:
    with _ends() as (one, two):
        assert isinstance(one, legacy.TransportBackend)
        assert one.check_connection()
        assert two.receive_weights(timeout=0.05) is None
        tied, large = torch.arange(3.0), torch.ones(3_000_000)
        sent = {"a.b": tied, "tied": tied, "step": torch.tensor(7), "note": "text", "big": large}
        one.send_weights_async("policy", sent)
        for tensor in (tied, large):
            tensor.zero_()
        model_id, weights = two.receive_weights(timeout=tools.PATIENCE)
        assert (model_id, weights["note"], int(weights["step"])) == ("policy", "text", 7)
        one.send_weights_async("critic", _td(1.5))
        model_id, other = two.receive_weights(timeout=tools.PATIENCE)
        assert (model_id, other["inner", "bias"].tolist()) == ("critic", [1.0])
        # The weights have the values of the time when they were sent.
        assert weights["a.b"].tolist() == weights["tied"].tolist() == [0.0, 1.0, 2.0]
        assert weights["big"].sum().item() == 3_000_000
    assert tools.portal_threads() == []


def test_nothing_is_lost_between_weights_and_answers() -> None:
    """Both ends send, and each first looks for another message than the one that comes first."""
    with _ends() as (one, two):
        for value in range(3):
            one.send_weights_async("policy", _td(float(value)))
            two.send_weights_async("critic", _td(float(-value)))
        kept = []
        for _ in range(3):
            kept.append(two.receive_weights(timeout=tools.PATIENCE)[1])
            two.send_ack()
        for _ in range(3):
            # wait_ack() reads past the weights that came before the answer.
            one.wait_ack()
        for value in range(3):
            model_id, weights = one.receive_weights(timeout=tools.PATIENCE)
            assert (model_id, float(weights["weight"][0])) == ("critic", -value)
        assert one.receive_weights(timeout=0.01) is None
        # Later weights do not change those that somebody keeps.
        for value in range(3, 6):
            one.send_weights_async("policy", _td(float(value)))
            kept.append(two.receive_weights(timeout=tools.PATIENCE)[1])
        assert [float(each["weight"][0]) for each in kept] == [*range(6)]


def test_answers_that_say_no_or_do_not_come() -> None:
    with _ends() as (left, right):
        workers.refuses(
            (RuntimeError, "No async send is pending", left.wait_ack),
            (RuntimeError, "nothing to acknowledge", right.send_ack),
        )
        left.timeout = 0.2
        workers.refuses((TimeoutError, "0.2 s", lambda: left.send_weights("policy", _td(1.0))))
        # A late answer does not count for the next send.
        assert right.receive_weights(timeout=tools.PATIENCE) is not None
        right.send_ack()
        left.send_weights_async("policy", _td(2.0))
        workers.refuses((TimeoutError, "0.2 s", left.wait_ack))
        assert right.receive_weights(timeout=tools.PATIENCE) is not None
        right.send_ack()
        left.timeout = tools.PATIENCE
        left.send_weights_async("policy", _td(3.0))
        assert right.receive_weights(timeout=tools.PATIENCE) is not None
        right.send_ack("no")
        workers.refuses((RuntimeError, "'updated', got 'no'", left.wait_ack))


def test_answers_are_waited_for_as_long_as_workers_take_to_start() -> None:
    one, two = Pipe()
    with two, workers.transport("SharedMemTransport", one) as shared:
        assert shared.timeout == legacy.MPTransport(Pipe()[0]).timeout == 60.0
        shared.timeout = 0.2
        workers.refuses((TimeoutError, "", lambda: shared.send_weights("policy", _td(1.0))))


def test_closing() -> None:
    with _ends() as (one, two):
        two.send_weights_async("policy", _td(1.0))
        for _ in range(2):
            two.close()
        # Weights that were sent before the end was closed still arrive.
        assert one.receive_weights() is not None
        for call in (one.receive_weights, lambda: one.send_weights("policy", _td(2.0))):
            with pytest.raises((aiosync.PeerClosed, aiosync.TransportBroken)):
                call()
        assert not one.check_connection()
        assert one.pipe.poll()
        workers.refuses((EOFError, "", one.pipe.recv))
        one.close()
        workers.refuses((aiosync.TransportClosed, "", one.receive_weights))
        assert not one.check_connection()
    forgotten, other = map(legacy.MPTransport, Pipe())
    assert forgotten.check_connection()
    assert other.check_connection()


# -- failures -----------------------------------------------------------------------------------


def _take_and_end(pipe: Any, kind: str) -> None:
    with workers.transport(kind, pipe) as transport:
        transport.receive_weights(timeout=tools.PATIENCE)
        transport.send_ack()
        # The process ends at once, before a background thread could still send the answer.
        os._exit(0)


@pytest.mark.parametrize("kind", ["MPTransport", "SharedMemTransport"])
def test_an_answer_has_left_before_the_worker_ends(kind: str) -> None:
    for _ in range(5):
        mine, theirs = Pipe()
        with workers.process(_take_and_end, theirs, kind) as process:
            theirs.close()
            with workers.transport(kind, mine) as transport:
                transport.send_weights("policy", _td(1.0))
            process.join(tools.PATIENCE)
            assert process.exitcode == 0


class _Given(legacy.WeightSyncScheme):
    """Scheme for transports that are there already."""

    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context


def _receiver_of(transport: Any, model: Any) -> legacy.WeightReceiver:
    receiver = _Given("state_dict").create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(transport)
    return receiver


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_worker_does_not_keep_the_others_from_being_served(dead: int) -> None:
    with _ends() as one, _ends() as two:
        sender: Any = _Given("state_dict").create_sender()
        for idx, (link, _) in enumerate((one, two)):
            sender.register_worker(idx, link)
        gone, (live, taking) = (one, two) if dead == 0 else (two, one)
        model = tools.filled(0.0)
        receiver = _receiver_of(taking, model)
        gone[1].close()
        tools.until(lambda: not gone[0].check_connection())
        sender.send_async(tools.filled(1.0))
        assert receiver.receive(timeout=tools.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            sender.wait_async()
        assert (caught.value.acked, list(caught.value.failed)) == ({1 - dead}, [dead])
        assert isinstance(caught.value.failed[dead], aiosync.PeerClosed)
        # No answer is left over from before: a send that no worker answers fails.
        live.timeout = 0.1
        with pytest.raises(aiosync.PartialSyncError):
            sender.send(tools.filled(2.0))
        assert receiver.receive(timeout=tools.PATIENCE)
        workers.refuses(
            (
                aiosync.PartialSyncError,
                "AckTimeout",
                lambda: sender.send(tools.filled(3.0), worker_ids=1 - dead),
            ),
            (ValueError, "Worker 7", lambda: sender.send(tools.filled(4.0), [1 - dead, 7])),
        )
        assert receiver.receive(timeout=tools.PATIENCE)
        # The refused send has reached no worker.
        assert not receiver.receive(timeout=0.05)
        assert tools.value_of(model) == 3.0


def test_shared_memory_of_many_models() -> None:
    left, right = (workers.transport("SharedMemTransport", end) for end in Pipe())
    state = {"net.weight": torch.ones(2000), "net.bias": torch.zeros(1)}
    with left as sender, right as receiver:
        assert receiver.receive_weights(timeout=0.01) is None
        # The receiver takes no weights meanwhile.
        for number in range(20):
            sender.send_weights(f"model{number}", state)
        receiver.receive_weights(timeout=None)
        assert len(receiver.policy_weights) == 20
        state["net.weight"].fill_(5.0)
        for each in (sender, receiver):
            assert each.policy_weights["model3"]["net", "weight"].unique().tolist() == [1.0]
            each.send_ack()
            each.check_ack()
        with tools.threads(lambda: receiver.receive_weights(None)):
            sender.send_weights("model3", state)
        assert receiver.policy_weights["model3"]["net", "weight"].unique().tolist() == [5.0]
        sender.register_pipe(Pipe()[0])
        workers.refuses((RuntimeError, "one pipe", sender.receive_weights))
        receiver.close()
        tools.until(lambda: not sender.check_connection())
        workers.refuses((aiosync.PeerClosed, "", lambda: sender.send_weights("model3", state)))


# -- calls of remote objects --------------------------------------------------------------------


def test_memory_of_what_was_copied_is_used_again() -> None:
    left, right = (workers.transport("SharedMemTransport", end) for end in Pipe())
    with left as sender, right as receiver:
        receiver.receive_weights(timeout=0.0)
        weights = {"w": torch.zeros(2_000_000)}
        for _ in range(3):
            sender.send_weights("policy", weights)
            receiver.receive_weights(timeout=tools.PATIENCE)
        tracemalloc.start()
        try:
            sender.send_weights("policy", weights)
            receiver.receive_weights(timeout=tools.PATIENCE)
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


def test_a_socket_that_the_program_closes_is_that_of_the_transport() -> None:
    ends = socket.socketpair()
    one, two = (contextlib.closing(legacy.MPTransport(end)) for end in ends)
    with one as sender, two as receiver:
        for end in ends:
            end.close()
        sender.send_weights_async("policy", _td(2.0))
        assert receiver.receive_weights(timeout=tools.PATIENCE)[1]["weight"].tolist() == [2.0, 2.0]
        receiver.send_ack()
        sender.wait_ack()
    workers.refuses((ValueError, "no open end", lambda: legacy.MPTransport(ends[0])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "count"),
    [(_programs.rpc_program, 2), (_programs.distributed_program, 2), (_programs.stuck_program, 3)],
)
def test_processes_of_a_group(program: Any, count: int) -> None:
    port = _rpc_group.free_port()
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(workers.process(program, rank, port, method="forkserver"))
            for rank in range(count)
        ]
        for process in started:
            process.join(tools.PATIENCE)
            assert process.exitcode == 0


# The program starts a Ray cluster of its own.
@pytest.mark.heavy
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


@pytest.mark.parametrize("way", ["object_store", "nixl"])
def test_an_async_send_takes_a_snapshot_where_ray_takes_none(way: Any) -> None:
    begun: list[Any] = []

    class Late(legacy.RayTransport):
        def begin(self, model_id: str, weights: Any) -> Any:
            begun.append(weights)
            return lambda timeout: None

    transport, weights = Late(object(), way), _td(1.0)
    transport.send_weights_async("policy", weights)
    transport.wait_ack()
    # Ray copies into its object store by itself.
    assert (begun[0] is weights) == (way == "object_store")
    weights.zero_()
    assert float(begun[0]["weight"][0]) == (way == "nixl")


def test_arguments_of_remote_transports() -> None:
    workers.refuses(
        (ValueError, "carrier", lambda: legacy.RayTransport(None, "carrier pigeon")),  # type: ignore[arg-type]
        (ValueError, "zip", lambda: legacy.RayActorTransport(None, "zip")),  # type: ignore[arg-type]
        (TypeError, "class", lambda: legacy.RPCWeightSyncScheme().create_transport((1, 2))),
        (TypeError, "", lambda: legacy.DistributedWeightSyncScheme().create_transport(1)),
        (RuntimeError, "No async send", legacy.RPCTransport(None, None, None).wait_ack),
    )
    wrapped = legacy.RayModuleTransformScheme()
    assert wrapped.strategy == "tensordict"
    assert type(wrapped.create_receiver()) is legacy.RayModuleTransformReceiver
    scheme = legacy.DistributedWeightSyncScheme("gloo", False)
    assert (scheme.backend, scheme.sync, scheme.strategy) == ("gloo", False, "state_dict")
    assert type(pickle.loads(pickle.dumps(scheme))) is legacy.DistributedWeightSyncScheme

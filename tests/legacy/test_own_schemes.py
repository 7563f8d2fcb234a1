"""Schemes that users wrote for TorchRL: with its hooks, its transports and its setters."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import aiosync
from aiosync import legacy, sync
from tests.legacy import _tools as workers
from tests.legacy._tools import BOTH
from tests.schemes import _harness as harness
from tests.sync import _tools as tools


class QueueTransport:
    """Transport with the methods that TorchRL asks for, and no more: it sets up no connection."""

    def __init__(self, updates: Any, answers: Any) -> None:
        self.updates, self.answers = updates, answers

    def send_weights_async(self, weights: Any) -> None:
        self.updates.put(weights.detach().clone())

    def wait_ack(self) -> None:
        answer = self.answers.get(timeout=tools.PATIENCE)
        if answer != "updated":
            raise RuntimeError(answer)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, **others: Any
    ) -> Any:
        # Like TorchRL's own transports, this one raises queue.Empty.
        return self.updates.get(timeout=timeout)

    def send_ack(self, message: str = "updated") -> None:
        self.answers.put(message)


class QueueScheme(legacy.WeightSyncScheme):
    """Scheme in TorchRL's style: keyword arguments, and attributes that the hooks assign."""

    def __init__(self, ends: list[Any], strategy: Any = "tensordict") -> None:
        self.ends = ends
        super().__init__(strategy)

    def create_transport(self, **kwargs: Any) -> QueueTransport:
        return QueueTransport(**kwargs)

    def _init_on_sender_impl(
        self, *, model_id: str, context: Any = None, model: Any = None, num_workers: int = 1
    ) -> None:
        for idx in range(num_workers):
            updates, answers = self.ends[idx]
            self._register_worker_sender(worker_idx=idx, updates=updates, answers=answers)
        self.model_id = model_id
        self.context = context
        if model is not None:
            self.model = model

    def _init_on_receiver_impl(
        self, model_id: str, context: Any = None, *, worker_idx: int = 0, model: Any = None
    ) -> None:
        updates, answers = self.ends[worker_idx]
        self._register_transport_receiver(updates=updates, answers=answers)
        self.model_id, self.worker_idx, self.context = model_id, worker_idx, context
        if model is not None:
            self.model = model


def queues(count: int = 1) -> list[Any]:
    return [(queue.Queue[Any](), queue.Queue[Any]()) for _ in range(count)]


class Owner:
    """Context with the interface of TorchRL's collectors."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy
        self.passed_on: list[tuple[str, Any]] = []

    def update_policy_weights_(self, policy_or_weights: Any, *, model_id: str) -> None:
        self.passed_on.append((model_id, policy_or_weights))


def test_a_scheme_with_the_hooks_of_torchrl() -> None:
    ends = queues(2)
    trained = tools.filled(1.0)
    models = [tools.filled(0.0), tools.filled(0.0)]
    with QueueScheme(ends) as scheme, QueueScheme(ends) as one, QueueScheme(ends) as two:
        scheme.init_on_sender(model_id="policy", model=trained, num_workers=2)
        assert (scheme.initialized_on_sender, scheme.synchronized_on_sender) == (True, False)
        owner = Owner(models[1])
        one.init_on_receiver(model_id="policy", worker_idx=0, model=models[0])
        two.init_on_receiver(model_id="policy", worker_idx=1, context=owner)
        workers.refuses(
            (RuntimeError, "worker_idx on sender", lambda: scheme.connect(worker_idx=0)),
            (RuntimeError, "weights on receiver", lambda: one.connect(weights=trained)),
            (ValueError, "send\\(weights\\) after", lambda: scheme.connect(weights=trained)),
            (RuntimeError, "already a sender", lambda: scheme.init_on_sender(model_id="policy")),
            (RuntimeError, "already a receiver", lambda: one.init_on_receiver(model_id="policy")),
        )
        for each in (scheme, one, two):
            each.connect()
            workers.refuses((RuntimeError, "twice", each.connect))
        assert scheme.synchronized_on_sender
        assert one.synchronized_on_receiver
        assert {type(each) for each in scheme.sender_transports.values()} == {QueueTransport}
        assert list(scheme.sender_transports) == [0, 1]
        assert type(one.receiver_transport) is QueueTransport
        assert one.receive(timeout=0.01) is None
        for value in (2.0, 3.0):
            tools.fill(trained, value)
            with tools.threads(scheme.send):
                applied = [each.receive(timeout=tools.PATIENCE) for each in (one, two)]
            assert [each is not None and each.version for each in applied] == [value - 1] * 2
            assert [*map(tools.value_of, models)] == [value] * 2
        assert applied[0] is not None
        assert applied[0].weights["weight"].unique().tolist() == [3.0]
        # The model has these weights, and the trainer has its answer.
        for each in (applied[0], None):
            one.apply_weights(each)
        assert ends[0][1].empty()
        two.apply_weights(applied[0], inplace=False)
        assert (tools.value_of(models[1]), ends[1][1].get(timeout=0)) == (3.0, "updated")
        # The scheme also passed the updates to the context, for the collectors below it.
        [(model_id, _), _] = owner.passed_on
        assert model_id == "policy"
        with tools.threads(lambda: scheme.send(tools.filled(4.0), worker_ids=1)):
            assert two.receive(timeout=tools.PATIENCE)
        assert [*map(tools.value_of, models)] == [3.0, 4.0]
        one.model = replaced = tools.filled(0.0)
        for inplace in (True, False):
            one.apply_weights(TensorDict.from_module(tools.filled(5.0 + inplace)), inplace)
            assert tools.value_of(replaced) == 5.0 + inplace
            assert ends[0][1].get(timeout=tools.PATIENCE) == "updated"


def test_a_context_is_not_told_of_a_model_of_its_own() -> None:
    ends = queues()
    owner: Any = Owner(tools.filled(0.0))
    owner.critic = tools.filled(0.0)
    with QueueScheme(ends) as scheme, QueueScheme(ends) as other:
        scheme.init_on_sender(model_id="critic", model=tools.filled(1.0))
        other.init_on_receiver(model_id="critic", context=owner)
        with tools.threads(scheme.send):
            assert other.receive(tools.PATIENCE)
        assert (tools.value_of(owner.critic), owner.passed_on) == (1.0, [])


def test_a_model_that_was_given_needs_no_context() -> None:
    ends = queues()
    owner, model = Owner(tools.filled(0.0)), tools.filled(0.0)
    with QueueScheme(ends) as scheme, QueueScheme(ends) as other:
        scheme.init_on_sender(model_id="policy", model=tools.filled(1.0))
        other.init_on_receiver(model_id="policy", context=owner, model=model)
        del owner
        gc.collect()
        with tools.threads(scheme.send):
            assert other.receive(tools.PATIENCE)
        assert tools.value_of(model) == 1.0


def test_what_does_not_fit_is_told_to_both() -> None:
    ends = queues()
    model = tools.filled(0.0)
    with QueueScheme(ends) as scheme, QueueScheme(ends) as other:
        scheme.init_on_sender(model_id="policy")
        other.init_on_receiver(model_id="policy", model=model)
        with tools.threads(
            lambda: workers.refuses(
                (
                    aiosync.PartialSyncError,
                    "do not fit",
                    lambda: scheme.send(TensorDict({"weight": torch.zeros(1)})),
                )
            )
        ):
            workers.refuses(
                (aiosync.ApplyError, "do not fit", lambda: other.receive(tools.PATIENCE))
            )
        assert tools.value_of(model) == 0.0


class Sends:
    """Transport that only sends, with the arguments that TorchRL passes."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def send_weights(self, weights: Any) -> None:
        self.log.append(weights["weight"].unique().tolist())


class SendsLater:
    """Like the queues of TorchRL's own schemes, this transport takes a name after the weights."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        self.log.append((weights["weight"].unique().tolist(), model_id))

    def wait_ack(self) -> None:
        self.log.append("acked")


class Greets(Sends):
    """Transport with one half of the handshake, which takes any arguments to send."""

    def setup_connection_and_weights_on_sender(self) -> None:
        self.log.append("met")

    def send_weights(self, *args: Any) -> None:
        self.log.append(len(args))


class SendsNamed:
    """Transport of the older generation that only sends."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.log.append((model_id, weights["weight"].unique().tolist()))


@pytest.mark.parametrize(
    ("kind", "log"),
    [
        (Sends, [[1.0]]),
        (SendsLater, [([1.0], "policy"), "acked"]),
        (Greets, ["met", 1]),
        (SendsNamed, [("policy", [1.0])]),
    ],
)
def test_a_transport_that_only_sends(kind: Any, log: list[Any]) -> None:
    class Mine(legacy.WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return kind(pipe_or_context)

    found: list[Any] = []
    with Mine("tensordict") as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[found], model=tools.filled(1.0))
        scheme.connect()
        scheme.send()
        assert found == log


class Slips(SendsLater):
    """Transport that raises an error where it was told to."""

    error: Exception = KeyError("no such worker")
    at_ack = False

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        if not self.at_ack:
            raise self.error

    def wait_ack(self) -> None:
        raise self.error


class OfTransports(legacy.WeightSyncScheme):
    """Scheme that is given its transports."""

    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context


@pytest.mark.parametrize("name", ["send", "send_async"])
def test_a_send_that_one_transport_refuses_leaves_no_answer_of_another(name: str) -> None:
    log: list[Any] = []
    with OfTransports("tensordict") as scheme:
        pipes = [SendsLater(log), Slips(log)]
        scheme.init_on_sender(model_id="policy", pipes=pipes, model=tools.filled(1.0))
        with pytest.raises(KeyError, match="no such worker"):
            getattr(scheme.get_sender(), name)()
        assert log == [([1.0], "policy"), "acked"]
        # Worker 0 can be sent to again.
        scheme.send(worker_ids=0)
        assert log[2:] == log[:2]


@pytest.mark.parametrize("at_ack", [False, True])
def test_an_error_of_a_transport_is_the_cause(at_ack: bool) -> None:
    slips = Slips([])
    slips.error, slips.at_ack = ValueError("a broken cable"), at_ack
    with OfTransports("tensordict") as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[slips], model=tools.filled(1.0))
        with pytest.raises(aiosync.PartialSyncError, match="a broken cable") as caught:
            scheme.send()
    assert caught.value.failed[0].__cause__ is slips.error


class Late:
    """Transport that reads the weights some time after it was given them, as queues do."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def send_weights_async(self, weights: Any) -> None:
        self.weights = weights

    def wait_ack(self) -> None:
        self.log.append((type(self.weights), self.weights["weight"].unique().tolist()))


class LateNamed(Late):
    """Transport like that, of the older generation."""

    def send_weights_async(self, model_id: str, weights: Any) -> None:  # type: ignore[override]
        self.weights = weights


@pytest.mark.parametrize("kind", [Late, LateNamed])
@pytest.mark.parametrize(("strategy", "form"), [("tensordict", TensorDict), ("state_dict", dict)])
def test_an_async_send_takes_a_snapshot_for_any_transport(
    kind: Any, strategy: Any, form: Any
) -> None:
    class Mine(legacy.WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return kind(pipe_or_context)

    found: list[Any] = []
    trained = tools.filled(1.0)
    with Mine(strategy) as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[found], model=trained)
        sender = scheme.get_sender()
        sender.send_async()
        tools.fill(trained, 2.0)
        sender.wait_async()
        assert found == [(form, [1.0])]


class Arrays(QueueTransport):
    """Transport of arrays: for tensors, torch would start a server in this process."""

    def send_weights_async(self, weights: Any) -> None:
        self.updates.put({name: each.detach().numpy() for name, each in weights.items()})

    def receive_weights(self, timeout: float | None = None, **others: Any) -> Any:
        found = self.updates.get(timeout=timeout)
        return {name: torch.from_numpy(each) for name, each in found.items()}


class Pushed(QueueScheme):
    """Scheme that receives in the background when told to; connect() receives the first weights."""

    def create_transport(self, **kwargs: Any) -> QueueTransport:
        return Arrays(**kwargs)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        self.send(weights)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        self.receive(timeout=tools.PATIENCE)
        self._start_background_receiver()

    def _wait_for_instruction(self, timeout: float | None = None) -> str | None:
        return "stop" if self.ends[0][0].get() is None else "receive"

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        if self.synchronized_on_sender and self.sender_transports and weights is None:
            self.ends[0][0].put("receive")
        super().send(weights, worker_ids)

    def shutdown(self) -> None:
        if self.initialized_on_receiver:
            self.ends[0][0].put(None)
        super().shutdown()


def _pushed(scheme: Pushed, conn: Any) -> None:
    model = tools.filled(0.0)
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=model)
        scheme.connect()
        conn.send(tools.value_of(model))
        while conn.recv() is not None:
            conn.send(tools.value_of(model))


def test_a_scheme_that_receives_in_the_background_of_a_process() -> None:
    ctx = harness.context("forkserver")
    trained = tools.filled(1.0)
    ends = [(ctx.Queue(), ctx.Queue())]
    mine, theirs = ctx.Pipe()
    with Pushed(ends) as scheme:
        # The scheme's attributes, with the queues, travel with it.
        process = ctx.Process(target=_pushed, args=(scheme, theirs))
        process.start()
        scheme.init_on_sender(model_id="policy", model=trained)
        scheme.connect(weights=trained)
        assert tools.recv(mine) == 1.0
        for value in (2.0, 3.0):
            tools.fill(trained, value)
            scheme.send()
            mine.send("look")
            assert tools.recv(mine) == value
        mine.send(None)
        process.join(tools.PATIENCE)
        assert process.exitcode == 0
    for each in ends[0]:
        each.close()
        each.join_thread()


class Unassigned(Pushed):
    """Scheme that keeps its context unless a call brings one, as TorchRL's own do."""

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        context = self.context if context is None else context
        super()._init_on_receiver_impl(model_id, context, **kwargs)


def _forked(scheme: Any, conn: Any) -> None:
    model = tools.filled(0.0)
    scheme.init_on_receiver(model_id="policy", model=model)
    scheme.connect()
    conn.send((scheme.context, tools.value_of(model)))
    while conn.recv() is not None:
        conn.send(tools.value_of(model))
    scheme.shutdown()


def test_a_worker_that_is_forked_from_the_sender_has_no_context_of_its_own() -> None:
    ctx = harness.context("fork")
    owner = Owner(tools.filled(1.0))
    ends = [(ctx.Queue(), ctx.Queue())]
    mine, theirs = ctx.Pipe()
    with Unassigned(ends) as scheme:
        scheme.init_on_sender(model_id="policy", context=owner)
        with workers.process(_forked, scheme, theirs):
            scheme.connect(weights=owner.policy)
            assert tools.recv(mine) == (None, 1.0)
            tools.fill(owner.policy, 2.0)
            scheme.send()
            mine.send("look")
            assert tools.recv(mine) == 2.0
            mine.send(None)
    for each in ends[0]:
        each.close()
        each.join_thread()


class Polled(QueueScheme):
    """Scheme whose hook asks for instructions until the scheme ends, as TorchRL's own do."""

    def __init__(self, ends: list[Any], instructions: Any) -> None:
        super().__init__(ends)
        self.instructions = instructions
        self.seen: list[Any] = []

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        self._start_background_receiver()
        self.seen.append(self._background_thread)

    def _wait_for_instruction(self, timeout: float | None = None) -> Any:
        if self._stop_event.is_set():  # type: ignore[union-attr]
            return None
        found = self.instructions.get(timeout=0.01)  # raises queue.Empty at first
        if isinstance(found, Exception):
            raise found
        return found


def test_the_background_thread_survives_errors_of_the_hook() -> None:
    ends, instructions = queues(), queue.Queue[Any]()
    trained, model = tools.filled(1.0), tools.filled(0.0)
    with QueueScheme(ends) as scheme, Polled(ends, instructions) as other:
        scheme.init_on_sender(model_id="policy", model=trained)
        other.init_on_receiver(model_id="policy", model=model)

        def update() -> None:
            other.connect()
            instructions.put(ValueError("no such store"))
            instructions.put("dance")
            for value in (2.0, 3.0):
                tools.fill(trained, value)
                instructions.put("receive")
                scheme.send()
                assert tools.value_of(model) == value

        with pytest.warns(RuntimeWarning) as caught:
            update()
        texts = " ".join(str(each.message) for each in caught)
        assert "Polled could not receive: ValueError: no such store" in texts
        assert "Polled does not know the instruction 'dance'" in texts
        [thread] = other.seen
        assert thread.is_alive()
        assert thread.name == "WeightReceiver-0"
    assert not thread.is_alive()
    # The thread and its event stay in the process.
    assert type(pickle.loads(pickle.dumps(Polled(ends=[], instructions=None)))) is Polled


def test_a_scheme_has_a_background_loop_of_its_own() -> None:
    class Own(Polled):
        def _background_receive_loop(self) -> None:
            self.seen.append(self._stop_event.wait(tools.PATIENCE))  # type: ignore[union-attr]

    with Own(queues(), None) as scheme:
        scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))
        scheme.connect()
    [thread, ended] = scheme.seen
    assert (thread.is_alive(), ended) == (False, True)


class Shared(QueueScheme):
    """Scheme with one transport for all workers."""

    def __init__(self, ends: list[Any]) -> None:
        super().__init__(ends)
        self.shared_transport = QueueTransport(*ends[0])

    def _init_on_sender_impl(self, **kwargs: Any) -> None:
        self.model_id, self.model = kwargs["model_id"], kwargs["model"]

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        self.model_id, self.weights = model_id, kwargs["weights"]


def test_the_setters_that_torchrl_has() -> None:
    ends = queues()
    scheme, other = Shared(ends), Shared(ends)
    buffer = TensorDict.from_module(tools.filled(0.0)).detach()
    with scheme, other:
        scheme.init_on_sender(model_id="policy", model=tools.filled(1.0))
        other.init_on_receiver(model_id="policy", weights=buffer)
        scheme.synchronized_on_sender = other.synchronized_on_receiver = True
        workers.refuses((RuntimeError, "twice", scheme.connect), (RuntimeError, "", other.connect))
        scheme.synchronized_on_sender = other.synchronized_on_receiver = False
        scheme.connect()
        other.connect()
        with tools.threads(scheme.send):
            assert other.receive(tools.PATIENCE)
        assert buffer["weight"].unique().tolist() == [1.0]
        assert type(scheme.shared_transport) is QueueTransport
        scheme.strategy = "state_dict"
        other.worker_idx = 3
        assert (scheme.strategy_str, other.worker_idx) == ("state_dict", 3)


class Buffered(QueueScheme):
    """Scheme whose hooks assign a model and a buffer, after or before the receiver is made."""

    def _init_on_sender_impl(self, **kwargs: Any) -> None:
        super()._init_on_sender_impl(**kwargs)
        self.weights = TensorDict.from_module(self.model).detach().clone()

    def _init_on_receiver_impl(self, *, worker_idx: int, model: Any, **kwargs: Any) -> None:
        updates, answers = self.ends[worker_idx]
        if worker_idx == 0:
            self._register_transport_receiver(updates=updates, answers=answers)
        self.model, self.weights = model, TensorDict.from_module(model).detach().clone()
        if worker_idx == 1:
            self._register_transport_receiver(updates=updates, answers=answers)


@pytest.mark.parametrize("idx", [0, 1])
def test_a_model_counts_more_than_a_buffer_for_its_weights(idx: int) -> None:
    ends = queues(2)
    trained, model = tools.filled(1.0), tools.filled(0.0)
    with Buffered(ends) as scheme, Buffered(ends) as other:
        scheme.init_on_sender(model_id="policy", model=trained, num_workers=2)
        other.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
        tools.fill(trained, 2.0)
        with tools.threads(lambda: scheme.send(worker_ids=idx)):
            assert other.receive(tools.PATIENCE)
        assert tools.value_of(model) == 2.0
        assert other.weights["weight"].unique().tolist() == [0.0]


class Introduced(QueueTransport):
    """Transport with a handshake that keeps the index that it is given."""

    met: Any = "nobody"

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: Any, **others: Any) -> None:
        self.met = worker_idx


class Private(QueueScheme):
    """Scheme whose hooks use the private names of TorchRL's base class, as TorchRL's own do."""

    def _init_on_sender_impl(self, *, model_id: str, model: Any) -> None:  # type: ignore[override]
        self._model_id, self._sender_transports = model_id, {0: QueueTransport(*self.ends[0])}
        self.model = model

    def _init_on_receiver_impl(  # type: ignore[override]
        self, model_id: str, context: Any = None, *, worker_idx: int | None, model: Any
    ) -> None:
        self._receiver_transport = Introduced(*self.ends[0])
        self._model_id, self._worker_idx, self.model = model_id, worker_idx, model

    def reset(self) -> None:
        """Forget the roles, as a copy of one of TorchRL's schemes does."""
        self._initialized_on_sender = self._initialized_on_receiver = False
        self._sender_transports = self._receiver_transport = None
        self._model_id = self._worker_idx = None

    def names(self) -> tuple[Any, ...]:
        transport = self._receiver_transport
        roles = (self._initialized_on_sender, self._initialized_on_receiver)
        return (self._model_id, self._worker_idx, *self._sender_transports, type(transport), *roles)


@pytest.mark.parametrize("idx", [None, 0, 3])
def test_the_private_names_that_torchrl_has(idx: int | None) -> None:
    ends = queues()
    model = tools.filled(0.0)
    with Private(ends) as scheme, Private(ends) as other:
        for each in (scheme, other):
            each.reset()
            assert each.names() == (None, None, type(None), False, False)
        scheme.init_on_sender(model_id="policy", model=tools.filled(1.0))
        other.init_on_receiver(model_id="policy", worker_idx=idx, model=model)
        other.connect()
        assert scheme.names() == ("policy", None, 0, type(None), True, False)
        assert other.names() == ("policy", idx, Introduced, False, True)
        assert (other.worker_idx, other.receiver_transport.met) == (idx, idx)
        with tools.threads(scheme.send):
            assert other.receive(tools.PATIENCE)
        assert tools.value_of(model) == 1.0


@BOTH
def test_schemes_with_pipes_have_them_as_well(make: Any) -> None:
    mine, theirs = multiprocessing.Pipe()
    with make() as scheme, make() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine], model=tools.filled(1.0))
        other.init_on_receiver(model_id="policy", pipe=theirs, model=tools.filled(0.0))
        assert not (scheme.synchronized_on_sender or other.synchronized_on_receiver)
        for each in (scheme, other):
            each.connect()
            workers.refuses((RuntimeError, "twice", each.connect))
        assert scheme.synchronized_on_sender
        assert other.synchronized_on_receiver
        assert list(scheme.sender_transports) == [0]
        assert other.receiver_transport is not None
        assert other.receive(timeout=0.01) is None
        with tools.threads(scheme.send):
            applied = other.receive(timeout=tools.PATIENCE)
        assert applied.version == 1
        assert applied.weights["weight"].unique().tolist() == [1.0]
        if make is workers.MP:
            other.apply_weights(tools.filled(2.0).state_dict())
            assert applied.weights["weight"].unique().tolist() == [2.0]


def test_the_default_strategy_is_that_of_the_generation_of_the_hooks() -> None:
    class OfPresent(QueueScheme):
        def __init__(self) -> None:
            legacy.WeightSyncScheme.__init__(self)

    class OfFirst(legacy.WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return QueueTransport(*pipe_or_context)

    class OnPipes(workers.MP):
        def _init_on_sender_impl(self, *args: Any, **kwargs: Any) -> None:
            super()._init_on_sender_impl(*args, **kwargs)

    made = [OfPresent(), OfFirst(), OnPipes(), legacy.NoWeightSyncScheme()]
    assert [each.strategy for each in made] == ["tensordict", *["state_dict"] * 3]
    assert OfFirst("tensordict").strategy == "tensordict"


def test_what_a_pickle_of_a_scheme_takes_along() -> None:
    scheme = QueueScheme([1, 2])
    copied = pickle.loads(pickle.dumps(scheme))
    assert (type(copied), copied.ends) == (QueueScheme, [1, 2])
    assert copied.strategy == "tensordict"


@pytest.mark.apart
@pytest.mark.timeout(160)
def test_a_scheme_for_torchrl_in_its_collector_by_changing_the_import() -> None:
    pytest.importorskip("torchrl")
    done = subprocess.run(
        # The program takes "torchrl", too, to compare.
        [sys.executable, "-m", "tests.legacy._own_in_collector", "aiosync"],
        cwd=tools.ROOT,
        env={**os.environ, "PYTHONPATH": str(tools.ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout.splitlines() == ["[0.0] [0]", "[1.0] [1]", "[2.0] [2]"], done.stderr


# -- errors that name the user's class ------------------------------------------------------------


def test_a_class_that_cannot_work_is_refused_by_name() -> None:
    class Nothing(legacy.WeightSyncScheme):
        pass

    class Keywords(legacy.WeightSyncScheme):
        def create_transport(self, **kwargs: Any) -> Any:
            return QueueTransport(**kwargs)

    class Links(legacy.WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return object()

    class Lonely(sync.WeightSyncScheme):
        pass

    def initialise(cls: Any, **ends: Any) -> None:
        with cls() as scheme:
            scheme.init_on_sender(model_id="policy", model=tools.filled(0.0), **ends)

    def receive(cls: Any) -> None:
        with cls() as scheme:
            scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))

    workers.refuses(
        (ValueError, "Nothing has no link.*_register_worker_sender", lambda: initialise(Nothing)),
        (ValueError, "Nothing has no link.*_register_transport_receiver", lambda: receive(Nothing)),
        (
            ValueError,
            r"Keywords.create_transport\(\) does not take.*_init_on_sender_impl",
            lambda: initialise(Keywords, pipes=[1]),
        ),
        (ValueError, "object of Links has neither", lambda: initialise(Links, pipes=[1])),
        (ValueError, "Lonely has no link: .*aiosync.legacy.WeightSyncScheme", Lonely),
        (
            ValueError,
            "sync=",
            lambda: initialise(lambda: legacy.MultiProcessWeightSyncScheme(sync=False), pipes=[1]),
        ),
    )


@pytest.mark.parametrize("base", [sync.WeightSyncScheme, sync.SharedMemWeightSyncScheme])
@pytest.mark.parametrize("hook", ["create_transport", "_init_on_sender_impl"])
def test_a_hook_that_nothing_would_call_is_refused(base: Any, hook: str) -> None:
    body = {hook: lambda self, **kwargs: None}
    workers.refuses(
        (
            ValueError,
            rf"Mine.{hook}\(\) would not be called.*legacy",
            lambda: type("Mine", (base,), body),
        )
    )


def test_a_transport_that_changes_a_model_itself_is_told_what_to_do() -> None:
    class Writes(QueueTransport):
        def receive_weights(
            self, timeout: Any = None, *, weights: Any, model: Any, strategy: Any
        ) -> Any:
            weights.update_(self.updates.get(timeout=timeout))

    ends = queues()
    scheme = QueueScheme(ends)
    scheme.create_transport = lambda **kwargs: Writes(**kwargs)  # type: ignore[method-assign]
    with scheme:
        scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))
        ends[0][0].put(1)
        with pytest.raises(AttributeError) as caught:
            scheme.receive(timeout=1)
        assert "Writes.receive_weights() was given weights=None" in caught.value.__notes__[0]


# -- TorchRL's names and keywords -----------------------------------------------------------------


def test_transports_by_the_keywords_of_torchrl() -> None:
    info, rref, store, actor = object(), object(), object(), object()
    made: Any = legacy.RPCWeightSyncScheme().create_transport(
        collector_info=info, collector_rref=rref, collector_class=int, worker_rank=1
    )
    assert (made.collector_info, made.collector_rref, made.collector_class) == (info, rref, int)
    made = legacy.DistributedWeightSyncScheme().create_transport(
        weights_buffer=None, store=store, rank=1, sync=False
    )
    assert (type(made), made.rank, made.sync) == (legacy.DistributedTransport, 1, False)
    for scheme, cls in (
        (legacy.RayWeightSyncScheme(), legacy.RayTransport),
        (legacy.RayModuleTransformScheme(), legacy.RayActorTransport),
    ):
        for name in ("remote_actor", "remote_collector"):
            assert type(scheme.create_transport(worker_idx=0, **{name: actor})) is cls
        workers.refuses((ValueError, "handle of an actor", scheme.create_transport))


def test_schemes_of_the_newer_generation_say_where_they_are_taken() -> None:
    rpc, ray = sync.RPCWeightSyncScheme(), sync.RayWeightSyncScheme()
    text = r"RPC.*create_transport\(\) .* not collector_info=, collector_rref=: .*aiosync.legacy"
    create: Any = rpc.create_transport
    workers.refuses(
        (ValueError, text, lambda: create(collector_info=1, collector_rref=2)),
        (ValueError, r"not \(1, 2, 3\): .*aiosync.legacy", lambda: create((1, 2, 3))),
        (ValueError, "not remote_actor=", lambda: ray.create_transport(remote_actor=1)),  # type: ignore[call-arg]
        (
            ValueError,
            "not store=, rank=",
            lambda: sync.DistributedWeightSyncScheme().create_transport(store=1, rank=2),  # type: ignore[call-arg]
        ),
    )


def test_the_transports_are_where_the_blocking_schemes_are() -> None:
    for name in (
        *("DistributedTransport", "MPTransport", "RPCTransport", "RayActorTransport"),
        *("RayTransport", "SharedMemTransport", "TransportBackend"),
    ):
        assert getattr(sync, name) is getattr(aiosync, name)

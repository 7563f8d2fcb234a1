"""The older generation's schemes, senders and receivers: what they promise, and how they fail."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import aiosync
from aiosync import legacy, sync
from tests.legacy import _tools as workers
from tests.sync import _tools as tools

MP = legacy.MultiProcessWeightSyncScheme
SHM = legacy.SharedMemWeightSyncScheme
NONE = legacy.NoWeightSyncScheme
BOTH = [MP, SHM]


def _td(value: float) -> TensorDict:
    return TensorDict.from_module(tools.filled(value))


# -- names and defaults -----------------------------------------------------------------------


def test_signatures_and_defaults_of_that_generation() -> None:
    assert MP().strategy == "state_dict"
    assert SHM().strategy == "tensordict"
    assert NONE("tensordict").strategy == "tensordict"
    scheme = SHM({"policy": _td(1.0)}, "state_dict", False)
    assert (scheme.strategy, scheme.auto_register) == ("state_dict", False)
    assert isinstance(scheme, sync.SharedMemWeightSyncScheme)
    assert isinstance(scheme, legacy.WeightSyncScheme)
    scheme.strategy = "tensordict"
    assert scheme.strategy_str == "tensordict"
    with pytest.raises(ValueError, match="Unknown strategy"):
        MP(strategy="pickle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nonsense"):
        MP(nonsense=1)


def test_back_ends_by_name() -> None:
    for name in ("none", "direct", "shared", "thread", "process", "distributed", "rpc", "ray"):
        scheme = legacy.WeightSyncScheme.from_backend(name)
        assert type(scheme) is getattr(legacy, type(scheme).__name__)
        assert type(scheme) is type(SHM.from_backend(name))
        assert scheme.strategy == type(scheme)().strategy
    assert type(legacy.WeightSyncScheme.from_backend("shared", auto_register=False)) is SHM
    with pytest.raises(ValueError, match="Unsupported weight-sync backend 'carrier pigeon'"):
        legacy.WeightSyncScheme.from_backend("carrier pigeon")
    with pytest.raises(aiosync.ConfigError, match=r"aiosync\.sync\.WeightSyncScheme\.from_b"):
        legacy.WeightSyncScheme.from_backend("tcp")


def test_the_strategy_refuses_what_it_does_not_know() -> None:
    strategy = legacy.WeightStrategy()
    assert strategy.extract_as == "tensordict"
    for source in (None, 3):
        with pytest.raises(ValueError, match="cannot extract"):
            strategy.extract_weights(source)
    with pytest.raises(ValueError, match="extract_as must be"):
        legacy.WeightStrategy("zip")  # type: ignore[arg-type]
    model = tools.filled(0.0)
    legacy.WeightStrategy("state_dict").apply_weights(model, tools.filled(2.0).state_dict())
    assert tools.value_of(model) == 2.0
    with pytest.raises(ValueError, match="Unsupported weights type"):
        strategy.apply_weights(model, 3)
    with pytest.raises(TypeError):
        strategy.apply_weights(model, {}, inplace=False)  # type: ignore[call-arg]


# -- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*BOTH, NONE])
def test_senders_and_receivers_come_after_init(make: Any) -> None:
    scheme = make()
    with pytest.raises(RuntimeError, match=r"Must call init_on_sender\(\) before get_sender\(\)"):
        scheme.get_sender()
    with pytest.raises(RuntimeError, match=f"before get_receiver.. on {make.__name__}"):
        scheme.get_receiver()


@pytest.mark.parametrize("make", [*BOTH, NONE])
def test_the_order_of_async_calls(make: Any) -> None:
    mine, theirs = Pipe()
    with make() as scheme, theirs:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        assert scheme.get_sender() is sender
        with pytest.raises(RuntimeError, match="No async send is pending"):
            sender.wait_async()
        sender.send_async(_td(1.0))
        with pytest.raises(RuntimeError, match=r"Cannot call send\(\) while an async send"):
            sender.send(_td(1.0))
        with pytest.raises(RuntimeError, match=r"Cannot call send_async\(\) again"):
            sender.send_async(_td(1.0))
        twin = pickle.loads(pickle.dumps(sender))
        with pytest.raises(RuntimeError, match="No async send is pending"):
            twin.wait_async()


def test_arguments_that_cannot_be() -> None:
    mine, theirs = Pipe()
    with theirs, MP() as scheme:
        with pytest.raises(ValueError, match="num_workers is 2, but there are 1 pipes"):
            scheme.init_on_sender(model_id="policy", pipes=[mine], num_workers=2)
        with pytest.raises(TypeError, match="nonsense"):
            scheme.init_on_sender(model_id="policy", pipes=[mine], nonsense=1)
        with pytest.raises(ValueError, match="not a multiprocessing pipe"):
            scheme.init_on_sender(model_id="policy", pipes=["pipe"])
        reader, writer = Pipe(duplex=False)
        with reader, writer, pytest.raises(ValueError, match="two-way"):
            scheme.init_on_worker(model_id="policy", pipe=reader)
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        with pytest.raises(RuntimeError, match="already a sender"):
            scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        with pytest.raises(ValueError, match="Worker 3 not registered"):
            sender.send(_td(1.0), worker_ids=3)
        with pytest.raises(ValueError, match="nothing to send"):
            sender.send()
        with pytest.raises(ValueError, match="Cannot resolve string reference 'actor'"):
            sender.send("actor")


def test_pipes_that_were_forgotten() -> None:
    with MP() as scheme:
        for keywords in ({}, {"ctx": object()}, {"cached_weights": _td(1.0)}):
            with pytest.raises(ValueError, match="pipes must be provided via context or kwargs"):
                scheme.init_on_sender(model_id="policy", **keywords)
        with pytest.raises(ValueError, match="pipe must be provided via context or kwargs"):
            scheme.init_on_worker(model_id="policy", model=tools.filled(0.0))
        with pytest.raises(TypeError, match="nonsense"):
            scheme.init_on_sender(model_id="policy", nonsense=1)
        scheme.init_on_sender(model_id="policy", model=tools.filled(0.0))  # the newer way
    with MP() as scheme:
        scheme.init_on_receiver(model_id="policy", model=tools.filled(0.0))
    with SHM() as scheme:
        scheme.init_on_worker(model_id="policy", model=tools.filled(0.0))
        assert scheme.get_receiver().receive() is False
    with NONE() as scheme:
        scheme.init_on_sender(model_id="policy", nonsense=1)
        scheme.get_sender().send(_td(1.0))


def test_a_receiver_without_a_model() -> None:
    scheme = MP()
    receiver = scheme.create_receiver()
    with pytest.raises(ValueError, match="No model registered"):
        receiver.apply_weights(_td(1.0))
    receiver.register_model("policy")
    with pytest.raises(ValueError, match="Context is required to resolve string references"):
        receiver.apply_weights(_td(1.0))
    context = workers.OldContext(tools.filled(0.0))
    receiver.context = context
    receiver.apply_weights(_td(1.0))
    assert tools.value_of(context.policy) == 1.0
    del context
    gc.collect()
    with pytest.raises(ValueError, match="Context has been garbage collected"):
        receiver.apply_weights(_td(1.0))


def test_weights_that_come_before_a_model() -> None:
    mine, theirs = Pipe()
    with MP() as scheme, copy.copy(scheme) as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs)
        sender, receiver = scheme.get_sender(), other.get_receiver()
        sender.send_async(tools.filled(1.0).state_dict())
        with pytest.raises(ValueError, match="No model registered"):
            receiver.receive(timeout=tools.PATIENCE)
        model = tools.filled(0.0)
        receiver.register_model(model)
        assert receiver.receive()
        sender.wait_async()
        assert tools.value_of(model) == 1.0


# -- what is sent -----------------------------------------------------------------------------


def test_where_weights_come_from() -> None:
    scheme = MP()
    context = workers.OldContext(tools.filled(1.0))
    assert list(scheme.prepare_weights(None, "policy", None, context)) == ["weight", "bias"]
    strategy = legacy.WeightStrategy("tensordict")
    found = scheme.prepare_weights(tools.filled(2.0), "policy", strategy)
    assert isinstance(found, TensorDict)
    assert scheme.prepare_weights("policy", "policy", None, context)["bias"].sum() == 2.0
    with pytest.raises(ValueError, match="without context"):
        scheme.prepare_weights("policy", "policy", None)
    assert scheme.prepare_weights(None, "other", None, context) is None
    weights = {"a": torch.zeros(1)}
    assert scheme.prepare_weights(weights, "policy", None, context) is weights


@pytest.mark.slow
@pytest.mark.parametrize("make", BOTH)
def test_an_old_style_context(make: Any) -> None:
    mine, theirs = Pipe()
    with make() as scheme, workers.worker(scheme, theirs) as work:
        context = workers.OldContext(tools.filled(1.0), pipes=[mine], num_workers=1)
        scheme.init_on_sender(model_id="policy", context=context)
        assert scheme.context is context
        sender = scheme.get_sender()
        work("attach_context")
        for value in (1.0, 2.0):
            tools.fill(context.policy, value)
            work.start("receive")
            sender.send()
            assert work.result() is True
            assert work("value") == value
        work.start("receive")
        context.critic = tools.filled(3.0)
        sender.send("critic")
        assert work.result() is True
        assert work("value") == 3.0
        work("shutdown")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords", [{"model": "module"}, {"weights": "td"}, {"cached_weights": "td"}]
)
def test_a_registered_source(keywords: dict[str, str]) -> None:
    mine, theirs = Pipe()
    source = tools.filled(5.0)
    given = {"module": source, "td": TensorDict.from_module(source)}
    with MP() as scheme, workers.worker(scheme, theirs) as work:
        named = {name: given[kind] for name, kind in keywords.items()}
        scheme.init_on_sender(model_id="policy", pipes=[mine], **named)
        work("attach")
        assert not work("receive", 0.3)  # what is registered is not sent before send()
        work.start("receive")
        scheme.get_sender().send()
        assert work.result() is True
        assert work("value") == 5.0
        work("shutdown")


@pytest.mark.slow
def test_single_workers_and_weights_of_their_own() -> None:
    pipes = [Pipe() for _ in range(2)]
    scheme = SHM(per_worker_weights=True)
    with (
        scheme,
        workers.worker(scheme, pipes[0][1]) as one,
        workers.worker(scheme, pipes[1][1]) as two,
    ):
        scheme.init_on_sender(model_id="policy", pipes=[mine for mine, _ in pipes])
        sender = scheme.get_sender()
        sender.send_async({0: _td(1.0), 1: _td(2.0)})  # nobody has attached
        one("attach")
        two("attach")
        sender.wait_async()
        assert (one("value"), two("value")) == (1.0, 2.0)
        sender.send(_td(3.0), worker_ids=1)
        assert (one("value"), two("value")) == (1.0, 3.0)
        sender.send({0: _td(4.0), 1: _td(5.0)})
        assert (one("value"), two("value")) == (4.0, 5.0)
        sender.send(_td(6.0), worker_ids=[0, 1])
        assert (one("value"), two("value")) == (6.0, 6.0)
        one("shutdown")
        two("shutdown")


@pytest.mark.slow
def test_a_worker_that_is_forked_from_the_sender() -> None:
    mine, theirs = Pipe()
    with MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        with pytest.warns(UserWarning, match="no worker has attached"):
            sender.send(tools.filled(1.0).state_dict())  # the portal runs, the pipe is watched
        with workers.worker(scheme, theirs) as work:
            work("attach")
            assert work("receive") is True
            assert work("value") == 1.0
            work.start("receive")
            sender.send(tools.filled(2.0).state_dict())
            assert work.result() is True
            work("shutdown")


# -- shared memory ----------------------------------------------------------------------------


@pytest.mark.slow
def test_registered_weights_are_first_values() -> None:
    registered = _td(1.0).detach()
    mine, theirs = Pipe()
    with SHM({"policy": registered}, auto_register=False) as scheme:
        registered.data.zero_()  # what workers get first was copied
        with workers.worker(scheme, theirs) as work:
            scheme.init_on_sender(model_id="policy", pipes=[mine])
            work("attach")
            assert work("receive") is True
            assert work("value") == 1.0
            with pytest.raises(RuntimeError, match="registered already"):
                scheme.register_shared_weights("policy", _td(2.0))
            scheme.get_sender().send(_td(3.0))
            assert work("value") == 3.0
            assert scheme.policy_weights["policy"] is registered
            assert float(registered["bias"].sum()) == 6.0  # it is kept up to date
            with pytest.raises(ValueError, match="do not fit"):
                scheme.get_sender().send({"weight": torch.zeros(1)})
            assert float(registered["bias"].sum()) == 6.0
            work("shutdown")


@pytest.mark.parametrize("where", ["keyword", "context"])
def test_cached_weights_are_registered(where: str) -> None:
    mine, theirs = Pipe()
    context = workers.OldContext(get_cached_weights={"policy": _td(2.0)}.get)
    model = tools.filled(0.0)
    with SHM(auto_register=False) as scheme, SHM() as other:
        if where == "keyword":
            scheme.init_on_sender(model_id="policy", pipes=[mine], cached_weights=_td(2.0))
        else:
            scheme.init_on_sender(model_id="policy", context=context, pipes=[mine])
        assert float(scheme.policy_weights["policy"]["bias"].sum()) == 4.0
        other.init_on_worker(model_id="policy", pipe=theirs, model=model)
        assert other.get_receiver().receive(timeout=tools.PATIENCE)
        assert tools.value_of(model) == 2.0
        scheme.get_sender().send(_td(3.0))
        assert tools.value_of(model) == 3.0


@pytest.mark.parametrize("per_worker", [False, True])
def test_what_a_send_registers_goes_nowhere_else(per_worker: bool) -> None:
    pipes = [Pipe() for _ in range(2)]
    model = tools.filled(0.0)
    with pipes[0][1], SHM(per_worker_weights=per_worker) as scheme, SHM() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine for mine, _ in pipes])
        other.init_on_worker(model_id="policy", pipe=pipes[1][1], model=model)
        scheme.get_sender().send_async({0: _td(1.0)} if per_worker else _td(1.0), worker_ids=0)
        assert float(scheme.policy_weights["policy"]["bias"].sum()) == 2.0
        assert not other.get_receiver().receive(timeout=0.3)
        assert tools.value_of(model) == 0.0


def test_a_transport_without_a_pipe() -> None:
    with SHM({"policy": _td(1.0)}) as scheme, scheme.create_transport(None) as transport:
        assert isinstance(transport, legacy.SharedMemTransport)
        assert transport.policy_weights.keys() == {"policy"}


def test_weights_that_are_not_registered() -> None:
    mine, theirs = Pipe()
    with theirs, SHM(auto_register=False) as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        for call in (sender.send, sender.send_async):
            with pytest.raises(KeyError, match="not registered"):
                call(_td(1.0))
        with pytest.raises(ValueError, match="must be a TensorDict"):
            scheme.register_shared_weights("policy", {"a": torch.zeros(1)})  # type: ignore[arg-type]
        scheme.register_shared_weights("policy", _td(1.0))
        sender.send_async(_td(1.0))
    with pytest.raises(ValueError, match="must be a TensorDict"):
        SHM({"policy": 3})  # type: ignore[dict-item]


def test_auto_registration_happens_once() -> None:
    mine, theirs = Pipe()
    with theirs, SHM() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        scheme.get_sender().send_async(_td(1.0))
        with pytest.raises(RuntimeError, match="registered already"):
            scheme.register_shared_weights("policy", _td(1.0))


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", BOTH)
def test_a_worker_that_dies(make: Any) -> None:
    pipes = [Pipe() for _ in range(2)]
    with (
        make("tensordict") if make is MP else make() as scheme,
        workers.worker(scheme, pipes[0][1]) as one,
        workers.worker(scheme, pipes[1][1]) as two,
    ):
        scheme.init_on_sender(model_id="policy", pipes=[mine for mine, _ in pipes])
        sender = scheme.get_sender()
        sender.send_async(_td(1.0))
        for work in (one, two):
            work("attach")
            work("receive")
        sender.wait_async()
        two.kill()
        one.start("receive")
        started = time.monotonic()
        with pytest.raises(aiosync.PartialSyncError) as caught:
            sender.send(_td(2.0))
        assert workers.is_quick(started, 10.0)
        assert caught.value.failed.keys() == {1}
        assert one.result() is True
        assert one("value") == 2.0
        one.start("receive")
        sender.send(_td(3.0))  # it was reported; the others go on
        assert one.result() is True
        one("shutdown")


@pytest.mark.slow
@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("late", [False, True])
def test_weights_that_do_not_fit(make: Any, late: bool) -> None:
    mine, theirs = Pipe()
    with make() as scheme, workers.worker(scheme, theirs) as work:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        if late:
            sender.send_async({"weight": torch.zeros(3, 3)})
            work("attach")
            work.start("receive")
        else:
            work("attach")
            work.start("receive")
            sender.send_async({"weight": torch.zeros(3, 3)})
        with pytest.raises(aiosync.PartialSyncError, match="ApplyError"):
            sender.wait_async()
        with pytest.raises(workers.WorkerError, match="ApplyError"):
            work.result()
        assert work("value") == 0.0
        work.start("receive")
        sender.send(tools.filled(1.0).state_dict())
        assert work.result() is True
        assert work("value") == 1.0
        work("shutdown")


@pytest.mark.slow
def test_a_worker_that_is_refused() -> None:
    mine, theirs = Pipe()
    with MP() as scheme, workers.worker(scheme, theirs) as work:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        sender.send_async(tools.filled(1.0).state_dict())
        work("attach", "critic")
        with pytest.raises(workers.WorkerError, match="ConfigError.*serves model 'policy'"):
            work("receive")
        with pytest.raises(workers.WorkerError, match="ConfigError.*serves model 'policy'"):
            work("receive")
        with pytest.raises(aiosync.PartialSyncError, match="could not attach.*'critic'"):
            sender.wait_async()
        work("shutdown")


def test_why_a_worker_is_refused_is_said_while_its_link_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = aiosync.MultiProcessWeightSyncScheme.connect

    async def slowly(self: Any, **options: Any) -> None:
        try:
            await connect(self, **options)
        finally:
            await asyncio.sleep(0.3)

    mine, theirs = Pipe()
    other = MP()
    with MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        scheme.get_sender().send_async(tools.filled(1.0).state_dict())
        monkeypatch.setattr(aiosync.MultiProcessWeightSyncScheme, "connect", slowly)
        other.init_on_worker(model_id="critic", pipe=theirs, model=tools.filled(0.0))
        tools.until(lambda: other._scheme._closed)
        with pytest.raises(aiosync.ConfigError, match="serves model 'policy'"):
            other.get_receiver().receive(timeout=tools.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError, match="could not attach"):
            scheme.get_sender().wait_async()
    other.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("make", BOTH)
def test_a_trainer_that_goes_away(make: Any) -> None:
    mine, theirs = Pipe()
    other, closed = make(), threading.Event()
    with make() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs, model=tools.filled(0.0))
        scheme.get_sender().send_async(_td(1.0) if make is SHM else tools.filled(1.0).state_dict())
        assert other.get_receiver().receive(timeout=tools.PATIENCE)

        def wait() -> None:
            with pytest.raises(aiosync.PeerClosed):
                other.get_receiver().receive(timeout=tools.PATIENCE)
            closed.set()

        thread = tools.in_thread(wait)
        scheme.get_sender().wait_async()
    assert closed.wait(10.0)
    thread.join()
    other.shutdown()


def test_a_pipe_that_ends_before_anybody_attaches() -> None:
    mine, theirs = Pipe()
    with MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        theirs.close()
        with pytest.raises(aiosync.PartialSyncError, match="worker 0 could not attach"):
            scheme.get_sender().send(_td(1.0))


# -- pickling and the newer calls -------------------------------------------------------------


def test_pickles_are_configuration() -> None:
    mine, theirs = Pipe()
    with theirs, SHM({"policy": _td(1.0)}, auto_register=False, timeout=7.0) as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        for twin in (pickle.loads(pickle.dumps(scheme)), copy.copy(scheme), copy.deepcopy(scheme)):
            assert type(twin) is SHM
            assert (twin.strategy, twin.auto_register, twin.timeout) == ("tensordict", False, 7.0)
            ours, its = scheme.policy_weights["policy"], twin.policy_weights["policy"]
            assert (ours == its).all()
            assert ours["weight"].data_ptr() != its["weight"].data_ptr()
            with pytest.raises(RuntimeError, match="Must call init_on_sender"):
                twin.get_sender()
            with pytest.raises(RuntimeError, match="registered already"):
                twin.register_shared_weights("policy", _td(1.0))
            twin.shutdown()


@pytest.mark.parametrize("make", BOTH)
def test_the_newer_calls_go_on_working(make: Any) -> None:
    source, target = tools.filled(1.0), tools.filled(0.0)
    context = workers.OldContext(source)
    with make(timeout=tools.PATIENCE) as sender, copy.copy(sender) as receiver:
        sender.init_on_sender(model_id="policy", context=context, num_workers=1)
        receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
        tools.join(sender, receiver)
        assert tools.value_of(target) == 1.0
        tools.fill(source, 2.0)
        assert sender.send().acked == {0}
        assert tools.value_of(target) == 2.0
        tools.fill(source, 3.0)
        sender.get_sender().send()
        assert tools.value_of(target) == 3.0
        assert receiver.get_receiver().receive()
        tools.fill(source, 4.0)
        sender.get_sender().send_async()
        sender.get_sender().wait_async()
        assert tools.value_of(target) == 4.0
    assert tools.portal_threads() == []


def test_no_sync_does_nothing() -> None:
    mine, theirs = Pipe()
    with theirs, NONE() as scheme, NONE() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        model = tools.filled(0.0)
        other.init_on_worker(model_id="policy", pipe=None, model=model)
        sender, receiver = scheme.get_sender(), other.get_receiver()
        sender.send(_td(1.0))
        sender.send_async(_td(1.0))
        sender.wait_async()
        assert receiver.receive() is False
        assert tools.value_of(model) == 0.0
        assert scheme.create_transport(mine).check_connection()
        mine.send("still the program's own")
        assert theirs.recv() == "still the program's own"
        mine.close()
    assert tools.portal_threads() == []


# -- schemes that users wrote -----------------------------------------------------------------


class Box:
    """A transport of a user, in one process."""

    def __init__(self, messages: list[tuple[str, Any]]) -> None:
        self.messages = messages

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.messages.append((model_id, weights))

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        return self.messages.pop(0) if self.messages else None

    def check_connection(self) -> bool:
        return True


class BoxScheme(legacy.WeightSyncScheme):
    def create_transport(self, pipe_or_context: Any) -> Box:
        return Box(pipe_or_context)


def test_a_scheme_with_a_transport_of_its_own() -> None:
    boxes: list[list[tuple[str, Any]]] = [[], []]
    model = tools.filled(0.0)
    assert isinstance(Box([]), legacy.TransportBackend)
    with BoxScheme() as scheme, BoxScheme() as other:
        scheme.init_on_sender(model_id="policy", pipes=boxes, model=tools.filled(1.0))
        other.init_on_worker(model_id="policy", pipe=boxes[1], model=model)
        sender, receiver = scheme.get_sender(), other.get_receiver()
        assert not receiver.receive()
        sender.send()
        assert receiver.receive()
        assert tools.value_of(model) == 1.0
        assert len(boxes[0]) == 1
        sender.send(worker_ids=1)
        assert [len(box) for box in boxes] == [1, 1]
        with pytest.raises(ValueError, match="Worker 2 not registered"):
            sender.send(worker_ids=2)
        with pytest.raises(RuntimeError, match="does not support async send"):
            sender.send_async()
    with pytest.raises(NotImplementedError, match="has no transport"):
        legacy.WeightSyncScheme().create_transport(None)

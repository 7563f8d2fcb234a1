"""The older generation's schemes, senders and receivers: their promises, and their failures."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import queue
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import aiosync
from aiosync import legacy, sync
from tests.legacy import _tools as workers
from tests.legacy._tools import BOTH, MP, SHM, ones, td
from tests.sync import _tools as tools

NONE = legacy.NoWeightSyncScheme
ALL = pytest.mark.parametrize("make", [MP, SHM, NONE])


# -- names and options ------------------------------------------------------------------------


def test_names_and_options_of_that_generation() -> None:
    assert (MP().strategy, SHM().strategy) == ("state_dict", "tensordict")
    scheme = SHM({"policy": td()}, "state_dict", False)
    assert (scheme.strategy, scheme.auto_register) == ("state_dict", False)
    assert isinstance(scheme, sync.SharedMemWeightSyncScheme)
    scheme.strategy = "tensordict"
    assert scheme.strategy_str == "tensordict"

    class Own(legacy.WeightStrategy):
        def extract_weights(self, source: Any) -> Any:
            return source.state_dict()

    workers.refuses(
        (ValueError, "strategy", lambda: MP(strategy="pickle")),  # type: ignore[arg-type]
        (ValueError, "Own overrides extract_weights", lambda: setattr(scheme, "strategy", Own())),
        (ValueError, "Own overrides extract_weights", lambda: setattr(scheme, "_strategy", Own())),
        (TypeError, "nonsense", lambda: MP(nonsense=1)),
    )


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("shared", "SharedMemWeightSyncScheme"),
        ("process", "MultiProcessWeightSyncScheme"),
        ("distributed", "DistributedWeightSyncScheme"),
        ("rpc", "RPCWeightSyncScheme"),
        ("ray", "RayWeightSyncScheme"),
        ("none", "NoWeightSyncScheme"),
    ],
)
def test_a_name_makes_the_class_of_that_generation(backend: str, name: str) -> None:
    scheme = legacy.WeightSyncScheme.from_backend(backend, strategy="state_dict")
    assert type(scheme) is getattr(legacy, name)
    assert scheme.strategy == "state_dict"
    with pytest.raises(aiosync.ConfigError, match=r"aiosync\.sync"):
        legacy.WeightSyncScheme.from_backend("tcp")


def test_a_registered_class_of_the_users_is_no_scheme_of_that_generation() -> None:
    class Mine(aiosync.SharedMemWeightSyncScheme):
        pass

    aiosync.register_weight_sync_backend("mine-of-shared")(Mine)
    with pytest.raises(aiosync.ConfigError, match=r"aiosync\.sync"):
        legacy.WeightSyncScheme.from_backend("mine-of-shared")
    assert isinstance(sync.WeightSyncScheme.from_backend("mine-of-shared"), sync.WeightSyncScheme)


SCHEMES = [name for name in legacy.__all__ if name.endswith("Scheme")]


@pytest.mark.parametrize("name", SCHEMES)
def test_an_instance_of_the_class_of_the_newer_generation(name: str) -> None:
    cls, newer = getattr(legacy, name), getattr(sync, name)
    scheme = cls()
    for each in (scheme, copy.copy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert type(each) is cls
        assert isinstance(each, newer)
        assert isinstance(each, sync.WeightSyncScheme)
        assert isinstance(each, sync.NoWeightSyncScheme) is (cls is NONE)
    assert not issubclass(newer, cls)


def test_functions_of_the_newer_generation_take_these_schemes() -> None:
    trained, model = tools.filled(1.0), tools.filled(0.0)
    with SHM() as scheme, copy.copy(scheme) as other:
        scheme.init_on_sender(model_id="policy", model=trained, num_workers=1)
        other.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        sync.connect_all(scheme, other, timeout=tools.PATIENCE)
        assert scheme.send().version == other.wait_for_version(2) == 2
        assert tools.value_of(model) == 1.0
        assert (scheme.worker_versions, other.lag, bool(other.ready)) == ({0: 2}, 0, True)


@pytest.mark.parametrize("make", [MP, SHM])
def test_the_result_of_receive_is_applied_already(make: Any) -> None:
    """Without a pipe; weights that are applied by hand have version 0."""
    model = tools.filled(0.0)
    with make() as scheme, copy.copy(scheme) as other:
        scheme.init_on_sender(model_id="policy", model=tools.filled(1.0), num_workers=1)
        other.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        sync.connect_all(scheme, other, timeout=tools.PATIENCE)
        handle = threading.Thread(target=scheme.send)
        handle.start()
        other.apply_weights(other.receive(timeout=tools.PATIENCE))
        handle.join()
        with other.reading() as read:
            assert read.version == scheme.version
        other.apply_weights(tools.filled(3.0).state_dict())
        with other.reading() as read:
            assert (read.version, tools.value_of(model)) == (0, 3.0)


def test_a_scheme_without_links_has_nothing_to_apply() -> None:
    with pytest.raises(aiosync.LocalProtocolError, match="needs a connected receiver"):
        legacy.WeightSyncScheme().apply_pending()


def _tell(scheme: Any, conn: Connection) -> None:
    found = scheme.policy_weights.items()
    conn.send({name: each["bias"].tolist() for name, each in found})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_registered_weights_go_into_a_new_process(method: str) -> None:
    scheme = SHM({"policy": td(3.0).share_memory_(), "critic": td(4.0)})
    mine, theirs = Pipe()
    process = torch.multiprocessing.get_context(method).Process(target=_tell, args=(scheme, theirs))
    process.start()
    theirs.close()
    try:
        told = mine.recv() if mine.poll(workers.PATIENCE) else None
    finally:
        process.join()
    assert process.exitcode == 0
    assert told == {"policy": [3.0, 3.0], "critic": [4.0, 4.0]}


# -- mistakes ---------------------------------------------------------------------------------


@ALL
def test_the_order_of_calls(make: Any) -> None:
    mine, theirs = Pipe()
    with make() as scheme, theirs:
        workers.refuses(
            (RuntimeError, "init_on_sender", scheme.get_sender),
            (RuntimeError, "init_on_worker", scheme.get_receiver),
        )
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        assert scheme.get_sender() is sender
        workers.refuses((RuntimeError, "No async send", sender.wait_async))
        sender.send_async(td())
        workers.refuses(
            (RuntimeError, "async send", lambda: sender.send(td())),
            (RuntimeError, "again", lambda: sender.send_async(td())),
            (RuntimeError, "No async send", pickle.loads(pickle.dumps(sender)).wait_async),
        )


def test_arguments_that_cannot_be() -> None:
    mine, theirs = Pipe()
    reader, writer = Pipe(duplex=False)
    with theirs, reader, writer, MP() as scheme:

        def init(**options: Any) -> Any:
            return lambda: scheme.init_on_sender(model_id="policy", **options)

        workers.refuses(
            (ValueError, "num_workers is 2", init(pipes=[mine], num_workers=2)),
            (
                ValueError,
                "per_worker_weights=",
                lambda: MP(per_worker_weights=True).init_on_sender(pipes=[mine]),
            ),
            (TypeError, "nonsense", init(pipes=[mine], nonsense=1)),
            (ValueError, "pipe", init(pipes=["pipe"])),
            (ValueError, "two-way", lambda: scheme.init_on_worker("policy", pipe=reader)),
        )
        init(pipes=[mine])()
        sender = scheme.get_sender()
        # This scheme has links of the newer generation, and so no sender.
        with MP() as other:
            other.init_on_sender(num_workers=1)
            workers.refuses((RuntimeError, "scheme", other.get_sender))
        workers.refuses(
            (RuntimeError, "already a sender", init(pipes=[mine])),
            (ValueError, "Worker 3", lambda: sender.send(td(), worker_ids=3)),
            (ValueError, "nothing to send", sender.send),
            (ValueError, "'actor'", lambda: sender.send("actor")),
        )


def test_a_receiver_without_a_model() -> None:
    receiver = MP().create_receiver()
    context = workers.OldContext(tools.filled(0.0))
    workers.refuses((ValueError, "No model", lambda: receiver.apply_weights(td())))
    receiver.register_model("policy")
    workers.refuses((ValueError, "Context", lambda: receiver.apply_weights(td())))
    receiver.context = context
    receiver.apply_weights(td())
    assert tools.value_of(context.policy) == 1.0
    del context
    gc.collect()
    workers.refuses((ValueError, "garbage", lambda: receiver.apply_weights(td())))


def test_weights_that_come_before_a_model() -> None:
    model = tools.filled(0.0)
    with workers.pair(MP, None) as (sender, receiver):
        sender.send_async(ones())
        with pytest.raises(ValueError, match="No model registered"):
            receiver.receive(timeout=tools.PATIENCE)
        receiver.register_model(model)
        assert receiver.receive()
        sender.wait_async()
        assert tools.value_of(model) == 1.0


# -- sources of weights -----------------------------------------------------------------------


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


@BOTH
def test_an_old_style_context(make: Any) -> None:
    mine, theirs = Pipe()
    context = workers.OldContext(tools.filled(1.0), pipes=[mine], num_workers=1)
    its = workers.OldContext(tools.filled(0.0), pipe=theirs)
    with make() as scheme, make() as other:
        scheme.init_on_sender(model_id="policy", context=context)
        other.init_on_worker(model_id="policy", context=its)
        assert scheme.context is scheme.get_sender().context is context
        for value in (1.0, 2.0):
            tools.fill(context.policy, value)
            workers.deliver(scheme.get_sender(), other.get_receiver())
            assert tools.value_of(its.policy) == value
        context.critic = tools.filled(3.0)
        workers.deliver(scheme.get_sender(), other.get_receiver(), "critic")
        assert tools.value_of(its.policy) == 3.0


def test_pipes_of_a_subclass_of_torchrls_collectors_are_its_own() -> None:
    theirs: type = type("Theirs", (), {"__module__": "torchrl.collectors"})
    own = type("Own", (theirs,), {"pipes": ["for orders"], "policy": tools.filled(0.0)})()
    with MP() as scheme:
        scheme.init_on_sender(model_id="policy", context=own, num_workers=1)
        workers.refuses((RuntimeError, "pipes", scheme.get_sender))


@pytest.mark.parametrize("keyword", ["model", "weights", "cached_weights"])
def test_a_registered_source(keyword: str) -> None:
    source, model = tools.filled(5.0), tools.filled(0.0)
    given = source if keyword == "model" else TensorDict.from_module(source)
    with workers.pair(MP, model, **{keyword: given}) as (sender, receiver):
        # A registered source is not sent before send().
        assert not receiver.receive(0.3)
        workers.deliver(sender, receiver)
        assert tools.value_of(model) == 5.0


def test_single_workers() -> None:
    pipes, models = [Pipe() for _ in range(2)], [tools.filled(0.0) for _ in range(2)]
    with SHM() as scheme, SHM() as one, SHM() as two:
        scheme.init_on_sender(model_id="policy", pipes=[mine for mine, _ in pipes])
        sender = scheme.get_sender()
        # No worker has attached yet.
        sender.send_async(td(1.0))
        for other, (_, theirs), model in zip((one, two), pipes, models, strict=True):
            other.init_on_worker(model_id="policy", pipe=theirs, model=model)
        sender.wait_async()
        for value, worker_ids, expected in (
            (2.0, [], [1.0, 1.0]),
            (3.0, 1, [1.0, 3.0]),
            (6.0, [0, 1], [6.0, 6.0]),
        ):
            sender.send(td(value), worker_ids=worker_ids)
            assert [tools.value_of(model) for model in models] == expected
        sender.send_async(td(7.0), worker_ids=iter([0]))
        sender.wait_async()
        assert [tools.value_of(model) for model in models] == [7.0, 6.0]
        with pytest.raises(aiosync.ConfigError, match="worker_ids="):
            sender.send({0: td(1.0), 1: td(2.0)})


def test_a_context_that_goes_is_told_to_both_sides() -> None:
    mine, theirs = Pipe()
    context = workers.OldContext(tools.filled(0.0))
    with SHM() as scheme, SHM() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs, context=context)
        scheme.get_sender().send(td())
        del context
        gc.collect()
        with pytest.raises(aiosync.PartialSyncError, match="garbage"):
            scheme.get_sender().send(td())
        with pytest.raises(aiosync.ConfigError, match="garbage"):
            other.get_receiver().receive(timeout=tools.PATIENCE)


@BOTH
@pytest.mark.parametrize("has_model", [False, True])
def test_a_context_that_goes_is_the_answer_to_an_update(make: Any, has_model: bool) -> None:
    mine, theirs = Pipe()
    context = workers.OldContext(tools.filled(0.0) if has_model else None)
    with make() as scheme, make() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs, context=context)
        del context
        gc.collect()
        scheme.get_sender().send_async(td())
        with pytest.raises(aiosync.ConfigError, match="garbage"):
            other.get_receiver().receive(timeout=tools.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError, match="garbage"):
            scheme.get_sender().wait_async()


@BOTH
def test_a_model_that_was_given_needs_no_context(make: Any) -> None:
    mine, theirs = Pipe()
    context, model = workers.OldContext(None), tools.filled(0.0)
    with make() as scheme, make() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        other.init_on_worker(model_id="policy", pipe=theirs, model=model, context=context)
        del context
        gc.collect()
        workers.deliver(scheme.get_sender(), other.get_receiver(), td())
        assert tools.value_of(model) == 1.0


@pytest.mark.parametrize(
    ("counted", "given", "count"),
    [
        ({"num_workers": 2}, {}, 2),
        ({"num_workers": 2}, {"num_workers": 3}, 3),
        ({}, {"num_workers": 3}, 3),
        ({}, {}, 1),
    ],
)
def test_a_scheme_that_does_nothing_has_workers_without_pipes(
    counted: dict[str, int], given: dict[str, int], count: int
) -> None:
    context = workers.OldContext(tools.filled(1.0), **counted)
    with NONE() as scheme:
        scheme.init_on_sender(model_id="policy", context=context, **given)
        sender = scheme.get_sender()
        sender.send()
        sender.send(worker_ids=count - 1)
        assert list(scheme.sender_transports) == list(range(count))


@BOTH
def test_a_copy_of_a_worker_is_not_that_worker(make: Any) -> None:
    _, theirs = Pipe()
    with make() as scheme:
        scheme.worker_idx = 1
        assert copy.copy(scheme).worker_idx == 1  # assigned for a later worker
        scheme.init_on_worker(model_id="policy", pipe=theirs, model=tools.filled(0.0))
        for twin in (pickle.loads(pickle.dumps(scheme)), copy.copy(scheme)):
            assert (scheme.worker_idx, twin.worker_idx) == (1, None)


@pytest.mark.slow
def test_a_worker_that_is_forked_from_the_sender() -> None:
    mine, theirs = Pipe()
    with MP() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        with pytest.warns(UserWarning, match="no worker has attached"):
            # From here on the portal runs and watches the pipe, beside which the worker is forked.
            sender.send(ones(1.0))
        with workers.worker(scheme, theirs) as work:
            work("attach")
            assert work("receive") is True
            assert work("value") == 1.0
            work.receives(lambda: sender.send(ones(2.0)))


@workers.BOTH
def test_weights_that_come_over_links_are_passed_on_over_a_pipe(make: Any) -> None:
    mine, theirs = Pipe()
    first, last = tools.filled(0.0), tools.filled(0.0)
    with make(timeout=tools.PATIENCE) as trainer, copy.copy(trainer) as relay, make() as leaf:
        trainer.init_on_sender(model_id="policy", num_workers=1)
        relay.init_on_sender(model_id="policy", pipes=[mine])
        relay.init_on_worker(model_id="policy", model=first, worker_idx=0)
        leaf.init_on_worker(model_id="policy", pipe=theirs, model=last)
        tools.join(trainer, relay)
        with tools.threads(lambda: trainer.send(td(3.0))):
            assert relay.receive(timeout=tools.PATIENCE)
        workers.deliver(relay.get_sender(), leaf.get_receiver(), first)
        assert tools.value_of(last) == 3.0


@pytest.mark.parametrize("make", [legacy.RayWeightSyncScheme, legacy.RayModuleTransformScheme])
def test_an_actor_applies_what_it_is_called_with(make: Any) -> None:
    context, other = workers.OldContext(tools.filled(0.0)), tools.filled(0.0)
    for model, source in ((context.policy, {"context": context}), (other, {"model": other})):
        with make() as scheme:
            scheme.init_on_worker(model_id="policy", **source)
            receiver = scheme.get_receiver()
            receiver.apply_weights(ones(2.0))
            assert tools.value_of(model) == 2.0
            assert scheme.get_receiver() is receiver
            misfit = {"weight": torch.zeros(3)}
            workers.refuses(
                (aiosync.ApplyError, "weight", functools.partial(receiver.apply_weights, misfit)),
                # receive() is for links, which this scheme may also have.
                (RuntimeError, "connect", scheme.receive),
            )


# -- shared memory ----------------------------------------------------------------------------


def test_registered_weights_are_first_values() -> None:
    registered, model = td(1.0), tools.filled(0.0)
    mine, theirs = Pipe()
    with SHM({"policy": registered}, auto_register=False) as scheme, SHM() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        # The workers' first values were copied before.
        registered.zero_()
        other.init_on_worker(model_id="policy", pipe=theirs, model=model)
        assert other.get_receiver().receive(tools.PATIENCE)
        assert tools.value_of(model) == 1.0
        with pytest.raises(RuntimeError, match="registered already"):
            scheme.register_shared_weights("policy", td(2.0))
        scheme.get_sender().send(td(3.0))
        assert tools.value_of(model) == 3.0
        assert scheme.policy_weights["policy"] is registered
        with pytest.raises(ValueError, match="do not fit"):
            scheme.get_sender().send({"weight": torch.zeros(1)})
        # The scheme keeps its registered weights up to date.
        assert float(registered["bias"].sum()) == 6.0


# -- failures ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("late", [False, True])
def test_weights_that_do_not_fit(make: Any, late: bool) -> None:
    model = tools.filled(0.0)
    mine, theirs = Pipe()
    with make() as scheme, make() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        if late:
            sender.send_async({"weight": torch.zeros(2, 4)})
        other.init_on_worker(model_id="policy", pipe=theirs, model=model)
        if not late:
            sender.send_async({"weight": torch.zeros(2, 4)})
        with pytest.raises(aiosync.ApplyError, match="strict=False"):
            other.get_receiver().receive(timeout=tools.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError, match="strict=False") as caught:
            sender.wait_async()
        assert isinstance(caught.value.failed[0], aiosync.ApplyError)
        assert tools.value_of(model) == 0.0
        workers.deliver(sender, other.get_receiver(), ones())
        assert tools.value_of(model) == 1.0


@pytest.mark.parametrize("inplace", [True, False])
def test_weights_that_are_applied_by_hand_and_do_not_fit(inplace: bool) -> None:
    """The answer to the next weights does not count for those that were refused."""
    model = tools.filled(0.0)
    with workers.pair(MP, model) as (sender, receiver):
        for weights, refused in (({"weight": torch.zeros(2, 4)}, True), (ones(), False)):
            sender.send_async(weights)
            (_, arrived), _ = receiver.transports[0].pipe.recv()
            if refused:
                with pytest.raises((aiosync.ApplyError, aiosync.ManifestMismatch)):
                    receiver.apply_weights(arrived, inplace)
                with pytest.raises(aiosync.PartialSyncError, match="Apply|Mismatch"):
                    sender.wait_async()
            else:
                receiver.apply_weights(arrived, inplace)
                sender.wait_async()
        assert tools.value_of(model) == 1.0


def test_a_worker_that_is_refused() -> None:
    mine, theirs = Pipe()
    with MP() as scheme, MP() as other:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        sender = scheme.get_sender()
        sender.send_async(ones())
        other.init_on_worker(model_id="critic", pipe=theirs, model=tools.filled(0.0))
        with pytest.raises(aiosync.ConfigError, match="'policy'"):
            other.get_receiver().receive(timeout=tools.PATIENCE)
        with pytest.raises(aiosync.PartialSyncError, match="'critic'"):
            sender.wait_async()


# -- pickling and the newer calls -------------------------------------------------------------


def test_pickles_are_configuration() -> None:
    mine, theirs = Pipe()
    with theirs, SHM({"policy": td()}, auto_register=False, timeout=7.0) as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[mine])
        for twin in (pickle.loads(pickle.dumps(scheme)), copy.copy(scheme), copy.deepcopy(scheme)):
            assert type(twin) is SHM
            assert (twin.strategy, twin.auto_register, twin.timeout) == ("tensordict", False, 7.0)
            ours, its = scheme.policy_weights["policy"], twin.policy_weights["policy"]
            assert (ours == its).all()
            assert ours["weight"].data_ptr() != its["weight"].data_ptr()
            workers.refuses(
                (RuntimeError, "init_on_sender", twin.get_sender),
                (RuntimeError, "", lambda: twin.register_shared_weights("policy", td())),  # noqa: B023
            )
            twin.shutdown()


# -- schemes that users wrote -----------------------------------------------------------------


class Box:
    """A user's transport, within one process."""

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


class QueueTransport:
    """A transport in the style of TorchRL's present schemes: blocking, over two queues."""

    def __init__(self, updates: Any, answers: Any) -> None:
        self.updates, self.answers = updates, answers

    def send_weights(self, weights: Any) -> None:
        self.updates.put(weights.detach().clone())

    def wait_ack(self) -> None:
        assert self.answers.get(timeout=tools.PATIENCE) == "updated"

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any, model: Any, strategy: Any
    ) -> Any:
        # The scheme changes the model itself, between two forwards.
        assert (weights, model) == (None, None)
        try:
            return self.updates.get(timeout=timeout)
        except queue.Empty:
            return None

    def send_ack(self, message: str) -> None:
        self.answers.put(message)

    def setup_connection_and_weights_on_sender(self) -> None:
        assert self.answers.get(timeout=tools.PATIENCE) == "here"

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        assert (worker_idx, strategy.extract_as) == (0, "tensordict")
        self.answers.put("here")
        return TensorDict.from_module(tools.filled(7.0))


class QueueScheme(legacy.WeightSyncScheme):
    def create_transport(self, pipe_or_context: Any) -> QueueTransport:
        return QueueTransport(*pipe_or_context)


def test_a_backend_of_ones_own_as_torchrl_has_them() -> None:
    queues = queue.Queue[Any](), queue.Queue[Any]()
    model, trained = tools.filled(0.0), tools.filled(1.0)
    assert isinstance(QueueTransport(*queues), sync.InitialSyncTransport)
    with QueueScheme("tensordict") as scheme, QueueScheme("tensordict") as other:
        scheme.init_on_sender(model_id="policy", pipes=[queues], model=trained)
        other.init_on_receiver(model_id="policy", pipe=queues, model=model, worker_idx=0)
        with tools.threads(other.connect):
            scheme.connect()
        # The transport brought these weights when it connected.
        assert tools.value_of(model) == 7.0
        assert not other.receive(timeout=0.01)
        for value in (1.0, 2.0):
            tools.fill(trained, value)
            with tools.threads(scheme.send):
                assert other.receive(timeout=tools.PATIENCE)
            assert tools.value_of(model) == value


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
        sender.send(worker_ids=1)
        assert [len(box) for box in boxes] == [1, 1]
        workers.refuses(
            (ValueError, "Worker 2", lambda: sender.send(worker_ids=2)),
            (RuntimeError, "async send", sender.send_async),
            (NotImplementedError, "", lambda: legacy.WeightSyncScheme().create_transport(None)),
        )

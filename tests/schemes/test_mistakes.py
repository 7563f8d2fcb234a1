"""A newcomer's first mistakes: each gets an error that says what to do."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import math
import multiprocessing
import os
import pickle
import re
import resource
import subprocess
import sys
import textwrap
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import aiosync
import aiosync.sync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = pytest.mark.one_loop

both = pytest.mark.parametrize("make", harness.SCHEMES)


NO_ROLE = (
    r"^Neither init_on_sender nor init_on_receiver have been called\. Call init_on_sender\(\) in "
    r"the trainer and init_on_receiver\(\) in a worker first$"
)


def _weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}


@pytest.mark.asyncio
@both
async def test_send_before_init_and_before_connect(make) -> None:
    async with make() as scheme:
        with pytest.raises(aiosync.LocalProtocolError, match=r"call init_on_sender\(\)"):
            await scheme.send()
        with pytest.raises(aiosync.LocalProtocolError, match=NO_ROLE):
            await scheme.connect()
        scheme.init_on_sender(model=models.linear())
        for call in (scheme.send, scheme.send_nowait):
            with pytest.raises(aiosync.LocalProtocolError, match=r"call scheme.connect\(\) first"):
                await call()
        with pytest.raises(aiosync.LocalProtocolError, match="init_on_receiver"):
            await scheme.receive()


@both
def test_an_async_scheme_used_as_a_blocking_one(make) -> None:
    scheme = make()
    with pytest.raises(aiosync.LocalProtocolError, match=r"`async with.*aiosync\.sync"), scheme:
        pass
    for name, instead in (
        ("shutdown", "await scheme.aclose()"),
        ("send_async", "scheme.send_nowait()"),
        ("wait_async", "await handle"),
    ):
        assert not hasattr(scheme, name)
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(scheme, name)


@both
@pytest.mark.asyncio
async def test_a_blocking_scheme_used_as_an_async_one(make) -> None:
    scheme = getattr(aiosync.sync, make.__name__)()
    with pytest.raises(aiosync.LocalProtocolError, match="use `with scheme:`"):
        async with scheme:
            pass
    for name, instead in (("aclose", "scheme.shutdown()"), ("send_nowait", "scheme.send_async()")):
        assert not hasattr(scheme, name)
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(scheme, name)


@pytest.mark.parametrize("module", [aiosync, aiosync.sync])
def test_an_unknown_attribute_is_named_and_its_cause_kept(module) -> None:
    class Scheme(module.SharedMemWeightSyncScheme):
        @property
        def broken(self) -> int:
            return self.nothing.value

    for name in ("nothing", "broken"):
        with pytest.raises(AttributeError, match="'Scheme' object has no attribute 'nothing'"):
            getattr(Scheme(), name)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (aiosync, "WeightFeed", "from aiosync.serving import WeightFeed"),
        (aiosync, "AdmissionGate", "from aiosync.serving import AdmissionGate"),
        (aiosync, "WeightServer", "from aiosync.server import WeightServer"),
        (aiosync, "WeightClient", "from aiosync.server import WeightClient"),
        (aiosync, "WeightsMiddleware", "from aiosync.integrations.asgi import WeightsMiddleware"),
        (aiosync.sync, "PartialSyncError", "use aiosync.PartialSyncError"),
        (aiosync.sync, "TLS", "use aiosync.TLS"),
        (aiosync, "nothing", "no attribute 'nothing'$"),
        (aiosync.sync, "nothing", "no attribute 'nothing'$"),
    ],
)
def test_names_that_are_elsewhere(module, name, instead) -> None:
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=instead):
        getattr(module, name)
    if instead.startswith("from"):
        exec(instead)


def test_a_package_that_was_not_imported() -> None:
    script = "import aiosync; from aiosync import serving; aiosync.serving; aiosync.sync"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.endswith("'sync': use `import aiosync.sync` first\n")


@pytest.mark.asyncio
async def test_connect_before_init_without_synchronization() -> None:
    async with aiosync.NoWeightSyncScheme() as scheme:
        with pytest.raises(aiosync.LocalProtocolError, match=NO_ROLE):
            await scheme.connect()


@pytest.mark.asyncio
@both
async def test_receive_before_connect(make) -> None:
    async with make() as scheme:
        with pytest.raises(aiosync.LocalProtocolError, match="call init_on_receiver"):
            await scheme.receive()
        scheme.init_on_receiver(model=models.linear())
        with pytest.raises(aiosync.LocalProtocolError, match=r"call scheme.connect\(\) first"):
            await scheme.receive()
        with pytest.raises(aiosync.LocalProtocolError, match="connected receiver"):
            scheme.apply_pending()
        with pytest.raises(aiosync.LocalProtocolError, match=r"call init_on_sender\(\)"):
            await scheme.send()


@pytest.mark.asyncio
@both
async def test_connect_twice(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as ends:
        for scheme in ends:
            with pytest.raises(aiosync.LocalProtocolError, match="twice"):
                await scheme.connect()
        assert (await ends[0].send()).acked == {0}  # no harm was done


@pytest.mark.asyncio
@both
async def test_both_roles_in_one_object(make) -> None:
    async with make() as scheme:
        scheme.init_on_sender(model=models.linear())
        with pytest.raises(aiosync.LocalProtocolError, match=r"copy.copy\(scheme\)"):
            scheme.init_on_receiver(model=models.linear())
        with pytest.raises(aiosync.LocalProtocolError, match="already a sender"):
            scheme.init_on_sender(model=models.linear())


@pytest.mark.asyncio
@both
async def test_two_senders_of_one_scheme(make) -> None:
    async with make() as scheme, copy.copy(scheme) as other:
        scheme.init_on_sender(model=models.linear())
        with pytest.raises(aiosync.ConfigError, match="each sender a scheme of its own"):
            other.init_on_sender(model=models.linear())


@both
def test_a_context_that_cannot_be_referred_to_weakly(make) -> None:
    """It is refused before the scheme takes a role, or its address."""
    scheme = make()
    context = {"policy": models.linear()}
    for init in (scheme.init_on_sender, scheme.init_on_receiver):
        with pytest.raises(aiosync.ConfigError, match=r"dict cannot have: pass the model itself"):
            init(model_id="policy", context=context)
    scheme.init_on_sender(model=models.linear())
    scheme.abort()


@both
@pytest.mark.parametrize(
    "options",
    [
        {"devices": "cpu"},
        {"devices": torch.device("cpu")},
        {"pipes": 3},
        {"context": SimpleNamespace(num_workers="two"), "model_id": "policy"},
        {"num_workers": 1.5},
    ],
    ids=str,
)
def test_wrong_kinds_of_options(make, options) -> None:
    model = {} if "context" in options else {"model": models.linear()}
    with pytest.raises(aiosync.ConfigError, match=r"must be (a list|an int)"):
        make().init_on_sender(**model, **options)


@pytest.mark.asyncio
@both
async def test_unknown_worker(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as ends:
        with pytest.raises(aiosync.ConfigError, match=r"Worker 5 not registered.*connected: 0"):
            await ends[0].send(worker_ids=5)


async def _refused(scheme, other) -> aiosync.AiosyncError:
    """What the worker is told, while the trainer waits for another one."""
    async with scheme, other:
        connecting = asyncio.ensure_future(scheme.connect(timeout=0.5))
        with pytest.raises(aiosync.AiosyncError) as caught:
            await other.connect(timeout=10)
        with pytest.raises(aiosync.ConnectTimeout) as late:
            await connecting
        assert "refused: " in str(late.value)
        return caught.value


@pytest.mark.asyncio
@pytest.mark.slow
@both
async def test_index_out_of_range(make) -> None:
    scheme = make()
    other = copy.copy(scheme)
    scheme.init_on_sender(model=models.linear(), num_workers=2)
    other.init_on_receiver(model=models.linear(), worker_idx=2)
    error = await _refused(scheme, other)
    assert isinstance(error, aiosync.ConfigError)
    assert "worker_idx 0 to 1" in str(error)


@pytest.mark.asyncio
@pytest.mark.slow
@both
async def test_wrong_model_id(make) -> None:
    scheme = make()
    other = copy.copy(scheme)
    scheme.init_on_sender(model_id="policy", model=models.linear(), num_workers=1)
    other.init_on_receiver(model_id="critic", model=models.linear())
    error = await _refused(scheme, other)
    assert isinstance(error, aiosync.ConfigError)
    assert "'policy'" in str(error)
    assert "'critic'" in str(error)
    assert "same model_id on both sides" in str(error)


@pytest.mark.asyncio
@pytest.mark.slow
@both
async def test_mismatched_strategies(make) -> None:
    scheme = make("tensordict")
    other = copy.copy(scheme)
    other.strategy = "state_dict"
    scheme.init_on_sender(model=models.linear(), num_workers=1)
    other.init_on_receiver(model=models.linear())
    error = await _refused(scheme, other)
    assert isinstance(error, aiosync.ConfigError)
    assert "same strategy" in str(error)


@pytest.mark.asyncio
@both
async def test_wrong_model(make) -> None:
    scheme = make()
    other = copy.copy(scheme)
    async with scheme, other:
        scheme.init_on_sender(model=models.wide(), num_workers=1)
        other.init_on_receiver(model=models.linear())
        results = await asyncio.gather(scheme.connect(), other.connect(), return_exceptions=True)
        sender_error, receiver_error = results
        assert isinstance(sender_error, aiosync.PartialSyncError)
        assert isinstance(receiver_error, aiosync.ApplyError)
        for text in (str(sender_error), str(receiver_error)):
            assert "weight" in text
            assert "bias" in text
            assert "3" in text
            assert "2" in text


@both
def test_forgot_the_guard(make) -> None:
    with pytest.raises(aiosync.ConfigError, match="guard='reading'.*apply_pending"):
        make().init_on_receiver(weights=_weights())
    make(guard="reading").init_on_receiver(weights=_weights())
    make(apply="manual").init_on_receiver(weights=_weights())


@pytest.mark.asyncio
@both
async def test_forgot_the_guard_of_a_model_given_late(make) -> None:
    async with make() as scheme:
        scheme.init_on_receiver()
        with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
            scheme.model = _weights()


@pytest.mark.asyncio
@both
async def test_a_closed_scheme(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as (
        sender,
        receiver,
    ):
        await sender.aclose()
        await receiver.aclose()
        for call in (
            sender.send,
            sender.connect,
            lambda: sender.wait_for_version(1),
            receiver.receive,
            receiver.connect,
            lambda: receiver.wait_for_version(1),
        ):
            with pytest.raises(aiosync.TransportClosed, match="make a new one, or copy.copy"):
                await call()
        for call in (
            sender.send_nowait,
            sender.init_on_sender,
            receiver.apply_pending,
            receiver.init_on_receiver,
            lambda: receiver.apply_weights({}),
        ):
            with pytest.raises(aiosync.TransportClosed, match="make a new one, or copy.copy"):
                call()


@pytest.mark.asyncio
async def test_the_facade_inside_a_running_loop() -> None:
    for name in ("SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"):
        scheme = getattr(aiosync.sync, name)()
        scheme.init_on_sender(model=models.linear())
        with pytest.raises(aiosync.LocalProtocolError, match="use the async API"):
            scheme.connect()
        scheme.shutdown()


class _Scaled(aiosync.WeightStrategy):
    def __init__(self, function) -> None:
        super().__init__("tensordict")
        self.function = function


@both
@pytest.mark.parametrize("method", ["spawn", "forkserver", "pickle"])
def test_a_lambda_in_a_spawned_worker(make, method) -> None:
    scheme = make(_Scaled(lambda weights: weights))
    scheme.init_on_sender(model=models.linear(), num_workers=1, device_map_fn=lambda i, w: w)
    try:
        with pytest.raises(aiosync.ConfigError, match="top level of a module.*'fork'"):
            if method == "pickle":
                pickle.dumps(scheme)
            else:
                process = harness.context(method).Process(target=print, args=(scheme,))
                process.start()
        copy.copy(scheme)  # in one process there is nothing to pickle
    finally:
        scheme.abort()


@both
def test_lambdas_that_stay_in_the_trainer_do_no_harm(make) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(), num_workers=1, device_map_fn=lambda i, w: w)
    pickle.loads(pickle.dumps(scheme)).init_on_receiver(model=models.linear())
    scheme.abort()


@pytest.mark.asyncio
@both
async def test_used_on_another_loop(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as (
        sender,
        _,
    ):

        def elsewhere() -> None:
            with asyncio.Runner() as runner:
                runner.run(sender.send())

        with pytest.raises(aiosync.LocalProtocolError, match="another event loop"):
            await asyncio.to_thread(elsewhere)


def _use_in_child(scheme, conn) -> None:
    async def main() -> list[str]:
        texts = []
        for call in (scheme.connect, scheme.connect, lambda: scheme.wait_for_version(1)):
            try:
                await call()
            except aiosync.LocalProtocolError as exc:
                texts.append(str(exc))
        async with asyncio.timeout(2):
            await scheme.aclose()
        return texts

    conn.send(asyncio.run(main()))


def _texts_of_child(scheme) -> list[str]:
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs:
        process = multiprocessing.get_context("fork").Process(
            target=_use_in_child, args=(scheme, theirs)
        )
        process.start()
        process.join(harness.PATIENCE)
        process.close()
        assert mine.poll()
        return mine.recv()


@pytest.mark.asyncio
@both
async def test_a_connected_scheme_in_a_forked_child(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as ends:
        for scheme in ends:
            texts = _texts_of_child(scheme)
            assert len(texts) == 3
            for text in texts:
                assert "was connected before the process forked; call init_on_receiver()" in text
        assert (await ends[0].send()).acked == {0}


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_scheme_in_a_forked_child_that_the_parent_gave_a_role(make, role) -> None:
    async with make() as scheme:
        getattr(scheme, f"init_on_{role}")(model=models.linear())
        texts = _texts_of_child(scheme)
        for text in texts[:2]:
            assert "was set up before the process forked; call init_on_receiver()" in text


@pytest.mark.slow
def test_without_uvloop() -> None:
    script = """
    import sys
    sys.modules["uvloop"] = None  # as if it were not installed
    import importlib.util
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "uvloop" else find_spec(name, *a)
    import asyncio, copy, torch, aiosync, aiosync.sync

    async def main():
        scheme = aiosync.SharedMemWeightSyncScheme()
        other = copy.copy(scheme)
        source, target = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        async with scheme, other:
            scheme.init_on_sender(model=source, num_workers=1)
            other.init_on_receiver(model=target)
            await asyncio.gather(scheme.connect(), other.connect())
            await scheme.send()
        assert torch.equal(source.weight, target.weight)
        return type(asyncio.get_running_loop()).__module__

    assert aiosync.run(main).startswith("asyncio"), aiosync.run(main)
    with aiosync.sync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=torch.nn.Linear(4, 2))
        scheme.connect()
        scheme.send()
    print("good")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "good\n", done.stderr


_NO_TIMEOUTS = [float("nan"), -1, np.float32("nan"), "5", True, [1], 1j]


@pytest.mark.parametrize("timeout", _NO_TIMEOUTS, ids=repr)
@both
def test_a_timeout_of_a_scheme_that_is_no_number(make, timeout) -> None:
    with pytest.raises(aiosync.ConfigError, match="timeout must be positive seconds or None"):
        make(timeout=timeout)
    for module in (aiosync, aiosync.sync):
        with pytest.raises(aiosync.ConfigError, match="timeout must be"):
            getattr(module, make.__name__)(timeout=timeout)


@pytest.mark.asyncio
@pytest.mark.parametrize("timeout", _NO_TIMEOUTS, ids=repr)
@both
async def test_a_timeout_of_a_call_that_is_no_number(make, timeout) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as (
        sender,
        receiver,
    ):
        for call in (
            sender.send,
            lambda timeout: sender.send_nowait(timeout=timeout),
            lambda timeout: sender.wait_for_version(9, timeout=timeout),
            lambda timeout: sender.wait_staged(9, timeout=timeout),
            lambda timeout: receiver.wait_for_version(9, timeout=timeout),
            lambda timeout: receiver.wait_staged(9, timeout=timeout),
            lambda timeout: receiver.pull(min_version=9, timeout=timeout),
            receiver.receive,
            sender.ready.wait,
        ):
            with pytest.raises(aiosync.ConfigError, match="timeout is .*: pass seconds"):
                await call(timeout=timeout)
        assert (sender.version, receiver.version) == (1, 1)  # nothing was sent
        for good in (None, 30, np.float32(30), np.int64(30), float("inf")):
            await sender.send(timeout=good)
        assert receiver.version == 6
    scheme = make()
    scheme.init_on_sender(model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="timeout is"):
        await scheme.connect(timeout=timeout)
    await scheme.connect(timeout=0.01)  # nothing had begun
    await scheme.aclose()


@pytest.fixture(scope="module")
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants torch.compile to be used
        return torch.jit.script(models.linear())


class _Owner:
    def __init__(self, policy) -> None:
        self.policy = policy


@pytest.mark.asyncio
@both
async def test_a_scripted_model_takes_no_forward_hooks(make, scripted) -> None:
    scheme = make()
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        scheme.init_on_receiver(model=scripted)
    scheme.init_on_receiver(model_id="policy", context=(owner := _Owner(scripted)))
    with pytest.raises(aiosync.ConfigError, match="guard='reading'"):
        await scheme.connect(timeout=0.5)
    await scheme.aclose()
    del owner
    for options in ({"guard": "reading"}, {"apply": "manual"}):
        source = models.linear()
        models.fill(source, 3.0)
        target = copy.deepcopy(scripted)
        async with harness.here(make(**options), target, sender={"model": source}) as (
            sender,
            receiver,
        ):
            assert target(torch.ones(4)).tolist() == [15.0, 15.0]
            models.fill(source, 1.0)
            handle = sender.send_nowait()
            await receiver.receive(timeout=harness.PATIENCE)
            await handle
            assert target(torch.ones(4)).tolist() == [5.0, 5.0]
            receiver.model = copy.deepcopy(scripted)


@pytest.mark.filterwarnings("ignore")  # torch wants torch.compile to be used
@pytest.mark.asyncio
@both
async def test_a_traced_model_is_guarded(make) -> None:
    source = models.linear()
    target = torch.jit.trace(models.linear(), torch.zeros(4))
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        seen = []
        hook = target.register_forward_pre_hook(
            lambda *_: seen.append(receiver._guard_object.reading_here)
        )
        target(torch.zeros(4))
        hook.remove()
        assert seen == [True]
        models.fill(source, 1.0)
        await sender.send()
        assert target(torch.ones(4)).tolist() == [5.0, 5.0]


@pytest.mark.asyncio
async def test_a_timeout_that_is_no_number_without_synchronisation() -> None:
    sender, receiver = (aiosync.NoWeightSyncScheme() for _ in range(2))
    sender.init_on_sender(model=models.linear())
    receiver.init_on_receiver(model=models.linear())
    for scheme in (sender, receiver):
        with pytest.raises(aiosync.ConfigError, match="timeout is"):
            await scheme.connect(timeout="5")
        await scheme.connect()
    for call in (
        sender.send,
        lambda timeout: sender.send_nowait(timeout=timeout),
        receiver.receive,
        lambda timeout: receiver.wait_for_version(0, timeout=timeout),
        lambda timeout: receiver.wait_staged(0, timeout=timeout),
    ):
        with pytest.raises(aiosync.ConfigError, match="timeout is"):
            await call(timeout=float("nan"))
    await sender.aclose()
    await receiver.aclose()


def test_a_model_id_that_is_too_long_for_a_hello() -> None:
    most = "ü" * 512
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:1", dial="both")
    with pytest.raises(aiosync.ConfigError, match="model_id has 1025 bytes; at most 1024"):
        scheme.init_on_receiver(model_id=f"{most}x", model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="model_id has 1025 bytes; at most 1024"):
        scheme.init_on_sender(model_id=f"{most}x", model=models.linear())
    scheme.init_on_sender(model_id=most, model=models.linear())
    assert scheme.model_id == most


@pytest.mark.parametrize("value", [3, b"policy", "\ud800"])
def test_a_model_id_that_cannot_be_told_to_the_other_side(value) -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:1")
    with pytest.raises(aiosync.ConfigError, match="model_id must be a str"):
        scheme.init_on_receiver(model_id=value, model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="model_id must be a str"):
        scheme.init_on_sender(model_id=value, model=models.linear())
    with pytest.raises(aiosync.ConfigError, match="model_id must be a str"):
        scheme.model_id = value
    assert scheme.model_id is None
    assert scheme._listener is None


@pytest.mark.asyncio
@both
async def test_calls_from_a_thread_without_a_loop(make) -> None:
    async with harness.here(make(), models.linear(), sender={"model": models.linear()}) as (
        sender,
        _,
    ):
        with pytest.raises(aiosync.LocalProtocolError, match="belongs to another event loop"):
            await asyncio.to_thread(sender.send_nowait)


@pytest.mark.asyncio
@both
async def test_waiting_without_a_role(make) -> None:
    async with make() as scheme:
        for wait in (lambda: scheme.wait_for_version(1), scheme.wait_staged, scheme.ready.wait):
            with pytest.raises(aiosync.LocalProtocolError, match=NO_ROLE):
                await wait()
        await scheme.aclose()
        for wait in (lambda: scheme.wait_for_version(1), scheme.wait_staged, scheme.ready.wait):
            with pytest.raises(aiosync.TransportClosed):
                await wait()


@pytest.mark.asyncio
async def test_waiting_without_a_role_or_synchronisation() -> None:
    async with aiosync.NoWeightSyncScheme() as scheme:
        with pytest.raises(aiosync.LocalProtocolError, match=NO_ROLE):
            await scheme.ready


@pytest.mark.asyncio
@both
async def test_a_context_that_has_no_such_model(make) -> None:
    owner, missing = models.linear(), "the context, a Linear, has no model 'p'"
    late = f"version 1 is here, but {missing}; it waits until there is one, or until scheme.model"
    scheme = make()
    scheme.init_on_sender(model_id="p", context=owner, num_workers=1)
    receiver = harness.twin(scheme)
    receiver.init_on_receiver(model_id="p", context=owner)
    async with scheme, receiver:
        with pytest.warns(UserWarning, match=missing):
            await asyncio.gather(scheme.connect(), receiver.connect())
        for call in (scheme.send, scheme.send_nowait):
            with pytest.raises(aiosync.ConfigError, match=f"{missing}: pass model= for"):
                await call()
        with pytest.raises(aiosync.PartialSyncError, match="without a model"):
            await scheme.send(_weights(), timeout=0.05)
        for wait in (
            lambda: receiver.wait_for_version(1, timeout=0.01),
            lambda: receiver.pull(timeout=0.01),
        ):
            with pytest.raises(aiosync.RecvTimeout, match=late):
                await wait()
        receiver.model = models.linear()
        assert await receiver.wait_for_version(1) == 1


@pytest.mark.asyncio
@both
async def test_a_context_that_is_gone(make) -> None:
    scheme = make()
    async with scheme:
        scheme.init_on_sender(model_id="p", context=models.linear())
        await scheme.connect()
        with pytest.raises(aiosync.ConfigError, match="the context is gone"):
            await scheme.send()


@pytest.mark.asyncio
@both
async def test_nothing_is_said_of_a_model_that_may_come_late(make) -> None:
    """By ``scheme.model``, or with ``apply="manual"``."""
    for options, init in (({}, {}), ({"apply": "manual"}, {"context": models.linear()})):
        async with harness.here(make(**options), None, sender={}, receiver=init) as (_, receiver):
            assert receiver.version == 0


@pytest.mark.asyncio
@both
async def test_closing_says_nothing_of_handles_that_nobody_awaits(make) -> None:
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    source = models.linear()
    async with harness.here(make(apply="manual"), models.linear(), sender={"model": source}) as (
        sender,
        _,
    ):
        handle = sender.send_nowait()
        kept = sender.send_nowait()
        await asyncio.sleep(0.05)
        del handle
        await sender.aclose()
        with pytest.raises(aiosync.TransportClosed, match="this scheme was closed"):
            await kept
        del kept
        gc.collect()
        await asyncio.sleep(0)
    assert not told


def test_a_large_receiver_is_closed_after_its_loop_has_ended() -> None:
    source, target = nn.Linear(1024, 3072), nn.Linear(1024, 3072)
    sender = aiosync.SharedMemWeightSyncScheme()
    sender.init_on_sender(model=source, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=target)

    async def meet() -> None:
        await asyncio.gather(sender.connect(), receiver.connect())

    asyncio.run(meet())
    receiver.abort()
    sender.abort()
    assert torch.equal(source.weight, target.weight)
    assert not target._forward_pre_hooks


@pytest.mark.parametrize("timeout", [math.nan, True, "soon", 0], ids=str)
@pytest.mark.asyncio
async def test_a_timeout_that_was_assigned_is_checked(timeout) -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.MultiProcessWeightSyncScheme()
    async with harness.here(scheme, target, sender={"model": source}) as (sender, _):
        with pytest.raises(aiosync.ConfigError, match="timeout must be positive"):
            sender.timeout = timeout
        assert sender.timeout == 120.0
        assert (await sender.send()).version == 2


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
def test_a_trainer_without_descriptors_is_told() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    scheme = aiosync.SharedMemWeightSyncScheme()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(aiosync.ConfigError, match="the socket that workers dial"):
            scheme.init_on_sender(model=models.linear())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    scheme.init_on_sender(model=models.linear())
    scheme.abort()


@pytest.mark.parametrize("make", harness.SCHEMES)
@pytest.mark.parametrize("closed", [False, True], ids=["stopped", "closed"])
def test_a_scheme_is_closed_when_its_own_loop_does_not_run(make, closed) -> None:
    source, target = models.linear(), models.linear()
    scheme = make()
    worker = copy.copy(scheme)
    scheme.init_on_sender(model_id="policy", model=source, num_workers=1)
    worker.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    loop = asyncio.SelectorEventLoop()

    async def connect() -> None:
        await asyncio.gather(scheme.connect(), worker.connect())

    loop.run_until_complete(connect())
    if closed:
        loop.close()
    started = time.monotonic()
    for each in (worker, scheme):
        asyncio.run(each.aclose())
        asyncio.run(each.aclose())
    assert time.monotonic() - started < 4.5, "it waited for tasks that nothing runs"
    if not closed:
        loop.run_until_complete(asyncio.sleep(0.01))
        assert not asyncio.all_tasks(loop)
        loop.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("make", harness.SCHEMES)
async def test_a_connect_in_vain_says_that_there_was_no_descriptor(make, monkeypatch) -> None:
    scheme = make()
    worker = copy.copy(scheme)
    scheme.init_on_sender(model_id="policy", model=models.linear(), num_workers=1)
    worker.init_on_receiver(model_id="policy", model=models.linear(), worker_idx=0)

    def no_descriptor() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scheme._listener, "_sock", _Deaf(scheme._listener._sock, no_descriptor))
    async with scheme, worker:
        joining = asyncio.ensure_future(worker.connect(timeout=2))
        with pytest.raises(aiosync.ConnectTimeout, match="Too many open files"):
            await scheme.connect(timeout=0.5)
        await asyncio.wait({joining})
        assert isinstance(joining.exception(), aiosync.ConnectError)


class _Deaf:
    """A listening socket of a process that has no descriptor left."""

    def __init__(self, sock, accept) -> None:
        self._sock, self.accept = sock, accept

    def __getattr__(self, name):
        return getattr(self._sock, name)


@pytest.mark.asyncio
async def test_without_a_descriptor_for_wide_buffers_a_worker_is_let_in(monkeypatch) -> None:
    scheme = aiosync.MultiProcessWeightSyncScheme()

    def no_descriptor(_fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "dup", no_descriptor)
    source = models.linear()
    async with harness.here(scheme, models.linear(), sender={"model": source}) as (sender, _):
        assert (await sender.send()).acked == {0}


@pytest.mark.asyncio
async def test_a_worker_that_cannot_be_let_in_is_hung_up_on(monkeypatch, caplog) -> None:
    scheme = aiosync.MultiProcessWeightSyncScheme()
    worker = copy.copy(scheme)
    scheme.init_on_sender(model_id="policy", model=models.linear())
    worker.init_on_receiver(model_id="policy", model=models.linear(), worker_idx=0)

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with scheme, worker:
        monkeypatch.setattr(scheme, "_transport_over", refuse)
        await scheme.connect()
        with pytest.raises(aiosync.ConnectError) as raised:
            await worker.connect(timeout=harness.PATIENCE)
        assert not isinstance(raised.value, aiosync.ConnectTimeout), "it waited in vain"
    assert "Exception in callback" not in caplog.text

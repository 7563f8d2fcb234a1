"""What ``connect()`` and ``send()`` do for several workers, in one process."""

from __future__ import annotations

import asyncio
import gc
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import aiosync
from aiosync.errors import PartialSyncError
from tests.schemes import _harness as harness
from tests.schemes import _models as models

both = pytest.mark.parametrize("make", harness.SCHEMES)
pytestmark = pytest.mark.asyncio


def _values(targets) -> list[float]:
    found = []
    for target in targets:
        first = next(target.parameters()).flatten()[0].item()
        assert models.filled(target, first)
        found.append(first)
    return found


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}


# -- connecting -------------------------------------------------------------------------------


@both
async def test_workers_without_an_index_get_one_each(make) -> None:
    scheme, targets = make(), [models.linear() for _ in range(4)]
    receiver = {"worker_idx": None}
    async with harness.crowd(
        scheme,
        targets,
        sender={"model": models.wide(), "weights": None} | {"model": models.linear()},
        receiver=receiver,
    ) as (sender, others):
        assert sorted(other.worker_idx for other in others) == [0, 1, 2, 3]
        assert (await sender.send()).acked == {0, 1, 2, 3}


@both
@pytest.mark.parametrize("early", [True, False])
async def test_a_big_model_is_there_when_the_worker_has_connected(make, early) -> None:
    source, target = models.medium(), models.medium()
    models.fill(source, 1.0)
    scheme = make()
    other = harness.twin(scheme)
    async with scheme, other:
        scheme.init_on_sender(model=source, num_workers=1)
        other.init_on_receiver(model=target)
        async with asyncio.TaskGroup() as group:
            if early:
                worker = group.create_task(other.connect())
                await asyncio.sleep(0)
            trainer = group.create_task(scheme.connect())
            if not early:
                worker = group.create_task(other.connect())
            await worker
            assert models.filled(target, 1.0)
            assert other.version == 1
            await trainer


@both
async def test_a_worker_without_weights_of_its_own_connects_all_the_same(make) -> None:
    targets = [models.linear() for _ in range(3)]
    init = {"params_map": {0: _weights(1.0), 2: _weights(3.0)}, "num_workers": None}
    async with harness.crowd(make(), targets, sender=init) as (sender, others):
        assert _values(targets) == [1.0, -1.0, 3.0]
        assert [other.version for other in others] == [1, 0, 1]
        assert (await sender.send()).acked == {0, 2}


@both
async def test_closing_a_sender_ends_its_connect(make) -> None:
    scheme = make()
    scheme.init_on_sender(model=models.linear(), num_workers=1)
    connecting = asyncio.ensure_future(scheme.connect(timeout=30))
    await asyncio.sleep(0.01)
    await scheme.aclose()
    with pytest.raises(aiosync.TransportClosed):
        await asyncio.wait_for(connecting, 10)


@both
async def test_nobody_comes(make) -> None:
    async with make() as scheme:
        scheme.init_on_sender(model=models.linear(), num_workers=2)
        with pytest.raises(aiosync.ConnectTimeout, match=r"workers \[0, 1\] did not connect"):
            await scheme.connect(timeout=0.02)


@both
async def test_a_late_joiner_gets_the_current_weights(make) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    scheme = make()
    late, last = harness.twin(scheme), models.linear()
    init = {"model": source, "num_workers": None}
    async with late, harness.crowd(scheme, targets, sender=init) as (sender, _):
        await harness.until(lambda: len(sender.worker_versions) == 2)
        models.fill(source, 1.0)
        await sender.send()
        models.fill(source, 2.0)  # never sent
        late.init_on_receiver(model=last)
        await late.connect()
        assert late.worker_idx == 2
        assert models.filled(last, 1.0)
        assert late.version == sender.version
        assert (await sender.send()).acked == {0, 1, 2}
        assert models.filled(last, 2.0)


@both
async def test_a_late_joiner_gets_what_was_sent_to_its_index_alone(make) -> None:
    targets = [models.linear() for _ in range(2)]
    scheme = make(per_worker_weights=True)
    async with harness.crowd(scheme, targets, sender={"weights": _weights(1.0)}) as (
        sender,
        others,
    ):
        await sender.send({1: _weights(5.0)})
        await others[1].aclose()
        await harness.until(lambda: len(sender.worker_versions) == 1)
        async with harness.twin(scheme) as again:
            again.init_on_receiver(model=targets[1], worker_idx=1)
            models.fill(targets[1], 0.0)
            await again.connect()
            assert _values(targets) == [1.0, 5.0]


@both
@pytest.mark.parametrize("weights", [{0: 7.0}, 7.0])
async def test_what_was_sent_to_a_worker_while_it_was_away(make, weights) -> None:
    """It finds that when it comes again: to send it failed, but nothing newer was sent."""
    scheme, target = make(per_worker_weights=True), models.linear()
    async with harness.here(scheme, target, sender={"model": models.linear()}) as (sender, worker):
        again = harness.twin(sender)
        await worker.aclose()
        await harness.until(lambda: not sender._sender.peers)
        for _ in range(2):
            sent = {0: _weights(7.0)} if isinstance(weights, dict) else _weights(7.0)
            with pytest.raises(PartialSyncError):
                await sender.send(sent, worker_ids=0)
        target = models.linear()
        again.init_on_receiver(model=target, worker_idx=0)
        async with again:
            await again.connect()
            assert models.filled(target, 7.0)
            assert again.version == sender.version == 3


@both
async def test_a_worker_that_comes_back_replaces_its_old_link(make) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    scheme = make()
    async with harness.crowd(scheme, targets, sender={"model": source}) as (sender, others):
        others[1].abort()
        again = harness.twin(scheme)
        async with again:
            fresh = models.linear()
            again.init_on_receiver(model=fresh, worker_idx=1)
            await again.connect()
            models.fill(source, 4.0)
            assert (await sender.send()).acked == {0, 1}
            assert _values([targets[0], fresh]) == [4.0, 4.0]


# -- sending ----------------------------------------------------------------------------------


@both
async def test_every_form_of_weights(make) -> None:
    source, target = models.batch_norm(), models.batch_norm()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        other = models.batch_norm()
        forms = [
            None,
            other,
            TensorDict.from_module(other),
            TensorDict.from_module(other).data,
            dict(other.state_dict()),
            TensorDict.from_module(other).to_dict(),
            TensorDict.from_module(other).flatten_keys("."),
        ]
        for value, weights in enumerate(forms, 10):
            models.fill(source if weights is None else other, float(value))
            other[1].running_mean.fill_(value)
            if isinstance(weights, dict) and "0" not in weights:
                weights = dict(other.state_dict())
            report = await sender.send(weights)
            assert models.filled(target, float(value))
            if weights is not None:
                assert (target[1].running_mean == value).all()
            assert receiver.version == report.version


@both
@pytest.mark.parametrize("ids", [1, [1], (1,), {1}])
async def test_only_the_named_workers_change(make, ids) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(3)]
    models.fill(source, 1.0)
    async with harness.crowd(make(), targets, sender={"model": source}) as (sender, others):
        models.fill(source, 2.0)
        report = await sender.send(worker_ids=ids)
        assert report.acked == {1}
        assert _values(targets) == [1.0, 2.0, 1.0]
        assert [other.version for other in others] == [1, 2, 1]
        assert sender.worker_versions == {0: 1, 1: 2, 2: 1}
        assert sender.lag == 1
        models.fill(source, 3.0)
        report = await sender.send(worker_ids=[0, 2])
        assert _values(targets) == [3.0, 2.0, 3.0]
        await sender.send()
        assert sender.lag == 0


@both
async def test_per_worker_weights(make) -> None:
    targets = [models.linear() for _ in range(3)]
    scheme = make(per_worker_weights=True)
    async with harness.crowd(scheme, targets, sender={}) as (sender, _):
        report = await sender.send({idx: _weights(float(idx)) for idx in range(3)})
        assert report.acked == {0, 1, 2}
        assert _values(targets) == [0.0, 1.0, 2.0]
        assert (await sender.send({1: _weights(7.0)})).acked == {1}
        assert _values(targets) == [0.0, 7.0, 2.0]
        assert (await sender.send(_weights(8.0))).acked == {0, 1, 2}
        assert _values(targets) == [8.0] * 3


@both
async def test_per_worker_weights_have_to_be_asked_for(make) -> None:
    async with harness.crowd(make(), [models.linear()], sender={}) as (sender, _):
        with pytest.raises(aiosync.ConfigError, match="per_worker_weights=True"):
            await sender.send({0: _weights(1.0)})


@both
async def test_a_device_map_gives_each_worker_its_own(make) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(3)]
    models.fill(source, 1.0)

    def scaled(idx, weights):
        return weights * (idx + 1)

    init = {"model": source, "device_map_fn": scaled}
    async with harness.crowd(make(), targets, sender=init) as (sender, others):
        assert _values(targets) == [1.0, 2.0, 3.0]
        models.fill(source, 2.0)
        assert (await sender.send()).acked == {0, 1, 2}
        assert _values(targets) == [2.0, 4.0, 6.0]
        await others[1].aclose()
        await harness.until(lambda: len(sender.worker_versions) == 2)
        models.fill(source, 3.0)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.send()
        assert set(caught.value.failed) == {1}
        models.fill(source, 4.0)
        report = await sender.send()  # named once, then listed
        assert (report.acked, set(report.lost)) == ({0, 2}, {1})
        assert _values([targets[0], targets[2]]) == [4.0, 12.0]
        async with harness.twin(sender) as again:
            fresh = models.linear()
            again.init_on_receiver(model=fresh, worker_idx=1)
            await again.connect()
            assert _values([fresh]) == [8.0]


@both
async def test_a_device_map_gets_tensors_and_no_model(make) -> None:
    """What is usual there, such as ``.to()``, would change a module in place."""
    source, targets, kinds = models.linear(), [models.linear() for _ in range(2)], set()
    models.fill(source, 1.0)

    def double(idx, weights):
        kinds.add(type(weights))
        return weights.to(torch.float64).apply(lambda x: x + idx).to(torch.float32)

    options = {"model": source, "device_map_fn": double}
    async with harness.crowd(make(), targets, sender=options) as (sender, _):
        models.fill(source, 3.0)
        await sender.send()
        assert _values(targets) == [3.0, 4.0]
    assert kinds == {TensorDict}
    assert next(source.parameters()).dtype is torch.float32
    assert models.filled(source, 3.0)


@both
async def test_another_model_takes_the_place_of_the_first(make) -> None:
    """In the sender, as in the receiver."""
    first, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": first}) as (sender, _):
        second, third = models.linear(), models.linear()
        models.fill(second, 2.0)
        models.fill(third, 3.0)
        sender.model = second
        await sender.send()
        assert models.filled(target, 2.0)
        sender.weights = third.state_dict()
        await sender.send()
        assert models.filled(target, 3.0)
        sender.model = second
        assert float(sender.prepare_weights(None)["weight"].detach()[0, 0]) == 2.0
        await sender.send()
        assert models.filled(target, 2.0)
        with pytest.raises(aiosync.ConfigError, match=r"nn\.Module"):
            sender.model = "a name"
        await sender.send()
        assert models.filled(target, 2.0)


@both
async def test_one_model_is_not_for_workers_with_weights_of_their_own(make) -> None:
    scheme = make(per_worker_weights=True)
    scheme.init_on_sender(params_map={0: _weights(1.0), 1: _weights(2.0)})
    with pytest.raises(aiosync.ConfigError, match="worker_idx: weights"):
        scheme.model = models.linear()
    with pytest.raises(aiosync.ConfigError, match="worker_idx: weights"):
        scheme.weights = _weights(3.0)
    await scheme.aclose()


@both
async def test_indices_of_other_libraries(make) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    scheme = make(per_worker_weights=True)
    options = {"model": source, "num_workers": np.int64(2)}
    workers = {"worker_idx": None}
    async with harness.crowd(scheme, targets, sender=options, receiver=workers) as (sender, _):
        value = 1.0
        one = (np.int64(1), torch.tensor(1), [np.int64(1)], torch.tensor([1]), np.array([1]), {1})
        for ids in one:
            value += 1
            models.fill(source, value)
            assert (await sender.send(worker_ids=ids)).acked == {1}
        assert (await sender.send({np.int64(1): _weights(9.0)})).acked == {1}
        assert _values(targets)[1] == 9.0
        assert (await sender.send(worker_ids=np.array([0, 1]))).acked == {0, 1}
        for ids in ("0", 1.0, [0.0], -1, [None], object()):
            with pytest.raises(aiosync.ConfigError, match=r"worker_ids|not registered"):
                await sender.send(worker_ids=ids)
    other = make()
    for idx in ("0", -1, 1.0):
        with pytest.raises(aiosync.ConfigError, match="worker_idx must be an int"):
            other.init_on_receiver(model=models.linear(), worker_idx=idx)
    other.init_on_receiver(model=models.linear(), worker_idx=np.int64(3))
    assert type(other.worker_idx) is int


@both
async def test_an_empty_list_of_workers(make) -> None:
    """No version is drawn that nobody would ever have."""
    target = models.linear()
    options = {"model": models.linear()}
    async with harness.here(make(require=1), target, sender=options) as (sender, receiver):
        for report in (await sender.send(worker_ids=[]), await sender.send_nowait(worker_ids=())):
            assert (report.version, report.acked, report.failed) == (1, frozenset(), {})
        assert sender.version == receiver.version == 1


@both
async def test_unknown_worker(make) -> None:
    async with harness.crowd(make(), [models.linear()], sender={"model": models.linear()}) as (
        sender,
        _,
    ):
        with pytest.raises(aiosync.ConfigError, match="Worker 3 not registered.*connected: 0"):
            await sender.send(worker_ids=[0, 3])
        assert sender.version == 1  # nothing was sent


@both
async def test_a_lost_worker_is_named_once_and_listed_after_that(make) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    async with harness.crowd(make(), targets, sender={"model": source}) as (sender, others):
        await others[0].aclose()
        models.fill(source, 2.0)
        with pytest.raises(aiosync.PartialSyncError) as caught:
            await sender.send()
        assert set(caught.value.failed) == {0}
        assert isinstance(caught.value.failed[0], aiosync.TransportError)
        assert caught.value.acked == {1}
        assert models.filled(targets[1], 2.0)
        report = await sender.send()
        assert (report.acked, set(report.lost)) == ({1}, {0})


@both
@pytest.mark.parametrize(
    ("require", "enough"), [("all", False), (1, True), (2, False), (0.5, True), (0.51, False)]
)
async def test_require(make, require, enough) -> None:
    source, targets = models.linear(), [models.linear(), models.wide()]
    scheme = make(require=require)
    async with harness.crowd(scheme, targets, sender={}) as (sender, _):
        sending = sender.send(source)
        if enough:
            report = await sending
            assert report.acked == {0}
        else:
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await sending
            assert caught.value.acked == {0}
            assert isinstance(caught.value.failed[1], aiosync.ApplyError)


@both
async def test_the_links_can_be_looked_at(make) -> None:
    source = models.linear()
    targets = [models.linear(), models.linear()]
    scheme = make()
    assert (scheme.sender_transports, scheme.receiver_transport) == ({}, None)
    async with harness.crowd(scheme, targets, sender={"model": source}) as (sender, receivers):
        links = sender.sender_transports
        assert list(links) == [0, 1]
        assert all(isinstance(link, aiosync.Transport) for link in links.values())
        assert sender.receiver_transport is None
        link = receivers[1].receiver_transport
        assert link.capabilities == links[1].capabilities
        assert receivers[1].sender_transports == {}
        await receivers[0].aclose()
        await harness.until(lambda: list(sender.sender_transports) == [1])


@both
async def test_require_may_change_between_two_sends(make) -> None:
    source, targets = models.linear(), [models.linear(), models.wide()]
    async with harness.crowd(make(require=1), targets, sender={}) as (sender, _):
        assert (await sender.send(source)).acked == {0}
        sender.require = 2
        with pytest.raises(aiosync.PartialSyncError):
            await sender.send(source)
        sender.require = 0.5
        assert (await sender.send(source)).acked == {0}
        with pytest.raises(aiosync.ConfigError, match="most"):
            sender.require = "most"
        sender.require = 1
        assert (await sender.send(source)).acked == {0}


@both
async def test_send_nowait_takes_its_snapshot_at_once(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        models.fill(source, 2.0)
        handle = sender.send_nowait()
        models.fill(source, 3.0)
        assert handle.version == 2
        assert "under way" in repr(handle)
        report = await handle
        assert handle.done()
        assert await handle == report  # any number of times
        assert models.filled(target, 2.0)
        assert receiver.version == 2


@both
async def test_sends_at_the_same_time_come_in_order(make) -> None:
    source, target = models.medium(), models.medium()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        sources = [models.medium() for _ in range(4)]
        for value, each in enumerate(sources):
            models.fill(each, float(value))
        reports = await asyncio.gather(*(sender.send(each) for each in sources))
        assert [report.version for report in reports] == [2, 3, 4, 5]
        assert models.filled(target, 3.0)
        assert receiver.version == 5


@both
async def test_wait_for_version_on_the_sender(make) -> None:
    source, targets = models.linear(), [models.linear() for _ in range(2)]
    async with harness.crowd(make(), targets, sender={"model": source}) as (sender, _):
        handle = sender.send_nowait()
        assert await sender.wait_for_version(handle.version) == handle.version
        await handle
        with pytest.raises(aiosync.RecvTimeout, match="version 9"):
            await sender.wait_for_version(9, timeout=0.01)


@both
async def test_nobody_has_what_nobody_is_there_to_have(make) -> None:
    async with make() as scheme:
        scheme.init_on_sender(model=models.linear())
        await scheme.connect()
        with pytest.raises(aiosync.RecvTimeout):
            await scheme.wait_for_version(1, timeout=0.05)
        waiting = asyncio.ensure_future(scheme.wait_for_version(2, timeout=harness.PATIENCE))
        target = models.linear()
        worker = harness.twin(scheme)
        worker.init_on_receiver(model=target)
        async with worker:
            await worker.connect()
        await harness.until(lambda: not scheme._sender.peers)
        assert not waiting.done()
        worker = harness.twin(scheme)
        worker.init_on_receiver(model=target)
        async with worker:
            await worker.connect()
            await scheme.send()
            assert await waiting == 2


@both
async def test_the_layout_may_change_between_sends(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as (sender, receiver):
        for build in (models.wide, models.medium, models.linear, models.batch_norm, models.wide):
            receiver.model = None
            receiver.model = target = build()
            other = build()
            models.fill(other, 2.0)
            assert (await sender.send(other)).acked == {0}
            assert models.filled(target, 2.0)


@both
async def test_the_source_may_be_changed_in_every_way(make) -> None:
    source, target = models.batch_norm(), models.batch_norm()
    async with harness.here(make(strict=False), target, sender={"model": source}) as (sender, _):
        source[0].weight = torch.nn.Parameter(torch.full((3, 4), 2.0))
        await sender.send()
        assert (target[0].weight == 2.0).all()
        source.double()
        models.fill(source, 3.0)
        await sender.send()
        assert models.filled(target, 3.0)
        assert target[0].weight.dtype == torch.float32
        source.half()
        models.fill(source, 4.0)
        await sender.send()
        assert models.filled(target, 4.0)
        source.float()
        source[0].weight.data = torch.full((4, 3), 5.0).t()  # not contiguous
        await sender.send()
        assert (target[0].weight == 5.0).all()


@both
async def test_a_dropped_scheme_says_that_it_was_not_closed(make) -> None:
    source, target = models.linear(), models.linear()
    scheme = make()
    other = harness.twin(scheme)
    scheme.init_on_sender(model=source, num_workers=1)
    other.init_on_receiver(model=target)
    await asyncio.gather(scheme.connect(), other.connect())
    with pytest.warns(ResourceWarning, match="never closed"):
        scheme._abandon()
    with pytest.warns(ResourceWarning, match="never closed"):
        other._abandon()
    del scheme, other
    gc.collect()
    await asyncio.sleep(0.01)


@both
async def test_a_dropped_scheme_is_closed_where_warnings_are_errors(make) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(make(), target, sender={"model": source}) as ends:
        for scheme in ends:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(ResourceWarning, match="never closed"):
                    scheme._abandon()
            assert "closed" in repr(scheme)
            with pytest.raises(aiosync.TransportClosed):
                await scheme.wait_for_version(1)


async def test_prepare_weights() -> None:
    source = models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme(strategy="state_dict")
    scheme.init_on_sender(model=source)
    weights = scheme.prepare_weights(None)
    assert set(weights) == {"weight", "bias"}
    assert weights["weight"].data_ptr() == source.weight.data_ptr()
    await scheme.aclose()


async def test_prepared_weights_are_those_that_are_sent() -> None:
    class Fallback:
        policy = None
        _fallback_policy = models.linear()

    class Owner:
        policy = models.linear()

    models.fill(Fallback._fallback_policy, 3.0)
    models.fill(Owner.policy, 4.0)
    given = models.linear()
    models.fill(given, 9.0)
    for context, options, expected in ((Fallback(), {}, 3.0), (Owner(), {"model": given}, 9.0)):
        target = models.linear()
        sender = {"context": context, "num_workers": 1, **options}
        async with harness.here(aiosync.SharedMemWeightSyncScheme(), target, sender=sender) as pair:
            assert (pair[0].prepare_weights(None)["weight"] == expected).all()
            await pair[0].send()
            assert models.filled(target, expected)
            assert pair[0].prepare_weights(None, context=Owner())["weight"].mean() == 4.0
            assert pair[0].prepare_weights(None, "other") is None
            Fallback._fallback_policy = None
    nothing = aiosync.SharedMemWeightSyncScheme()
    nothing.init_on_sender("policy", context := Fallback())
    assert nothing.prepare_weights(None) is None
    del context
    await nothing.aclose()


async def test_a_trainer_that_only_sends_lets_workers_come() -> None:
    source, target = models.linear(), models.linear()
    scheme = aiosync.SharedMemWeightSyncScheme()
    other = harness.twin(scheme)
    scheme.init_on_sender(model=source)
    other.init_on_receiver(model=target)
    async with scheme, other:
        await scheme.connect()
        joining = asyncio.ensure_future(other.connect())
        async with asyncio.timeout(harness.PATIENCE):
            while not joining.done():
                await scheme.send()
        await joining

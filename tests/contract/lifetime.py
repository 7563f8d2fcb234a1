"""Links and models that come and go, the order of calls, and the end of schemes.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import torch

import aiosync
from aiosync import VersionSpan
from tests.contract.bench import (
    PATIENCE,
    Bench,
    Crew,
    background,
    large,
    needs,
    raises,
    refuses,
    small,
    until,
    value_of,
    wide,
)
from tests.schemes._harness import read_elsewhere
from tests.support.waiting import mapped_nbytes


class Owner:
    """Context that has a model."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy


@needs("relay")
async def check_cut_link(bench: Bench) -> None:
    """A worker whose link is cut dials again with its index, and gets the update that it missed."""
    assert bench.hooks.relay is not None
    async with bench.sender(small(1.0)) as crew:
        target = small()
        async with bench.hooks.relay(crew.sender) as (scheme, cut, _), scheme:
            scheme.init_on_receiver(model_id="policy", model=target, worker_idx=0)
            await asyncio.gather(crew.sender.connect(), scheme.connect())
            await scheme.wait_for_version(1)
            for number in range(2, 6):
                cut()
                try:
                    await crew.send(float(number))
                except aiosync.PartialSyncError as exc:
                    assert set(exc.failed) == {0}
                await scheme.wait_for_version(number, timeout=PATIENCE)
                assert value_of(scheme, target) == number
            assert scheme.link_lost is None
            await until(lambda: 0 in crew.sender.worker_versions)
            assert (await crew.send(9.0)).acked == {0}


@needs("relay")
async def check_other_trainer(bench: Bench) -> None:
    """A worker takes version 1 of a restarted trainer, whatever version of the run before it has.

    In its spans the reads of the run before count as version 0, so their age is unknown.
    """
    assert bench.hooks.relay is not None
    async with bench.sender(small(1.0)) as one, bench.sender(small(5.0)) as two:
        target = small()
        async with bench.hooks.relay(one.sender) as (scheme, _, lead_to), scheme:
            scheme.init_on_receiver(model_id="policy", model=target)
            await asyncio.gather(one.sender.connect(), two.sender.connect(), scheme.connect())
            for number in (2.0, 3.0):
                await one.send(number)
            first = (await scheme.receive()).epoch
            assert scheme.version == 3
            scheme.span()
            assert target() == target() == (3.0, 3.0)
            lead_to(two.sender)
            await one.sender.aclose()
            update = await scheme.receive(timeout=PATIENCE)
            assert update.epoch == two.sender.epoch != first
            assert (update.version, target()) == (1, (5.0, 5.0))
            span = scheme.span()
            assert span == VersionSpan(0, 1, f"{update.epoch:016x}", ((0, 2), (1, 1)))
            assert two.sender.staleness(span) is None
            assert (await two.send(6.0)).acked == {0}


async def check_worker_before_trainer(bench: Bench) -> None:
    """A worker that connects before the trainer listens waits for the trainer."""
    sender = bench.make(**bench.hooks.address())
    worker = bench.twin(sender)
    worker.init_on_receiver(model_id="policy", model=small())
    async with sender, worker, background(worker.connect(timeout=PATIENCE)) as [joining]:
        await asyncio.wait([joining], timeout=0.1)
        sender.init_on_sender(model_id="policy", model=small(1.0), num_workers=1)
        await sender.connect(timeout=PATIENCE)
        await joining
        assert worker.version == 1


async def check_worker_comes_again(bench: Bench) -> None:
    """A worker that left may join again with its index, any number of times."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        for number in range(2, 6):
            await crew.workers.pop().leave()
            again = await crew.join(small(), 1)
            assert await again.value() == number - 1
            report = await crew.send(float(number))
            assert (report.acked, report.lost) == ({0, 1}, {})
            assert await crew.values() == [number, number]


async def check_leaving_is_not_dying(bench: Bench) -> None:
    """A worker that was closed is reported once as left, and is no error."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        first, second = crew.workers
        await first.leave()
        report = await crew.send(2.0)
        assert (report.acked, report.left, report.failed, report.lost) == ({1}, {0}, {}, {})
        report = await crew.send(3.0)
        assert (report.acked, report.left, report.lost) == ({1}, frozenset(), {})
        # A send to named workers reports each time which of them have left.
        report = await crew.send(4.0, worker_ids=0)
        assert (report.acked, report.left, report.failed) == (frozenset(), {0}, {})
        crew.sender.require = 2
        error = await raises(aiosync.PartialSyncError, crew.send(4.0))
        assert (error.acked, error.failed) == ({1}, {})
        crew.sender.require = "all"
        again = await crew.join(small(), 0)
        assert await again.value() == 4.0
        for worker in (again, second):
            await worker.leave()
        report = await crew.send(5.0)
        assert (report.acked, report.left, report.failed) == (frozenset(), {0, 1}, {})
        report = await crew.send(6.0)
        assert (report.acked, report.left, report.lost) == (frozenset(), frozenset(), {})
        assert await crew.sender.wait_for_version(report.version) == report.version
        late = await crew.join(small())
        assert await late.value() == 6.0
        other = await crew.join(small())
        assert (await crew.send(7.0)).acked == {0, 1}
        await late.die()
        await raises(aiosync.PartialSyncError, crew.send(8.0))
        await other.leave()
        report = await crew.send(9.0)
        assert (report.acked, report.left, set(report.lost)) == (frozenset(), {1}, {0})
        assert not (await crew.send(10.0)).acked


async def check_last_worker_died(bench: Bench) -> None:
    """While no worker is left, each send raises if the last one died, although others had left."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        first, second = crew.workers
        await first.leave()
        assert (await crew.send(2.0)).acked == {1}
        await second.die()
        for value in (3.0, 4.0, 5.0):
            error = await raises(aiosync.PartialSyncError, crew.send(value))
            assert set(error.failed) == {1}
        again = await crew.join(small(), 0)
        assert (await crew.send(6.0)).acked == {0}
        await again.leave()
        assert not (await crew.send(7.0)).acked


async def check_rolling_restart(bench: Bench) -> None:
    """Workers that leave and join again during steady sends cause no error on either side."""
    for make in (small, large):
        async with bench.crew(make(1.0), [make() for _ in range(4)]) as crew:
            left, over = set[int](), asyncio.Event()

            async def keep_sending(
                crew: Crew = crew, left: set[int] = left, over: asyncio.Event = over
            ) -> None:
                number = 1.0
                while not over.is_set():
                    number += 1.0
                    left |= (await crew.send(number)).left

            async with background(keep_sending()) as [sending]:
                for idx in (0, 1, 2, 3, 0, 1):
                    await asyncio.sleep(0.02)
                    await crew.workers[idx].leave()
                    await asyncio.sleep(0.02 * (idx % 2))
                    again = await crew.join(make(), idx)
                    crew.workers[idx] = crew.workers.pop()
                    assert await again.value() >= 1.0
                over.set()
                await sending
            assert left <= {0, 1, 2, 3}
            assert (await crew.send(-2.0)).acked == {0, 1, 2, 3}
            assert await crew.values() == [-2.0] * 4


async def check_restarted_trainer(bench: Bench) -> None:
    """A new trainer has a new epoch; its version 1 replaces any version of the trainer before."""
    target = small()
    epochs = set()
    for value in (1.0, 5.0):
        async with bench.crew(small(value), [target]) as crew:
            assert (await crew.workers[0].version(), await crew.values()) == (1, [value])
            for number in (2.0, 3.0):
                epochs.add((await crew.send(value + number)).epoch)
                assert await crew.values() == [value + number]
    assert len(epochs) == 2


async def check_replaced_model(bench: Bench) -> None:
    """A model given to a receiver has the weights at once; one that does not fit is refused."""
    for apply_copy in (False, True):
        async with bench.crew(small(1.0), [small()], apply_copy=apply_copy) as crew:
            [worker] = crew.workers
            old, worker.model = worker.model, small()
            worker.scheme.model = worker.model
            assert worker.scheme.model is worker.model
            assert (await worker.value(), await worker.version()) == (1.0, 1)
            await crew.send(2.0)
            assert await worker.value() == 2.0
            assert old() == (1.0, 1.0)

            def give_other_shapes(scheme: Any = worker.scheme) -> None:
                scheme.model = wide()

            error = refuses(aiosync.ApplyError, give_other_shapes)
            assert "layers.1" in str(error)
            assert worker.scheme.model is worker.model
            assert (await crew.send(3.0)).acked == {0}
            assert await worker.value() == 3.0


async def check_replaced_while_read(bench: Bench) -> None:
    """A model may be replaced while it is read; the new model gets updates that came meanwhile."""
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        for value in (2.0, 3.0):
            old = worker.model
            with read_elsewhere(worker.scheme):
                handle = crew.send_nowait(value)
                await worker.scheme.wait_staged(handle.version)
                worker.model = worker.scheme.model = small() if value == 2.0 else None
            if worker.model is None:
                await until(lambda: worker.scheme.version == 0)
                worker.model = worker.scheme.model = small()
            assert await worker.value() == value
            assert (await handle).acked == {0}
            assert old() == (value - 1, value - 1)


async def check_late_model(bench: Bench) -> None:
    """A receiver may get its model after connect(); the model then has the newest version."""
    async with bench.sender(small(1.0), {"num_workers": 1}) as crew:
        worker = crew.hire(None)
        # connect() is refused, because a trainer would wait for the missing model.
        error = await raises(aiosync.ConfigError, worker.connect())
        assert "initial=False" in str(error)
        worker = crew.hire(None)
        await asyncio.gather(crew.sender.connect(), worker.scheme.connect(initial=False))
        assert await worker.version() == 0
        crew.sender.timeout = 0.3
        error = await raises(aiosync.PartialSyncError, crew.send(2.0))
        assert isinstance(error.failed[0], aiosync.AckTimeout)
        worker.model = worker.scheme.model = small()
        await worker.wait(2)
        assert await worker.value() == 2.0
        assert (await crew.send(3.0, timeout=PATIENCE)).acked == {0}
        assert await worker.value() == 3.0


async def check_context(bench: Bench) -> None:
    """Both sides take the model from a context for each update, and keep no context alive."""
    source, target = Owner(small(1.0)), Owner(small())
    async with bench.crew(
        None, [None], init={"context": source, "model": None}, worker={"context": target}
    ) as crew:
        scheme = crew.workers[0].scheme
        assert value_of(scheme, target.policy) == 1.0
        source.policy, target.policy = small(2.0), small()
        assert (await crew.sender.send()).acked == {0}
        assert value_of(scheme, target.policy) == 2.0
        assert (await crew.sender.send("policy")).version == 3
    async with bench.make() as scheme:
        owner = Owner(small())
        scheme.init_on_sender(model_id="policy", context=owner)
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None
    refuses(aiosync.ConfigError, lambda: bench.make().init_on_sender(context={"policy": small()}))


async def check_plain_weights(bench: Bench) -> None:
    """A receiver keeps a dict of tensors up to date, or hands each version to a function."""
    kept = {name: value.clone() for name, value in small().state_dict().items()}
    got: list[Any] = []

    def load(weights: Any) -> None:
        # The tensor may be kept, because later updates do not write to it.
        got.append(dict(weights)["layers.3"])

    init = {"num_workers": 2}
    async with bench.sender(small(1.0), init, guard="reading") as crew:
        crew.hire(None, 0, weights=kept)
        crew.hire(None, 1, load=load)
        await asyncio.gather(
            crew.sender.connect(), *(worker.scheme.connect() for worker in crew.workers)
        )
        for number in range(2, 9):
            await crew.send(float(number))
            with crew.workers[0].scheme.reading():
                assert {each.mean().item() for each in kept.values()} == {number}
        assert [each.unique().tolist() for each in got] == [[number] for number in range(1, 9)]
        got.clear()


async def check_pickling(bench: Bench) -> None:
    """A pickle or copy has the options, whenever set, and no role, link, model or version."""
    async with bench.crew(small(1.0), [small()], timeout=7.0, apply_copy=True) as crew:
        for scheme in (crew.sender, crew.workers[0].scheme):
            scheme.strict = False
            for other in (bench.twin(scheme), copy.copy(scheme)):
                assert (other.timeout, other.apply_copy, other.strict) == (7.0, True, False)
                assert not (other.initialized_on_sender or other.initialized_on_receiver)
                assert (other.version, other.model) == (0, None)
                await raises(aiosync.LocalProtocolError, other.connect())
                await other.aclose()
        second = bench.twin(bench.twin(crew.sender))
        crew.workers.append(SimpleNamespace(leave=second.aclose))
        assert (await crew.send(2.0)).acked == {0}


async def check_wrong_order(bench: Bench) -> None:
    """Calls of the wrong role or in the wrong order raise LocalProtocolError and harm nothing."""
    wrong = aiosync.LocalProtocolError
    async with bench.make() as scheme:
        for call in (scheme.connect, scheme.send, scheme.receive):
            assert "init_on" in str(await raises(wrong, call()))
        scheme.init_on_sender(model=small())
        for call in (scheme.send, scheme.receive):
            assert "connect" in str(await raises(wrong, call())) or call == scheme.receive
        refuses(wrong, scheme.send_nowait)
        refuses(wrong, lambda: scheme.init_on_receiver(model=small()))
        refuses(wrong, lambda: scheme.init_on_sender(model=small()))
    async with bench.crew(small(1.0), [small()]) as crew:
        worker = crew.workers[0].scheme
        for end in (crew.sender, worker):
            await raises(wrong, end.connect())
        await raises(wrong, worker.send())
        await raises(wrong, crew.sender.receive())
        refuses(wrong, crew.sender.apply_pending)
        # The threads run these calls on another loop.
        for call in (crew.sender.send, crew.sender.aclose, worker.aclose):
            await raises(wrong, asyncio.to_thread(asyncio.run, call()))
        await raises(wrong, asyncio.to_thread(crew.sender.send_nowait))
        assert (await crew.send(2.0)).acked == {0}


async def check_wrong_arguments(bench: Bench) -> None:
    """An argument that makes no sense raises ConfigError, and harms nothing."""
    wrong = aiosync.ConfigError
    both = {"model": small(), "weights": {}}
    refuses(wrong, lambda: bench.make().init_on_receiver(**both))
    # No guard protects plain weights by default.
    refuses(wrong, lambda: bench.make().init_on_receiver(weights={}))
    async with bench.crew(small(1.0), [small()]) as crew:
        await raises(wrong, crew.sender.send(timeout=math.nan))
        # Weights by worker need per_worker_weights.
        await raises(wrong, crew.sender.send({0: small()}))
        await raises(wrong, crew.sender.send({"layers.0": object}))
        assert (await crew.send(2.0)).acked == {0}


async def check_close_in_each_state(bench: Bench) -> None:
    """aclose() closes a scheme in any state, at once, and may be called any number of times."""
    fresh = bench.make()
    sender = bench.make()
    sender.init_on_sender(model=small())
    receiver = bench.twin(sender)
    receiver.init_on_receiver(model=small())
    for scheme in (fresh, receiver, sender):
        for _ in range(2):
            await asyncio.wait_for(scheme.aclose(), PATIENCE)
        await raises(aiosync.TransportClosed, scheme.connect())
    for ends in ((0, 1), (1, 0)):
        async with bench.crew(small(1.0), [small()]) as crew:
            both = (crew.sender, crew.workers[0].scheme)
            for idx in (*ends, *ends):
                await asyncio.wait_for(both[idx].aclose(), PATIENCE)
            await raises(aiosync.TransportClosed, crew.sender.send())
            await raises(aiosync.TransportClosed, both[1].receive())
            refuses(aiosync.TransportClosed, both[1].apply_pending)
            assert crew.workers[0].model() == (1.0, 1.0)
    async with bench.crew(small(1.0), [small()]) as crew:
        crew.sender.abort()
        crew.sender.abort()
        await raises(aiosync.TransportClosed, crew.sender.send())
        await crew.sender.aclose()


async def check_close_wakes(bench: Bench) -> None:
    """Closing a scheme makes each of its waiting calls raise TransportClosed."""
    async with bench.sender(small(1.0), {"num_workers": 2}) as crew:
        worker = crew.hire(small(), 0)
        async with background(crew.sender.connect(), worker.connect()) as joining:
            await until(joining[1].done)
            waits = (worker.scheme.receive(), worker.scheme.wait_for_version(5))
            async with background(*waits) as waiting:
                await worker.leave()
                for task in waiting:
                    await raises(aiosync.TransportClosed, asyncio.wait_for(task, PATIENCE))
            await crew.sender.aclose()
            await raises(aiosync.TransportClosed, asyncio.wait_for(joining[0], PATIENCE))
    early = bench.twin(bench.make(**bench.hooks.address()))
    early.init_on_receiver(model=small())
    # No trainer listens, so connect() waits.
    async with background(early.connect()) as [joining]:
        await asyncio.wait([joining], timeout=0.05)
        await early.aclose()
        await asyncio.wait({joining}, timeout=PATIENCE)
        assert isinstance(joining.exception(), aiosync.TransportClosed)
    async with bench.crew(small(1.0), [small()], apply="manual") as crew:
        handle = crew.send_nowait(2.0)
        async with background(crew.send(3.0), crew.sender.wait_for_version(9)) as waiting:
            await crew.sender.aclose()
            for task in (handle, *waiting):
                await raises(aiosync.TransportClosed, asyncio.wait_for(task, PATIENCE))


async def check_cancelled_tasks(bench: Bench) -> None:
    """Once every task of the loop was cancelled, waiting and later calls raise."""
    before = asyncio.all_tasks()
    async with bench.crew(small(1.0), [small()]) as crew:
        worker = crew.workers[0].scheme
        async with background(worker.receive()) as [waiting]:
            for task in asyncio.all_tasks() - before - {waiting}:
                task.cancel()
            await raises(aiosync.TransportClosed, asyncio.wait_for(waiting, PATIENCE))
        for call in (worker.receive, crew.sender.send):
            await raises(aiosync.TransportClosed, call(timeout=PATIENCE))
        await raises(aiosync.TransportClosed, crew.sender.wait_for_version(9, timeout=PATIENCE))
        # No worker may join now, because it would wait for updates in vain.
        late = crew.hire(small(), 0)
        await raises(aiosync.AiosyncError, late.scheme.connect(timeout=0.2))


async def check_memory_stays(bench: Bench) -> None:
    """Memory holds only a few of the versions that were sent, even if one worker is slow."""
    async with bench.sender(large(1.0), {"num_workers": 2}) as crew:
        slow, quick = crew.hire(large(), 0, apply="manual"), crew.hire(large(), 1)
        await asyncio.gather(crew.sender.connect(), slow.connect(), quick.connect())
        sizes, handles = [], []
        for number in range(2, 22):
            handles.append(crew.send_nowait(float(number)))
            await quick.wait(number)
            sizes.append(mapped_nbytes())
        model_nbytes = sum(each.nbytes for each in crew.source.layers)
        # A single send may find no free slot, and a thread may start. A leak stays, and grows. An
        # update that finds no slot on the device goes through the host, where the trainer and each
        # worker keep a buffer for the next one.
        spare = 5 if getattr(crew.sender, "memory", "host") == "device" else 2
        assert min(sizes[-5:]) <= sizes[5] + spare * model_nbytes
        await slow.wait(21)
        assert ((await handles[-1]).acked, await crew.values()) == ({0, 1}, [21.0, 21.0])


async def check_nothing_is_left(bench: Bench) -> None:
    """Nothing keeps models, senders and workers that came and went, nor their memory."""
    gone = []
    async with bench.crew(small(1.0), [small()], init={"num_workers": None}) as crew:
        for number in range(2, 8):
            late = await crew.join(small())
            await crew.send(float(number))
            crew.workers.remove(late)
            await late.leave()
            gone += [weakref.ref(late.model), weakref.ref(late.scheme)]
            del late
        gone += [weakref.ref(crew.sender), weakref.ref(crew.source)]
    del crew

    def is_all_gone() -> bool:
        gc.collect()
        return [ref() for ref in gone] == [None] * len(gone)

    # The thread that applied the last update may keep it in a frame for a moment.
    await until(is_all_gone)


class Below(Owner):
    """Context that passes weights on to a model or workers below it, by a call of its subclass."""

    def __init__(self, policy: Any, below: Any) -> None:
        super().__init__(policy)
        self.below, self.fails = below, False

    def get_model(self, model_id: str) -> Any:
        """Return the model; see :meth:`aiosync.WeightSyncScheme.init_on_receiver`."""
        return {"policy": self.policy}[model_id]


class Blocking(Below):
    """Context whose call blocks; it runs on a thread and not on the worker's loop."""

    def update_policy_weights_(self, *, policy_or_weights: Any, model_id: str) -> None:
        """Put the weights into the model below."""
        if self.fails:
            raise ValueError(f"no {model_id}")
        self.below.load_state_dict(policy_or_weights.flatten_keys(".").to_dict())


class Loading(Blocking):
    """Context whose call is a coroutine that does not wait."""

    async def update_policy_weights_(self, **options: Any) -> None:  # type: ignore[override]
        """Put the weights into the model below."""
        super().update_policy_weights_(**options)


class Awaiting(Below):
    """Context whose call is a coroutine."""

    async def update_policy_weights_(self, *, policy_or_weights: Any, model_id: str) -> None:
        """Send the weights to the workers below."""
        assert model_id == "policy"
        await self.below.sender.send(policy_or_weights)


class Decorated(Awaiting):
    """Context whose call is a coroutine function below a decorator."""

    update_policy_weights_ = torch.no_grad()(Awaiting.update_policy_weights_)


async def check_context_passes_on(bench: Bench) -> None:
    """A worker calls its context's ``update_policy_weights_()`` before it tells the trainer."""
    async with bench.sender(small(1.0), {"num_workers": 1}) as crew:
        context = Blocking(small(), small())
        worker = crew.hire(None, context=context)
        worker.model = context.policy
        await asyncio.gather(crew.sender.connect(), worker.connect())
        for number in (2.0, 3.0):
            assert (await crew.send(number)).acked == {0}
            assert value_of(worker.scheme, context.below) == number
        context.fails = True
        error = await raises(aiosync.PartialSyncError, crew.send(4.0))
        assert "ValueError: no policy" in str(error.failed[0])


async def check_context_that_loads_its_own_model(bench: Bench) -> None:
    """A context that puts the weights into the worker's own model once more keeps their version."""
    for kind in (Blocking, Loading):
        async with bench.sender(small(1.0), {"num_workers": 1}) as crew:
            policy = small()
            context = kind(policy, policy)
            worker = crew.hire(None, context=context)
            worker.model = policy
            await asyncio.gather(crew.sender.connect(), worker.connect())
            report = await crew.send(2.0)
            with worker.scheme.reading() as read:
                assert (policy(), read.version) == ((2.0, 2.0), report.version)


async def check_context_sends_on(bench: Bench) -> None:
    """``update_policy_weights_()`` of a context may await a scheme of its own on the same loop."""
    for kind in (Awaiting, Decorated):
        async with bench.crew(small(1.0), [small()]) as below, bench.sender(small(1.0)) as crew:
            context = kind(small(), below)
            worker = crew.hire(None, context=context)
            worker.model = context.policy
            await asyncio.gather(crew.sender.connect(), worker.connect())
            await crew.send(2.0)
            assert (await below.values(), await crew.values()) == ([2.0], [2.0])


CHECKS = (
    check_context_passes_on,
    check_context_that_loads_its_own_model,
    check_context_sends_on,
    check_cut_link,
    check_other_trainer,
    check_worker_before_trainer,
    check_worker_comes_again,
    check_leaving_is_not_dying,
    check_last_worker_died,
    check_rolling_restart,
    check_restarted_trainer,
    check_replaced_model,
    check_replaced_while_read,
    check_late_model,
    check_context,
    check_plain_weights,
    check_pickling,
    check_wrong_order,
    check_wrong_arguments,
    check_close_in_each_state,
    check_close_wakes,
    check_cancelled_tasks,
    check_memory_stays,
    check_nothing_is_left,
)

"""The engine for NeMo-RL, driven through NeMo-RL's life cycle of a refit."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import multiprocessing
import pickle
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync
from aiosync.integrations.nemo_rl import Engine
from aiosync.testing import FaultProxy
from aiosync.testing.proxy import Faults, Plan
from tests._certificates import certificates
from tests.integrations._refits import (
    BUCKET,
    Tensors,
    as_bytes,
    make_weights,
    refits,
    run_worker,
    take,
    through_one_buffer,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.one_loop]


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect the engines, which nobody closes, before the leak check."""
    yield
    gc.collect()


async def test_it_has_the_interface() -> None:
    engine = Engine(bucket_size=BUCKET, address="tcp://127.0.0.1:0")
    assert engine.cleanup_after_load is False and engine.shard_expert_weights is False
    assert inspect.iscoroutinefunction(engine.send_weights)
    assert inspect.isasyncgenfunction(engine.receive_weight_batches)
    metadata = engine.prepare()
    # NeMo-RL adds the rank to it, and sorts by that.
    assert isinstance(metadata, dict) and "rank" not in metadata
    assert metadata == engine.prepare()
    token = metadata["source"].token.value
    assert len(token) == 32
    assert token not in pickle.dumps(metadata) and repr(token) not in repr(metadata)


async def test_it_takes_the_setting_that_nemo_rl_adds_to_its_options() -> None:
    engine = Engine(bucket_size=BUCKET, address="tcp://127.0.0.1:0", release_after_refit=False)
    # Workers with Megatron ask for the part of the weights that their rollout ranks have.
    assert engine.get_target_weight_layout() is None
    engine.shard_expert_weights = True
    with pytest.raises(NotImplementedError, match="whole tensors"):
        engine.get_target_weight_layout()


async def test_links_outlive_a_release_after_each_refit() -> None:
    async with refits(release_after_refit=True, ready=False) as workers:
        source = workers.policies[0].prepare()["source"]
        async with FaultProxy(source.url) as proxy:
            for step in range(5):
                await workers.get_ready(proxy.url)
                weights = make_weights(step)
                for taken in await workers.refit(weights):
                    assert as_bytes(taken) == as_bytes(weights)
                for engine in (*workers.policies, *workers.rollouts):
                    engine.finalize()
            assert proxy.connections == 2


async def test_metadata_that_came_as_mappings() -> None:
    weights = make_weights(1)
    async with refits(1, 1, ready=False) as workers:
        policy, rollout = workers.policies[0], workers.rollouts[0]
        metadata = [policy.prepare(), rollout.prepare()]
        sizes = {"train_world_size": 1, "rollout_world_size": 1}
        policy.init_policy_process_group(worker_rank=0, metadata=metadata, **sizes)
        # As vLLM's asynchronous engine hands them to its workers.
        mappings = [{**each, "source": dataclasses.asdict(each["source"])} for each in metadata]
        connect = rollout.init_rollout_process_group
        await asyncio.to_thread(connect, rollout_rank=0, metadata=mappings, **sizes)
        assert as_bytes((await workers.refit(weights))[0]) == as_bytes(weights)


@pytest.mark.parametrize(("policies", "rollouts"), [(1, 2), (2, 3), (3, 1)])
async def test_what_arrives_is_what_was_sent(policies: int, rollouts: int) -> None:
    async with refits(policies, rollouts) as workers:
        for step in range(20):
            weights = make_weights(step)
            for taken in await workers.refit(weights):
                assert as_bytes(taken) == as_bytes(weights)
            for engine in (*workers.policies, *workers.rollouts):
                engine.finalize()


async def test_each_call_may_have_a_loop_of_its_own() -> None:
    async with refits(1, 1) as workers:
        for step in range(3):
            weights = make_weights(step)
            send = workers.policies[0].send_weights(iter(weights.items()))
            sending = asyncio.to_thread(asyncio.run, send)
            taking = asyncio.to_thread(asyncio.run, take(workers.rollouts[0]))
            _, taken = await asyncio.gather(sending, taking)
            assert as_bytes(taken) == as_bytes(weights)


async def test_links_live_on() -> None:
    async with refits(ready=False) as workers:
        source = workers.policies[0].prepare()["source"]
        async with FaultProxy(source.url) as proxy:
            for step in range(5):
                await workers.get_ready(proxy.url)
                await workers.refit(make_weights(step))
            assert proxy.connections == 2


async def test_a_rollout_rank_keeps_nothing_of_a_refit_before() -> None:
    def count_senders() -> int:
        gc.collect()
        return sum(type(each).__name__ == "BucketSender" for each in gc.get_objects())

    async with refits(1, 1, ready=False) as workers:
        workers.rollouts[0].prepare()
        # A rollout rank can send until it is told its role.
        assert count_senders() == 1
        for step in range(3):
            await workers.get_ready()
            assert count_senders() == 1
            assert len(await workers.refit(make_weights(step))) == 1


async def test_memory_that_the_source_uses_again_is_copied_first() -> None:
    weights = make_weights(1)
    async with refits(1, 1) as workers:
        send = workers.policies[0].send_weights(through_one_buffer(weights))
        _, taken = await asyncio.gather(send, take(workers.rollouts[0]))
        assert as_bytes(taken) == as_bytes(weights)


async def test_tensors_are_the_consumers() -> None:
    first, second = make_weights(1), make_weights(2)
    kept: Tensors = {}

    async def keep(engine: Engine) -> None:
        async for batch in engine.receive_weight_batches():
            kept.update(batch)
            batch[0][1].add_(1) if batch[0][1].dtype == torch.float32 else None

    async with refits(1, 1) as workers:
        await asyncio.gather(
            workers.policies[0].send_weights(iter(first.items())), keep(workers.rollouts[0])
        )
        before = as_bytes(kept)
        for _ in range(3):
            assert as_bytes((await workers.refit(second))[0]) == as_bytes(second)
        assert as_bytes(kept) == before


async def test_conjugate_and_negative_views() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    views = {"conjugate": values.conj(), "negative": values.conj().imag}
    assert views["conjugate"].is_conj() and views["negative"].is_neg()
    async with refits(1, 1) as workers:
        taken = (await workers.refit(views))[0]
        assert torch.equal(taken["conjugate"], torch.tensor([1 - 2j, 3 + 4j]))
        assert torch.equal(taken["negative"], torch.tensor([-2.0, 4.0]))


async def test_weights_may_come_asynchronously() -> None:
    weights = make_weights(1)

    async def gather() -> Any:
        for item in weights.items():
            await asyncio.sleep(0)
            yield item

    async with refits(1, 1) as workers:
        send = workers.policies[0].send_weights(gather())
        _, taken = await asyncio.gather(send, take(workers.rollouts[0]))
        assert as_bytes(taken) == as_bytes(weights)


async def test_a_model_without_weights() -> None:
    async with refits(1, 1) as workers:
        assert await workers.refit({}) == [{}]
        assert list((await workers.refit({"a": torch.empty(0)}))[0]) == ["a"]


# -- failures -------------------------------------------------------------------------------------


async def _stop_early(engine: Engine) -> None:
    async for _ in engine.receive_weight_batches():
        raise OverflowError("this model is full")


async def test_a_consumer_that_fails_concerns_no_other() -> None:
    weights = make_weights(1)
    async with refits() as workers:
        send = workers.policies[0].send_weights(iter(weights.items()))
        good, bad = workers.rollouts
        sent, taken, failed = await workers.outcomes(send, take(good), _stop_early(bad))
        assert isinstance(failed, OverflowError)
        assert as_bytes(taken) == as_bytes(weights)
        assert isinstance(sent, aiosync.PartialSyncError)
        assert sent.acked == {0} and isinstance(sent.failed[1], aiosync.ApplyError)
        assert "rollout rank 1 (" in str(sent) and "process" in str(sent)
        for taken in await workers.refit(make_weights(2)):
            assert as_bytes(taken) == as_bytes(make_weights(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: OverflowError("no more memory"),
        # A trainer may sync with others while it gathers.
        lambda: aiosync.PartialSyncError(acked=(), failed={0: aiosync.PeerClosed()}, version=1),
    ],
    ids=["its own", "of another sync"],
)
async def test_a_source_that_fails_is_reported_to_all(make: Callable[[], Exception]) -> None:
    # Made here, because an error keeps the engines alive whose calls it ended.
    error = make()

    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_weights(1).items()
        raise error

    async with refits() as workers:
        send = workers.policies[0].send_weights(fail())
        sent, *failed = await workers.outcomes(send, *map(take, workers.rollouts))
        assert sent is error
        for each in failed:
            assert isinstance(each, aiosync.PeerClosed)
            assert "policy rank (" in str(each)
            assert f"{type(error).__name__}: {error}" in str(each)
        for taken in await workers.refit(make_weights(2)):
            assert as_bytes(taken) == as_bytes(make_weights(2))


async def test_a_refit_that_follows_a_failed_one_at_once() -> None:
    """A slow rank has yet to take a frame of the failed refit when the next one begins."""
    size, weights, go = 2**24, make_weights(2), asyncio.Event()

    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(4):
            yield f"w{index}", torch.zeros(size // 4)
        raise OverflowError("no more memory")

    async def take_slowly(engine: Engine) -> None:
        async for _ in engine.receive_weight_batches():
            await go.wait()

    async with refits(1, 2, bucket_size=size) as workers:
        slow, quick = workers.rollouts
        taking = asyncio.ensure_future(workers.outcomes(take_slowly(slow), take(quick)))
        with pytest.raises(OverflowError):
            await workers.policies[0].send_weights(fail())
        sending = asyncio.ensure_future(workers.policies[0].send_weights(iter(weights.items())))
        # The next refit waits for its members meanwhile.
        await asyncio.sleep(0.3)
        go.set()
        failed = await taking
        for taken in await asyncio.gather(*map(take, workers.rollouts)):
            assert as_bytes(taken) == as_bytes(weights)
        await sending
        for each in failed:
            assert isinstance(each, aiosync.PeerClosed) and "no more memory" in str(each)


async def test_refits_that_fail_before_a_rank_is_ready() -> None:
    """The rank hears of each failed one once, also if two of them fail in a row."""

    def fail(why: str) -> Iterator[tuple[str, torch.Tensor]]:
        raise OverflowError(why)
        yield  # makes this a generator

    async with refits(1, 1, timeout=2.0) as workers:
        policy, rollout = workers.policies[0], workers.rollouts[0]
        for why in ("no more memory", "no more disk"):
            with pytest.raises(OverflowError):
                await policy.send_weights(fail(why))
            with pytest.raises(aiosync.PeerClosed, match=why):
                await take(rollout)
        assert len(await workers.refit(make_weights(2))) == 1


async def test_what_cannot_travel_is_refused_and_the_rest_is_gathered() -> None:
    gathered = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "sparse", "b", "c"):
            gathered.append(name)
            yield name, torch.eye(3).to_sparse() if name == "sparse" else torch.eye(3)

    async with refits(1, 1) as workers:
        send = workers.policies[0].send_weights(gather())
        sent, failed = await workers.outcomes(send, take(workers.rollouts[0]))
        assert isinstance(sent, aiosync.ConfigError) and "sparse cannot travel" in str(sent)
        assert isinstance(failed, aiosync.PeerClosed) and "sparse" in str(failed)
        assert gathered == ["a", "sparse", "b", "c"]


async def test_every_weight_is_gathered_though_nobody_takes_it() -> None:
    gathered = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in make_weights(1).items():
            gathered.append(name)
            yield name, tensor

    async with refits(1, 1) as workers:
        send = workers.policies[0].send_weights(gather())
        sent, _ = await workers.outcomes(send, _stop_early(workers.rollouts[0]))
        assert isinstance(sent, aiosync.PartialSyncError)
        assert gathered == list(make_weights(1))


@pytest.mark.parametrize("after", [2_000, 20_000])
async def test_a_link_that_is_cut(after: int) -> None:
    weights = make_weights(1)
    async with refits(1, 1, ready=False) as workers:
        source = workers.policies[0].prepare()["source"]
        async with FaultProxy(source.url) as proxy:
            proxy.plan = Plan(back=Faults(reset_at=after))
            await workers.get_ready(proxy.url)
            send = workers.policies[0].send_weights(iter(weights.items()))
            sent, failed = await workers.outcomes(send, take(workers.rollouts[0]))
            assert isinstance(sent, aiosync.PartialSyncError) and "rollout rank 0" in str(sent)
            assert isinstance(failed, aiosync.TransportError) and "policy rank" in str(failed)
            proxy.plan = Plan()
            assert as_bytes((await workers.refit(weights))[0]) == as_bytes(weights)


async def test_a_byte_that_changed() -> None:
    async with refits(1, 1, ready=False) as workers:
        source = workers.policies[0].prepare()["source"]
        async with FaultProxy(source.url) as proxy:
            proxy.plan = Plan(back=Faults(corrupt_at=15_000))
            await workers.get_ready(proxy.url)
            send = workers.policies[0].send_weights(iter(make_weights(1).items()))
            sent, failed = await workers.outcomes(send, take(workers.rollouts[0]))
            assert isinstance(sent, aiosync.PartialSyncError)
            assert isinstance(failed, aiosync.RemoteProtocolError)


async def test_a_receiver_that_stops_reading() -> None:
    async def stop_reading(engine: Engine) -> None:
        async for _ in engine.receive_weight_batches():
            await asyncio.sleep(60)

    large = {f"w{index}": torch.zeros(2**20) for index in range(32)}
    async with refits(1, 2, timeout=1.0, bucket_size=2**22) as workers:
        send = workers.policies[0].send_weights(iter(large.items()))
        sleeping = asyncio.ensure_future(stop_reading(workers.rollouts[1]))
        sent, taken = await workers.outcomes(send, take(workers.rollouts[0]))
        assert list(taken) == list(large)
        assert isinstance(sent, aiosync.PartialSyncError) and "rollout rank 1" in str(sent)
        sleeping.cancel()
        await asyncio.wait([sleeping])
        assert len((await workers.refit(large))[1]) == len(large)


async def test_members_that_do_not_come_are_named() -> None:
    async with refits(timeout=2.0) as workers:
        weights = make_weights(1)
        send = workers.policies[0].send_weights(iter(weights.items()))
        sent, taken = await workers.outcomes(send, take(workers.rollouts[0]))
        assert as_bytes(taken) == as_bytes(weights)
        assert isinstance(sent, aiosync.PartialSyncError)
        assert "rollout rank 1" in str(sent) and "did not ask for weights within" in str(sent)
        # Later it comes, and nobody sends.
        with pytest.raises(aiosync.RecvTimeout, match=r"policy rank"):
            await take(workers.rollouts[1])
        # The call has closed its link, and the sender need not have noticed yet.
        assert len(await workers.refit(weights)) == 2


async def test_a_rank_that_answers_late_that_it_is_in() -> None:
    """Its answer to the refit that has gone on without it is none to the next refit."""
    weights = make_weights(1)
    async with refits(1, 1, timeout=2.0, ready=False) as workers:
        policy, rollout = workers.policies[0], workers.rollouts[0]
        async with FaultProxy(policy.prepare()["source"].url) as proxy:
            await workers.get_ready(proxy.url)
            taking = asyncio.ensure_future(take(rollout))
            # The policy rank knows by then that the rank is ready.
            await asyncio.sleep(0.3)
            proxy.stall()
            with pytest.raises(aiosync.PartialSyncError, match="did not answer within 2 s"):
                await policy.send_weights(iter(weights.items()))
            sending = asyncio.ensure_future(policy.send_weights(iter(weights.items())))
            await asyncio.sleep(0.3)
            proxy.resume()
            [first] = await workers.outcomes(taking)
            # It dials anew at once, or only with its next call if it has begun to read.
            taken = await take(rollout) if isinstance(first, aiosync.TransportError) else first
            await sending
            assert as_bytes(taken) == as_bytes(weights)


async def test_a_cancelled_refit() -> None:
    async with refits(1, 1) as workers:

        async def slowly() -> Any:
            for item in make_weights(1).items():
                await asyncio.sleep(0.01)
                yield item

        sending = asyncio.ensure_future(workers.policies[0].send_weights(slowly()))
        taking = asyncio.ensure_future(take(workers.rollouts[0]))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(aiosync.TransportError):
            await taking
        assert len(await workers.refit(make_weights(2))) == 1


async def test_a_refit_that_is_cancelled_when_everything_was_sent() -> None:
    """A rank that is still busy with the weights takes part in the next refit."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def take_slowly(engine: Engine) -> None:
        async for _ in engine.receive_weight_batches():
            begun.set()
            await go.wait()

    weights = {"w": torch.eye(3)}
    async with refits(1, 1) as workers:
        sending = asyncio.ensure_future(workers.policies[0].send_weights(iter(weights.items())))
        taking = asyncio.ensure_future(take_slowly(workers.rollouts[0]))
        await begun.wait()
        # By then only the answer of the rank is awaited.
        await asyncio.sleep(0.3)
        sending.cancel()
        await asyncio.wait([sending])
        # The rank notices the end of its link.
        await asyncio.sleep(0.3)
        go.set()
        await taking
        taking = asyncio.ensure_future(take(workers.rollouts[0]))
        # The rank is ready before the next refit begins.
        await asyncio.sleep(0.3)
        await workers.policies[0].send_weights(iter(weights.items()))
        assert as_bytes(await taking) == as_bytes(weights)


async def test_a_refit_that_is_cancelled_when_one_rank_has_taken_it() -> None:
    """The rank hears nothing of it, also if it is ready for the next refit already."""
    go, weights = asyncio.Event(), {"w": torch.eye(3)}

    async def take_slowly(engine: Engine) -> None:
        async for _ in engine.receive_weight_batches():
            await go.wait()

    async with refits(1, 3) as workers:
        quick, eager, slow = workers.rollouts
        sending = asyncio.ensure_future(workers.policies[0].send_weights(iter(weights.items())))
        lagging = asyncio.ensure_future(take_slowly(slow))
        await asyncio.gather(take(quick), take(eager))
        early = asyncio.ensure_future(take(eager))
        await asyncio.sleep(0.3)
        sending.cancel()
        await asyncio.wait([sending])
        await asyncio.sleep(0.3)
        go.set()
        await asyncio.wait([lagging])
        takes = [take(quick), early, take(slow)]
        _, *taken = await asyncio.gather(
            workers.policies[0].send_weights(iter(weights.items())), *takes
        )
        assert [as_bytes(each) for each in taken] == [as_bytes(weights)] * 3


async def test_a_refit_that_is_cancelled_while_an_answer_is_on_its_way() -> None:
    weights = make_weights(1)
    async with refits(1, 1, ready=False) as workers:
        source = workers.policies[0].prepare()["source"]
        async with FaultProxy(source.url) as proxy:
            proxy.plan = Plan(forward=Faults(delay=0.2))
            await workers.get_ready(proxy.url)
            sending = asyncio.ensure_future(workers.policies[0].send_weights(iter(weights.items())))
            await take(workers.rollouts[0])
            sending.cancel()
            await asyncio.wait([sending])
            # The refusal arrives between two refits.
            await asyncio.sleep(0.3)
            assert as_bytes((await workers.refit(weights))[0]) == as_bytes(weights)


async def test_a_rank_is_ready_again_while_its_answer_to_a_cancelled_refit_is_on_its_way() -> None:
    weights = make_weights(1)
    async with refits(1, 1, ready=False) as workers:
        source = workers.policies[0].prepare()["source"]
        async with FaultProxy(source.url) as proxy:
            proxy.plan = Plan(forward=Faults(delay=0.5))
            await workers.get_ready(proxy.url)
            sending = asyncio.ensure_future(workers.policies[0].send_weights(iter(weights.items())))
            await take(workers.rollouts[0])
            early = asyncio.ensure_future(take(workers.rollouts[0]))
            sending.cancel()
            await asyncio.wait([sending])
            await workers.policies[0].send_weights(iter(weights.items()))
            assert as_bytes(await early) == as_bytes(weights)


async def test_different_sizes_of_buckets() -> None:
    async with refits(1, 1, theirs=[{"bucket_size": 512}]) as workers:
        send = workers.policies[0].send_weights(iter(make_weights(1).items()))
        sent, failed = await workers.outcomes(send, take(workers.rollouts[0]))
        assert isinstance(sent, aiosync.PartialSyncError)
        assert isinstance(failed, aiosync.RemoteProtocolError)
        assert "give both sides the same bucket size" in str(failed)


async def test_members_come_and_go() -> None:
    weights = make_weights(1)
    async with refits(1, 2) as workers:
        await workers.refit(weights)
        first = workers.rollouts.pop(0)
        await workers.get_ready()
        assert len(await workers.refit(weights)) == 1
        with pytest.raises(aiosync.AiosyncError):
            await take(first)
        options = {"bucket_size": BUCKET, "address": "tcp://127.0.0.1:0", "timeout": 20.0}
        workers.rollouts += [Engine(**options), Engine(**options)]
        await workers.get_ready()
        for taken in await workers.refit(make_weights(2)):
            assert as_bytes(taken) == as_bytes(make_weights(2))


# -- processes that are killed ---------------------------------------------------------------------


class _Process:
    """A rollout rank or a policy rank in a process of its own, which stops in mid-refit.

    Its start may take most of a minute on a busy machine, as it imports torch.
    """

    def __init__(self, role: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_worker, args=(role, theirs))
        self.process.start()
        theirs.close()

    async def call(self, *message: Any) -> Any:
        self.pipe.send(message)
        return await asyncio.to_thread(self.pipe.recv)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


@pytest.mark.timeout(180)
async def test_a_rollout_rank_that_is_killed() -> None:
    worker = _Process("rollout")
    async with refits(1, 1, ready=False) as workers:
        engines = [workers.policies[0], workers.rollouts[0]]
        metadata = [each.prepare() for each in engines] + [await worker.call("prepare")]
        sizes = {"train_world_size": 1, "rollout_world_size": 2, "metadata": metadata}
        engines[0].init_policy_process_group(worker_rank=0, **sizes)
        await asyncio.to_thread(engines[1].init_rollout_process_group, rollout_rank=0, **sizes)
        await worker.call("init", {"rollout_rank": 1, **sizes})
        weights = {f"w{index}": torch.full((2**20,), float(index)) for index in range(16)}
        sending = asyncio.ensure_future(engines[0].send_weights(iter(weights.items())))
        taking = asyncio.ensure_future(take(engines[1]))
        assert await worker.call("stop in the middle") == "in the middle"
        worker.kill()
        with pytest.raises(
            aiosync.PartialSyncError, match=r"rollout rank 1 \(.*closed the link"
        ) as one:
            await sending
        assert one.value.acked == {0}
        assert as_bytes(await taking) == as_bytes(weights)
        await workers.get_ready()
        assert len(await workers.refit(make_weights(1))) == 1


@pytest.mark.timeout(180)
async def test_a_policy_rank_that_is_killed() -> None:
    worker = _Process("policy")
    async with refits(1, 1, ready=False) as workers:
        engine = workers.rollouts[0]
        metadata = [await worker.call("prepare"), engine.prepare()]
        sizes = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
        await worker.call("init", {"worker_rank": 0, **sizes})
        await asyncio.to_thread(engine.init_rollout_process_group, rollout_rank=0, **sizes)
        taking = asyncio.ensure_future(take(engine))
        assert await worker.call("stop in the middle") == "in the middle"
        worker.kill()
        with pytest.raises(aiosync.TransportError, match=r"policy rank \("):
            await taking
        # Another trainer takes its place.
        await workers.get_ready()
        assert as_bytes((await workers.refit(make_weights(1)))[0]) == as_bytes(make_weights(1))


# -- credentials and options ----------------------------------------------------------------------


async def test_a_token_in_a_file_does_not_travel(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(secrets.token_hex())
    async with refits(1, 1, token_file=str(file)) as workers:
        assert workers.policies[0].prepare()["source"].token is None
        assert len(await workers.refit(make_weights(1))) == 1


async def test_a_wrong_token_is_refused() -> None:
    theirs = [{"token": "another token of 16 bytes"}]
    async with refits(
        1, 1, token="a token of at least 16 bytes", theirs=theirs, ready=False
    ) as one:
        with pytest.raises(aiosync.AuthError):
            await one.get_ready()


async def test_tls() -> None:
    made = certificates().both
    files = {
        name: str(getattr(made, name)) for name in ("cert", "key", "ca") if getattr(made, name)
    }
    async with refits(1, 2, tls={**files, "hostname": "localhost"}) as workers:
        for taken in await workers.refit(make_weights(1)):
            assert as_bytes(taken) == as_bytes(make_weights(1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"bucket_size": 0}, "bucket_size"),
        ({"token": ""}, "token"),
        ({"address": "http://a"}, "address"),
    ],
)
async def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    options = {"bucket_size": BUCKET, "address": "tcp://127.0.0.1:0"} | options
    with pytest.raises(aiosync.ConfigError, match=text):
        Engine(**options).prepare()


async def test_the_order_of_calls() -> None:
    engine = Engine(bucket_size=BUCKET)
    with pytest.raises(aiosync.LocalProtocolError, match="prepare"):
        engine.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=0, metadata=[]
        )
    with pytest.raises(aiosync.LocalProtocolError, match="connect"):
        await take(engine)

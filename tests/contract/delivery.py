"""Delivery of updates: their values, their workers and their versions.

This module imports neither pytest nor a private name.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from functools import partial
from typing import Any

import torch
from torch import nn

import aiosync
from tests.contract.bench import (
    PATIENCE,
    Bench,
    background,
    fill,
    large,
    raises,
    refuses,
    small,
    value_of,
)


async def check_send_applies(bench: Bench) -> None:
    """connect() and send() return once the workers have the version, which grows by one."""
    async with bench.crew(small(1.0), [small()]) as crew:
        assert (crew.sender.version, await crew.values()) == (1, [1.0])
        assert await crew.workers[0].version() == 1
        epochs = set()
        for number in range(2, 12):
            report = await crew.send(float(number))
            assert await crew.values() == [float(number)]
            assert (report.version, report.acked) == (number, {0})
            assert not (report.skipped or report.failed or report.lost or report.waiting)
            assert (report.nbytes >= 400, report.elapsed > 0) == (True, True)
            assert await crew.workers[0].version() == crew.sender.version == number
            epochs.add(report.epoch)
        assert len(epochs) == 1


async def check_several_workers(bench: Bench) -> None:
    """Every worker gets every version, of small and of large models."""
    for build in (small, large):
        async with bench.crew(build(1.0), [build() for _ in range(3)]) as crew:
            for number in (2.0, 3.0, 4.0):
                assert (await crew.send(number)).acked == {0, 1, 2}
                assert await crew.values() == [number] * 3


async def check_looks_without_a_read(bench: Bench) -> None:
    """A worker whose forward nobody calls has what was sent, also if another one computes."""
    async with bench.crew(small(1.0), [small(), small()]) as crew:
        reader, looker = crew.workers
        for number in range(2, 22):
            await reader.compute()
            assert (await crew.send(float(number))).acked == {0, 1}
            assert await looker.look() == number
        for number in range(22, 27):
            await looker.compute()
            assert (await crew.send(float(number))).acked == {0, 1}
        # It no longer computes, which the trainer learns after some versions, each taken late.
        for number in range(27, 47):
            await crew.send(float(number))
            async with asyncio.timeout(PATIENCE):
                while await looker.look() != number:
                    await asyncio.sleep(0.001)
        for number in range(47, 67):
            assert (await crew.send(float(number))).acked == {0, 1}
            assert await looker.look() == number
        assert await crew.values() == [66.0, 66.0]


async def check_late_joiner_gets_what_was_sent(bench: Bench) -> None:
    """A worker that joins late gets the newest weights as they were sent, and later updates."""
    for build in (small, large):
        async with bench.crew(build(1.0), [build()], init={"num_workers": None}) as crew:
            await crew.send(2.0)
            fill(crew.source, 9.0)
            late = await crew.join(build())
            assert (await late.version(), await late.value()) == (2, 2.0)
            assert (await crew.send(2.5)).acked == {0, 1}
            assert await crew.values() == [2.5, 2.5]
            for worker in crew.workers:
                await worker.leave()
            # No worker is connected.
            await crew.send(3.0)
            fill(crew.source, 9.0)
            assert await (await crew.join(build())).value() == 3.0


async def check_no_first_weights(bench: Bench) -> None:
    """Without initial weights workers connect at version 0; the sender is ready after a send()."""
    target = small()
    async with bench.crew(None, [target]) as crew:
        assert (crew.sender.version, await crew.values()) == (0, [-1.0])
        for weights, text in ((None, "nothing to send"), ("w", "init_on_sender(context=...)")):
            error = await raises(aiosync.ConfigError, crew.sender.send(weights))
            assert text in str(error)
        assert crew.sender.epoch == 0
        assert not crew.sender.ready
        async with background(crew.sender.ready.wait()) as waiting:
            report = await crew.sender.send(small(2.0))
            await asyncio.wait_for(*waiting, PATIENCE)
        assert (report.version, await crew.values()) == (1, [2.0])
        assert crew.sender.epoch == report.epoch


async def check_forms_of_weights(bench: Bench) -> None:
    """send() takes a module, a state dict or a TensorDict instead of the registered model."""
    async with bench.crew(small(1.0), [small()]) as crew:
        flat = small(3.0).state_dict()
        forms: list[Any] = [small(2.0), flat, aiosync.WeightStrategy().extract_weights(small(4.0))]
        for number, weights in enumerate(forms, 2):
            assert (await crew.sender.send(weights)).acked == {0}
            assert await crew.values() == [float(number)]


async def check_changed_source(bench: Bench) -> None:
    """The sender's parameters may get other memory, or be replaced, between two sends."""
    for build in (small, large):
        async with bench.crew(build(1.0), [build()]) as crew:
            for number in range(2, 10):
                if number % 3 == 0:
                    layer = crew.source.layers[number // 3]
                    layer.data = layer.data.clone()
                if number % 5 == 0:
                    crew.source.layers[0] = nn.Parameter(torch.zeros_like(crew.source.layers[0]))
                await crew.send(float(number))
                assert await crew.values() == [number]


async def check_worker_ids(bench: Bench) -> None:
    """send(worker_ids=) updates only these workers, and refuses one that never connected."""
    async with bench.crew(small(1.0), [small() for _ in range(3)]) as crew:
        report = await crew.send(2.0, worker_ids=[0, 2])
        assert (report.acked, await crew.values()) == ({0, 2}, [2.0, 1.0, 2.0])
        assert (await crew.send(3.0, worker_ids=1)).acked == {1}
        error = await raises(aiosync.ConfigError, crew.sender.send(worker_ids=[0, 7]))
        assert "7" in str(error)
        error = await raises(aiosync.ConfigError, crew.sender.send(worker_ids=[]))
        assert "nobody" in str(error)
        # Masks are no indices.
        for mask in (True, torch.tensor(True), torch.tensor([True, False, True])):
            await raises(aiosync.ConfigError, crew.sender.send(worker_ids=mask))
        # A refused send() takes no version, because no worker would ever have it.
        assert crew.sender.version == 3
        assert await crew.values() == [2.0, 3.0, 2.0]
        assert (await crew.send(4.0)).acked == {0, 1, 2}
        assert await crew.values() == [4.0] * 3


async def check_per_worker_weights(bench: Bench) -> None:
    """With per_worker_weights each worker gets its own weights, also when it joins again."""
    async with bench.crew(small(1.0), [small(), small()], per_worker_weights=True) as crew:
        report = await crew.sender.send({0: small(5.0), 1: small(6.0)})
        assert (report.acked, await crew.values()) == ({0, 1}, [5.0, 6.0])
        assert (await crew.sender.send({1: small(7.0)})).acked == {1}
        assert await crew.values() == [5.0, 7.0]
        await crew.workers.pop(0).leave()
        again = await crew.join(small(), 0)
        assert await again.value() == 5.0
        assert (await crew.send(8.0, timeout=PATIENCE)).acked >= {1}


async def check_parts(bench: Bench) -> None:
    """With strict=False a send may hold some of the names; the other names keep their values."""
    async with bench.crew(small(1.0), [small()], strict=False) as crew:
        [worker] = crew.workers
        await crew.sender.send({"layers.0": torch.full((5, 4), 2.0)})
        with worker.scheme.reading():
            assert worker.model() == (2.0, 1.0)
        # The read delays both updates, and neither may replace the other.
        async with worker.scheme.reading():
            first = crew.sender.send_nowait({"layers.0": torch.full((5, 4), 3.0)})
            second = crew.sender.send_nowait({"layers.4": torch.full((5, 4), 4.0)})
        assert (await first).acked == (await second).acked == {0}
        with worker.scheme.reading():
            assert worker.model() == (3.0, 4.0)
        assert await worker.version() == second.version


async def check_parts_for_a_late_joiner(bench: Bench) -> None:
    """With strict=False a worker that joins late gets the newest weights of every name."""
    init = {"num_workers": None}
    async with bench.crew(small(1.0), [small()], init=init, strict=False) as crew:
        await crew.sender.send({"layers.0": torch.full((5, 4), 2.0)})
        await crew.sender.send({"layers.4": torch.full((5, 4), 3.0)})
        late = await crew.join(small())
        with late.scheme.reading():
            assert late.model() == (2.0, 3.0)
            assert [each.mean().item() for each in late.model.layers] == [2.0, 1.0, 1.0, 1.0, 3.0]


class Rich(nn.Module):
    """Model with tied parameters, buffers of both kinds, several dtypes, and extra state."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("coarse", torch.full((7,), value, dtype=torch.bfloat16))
        self.register_buffer("passing", torch.full((2,), value), persistent=False)
        self.extra = value
        fill(self, value)

    def get_extra_state(self) -> float:
        return self.extra

    def set_extra_state(self, state: float) -> None:
        self.extra = state


async def check_everything_travels(bench: Bench) -> None:
    """Parameters, tied parameters, buffers, dtypes and extra state arrive with either strategy."""
    for strategy in ("tensordict", "state_dict"):
        async with bench.crew(Rich(2.0), [Rich(0.0)], strategy=strategy) as crew:
            for value in (2.0, 3.0):
                if value > 2.0:
                    await crew.sender.send(Rich(value))
                [worker] = crew.workers
                with worker.scheme.reading():
                    got = worker.model
                    assert (got.first.weight == value).all()
                    assert got.tied.weight is got.first.weight
                    assert (got.count.item(), got.count.dtype) == (value, torch.int64)
                    assert (got.coarse == value).all()
                    assert got.coarse.dtype == torch.bfloat16
                    persists = strategy == "state_dict"
                    assert (got.passing == (0.0 if persists else value)).all()
                    assert got.extra == value


async def check_nothing_is_aliased(bench: Bench) -> None:
    """Writes of the trainer or of a worker to its own tensors change no other model."""
    for build in (small, large):
        async with bench.crew(build(1.0), [build(), build()]) as crew:
            one, two = crew.workers
            await crew.send(2.0)
            fill(crew.source, 8.0)
            assert await crew.values() == [2.0, 2.0]
            old, one.model = one.model, build()
            # The replaced model keeps its values in memory of its own.
            one.scheme.model = one.model
            fill(old, 9.0)
            assert await crew.values() == [2.0, 2.0]
            assert crew.source.layers[0].unique().tolist() == [8.0]
            await crew.send(7.0)
            assert old.layers[0].unique().tolist() == [9.0]
            assert await crew.values() == [7.0, 7.0]
            fill(one.model, 6.0)
            assert await two.value() == 7.0
            assert crew.source.layers[0].unique().tolist() == [7.0]
            # The model of a worker that left keeps its values, too.
            await two.leave()
            for number in range(8, 12):
                await crew.send(float(number), worker_ids=0)
            assert two.model() == (7.0, 7.0)


async def check_kept_values(bench: Bench) -> None:
    """Tensors of a version that a worker keeps, in whatever way, never change."""
    async with bench.crew(small(1.0), [small()]) as crew:
        model, kept = crew.workers[0].model, []
        for value in range(2, 32):
            await crew.send(float(value))
            assert await crew.values() == [value]
            if value in (3, 4, 11):
                twin, state = small(), model.state_dict()
                twin.load_state_dict(state, assign=True)
                copies = [*copy.deepcopy(model).parameters(), *twin.parameters()]
                kept.append((value, [*copies, *state.values(), model.layers[0].data[1:]]))
        for value, tensors in kept:
            assert all((tensor == value).all() for tensor in tensors)
    # Nor do they after another model came instead of a dropped one.
    async with bench.crew(small(1.0), [small()]) as crew:
        [worker] = crew.workers
        assert await crew.values() == [1.0]
        state = worker.model.state_dict()
        worker.scheme.model = None
        worker.model = worker.scheme.model = small()
        for value in range(2, 8):
            handle = crew.send_nowait(float(value))
            # Over shared memory this takes the update, before the loop runs again.
            worker.model()
            assert (await handle).acked == {0}
            assert await crew.values() == [value]
        assert all((tensor == 1.0).all() for tensor in state.values())


class Running(nn.Module):
    """Model with buffers: an update copies these, while parameters take the update's memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), value))
        self.register_buffer("mean", torch.full((3, 2), value))
        self.register_buffer("passing", torch.full((2,), value), persistent=False)

    def forward(self) -> torch.Tensor:
        return self.mean[1:].t()


async def check_kept_buffers(bench: Bench) -> None:
    """Kept views of a buffer keep their values, and its object stays; apply_copy writes to it."""
    for strategy in ("tensordict", "state_dict"):
        async with bench.crew(Running(1.0), [Running(0.0)], strategy=strategy) as crew:
            model, kept = crew.workers[0].model, list[tuple[int, torch.Tensor]]()
            buffer = model.mean
            for value in range(2, 12):
                await crew.sender.send(Running(float(value)))
                with crew.workers[0].scheme.reading():
                    assert (model.mean == value).all() and model.mean is buffer
                    kept += [(value, each) for each in (*model.state_dict().values(), model())]
            assert all((tensor == value).all() for value, tensor in kept)
    async with bench.crew(Running(1.0), [Running(0.0)], apply_copy=True) as crew:
        model = crew.workers[0].model
        state, address = model.state_dict(), model.mean.data_ptr()
        await crew.sender.send(Running(2.0))
        with crew.workers[0].scheme.reading():
            assert (state["mean"] == 2).all() and model.mean.data_ptr() == address


class Scale(nn.Module):
    """Model whose parameter itself is saved by autograd; of a linear layer's it saves a view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Recurrent(nn.Module):
    """Model whose forward replaces its hidden state, which belongs to this process alone."""

    def __init__(self, value: float, rows: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))
        self.register_buffer("hidden", torch.zeros(rows, 2), persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.hidden[: len(x)] + x
        return self.scale + 0


async def check_state_of_a_worker(bench: Bench) -> None:
    """Updates skip hidden states with buffers="persistent", and always those of another size."""
    for apply_copy in (False, True):
        options = {"buffers": "persistent", "apply_copy": apply_copy}
        async with bench.crew(Recurrent(1.0, 4), [Recurrent(0.0, 4)], **options) as crew:
            model = crew.workers[0].model
            for value in range(2, 6):
                assert (model(torch.ones(4, 2)) == value - 1).all()
                assert (await crew.sender.send(Recurrent(float(value), 4))).acked == {0}
                assert (model(torch.ones(4, 2)) == value).all()
                assert (model.hidden == 2 * (value - 1)).all()
        other = {"apply_copy": apply_copy}
        async with bench.crew(Recurrent(1.0, 4), [Recurrent(0.0, 2)], **other) as crew:
            assert (await crew.sender.send(Recurrent(2.0, 3))).acked == {0}
            assert (crew.workers[0].model(torch.ones(2, 2)) == 2).all()


async def check_state_behind_a_transform(bench: Bench) -> None:
    """A worker with a transform may lack a buffer that is not persistent, too."""
    source = small(1.0)
    source.register_buffer("hidden", torch.zeros(2), persistent=False)
    init = {"transform": lambda weights: weights}
    async with bench.crew(source, [small()], worker=init) as crew:
        await crew.send(2.0)
        assert await crew.workers[0].value() == 2.0


async def check_graph_of_a_version(bench: Bench) -> None:
    """Autograd refuses to differentiate a graph of an old version with weights of a new one."""
    for build, frozen in itertools.product((partial(nn.Linear, 4, 2), Scale), (False, True)):
        target = build().requires_grad_(not frozen)
        async with bench.crew(build(), [target]) as crew:
            await crew.send(2.0)
            x = torch.ones(4, requires_grad=True)
            loss = target(x).sum()
            await crew.send(5.0)
            assert await crew.values() == [5.0]
            error = refuses(RuntimeError, loss.backward)
            assert "modified by an inplace operation" in str(error)
            async with crew.workers[0].scheme.reading():
                loss = target(x).sum()
                handle = crew.send_nowait(7.0)
                await crew.workers[0].scheme.wait_staged(3)
                loss.backward()
            await handle
            assert (x.grad == (5.0 if build is Scale else 10.0)).all()


async def check_sends_at_once(bench: Bench) -> None:
    """Sends that begin at the same time arrive in their order."""
    async with bench.crew(large(1.0), [large()]) as crew:
        sends = (crew.sender.send(large(value)) for value in (2.0, 3.0, 4.0))
        assert [report.version for report in await asyncio.gather(*sends)] == [2, 3, 4]
        assert await crew.values() == [4.0]


async def check_no_time_to_wait_for_the_lag(bench: Bench) -> None:
    """With a timeout of 0 a send that need not wait for the lag has all its time."""
    async with bench.crew(small(1.0), [small()]) as crew:
        for value in (2.0, 3.0, 4.0):
            fill(crew.source, value)
            report = await crew.sender.send(max_lag=2, timeout=0)
            assert report.acked == {0}
            assert await crew.values() == [value]


async def check_wire_dtype(bench: Bench) -> None:
    """wire_dtype= rounds only what travels; the sender's weights and all dtypes stay."""
    targets = [small(), small().bfloat16()]
    async with bench.crew(small(1.0), targets, wire_dtype=torch.bfloat16, strict=False) as crew:
        report = await crew.send(1.00390625 + 2**-12)
        assert await crew.values() == [1.0078125] * 2
        # At their own dtype the weights would have 400 bytes.
        assert 200 <= report.nbytes < 400
        dtypes = [worker.model.layers[0].dtype for worker in crew.workers]
        assert dtypes == [torch.float32, torch.bfloat16]
        assert crew.source.layers[0][0, 0].item() == 1.00390625 + 2**-12


class Statistics(nn.Module):
    """Model with a count that no smaller dtype can hold."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), value))
        self.register_buffer("count", torch.tensor(123456789 * value, dtype=torch.float64))


async def check_wire_dtype_of_statistics(bench: Bench) -> None:
    """wire_dtype= leaves float64 buffers alone; a strict worker casts them to its dtypes."""
    for strategy, apply_copy in (("tensordict", False), ("state_dict", True)):
        targets: list[Any] = [Statistics(0.0) for _ in range(2)]
        targets[0].scale.data = targets[0].scale.bfloat16()
        targets[1].bfloat16()
        options = {"strategy": strategy, "apply_copy": apply_copy, "wire_dtype": torch.bfloat16}
        async with bench.crew(Statistics(1.0), targets, **options) as crew:
            for value in (2.0, 3.0):
                await crew.sender.send(Statistics(value))
                for worker in crew.workers:
                    with worker.scheme.reading():
                        dtype, exact = worker.model.count.dtype, 123456789 * value
                        assert worker.model.count == torch.tensor(exact, dtype=dtype)
                        assert (worker.model.scale == value).all()
        assert [target.count.dtype for target in targets] == [torch.float64, torch.bfloat16]


async def check_two_models(bench: Bench) -> None:
    """Two schemes in one process have workers and versions of their own."""
    async with (
        bench.crew(small(1.0), [small()]) as one,
        bench.crew(
            small(2.0), [small()], init={"model_id": "critic"}, worker={"model_id": "critic"}
        ) as two,
    ):
        await asyncio.gather(one.send(3.0), two.send(4.0))
        await two.send(5.0)
        assert (await one.values(), await two.values()) == ([3.0], [5.0])
        assert (one.sender.version, two.sender.version) == (2, 3)
        assert value_of(two.workers[0].scheme, two.workers[0].model) == 5.0


CHECKS = (
    check_send_applies,
    check_several_workers,
    check_looks_without_a_read,
    check_late_joiner_gets_what_was_sent,
    check_no_first_weights,
    check_forms_of_weights,
    check_changed_source,
    check_worker_ids,
    check_per_worker_weights,
    check_parts,
    check_parts_for_a_late_joiner,
    check_everything_travels,
    check_nothing_is_aliased,
    check_kept_values,
    check_kept_buffers,
    check_state_of_a_worker,
    check_state_behind_a_transform,
    check_graph_of_a_version,
    check_sends_at_once,
    check_no_time_to_wait_for_the_lag,
    check_wire_dtype,
    check_wire_dtype_of_statistics,
    check_two_models,
)

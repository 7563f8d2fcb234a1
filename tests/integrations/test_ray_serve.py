"""Weights in Ray Serve: real replicas on a cluster of this host, and parts that need none."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray.serve", reason="needs ray[serve]")

from aiosync.errors import ConfigError, LocalProtocolError, RecvTimeout
from aiosync.integrations.ray_serve import WeightsMixin, admitted
from aiosync.serving import AdmissionGate
from tests.integrations import _ray_serve_scenarios as scenarios
from tests.integrations._ray_serve_apps import TOKEN, Constant, Trainer, trainer
from tests.schemes import _harness as harness
from tests.schemes._driver import Driver, cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

pytestmark = pytest.mark.one_loop


# -- in a cluster ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver(cluster)) as driver:
        driver.run(scenarios.start_serve)
        driver.run(scenarios.start_app)
        yield driver


# The cluster and Serve take most of a minute to start; .ci/run has them apart.
@pytest.mark.heavy
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.versions,
        scenarios.under_load,
        scenarios.ingress,
        scenarios.restarted,
        scenarios.deleted,
        scenarios.never_ready,
        scenarios.too_stale,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_replicas(driver: Driver, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    driver.run(scenario)


# -- without a cluster: the test's loop runs the replica's code --------------------------------


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOSYNC_TOKEN", raising=False)


class Replica(WeightsMixin):
    def __init__(self) -> None:
        self.model = Constant()
        self.computing = threading.Event()
        self.go_on = threading.Event()

    async def end(self) -> None:
        """End the replica as Serve does."""
        await self.__dict__["__del__"]()

    @admitted
    async def act(self, factor: int) -> float:
        return self.model()[1] * factor

    @admitted
    def compute(self) -> tuple[float, float]:
        first = self.model()
        self.computing.set()
        assert self.go_on.wait(20)
        return min(first[0], self.model()[0]), max(first[1], self.model()[1])

    @admitted
    async def steps(self, count: int) -> AsyncIterator[float]:
        for _ in range(count):
            async with self.weight_feed.batch():
                value = self.model()[1]
            yield value

    @admitted
    async def late_step(self, go_on: asyncio.Event) -> float:
        self.computing.set()
        await go_on.wait()
        async with self.weight_feed.batch():
            return self.model()[1]

    @admitted
    async def fail(self) -> None:
        raise KeyError("loop")

    @admitted
    def fail_in_thread(self) -> None:
        raise KeyError("thread")


@asynccontextmanager
async def following(it: Trainer, **options: Any) -> AsyncIterator[Replica]:
    replica = Replica()
    await replica.follow_weights(it.scheme.address, model=replica.model, **options)
    try:
        yield replica
    finally:
        await replica.end()


@pytest.mark.asyncio
async def test_no_switch_while_a_thread_computes_though_its_caller_gave_up() -> None:
    async with trainer() as it, following(it) as replica:
        asking = asyncio.create_task(replica.compute())
        await harness.until(replica.computing.is_set)
        for _ in range(2):
            asking.cancel()
            await asyncio.sleep(0.02)
        pushing = asyncio.create_task(it.push())
        await harness.until(lambda: replica.weight_feed.status.newest == 2)
        await asyncio.wait({asking}, timeout=0.1)
        assert not asking.done()
        assert replica.weight_feed.version == 1
        replica.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await pushing
        assert replica.weight_feed.version == 2
        answer = await replica.compute()
        assert (answer.value, answer.span.first, answer.span.last) == ((2.0, 2.0), 2, 2)


@pytest.mark.asyncio
async def test_an_error_of_a_method_is_raised_and_ends_its_admission() -> None:
    async with trainer() as it, following(it) as replica:
        for method in (replica.fail, replica.fail_in_thread):
            with pytest.raises(KeyError):
                await method()
            assert replica.weight_feed.gate.running == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_no_source_in_time_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica()

    def follow(address: str, **options: Any) -> Coroutine[Any, Any, int]:
        return replica.follow_weights(address, model=replica.model, **options)

    async with trainer(token=TOKEN) as it:
        address = it.scheme.address
        monkeypatch.setenv("AIOSYNC_TOKEN", "another one")
        with pytest.raises(RecvTimeout, match="from tcp://.*AuthError"):
            await follow(address, timeout=0.3)
        monkeypatch.setenv("AIOSYNC_TOKEN", TOKEN)
        with pytest.raises(RecvTimeout, match="has version 1 and needs 3; .* nothing newer"):
            await follow(address, timeout=0.3, min_version=3)
        asking = asyncio.create_task(follow(address, min_version=3))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await follow(address, timeout=10) == 1
        with pytest.raises(LocalProtocolError, match="one already"):
            await follow(address)
        await replica.end()
        assert replica.weight_feed.status.state == "closed"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_stale_is_healthy_unless_there_is_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        trainer() as it,
        following(it) as patient,
        following(it, max_staleness=0.2) as strict,
    ):
        for replica in (patient, strict):
            await replica.check_health()
        assert not caplog.records
        await it.scheme.aclose()
        await harness.until(lambda: strict.weight_feed.status.stale_for > 0.2)
        await patient.check_health()
        with pytest.raises(RecvTimeout, match=r"max_staleness is 0.2 s: the link"):
            await strict.check_health()
        await patient.check_health()
        # Each replica has warned once.
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert "answers with version 1, which is stale" in caplog.text
        assert (await patient.act(1)).value == 1.0


@pytest.mark.asyncio
async def test_the_users_own_end_comes_first() -> None:
    seen = []

    class Ending(Replica):
        async def __del__(self) -> None:
            if seen:
                # This call comes from the garbage collector.
                return
            seen.append(self.weight_feed.status.state)

    async with trainer() as it:
        replica = Ending()
        await replica.follow_weights(it.scheme.address, model=replica.model)
        await replica.end()
        assert seen == ["live"]
        assert replica.weight_feed.status.state == "closed"
        type(replica).__del__ = lambda self: None  # type: ignore[assignment]


def test_what_cannot_be_admitted() -> None:
    from ray import serve

    with pytest.raises(ConfigError, match="timeout must be"):
        admitted(timeout=-1.0)

    with pytest.raises(ConfigError, match="make it `async def`"):

        @admitted
        def generator(self: Any) -> Iterator[int]:
            yield 1

    with pytest.raises(ConfigError, match="'min_version'"):

        @admitted
        async def taken(self: Any, min_version: int) -> None: ...

    with pytest.raises(ConfigError, match=r"@serve\.batch"):

        @admitted
        @serve.batch
        async def batch(self: Any, inputs: list[int]) -> list[int]:
            return inputs


@pytest.mark.asyncio
async def test_mistakes() -> None:
    class Other:
        @admitted
        async def act(self) -> None: ...

    with pytest.raises(LocalProtocolError, match="WeightsMixin"):
        await Other().act()
    replica = Replica()
    with pytest.raises(LocalProtocolError, match="follow_weights"):
        await replica.act(1)
    await replica.check_health()
    for options in ({"timeout": "5"}, {"min_version": 0}, {"max_staleness": -1.0}):
        with pytest.raises(ConfigError):
            await replica.follow_weights("tcp://127.0.0.1:1", model=replica.model, **options)
    with pytest.raises(ConfigError, match="one of model"):
        await replica.follow_weights("tcp://127.0.0.1:1")


@pytest.mark.asyncio
async def test_answers_of_several_versions_name_them() -> None:
    gate = AdmissionGate(mode="immediate")
    async with trainer() as it, following(it, gate=gate) as replica:
        answers = []
        async for answer in replica.steps(2):
            answers.append((answer.value, answer.version, answer.versions))
            await it.push()
        assert answers == [(1.0, 1, (1,)), (2.0, 1, (1, 2))]
        assert answer.span.runs == ((1, 1), (2, 1))


@pytest.mark.asyncio
async def test_no_answer_gives_the_version_of_a_new_trainer_the_epoch_of_the_old_one() -> None:
    gate = AdmissionGate(mode="immediate")
    async with trainer() as it, following(it, gate=gate) as replica:
        for epoch in (gate.epoch, 7):
            go_on = asyncio.Event()
            asking = asyncio.create_task(replica.late_step(go_on))
            await harness.until(replica.computing.is_set)
            replica.computing.clear()
            async with gate.swap(version=1, epoch=epoch):
                pass
            go_on.set()
            answer = await asking
            restarted = epoch == 7
            assert (answer.version, answer.versions) == (1, (1,))
            assert answer.epoch == (None if restarted else epoch)
            assert (answer.span.first == 0) == restarted

"""Simulated runs: the same seed gives the same run, and many seeds find no fault."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
import warnings

import pytest

from aiosync.testing.sim import Process, SimulationError, Weather, World, simulate
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.mutants import run as run_mutant
from tests.sim.plans import KINDS, plan_for
from tests.sim.programs import run

SEEDS = 200
HEAVY_SEEDS = 10_000


def _names(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "-")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 25):
        run(plan_for(seed))


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_many_seeds() -> None:
    for seed in range(HEAVY_SEEDS):
        run(plan_for(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_run(kind: str) -> None:
    runs = [run(plan_for(7, kind)) for _ in range(2)]
    assert runs[0].trace == runs[1].trace
    assert runs[0].digest == runs[1].digest
    assert runs[0].digest != run(plan_for(8, kind)).digest


@pytest.mark.parametrize("mutant", MUTANTS, ids=_names)
def test_the_fault_fits(mutant: Mutant) -> None:
    assert mutant.fits(), f"its old text has to occur once in aiosync/{mutant.file}"


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=_names)
def test_the_seed_finds_the_fault(mutant: Mutant) -> None:
    status, text = run_mutant(mutant, ["--seed", str(mutant.seed)])
    assert status == 1, text


# -- the world ---------------------------------------------------------------------------------


def test_time_is_virtual() -> None:
    async def main(world: World) -> float:
        began = time.monotonic()
        await asyncio.sleep(3000.0)
        return time.monotonic() - began

    began = time.monotonic()
    assert simulate(main, seed=1) == pytest.approx(3000.0, abs=0.01)
    assert time.monotonic() - began < 10.0


def test_the_error_of_a_program_ends_the_simulation() -> None:
    async def program() -> None:
        raise ValueError("of the program")

    async def main(world: World) -> None:
        await world.ended(world.start("one", program()))

    with pytest.raises(SimulationError, match="(?s)seed 5: of the program.*one starts") as caught:
        simulate(main, seed=5)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("ends", ["by itself", "by kill()", "with the simulation"])
def test_the_error_of_a_task_that_nothing_awaits_ends_the_simulation(ends: str) -> None:
    async def pump() -> None:
        raise ValueError("of the task")

    async def program() -> None:
        asyncio.create_task(pump())  # noqa: RUF006 - nothing holds it
        await asyncio.sleep(1.0)
        if ends != "by itself":
            await asyncio.sleep(1e3)

    async def main(world: World) -> None:
        process = world.start("one", program())
        await asyncio.sleep(10.0)
        if ends == "by kill()":
            world.kill(process)
        # The program's end or the kill is enough: main need not end.
        await asyncio.sleep(1.0 if ends == "with the simulation" else 100.0)
        assert ends == "with the simulation"

    with pytest.raises(SimulationError, match="seed 1: only the event loop saw an error") as caught:
        simulate(main, seed=1)
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value.__cause__.__cause__, ValueError)


def test_an_error_that_a_killed_process_would_have_seen_is_none() -> None:
    """It is killed after a task of it has failed, and before it sees the error."""
    failed, seen = list[str](), list[BaseException | None]()

    async def fail() -> None:
        failed.append("now")
        raise ValueError("of the task")

    async def watched() -> None:
        asyncio.create_task(fail()).add_done_callback(lambda task: seen.append(task.exception()))
        await asyncio.sleep(1e3)

    async def awaited() -> None:
        with contextlib.suppress(ValueError):
            await asyncio.create_task(fail())
        seen.append(None)
        await asyncio.sleep(1e3)

    async def main(world: World) -> None:
        processes = [world.start("watched", watched()), world.start("awaited", awaited())]

        def check(process: Process) -> None:
            if failed and process in processes:
                failed.clear()
                world.kill(process)

        world.checks.append(check)
        await asyncio.sleep(10.0)
        assert not any(process.is_alive for process in processes)

    simulate(main, seed=1)
    assert not seen


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(0), SystemExit("no")])
def test_a_program_that_is_cancelled_or_exits_ends_the_simulation(error: BaseException) -> None:
    async def program() -> None:
        await asyncio.sleep(1.0)
        raise error

    async def main(world: World) -> str:
        world.start("one", program())
        await asyncio.sleep(100.0)
        return "passed"

    with pytest.raises(SimulationError, match="seed 1: ") as caught:
        simulate(main, seed=1)
    assert caught.value.__cause__ is error
    assert f"one fails: {error!r}" in str(caught.value)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(0)])
def test_so_does_main(error: BaseException) -> None:
    async def main(world: World) -> None:
        raise error

    with pytest.raises(SimulationError, match="seed 1: ") as caught:
        simulate(main, seed=1)
    assert caught.value.__cause__ is error


def test_an_outcome_of_pytest_in_a_program_is_that_of_the_simulation() -> None:
    async def program() -> None:
        pytest.fail("of the program")

    async def main(world: World) -> None:
        world.start("one", program())
        await asyncio.sleep(100.0)

    with pytest.raises(pytest.fail.Exception, match="of the program"):
        simulate(main, seed=1)


def test_a_wait_for_nothing_is_an_error() -> None:
    async def main(world: World) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationError, match="nothing can happen any more"):
        simulate(main, seed=1)


def test_a_task_gets_the_options_that_its_factory_is_given() -> None:
    """The tasks of Python 3.14 get their name in this way, for one."""

    async def main(world: World) -> str:
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        assert factory is not None
        task = factory(loop, asyncio.sleep(1.0), name="given")
        await task
        return task.get_name()

    assert simulate(main, seed=1) == "given"


@pytest.mark.parametrize("what", ["task", "reader"])
def test_a_process_that_spins_reaches_the_end_of_the_time(what: str) -> None:
    async def program() -> None:
        listening, sock = socket.socket(), socket.socket()
        listening.bind(("127.0.0.1", 7000))
        listening.listen()
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", 7000))
        if what == "reader":
            loop.add_reader(listening.fileno(), lambda: None)
            await asyncio.sleep(1e3)
        for _ in range(1_000_000):
            await asyncio.sleep(0)

    async def main(world: World) -> None:
        await world.ended(world.start("one", program()))

    with pytest.raises(SimulationError, match="the time is up.*one: "):
        simulate(main, seed=1, max_seconds=0.5)


def test_a_task_that_a_process_leaves_is_an_error() -> None:
    left = []

    async def program() -> None:
        left.append(asyncio.create_task(asyncio.sleep(10.0), name="forgotten"))

    async def main(world: World) -> None:
        await world.ended(world.start("one", program()))

    with pytest.raises(SimulationError, match="one has ended, and left forgotten"):
        simulate(main, seed=1)


@pytest.mark.parametrize(("what", "count"), [("tasks", 10), ("sockets", 3)])
def test_a_process_has_a_bounded_number_of(what: str, count: int) -> None:
    async def program() -> None:
        kept: list[object] = []
        while True:
            await asyncio.sleep(1.0)
            kept.append(asyncio.create_task(asyncio.sleep(0 if what == "sockets" else 1e6)))
            if what == "sockets":
                kept.append(socket.socket())

    async def main(world: World) -> None:
        process = world.start("one", program())
        process.most_tasks, process.most_sockets = 10, 3
        await world.ended(process)

    with pytest.raises(SimulationError, match=f"one has [0-9]+ {what}: more than {count}"):
        simulate(main, seed=1)


@pytest.mark.parametrize(("most", "rounds"), [(3, 50), (2, 1)])
def test_only_tasks_that_have_not_ended_count(most: int, rounds: int) -> None:
    """The program is a task, too."""

    async def program() -> None:
        for _ in range(rounds):
            await asyncio.gather(asyncio.sleep(1.0), asyncio.sleep(2.0))

    async def main(world: World) -> None:
        process = world.start("one", program())
        process.most_tasks = most
        await world.ended(process)

    error = pytest.raises(SimulationError, match="one has 3 tasks: more than 2 at a time")
    with error if most < 3 else contextlib.nullcontext():
        simulate(main, seed=1)


def test_a_failed_check_ends_the_simulation() -> None:
    async def main(world: World) -> None:
        def check(process: object) -> None:
            if world.now > 1.0:
                raise ValueError("it is late")

        world.checks.append(check)
        await asyncio.sleep(2.0)
        await asyncio.sleep(2.0)

    with pytest.raises(SimulationError, match="it is late"):
        simulate(main, seed=1)


def test_a_process_may_end_before_its_first_step() -> None:
    async def program() -> None:
        raise AssertionError("it began")

    async def main(world: World) -> None:
        killed, stopped = (world.start(name, program()) for name in ("killed", "stopped"))
        world.kill(killed)
        world.stop(stopped, 10.0)
        await asyncio.sleep(1.0)

    with warnings.catch_warnings(record=True, action="always") as seen:
        simulate(main, seed=1)
        gc.collect()
    assert not seen  # such as "was never awaited"


def test_a_killed_process_runs_no_more() -> None:
    steps = []

    async def program() -> None:
        try:
            while True:
                steps.append(1)
                await asyncio.sleep(1.0)
        finally:
            steps.append(2)

    async def main(world: World) -> None:
        process = world.start("one", program())
        await asyncio.sleep(3.5)
        world.kill(process)
        await world.ended(process)
        await asyncio.sleep(10.0)
        assert steps == [1, 1, 1, 1]

    simulate(main, seed=1)


def _received(weather: Weather, sent: bytes, seed: int) -> bytes | OSError:
    """Return what arrives of some bytes, up to the end of the stream or an error."""
    arrived = bytearray()

    async def listen() -> bytes | OSError:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bytes | OSError] = loop.create_future()
        listening = socket.socket()
        listening.bind(("127.0.0.1", 7000))
        listening.listen()

        def on_connection() -> None:
            sock = listening.accept()[0]
            loop.remove_reader(listening.fileno())
            loop.add_reader(sock.fileno(), on_bytes, sock)

        def on_bytes(sock: socket.socket) -> None:
            try:
                data = sock.recv(100)
            except OSError as exc:
                data, error = b"", exc
            else:
                error = None
            arrived.extend(data)
            if not data:
                loop.remove_reader(sock.fileno())
                sock.close()
                ended.set_result(error or bytes(arrived))

        loop.add_reader(listening.fileno(), on_connection)
        result = await ended
        listening.close()
        return result

    async def dial() -> None:
        sock = socket.socket()
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", 7000))
        rest = sent
        while rest:
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError:
                break
        sock.close()

    async def main(world: World) -> bytes | OSError:
        results = []

        async def keep() -> None:
            results.append(await listen())

        processes = [world.start("listener", keep()), world.start("dialer", dial())]
        for process in processes:
            await world.ended(process)
        assert sent.startswith(arrived) or weather.corrupts
        # A fault comes before so many bytes, whether or not one write went on behind it.
        assert len(arrived) < weather.within or not (weather.cuts or weather.half_closes)
        return results[0]

    return simulate(main, seed=seed, weather=weather)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order(seed: int) -> None:
    sent = bytes(range(256)) * 40
    assert _received(Weather(fragments=0.3, capacity=(10, 1000)), sent, seed) == sent


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_up_to_a_fault(seed: int) -> None:
    sent = bytes(range(256)) * 40
    cut = _received(Weather(cuts=1.0, within=5000), sent, seed)
    assert isinstance(cut, ConnectionResetError)
    short = _received(Weather(half_closes=1.0, within=5000), sent, seed)
    assert isinstance(short, bytes)
    assert len(short) < 5000
    wrong = _received(Weather(corrupts=1.0, within=5000), sent, seed)
    assert isinstance(wrong, bytes)
    assert sum(one != other for one, other in zip(sent, wrong, strict=True)) == 1

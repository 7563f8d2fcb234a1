"""Records of the logger ``aiosync``: peers that come and go, and long waits of calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

import pytest

import aiosync
from aiosync.server import WeightServer
from tests.contract.bench import large, small
from tests.schemes import _harness as harness
from tests.support.waiting import until

if TYPE_CHECKING:
    from torch import nn

pytestmark = pytest.mark.one_loop


@pytest.fixture(name="told")
def _told(caplog: pytest.LogCaptureFixture) -> Any:
    """Function that returns the log records of a phase."""
    caplog.set_level(logging.DEBUG, "aiosync")

    def told(phase: str) -> list[logging.LogRecord]:
        return [each for each in caplog.records if getattr(each, "phase", "") == phase]

    return told


def sender_of(model: nn.Module | None = None, **options: Any) -> Any:
    scheme = aiosync.TCPWeightSyncScheme(**options)
    scheme.init_on_sender(model_id="policy", model=model or small(0.0), num_workers=1)
    return scheme


def receiver_of(sender: Any, model: nn.Module | None = None) -> Any:
    scheme = harness.twin(sender)
    scheme.init_on_receiver(model_id="policy", model=model or small(), worker_idx=0)
    return scheme


@pytest.mark.slow
@pytest.mark.asyncio
async def test_who_waits_for_long_says_for_what(told: Any, unused_tcp_port: int) -> None:
    """After five seconds connect() of either side, send() and wait_for_version() log a warning."""
    early = aiosync.TCPWeightSyncScheme(f"tcp://127.0.0.1:{unused_tcp_port}")
    early.init_on_receiver(model_id="policy", model=small(), worker_idx=0)
    trainer = sender_of(apply="manual")
    async with sender_of() as lonely, early, trainer, receiver_of(trainer) as worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        waits = [each.connect(timeout=6) for each in (lonely, early)]
        waits += [trainer.send(timeout=6), trainer.wait_for_version(2, timeout=6)]
        ended = await asyncio.gather(*waits, return_exceptions=True)
    connect = aiosync.ConnectTimeout
    assert [*map(type, ended)] == [connect, connect, aiosync.PartialSyncError, aiosync.RecvTimeout]
    assert all(each.levelno == logging.WARNING for each in told("waiting"))
    texts = [each.getMessage() for each in told("waiting")]
    for pieces in (
        ("policy: connect() has waited for ", "workers [0]", " s (timeout=)"),
        (f":{unused_tcp_port} was not reached: ", "connect() has waited", "; the last attempt: "),
        ("send() of version 2", "worker 0 (process"),
        ("wait_for_version(2)", "versions {0: 1}"),
    ):
        assert any(all(piece in text for piece in pieces) for text in texts), texts
    [record] = [each for each in told("waiting") if "send() of" in each.getMessage()]
    assert (record.model, record.version) == ("policy", 2)  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_who_comes_and_goes_is_said(told: Any) -> None:
    trainer = sender_of()
    worker = receiver_of(trainer)
    async with trainer:
        await asyncio.gather(trainer.connect(), worker.connect())
        # Each side logs that the worker has joined.
        assert [each.worker for each in told("joined")] == [0, 0]
        await trainer.send()
        assert [each.version for each in told("send")] == [2]
        assert 2 in [each.version for each in told("applied")]
        for transport in trainer.sender_transports.values():
            transport.abort()
        await until(lambda: told("reconnected"))
        assert told("lost")
        await until(lambda: 0 in trainer.sender_transports)
        await worker.aclose()
        await until(lambda: told("left"))
        assert "worker 0" in told("left")[0].getMessage()
        assert {each.levelno for each in told("lost") + told("left")} == {logging.INFO}


@pytest.mark.asyncio
async def test_a_refusal_and_another_trainer_are_said(told: Any) -> None:
    trainer = sender_of(large(0.0))
    async with trainer, receiver_of(trainer, small()) as worker:
        joining = asyncio.gather(trainer.connect(), worker.connect(), return_exceptions=True)
        assert any(isinstance(each, aiosync.ApplyError) for each in await joining)
        assert "shape" in told("refused")[0].getMessage()
    token = secrets.token_hex(16)
    first = sender_of(token=token)
    async with receiver_of(first) as worker:
        await asyncio.gather(first.connect(), worker.connect())
        address = first.address
        await first.aclose()
        async with sender_of(address=address, token=token) as second:
            await second.connect(timeout=30)
        assert told("restarted")


@pytest.mark.asyncio
async def test_no_peer_forges_a_line_or_moves_the_cursor(told: Any) -> None:
    """Control characters in names and errors of peers are escaped in records."""
    name = "policy\n00:00:00 CRITICAL disk is on fire\x1b[31m"

    def transform(weights: Any) -> Any:
        raise ValueError("all is well\r\x1b[2J")

    trainer = aiosync.TCPWeightSyncScheme()
    trainer.init_on_sender(model_id=name, model=small(0.0), num_workers=1)
    worker = harness.twin(trainer)
    worker.init_on_receiver(model_id=name, model=small(), worker_idx=0, transform=transform)
    async with trainer, worker:
        await asyncio.gather(trainer.connect(), worker.connect(), return_exceptions=True)
    refused = told("refused")
    assert len(refused) == 2, "each side logs the refusal"
    for record in [*refused, *told("joined"), *told("left")]:
        assert record.getMessage().isprintable()
        assert record.model == r"policy\n00:00:00 CRITICAL disk is on fire\x1b[31m"  # type: ignore[attr-defined]
    assert all(r"all is well\r\x1b[2J" in record.getMessage() for record in refused)


@pytest.mark.asyncio
async def test_a_worker_that_gives_up_says_so(told: Any) -> None:
    trainer = sender_of()
    worker = aiosync.TCPWeightSyncScheme(trainer.address, reconnect=0.1)
    worker.init_on_receiver(model_id="policy", model=small(), worker_idx=0)
    async with worker:
        await asyncio.gather(trainer.connect(), worker.connect())
        await trainer.aclose()
        await until(lambda: told("gave up"))
        [record] = told("gave up")
        assert record.levelno == logging.WARNING
        assert "keeps version 1: the link to the trainer was lost" in record.getMessage()
        assert "not restored within 0.1 s" in str(worker.link_lost)


@pytest.mark.asyncio
@pytest.mark.parametrize("reconnect", [0.0, 0.1])
async def test_a_trainer_that_gives_up_its_weight_server_says_so(
    told: Any, reconnect: float
) -> None:
    async with WeightServer("tcp://127.0.0.1:0") as server:
        trainer = sender_of(address=server.url, dial="both", reconnect=reconnect)
        async with sender_of(address=server.url, dial="both", reconnect=reconnect) as other:
            await other.connect()
        await trainer.connect()
        assert not told("gave up"), "the other one was closed by its owner"
    async with trainer:
        await until(lambda: told("gave up"))
        [record] = told("gave up")
        assert (record.levelno, record.model) == (logging.WARNING, "policy")  # type: ignore[attr-defined]
        assert f"at {server.url}" in record.getMessage()
        with pytest.raises(aiosync.PartialSyncError, match="the weight server at"):
            await trainer.send()
    assert told("gave up") == [record]


@pytest.mark.asyncio
async def test_strangers_do_not_fill_the_log(told: Any) -> None:
    async with sender_of(token="0123456789abcdef") as trainer:
        joining = asyncio.create_task(trainer.connect(timeout=30))
        for _ in range(8):
            stranger = aiosync.TCPWeightSyncScheme(trainer.address, token="another, of 16 bytes")
            stranger.init_on_receiver(model_id="policy", model=small(), worker_idx=0)
            async with stranger:
                with pytest.raises(aiosync.AuthError):
                    await stranger.connect(timeout=30)
        await until(lambda: trainer.refused["AuthError"] == 8)
        async with receiver_of(trainer) as worker:
            await asyncio.gather(joining, worker.connect())
    refused = [each.getMessage() for each in told("refused")]
    assert [each.partition("(")[2].partition(" ")[0] for each in refused] == ["1", "2", "4", "8"]
    assert "0123456789abcdef" not in str(refused)


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["at first", "instead of a lost trainer"])
async def test_an_http_server_is_no_trainer(told: Any, when: str) -> None:
    """The log says so once while the worker goes on to try, even if no call waits for the link."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    trainer = sender_of(reconnect=None)
    async with receiver_of(trainer) as worker:
        if when != "at first":
            await asyncio.gather(trainer.connect(), worker.connect())
        port = int(trainer.address.rpartition(":")[2])
        await trainer.aclose()
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            if when == "at first":
                with pytest.raises(aiosync.ConnectTimeout, match="not aiosync"):
                    await worker.connect(timeout=0.5)
            await until(lambda: told("waiting"))
            await worker.aclose()
    [record] = told("waiting")
    assert record.levelno == logging.WARNING
    assert "b'HTTP': the peer is not aiosync" in record.getMessage()


def test_nothing_is_shown_by_itself(fresh: Any) -> None:
    done = fresh.script(
        "import asyncio, aiosync, torch, warnings\n"
        "warnings.simplefilter('error')\n"
        "from torch import nn\n"
        "async def main():\n"
        "    scheme = aiosync.TCPWeightSyncScheme()\n"
        "    scheme.init_on_sender(model_id='policy', model=nn.Linear(1, 1), num_workers=1)\n"
        "    async with scheme:\n"
        "        try: await scheme.connect(timeout=0.1)\n"
        "        except aiosync.ConnectTimeout: pass\n"
        "asyncio.run(main())"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

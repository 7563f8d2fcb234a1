"""A place that is held through a link to a host that may be gone: refused for good, or for now."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

import aiosync
from aiosync.schemes import _hosts
from aiosync.schemes._hosts import HostCheck
from aiosync.transports.tcp import TCPTransport
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]

linux = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux can ask")
OPTIONS = (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, getattr(socket, "TCP_KEEPIDLE", 0))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links over the loopback count as links to another host, whose kernel answers."""
    monkeypatch.setattr(_hosts, "is_elsewhere", lambda _: True)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, elsewhere: None) -> None:
    """That host does not answer."""
    monkeypatch.setattr(_hosts, "_was_heard", lambda *_: False)


def tcp() -> aiosync.TCPWeightSyncScheme:
    return aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", token="token of a test", keepalive=4.0)


@pytest.mark.slow
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, r"worker_idx 0 is taken: .*does not answer.*found dead after at most \d+ s of silence"),
        (None, r"1 workers, and all of them are connected; but the host of one does not answer"),
    ],
)
async def test_a_newcomer_waits_for_a_silent_host(given: int | None, text: str) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(tcp(), target, sender={"model": source}) as (sender, receiver):
        async with harness.twin(sender) as other:
            other.init_on_receiver(model=models.linear(), worker_idx=given)
            with pytest.raises((aiosync.ConnectTimeout, aiosync.ConnectError), match=text):
                await other.connect(timeout=2.5)  # what is known is said in the end
        assert (await sender.send()).acked == {0}  # the first one goes on
        async with harness.twin(sender) as other:
            other.init_on_receiver(model=models.linear(), worker_idx=given)
            connecting = asyncio.ensure_future(other.connect(timeout=harness.PATIENCE))
            await asyncio.sleep(1.5)  # refused once, at least
            assert not connecting.done()
            receiver.abort()
            await connecting
            assert other.worker_idx == 0
            assert (await sender.send()).acked == {0}


@linux
@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("given", [0, None])
async def test_a_newcomer_is_refused_for_good_where_the_host_answers(given: int | None) -> None:
    source, target = models.linear(), models.linear()
    async with harness.here(tcp(), target, sender={"model": source}) as (sender, _):
        async with harness.twin(sender) as other:
            other.init_on_receiver(model=models.linear(), worker_idx=given)
            with pytest.raises(aiosync.ConfigError, match=r"working link|num_workers=None"):
                await other.connect(timeout=harness.PATIENCE)
        assert (await sender.send()).acked == {0}


def options_of(link: Any) -> list[int]:
    sock = link.channel.io.sock
    return [sock.getsockopt(socket.IPPROTO_TCP, option) for option in OPTIONS]


@linux
@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
async def test_the_kernel_asks_and_forgets_that_it_did() -> None:
    async with TCPTransport.pair() as (link, _):
        own = options_of(link)
        await asyncio.sleep(1.1)
        began = time.monotonic()
        check, other = HostCheck([link]), HostCheck([link])
        assert check.notice_seconds == other.notice_seconds == 60
        other.close()  # the first one still asks
        assert options_of(link) != own
        async with asyncio.timeout(harness.PATIENCE):
            while not check.all_heard(time.monotonic() - began):
                await asyncio.sleep(0.01)
        check.close()
        check.close()
        assert options_of(link) == own
        assert not HostCheck._asked


async def test_links_of_this_host_need_no_question() -> None:
    async with TCPTransport.pair() as (link, _):
        check = HostCheck([link])
        assert check.all_heard(0.0)
        assert check.notice_seconds is None
        check.close()
    assert not _hosts.is_elsewhere(link)  # it has ended


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.2", True), ("::1", True), ("::ffff:127.0.0.1", True), ("fe80::1%lo", False)],
)
async def test_loopback_addresses(host: str, loopback: bool) -> None:
    assert _hosts._is_loopback(host) is loopback

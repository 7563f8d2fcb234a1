"""The shaped link has the bandwidth that it was asked for, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults._netns import goodput, in_netns, netns_available, shaped_link

pytestmark = pytest.mark.slow

SERVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("ready", flush=True)
    sock, _ = listener.accept()
    nbytes = len(sock.recv(2**16))
    began = time.monotonic()
    first = nbytes
    while block := sock.recv(2**20):
        nbytes += len(block)
    print(nbytes, nbytes - first, time.monotonic() - began)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as sock:
    sock.sendall(bytes(int(sys.argv[2])))
"""
PING = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as sock:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    best = 9.0
    for _ in range(5):
        began = time.monotonic()
        sock.sendall(b"x")
        sock.recv(1)
        best = min(best, time.monotonic() - began)
    print(best)
"""
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("ready", flush=True)
    sock, _ = listener.accept()
    while block := sock.recv(1):
        sock.sendall(block)
"""


@pytest.fixture
def _possible() -> None:
    reason = netns_available()
    if reason is not None:
        pytest.skip(reason)


def run_both(link: tuple[str, str, str, str], server: str, client: str, *args: str) -> list[str]:
    """Output lines of a server in the second namespace and a client in the first."""
    a, b, _, address = link
    options = {"stdout": subprocess.PIPE, "text": True}
    with in_netns(b, [sys.executable, "-c", server, address], **options) as served:
        try:
            assert served.stdout.readline() == "ready\n"
            command = [sys.executable, "-c", client, address, *args]
            with in_netns(a, command, **options) as dialed:
                lines = [dialed.communicate(timeout=30)[0], served.communicate(timeout=30)[0]]
            assert (dialed.returncode, served.returncode) == (0, 0)
        finally:
            served.kill()
    return [line.strip() for line in lines]


def left() -> list[str]:
    if not os.path.isdir("/run/netns"):
        return []
    return [name for name in os.listdir("/run/netns") if name.startswith(f"aiosync-{os.getpid()}-")]


@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize(("rate_bits", "nbytes"), [(40_000_000, 6 * 2**20), (200_000_000, 2**25)])
def test_a_transfer_takes_as_long_as_the_bandwidth_says(rate_bits: int, nbytes: int) -> None:
    found = []
    for _ in range(3):  # a machine that is busy elsewhere only adds to the time
        with shaped_link(rate_bits) as link:
            _, result = run_both(link, SERVER, CLIENT, str(nbytes))
        total, measured, seconds = result.split()
        assert int(total) == nbytes
        assert left() == []
        found.append(float(seconds) * goodput(rate_bits) / int(measured))
        assert found[-1] > 0.9  # never faster than the link
        if found[-1] < 1.1:
            break
    assert min(found) < 1.1, found


@pytest.mark.usefixtures("_possible")
def test_latency() -> None:
    reason = netns_available(delay=True)
    if reason is not None:
        pytest.skip(reason)
    with shaped_link(100_000_000, 20.0) as link:
        result, _ = run_both(link, ECHO, PING)
    assert 0.04 <= float(result) < 0.06


@pytest.mark.usefixtures("_possible")
def test_everything_is_removed_after_an_error_and_with_processes_in_it() -> None:
    with pytest.raises(LookupError):
        with shaped_link(10**8) as (a, b, _, _):
            assert len(left()) == 2
            sleeping = [in_netns(name, ["sleep", "60"]) for name in (a, b)]
            for process in sleeping:
                # `ip` enters the namespace before it becomes the program.
                while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
                    os.sched_yield()
            raise LookupError
    assert left() == []
    assert [process.wait(timeout=10) for process in sleeping] == [-9, -9]


@pytest.mark.usefixtures("_possible")
def test_two_links_stand_beside_one_another() -> None:
    with shaped_link(10**8) as one, shaped_link(10**8) as two:
        assert len({*one[:2], *two[:2]}) == 4 == len(left())
    assert left() == []


def test_a_link_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="no such link"):
        with shaped_link(0, 0.0):
            pass

"""The transport over RPC, on every loop, against every check of the published suite.

RPC keeps threads and sockets for the life of a process, so the suite runs in one of its own,
whose RPC worker calls itself: ``python -m tests.conformance.test_rpc LOOP``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiosync.testing import CONFORMANCE_CHECKS, Hooks, check_transport
from aiosync.testing._tools import deliver
from aiosync.transports.rpc import RPCTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.types import Limits
from tests.conformance.test_transports import FdPeer, Pair, cut_stream, tcp_ends
from tests.schemes import _harness as harness

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def pair(sender: Limits | None = None, receiver: Limits | None = None) -> AsyncIterator[Pair]:
    left, right = tcp_ends()
    async with (
        TCPTransport(left, limits=sender) as one,
        TCPTransport(right, limits=receiver) as two,
        RPCTransport(one) as a,
        RPCTransport(two) as b,
    ):
        yield a, b


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[FdPeer, RPCTransport]]:
    left, right = socket.socketpair()
    peer = FdPeer(left)
    try:
        async with RPCTransport(TCPTransport(right)) as transport:
            yield peer, transport
    finally:
        peer.close()


async def suite() -> None:
    async with RPCTransport.pair() as (one, two):  # RPC opens what it keeps
        await deliver(one, two, 1, bytes(40 * 2**20))
    hooks = Hooks(cut=cut_stream, limited=pair, raw=raw, raw_payload_nbytes=65536)
    report = await check_transport(pair, hooks=hooks)
    assert len(report.passed) == len(CONFORMANCE_CHECKS), report.skipped


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_conformance(loop: str) -> None:
    command = [sys.executable, "-m", "tests.conformance.test_rpc", loop]
    done = subprocess.run(
        command, cwd=ROOT, timeout=55, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def main(loop: str) -> None:
    from torch.distributed import rpc

    warnings.simplefilter("ignore", UserWarning)  # torch's own, about its own deprecations
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc("alone", rank=0, world_size=1)
    try:
        with asyncio.Runner(loop_factory=harness.loop_factory(loop)) as runner:
            runner.run(suite())
    finally:
        rpc.shutdown()


if __name__ == "__main__":
    from tests.conformance import test_rpc

    test_rpc.main(sys.argv[1])

"""The kernel's keep-alive, which notices that a peer's host went away without a message."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiosync

# This address exists only in the network namespaces of this test.
ADDRESS = "tcp://10.213.0.2:7777"

SENDER = """
import asyncio, sys, torch, aiosync

async def main():
    scheme = aiosync.TCPWeightSyncScheme(sys.argv[1], token="0123456789abcdef", keepalive=1)
    scheme.init_on_sender(weights={"w": torch.ones(4)}, num_workers=1)
    print("ready", flush=True)
    await scheme.connect(timeout=30)
    print("connected", flush=True)
    while scheme.worker_versions:
        await asyncio.sleep(0.05)
    print("lost", flush=True)
    try:
        await scheme.send(timeout=5)
    except aiosync.PartialSyncError as exc:
        print(type(exc.failed[0]).__name__, flush=True)
    await scheme.aclose()

aiosync.run(main)
"""

RECEIVER = """
import asyncio, sys, torch, aiosync

async def main():
    scheme = aiosync.TCPWeightSyncScheme(
        sys.argv[1], token="0123456789abcdef", keepalive=1, reconnect=0, guard="reading"
    )
    scheme.init_on_receiver(weights={"w": torch.zeros(4)}, worker_idx=0)
    await scheme.connect(timeout=30)
    try:
        while True:
            await scheme.receive()
    except aiosync.TransportError as exc:
        print(type(exc).__name__, flush=True)
    await scheme.aclose()

aiosync.run(main)
"""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def two_hosts(a: str, b: str, device: str) -> Iterator[None]:
    """Two network namespaces with a link between them; they need root on Linux."""
    with contextlib.ExitStack() as undo:
        try:
            for name in (a, b):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ends = ("netns", a, "type", "veth", "peer", "name", device, "netns", b)
            ip("link", "add", device, *ends)
            for name, address in ((a, "10.213.0.1/30"), (b, "10.213.0.2/30")):
                ip("-n", name, "address", "add", address, "dev", device)
                ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no network namespaces: {exc}")
        yield


@pytest.mark.slow
def test_both_ends_notice_that_the_network_is_gone() -> None:
    a, b, device = (f"aiosync-{os.getpid()}-a", f"aiosync-{os.getpid()}-b", f"as{os.getpid()}")
    root = str(Path(aiosync.__file__).parents[1])
    with two_hosts(a, b, device), contextlib.ExitStack() as stack:

        def start(name: str, program: str) -> subprocess.Popen[str]:
            argv = ["ip", "netns", "exec", name, sys.executable, "-c", program, ADDRESS]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=root)
            stack.enter_context(process)
            # `ip` has replaced itself with the program, so this kills the program.
            stack.callback(process.kill)
            return process

        sender, receiver = start(b, SENDER), start(a, RECEIVER)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"
        assert sender.stdout.readline() == "connected\n"
        # From now on packets are dropped, and neither end gets a message about it.
        ip("-n", a, "link", "set", device, "down")
        began = time.monotonic()
        assert sender.stdout.readline() == "lost\n"
        assert time.monotonic() - began < 15
        # communicate() would lose the output that readline() has read ahead.
        assert sender.stdout.readline() in ("TransportBroken\n", "PeerClosed\n")
        assert receiver.communicate(timeout=30)[0] in ("TransportBroken\n", "PeerClosed\n")

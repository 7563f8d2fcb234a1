"""A peer whose host went away without a word is noticed by the kernel's keep-alive."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

import aiosync
from tests.faults._netns import in_netns, netns_available, shaped_link

SENDER = """
import asyncio, sys, torch, aiosync

async def main():
    scheme = aiosync.TCPWeightSyncScheme(f"tcp://{sys.argv[1]}:7777", token="t", keepalive=1)
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
        f"tcp://{sys.argv[1]}:7777", token="t", keepalive=1, reconnect=0, guard="reading"
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


@pytest.mark.slow
def test_both_ends_notice_that_the_network_is_gone() -> None:
    reason = netns_available()
    if reason is not None:
        pytest.skip(reason)
    root = str(Path(aiosync.__file__).parents[1])
    with shaped_link(100_000_000) as (a, b, _, address), contextlib.ExitStack() as stack:

        def start(name: str, program: str) -> subprocess.Popen[str]:
            argv = [sys.executable, "-c", program, address]
            process = in_netns(name, argv, stdout=subprocess.PIPE, text=True, cwd=root)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        sender, receiver = start(b, SENDER), start(a, RECEIVER)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"
        assert sender.stdout.readline() == "connected\n"
        device = subprocess.run(
            ["ip", "-n", a, "-o", "-4", "addr", "show", "scope", "global"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[1]
        # Nobody is told: packets are dropped from now on.
        subprocess.run(["ip", "-n", a, "link", "set", device, "down"], check=True)
        began = time.monotonic()
        assert sender.stdout.readline() == "lost\n"
        assert time.monotonic() - began < 15
        # Not communicate(): what readline() has read ahead would be lost to it.
        assert sender.stdout.readline() in ("TransportBroken\n", "PeerClosed\n")
        assert receiver.communicate(timeout=30)[0] in ("TransportBroken\n", "PeerClosed\n")

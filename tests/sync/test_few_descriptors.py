"""A process that has hardly any descriptors left gets an error, whatever the API."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, resource
import torch
import aiosync, aiosync.sync

async def main():
    await aiosync.SharedMemWeightSyncScheme().aclose()

def blocking():
    with aiosync.sync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=torch.nn.Linear(2, 2), num_workers=None)
        scheme.connect(timeout=5.0)
        scheme.send()

def attempt(what, left):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(left):
        os.close(held.pop())
    try:
        what()
    except (OSError, aiosync.AiosyncError):
        pass

for what in (lambda: aiosync.run(main), blocking):
    for left in range(12):
        if not (child := os.fork()):
            attempt(what, left)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, (what, left, status)
"""


def test_hardly_any_descriptors_left() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [line for line in ended.stderr.splitlines() if "cpuinfo" not in line]
    assert (ended.returncode, lines) == (0, [])

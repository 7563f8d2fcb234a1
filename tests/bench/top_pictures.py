"""Pictures of ``aiosync top`` and of its page, beside a run with 16 workers: one stuck, one lost.

``python -m tests.bench.top_pictures docs/topics/top`` writes them there. Needs ``chromium``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

import aiosync
from aiosync.cli.status import Look, draw, serve_page
from aiosync.server import WeightClient
from tests.schemes import _harness as harness
from tests.schemes import _models as models

_WORKERS, _STUCK, _LOST = 16, 5, 11
_PAUSE = 1.0
# A picture of a page before its first event is at most this large.
_EMPTY_NBYTES = 20_000
_PAGES = {"page": ("1200,590", ""), "page-dark": ("500,700", "--force-dark-mode")}


async def pour(trainer: Any) -> None:
    """Send until cancelled, without waiting for the worker that is stuck."""
    waiting = set()
    while True:
        waiting.add(asyncio.ensure_future(_swallow(trainer.send_nowait(timeout=0.9))))
        await asyncio.sleep(_PAUSE)


async def _swallow(handle: Any) -> None:
    with contextlib.suppress(aiosync.AiosyncError):
        await handle


async def photograph(address: str, file: Path, size: str, *options: str) -> None:
    """Take a picture of a page with Chromium, again and again until there is something on it."""
    for _ in range(10):
        with tempfile.TemporaryDirectory() as profile:
            process = await asyncio.create_subprocess_exec(
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", f"--window-size={size}", f"--screenshot={file}"),
                *("--timeout=5000", "--run-all-compositor-stages-before-draw", *options, address),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            async with asyncio.timeout(60):
                await process.wait()
        if (await asyncio.to_thread(file.stat)).st_size > _EMPTY_NBYTES:
            return
    raise RuntimeError(f"nothing came to {address}")


async def main(folder: Path) -> None:
    """Run the trainer and its workers, and take the pictures."""
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", stall_timeout=None)
    trainer.init_on_sender("policy", model=models.medium(), num_workers=_WORKERS)
    async with harness.workers(trainer, models.medium, _WORKERS) as crew:
        sending = asyncio.ensure_future(pour(trainer))
        await asyncio.sleep(10)
        crew[_STUCK].stop()
        crew[_LOST].kill()
        await asyncio.sleep(30)
        client = WeightClient(trainer.address)
        look = Look(time.monotonic(), await client.stats())
        await asyncio.sleep(5)
        look = Look(time.monotonic(), await client.stats(), look)
        console = Console(record=True, width=64, file=io.StringIO(), force_terminal=True)
        console.print(draw(trainer.address, look, 40))
        with tempfile.TemporaryDirectory() as place:
            drawing = Path(place) / "terminal.svg"
            drawing.write_text(console.export_svg(title=f"aiosync top {trainer.address}"))
            await photograph(f"file://{drawing}", folder / "terminal.png", "900,760")
        async with serve_page("127.0.0.1:0", trainer.address, client.stats, 1.0) as page:
            # There is a first reader, so that the first event of the next one has rates.
            await asyncio.to_thread(lambda: urllib.request.urlopen(f"{page}events").readline())
            for name, (size, *options) in _PAGES.items():
                await photograph(page, folder / f"{name}.png", size, *filter(None, options))
        sending.cancel()


if __name__ == "__main__":
    to = Path(sys.argv[1])
    to.mkdir(exist_ok=True)
    aiosync.run(main(to))
    for picture in sorted(to.glob("*.png")):
        print(f"{picture} has {picture.stat().st_size} bytes")

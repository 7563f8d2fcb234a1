"""``aiosync demo``: its options, and the report of a run. The training itself is in ``ppo.py``."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

from aiosync.cli._common import errors_to, failing, write_text
from aiosync.cli.progress import Progress

__all__ = ["demo"]


class _TransportOption(str, Enum):  # noqa: UP042  # typer shows str values of enums only
    pipe = "pipe"
    shm = "shm"


def demo(
    transport: Annotated[
        _TransportOption, typer.Option(help="Pipes, or one shared-memory segment.")
    ] = _TransportOption.shm,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    sync: Annotated[
        bool, typer.Option("--sync", help="Use the blocking API, aiosync.sync.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest training time; ends earlier when solved.")
    ] = 50.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks and environments.")] = 0,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write a summary as JSON; - is stdout."),
    ] = None,
) -> None:
    """Train CartPole with workers that aiosync keeps on the newest policy.

    One trainer process and some worker processes; the workers collect episodes without pause
    and aiosync gives them every new version of the policy. Exits with status 1 if the
    return did not rise.

    - `aiosync demo`
    - `aiosync demo --transport pipe --workers 4`
    """
    errors = errors_to()
    console = errors if json_to == "-" else Console(highlight=False, soft_wrap=True)
    with failing("demo", errors) as status:
        from aiosync.cli import ppo

        if json_to not in (None, "-"):
            write_text("--json", json_to, "")  # a bad path has to fail before the run
        status[0] = 1
        console.print(
            f"aiosync demo: CartPole-v1, {workers} workers, {transport.value}, "
            f"{'aiosync.sync' if sync else 'aiosync'}"
        )
        progress = Progress(workers, seconds, console.print)
        ppo.train(progress, transport.value, workers, seed, sync)
        summary = {"transport": transport.value, "sync": sync, **progress.summary()}
        rose = "rose" if summary["risen"] else "did not rise"
        console.print(
            f"{'Solved' if progress.solved else f'The return {rose}'}: mean return "
            f"{progress.mean_return(first=True):.1f} -> {progress.mean_return():.1f} in "
            f"{progress.elapsed:.1f} s, {summary['steps']} steps and {progress.version} versions."
        )
        if json_to is not None:
            numbers = {name: None if value != value else value for name, value in summary.items()}
            write_text("--json", json_to, json.dumps(numbers, indent=2))
        raise typer.Exit(0 if summary["risen"] else 1)

"""``aiosync top``: what a weight server, or a trainer that listens, does now; again and again.

Must not import torch: people look often.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from aiosync._run import run
from aiosync.cli._common import (
    Connection,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    dialling,
    plain,
)
from aiosync.cli.dashboard import serve_page
from aiosync.cli.figures import (
    STATES,
    Facts,
    Look,
    counts,
    facts,
    look_again,
    worker_facts,
    workers,
)
from aiosync.cli.status import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from aiosync.events import SyncStats

__all__ = ["draw", "top"]

_ANSWER_SECONDS = 10.0
_WIDTH = 200  # a pipe has none; rows stay whole
_FRAMES = 12  # lines of a screen that are no rows
_WORDS = ("model", "state")  # the other columns are numbers
_BAD = ("lost", "lagging")
_STYLES = dict(zip(STATES, ("bold red", "bold yellow", "cyan", "dim", "green"), strict=True))


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of a weight server, or of a trainer.")
    ],
    interval: Annotated[
        float, typer.Option(min=0.1, max=10.0, metavar="SECONDS", help="Time between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, for the rates, show that and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was answered as JSON, and end.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", show_default=False, help="Show it on a page there instead."
        ),
    ] = None,
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch weights move: models, rates and how far each worker is, until Ctrl-C.

    Asks a weight server, or a trainer that listens. Without a terminal it shows one table.

    - `aiosync top tcp://10.0.0.5:7000 --token-file token`
    - `aiosync top unix:///tmp/weights --html 127.0.0.1:8080`
    """
    given = (url, token_file, tls, tls_ca, tls_cert, tls_key)
    with dialling("top", *given) as (server, _, exit_status):
        exit_status[0] = 1
        run(_top(server, interval, once, as_json, html))


async def _top(
    server: Connection, interval: float, once: bool, as_json: bool, html: str | None
) -> None:
    client = server.client()

    async def ask() -> Sequence[SyncStats]:
        return await client.stats(timeout=_ANSWER_SECONDS)

    first = await ask()  # what is wrong there ends the command, and later does not
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(each) for each in first], indent=2))
    elif html is not None:
        async with serve_page(html, server.url, ask, interval) as page:
            typer.echo(page)
            await asyncio.Event().wait()
    else:
        await _show(server.url, ask, Look(time.monotonic(), first), interval, once)


async def _show(
    url: str,
    ask: Callable[[], Awaitable[Sequence[SyncStats]]],
    look: Look,
    interval: float,
    once: bool,
) -> None:
    """Draw each look until Ctrl-C; or the second one, which has rates, and no more."""
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if terminal else _WIDTH)
    if terminal and not once:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(draw(url, look, console.height), refresh=True)
                await asyncio.sleep(interval)
                look = await look_again(ask, look)
    await asyncio.sleep(interval)
    look = await look_again(ask, look)
    if look.error is not None:
        raise look.error
    console.print(draw(url, look))


def draw(url: str, look: Look, height: int | None = None) -> RenderableType:
    """Return what a look has to show, in about ``height`` lines: of the workers the worst first."""
    found = workers(look.models)
    total = Text(f"{plain(url)}: {len(found)} worker{'s' * (len(found) != 1)}")
    for state, count in counts(found).items():
        total.append(", ").append(f"{count} {state}", _STYLES[state])
    parts: list[RenderableType] = [total]
    if look.error is not None:
        parts.append(Text(look.trouble, "bold red"))
    models = [{"model": each.model, **facts(look, each)} for each in look.models]
    parts.append(_table((each, "") for each in models) if models else Text("No models yet."))
    room = len(found) if height is None else max(1, height - len(models) - _FRAMES)
    named = len(models) > 1
    rows = []
    for model, worker in found[:room]:
        state = worker.state.upper() if worker.state in _BAD else worker.state
        row = {"worker": str(worker.index), "state": state, **worker_facts(worker)}
        rows.append(({"model": model.model, **row} if named else row, _STYLES[worker.state]))
    if rows:
        parts.append(_table(rows))
    if found[room:]:
        rest = ", ".join(f"{count} {state}" for state, count in counts(found[room:]).items())
        parts.append(Text(f"and {rest}"))
    return Group(*parts)


def _table(rows: Iterable[tuple[Facts, str]]) -> Table:
    """A table with a style for each row."""
    given = list(rows)
    table = make_table(*(name if name in _WORDS else f">{name}" for name in given[0][0]))
    for row, style in given:
        table.add_row(*(escape(plain(each, 60)) for each in row.values()), style=style)
    return table

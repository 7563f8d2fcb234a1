"""``aiosync status`` and ``aiosync top``: the state of a weight server or of a listening trainer.

``status`` prints once everything that a server reports about itself. ``top`` shows repeatedly how
weights move, on a terminal or on a web page; ``aiosync serve`` serves the same page.
Must not import torch except where a page is served: users call these commands often.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.resources
import itertools
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aiosync._run import run
from aiosync.cli._common import (
    AllowHost,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    dialling,
    plain,
    show_nbytes,
)
from aiosync.errors import AiosyncError, RemoteProtocolError
from aiosync.events import SyncStats, WorkerStats

if TYPE_CHECKING:
    from aiosync.server import WeightClient

__all__ = [
    "STATES",
    "Look",
    "draw",
    "facts",
    "look_again",
    "make_table",
    "serve_page",
    "status",
    "top",
]

Values: TypeAlias = Mapping[str, Any]
"""A weight server's status, or a part of it, as plain values."""

Facts: TypeAlias = dict[str, str]
"""Texts by heading, in the order in which they are shown."""

STATES = ("lost", "lagging", "joining", "left", "ready")
"""The states of a worker; those that need attention come first."""

_ANSWER_SECONDS = 10.0
_WIDTH = 200  # characters in a line of a pipe, which has no width: rows must not be broken
_ALL = 80  # width of a terminal from which on every column has room
_WIDE = 90  # width from which on there is a space between the columns, too
_FRAMES = 12  # lines of a screen that are not rows of workers or models
_WORDS = (
    "model",
    "strategy",
    "trainer",
    "address",
    "state",
    "behind",
)  # the other columns are numbers
_BAD = ("lost", "lagging")
_STYLES = dict(zip(STATES, ("bold red", "bold yellow", "cyan", "dim", "green"), strict=True))

# -- status ----------------------------------------------------------------------------------------


def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the weight server.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the values as JSON instead of tables.")
    ] = False,
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 30.0,
) -> None:
    """Show what a weight server serves, by whom and to whom.

    - `aiosync status tcp://10.0.0.5:7000`
    - `aiosync status unix:///tmp/weights --json`
    """
    given = (url, token_file, tls, tls_ca, tls_cert, tls_key)
    with dialling("status", *given) as (client, _, _, accept_options):
        accept_options()
        values = run(client.status(timeout=timeout))
        if as_json:
            typer.echo(json.dumps(values, indent=2, default=str))
            return
        try:
            shown = _tables(values)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise RemoteProtocolError(
                f"{url} sent a status of another release: see --json"
            ) from exc
        width = None if sys.stdout.isatty() else _WIDTH
        Console(highlight=False, width=width).print(shown)


def _served_model(model: Values) -> dict[str, Any]:
    """Return the row of a model that a server serves."""
    return {
        "model": model["model_id"],
        "strategy": model["strategy"],
        **_served_version(model),
        "workers": len(model["workers"]),
        "lag": max((worker["lag"] for worker in model["workers"]), default=0),
        "trainer": model["trainer"] or "-",
    }


def _served_version(model: Values) -> dict[str, Any]:
    """Return the columns about the version of a model, which hold dashes if it has none yet."""
    if not model["version"]:
        return dict.fromkeys(("version", "size", "tensors", "age"), "-")
    return {
        "version": model["version"],
        "size": show_nbytes(model["nbytes"]),
        "tensors": model["tensors"],
        "age": _show_seconds(time.time() - model["updated_at"]),
    }


def _served_worker(model: Values, worker: Values) -> dict[str, Any]:
    """Return the row of a worker to which a server serves a model."""
    sent, seconds = worker["sent_nbytes"], worker["connected_seconds"]
    return {
        "model": model["model_id"],
        "worker": worker["worker_idx"],
        "address": worker["name"],
        "pid": worker["pid"],
        "version": worker["version"],
        "lag": worker["lag"],
        "sent": show_nbytes(sent),
        "rate": f"{show_nbytes(sent / max(seconds, 1e-3))}/s",
        "since": _show_seconds(seconds),
        **_behind(*(worker.get("behind") or (0, 0))),
    }


def _tables(values: Values) -> RenderableType:
    """Return everything in a server's status, as tables and lines of text."""
    models = values["models"]
    parts: list[RenderableType] = [
        Text(_server_line(values)),
        make_table(map(_served_model, models), narrow_without=("strategy", "tensors"))
        if models
        else Text("No models yet."),
    ]
    workers = [_served_worker(model, worker) for model in models for worker in model["workers"]]
    if workers:
        parts.append(make_table(workers, narrow_without=("sent", "since")))
    parts += [
        Text(plain(f"{model['model_id']}: {model['refusal']}", 2000))
        for model in models
        if model["refusal"]
    ]
    return Group(*parts, *_lost_links(values))


def _server_line(values: Values) -> str:
    """Return the line about a server itself: address, release, age and connections."""
    return (
        f"{plain(values['url'])}, aiosync {plain(values['aiosync'])}, up "
        f"{_show_seconds(values['uptime_seconds'])}, {plain(values['connections'])} "
        f"connections now, {plain(values['accepted'])} in all"
        f"{', with a store' if values['store'] else ''}"
    )


def _lost_links(values: Values) -> Iterator[Text]:
    """Yield a line with the causes of refused connections, and one with those of ended links."""
    for what, numbers in (
        ("Refused connections", values["refused"]),
        ("Links that ended", values["ended"]),
    ):
        listed = ", ".join(f"{plain(name)} {plain(number)}" for name, number in numbers.items())
        if listed:
            yield Text(f"{what}: {listed}")


# -- tables of both commands -----------------------------------------------------------------------


def _show_seconds(seconds: float) -> str:
    """Return a time span as text, in the unit that fits."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86400:.0f} d"


def _add_columns(table: Table, names: Iterable[str]) -> None:
    """Add columns to a table: words fold at the left, numbers stay whole at the right."""
    for name in names:
        words = name in _WORDS
        table.add_column(
            name,
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold",
            min_width=len(name),
        )


def make_table(
    rows: Iterable[Mapping[str, Any]],
    styles: Iterable[str] = itertools.repeat(""),
    narrow_without: Collection[str] = (),
) -> Table:
    """Return a table that folds long texts and never cuts a number.

    Args:
        rows: At least one row; each has its values by the headings of the columns.
        styles: The style of each row.
        narrow_without: Columns that are left out on a terminal of less than 80 characters.
    """
    rows = list(rows)
    # Some rows lack the last columns; the longest has all of them.
    names = max(rows, key=len)
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    table = Table(pad_edge=False, padding=(0, 1 if width >= _WIDE else 0))
    for row, style in zip(rows, styles, strict=False):
        shown = {
            name: row.get(name, "-")
            for name in names
            if width >= _ALL or name not in narrow_without
        }
        if not table.columns:
            _add_columns(table, shown)
        table.add_row(*(escape(plain(each, 60)) for each in shown.values()), style=style)
    return table


# -- top -------------------------------------------------------------------------------------------


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
    allow_host: AllowHost = None,
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
    with dialling("top", *given) as (client, _, _, accept_options):
        accept_options()
        run(_top(client, url, interval, once, as_json, html, allow_host or ()))


async def _top(
    client: WeightClient,
    url: str,
    interval: float,
    once: bool,
    as_json: bool,
    html: str | None,
    allow_hosts: Sequence[str],
) -> None:
    """Ask, and show the answer as JSON, on a page or in the terminal; see :func:`top`."""

    async def ask() -> Sequence[SyncStats]:
        return await client.stats(timeout=_ANSWER_SECONDS)

    # An error of the first answer ends the command; later errors are shown.
    first = await ask()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(each) for each in first], indent=2))
    elif html is not None:
        async with serve_page(html, url, ask, interval, allow_hosts) as page:
            typer.echo(page)
            await asyncio.Event().wait()
    else:
        await _show(url, ask, Look(time.monotonic(), first), interval, once)


async def _show(
    url: str,
    ask: Callable[[], Awaitable[Sequence[SyncStats]]],
    look: Look,
    interval: float,
    once: bool,
) -> None:
    """Draw each look until Ctrl-C; with ``once`` or without a terminal, draw only the second look.

    The first look has no rates yet.

    Raises:
        AiosyncError: The second look got no answer and is the only one to draw.
    """
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
    """Return the tables of a look, in about ``height`` lines; the worst workers come first."""
    found = workers(look.models)
    parts: list[RenderableType] = [_total(url, found)]
    if look.error is not None:
        parts.append(Text(look.trouble, "bold red"))
    models = [{"model": each.model, **facts(look, each)} for each in look.models]
    parts.append(make_table(models) if models else Text("No models yet."))
    room = len(found) if height is None else max(1, height - len(models) - _FRAMES)
    return Group(*parts, *_worker_lines(found, room, len(models) > 1))


def _worker_lines(
    found: Sequence[tuple[SyncStats, WorkerStats]], room: int, named: bool
) -> Iterator[RenderableType]:
    """Yield the table of the first ``room`` workers, and a line that counts the others."""
    rows = [_worker_row(model, worker, named) for model, worker in found[:room]]
    if rows:
        yield make_table(rows, (_STYLES[worker.state] for _, worker in found))
    if found[room:]:
        rest = ", ".join(f"{count} {state}" for state, count in counts(found[room:]).items())
        yield Text(f"and {rest}")


def _total(url: str, found: Sequence[tuple[SyncStats, WorkerStats]]) -> Text:
    """Return the line that counts the workers of a peer, in all and in each state."""
    here = sum(worker.state != "left" for _, worker in found)
    total = Text(f"{plain(url)}: {here} worker{'s' * (here != 1)}")
    for state, count in counts(found).items():
        total.append(", ").append(f"{count} {state}", _STYLES[state])
    return total


def _worker_row(model: SyncStats, worker: WorkerStats, named: bool) -> Facts:
    """Return the row of a worker, with the name of its model if ``named``."""
    state = worker.state.upper() if worker.state in _BAD else worker.state
    row = {"worker": str(worker.index), "state": state, **worker_facts(worker)}
    return {"model": model.model, **row} if named else row


# -- looks: the newest answer and the one before, because a rate needs two -------------------------


class Look(NamedTuple):
    """A peer's newest answer, and the answer before it.

    Attributes:
        at: Time of the question, in seconds of ``time.monotonic()``.
        models: Statistics of each model, as the peer answered.
        before: The look before this one; ``None`` if there is none.
        error: Error of the last question, which got no answer; ``None`` if it got one.
    """

    at: float
    models: Sequence[SyncStats] = ()
    before: Look | None = None
    error: AiosyncError | None = None

    @property
    def trouble(self) -> str:
        """A sentence about the missing answer; empty if the last question was answered."""
        if self.error is None:
            return ""
        since = _show_seconds(time.monotonic() - self.at)
        return f"No answer for {since}, asking again: {plain(self.error, 500)}"

    def rate(self, model: SyncStats, count: Callable[[SyncStats], int]) -> float | None:
        """Return how much a count grows in a second; ``None`` while that is not known."""
        # Without an earlier look the time between the looks is 0, and the rate unknown.
        before = self.before or self
        for old in before.models:
            if (old.role, old.model, old.epoch) == (model.role, model.model, model.epoch):
                seconds = self.at - before.at
                return max(0, count(model) - count(old)) / seconds if seconds else None
        return None


async def look_again(ask: Callable[[], Awaitable[Sequence[SyncStats]]], last: Look) -> Look:
    """Ask once more and return the new look.

    Without an answer the new look has the models of the last answer, and the error.
    """
    # The last look keeps no earlier one, so that the chain does not grow.
    last = last._replace(before=None, error=None)
    try:
        return Look(time.monotonic(), await ask(), last)
    except AiosyncError as exc:
        return last._replace(error=exc)


def workers(models: Iterable[SyncStats]) -> list[tuple[SyncStats, WorkerStats]]:
    """Return the workers of all models; those that need attention come first."""
    found = [(model, worker) for model in models for worker in model.workers]
    return sorted(found, key=lambda each: (STATES.index(each[1].state), -each[1].lag))


def counts(found: Iterable[tuple[SyncStats, WorkerStats]]) -> dict[str, int]:
    """Return the number of workers in each state that occurs."""
    states = Counter[str](worker.state for _, worker in found)
    return {state: states[state] for state in reversed(STATES) if states[state]}


def facts(look: Look, model: SyncStats) -> Facts:
    """Return the texts about a model, without its name and workers."""
    rate = look.rate(model, lambda each: each.version)
    nbytes = look.rate(model, lambda each: each.wire_nbytes)
    pause = model.seconds.get("pause")
    return {
        "version": str(model.version),
        "lag": str(model.lag),
        "rate": "-" if rate is None else f"{rate:.1f}/s",
        "bytes/s": "-" if nbytes is None else f"{show_nbytes(nbytes)}/s",
        "age": _show_seconds(model.age) if model.version else "-",
        "pause": "-" if pause is None else f"{pause * 1e3:.1f} ms",
    }


def worker_facts(worker: WorkerStats) -> Facts:
    """Return the texts about a worker, without its index and state."""
    return {
        "version": str(worker.version or "-"),
        "lag": str(worker.lag),
        "age": _show_seconds(worker.age) if worker.version else "-",
        "pid": str(worker.pid or "-"),
        **_behind(worker.behind, worker.oldest),
    }


def _behind(count: int, oldest: int) -> Facts:
    """Return the text about the workers behind a worker that passes versions on, if any."""
    return {"behind": f"{count} workers, oldest version {oldest}"} if count else {}


# -- the page, and the events that keep it up to date ----------------------------------------------


@contextlib.asynccontextmanager
async def serve_page(
    listen: str,
    name: str,
    ask: Callable[[], Awaitable[Sequence[SyncStats]]],
    interval: float,
    allow_hosts: Sequence[str] = (),
) -> AsyncIterator[str]:
    """Serve the page, and its events to every browser that shows it.

    Args:
        listen: ``HOST:PORT``; port 0 for any free one.
        name: Name of the server or trainer, as the page shows it.
        ask: Returns the newest statistics. One call serves all browsers; without a browser there
            are no calls.
        interval: Seconds between two events.
        allow_hosts: Host names under which browsers may ask for the page, beside those of this
            host.

    Yields:
        The URL of the page.

    Raises:
        ConfigError: The address cannot be bound.
    """
    from aiosync.metrics.http import HttpServer, Page

    page = (importlib.resources.files(__package__) / "dashboard.html").read_bytes()

    look, event, due, asking = Look(time.monotonic()), b"", 0.0, asyncio.Lock()

    async def events() -> AsyncGenerator[bytes]:
        nonlocal look, event, due
        while True:
            async with asking:
                # Before it is due, the event that another browser asked for is new enough.
                if time.monotonic() >= due:
                    look = await look_again(ask, look)
                    event = f"data: {json.dumps(_page_values(name, look))}\n\n".encode()
                    due = time.monotonic() + interval
            yield event
            await asyncio.sleep(interval)

    pages: dict[str, Page] = {
        "/": lambda _: (HTTPStatus.OK, "text/html; charset=utf-8", page),
        "/events": lambda _: events(),
    }
    async with HttpServer(listen, pages, allow_hosts) as url:
        yield f"{url}/"


def _page_values(name: str, look: Look) -> dict[str, Any]:
    """Return a look as plain values for the page, which never takes a text for markup."""
    return {
        "about": plain(name),
        "trouble": look.trouble,
        "models": [
            {
                "name": plain(model.model),
                "about": f"{model.role} over {plain(model.transport)}, epoch {model.epoch:016x}",
                "facts": list(facts(look, model).items()),
                "counts": list(counts(workers([model])).items()),
                "workers": [
                    {
                        "name": f"worker {worker.index}",
                        "state": worker.state,
                        "facts": list(worker_facts(worker).items()),
                    }
                    for _, worker in workers([model])
                ],
            }
            for model in look.models
        ],
    }

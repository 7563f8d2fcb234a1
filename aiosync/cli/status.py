"""``aiosync status``: what a weight server says, as tables of models, workers and refusals.

Must not import torch: people ask often.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aiosync._run import run
from aiosync.cli._common import (
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
from aiosync.errors import RemoteProtocolError

__all__ = ["make_table", "show_seconds", "status"]

Values = Mapping[str, Any]

_WIDTH = 200  # a pipe has none; rows stay whole
_ALL = 80  # from where there is room for every column
_WIDE = 90  # and from where there is some between the columns
_WORDS = ("model", "strategy", "trainer", "address", "state")  # the other columns are numbers


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
    with dialling("status", *given) as (client, _, _, exit_status):
        exit_status[0] = 1
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


def show_seconds(seconds: float) -> str:
    """Return a time span as people read it."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86400:.0f} d"


def _model_row(model: Values) -> dict[str, Any]:
    has = bool(model["version"])
    return {
        "model": model["model_id"],
        "strategy": model["strategy"],
        "version": model["version"] if has else "-",
        "size": show_nbytes(model["nbytes"]) if has else "-",
        "tensors": model["tensors"] if has else "-",
        "age": show_seconds(time.time() - model["updated_at"]) if has else "-",
        "workers": len(model["workers"]),
        "lag": max((worker["lag"] for worker in model["workers"]), default=0),
        "trainer": model["trainer"] or "-",
    }


def _worker_row(model: Values, worker: Values) -> dict[str, Any]:
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
        "since": show_seconds(seconds),
    }


def _tables(values: Values) -> RenderableType:
    """Return everything that a status says, as tables."""
    models = values["models"]
    parts: list[RenderableType] = [
        Text(
            f"{plain(values['url'])}, aiosync {plain(values['aiosync'])}, up "
            f"{show_seconds(values['uptime_seconds'])}, {plain(values['connections'])} "
            f"connections now, {plain(values['accepted'])} in all"
            f"{', with a store' if values['store'] else ''}"
        ),
        make_table(map(_model_row, models), narrow_without=("strategy", "tensors"))
        if models
        else Text("No models yet."),
    ]
    workers = [_worker_row(model, worker) for model in models for worker in model["workers"]]
    if workers:
        parts.append(make_table(workers, narrow_without=("sent", "since")))
    parts += [
        Text(plain(f"{model['model_id']}: {model['refusal']}", 2000))
        for model in models
        if model["refusal"]
    ]
    for what, counts in (
        ("Refused connections", values["refused"]),
        ("Links that ended", values["ended"]),
    ):
        listed = ", ".join(f"{plain(name)} {count}" for name, count in counts.items())
        if listed:
            parts.append(Text(f"{what}: {listed}"))
    return Group(*parts)


def make_table(
    rows: Iterable[Mapping[str, Any]],
    styles: Iterable[str] = itertools.repeat(""),
    narrow_without: Collection[str] = (),
) -> Table:
    """Return a table that folds texts where there is no room, and cuts no number.

    Args:
        rows: What is in each row, by the headings of the columns; at least one.
        styles: One for each row.
        narrow_without: Columns that are left out below 80 columns of a terminal.
    """
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    table = Table(pad_edge=False, padding=(0, 1 if width >= _WIDE else 0))
    for row, style in zip(rows, styles, strict=False):
        shown = {name: row[name] for name in row if width >= _ALL or name not in narrow_without}
        if not table.columns:
            for name in shown:
                words = name in _WORDS
                table.add_column(
                    name,
                    justify="left" if words else "right",
                    no_wrap=not words,
                    overflow="fold",
                    min_width=len(name),
                )
        table.add_row(*(escape(plain(each, 60)) for each in shown.values()), style=style)
    return table

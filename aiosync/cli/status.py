"""``aiosync status``: what a weight server says, as tables of models, workers and refusals.

Must not import torch: people ask often.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
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

__all__ = ["make_table", "models_table", "show_seconds", "status", "version_line"]

Values = Mapping[str, Any]

_WIDTH = 200  # a pipe has none; rows stay whole
_WIDE = 90  # where there is room between the columns


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
    with dialling("status", *given) as (server, _, exit_status):
        exit_status[0] = 1
        values = run(server.client().status(timeout=timeout))
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


def models_table(values: Values) -> Table:
    """Return one row for each model of a status, which ``WeightServer.status()`` returned."""
    table = make_table(
        "model", "strategy", ">version", ">size", ">tensors", ">age", ">workers", ">lag", "trainer"
    )
    for model in values["models"]:
        newest = ["-"] * 4
        if model["version"]:
            age = show_seconds(time.time() - model["updated_at"])
            nbytes, tensors = show_nbytes(model["nbytes"]), _text(model["tensors"])
            newest = [_text(model["version"]), nbytes, tensors, age]
        table.add_row(
            _text(model["model_id"]),
            _text(model["strategy"]),
            *newest,
            str(len(model["workers"])),
            str(_lag(model)),
            _text(model["trainer"] or "-"),
        )
    return table


def _workers_table(values: Values) -> Table:
    table = make_table(
        "model", ">worker", "address", ">pid", ">version", ">lag", ">sent", ">rate", ">since"
    )
    for model in values["models"]:
        for worker in model["workers"]:
            sent, seconds = worker["sent_nbytes"], worker["connected_seconds"]
            table.add_row(
                _text(model["model_id"]),
                *(_text(worker[name]) for name in ("worker_idx", "name", "pid", "version", "lag")),
                show_nbytes(sent),
                f"{show_nbytes(sent / max(seconds, 1e-3))}/s",
                show_seconds(seconds),
            )
    return table


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
        models_table(values) if models else Text("No models yet."),
    ]
    if any(model["workers"] for model in models):
        parts.append(_workers_table(values))
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


def _lag(model: Values) -> int:
    return max((worker["lag"] for worker in model["workers"]), default=0)


def version_line(model: Values) -> str:
    """Say in one line which version of a model there is, and who has it."""
    return (
        f"{plain(model['model_id'])}: version {model['version']} of epoch {model['epoch']}, "
        f"{show_nbytes(model['nbytes'])}, {len(model['workers'])} workers, lag {_lag(model)}"
    )


def make_table(*headings: str) -> Table:
    """Return a table that folds texts where there is no room, and cuts no number."""
    wide = shutil.get_terminal_size((_WIDTH, 0)).columns >= _WIDE
    table = Table(pad_edge=False, padding=(0, 1 if wide else 0))
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading[1:], justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    return table


def _text(value: Any) -> str:
    return escape(plain(value, 60))

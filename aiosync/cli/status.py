"""``aiosync status``: what a weight server says, as tables of models, workers and refusals.

Must not import torch: people ask often.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
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
    connection,
    errors_to,
    failing,
    plain,
    show_nbytes,
)

__all__ = ["models_table", "refusal_line", "status", "version_line"]

Values = Mapping[str, Any]

_WIDTH = 200  # a pipe has none; rows stay whole


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
    """Show what a weight server serves, by whom and to whom."""
    errors = errors_to()
    with failing("status", errors) as exit_status:
        server = connection(
            url, errors, token_file=token_file, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key
        )
        exit_status[0] = 1
        values = run(server.client().status(timeout=timeout))
        if as_json:
            typer.echo(json.dumps(values, indent=2, default=str))
        else:
            width = None if sys.stdout.isatty() else _WIDTH
            Console(highlight=False, width=width).print(_tables(values))


def _show_seconds(seconds: float) -> str:
    """Return a time span as people read it."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86400:.0f} d"


def models_table(values: Values) -> Table:
    """Return one row for each model of a status, which ``WeightServer.status()`` returned."""
    table = _table(
        "model", "strategy", ">version", ">size", ">tensors", ">age", ">workers", ">lag", "trainer"
    )
    for model in _maps(values, "models"):
        workers = _maps(model, "workers")
        age = time.time() - _number(model, "updated_at")
        empty = not model.get("version")
        table.add_row(
            _text(model.get("model_id")),
            _text(model.get("strategy")),
            "-" if empty else _text(model.get("version")),
            "-" if empty else show_nbytes(_number(model, "nbytes")),
            "-" if empty else _text(model.get("tensors")),
            "-" if model.get("updated_at") is None else _show_seconds(age),
            str(len(workers)),
            str(max((int(_number(worker, "lag")) for worker in workers), default=0)),
            _text(model.get("trainer") or "-"),
        )
    return table


def _workers_table(values: Values) -> Table:
    table = _table(
        "model", ">worker", "address", ">pid", ">version", ">lag", ">sent", ">rate", ">since"
    )
    for model in _maps(values, "models"):
        for worker in _maps(model, "workers"):
            sent, seconds = _number(worker, "sent_nbytes"), _number(worker, "connected_seconds")
            table.add_row(
                _text(model.get("model_id")),
                _text(worker.get("worker_idx")),
                _text(worker.get("name")),
                _text(worker.get("pid")),
                _text(worker.get("version")),
                _text(worker.get("lag")),
                show_nbytes(sent),
                f"{show_nbytes(sent / max(seconds, 1e-3))}/s",
                _show_seconds(seconds),
            )
    return table


def _tables(values: Values) -> RenderableType:
    """Return everything that a status says, as tables."""
    parts: list[RenderableType] = [
        Text(
            f"{plain(values.get('url'))}, aiosync {plain(values.get('aiosync'))}, up "
            f"{_show_seconds(_number(values, 'uptime_seconds'))}, "
            f"{_text(values.get('connections'))} connections now, "
            f"{_text(values.get('accepted'))} in all"
            f"{', with a store' if values.get('store') else ''}"
        )
    ]
    models = _maps(values, "models")
    parts.append(models_table(values) if models else Text("No models yet."))
    if any(_maps(model, "workers") for model in models):
        parts.append(_workers_table(values))
    parts += [Text(refusal_line(model)) for model in models if model.get("refusal")]
    for word in ("refused", "ended"):
        counts = values.get(word)
        if isinstance(counts, Mapping) and counts:
            listed = ", ".join(f"{plain(name)} {count}" for name, count in counts.items())
            what = "Refused connections" if word == "refused" else "Links that ended"
            parts.append(Text(f"{what}: {listed}"))
    return Group(*parts)


def version_line(model: Values) -> str:
    """Say in one line which version of a model there is, and who has it."""
    workers = _maps(model, "workers")
    lag = max((int(_number(worker, "lag")) for worker in workers), default=0)
    return (
        f"{plain(model.get('model_id'))}: version {model.get('version')} of epoch "
        f"{model.get('epoch')}, {show_nbytes(_number(model, 'nbytes'))}, "
        f"{len(workers)} workers, lag {lag}"
    )


def refusal_line(model: Values) -> str:
    """Say in one line what could not be stored last, and why."""
    why = plain(model.get("refusal") or "an older version", 2000)
    return (
        f"{plain(model.get('model_id'))}: not stored, so refused and not served "
        f"({model.get('refused')} so far): {why}"
    )


def _table(*headings: str) -> Table:
    table = Table(pad_edge=False)
    for heading in headings:
        table.add_column(
            heading.lstrip(">"),
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
        )
    return table


def _maps(values: Values, key: str) -> list[Values]:
    # A peer sent it: what is not as it should be is left out.
    found = values.get(key)
    items: Iterable[Any] = found if isinstance(found, list | tuple) else ()
    return [item for item in items if isinstance(item, Mapping)]


def _number(values: Values, key: str) -> float:
    found = values.get(key)
    return found if isinstance(found, int | float) else 0.0


def _text(value: Any) -> Text:
    return Text(plain(value, 60))

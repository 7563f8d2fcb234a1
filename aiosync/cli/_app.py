"""The commands and their options, on typer; what they do is in the modules beside this one.

Must not import gymnasium or matplotlib, nor, but inside a command, what imports them: ``--help``
has to be quick and to work without them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiosync.cli._bench import bench
from aiosync.cli._options import (
    Connection,
    ModelId,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    check_model_ids,
    errors_to,
    failing,
    read_token,
    tls_of,
)

__all__ = ["app", "bench", "demo", "doctor", "pull", "push", "run_app", "serve", "status"]

app = typer.Typer(
    name="aiosync",
    help="Move a policy's weights from a trainer to its inference workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class _TransportOption(str, Enum):  # noqa: UP042  # typer shows str values of enums only
    pipe = "pipe"
    shm = "shm"


def run_app(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; see :func:`aiosync.cli.main`."""
    try:
        app(args, prog_name="aiosync")  # also of "python -m aiosync", for completion
    except SystemExit as exc:  # how typer ends every command, also after it showed wrong usage
        return exc.code if isinstance(exc.code, int) else 0
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        from aiosync._version import __version__

        sys.stdout.write(f"aiosync {__version__}\n")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Move a policy's weights from a trainer to its inference workers."""


@app.command()
def demo(
    transport: Annotated[
        _TransportOption, typer.Option(help="Pipes, or one shared-memory segment.")
    ] = _TransportOption.shm,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    sync: Annotated[
        bool, typer.Option("--sync", help="Use the blocking facade, aiosync.sync.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest training time; ends earlier when solved.")
    ] = 50.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks and environments.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Save a plot of return and lag over time.")
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write a summary as JSON; - is stdout."),
    ] = None,
) -> None:
    """Train CartPole with workers that aiosync keeps on the newest policy.

    One trainer process and some worker processes; the workers collect episodes without pause
    and aiosync gives them every new version of the policy. Exits with status 1 if the
    return did not rise.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")
    from aiosync.cli._demo import DemoOptions, run_demo

    options = DemoOptions(transport.value, workers, sync, seconds, seed, plot, json_to)
    raise typer.Exit(run_demo(options))


app.command()(bench)


@app.command()
def doctor() -> None:
    """Show versions and check what aiosync needs from this machine.

    Exits with status 1 if something that aiosync needs is missing.
    """
    from aiosync.cli._doctor import examine

    console = Console(highlight=False)
    checks = examine()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in checks:
        mark = {True: "[green]ok[/green]", False: "[red]FAILED[/red]", None: ""}[check.ok]
        table.add_row(mark, check.name, escape(check.text))
    console.print(table)
    failed = [check.name for check in checks if check.ok is False]
    if failed:
        console.print(f"Failed checks: {', '.join(failed)}.")
        raise typer.Exit(1)
    console.print("Everything that aiosync needs is available.")


@app.command()
def serve(
    listen: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Where to listen: tcp://host:port (0: any port) or unix:///path."
        ),
    ],
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_verify_clients: Annotated[
        bool,
        typer.Option(
            "--tls-verify-clients", help="Refuse peers without a certificate signed by --tls-ca."
        ),
    ] = False,
    model_id: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", show_default=False, help="Serve only this model; repeatable."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Keep the newest versions there, across restarts.",
        ),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of links at a time.")
    ] = 1024,
) -> None:
    """Run a weight server: trainers push to it, workers pull from it.

    Prints its address as one line, then serves until Ctrl-C or SIGTERM; a second one ends it at
    once. Without a token or TLS it listens on this host only.
    """
    errors = errors_to()
    with failing("serve", errors):
        check_model_ids(model_id or [])
        import aiosync
        from aiosync.cli._serve import run_server
        from aiosync.server import WeightServer

        token = read_token(token_file, errors)
        tls = tls_of(ca=tls_ca, cert=tls_cert, key=tls_key, verify_clients=tls_verify_clients)

        def make() -> WeightServer:
            return WeightServer(
                listen,
                token=token,
                tls=tls,
                model_ids=model_id or None,
                store=store,
                max_connections=max_connections,
            )

        raise typer.Exit(aiosync.run(run_server(make, errors)))


def _needs_safetensors(path: Path) -> None:
    if path.suffix.lower() == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")


@app.command()
def push(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".safetensors, .pt, .pth, .bin or .ckpt")
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the weight server.")],
    model_id: ModelId = "policy",
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 120.0,
) -> None:
    """Send the weights of a file to a weight server, as a new version.

    Every worker of that model gets it, whatever its strategy. It counts as a restarted trainer:
    version 1 of a new epoch.
    """
    _needs_safetensors(file)
    errors = errors_to()
    with failing("push", errors) as status:
        check_model_ids([model_id])
        token = read_token(token_file, errors)
        certificates = tls_of(wanted=tls, ca=tls_ca, cert=tls_cert, key=tls_key)
        connection = Connection(url, token, certificates)
        connection.check()
        from aiosync.cli._transfer import check_source, push_file, transfer_bar

        check_source(file)
        status[0] = 1
        with transfer_bar(errors, f"push {model_id}") as show:
            done = push_file(
                file,
                connection,
                model_id=model_id,
                timeout=timeout,
                show=show,
                note=lambda text: errors.print(f"Note: {text}", markup=False),
            )
        typer.echo(done.describe("Pushed"))


@app.command()
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="A weight server, or a trainer.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".safetensors, .pt, .pth, .bin or .ckpt")
    ],
    model_id: ModelId = "policy",
    min_version: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, metavar="N", help="Wait until there is at least this version."
        ),
    ] = 0,
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 120.0,
) -> None:
    """Get the newest weights of a model and write them to a file.

    Waits for a first version. The file is replaced in one step, once everything is there.
    """
    _needs_safetensors(file)
    errors = errors_to()
    with failing("pull", errors) as status:
        check_model_ids([model_id])
        token = read_token(token_file, errors)
        certificates = tls_of(wanted=tls, ca=tls_ca, cert=tls_cert, key=tls_key)
        connection = Connection(url, token, certificates)
        connection.check()
        from aiosync.cli._transfer import pull_file, transfer_bar
        from aiosync.cli.files import check_target

        check_target(file)
        status[0] = 1
        with transfer_bar(errors, f"pull {model_id}") as show:
            done = pull_file(
                file,
                connection,
                model_id=model_id,
                min_version=min_version,
                timeout=timeout,
                show=show,
            )
        typer.echo(done.describe("Pulled"))


@app.command()
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
        token = read_token(token_file, errors)
        certificates = tls_of(wanted=tls, ca=tls_ca, cert=tls_cert, key=tls_key)
        connection = Connection(url, token, certificates)
        connection.check()
        import aiosync
        from aiosync.cli._status import show_status
        from aiosync.server import WeightClient

        exit_status[0] = 1
        client = WeightClient(url, token=token, tls=certificates)
        values = aiosync.run(client.status(timeout=timeout))
        if as_json:
            sys.stdout.write(json.dumps(values, indent=2, default=str) + "\n")
            sys.stdout.flush()
        else:
            width = None if sys.stdout.isatty() else 200  # a pipe has no width; keep rows whole
            Console(highlight=False, width=width).print(show_status(values))

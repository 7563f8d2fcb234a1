"""``aiosync serve``: runs a weight server until a signal ends it, and prints its new versions.

Imports torch once the options are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aiosync.cli._common import (
    INTERRUPTED,
    AllowHost,
    Quiet,
    Streams,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    check_model_ids,
    errors_to,
    failing,
    plain,
    read_token,
    show_nbytes,
    status_line,
    tls_of,
)
from aiosync.cli.plan import as_bits
from aiosync.cli.status import serve_page

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from aiosync.events import SyncStats
    from aiosync.server import WeightServer

__all__ = ["serve"]


class Delta(enum.StrEnum):
    """Choices of ``--delta``."""

    OFF = "off"
    AUTO = "auto"
    ALWAYS = "always"


_POLL_SECONDS = 0.25
_PAGE_SECONDS = 1.0


def serve(
    listen: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Where to listen: tcp://host:port (0: any port) or unix:///path."
        ),
    ],
    token_file: TokenFile = None,
    pull_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="File with a second token, of those who may pull and not push.",
        ),
    ] = None,
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
    store_deltas: Annotated[
        bool, typer.Option("--store-deltas", help="Store only what changes, where that is little.")
    ] = False,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Pass on the versions of another server, or of a trainer. Needs --model-id. "
            "Repeated: of the first that is reached.",
        ),
    ] = None,
    upstream_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="File with the token of the upstream, if it is another one.",
        ),
    ] = None,
    upstream_tls: Annotated[
        bool,
        typer.Option(
            "--upstream-tls",
            help="Use TLS to the upstream; without --upstream-tls-ca, the system's authorities are "
            "trusted.",
        ),
    ] = False,
    upstream_tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="PEM file of the authorities to trust there. Implies TLS.",
        ),
    ] = None,
    upstream_tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="PEM file of the certificate to show to the upstream.",
        ),
    ] = None,
    upstream_tls_key: TlsKey = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Where others reach this server, if --listen does not say so.",
        ),
    ] = None,
    streams: Streams = 1,
    fanout: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Number of workers of a model from which on others are sent on to servers that "
            "follow this one.",
        ),
    ] = None,
    delta: Annotated[
        Delta, typer.Option(help="Which updates travel as changes to an older one.")
    ] = Delta.OFF,
    limit_rate: Annotated[
        float | None,
        typer.Option(
            parser=as_bits,
            metavar="RATE",
            show_default=False,
            help="What each link sends at most in a second: 100Mbit.",
        ),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of links at a time.")
    ] = 1024,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="Answer GET /metrics, /healthz and /readyz there. Needs the extra 'metrics'.",
        ),
    ] = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="Show to whoever reaches it there, on a page, what `aiosync top` shows.",
        ),
    ] = None,
    allow_host: AllowHost = None,
    quiet: Quiet = False,
) -> None:
    """Run a weight server: trainers push to it, workers pull from it.

    Prints its address as one line, then serves until Ctrl-C or SIGTERM; a second one ends it at
    once. Without a token or TLS it listens on this host only.

    - `aiosync serve --listen unix:///tmp/weights`
    - `aiosync serve --listen tcp://0.0.0.0:7000 --token-file token`
    - `aiosync serve --listen unix:///tmp/here --upstream tcp://there:7000 --model-id policy`
    """
    errors = errors_to()
    with failing("serve", errors):
        check_model_ids(model_id or [])
        import aiosync
        from aiosync.server import WeightServer
        from aiosync.transports.credentials import Credentials

        token, pull_token = read_token(token_file, errors), None
        if pull_token_file is not None:
            pull_token = read_token(pull_token_file, errors, "--pull-token-file")
        upstream_token = token if upstream else None
        if upstream_token_file is not None:
            upstream_token = read_token(upstream_token_file, errors, "--upstream-token-file")
        tls = tls_of(ca=tls_ca, cert=tls_cert, key=tls_key, verify_clients=tls_verify_clients)
        dialled = tls_of(
            wanted=upstream_tls,
            ca=upstream_tls_ca,
            cert=upstream_tls_cert,
            key=upstream_tls_key,
            option="--upstream-tls",
        )
        Credentials(tls=dialled).dialling_context()

        def make() -> WeightServer:
            return WeightServer(
                listen,
                token=token,
                pull_token=pull_token,
                tls=tls,
                model_ids=model_id or None,
                store=store,
                store_deltas=store_deltas,
                max_connections=max_connections,
                delta=delta.value,
                limit_rate=None if limit_rate is None else max(1, int(limit_rate / 8)),
                upstream=upstream or None,
                upstream_token=upstream_token,
                upstream_tls=dialled,
                streams=streams,
                fanout=fanout,
                advertise=advertise,
            )

        shown = None if quiet else store
        serving = _serve(make, metrics, dashboard, allow_host or (), errors, shown)
        raise typer.Exit(aiosync.run(serving))


async def _serve(
    make: Callable[[], WeightServer],
    metrics: str | None,
    dashboard: str | None,
    allow_hosts: Sequence[str],
    errors: Console,
    store: Path | None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until the server breaks.

    Prints the address, and nothing else, as the first line of stdout, because scripts wait for it.

    Args:
        make: Makes the server.
        metrics: Address of the page of metrics, if there is to be one.
        dashboard: Address of the dashboard, if there is to be one.
        allow_hosts: Names under which these pages may be asked for.
        errors: Console on stderr.
        store: The server's store, if its reading is to be shown.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C; 1 after either if the server could not
        store a version during its shutdown.
    """
    with _signals() as came:
        server, refused_before_shutdown = make(), 0
        try:
            async with contextlib.AsyncExitStack() as stack:
                with status_line(errors, store is None) as say:
                    showing = asyncio.ensure_future(_show_reading(server, store, say))
                    stack.callback(showing.cancel)
                    await stack.enter_async_context(server)
                    showing.cancel()
                if metrics is not None:
                    from aiosync.metrics import Metrics, serve

                    pages = serve(Metrics(server), metrics, allow_hosts=allow_hosts)
                    url = await stack.enter_async_context(pages)
                    errors.print(f"Metrics at {url}/metrics", markup=False)
                if dashboard is not None:

                    async def ask() -> Sequence[SyncStats]:
                        return list(server.stats().values())

                    page = serve_page(dashboard, server.url, ask, _PAGE_SECONDS, allow_hosts)
                    url = await stack.enter_async_context(page)
                    errors.print(f"Dashboard at {url}", markup=False)
                typer.echo(server.url)
                try:
                    await _watch(server, errors)
                finally:
                    refused_before_shutdown = _count_refused(server)
        except asyncio.CancelledError:
            if not came:
                raise
    if came == [signal.SIGINT]:
        errors.print("Stopped by Ctrl-C.")
    if _count_refused(server) > refused_before_shutdown:
        return 1
    return INTERRUPTED if came == [signal.SIGINT] else 0


async def _show_reading(
    server: WeightServer, store: Path | None, say: Callable[[str], None]
) -> None:
    """Say how much of its store the server has read, until this task is cancelled."""
    if store is None:
        return
    try:
        nbytes = sum(each.stat().st_size for each in os.scandir(store))
    except OSError:
        # The store is new, or being tidied up. The server reports one that it cannot use.
        return
    started = time.monotonic()
    while True:
        models = server.status()["models"]
        read = show_nbytes(sum(model["nbytes"] for model in models))
        say(
            f"reads the store {store}: {len(models)} models, {read} of {show_nbytes(nbytes)}, "
            f"{time.monotonic() - started:.0f} s"
        )
        await asyncio.sleep(_POLL_SECONDS)


def _count_refused(server: WeightServer) -> int:
    """Return the number of versions that the server refused, as it could not store them."""
    return sum(model["refused"] for model in server.status()["models"])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Cancel this task at the first SIGINT or SIGTERM, and end the process at the second.

    The handlers are Python's and not the loop's, because Python's run although the loop is busy.

    Yields:
        A list that is empty until the first signal, and then holds that signal's number.
    """
    came: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def handle(number: int, _frame: FrameType | None) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)
        loop.call_soon_threadsafe(task.cancel)

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _watch(server: WeightServer, errors: Console) -> None:
    """Print a line for each new version of a model until the server ends.

    Polls the server, so versions that follow each other within 0.25 s may share a line.
    """
    seen: dict[str, tuple[int, int]] = {}

    def say() -> None:
        for model in server.status()["models"]:
            now = model["epoch"], model["version"]
            if seen.get(model["model_id"], (0, 0)) != now:
                seen[model["model_id"]] = now
                lag = max((worker["lag"] for worker in model["workers"]), default=0)
                errors.print(
                    f"{time.strftime('%H:%M:%S')} {plain(model['model_id'])}: version {now[1]} of "
                    f"epoch {now[0]:016x}, {show_nbytes(model['nbytes'])}, {len(model['workers'])} "
                    f"workers, lag {lag}",
                    markup=False,
                )

    ended = asyncio.ensure_future(server.wait_closed())
    try:
        while not ended.done():
            say()
            await asyncio.wait({ended}, timeout=_POLL_SECONDS)
        await ended
    finally:
        ended.cancel()
        say()

"""``aiosync push`` sends a file to a weight server; ``aiosync pull`` writes one from it.

A command transfers one version of one model. Imports torch once the options are right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiosync.cli._common import (
    ModelId,
    Quiet,
    Streams,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    dialling,
    plain,
    show_nbytes,
    shows_progress,
    status_line,
)
from aiosync.errors import (
    ConfigError,
    ConnectError,
    PartialSyncError,
    RemoteProtocolError,
    TransportError,
)
from aiosync.protocol import MAX_VERSION

if TYPE_CHECKING:
    from rich.console import Console

    from aiosync.cli.files import FileStates
    from aiosync.server import WeightClient

__all__ = ["pull", "push"]

_REDRAW_SECONDS = 0.1
# Factor by which the tensors may exceed the file: tensors in a file may be views of one memory.
_MAX_VIEWS = 8


def push(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help=".safetensors, .pt, .pth, .bin, .ckpt, or a folder of safetensors."
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the weight server.")],
    model_id: ModelId = "policy",
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Go on although another push came while the link was lost."
        ),
    ] = False,
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    streams: Streams = 1,
    timeout: Timeout = 120.0,
    quiet: Quiet = False,
) -> None:
    """Send the weights of a file, or of a folder of shards, to a weight server as a new version.

    Every worker of that model gets it, whatever its strategy. It counts as a restarted trainer:
    version 1 of a new epoch.

    - `aiosync push policy.pt tcp://10.0.0.5:7000`
    - `aiosync push critic.pt unix:///tmp/weights --model-id critic`
    """
    given = (url, token_file, tls, tls_ca, tls_cert, tls_key)
    with dialling("push", *given, model_id) as (client, options, errors, accept_options):
        with _transfer_bar(errors, quiet, f"push {model_id}", f"reads {file.name}") as show:
            import aiosync
            from aiosync.cli.files import file_states, load_weights

            source = file, file_states(file)
            weights = load_weights(
                file, note=lambda text: errors.print(f"Note: {text}", markup=False)
            )
            accept_options()
            options |= {"take_over": take_over, "streams": streams}
            done = aiosync.run(
                _push(weights, source, client, url, options, model_id, timeout, show)
            )
        _say_done("Pushed", model_id, *done)


async def _push(
    weights: dict[str, Any],
    source: tuple[Path, FileStates],
    client: WeightClient,
    url: str,
    options: dict[str, Any],
    model_id: str,
    timeout: float,
    show: Callable[[int, int], None],
) -> tuple[int, int, int, float]:
    """Send the weights of a file; return epoch, version, bytes and seconds.

    Args:
        weights: The contents of the file.
        source: Path of the file or folder, and the states of its files before they were read.
        client: Client for ``url``.
        url: Address of the weight server.
        options: Keyword arguments of the scheme.
        model_id: Name of the model.
        timeout: Seconds for the whole call.
        show: Called with the bytes sent so far, and with how many there are.

    Raises:
        ConfigError: The file announces larger tensors than it can hold, or was written to
            meanwhile; or the server follows another one.
        ConnectError: Another trainer is pushing the model.
    """
    from aiosync.cli.files import check_unchanged, stored_nbytes
    from aiosync.rendezvous.handshake import ANY_STRATEGY
    from aiosync.schemes import TCPWeightSyncScheme

    loop = asyncio.get_running_loop()
    started = loop.time()

    def left() -> float:
        return max(0.001, timeout - (loop.time() - started))

    # Another file may take the place of this one from the first wait on.
    nbytes = _check_size(weights, source[0], stored_nbytes(source[0]))
    # The scheme would dial until the timeout if another trainer pushed the model, so ask first.
    status = await client.status(timeout=timeout)
    _refuse_if_taken(status, model_id)
    scheme = TCPWeightSyncScheme(
        url, "state_dict", dial="both", timeout=timeout, reconnect=timeout, **options
    )
    # A file does not record the strategy that extracted its weights.
    scheme.strategy_str = ANY_STRATEGY
    scheme.init_on_sender(model_id, num_workers=1)

    async def show_progress() -> None:
        while True:
            show(min(nbytes, scheme.stats().wire_nbytes), nbytes)
            await asyncio.sleep(_REDRAW_SECONDS)

    async with scheme:
        showing = loop.create_task(show_progress())
        try:
            await scheme.connect(timeout=left())
            # The tensors are views of the mapped file.
            check_unchanged(source[1])
            await scheme.send(weights, timeout=left())
        except PartialSyncError as exc:
            error = exc.failed[0]
            if scheme.version == 0 or not isinstance(error, TransportError):
                raise error from exc
            # The link was lost. The scheme dials again, and the server tells it which part of the
            # update is there already.
            await scheme.wait_for_version(scheme.version, timeout=left())
        finally:
            showing.cancel()
        check_unchanged(source[1])
        return scheme.epoch, scheme.version, nbytes, loop.time() - started


def _refuse_if_taken(status: Mapping[str, Any], model_id: str) -> None:
    """Raise if a server follows another one, or if another trainer is pushing the model to it."""
    if status.get("upstream"):
        raise ConfigError(f"that server follows {status['upstream']}: push there")
    try:
        given = [each for each in status.get("models") or () if each.get("model_id") == model_id]
        trainers = [each["trainer"] for each in given if each.get("trainer")]
    except (TypeError, AttributeError) as exc:
        raise RemoteProtocolError("the server sent a status of another release") from exc
    for trainer in trainers:
        raise ConnectError(
            f"{trainer} is already pushing model {model_id!r} to this server: end it first, or "
            "push under another --model-id"
        )


def _check_size(weights: dict[str, Any], file: Path, held: int) -> int:
    """Return the bytes of the weights; raise if they are more than a file of ``held`` bytes has."""
    from aiosync.tensors import Layout, collect

    layout = Layout.plan(collect(weights).leaves)
    nbytes, largest = layout.nbytes, max(layout.manifest.leaves, key=lambda leaf: leaf.nbytes)
    if largest.nbytes > held or nbytes > _MAX_VIEWS * held:
        raise ConfigError(
            f"{file}: {largest.name!r} has {largest.nbytes} bytes, all tensors {nbytes}: more than "
            f"the file holds, which has {held}. Save tensor.contiguous() of what was expanded"
        )
    return nbytes


def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="A weight server, or a trainer.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=".safetensors, .pt, .pth, .bin, .ckpt, or a folder for model.safetensors.",
        ),
    ],
    model_id: ModelId = "policy",
    min_version: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_VERSION,
            metavar="N",
            help="Wait until there is at least this version. Each push is version 1.",
        ),
    ] = 0,
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    streams: Streams = 1,
    timeout: Timeout = 120.0,
    quiet: Quiet = False,
) -> None:
    """Get the newest weights of a model and write them to a file.

    Waits for a first version. The file is replaced in one step, once everything is there.

    - `aiosync pull tcp://10.0.0.5:7000 policy.safetensors`
    - `aiosync pull unix:///tmp/weights policy.pt --timeout 5`
    """
    given = (url, token_file, tls, tls_ca, tls_cert, tls_key)
    dialled = dialling("pull", *given, model_id, streams=streams)
    with dialled as (client, _, errors, accept_options):
        with _transfer_bar(errors, quiet, f"pull {model_id}", f"waits for {url}") as show:
            import aiosync
            from aiosync.cli.files import check_target, save_weights

            check_target(file)
            accept_options()
            started = time.monotonic()
            got = aiosync.run(
                client.pull(model_id, min_version=min_version, timeout=timeout, progress=show)
            )
            seconds = time.monotonic() - started
        about = {"model_id": model_id, "epoch": str(got.epoch), "version": str(got.version)}
        with status_line(errors, quiet) as say:
            say(f"pull {model_id} writes {show_nbytes(got.nbytes)} to {file.name}")
            save_weights(file, got.mapping(), metadata=about)
        _say_done("Pulled", model_id, got.epoch, got.version, got.nbytes, seconds, got.reconnects)


def _say_done(
    verb: str,
    model_id: str,
    epoch: int,
    version: int,
    nbytes: int,
    seconds: float,
    reconnects: int = 0,
) -> None:
    """Print one line about the finished transfer."""
    rate = nbytes / 1e6 / max(seconds, 1e-9)
    typer.echo(
        f"{verb} {plain(model_id)}: version {version} of epoch {epoch:016x}, "
        f"{show_nbytes(nbytes)} "
        f"({nbytes} bytes) in {seconds:.2f} s, {rate:.1f} MB/s"
        f"{f', {reconnects} reconnects' if reconnects else ''}"
    )


@contextmanager
def _transfer_bar(
    console: Console, quiet: bool, title: str, waits: str
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with bytes and rate if stderr is a terminal. Starts no thread.

    Args:
        console: Console on stderr.
        quiet: True if the user wants no progress.
        title: Text before the bar.
        waits: Text in place of the amount until the first bytes.

    Yields:
        A function that updates the bar; it takes the bytes done and the bytes in all.
    """
    if not shows_progress(quiet):
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TransferSpeedColumn

    amount = TextColumn("{task.fields[amount]}", markup=False)
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), amount, TransferSpeedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=None, amount=waits)
        progress.refresh()
        next_at = 0.0

        def show(done: int, total: int) -> None:
            nonlocal next_at
            if time.monotonic() >= next_at or done >= total:
                amount = f"{show_nbytes(done)} of {show_nbytes(total)}"
                progress.update(task, completed=done, total=total, amount=amount)
                progress.refresh()
                next_at = time.monotonic() + _REDRAW_SECONDS

        yield show

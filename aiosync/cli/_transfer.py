"""What ``aiosync push`` and ``aiosync pull`` do: one file, one version, one server.

Must not import typer.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import aiosync
from aiosync.cli._options import plain
from aiosync.cli._status import show_nbytes
from aiosync.cli.files import SAFETENSORS, TORCH, check_target, load_weights, save_weights
from aiosync.errors import (
    AckTimeout,
    AiosyncError,
    ApplyError,
    AuthError,
    ConfigError,
    ConnectError,
    ConnectTimeout,
    PartialSyncError,
    TransportError,
)
from aiosync.rendezvous.handshake import ANY_STRATEGY
from aiosync.schemes.inside import sender_of
from aiosync.schemes.tcp import TCPWeightSyncScheme
from aiosync.server import WeightClient
from aiosync.tensors import Layout, collect

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from aiosync.cli._options import Connection
    from aiosync.sender import WeightSender

__all__ = ["Transfer", "check_source", "pull_file", "push_file", "transfer_bar"]

Show: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done, and with how many there are."""

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was done.

    Attributes:
        model_id: Which model.
        epoch: Epoch of the version.
        version: Its number.
        nbytes: Bytes of its tensors.
        seconds: From the first connection to the last answer.
        reconnects: How often the link was lost meanwhile.
    """

    model_id: str
    epoch: int
    version: int
    nbytes: int
    seconds: float
    reconnects: int = 0

    def describe(self, verb: str) -> str:
        """Say it in one line."""
        rate = self.nbytes / 1e6 / max(self.seconds, 1e-9)
        again = f", {self.reconnects} reconnects" if self.reconnects else ""
        return (
            f"{verb} {plain(self.model_id)}: version {self.version} of epoch {self.epoch}, "
            f"{show_nbytes(self.nbytes)} ({self.nbytes} bytes) in {self.seconds:.2f} s, "
            f"{rate:.1f} MB/s{again}"
        )


@contextlib.contextmanager
def transfer_bar(console: Console, title: str) -> Iterator[Show]:
    """Show a bar with bytes and rate on a terminal, and nothing elsewhere. No thread is started.

    Args:
        console: On stderr.
        title: What is transferred.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=None)
        progress.refresh()
        next_at = 0.0

        def show(done: int, total: int) -> None:
            nonlocal next_at
            progress.update(task, completed=done, total=total)
            if time.monotonic() >= next_at or done >= total:
                progress.refresh()
                next_at = time.monotonic() + _LOOK_SECONDS

        yield show


def check_source(path: Path) -> None:
    """Find what is wrong with the name of a file of weights, before it is read.

    Raises:
        ConfigError: There is no such file, it is a directory, or its ending is unknown.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: this is a directory; push one of the files in it")
    known = SAFETENSORS + TORCH
    if path.suffix.lower() not in known:
        raise ConfigError(f"{path}: the name of the file must end in one of: {', '.join(known)}")
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")


# -- push -------------------------------------------------------------------------------------


def push_file(
    path: Path,
    connection: Connection,
    *,
    model_id: str,
    timeout: float,
    show: Show,
    note: Callable[[str], None],
) -> Transfer:
    """Send the weights of a file to a weight server, as the first version of a new epoch.

    Args:
        path: See :func:`check_source`.
        connection: The server.
        model_id: Name of the model there.
        timeout: Seconds for everything but the reading of the file.
        show: Told how far it is.
        note: Called with a sentence where there was a choice.

    Raises:
        ConfigError: The file is damaged or holds no weights; the server does not take them.
        AiosyncError: They did not get there; the message says why.
    """
    weights = load_weights(path, note=note)
    nbytes = Layout.plan(collect(weights)).nbytes
    return aiosync.run(_push(weights, nbytes, connection, model_id, timeout, show))


async def _push(
    weights: Mapping[str, Any],
    nbytes: int,
    connection: Connection,
    model_id: str,
    timeout: float,
    show: Show,
) -> Transfer:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await _check_server(connection, model_id, timeout)
    scheme = TCPWeightSyncScheme(
        connection.url,
        "state_dict",
        dial="both",
        token=connection.token,
        tls=connection.tls,
        timeout=timeout,
        reconnect=timeout,
    )
    scheme.strategy_str = ANY_STRATEGY  # a file says nothing of how its weights were extracted
    scheme.init_on_sender(model_id, num_workers=1)

    def left() -> float:
        return max(0.001, timeout - (loop.time() - started))

    async with scheme:
        await scheme.connect(timeout=left())
        sender = sender_of(scheme)
        assert sender is not None
        looking = loop.create_task(_look(sender, nbytes, show))
        try:
            report = await scheme.send(weights, timeout=left())
            epoch, version = report.epoch, report.version
        except PartialSyncError as exc:
            error = exc.failed[0]
            if not isinstance(error, TransportError):
                raise error from exc
            # The scheme dials again, and the server knows what it has already.
            epoch, version = sender.workers.clock.epoch, exc.version or 1
            await _until_applied(sender, version, left(), timeout, error)
        finally:
            looking.cancel()
            await asyncio.wait({looking})
    show(nbytes, nbytes)
    return Transfer(model_id, epoch, version, nbytes, loop.time() - started)


async def _check_server(connection: Connection, model_id: str, timeout: float) -> None:
    """Find out at once what would otherwise be tried again until the time is up.

    Raises:
        AiosyncError: Nobody is there, it is not a weight server, or it does not take this model.
    """
    client = WeightClient(connection.url, token=connection.token, tls=connection.tls)
    status = await client.status(timeout=timeout)
    allowed = status.get("model_ids")
    if isinstance(allowed, list) and model_id not in allowed:
        known = ", ".join(map(str, allowed))
        raise ConfigError(f"this server does not serve model {model_id!r}; it serves: {known}")
    for model in status.get("models") or ():
        if model.get("model_id") == model_id and model.get("trainer"):
            raise ConnectError(
                f"{model['trainer']} is already pushing model {model_id!r} to this server: end it "
                "first, or push under another --model-id"
            )


async def _look(sender: WeightSender, nbytes: int, show: Show) -> None:
    while True:
        link = sender.links.get(0)
        if link is not None and link.stream is not None:
            show(min(nbytes, link.stream.sent_nbytes + link.stream.resumed_nbytes), nbytes)
        await asyncio.sleep(_LOOK_SECONDS)


async def _until_applied(
    sender: WeightSender, version: int, left: float, timeout: float, lost: AiosyncError
) -> None:
    """Wait until the server has a version whose link was lost."""
    server = sender.workers.record(0)

    def done() -> bool:
        # Refused, or nobody dials any more.
        if isinstance(server.error, ApplyError | AuthError | ConfigError | ConnectTimeout):
            raise server.error
        return server.link is not None and server.link.visible >= version

    late = AckTimeout(
        f"the link to the server was lost ({lost}), and it did not receive everything within "
        f"{timeout:g} s",
        version=version,
    )
    await sender.wait_until(done, timeout=left, late=late)


# -- pull -------------------------------------------------------------------------------------


def pull_file(
    path: Path,
    connection: Connection,
    *,
    model_id: str,
    min_version: int,
    timeout: float,
    show: Show,
) -> Transfer:
    """Get the newest version of a model and write it to a file, in one step.

    Args:
        path: See :func:`aiosync.cli.files.save_weights`.
        connection: A weight server, or a trainer that listens.
        model_id: Name of the model there.
        min_version: The lowest acceptable version.
        timeout: Seconds for everything but the writing of the file.
        show: Told how far it is.

    Raises:
        ConfigError: The server has no such model, or the file cannot be written.
        AiosyncError: The weights did not arrive; the message says why. The old file stays.
        SystemExit: SIGTERM or SIGHUP came while the file was written; the old file stays.
    """
    check_target(path)
    client = WeightClient(connection.url, token=connection.token, tls=connection.tls)
    started = time.monotonic()
    pulled = aiosync.run(
        client.pull(model_id, min_version=min_version, timeout=timeout, progress=show)
    )
    seconds = time.monotonic() - started
    about = {
        "model_id": pulled.model_id,
        "epoch": str(pulled.epoch),
        "version": str(pulled.version),
    }
    with _ending_in_order():
        save_weights(path, pulled.mapping(), metadata=about)
    return Transfer(
        pulled.model_id, pulled.epoch, pulled.version, pulled.nbytes, seconds, pulled.reconnects
    )


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: what it began is cleaned up.

    The second signal ends the process at once. One that is ignored, as with nohup, stays so.

    Raises:
        SystemExit: One came; the status is 128 and its number.
    """
    came = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = number
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # others cannot handle signals
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is signal.SIG_DFL:
                before[each] = signal.signal(each, end)
    try:
        yield
    except Exception:  # goes on to the caller, unless it only follows from the signal
        if came:
            raise SystemExit(128 + came) from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

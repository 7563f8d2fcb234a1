"""``aiosync pull``: the newest version as a file. Imports torch once the options are right."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aiosync.cli._common import (
    ModelId,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    check_model_ids,
    connection,
    errors_to,
    failing,
    say_done,
    transfer_bar,
)

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["pull"]


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
    errors = errors_to()
    with failing("pull", errors) as exit_status:
        check_model_ids([model_id])
        server = connection(
            url, errors, token_file=token_file, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key
        )
        import aiosync
        from aiosync.cli.files import check_target, save_weights

        check_target(file)
        exit_status[0] = 1
        with transfer_bar(errors, f"pull {model_id}") as show:
            started = time.monotonic()
            getting = server.client().pull(
                model_id, min_version=min_version, timeout=timeout, progress=show
            )
            got = aiosync.run(getting)
            seconds = time.monotonic() - started
        about = {"model_id": model_id, "epoch": str(got.epoch), "version": str(got.version)}
        with _ending_in_order():
            save_weights(file, got.mapping(), metadata=about)
        say_done("Pulled", model_id, got.epoch, got.version, got.nbytes, seconds, got.reconnects)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: what it began is cleaned up.

    The second signal ends the process at once. One that is ignored, as with nohup, stays so.

    Raises:
        SystemExit: One came; the status is 128 and its number.
    """
    ended: SystemExit | None = None

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        ended = SystemExit(128 + number)
        raise ended

    before = {}
    if threading.current_thread() is threading.main_thread():  # others cannot handle signals
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is signal.SIG_DFL:
                before[each] = signal.signal(each, end)
    try:
        yield
    except Exception:  # goes on to the caller, unless it only follows from the signal
        if ended is None:
            raise
        raise ended from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

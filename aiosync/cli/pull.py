"""``aiosync pull``: the newest version as a file. Imports torch once the options are right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from aiosync.cli._common import (
    ModelId,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    dialling,
    say_done,
    transfer_bar,
)

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
            min=0,
            max=2**63 - 1,
            metavar="N",
            help="Wait until there is at least this version. Each push is version 1.",
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

    - `aiosync pull tcp://10.0.0.5:7000 policy.safetensors`
    - `aiosync pull unix:///tmp/weights policy.pt --timeout 5`
    """
    given = (url, token_file, tls, tls_ca, tls_cert, tls_key)
    with dialling("pull", *given, model_id) as (server, errors, exit_status):
        waits = f"waits for {url}"
        with transfer_bar(errors, f"pull {model_id}", waits) as show:  # torch takes its time
            import aiosync
            from aiosync.cli.files import check_target, save_weights

            check_target(file)
            exit_status[0] = 1
            started = time.monotonic()
            getting = server.client().pull(
                model_id, min_version=min_version, timeout=timeout, progress=show
            )
            got = aiosync.run(getting)
            seconds = time.monotonic() - started
        about = {"model_id": model_id, "epoch": str(got.epoch), "version": str(got.version)}
        save_weights(file, got.mapping(), metadata=about)
        say_done("Pulled", model_id, got.epoch, got.version, got.nbytes, seconds, got.reconnects)

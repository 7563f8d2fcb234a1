"""``aiosync push``: one file, one version, one server. Imports torch once the options are right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiosync.cli._common import (
    Connection,
    ModelId,
    Show,
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
from aiosync.errors import ConnectError, PartialSyncError, TransportError

if TYPE_CHECKING:
    from aiosync.schemes import TCPWeightSyncScheme

__all__ = ["push"]

_LOOK_SECONDS = 0.1


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

    - `aiosync push policy.pt tcp://10.0.0.5:7000`
    - `aiosync push critic.pt unix:///tmp/weights --model-id critic`
    """
    given = (url, token_file, tls, tls_ca, tls_cert, tls_key)
    with dialling("push", *given, model_id) as (server, errors, exit_status):
        with transfer_bar(errors, f"push {model_id}", f"reads {file.name}") as show:
            from aiosync.cli.files import load_weights

            weights = load_weights(
                file, note=lambda text: errors.print(f"Note: {text}", markup=False)
            )
            exit_status[0] = 1
            import aiosync

            done = aiosync.run(_push(weights, server, model_id, timeout, show))
        say_done("Pushed", model_id, *done)


async def _push(
    weights: dict[str, Any], server: Connection, model_id: str, timeout: float, show: Show
) -> tuple[int, int, int, float]:
    """Send; epoch, version, bytes and seconds."""
    from aiosync.rendezvous.handshake import ANY_STRATEGY
    from aiosync.schemes import TCPWeightSyncScheme
    from aiosync.schemes.inside import life_of
    from aiosync.tensors import Layout, collect

    loop = asyncio.get_running_loop()
    started = loop.time()

    def left() -> float:
        return max(0.001, timeout - (loop.time() - started))

    await _check_server(server, model_id, timeout)
    nbytes = Layout.plan(collect(weights)).nbytes
    scheme = TCPWeightSyncScheme(
        server.url,
        "state_dict",
        dial="both",
        token=server.token,
        tls=server.tls,
        timeout=timeout,
        reconnect=timeout,
    )
    scheme.strategy_str = ANY_STRATEGY  # a file says nothing of how its weights were extracted
    scheme.init_on_sender(model_id, num_workers=1)
    async with scheme:
        looking = loop.create_task(_look(scheme, nbytes, show))
        try:
            await scheme.connect(timeout=left())
            await scheme.send(weights, timeout=left())
        except PartialSyncError as exc:
            error = exc.failed[0]
            if scheme.version == 0 or not isinstance(error, TransportError):
                raise error from exc
            # The scheme dials again, and the server knows what it has already.
            await scheme.wait_for_version(scheme.version, timeout=left())
        finally:
            looking.cancel()
            await asyncio.wait({looking})
        sender = life_of(scheme).sender
        assert sender is not None
        show(nbytes, nbytes)
        return sender.workers.clock.epoch, scheme.version, nbytes, loop.time() - started


async def _check_server(server: Connection, model_id: str, timeout: float) -> None:
    """Find out at once what would otherwise be tried again until the time is up.

    Raises:
        AiosyncError: Nobody is there, it is not a weight server, or another trainer pushes there.
    """
    status = await server.client().status(timeout=timeout)
    for model in status.get("models") or ():
        if model.get("model_id") == model_id and model.get("trainer"):
            raise ConnectError(
                f"{model['trainer']} is already pushing model {model_id!r} to this server: end it "
                "first, or push under another --model-id"
            )


async def _look(scheme: TCPWeightSyncScheme, nbytes: int, show: Show) -> None:
    from aiosync.schemes.inside import life_of

    while True:
        sender = life_of(scheme).sender
        link = None if sender is None else sender.workers.links.get(0)
        if link is not None and link.stream is not None:
            show(min(nbytes, link.stream.sent_nbytes + link.stream.resumed_nbytes), nbytes)
        await asyncio.sleep(_LOOK_SECONDS)

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
    check_model_ids,
    connection,
    errors_to,
    failing,
    say_done,
    transfer_bar,
)
from aiosync.errors import ConfigError, ConnectError, PartialSyncError, TransportError

if TYPE_CHECKING:
    from aiosync.sender import WeightSender

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
    """
    errors = errors_to()
    with failing("push", errors) as exit_status:
        check_model_ids([model_id])
        server = connection(
            url, errors, token_file=token_file, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key
        )
        from aiosync.cli.files import check_source, load_weights

        check_source(file)
        exit_status[0] = 1
        with transfer_bar(errors, f"push {model_id}") as show:
            weights = load_weights(
                file, note=lambda text: errors.print(f"Note: {text}", markup=False)
            )
            import aiosync

            done = aiosync.run(_push(weights, server, model_id, timeout, show))
        say_done("Pushed", model_id, *done)


async def _push(
    weights: dict[str, Any], server: Connection, model_id: str, timeout: float, show: Show
) -> tuple[int, int, int, float]:
    """Send; epoch, version, bytes and seconds."""
    from aiosync.rendezvous.handshake import ANY_STRATEGY
    from aiosync.schemes import TCPWeightSyncScheme
    from aiosync.schemes.inside import sender_of
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
        await scheme.connect(timeout=left())
        sender = sender_of(scheme)
        assert sender is not None
        looking = loop.create_task(_look(sender, nbytes, show))
        try:
            await scheme.send(weights, timeout=left())
        except PartialSyncError as exc:
            if not isinstance(exc.failed[0], TransportError):
                raise exc.failed[0] from exc
            # The scheme dials again, and the server knows what it has already.
            await scheme.wait_for_version(scheme.version, timeout=left())
        finally:
            looking.cancel()
            await asyncio.wait({looking})
        show(nbytes, nbytes)
        return sender.workers.clock.epoch, scheme.version, nbytes, loop.time() - started


async def _check_server(server: Connection, model_id: str, timeout: float) -> None:
    """Find out at once what would otherwise be tried again until the time is up.

    Raises:
        AiosyncError: Nobody is there, it is not a weight server, or it does not take this model.
    """
    status = await server.client().status(timeout=timeout)
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

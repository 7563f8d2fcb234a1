"""The middleware: who may call, which path is which phase, and the status of each error."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import parse_qs

from aiosync._repr import text_of
from aiosync.errors import (
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PeerClosed,
    RemoteProtocolError,
    SyncTimeout,
)
from aiosync.integrations._responses import send_json
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.integrations.four_phase._bodies import (
    MAX_TEXT,
    Body,
    Disconnected,
    Refused,
    receive_body,
)
from aiosync.integrations.four_phase._phases import Phases
from aiosync.protocol import validate_seconds
from aiosync.serving import AdmissionGate
from aiosync.transports.credentials import Secret

if TYPE_CHECKING:
    from aiosync.receiver.transformer import Transform
    from aiosync.serving import WeightFeed
    from aiosync.tensors.apply import Loader

__all__ = ["FourPhaseMiddleware"]

_Handler: TypeAlias = Callable[[Body, dict[str, str]], Coroutine[Any, Any, Body]]


class FourPhaseMiddleware:
    """Middleware that lets trainers update a model as they update vLLM's server.

    ::

        app = FourPhaseMiddleware(Starlette(routes=[Route("/act", act)]), model=policy)

    Trainers that know vLLM's contract work unchanged, with the back-end ``aiosync``: for example
    :class:`aiosync.integrations.vllm.AiosyncTrainerEngine` with vLLM's own client. The weights
    arrive over aiosync's link while requests are answered.

    - ``POST /init_weight_transfer_engine`` connects to the trainer, whose address it names.
    - ``POST /start_weight_update``, ``/update_weights``, ``/finish_weight_update``: the second
      waits until the version has arrived, and the third switches the model to it, as a whole or not
      at all. An error ends the update, and the model keeps its version.
    - ``POST /pause`` waits for the running requests and keeps new ones waiting, by the rules of the
      gate, whatever its ``mode``; ``POST /resume`` lets them in. Without a pause, the switch itself
      takes its turn at the gate.
    - ``POST /shutdown_weight_transfer_engine``, ``/update_weight_version`` and
      ``/reset_prefix_cache``, ``GET /weight_info``, ``/get_world_size``, ``/is_paused`` and
      ``/health``.

    An error has the status 400 for an illegal request, 401 or 403 for a caller that may not, 409
    for a call out of turn, 502 if the trainer was not reached or is none, 503 if something took too
    long, and 500 if the model refused the version; the body has the cause. All other requests are
    those of the application, each inside the gate: see
    :class:`~aiosync.integrations.asgi.WeightsMiddleware` for their headers.

    Args:
        app: The application.
        model: Module to keep up to date.
        weights: TensorDict or dict of tensors to keep up to date instead.
        load: Function that loads versions, instead; see
            :meth:`aiosync.WeightSyncScheme.init_on_receiver`. It runs in a thread.
        transform: Function that changes updates before they are applied; see there.
        gate: The gate; ``None`` makes one that admits requests from the first version on. A model
            that can answer from the start has ``AdmissionGate(initial_version=1)``.
        token: Token that callers of the contract send as ``Authorization: Bearer TOKEN``; without
            one, only callers on this host are served.
        allow_remote: Serve callers of other hosts without a token, on a network that only the
            trainer can reach.
        max_pause: Seconds after which a pause ends by itself, because its trainer may have died;
            ``math.inf`` for never.
        readyz: Path of the probe of readiness; ``None`` for none.
        exempt: Paths of the application whose requests do not use the weights; a path that ends in
            ``/`` covers all paths below it.
        timeout: Seconds that a request of the application waits to be admitted; ``None`` takes the
            gate's.

    Raises:
        ConfigError: An option has an illegal value, or not exactly one of ``model``, ``weights``
            and ``load`` was given.

    Cancellation:
        A call of the contract that is cancelled goes on in the background.
    """

    def __init__(
        self,
        app: Any,
        *,
        model: Any = None,
        weights: Any = None,
        load: Loader | None = None,
        transform: Transform | None = None,
        gate: AdmissionGate | None = None,
        token: str | None = None,
        allow_remote: bool = False,
        max_pause: float = 300.0,
        readyz: str | None = "/readyz",
        exempt: Collection[str] = ("/healthz", "/livez"),
        timeout: float | None = None,
    ) -> None:
        if sum(each is not None for each in (model, weights, load)) != 1:
            raise ConfigError("FourPhaseMiddleware needs exactly one of model, weights and load")
        self._token = None if token is None else _as_secret(token)
        validate_seconds("max_pause", max_pause, endless=True)
        target = {"model": model, "weights": weights, "load": load, "transform": transform}
        self._phases = Phases(AdmissionGate() if gate is None else gate, target, max_pause)
        # The middleware asks a feed for no more than these phases have.
        feed = cast("WeightFeed", self._phases)
        self._rest = WeightsMiddleware(app, feed, readyz=readyz, exempt=exempt, timeout=timeout)
        self._allow_remote = allow_remote
        phases = self._phases
        self._paths: dict[str, tuple[str, _Handler]] = {
            "/init_weight_transfer_engine": ("POST", phases.init),
            "/shutdown_weight_transfer_engine": ("POST", phases.leave),
            "/start_weight_update": ("POST", phases.begin),
            "/update_weights": ("POST", phases.await_version),
            "/finish_weight_update": ("POST", phases.finish),
            "/update_weight_version": ("POST", phases.set_label),
            "/pause": ("POST", phases.pause),
            "/resume": ("POST", phases.resume),
            "/reset_prefix_cache": ("POST", phases.drop_caches),
            "/weight_info": ("GET", phases.weight_info),
            "/get_world_size": ("GET", phases.world_size),
            "/is_paused": ("GET", phases.is_paused),
            "/health": ("GET", phases.health),
        }

    @property
    def gate(self) -> AdmissionGate:
        """The gate of requests and switches, for admissions of your own; see its ``request()``."""
        return self._phases.gate

    async def aclose(self) -> None:
        """Leave the trainer and end the pause; the server's end of the lifespan does it, too."""
        await self._phases.__aexit__()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection of the server; an ASGI 3 application."""
        path = scope.get("path", "").removeprefix((scope.get("root_path") or "").rstrip("/"))
        if scope["type"] != "http" or path not in self._paths:
            await self._rest(scope, receive, send)
            return
        try:
            self._check_caller(scope, self._paths[path][0])
            answer = await self._run(path, scope, await receive_body(receive))
            status = 200
        except Disconnected:
            return
        except Refused as exc:
            status, answer = exc.status, {"error": str(exc)}
        except Exception as exc:  # noqa: BLE001 - the caller gets it
            text = f"{type(exc).__name__}: {text_of(exc)}"
            status, answer = _status_of(exc), {"error": text[:MAX_TEXT]}
        await send_json(send, status, answer)

    async def _run(self, path: str, scope: Any, body: Body) -> Body:
        """Answer a question, or run a phase once the phases before it have ended."""
        method, handle = self._paths[path]
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        call = handle(body, {name: values[-1] for name, values in query.items()})
        # Questions are answered at once, also while a phase waits.
        return await (call if method == "GET" else self._phases.run(call))

    def _check_caller(self, scope: Any, method: str) -> None:
        """Refuse a wrong method, pages of other sites in a browser, and callers without a right."""
        if scope["method"] != method:
            raise Refused(405, f"use {method}")
        headers = dict(scope["headers"])
        if b"origin" in headers:
            raise Refused(403, "this path is not for web pages")
        self._check_right(headers, scope.get("client"))

    def _check_right(self, headers: Mapping[bytes, bytes], client: Any) -> None:
        """Refuse a caller without the token or, if there is none, from another host."""
        if self._token is not None:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token.value):
                raise Refused(401, "send the token, as in `Authorization: Bearer TOKEN`")
        elif not self._allow_remote and not _is_loopback(client):
            raise Refused(
                403, "the server of this path has no token, and serves callers on its host only"
            )


def _is_loopback(client: Any) -> bool:
    """Return True if a client, (host, port) or ``None``, is known to be on this host."""
    with contextlib.suppress(ValueError, TypeError, IndexError):
        address = ipaddress.ip_address(client[0])
        # Before Python 3.13 an address of IPv4 that is mapped to IPv6 counts as none of this host.
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return False


def _as_secret(token: object) -> Secret:
    """Return the token as a secret.

    Raises:
        ConfigError: The token is empty, or no text of ASCII characters.
    """
    if not isinstance(token, str) or not token.isascii() or not token:
        raise ConfigError("token must be a str of ASCII characters")
    return Secret(token.encode())


def _status_of(error: Exception) -> int:
    """Return the HTTP status of the answer to a call that raised this error."""
    if isinstance(error, ConfigError):
        return 400
    if isinstance(error, LocalProtocolError):
        return 409
    if isinstance(error, SyncTimeout):
        return 503
    at_peer = ConnectError | PeerClosed | RemoteProtocolError
    return 502 if isinstance(error, at_peer) else 500

"""ASGI middleware for a weight feed: versions of requests and responses, readiness, start and end.

:class:`WeightsMiddleware` wraps any ASGI 3 application, those of Starlette and FastAPI included;
see ``docs/topics/serving.md``. Must not import a web framework.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiosync._repr import text_of
from aiosync.errors import AdmissionTimeout, ConfigError, LocalProtocolError
from aiosync.integrations._responses import send_json
from aiosync.protocol import MAX_VERSION, as_count, validate_seconds
from aiosync.spans import VersionSpan

if TYPE_CHECKING:
    from aiosync.serving import Admission, FeedStatus, WeightFeed

__all__ = ["WeightsMiddleware", "lifespan", "span_of"]

_Message: TypeAlias = MutableMapping[str, Any]
_Scope: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
_Header: TypeAlias = tuple[bytes, bytes]

_VERSION: Final = b"x-weight-version"
_VERSIONS: Final = b"x-weight-versions"
_EPOCH: Final = b"x-weight-epoch"
_MIN_VERSION: Final = b"x-min-weight-version"
_OURS: Final = frozenset({_VERSION, _VERSIONS, _EPOCH})
_BODY: Final = {"http.response.body", "http.response.zerocopysend"}
_RETRY: Final = (b"retry-after", b"1")
# A message of one byte takes some hundred bytes of memory, so a limit on the bytes is not enough.
_MOST_MESSAGES: Final = 4096
_NOT_RUNNING: Final = (
    "the feed is not running: start it with `async with feed`, lifespan(feed), or a server that "
    "sends lifespan messages"
)


class WeightsMiddleware:
    """Middleware that answers each HTTP request with one version of the weights and names it.

    ::

        feed = WeightFeed(aiosync.TCPWeightSyncScheme("tcp://trainer:5555"), model=policy)
        app = WeightsMiddleware(Starlette(routes=[...]), feed)
        # or app.add_middleware(WeightsMiddleware, feed=feed)

    The feed's gate admits a request before the application sees it. The request leaves the gate
    when its response is complete, so that background tasks of Starlette do not delay a switch. The
    body arrives before the request is admitted, so that a slow upload does not delay a switch
    either. A client that disconnects meanwhile gets no answer, and the application does not see its
    request. The application finds the :class:`~aiosync.serving.Admission` in
    ``scope["aiosync.admission"]``.

    - Responses have the headers ``x-weight-version``, the oldest version that may have contributed
      up to the start of the response, ``x-weight-versions`` (``3-5``) if there were several, and
      ``x-weight-epoch``. If an application sets one of these itself, the middleware adds none.
      Where weights may change during a request, all versions of a stream are known only at its
      end: its last part may hold the ``span`` of the admission.
    - Requests may have the headers ``x-min-weight-version`` and ``x-weight-epoch``. If no such
      version arrives in time, or none that the feed may begin with, the answer is 503 with
      ``Retry-After``, and nothing was computed; 400 if the header is invalid.
    - ``GET /readyz`` answers 200 or 503 with the feed's status as JSON: ``version`` is the feed's
      version, and ``waits_for`` the version that it still needs.
    - The feed is started before the application starts up, and closed after it has shut down.

    WebSockets and ``OPTIONS`` pass untouched. A socket would delay switches for as long as it is
    open, so the application admits its messages one by one, with ``feed.request()``.

    Args:
        app: The application.
        feed: The source of the weights.
        readyz: Path of the probe, below the ``root_path`` of the application; ``None`` for none.
        max_staleness: Seconds for which the probe stays healthy after the source was lost;
            ``None`` for ever, because the last complete version is still there.
        exempt: Paths whose requests do not use the weights; a path that ends in ``/`` covers all
            paths below it.
        timeout: Seconds that a request waits to be admitted, from the arrival of its body; ``None``
            takes the gate's.
        max_early_body: Bytes of a body that are received before the request is admitted, and kept
            until the application takes them; the rest of a longer body comes afterwards. 0 for
            none, for applications that answer while their clients still send.

    Raises:
        ConfigError: An option has an illegal value, or ``app`` and ``feed`` are swapped.

    Cancellation:
        A request that is cancelled leaves the gate.
    """

    def __init__(
        self,
        app: _App,
        feed: WeightFeed,
        *,
        readyz: str | None = "/readyz",
        max_staleness: float | None = None,
        exempt: Collection[str] = ("/healthz", "/livez"),
        timeout: float | None = None,
        max_early_body: int = 2**20,
    ) -> None:
        if not callable(app) or not hasattr(feed, "gate"):
            got = f"{type(app).__name__} and {type(feed).__name__}"
            raise ConfigError(f"WeightsMiddleware takes an application and its feed, got {got}")
        self._exempt = tuple(exempt)
        _check_paths(*self._exempt, *(() if readyz is None else (readyz,)))
        for name, value in (("max_staleness", max_staleness), ("timeout", timeout)):
            validate_seconds(name, value, zero=True, endless=True, none=True)
        as_count("max_early_body", max_early_body, 0)
        self.app: _App = app
        self.feed: WeightFeed = feed
        self.readyz = readyz
        self.max_staleness = max_staleness
        self.timeout = timeout
        self.max_early_body = max_early_body

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Handle one connection of the server; an ASGI 3 application."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (path := _path_of(scope)) == self.readyz:
            await self._probe(scope, send)
        elif scope["method"] == "OPTIONS" or self._is_exempt(path):
            await self.app(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    def _is_exempt(self, path: str) -> bool:
        return any(
            path.startswith(each) if each.endswith("/") else path == each for each in self._exempt
        )

    # -- requests ------------------------------------------------------------------------------

    async def _serve(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Let the application answer a request inside the gate, or refuse it."""
        try:
            min_version, epoch = _asked_for(scope["headers"])
        except ValueError as exc:
            await self._answer(scope, send, 400, {"error": "bad_header", "detail": str(exc)})
            return
        # A slow upload would delay every switch if the request were admitted before its body.
        early = await _receive_early(receive, self.max_early_body)
        if early is None:
            return  # the client has disconnected
        admission = self.feed.request(min_version=min_version, epoch=epoch, timeout=self.timeout)
        async with contextlib.AsyncExitStack() as inside:
            try:
                await inside.enter_async_context(admission)
            except (AdmissionTimeout, LocalProtocolError) as exc:
                await self._refuse(scope, send, exc, min_version)
                return

            async def forward(message: _Message) -> None:
                if message["type"] == "http.response.start":
                    message = self._labelled(message, admission)
                elif _ends_response(message):
                    # The request leaves the gate before its last part is sent, so that a client
                    # that reads slowly delays no switch.
                    await inside.aclose()
                await send(message)

            # The scope is changed in place, as frameworks do it: outer middleware reads the entries
            # that routers add to it.
            scope["aiosync.admission"] = admission
            await self.app(scope, early, forward)

    def _labelled(self, start: _Message, admission: Admission) -> _Message:
        """Return the start of a response with headers that name the admission's versions."""
        headers = list(start.get("headers") or ())
        if _OURS.isdisjoint([name.lower() for name, _ in headers]):
            # In the mode "immediate" a restarted trainer's version may be among them.
            epoch = admission.epoch if admission.epoch == self.feed.epoch else None
            headers += _labels(admission.versions, epoch)
        return {**start, "headers": headers}

    async def _refuse(
        self,
        scope: _Scope,
        send: _Send,
        error: AdmissionTimeout | LocalProtocolError,
        min_version: int,
    ) -> None:
        """Answer 503 to a request that was not admitted, with the reason."""
        late, status = isinstance(error, AdmissionTimeout), self.feed.status.as_dict()
        body = {
            "error": "weight_version" if late else "shutting_down",
            "detail": f"{error}; {_NOT_RUNNING}"
            if late and status["state"] == "closed"
            else str(error),
            "min_version": min_version,
            # The status's reason is left out, because it may name the trainer's address.
            **{name: status[name] for name in ("version", "epoch", "waits_for", "state")},
        }
        await self._answer(scope, send, 503, body, _RETRY)

    # -- the probe -----------------------------------------------------------------------------

    async def _probe(self, scope: _Scope, send: _Send) -> None:
        """Answer the probe of readiness: 200 if the feed is ready, else 503."""
        if scope["method"] not in ("GET", "HEAD"):
            body = {"error": "method", "detail": "only GET and HEAD"}
            await self._answer(scope, send, 405, body, (b"allow", b"GET, HEAD"))
            return
        status = self.feed.status
        # A closed gate admits no request.
        ready = self._is_fresh(status) and bool(self.feed.ready)
        later = () if ready else (_RETRY,)
        answer: dict[str, Any] = {"ready": ready, **status.as_dict()}
        await self._answer(scope, send, 200 if ready else 503, answer, *later)

    def _is_fresh(self, status: FeedStatus) -> bool:
        """Return True if the feed is live, or stale for no longer than ``max_staleness``."""
        if status.state != "stale":
            return status.state == "live"
        return self.max_staleness is None or status.stale_for <= self.max_staleness

    async def _answer(
        self, scope: _Scope, send: _Send, status: int, body: dict[str, Any], *more: _Header
    ) -> None:
        """Send a response of the middleware itself, which names the feed's version."""
        version = self.feed.version
        labels = _labels((version,), self.feed.epoch) if version else []
        await send_json(send, status, body, *more, *labels, is_head=scope["method"] == "HEAD")

    # -- start and end -------------------------------------------------------------------------

    async def _live(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Handle the lifespan: run the feed around the application's start-up and shutdown.

        The feed starts before the application, and is closed before the server gets the end of the
        shutdown. This method sends the messages that an application without lifespans does not
        send.
        """
        # Of the two events (start-up and shutdown), the number that the server was asked for, and
        # the number that it has got an answer to.
        received = answered = 0
        # True if the application answered as for another protocol.
        is_other_protocol = False

        async def receive_event() -> _Message:
            nonlocal received
            received += 1
            return await receive()

        async with contextlib.AsyncExitStack() as live:

            async def send_answer(message: _Message) -> None:
                nonlocal answered, is_other_protocol
                kind = message["type"]
                if not kind.startswith("lifespan."):
                    is_other_protocol = True
                    raise RuntimeError(f"{kind} does not belong to a lifespan")
                answered = 1 if kind == "lifespan.startup.complete" else 2
                if answered == 2:
                    await live.aclose()
                await send(message)

            try:
                await live.enter_async_context(self.feed)
            except Exception as exc:  # raised again
                # A server may take an error before its first event for an application without
                # lifespans, and serve all the same.
                await receive()
                failed = f"{type(exc).__name__}: {text_of(exc)}"
                await send({"type": "lifespan.startup.failed", "message": failed})
                raise
            try:
                await self.app(scope, receive_event, send_answer)
            except Exception:  # raised again, unless the application has no lifespans
                if answered or (received and not is_other_protocol):
                    raise
            while answered < 2:
                while received <= answered:
                    await receive_event()
                event = ("startup", "shutdown")[answered]
                await send_answer({"type": f"lifespan.{event}.complete"})


def lifespan(
    feed: WeightFeed,
) -> Callable[[Any], contextlib.AbstractAsyncContextManager[None]]:
    """Return a lifespan for ``Starlette(lifespan=...)`` or FastAPI that starts and closes ``feed``.

    :class:`WeightsMiddleware` starts and closes the feed itself if the server's lifespan messages
    pass through it. Both together are allowed, because the feed counts its starts. An application
    with a lifespan of its own writes ``async with feed:`` there.

    Args:
        feed: The feed to start.
    """

    @contextlib.asynccontextmanager
    async def live(app: Any) -> AsyncIterator[None]:
        async with feed:
            yield

    return live


def span_of(headers: Mapping[str, str]) -> VersionSpan | None:
    """Return the versions that a response was computed with, according to its headers.

    The headers of a stream name only the versions up to its start. If weights may change during
    the stream, its last part has to name the others.

    Args:
        headers: Headers of the response, with names in lower case, or in a mapping that ignores
            case.

    Returns:
        The span, without counts. Its ``first`` is 0 if the response names no epoch, because its
        versions may be of several epochs. ``None`` if the response names no version.

    Raises:
        ValueError: A header holds no valid version.
    """
    version, epoch = headers.get("x-weight-version"), headers.get("x-weight-epoch")
    if version is None:
        return None
    first, _, last = headers.get("x-weight-versions", version).partition("-")
    return VersionSpan(0 if epoch is None else int(first), int(last or first), epoch)


# -- options and messages ---------------------------------------------------------------------


def _check_paths(*paths: object) -> None:
    """Refuse a path that does not begin with a slash."""
    for path in paths:
        if not isinstance(path, str) or not path.startswith("/"):
            raise ConfigError(f"a path must be a str that begins with a slash, got {path!r}")


def _path_of(scope: _Scope) -> str:
    """Return the path below ``root_path``; some servers have left that out already."""
    path: str = scope["path"]
    rest = path.removeprefix((scope.get("root_path") or "").rstrip("/"))
    return rest if rest.startswith("/") else path if rest else "/"


def _asked_for(headers: Any) -> tuple[int, int | None]:
    """Return the lowest version and the epoch that a request asks for.

    Raises:
        ValueError: A header is invalid.
    """
    found = {name: value.strip() for name, value in headers if name in (_MIN_VERSION, _EPOCH)}
    if not found:
        return 0, None
    min_version, epoch = found.get(_MIN_VERSION, b"0"), found.get(_EPOCH)
    return _read_version(min_version), None if epoch is None else _read_epoch(epoch)


def _read_version(text: bytes) -> int:
    """Return the version in the header ``x-min-weight-version``; ``ValueError`` if invalid."""
    # Only ASCII digits are valid; int() would also take signs, underscores and thousands of digits.
    if not re.fullmatch(rb"[0-9]{1,19}", text) or int(text) > MAX_VERSION:
        raise ValueError(f"x-min-weight-version must be a whole number from 0 to {MAX_VERSION}")
    return int(text)


def _read_epoch(text: bytes) -> int:
    """Return the epoch in the header ``x-weight-epoch``; ``ValueError`` if it is invalid."""
    if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", text):
        raise ValueError("x-weight-epoch must be 1 to 16 hexadecimal digits")
    return int(text, 16)


def _ends_response(message: _Message) -> bool:
    """Return True if this message is the last one of a response."""
    kind: str = message["type"]
    is_last = not message.get("more_body", False)
    return kind == "http.response.pathsend" or (kind in _BODY and is_last)


def _labels(versions: Sequence[int], epoch: int | None) -> list[_Header]:
    """Return the headers that name versions, oldest first, and their epoch if there is one."""
    labels = [(_VERSION, b"%d" % versions[0])]
    if epoch is not None:
        labels.append((_EPOCH, b"%016x" % epoch))
    if len(versions) > 1:
        labels.append((_VERSIONS, b"%d-%d" % (versions[0], versions[-1])))
    return labels


async def _receive_early(receive: _Receive, limit: int) -> _Receive | None:
    """Receive the body of a request, or its first ``limit`` bytes.

    The message that reaches the limit is kept as a whole.

    Returns:
        A ``receive`` that returns the kept messages and then those that follow; ``None`` if the
        client has disconnected.
    """
    messages: deque[_Message] = deque()
    size, more = 0, True
    while more and size < limit and len(messages) < _MOST_MESSAGES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        messages.append(message)
        size += len(message.get("body") or b"")
        more = message.get("more_body", False)

    async def replay() -> _Message:
        return messages.popleft() if messages else await receive()

    return replay

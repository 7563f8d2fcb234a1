"""Weights in an ASGI server: versions of requests and responses, readiness, start and end.

:class:`WeightsMiddleware` goes around any ASGI 3 application, Starlette's and FastAPI's among
them; see ``docs/topics/serving.md``. Must not import a web framework.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    MutableMapping,
)
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiosync.errors import AdmissionTimeout, ConfigError, LocalProtocolError
from aiosync.protocol import validate_seconds
from aiosync.spans import VersionSpan

if TYPE_CHECKING:
    from aiosync.serving import Admission, WeightFeed

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
_LARGEST: Final = 2**63 - 1  # no version is larger
_SHUTDOWN_RETRY_SECONDS: Final = 1
_PROBE_RETRY_SECONDS: Final = 1
# A message of one byte takes some hundred bytes of memory, so the bytes alone are no bound.
_MOST_MESSAGES: Final = 4096
_NOT_RUNNING: Final = (
    "the feed is not running: start it with `async with feed`, lifespan(feed), or a server that "
    "sends lifespan messages"
)


class WeightsMiddleware:
    """Answers each HTTP request with one version of the weights, and says with which.

    ::

        feed = WeightFeed(aiosync.TCPWeightSyncScheme("tcp://trainer:5555"), model=policy)
        app = WeightsMiddleware(Starlette(routes=[...]), feed)
        # or app.add_middleware(WeightsMiddleware, feed=feed)

    A request is admitted by the feed's gate before the application sees it, and has left when its
    response is complete, so that background tasks of Starlette do not delay a switch. Its body has
    arrived before it is admitted, so that clients that upload slowly do not either. One that
    disconnects meanwhile is not served, and gets no answer. The application finds its
    :class:`~aiosync.serving.Admission` in ``scope["aiosync.admission"]``.

    - Responses say ``x-weight-version``, the oldest version that may have contributed up to
      their start, ``x-weight-versions`` (``3-5``) if there were several, and
      ``x-weight-epoch``. An application that sets one of these itself is left alone. Where weights
      may change under a request, the whole of what a stream came from is known at its end only:
      its last part may hold the ``span`` of the admission.
    - Requests may say ``x-min-weight-version`` and ``x-weight-epoch``. If no such
      version arrives in time, or none that the feed may begin with, the answer is 503 with
      ``Retry-After``, and nothing was computed; 400 if the header is invalid.
    - ``GET /readyz`` answers 200 or 503 with the feed's status as JSON: ``version`` is what it has,
      and ``waits_for`` what it waits for.
    - The feed is started before the application starts up, and closed after it has shut down.

    WebSockets and ``OPTIONS`` pass untouched: a socket would hold up switches for as long as it
    is open, so its messages are to be admitted one by one, with ``feed.request()``.

    Args:
        app: The application.
        feed: Where the weights come from.
        readyz: Path of the probe, below the ``root_path`` of the application; ``None`` for none.
        max_staleness: Seconds for which the probe stays healthy after the source was lost;
            ``None`` for ever, as the last complete version is still there.
        exempt: Paths that have nothing to do with the weights; one that ends in
            ``/`` covers all below it.
        timeout: Seconds that a request waits to be admitted, from the arrival of its body; ``None``
            takes the gate's.
        max_early_body: Bytes of a body that are received before the request is admitted, and kept
            until the application takes them; the rest of a longer body comes afterwards. 0 for
            none, which applications need that answer while their clients still send.

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
        if isinstance(exempt, str | bytes) or not isinstance(exempt, Collection):
            raise ConfigError(f"exempt must be a collection of paths, such as (), got {exempt!r}")
        for path in (*exempt, *(() if readyz is None else (readyz,))):
            if not isinstance(path, str) or not path.startswith("/"):
                raise ConfigError(f"a path must be a str that begins with a slash, got {path!r}")
        for name, value in (("max_staleness", max_staleness), ("timeout", timeout)):
            validate_seconds(name, value, zero=True, endless=True, none=True)
        if type(max_early_body) is not int or max_early_body < 0:
            raise ConfigError(
                f"max_early_body must be a number of bytes, 0 for none, got {max_early_body!r}"
            )
        self.app: _App = app
        self.feed: WeightFeed = feed
        self.readyz = readyz
        self.max_staleness = max_staleness
        self.timeout = timeout
        self.max_early_body = max_early_body
        self._exempt = frozenset(path for path in exempt if not path.endswith("/"))
        self._below = tuple(path for path in exempt if path.endswith("/"))

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One call of the server, as ASGI has it."""
        kind = scope["type"]
        if kind == "http":
            path = scope["path"]
            if root := scope.get("root_path"):
                path = _below_root(path, root)
            if path == self.readyz:
                await self._probe(scope, send)
            elif scope["method"] == "OPTIONS" or path in self._exempt:
                await self.app(scope, receive, send)
            elif self._below and path.startswith(self._below):
                await self.app(scope, receive, send)
            else:
                await self._serve(scope, receive, send)
        elif kind == "lifespan":
            await _Lifespan(self.feed, receive, send).run(self.app, scope)
        else:
            await self.app(scope, receive, send)

    # -- requests ------------------------------------------------------------------------------

    async def _serve(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        try:
            min_version, epoch = _asked_for(scope["headers"])
        except ValueError as exc:
            body = {"error": "bad_header", "detail": str(exc)}
            await self._answer(scope, send, 400, body)
            return
        if self.max_early_body and _is_announced(scope):
            # A client that uploads slowly would hold up every switch if it were admitted first.
            messages = await _receive_early(receive, self.max_early_body)
            if messages is None:
                return  # nobody is there to be answered
            receive = _replayed(messages, receive)
        admission = self.feed.request(min_version=min_version, epoch=epoch, timeout=self.timeout)
        try:
            await admission.__aenter__()
        except (AdmissionTimeout, LocalProtocolError) as exc:
            await self._refuse(scope, send, exc)
            return
        inside = True

        async def forward(message: _Message) -> None:
            nonlocal inside
            kind = message["type"]
            if kind == "http.response.start":
                headers = list(message.get("headers") or ())
                if _OURS.isdisjoint([name.lower() for name, _ in headers]):
                    headers += self._labels(admission)
                message = {**message, "headers": headers}
            elif inside and _ends(kind, message):
                # Before it is sent: a client that reads slowly holds nothing up.
                inside = False
                await admission.__aexit__(None, None, None)
            await send(message)

        # In place, as frameworks do it: middleware outside looks for what the router puts there.
        scope["aiosync.admission"] = admission
        try:
            await self.app(scope, receive, forward)
        finally:
            if inside:
                inside = False
                await admission.__aexit__(None, None, None)

    def _labels(self, admission: Admission) -> list[_Header]:
        versions = admission.versions
        # In the mode "immediate" a restarted trainer's version may be among them: no epoch then.
        epoch = admission.epoch if admission.epoch == self.feed.epoch else None
        labels = _labels(versions[0], epoch)
        if len(versions) != 1:
            labels.append((_VERSIONS, b"%d-%d" % (versions[0], versions[-1])))
        return labels

    async def _refuse(
        self, scope: _Scope, send: _Send, error: AdmissionTimeout | LocalProtocolError
    ) -> None:
        body: dict[str, Any] = {"error": "shutting_down", "detail": str(error)}
        seconds = _SHUTDOWN_RETRY_SECONDS
        if isinstance(error, AdmissionTimeout):
            status = self.feed.status
            seconds = max(1, math.ceil(error.retry_after))
            closed = status.state == "closed"
            body = {
                "error": "weight_version",
                "detail": f"{error}; {_NOT_RUNNING}" if closed else str(error),
                "version": error.version,
                "epoch": None if self.feed.epoch is None else f"{self.feed.epoch:016x}",
                "min_version": error.min_version,
                "waits_for": status.waits_for,
                "state": status.state,  # but no reason, as that may name the trainer's address
            }
        await self._answer(scope, send, 503, body, (b"retry-after", b"%d" % seconds))

    # -- the probe -----------------------------------------------------------------------------

    async def _probe(self, scope: _Scope, send: _Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            body = {"error": "method", "detail": "only GET and HEAD"}
            await self._answer(scope, send, 405, body, (b"allow", b"GET, HEAD"))
            return
        status = self.feed.status
        ready = status.state == "live" or (
            status.state == "stale"
            and (self.max_staleness is None or status.stale_for <= self.max_staleness)
        )
        ready = ready and bool(self.feed.ready)  # the gate may have been closed
        later = () if ready else ((b"retry-after", b"%d" % _PROBE_RETRY_SECONDS),)
        said = {"ready": ready, **status.as_dict()}
        await self._answer(scope, send, 200 if ready else 503, said, *later)

    async def _answer(
        self, scope: _Scope, send: _Send, status: int, body: dict[str, Any], *more: _Header
    ) -> None:
        data = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(data)),
            (b"cache-control", b"no-store"),
            *more,
        ]
        if self.feed.version:
            headers += _labels(self.feed.version, self.feed.epoch)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        data = b"" if scope["method"] == "HEAD" else data
        await send({"type": "http.response.body", "body": data})


def lifespan(
    feed: WeightFeed,
) -> Callable[[Any], contextlib.AbstractAsyncContextManager[None]]:
    """A lifespan for ``Starlette(lifespan=...)`` or FastAPI that starts and closes ``feed``.

    :class:`WeightsMiddleware` does it by itself where the server's lifespan messages pass
    through it; both together are fine, as the feed counts. An application with a lifespan of its
    own writes ``async with feed:`` there.

    Args:
        feed: The feed to start.
    """

    @contextlib.asynccontextmanager
    async def live(app: Any) -> AsyncIterator[None]:
        async with feed:
            yield

    return live


def span_of(headers: Mapping[str, str]) -> VersionSpan | None:
    """The versions that a response says it was computed with, for a client that keeps them.

    Of a stream over which weights may change, only what there was when it began: see its last part.

    Args:
        headers: Of the response; with names in lower case, or looked up whatever their case.

    Returns:
        The span, without counts; its ``first`` is 0 where the response names no epoch, since its
        versions may be of several. ``None`` if it names no version.

    Raises:
        ValueError: What it says is no version.
    """
    version, epoch = headers.get("x-weight-version"), headers.get("x-weight-epoch")
    if version is None:
        return None
    first, _, last = headers.get("x-weight-versions", version).partition("-")
    return VersionSpan(0 if epoch is None else int(first), int(last or first), epoch)


# -- options and messages ---------------------------------------------------------------------


def _below_root(path: str, root: str) -> str:
    """The path as the application knows it; some servers leave ``root_path`` out of it."""
    rest = path.removeprefix(root.rstrip("/"))
    return rest if rest.startswith("/") else path if rest else "/"


def _asked_for(headers: Any) -> tuple[int, int | None]:
    """The least version and the epoch that a request asks for."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == _MIN_VERSION or name == _EPOCH:
            if name in found:
                raise ValueError(f"{name.decode()} was sent twice")
            found[name] = value.strip()
    if not found:
        return 0, None
    min_version, epoch = found.get(_MIN_VERSION, b"0"), found.get(_EPOCH)
    # Digits of ASCII only; int() would take signs, underscores and thousands of digits, too.
    if not re.fullmatch(rb"[0-9]{1,19}", min_version) or int(min_version) > _LARGEST:
        raise ValueError(f"x-min-weight-version must be a whole number from 0 to {_LARGEST}")
    if epoch is None:
        return int(min_version), None
    if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", epoch):
        raise ValueError("x-weight-epoch must be 1 to 16 hexadecimal digits")
    return int(min_version), int(epoch, 16)


def _labels(version: int, epoch: int | None) -> list[_Header]:
    labels = [(_VERSION, b"%d" % version)]
    if epoch is not None:
        labels.append((_EPOCH, b"%016x" % epoch))
    return labels


def _ends(kind: str, message: _Message) -> bool:
    """Whether nothing that is computed follows this message."""
    if kind == "http.response.body":
        return not message.get("more_body", False)
    return kind == "http.response.pathsend"


# -- the body of a request, received before the request is admitted ----------------------------


def _is_announced(scope: _Scope) -> bool:
    """Whether the headers say that a body follows."""
    empty = False
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            if value.strip(b" \t0"):
                return True
            empty = True
    # From HTTP/2 on a body needs neither; a server knows at once where there is none.
    later = scope.get("http_version", "1.1").startswith(("2", "3"))
    return later and not empty and scope["method"] not in ("GET", "HEAD")


async def _receive_early(receive: _Receive, limit: int) -> deque[_Message] | None:
    """The messages of a body, or those of its first ``limit`` bytes; ``None`` if the client left.

    The message that reaches the bound is kept as a whole.
    """
    messages: deque[_Message] = deque()
    size = 0
    while size < limit and len(messages) < _MOST_MESSAGES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
        size += len(message.get("body") or b"")
    return messages


def _replayed(messages: deque[_Message], receive: _Receive) -> _Receive:
    """A ``receive`` that returns ``messages`` as they were, and then what the server says."""

    async def replay() -> _Message:
        return messages.popleft() if messages else await receive()

    return replay


# -- the lifespan messages of a server ---------------------------------------------------------


class _Lifespan:
    """One lifespan call: the feed starts before the application, and closes after it.

    Where the application knows nothing of lifespans, the server is answered from here.
    """

    def __init__(self, feed: WeightFeed, receive: _Receive, send: _Send) -> None:
        self._feed = feed
        self._ends = contextlib.AsyncExitStack()  # closes the feed, once
        self._receive_next = receive
        self._send = send
        self._first: _Message = {}
        self._given: list[_Message] = []  # what the application has received
        self._knows = True  # unless it answers with a message of another protocol
        self._told = ""  # what the server heard last

    async def run(self, app: _App, scope: _Scope) -> None:
        self._first = await self._receive_next()
        async with self._ends:
            try:
                await self._feed.start()
                self._ends.push_async_callback(self._feed.aclose)
                await self._run_app(app, scope)
            except Exception as exc:  # raised again: the server sees it
                if not self._told:
                    await self._ends.aclose()
                    await self._fail("startup", exc)
                raise

    async def _run_app(self, app: _App, scope: _Scope) -> None:
        try:
            await app(scope, self._receive, self._forward)
        except Exception:  # raised again, unless it only means that there is no lifespan
            if self._told or (self._given and self._knows):
                raise
        if not self._told:
            await self._forward({"type": "lifespan.startup.complete"})
        if self._told == "lifespan.startup.complete":
            if len(self._given) < 2:
                await self._receive_next()
            await self._forward({"type": "lifespan.shutdown.complete"})

    async def _receive(self) -> _Message:
        self._given.append(await self._receive_next() if self._given else self._first)
        return self._given[-1]

    async def _forward(self, message: _Message) -> None:
        kind = message["type"]
        if not kind.startswith("lifespan."):
            self._knows = False
            raise RuntimeError(f"{kind} does not belong to a lifespan")
        if kind != "lifespan.startup.complete":
            try:
                await self._ends.aclose()
            except Exception as exc:  # raised again: the server sees it
                if kind == "lifespan.shutdown.complete":
                    await self._fail("shutdown", exc)
                raise
        self._told = kind
        await self._send(message)

    async def _fail(self, phase: str, error: Exception) -> None:
        self._told = f"lifespan.{phase}.failed"
        await self._send({"type": self._told, "message": f"{type(error).__name__}: {error}"})

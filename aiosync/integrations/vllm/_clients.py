"""Clients that control an engine: vLLM's server, or an engine in the trainer's own process.

vLLM's own HTTP and Ray clients can be used instead. vLLM's client protocol has four methods and
none to pause an engine; the kind of the client decides how to pause. Must not import vLLM.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiosync.errors import AiosyncError, ApplyError, ConfigError, ConnectError, SyncTimeout
from aiosync.protocol import finite_or_none

__all__ = [
    "AsyncLLMClient",
    "HTTPClient",
    "LLMClient",
    "VLLMWeightSyncClient",
    "ask",
    "pausing",
]

_MAX_REASON_NBYTES = 65536
_TEXT_LIMIT = 2000


class VLLMWeightSyncClient(Protocol):
    """Protocol of a trainer's client of an engine: one of vLLM's, of this package, or your own."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engine's workers connect to the trainer."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the engine's workers load a version of the weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and set the label of the engine's weights."""


class HTTPClient:
    """Client of a vLLM server, for trainers without vLLM.

    Args:
        base_url: ``http://host:port`` of a server with ``VLLM_SERVER_DEV_MODE=1``.
        timeout: Seconds for each request.
        headers: Headers to send with each request, for a proxy that asks for credentials.

    Raises:
        ConfigError: The URL is not an HTTP URL.
    """

    def __init__(
        self, base_url: str, *, timeout: float = 120.0, headers: Mapping[str, str] | None = None
    ) -> None:
        if urllib.parse.urlsplit(base_url).scheme not in ("http", "https"):
            raise ConfigError(f"{base_url!r} is not an HTTP URL")
        self.base_url: str = base_url.rstrip("/")
        self.timeout: float = timeout
        self._headers = dict(headers or {})

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engine's workers connect to the trainer."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the engine's workers load a version of the weights."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and set the label of the engine's weights."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("finish_weight_update", body)

    def pause_generation(self, mode: str) -> None:
        """Pause generation, and drop the caches that the old weights computed."""
        self._post(f"pause?{urllib.parse.urlencode({'mode': mode, 'clear_cache': 'true'})}")

    def resume_generation(self) -> None:
        """Resume generation."""
        self._post("resume")

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a request; raise ApplyError if the server refuses, ConnectError if none answers."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(
            f"{self.base_url}/{path}", data=data, headers=headers, method="POST"
        )
        try:
            limit = finite_or_none(self.timeout)
            with urllib.request.urlopen(request, timeout=limit) as reply:
                reply.read()
        except urllib.error.HTTPError as exc:
            with exc:
                reason = exc.read(_MAX_REASON_NBYTES).decode(errors="replace")
            raise ApplyError(f"{request.full_url}: HTTP {exc.code}: {reason}") from exc
        # The server was not reached, or its answer did not come in time and as a whole.
        except (OSError, http.client.HTTPException) as exc:
            raise ConnectError(f"{request.full_url}: {exc}") from exc


class LLMClient:
    """Client of a ``vllm.LLM``, which generates only inside its own calls.

    Use it from the thread that calls ``generate()``, between two calls.

    Args:
        llm: The engine.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm

    def _wait(self, result: Any) -> None:
        """Wait for the result of a call to the engine; a ``vllm.LLM`` is done when it returns."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engine's workers connect to the trainer."""
        self._have_workers("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the engine's workers load a version of the weights."""
        self._have_workers("update_weights", update_info=update_info)

    def _have_workers(self, method: str, **arguments: Any) -> None:
        """Call a method in every worker of the engine, and wait for all of them."""
        self._wait(self._engine.collective_rpc(method, kwargs=arguments))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and set the label of the engine's weights."""
        self._wait(self._engine.finish_weight_update(weight_version))

    def pause_generation(self, mode: str) -> None:
        """Drop cached prefixes, which belong to the old weights; the engine is idle already."""
        del mode
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """Do nothing: the engine was not paused."""


class AsyncLLMClient(LLMClient):
    """Client of a ``vllm.v1.engine.async_llm.AsyncLLM``, for threads other than that of its loop.

    Args:
        engine: The engine.
        loop: The loop that the engine runs on. It must run during each call.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine)
        self._loop = loop

    def _wait(self, result: Any) -> None:
        asyncio.run_coroutine_threadsafe(result, self._loop).result()

    def pause_generation(self, mode: str) -> None:
        """Pause generation, and drop the caches that the old weights computed."""
        self._wait(self._engine.pause_generation(mode=mode, clear_cache=True))

    def resume_generation(self) -> None:
        """Resume generation."""
        self._wait(self._engine.resume_generation())


# -- deadlines, pauses and error texts for any client -------------------------------------------


class _RayActors:
    """Client that pauses engines in Ray actors, because vLLM's Ray client has no method for it."""

    def __init__(self, handles: Any, timeout: float) -> None:
        self._handles = handles
        self._timeout = finite_or_none(timeout)

    def pause_generation(self, mode: str) -> None:
        """Pause generation, and drop the caches that the old weights computed."""
        import ray

        waits = []
        for handle in self._handles:
            if hasattr(handle, "pause_generation"):
                waits.append(handle.pause_generation.remote(mode=mode, clear_cache=True))
            else:  # an actor of LLM makes one call at a time, so this call waits for generation
                waits.append(handle.reset_prefix_cache.remote(reset_running_requests=True))
        ray.get(waits, timeout=self._timeout)

    def resume_generation(self) -> None:
        """Resume generation."""
        import ray

        able = [each for each in self._handles if hasattr(each, "resume_generation")]
        ray.get([each.resume_generation.remote() for each in able], timeout=self._timeout)


def pausing(client: Any, timeout: float) -> Any:
    """Return an object that pauses and resumes the engine of a client.

    It has the methods ``pause_generation(mode)`` and ``resume_generation()``.

    Args:
        client: vLLM's HTTP or Ray client; or an object with these two methods, which is returned.
        timeout: Seconds for each call.

    Raises:
        ConfigError: There is no way to pause the engine of this client.
    """
    if hasattr(client, "pause_generation") and hasattr(client, "resume_generation"):
        return client
    if hasattr(client, "base_url"):
        return HTTPClient(client.base_url, timeout=timeout)
    if hasattr(client, "handles"):
        return _RayActors(client.handles, timeout)
    raise ConfigError(
        f"{type(client).__name__} cannot pause an engine: give it pause_generation(mode) and "
        "resume_generation(), or set pause=None in the init info"
    )


def ask(
    what: str,
    call: Callable[..., object],
    *args: object,
    timeout: float,
    refused: type[ApplyError] | type[ConnectError] = ApplyError,
) -> None:
    """Call an engine through a client, with a deadline; translate the client's errors.

    The call runs in a thread, because clients may wait for ever.

    Args:
        what: Name of the call, for error texts.
        call: A method of a client.
        *args: Arguments of the method.
        timeout: Longest time for the call, in seconds.
        refused: Type of the error if the engine answered with an error.

    Raises:
        SyncTimeout: The call took longer.
        ConnectError: The engine was not reached, or its answer did not come back.
        ApplyError: The engine answered with an error, unless ``refused`` is another type.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call(*args)
        except BaseException as exc:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(exc)

    thread = threading.Thread(target=run, name=f"aiosync-vllm-{what}", daemon=True)
    thread.start()
    thread.join(finite_or_none(timeout))
    if thread.is_alive():
        raise SyncTimeout(f"the engine did not answer {what!r} within {timeout:g} s")
    if not errors:
        return
    error = errors[0]
    if not isinstance(error, Exception):
        raise error
    reason = str(error) if isinstance(error, AiosyncError) else f"{type(error).__name__}: {error}"
    response = getattr(error, "response", None)  # an HTTP error has the engine's answer here
    no_answer = ConnectError | OSError | http.client.HTTPException
    if isinstance(error, no_answer) and response is None:
        raise ConnectError(f"the engine did not answer {what!r}: {reason[:_TEXT_LIMIT]}") from error
    if answer_text := getattr(response, "text", ""):
        reason = f"{reason}: {answer_text}"
    raise refused(f"the engine refused {what!r}: {reason[:_TEXT_LIMIT]}") from error

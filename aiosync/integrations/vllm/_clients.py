"""Talking to an engine: clients for vLLM's server, and for engines in the trainer's own process.

vLLM's own HTTP and Ray clients do as well. Its client protocol has four methods and no word for
pausing; how to pause follows from what kind of client it is. Must not import vLLM.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiosync.errors import AiosyncError, ApplyError, ConfigError, ConnectError, SyncTimeout

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
    """How a trainer talks to an engine: a client of vLLM's, one of this package, or your own."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine reach the trainer."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name the version."""


class HTTPClient:
    """Drives a vLLM server. For trainers without vLLM.

    Args:
        base_url: ``http://host:port`` of a server with ``VLLM_SERVER_DEV_MODE=1``.
        timeout: Seconds for each request.
        headers: Sent with each request, for a proxy in between that asks for credentials.

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
        """Have the engine reach the trainer."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name the version."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("finish_weight_update", body)

    def pause_generation(self, mode: str) -> None:
        """Stop generation, and forget what was computed by the old weights."""
        self._post(f"pause?{urllib.parse.urlencode({'mode': mode, 'clear_cache': 'true'})}")

    def resume_generation(self) -> None:
        """Go on with generation."""
        self._post("resume")

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(
            f"{self.base_url}/{path}", data=data, headers=headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                reply.read()
        except urllib.error.HTTPError as exc:
            with exc:
                reason = exc.read(_MAX_REASON_NBYTES).decode(errors="replace")
            raise ApplyError(f"{request.full_url}: HTTP {exc.code}: {reason}") from exc
        except OSError as exc:  # no connection, or not in time
            raise ConnectError(f"{request.full_url}: {exc}") from exc


class LLMClient:
    """Drives a ``vllm.LLM``, which generates only inside its own calls.

    Use it from the thread that calls ``generate()``, between two calls.

    Args:
        llm: The engine.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm

    def _wait(self, result: Any) -> None:
        """Wait until the engine has done what it was asked; here it has when the call returns."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine reach the trainer."""
        self._have_workers("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights."""
        self._have_workers("update_weights", update_info=update_info)

    def _have_workers(self, method: str, **arguments: Any) -> None:
        self._wait(self._engine.collective_rpc(method, kwargs=arguments))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name the version."""
        self._wait(self._engine.finish_weight_update(weight_version))

    def pause_generation(self, mode: str) -> None:
        """Forget cached prefixes, which belong to the old weights; there is nothing to pause."""
        del mode
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """Nothing to do."""


class AsyncLLMClient(LLMClient):
    """Drives a ``vllm.v1.engine.async_llm.AsyncLLM`` from a thread other than that of its loop.

    Args:
        engine: The engine.
        loop: The loop that it runs on. It must go on running meanwhile.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine)
        self._loop = loop

    def _wait(self, result: Any) -> None:
        asyncio.run_coroutine_threadsafe(result, self._loop).result()

    def pause_generation(self, mode: str) -> None:
        """Stop generation, and forget what was computed by the old weights."""
        self._wait(self._engine.pause_generation(mode=mode, clear_cache=True))

    def resume_generation(self) -> None:
        """Go on with generation."""
        self._wait(self._engine.resume_generation())


# -- any client, with deadlines and reasons ----------------------------------------------------


class _RayActors:
    """Pauses engines in Ray actors, for which vLLM's client of them has no method."""

    def __init__(self, handles: Any, timeout: float) -> None:
        self._handles = handles
        self._timeout = timeout

    def pause_generation(self, mode: str) -> None:
        """Stop generation, and forget what was computed by the old weights."""
        import ray

        waits = []
        for handle in self._handles:
            if hasattr(handle, "pause_generation"):
                waits.append(handle.pause_generation.remote(mode=mode, clear_cache=True))
            else:  # an actor of LLM: it generates in one call at a time, so this one waits for it
                waits.append(handle.reset_prefix_cache.remote(reset_running_requests=True))
        ray.get(waits, timeout=self._timeout)

    def resume_generation(self) -> None:
        """Go on with generation."""
        import ray

        able = [each for each in self._handles if hasattr(each, "resume_generation")]
        ray.get([each.resume_generation.remote() for each in able], timeout=self._timeout)


def pausing(client: Any, timeout: float) -> Any:
    """What has ``pause_generation(mode)`` and ``resume_generation()`` for the engine of a client.

    Args:
        client: vLLM's HTTP or Ray client; or anything with these two methods.
        timeout: Seconds for each call.

    Raises:
        ConfigError: The client knows no way to pause.
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
    """Call an engine in a thread, as clients wait for ever, and translate what they raise.

    Args:
        what: The name of the call, for errors.
        call: A method of a client.
        *args: Its arguments.
        timeout: Seconds that it may take.
        refused: The error where the engine has answered with one.

    Raises:
        SyncTimeout: It took longer.
        ConnectError: The engine was not reached.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call(*args)
        except BaseException as exc:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(exc)

    thread = threading.Thread(target=run, name=f"aiosync-vllm-{what}", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise SyncTimeout(f"the engine did not answer {what!r} within {timeout:g} s")
    if not errors:
        return
    error = errors[0]
    if not isinstance(error, Exception):
        raise error
    reason = str(error) if isinstance(error, AiosyncError) else f"{type(error).__name__}: {error}"
    response = getattr(error, "response", None)  # of an HTTP error: it has what the engine said
    if isinstance(error, ConnectError | OSError) and response is None:
        raise ConnectError(f"{what!r} did not reach the engine: {reason[:_TEXT_LIMIT]}") from error
    if said := getattr(response, "text", ""):
        reason = f"{reason}: {said}"
    raise refused(f"the engine refused {what!r}: {reason[:_TEXT_LIMIT]}") from error

"""Clients: for vLLM's server, and for engines in the trainer's own process.

vLLM's own HTTP and Ray clients do as well. Must not import vLLM.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Coroutine, Mapping
from typing import Any

from aiosync.errors import ApplyError, ConfigError, ConnectError

__all__ = ["AsyncLLMClient", "HTTPClient", "LLMClient"]

_MAX_REASON_NBYTES = 65536


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
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine reach the trainer."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name the version."""
        self._llm.finish_weight_update(weight_version)

    def pause_generation(self, mode: str) -> None:
        """Forget cached prefixes, which belong to the old weights; there is nothing to pause."""
        del mode
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """Nothing to do."""


class AsyncLLMClient:
    """Drives a ``vllm.v1.engine.async_llm.AsyncLLM`` from a thread other than that of its loop.

    Args:
        engine: The engine.
        loop: The loop that it runs on. It must go on running meanwhile.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine reach the trainer."""
        call = {"init_info": init_info}
        self._wait(self._engine.collective_rpc("init_weight_transfer_engine", kwargs=call))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights."""
        call = {"update_info": update_info}
        self._wait(self._engine.collective_rpc("update_weights", kwargs=call))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name the version."""
        self._wait(self._engine.finish_weight_update(weight_version))

    def pause_generation(self, mode: str) -> None:
        """Stop generation, and forget what was computed by the old weights."""
        self._wait(self._engine.pause_generation(mode=mode, clear_cache=True))

    def resume_generation(self) -> None:
        """Go on with generation."""
        self._wait(self._engine.resume_generation())

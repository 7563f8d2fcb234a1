"""Talking to an engine: whatever client a trainer has, with deadlines, and with reasons.

vLLM's client protocol has four methods and no word for pausing; how to pause follows from what
kind of client it is. Must not import the engine's side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from aiosync.errors import AiosyncError, ApplyError, ConfigError, ConnectError, SyncTimeout
from aiosync.integrations.vllm._base import VLLMWeightSyncClient
from aiosync.integrations.vllm._clients import HTTPClient

__all__ = ["Control"]

_T = TypeVar("_T")
_TEXT_LIMIT = 2000


class Control:
    """A client, with deadlines.

    Args:
        client: vLLM's HTTP or Ray client; or anything with its four methods. With methods
            ``pause_generation(mode)`` and ``resume_generation()`` it can pause, too.
        pause: As for :class:`AiosyncTrainerInitInfo`.
        timeout: Seconds for each call.

    Raises:
        ConfigError: The client knows no way to pause.
    """

    def __init__(self, client: VLLMWeightSyncClient, *, pause: str | None, timeout: float) -> None:
        self._client = client
        self._mode = pause
        self._timeout = timeout
        self._pause: Callable[[str], None]
        self._resume: Callable[[], None]
        own = getattr(client, "pause_generation", None)
        if own is not None:
            self._pause, self._resume = own, client.resume_generation  # type: ignore[attr-defined]
        elif hasattr(client, "base_url"):
            http = HTTPClient(client.base_url, timeout=timeout)
            self._pause, self._resume = http.pause_generation, http.resume_generation
        elif hasattr(client, "handles"):
            self._pause, self._resume = self._pause_ray, self._resume_ray
        elif pause is not None:
            raise ConfigError(
                f"{type(client).__name__} cannot pause an engine: give it pause_generation(mode) "
                "and resume_generation(), or set pause=None in the init info"
            )

    def init(self, init_info: dict[str, Any]) -> None:
        """Have the engine reach the trainer."""
        client = self._client
        self._call("init", lambda: client.init_weight_transfer_engine(init_info), ConnectError)

    def start(self) -> None:
        """Begin an update."""
        self._call("start", self._client.start_weight_update, ApplyError)

    def update(self, version: int, *, timeout: float, undo: bool = False) -> None:
        """Have the engine load a version, or take it back."""
        update_info = {"version": version, "timeout": timeout, "undo": undo}
        self._call("update", lambda: self._client.update_weights(update_info), ApplyError)

    def finish(self, version: str | None = None) -> None:
        """End an update."""
        self._call("finish", lambda: self._client.finish_weight_update(version), ApplyError)

    def pause(self) -> None:
        """Stop generation, unless the init info says not to."""
        if self._mode is not None:
            mode = self._mode
            self._call("pause", lambda: self._pause(mode), ApplyError)

    def resume(self) -> None:
        """Go on with generation."""
        if self._mode is not None:
            self._call("resume", self._resume, ApplyError)

    # -- deadlines and reasons -----------------------------------------------------------------

    def _call(
        self, what: str, call: Callable[[], _T], refused: type[ApplyError] | type[ConnectError]
    ) -> _T:
        """Call in a thread, as clients wait for ever, and translate what they raise."""
        outcome: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call())
            except BaseException as exc:  # noqa: BLE001 - raised again in the thread that waits
                errors.append(exc)

        thread = threading.Thread(target=run, name=f"aiosync-vllm-{what}", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if thread.is_alive():
            raise SyncTimeout(f"the engine did not answer {what!r} within {self._timeout:g} s")
        if not errors:
            return outcome[0]
        error = errors[0]
        if not isinstance(error, Exception):
            raise error
        replied = getattr(error, "response", None) is not None
        if isinstance(error, ConnectError | OSError) and not replied:
            raise ConnectError(f"{what!r} did not reach the engine: {_reason(error)}") from error
        raise refused(f"the engine refused {what!r}: {_reason(error)}") from error

    # -- pausing -------------------------------------------------------------------------------

    def _pause_ray(self, mode: str) -> None:
        import ray

        waits = []
        for handle in self._client.handles:  # type: ignore[attr-defined]
            if hasattr(handle, "pause_generation"):
                waits.append(handle.pause_generation.remote(mode=mode, clear_cache=True))
            else:  # an actor of LLM: it generates in one call at a time, so this one waits for it
                waits.append(handle.reset_prefix_cache.remote(reset_running_requests=True))
        ray.get(waits, timeout=self._timeout)

    def _resume_ray(self) -> None:
        import ray

        handles = self._client.handles  # type: ignore[attr-defined]
        waits = [h.resume_generation.remote() for h in handles if hasattr(h, "resume_generation")]
        ray.get(waits, timeout=self._timeout)


def _reason(error: Exception) -> str:
    """What the engine said, which an HTTP error keeps in its body."""
    body = getattr(getattr(error, "response", None), "text", None)
    text = f"{error}: {body}" if isinstance(body, str) and body else f"{error}"
    if isinstance(error, AiosyncError):
        return text[:_TEXT_LIMIT]
    return f"{type(error).__name__}: {text[:_TEXT_LIMIT]}"

"""Transports that a program made for TorchRL's present schemes, as this generation calls its own.

Must not import torch or schemes.
"""

from __future__ import annotations

from typing import Any

from aiosync.sync import InitialSyncTransport

__all__ = ["Backend"]


class Backend:
    """Stands between a role and a transport that has TorchRL's present interface.

    Weights that the transport returns are put into the model between two forwards; it is given
    none to change by itself.

    Args:
        inner: The transport. ``send_weights_async(weights)``, ``wait_ack()``, ``send_ack(text)``
            and ``close()`` are optional.
        model_id: Name of the model.
    """

    def __init__(self, inner: InitialSyncTransport, model_id: str) -> None:
        self._inner: Any = inner
        self._model_id = model_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send_weights(self, model_id: str, weights: Any) -> None:
        """See :class:`aiosync.legacy.TransportBackend`."""
        del model_id
        getattr(self._inner, "send_weights_async", self._inner.send_weights)(weights)

    send_weights_async = send_weights

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """See :class:`aiosync.legacy.TransportBackend`."""
        found = self._inner.receive_weights(timeout, weights=None, model=None, strategy=None)
        return None if found is None else (self._model_id, found)

    def check_connection(self) -> bool:
        """Whether the other side is there, as far as the transport can tell."""
        return bool(getattr(self._inner, "check_connection", lambda: True)())

    def meet_workers(self) -> None:
        """Let the trainer's side do what it does before the first send."""
        self._inner.setup_connection_and_weights_on_sender()

    def meet_trainer(self, worker_idx: int, strategy: Any) -> Any:
        """Let a worker's side do what it does before the first update; its weights, if any."""
        return self._inner.setup_connection_and_weights_on_receiver(
            worker_idx=worker_idx, weights=None, model=None, strategy=strategy
        )

"""A thread in which a user's own scheme receives.

Must not import schemes.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from aiosync._repr import text_of

__all__ = ["BackgroundReceiver"]

_JOIN_SECONDS = 5.0


class BackgroundReceiver:
    """Thread that calls a scheme's ``receive()`` at each ``"receive"`` instruction.

    The instructions come from the scheme's ``_wait_for_instruction()``. The thread ends when that
    returns ``"stop"`` or ``None``, or raises. An error of ``receive()`` is a warning: the trainer
    gets it, too, and the next update may fit.

    Args:
        scheme: The scheme.
        worker_idx: Index of the worker, for the name of the thread.

    Attributes:
        stopping: Event that ends the thread before its next ``receive()``.
    """

    def __init__(self, scheme: Any, worker_idx: int | None) -> None:
        self.stopping: threading.Event = threading.Event()
        self._scheme = scheme
        name = f"WeightReceiver-{worker_idx}"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        """Receive at each instruction, in the thread."""
        scheme = self._scheme
        while scheme._wait_for_instruction() not in (None, "stop") and not self.stopping.is_set():
            try:
                scheme.receive()
            except Exception as exc:  # noqa: BLE001 - becomes a warning
                what = f"{type(scheme).__name__} could not receive"
                text = f"{what}: {type(exc).__name__}: {text_of(exc)}"
                warnings.warn(text, RuntimeWarning, stacklevel=1)

    def stop(self) -> None:
        """Have the thread end after what it does now; wait for that, at most 5 seconds."""
        self.stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

"""The loop of the thread in which a user's own scheme receives.

Must not import schemes.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from aiosync._repr import text_of

__all__ = ["receive_in_background"]

_PAUSE_SECONDS = 0.1  # after an error, as a hook that always raises would take a whole core


def receive_in_background(scheme: Any, stopping: threading.Event) -> None:
    """Call a scheme's ``receive()`` at each ``"receive"`` instruction.

    The instructions come from the scheme's ``_wait_for_instruction()``. The loop ends when that
    returns ``"stop"`` or ``None``. An error is a warning: the trainer gets that of ``receive()``,
    too, and the next update may fit.

    Args:
        scheme: The scheme.
        stopping: Event that ends the loop before its next instruction.
    """
    while not stopping.is_set():
        try:
            instruction = scheme._wait_for_instruction()
            if instruction in (None, "stop") or stopping.is_set():
                return
            if instruction == "receive":
                scheme.receive()
            else:
                _warn(scheme, f"does not know the instruction {instruction!r}")
        except Exception as exc:  # noqa: BLE001 - becomes a warning
            if not stopping.wait(_PAUSE_SECONDS):
                _warn(scheme, f"could not receive: {type(exc).__name__}: {text_of(exc)}")


def _warn(scheme: Any, text: str) -> None:
    """Warn of what went wrong in the background."""
    warnings.warn(f"{type(scheme).__name__} {text}", RuntimeWarning, stacklevel=2)

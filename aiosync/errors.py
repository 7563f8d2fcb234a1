"""The exceptions that aiosync raises, as one tree with one root.

Third-party exceptions are translated into this tree once, where they enter the
library, with ``raise ... from exc``. ``asyncio.CancelledError`` is never
translated. This module imports nothing from aiosync and nothing heavy.

::

    AiosyncError
    +- ConfigError (ValueError)             bad option, found before any I/O
    +- TransportError                       the link; a new link may work
    |  +- ConnectError                      could not reach the peer, or the handshake failed
    |  |  +- AuthError                      no common token, or a certificate was refused
    |  +- TransportClosed                   we closed it
    |  +- PeerClosed                        the peer closed cleanly between messages
    |  +- TransportBroken                   lost, or a transfer was cut mid-message (sticky)
    |  +- TransportBusy                     a second concurrent send() or recv()
    +- ProtocolError                        abstract
    |  +- LocalProtocolError (RuntimeError) we asked for something illegal now
    |  +- RemoteProtocolError               the peer sent something illegal (sticky)
    |     +- FrameTooLarge
    |     +- WireVersionMismatch
    +- SyncTimeout (TimeoutError)
    |  +- ConnectTimeout, SendTimeout, RecvTimeout, AckTimeout
    |  +- AdmissionTimeout                  a request was not admitted; it may be tried again
    |  +- SwapTimeout                       running requests did not end
    +- WeightsError
    |  +- ManifestMismatch, StaleVersion, ApplyError, WeightsChanged
    +- PartialSyncError                     some workers did not get the update
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "AckTimeout",
    "AdmissionTimeout",
    "AiosyncError",
    "ApplyError",
    "AuthError",
    "ConfigError",
    "ConnectError",
    "ConnectTimeout",
    "FrameTooLarge",
    "LocalProtocolError",
    "ManifestMismatch",
    "PartialSyncError",
    "PeerClosed",
    "ProtocolError",
    "RecvTimeout",
    "RemoteProtocolError",
    "SendTimeout",
    "StaleVersion",
    "SwapTimeout",
    "SyncTimeout",
    "TransportBroken",
    "TransportBusy",
    "TransportClosed",
    "TransportError",
    "WeightsChanged",
    "WeightsError",
    "WireVersionMismatch",
]


class AiosyncError(Exception):
    """Root of every exception that aiosync raises on purpose.

    Each has a note, the last line of its traceback, that names its section of the documentation.
    The text itself has no such link: texts are joined into longer ones, and sent to peers.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        second = isinstance(self, (SyncTimeout, WeightsError, PartialSyncError))
        page = "errors-updates" if second else "errors"
        name = next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__)
        self.add_note(f"See reference/{page}#{name.lower()} in the documentation of aiosync.")


class ConfigError(AiosyncError, ValueError):
    """An option or argument is wrong; nothing was sent and nothing changed."""


class TransportError(AiosyncError):
    """A fault of one link. A new link may work."""


class ConnectError(TransportError):
    """The peer could not be reached, or it refused the handshake."""


class AuthError(ConnectError):
    """The two ends do not share a token, or the certificate of one was refused by the other."""


class TransportClosed(TransportError):
    """The link was closed by this side."""


class PeerClosed(TransportError):
    """The peer closed the link between two messages, or its process ended there."""


class TransportBroken(TransportError):
    """The link was lost, or a transfer was cut in mid-message. Sticky: open a new link."""


class TransportBusy(TransportError):
    """A second ``send()`` or a second ``recv()`` was started while one was running."""


class ProtocolError(AiosyncError):
    """Abstract parent of the two sides of a protocol fault."""


class LocalProtocolError(ProtocolError, RuntimeError):
    """This side asked for something that is not legal in the current state."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the wire format does not allow. Sticky."""


class FrameTooLarge(RemoteProtocolError):
    """A frame announced more bytes than the limits allow; nothing was allocated for it."""


class WireVersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the wire format."""


class SyncTimeout(AiosyncError, TimeoutError):
    """A deadline passed. The subclass says in which phase."""


class ConnectTimeout(SyncTimeout):
    """The rendez-vous or its handshake did not finish in time."""


class SendTimeout(SyncTimeout):
    """The link did not take the message in time."""


class RecvTimeout(SyncTimeout):
    """No message arrived in time. The link is intact."""


class AckTimeout(SyncTimeout):
    """Some workers did not acknowledge a version in time.

    Attributes:
        worker_ids: Indices of the workers that did not answer.
        version: The version that was waited for, or ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_ids: Iterable[int] = (),
        version: int | None = None,
    ) -> None:
        super().__init__(message)
        self.worker_ids: frozenset[int] = frozenset(worker_ids)
        self.version = version


class AdmissionTimeout(SyncTimeout):
    """A request was not admitted in time.

    Nothing was computed, so it may be tried again, or on another server.

    Attributes:
        version: The version that is being served; 0 when there is none yet.
        min_version: The lowest version that the request asked for.
        retry_after: Seconds after which another attempt makes sense.
    """

    def __init__(
        self, message: str, *, version: int = 0, min_version: int = 0, retry_after: float = 1.0
    ) -> None:
        super().__init__(message)
        self.version = version
        self.min_version = min_version
        self.retry_after = retry_after


class SwapTimeout(SyncTimeout):
    """Requests that were running did not end in time, so the weights were not switched.

    Attributes:
        running: Number of requests that were running.
    """

    def __init__(self, message: str, *, running: int = 0) -> None:
        super().__init__(message)
        self.running = running


class WeightsError(AiosyncError):
    """A fault of the weights themselves; the link is fine."""


class WeightsChanged(WeightsError):
    """The weights were written to while they were copied. No worker gets that version."""


class ManifestMismatch(WeightsError, ValueError, KeyError):
    """The weights do not fit the target. Nothing was changed.

    It is a ``KeyError``, too, which TorchRL's ``WeightStrategy`` raises.

    Attributes:
        missing: Names that the target has and the weights lack.
        unexpected: Names that the weights have and the target lacks.
        mismatched: For each name whose shape or dtype differs, what was expected and what arrived,
            as text.
    """

    def __init__(
        self,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> None:
        self.missing: tuple[str, ...] = tuple(missing)
        self.unexpected: tuple[str, ...] = tuple(unexpected)
        self.mismatched: Mapping[str, str] = MappingProxyType(dict(mismatched or {}))
        self.hint = hint
        differences = (
            ("missing", ", ", self.missing),
            ("unexpected", ", ", self.unexpected),
            ("mismatched", "; ", [f"{name}: {why}" for name, why in self.mismatched.items()]),
        )
        parts = [f"{kind}: {comma.join(texts)}" for kind, comma, texts in differences if texts]
        text = "the weights do not fit the target (" + " | ".join(parts or ["no detail"]) + ")"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __str__(self) -> str:
        """Return the text, around which a ``KeyError`` would put quotes."""
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        again = functools.partial(
            type(self),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=dict(self.mismatched),
            hint=self.hint,
        )
        return again, ()


class StaleVersion(WeightsError):
    """An update is not newer than what the receiver already has."""


class ApplyError(WeightsError):
    """A receiver refused an update; its module kept the version it had.

    If only its hook ``applied`` raised, the module has the new version.

    Attributes:
        worker_idx: The worker that refused, or ``None`` when raised in the worker itself.
        version: The version that was refused, or ``None``.
        remote_type: Name of the exception's type in the worker, or ``""``.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_idx: int | None = None,
        version: int | None = None,
        remote_type: str = "",
    ) -> None:
        super().__init__(message)
        self.worker_idx = worker_idx
        self.version = version
        self.remote_type = remote_type


class PartialSyncError(AiosyncError):
    """Some workers did not get the update; the others have it and keep working.

    Attributes:
        acked: Indices of the workers that applied the version (or a newer one).
        failed: For each worker that did not, the error that says why.
        version: The version that was sent.
    """

    def __init__(
        self,
        *,
        acked: Iterable[int] = (),
        failed: Mapping[int, AiosyncError] | None = None,
        version: int | None = None,
    ) -> None:
        self.acked: frozenset[int] = frozenset(acked)
        self.failed: Mapping[int, AiosyncError] = MappingProxyType(dict(failed or {}))
        self.version = version
        listed = "; ".join(
            f"worker {idx}: {type(error).__name__}: {error}"
            for idx, error in sorted(self.failed.items())
        )
        listed = listed.rstrip(".")
        have = ", ".join(map(str, sorted(self.acked))) or "none"
        what = f"did not reach every worker. {listed}"
        if not self.failed:
            what = "reached every worker that is connected, but require= asks for more"
        super().__init__(f"version {version} {what}. Workers that have it: {have}")

    def __reduce__(self) -> tuple[Any, ...]:
        again = functools.partial(
            type(self), acked=self.acked, failed=dict(self.failed), version=self.version
        )
        return again, ()

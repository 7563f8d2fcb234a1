"""Messages to an engine: the address of its trainer, and the version to load.

Every message to an engine is JSON and holds no secret: it names the place of a token, never the
token. Must not import vLLM, nor the engine's or the trainer's side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from aiosync.protocol import validate_seconds
from aiosync.schemes.internal import meet_at
from aiosync.sync import SharedMemWeightSyncScheme, TCPWeightSyncScheme, WeightSyncScheme
from aiosync.sync._schemes import core_of
from aiosync.transports.credentials import TLS, read_token

__all__ = ["NO_COPY", "SHARED", "AiosyncInitInfo", "AiosyncUpdateInfo"]

SHARED = "shm"
"""Scheme of the addresses of shared memory, for engines on the trainer's host."""

NO_COPY = "this engine has no copy to roll back to: restart it"
"""End of a worker's error that leaves its engine unusable; the trainer looks for this text."""


@dataclass
class AiosyncInitInfo:
    """Information for each worker of an engine when a trainer connects. JSON, without secrets.

    The trainer's side makes it; write one yourself for a trainer without vLLM.

    Attributes:
        address: Address that the trainer listens at: ``tcp://host:port``, ``unix:///path``, or the
            ``shm://`` address of a trainer on this host.
        model_id: Name of the model, the same on both sides.
        first_worker: Index of the first worker of this engine, if several engines have one
            trainer. Rank ``r`` of the engine is worker ``first_worker + r``.
        timeout: Seconds to reach the trainer. The engine generates nothing meanwhile.
        token_file: File with the shared token on the engine's host; without it, the variable
            ``AIOSYNC_TOKEN`` of the engine's environment is used.
        tls: Arguments of :class:`aiosync.TLS` for the engine's end, such as ``{"ca": "ca.pem"}``.
        check: Reference for the names, shapes and dtypes of an update. ``"checkpoint"`` is the
            checkpoint that the engine was started from, or the first update if its files cannot be
            read; ``"first"`` is the first update; ``"none"`` leaves the check to vLLM's loaders.
        rollback: Keep a copy of the weights in host memory, and restore it when an update fails
            halfway or is to be undone. Without it such a failure leaves the engine unusable.
    """

    address: str
    model_id: str = "policy"
    first_worker: int = 0
    timeout: float = 30.0
    token_file: str | None = None
    tls: dict[str, Any] | None = None
    check: Literal["checkpoint", "first", "none"] = "checkpoint"
    rollback: bool = True

    def __post_init__(self) -> None:
        validate_seconds("timeout", self.timeout, endless=True)
        if self.check not in ("checkpoint", "first", "none"):
            raise ValueError(f"check must be 'checkpoint', 'first' or 'none', not {self.check!r}")
        if self.first_worker < 0:
            raise ValueError(f"first_worker must not be negative, got {self.first_worker!r}")

    def receiving_scheme(self) -> WeightSyncScheme:
        """Make the scheme of a worker of the engine, without a role; updates will be staged.

        Raises:
            ConfigError: The address or the token file cannot be used.
        """
        options: dict[str, Any] = {"apply": "manual", "timeout": self.timeout}
        if not self.address.startswith(f"{SHARED}:"):
            return TCPWeightSyncScheme(
                self.address,
                "state_dict",
                token=read_token(self.token_file, "token_file"),
                tls=None if self.tls is None else TLS(**self.tls),
                reconnect=None,  # the engine outlives trainers, and goes on with its weights
                **options,
            )
        scheme = SharedMemWeightSyncScheme("state_dict", **options)
        parts = urlsplit(self.address)
        pid = parse_qs(parts.query).get("pid", [""])[0]
        address = parts.path if parts.path.strip("/") else f"\0{parts.netloc}"
        meet_at(core_of(scheme), address, int(pid) if pid.isdigit() else None)
        return scheme


@dataclass
class AiosyncUpdateInfo:
    """Information for each worker of an engine about an update to load.

    Attributes:
        version: Version to load; usually it is already staged.
        timeout: Seconds to wait until the version is staged.
        undo: Restore the weights from before this version, instead of loading it.
    """

    version: int
    timeout: float = 10.0
    undo: bool = False

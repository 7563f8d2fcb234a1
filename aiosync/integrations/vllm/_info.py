"""What the two sides are told, and the schemes that they make of it.

Everything that goes to an engine is JSON and holds no secret: it says where a token is, never
what it is. Where vLLM is not installed, as in many a trainer, what is written here stands in for
its classes; type checkers see nothing else. Must not import anything else of vLLM, nor the engine's
or the trainer's side.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias
from urllib.parse import parse_qs, urlsplit

import torch

from aiosync.errors import ConfigError
from aiosync.protocol import validate_seconds
from aiosync.schemes.inside import meet_at, meeting_point
from aiosync.sync import SharedMemWeightSyncScheme, TCPWeightSyncScheme, WeightSyncScheme
from aiosync.sync._schemes import core_of
from aiosync.transports.credentials import TLS, Secret

__all__ = [
    "HAS_VLLM",
    "AiosyncInitInfo",
    "AiosyncTrainerInitInfo",
    "AiosyncUpdateInfo",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "VLLMWeightSyncClient",
    "WeightSource",
    "address_of",
    "sending_scheme",
]

_SHARED = "shm"

HAS_VLLM: bool = find_spec("vllm") is not None
"""Whether vLLM is installed."""

if TYPE_CHECKING or not HAS_VLLM:
    WeightSource: TypeAlias = Iterable[tuple[str, torch.Tensor]]
    """Names and tensors of a trainer, to be iterated anew for each update, in one order."""

    class VLLMWeightSyncClient(Protocol):
        """How a trainer talks to an engine."""

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            """Have the engine reach the trainer."""

        def start_weight_update(self) -> None:
            """Begin an update."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load weights."""

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            """End an update, and name the version."""

    @dataclass
    class WeightTransferInitInfo:
        """What an engine is told when a trainer comes."""

    @dataclass
    class WeightTransferUpdateInfo:
        """What an engine is told with each update."""

    @dataclass
    class TrainerInitInfo:
        """What the trainer's side is made of."""

        backend: ClassVar[str]
        rank: int = field(kw_only=True)

        @property
        def is_sender(self) -> bool:
            """Whether this rank sends."""
            return self.rank == 0

    class TrainerWeightTransferEngine:
        """The trainer's side, in each of its ranks."""

        init_info_cls: type[TrainerInitInfo]
        is_sender: bool
        client: VLLMWeightSyncClient
        source: WeightSource | None

        def __init__(
            self,
            *,
            client: VLLMWeightSyncClient,
            source: WeightSource | None = None,
            is_sender: bool = True,
        ) -> None:
            self.is_sender = is_sender
            self.client = client
            self.source = source

else:
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )


@dataclass
class AiosyncInitInfo(WeightTransferInitInfo):
    """What each worker of an engine is told when a trainer connects. JSON, without secrets.

    The trainer's side makes it; write one yourself for a trainer without vLLM.

    Attributes:
        address: Where the trainer listens: ``tcp://host:port``, ``unix:///path``, or the
            ``shm://`` address of a trainer on this host.
        model_id: Name of the model, the same on both sides.
        first_worker: Index of the first worker of this engine, where several engines have one
            trainer. Rank ``r`` of the engine is worker ``first_worker + r``.
        timeout: Seconds to reach the trainer. The engine generates nothing meanwhile.
        token_file: File with the shared token on the engine's host; without it, the variable
            ``AIOSYNC_TOKEN`` of the engine's environment is used.
        tls: Arguments of :class:`aiosync.TLS` for the engine's end, such as ``{"ca": "ca.pem"}``.
        check: What the names, shapes and dtypes of an update have to be equal to:
            ``"checkpoint"``, that which the engine was started from, or the first update where
            its files cannot be read; ``"first"``, the first update; ``"none"`` leaves it to
            vLLM's loaders.
        rollback: Keep a copy of the weights in host memory, and put it back when an update
            fails halfway. Without it such a failure leaves the engine unusable.
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
        """The scheme of a worker of the engine, without a role; its weights are staged.

        Raises:
            ConfigError: The address or the token file cannot be used.
        """
        options: dict[str, Any] = {"apply": "manual", "timeout": self.timeout}
        if not self.address.startswith(f"{_SHARED}:"):
            return TCPWeightSyncScheme(
                self.address,
                "state_dict",
                token=_token_of(self.token_file),
                tls=None if self.tls is None else TLS(**self.tls),
                reconnect=None,  # the engine outlives trainers, and goes on with what it has
                **options,
            )
        scheme = SharedMemWeightSyncScheme("state_dict", **options)
        parts = urlsplit(self.address)
        pid = parse_qs(parts.query).get("pid", [""])[0]
        address = parts.path if parts.path.strip("/") else f"\0{parts.netloc}"
        meet_at(core_of(scheme), address, int(pid) if pid.isdigit() else None)
        return scheme


@dataclass
class AiosyncUpdateInfo(WeightTransferUpdateInfo):
    """What each worker of an engine is told with an update.

    Attributes:
        version: The version to load; usually it is already staged.
        timeout: Seconds to wait for it if it is not.
        undo: Instead, restore the weights from before this version.
    """

    version: int
    timeout: float = 10.0
    undo: bool = False


@dataclass
class AiosyncTrainerInitInfo(TrainerInitInfo):
    """What the trainer's side is made of; pass it to vLLM's ``WeightTransferTrainerFactory``.

    ``rank`` is this trainer process's rank; rank 0 sends, the others take part in gathering.

    Attributes:
        address: Where to listen: ``tcp://host:port`` (port 0 lets the system choose),
            ``unix:///path``, or ``"shm"`` for shared memory with engines of this host.
        connect_address: Where engines dial, if that is another address; for example with the
            host's name in place of ``0.0.0.0``.
        model_id: Name of the model.
        num_workers: Workers of all engines together: tensor, pipeline and data parallel ranks.
        pause: What becomes of requests in flight while an update is activated: ``"keep"``
            freezes them, ``"wait"`` lets them end first, ``"abort"`` ends them; ``None`` does
            not pause at all.
        wire_dtype: Cast floating tensors to this while sending; a name such as ``"bfloat16"``.
        timeout: Seconds for meeting the engine, and for an update to be staged by all workers.
        activation_timeout: Seconds for each call to the engine.
        token: The shared token; else that in ``token_file``, else of ``AIOSYNC_TOKEN``.
        token_file: File with the token on this host.
        tls: Certificates of this side.
        worker_token_file: File with the token on the engines' host.
        worker_tls: As :attr:`AiosyncInitInfo.tls`.
        check: As :attr:`AiosyncInitInfo.check`.
        rollback: As :attr:`AiosyncInitInfo.rollback`.
        first_version: What versions count from; a trainer that resumes continues with it.
    """

    backend: ClassVar[str] = "aiosync"

    address: str = "tcp://127.0.0.1:0"
    connect_address: str | None = None
    model_id: str = "policy"
    num_workers: int = 1
    pause: Literal["keep", "wait", "abort"] | None = "keep"
    wire_dtype: str | torch.dtype | None = None
    timeout: float = 120.0
    activation_timeout: float = 120.0
    token: str | bytes | Secret | None = field(default=None, repr=False)
    token_file: str | None = None
    tls: TLS | None = None
    worker_token_file: str | None = None
    worker_tls: dict[str, Any] | None = None
    check: Literal["checkpoint", "first", "none"] = "checkpoint"
    rollback: bool = True
    first_version: int = 1

    def __post_init__(self) -> None:
        if self.pause not in ("keep", "wait", "abort", None):
            raise ConfigError(f"pause must be 'keep', 'wait', 'abort' or None, not {self.pause!r}")
        if self.num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {self.num_workers!r}")
        for name in ("timeout", "activation_timeout"):
            validate_seconds(name, getattr(self, name), endless=True)

    def for_workers(self, address: str) -> dict[str, Any]:
        """The init info of the engines' workers, for the address that was bound."""
        return {
            "address": self.connect_address or address,
            "model_id": self.model_id,
            "timeout": min(self.timeout, 30.0),
            "token_file": self.worker_token_file,
            "tls": self.worker_tls,
            "check": self.check,
            "rollback": self.rollback,
        }


# -- schemes -----------------------------------------------------------------------------------


def sending_scheme(info: AiosyncTrainerInitInfo) -> WeightSyncScheme:
    """The scheme of a trainer, without a role.

    Raises:
        ConfigError: The address, the token file or the dtype cannot be used.
    """
    given: Any = info.wire_dtype
    options: dict[str, Any] = {
        "timeout": info.timeout,
        "first_version": info.first_version,
        "wire_dtype": getattr(torch, given, given) if isinstance(given, str) else given,
    }
    if info.address == _SHARED:
        return SharedMemWeightSyncScheme("state_dict", **options)
    token: Any = info.token.value if isinstance(info.token, Secret) else info.token
    token = _token_of(info.token_file) if token is None else token
    return TCPWeightSyncScheme(info.address, "state_dict", token=token, tls=info.tls, **options)


def address_of(scheme: WeightSyncScheme) -> str:
    """Where workers find the sender; after ``init_on_sender()``."""
    if isinstance(scheme, TCPWeightSyncScheme):
        return scheme.address
    found, pid = meeting_point(core_of(scheme))
    return f"{_SHARED}://{found.removeprefix(chr(0))}?pid={pid}"


def _token_of(path: str | None) -> bytes | None:
    """The token of a file, without a newline at its end, or that of the environment."""
    if path is None:
        text = os.environ.get("AIOSYNC_TOKEN")
        return None if text is None else os.fsencode(text)
    try:
        token = Path(path).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as exc:
        raise ConfigError(f"token_file: {path}: cannot be read: {exc.strerror}") from exc
    if not token:
        raise ConfigError(f"token_file: {path} is empty")
    return token

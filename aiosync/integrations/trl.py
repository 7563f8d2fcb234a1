"""Weights from TRL's ``AsyncGRPOTrainer`` to a vLLM server with the back-end ``aiosync``.

TRL stops the generation, sends, and lets it go on. The object here sends while the engine
generates, and pauses the engine only for the switch. Written for TRL 1.16 and 1.17, whose
``WeightTransferProtocol`` it follows; needs no TRL. See ``docs/coming-from/trl.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from aiosync.errors import ConfigError, LocalProtocolError
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo, HTTPClient
from aiosync.integrations.vllm._clients import VLLMWeightSyncClient
from aiosync.transports.credentials import Secret

if TYPE_CHECKING:
    import torch

__all__ = ["WeightTransfer"]

_VERSIONS = ("1.16", "1.17")


class WeightTransfer:
    """The argument ``weight_transfer=`` of ``AsyncGRPOTrainer``.

    TRL calls the methods in its main process, from a thread without an event loop.

    Args:
        server: URL of the vLLM server, such as ``"http://engine:8000"``; or a client that calls the
            engine. The engine has ``WeightTransferConfig(backend="aiosync")``.
        address: Address to listen at, which the engine's workers dial; or ``"shm"``.
        token: The shared token; ``None`` takes that in ``AIOSYNC_TOKEN``.
        options: Other fields of :class:`~aiosync.integrations.vllm.AiosyncTrainerInitInfo`, such as
            ``num_workers`` and ``timeout``; but not ``rank``.

    Attributes:
        engine: The trainer's side of the link; ``None`` before :meth:`init_weight_transfer` and
            after :meth:`destroy`.

    Raises:
        ConfigError: An option cannot be used, or TRL is installed in a version that calls other
            methods.
    """

    def __init__(
        self,
        server: str | VLLMWeightSyncClient,
        address: str = "tcp://127.0.0.1:0",
        token: str | bytes | Secret | None = None,
        **options: Any,
    ) -> None:
        _refuse_other_versions()
        try:
            self._info = AiosyncTrainerInitInfo(rank=0, address=address, token=token, **options)
        except TypeError as exc:
            raise ConfigError(f"WeightTransfer(): {exc}") from exc
        self._client = HTTPClient(server) if isinstance(server, str) else server
        self.engine: AiosyncTrainerEngine | None = None

    def init_weight_transfer(self) -> None:
        """Listen, and wait for the engine's workers to connect. Bounded by ``timeout``.

        Raises:
            ConnectError: The engine refused, or its workers could not connect.
            SyncTimeout: The engine did not answer.
        """
        self.destroy()
        self.engine = AiosyncTrainerEngine.trainer_init(self._info, client=self._client)

    def pause(self) -> None:
        """Do nothing: the engine generates while the weights travel, and :meth:`resume` pauses."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights, and send them in the background.

        The device has one gathered tensor at a time, and the host a copy of all of them.

        Args:
            iterator: Names and whole tensors in checkpoint format, on any device.

        Raises:
            PartialSyncError: A worker of the engine has disconnected.
        """
        engine = self._require()
        # The engine iterates it to its end in any case, because TRL's other ranks gather with it.
        engine.source = iterator
        engine.stage()

    def resume(self) -> None:
        """Wait until all workers have the weights, and switch the engine to them.

        The engine is paused for the switch only, and goes on after an error with the weights that
        it had.

        Raises:
            PartialSyncError: A worker has disconnected, or refused the weights, with its error.
            RecvTimeout: Not all workers had the weights in time; the engine was not paused.
            SyncTimeout: The engine did not answer.
        """
        self._require().activate()

    def destroy(self) -> None:
        """Disconnect from the engine, which keeps its weights. Idempotent, bounded."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.shutdown()

    def _require(self) -> AiosyncTrainerEngine:
        if self.engine is None:
            raise LocalProtocolError("call init_weight_transfer() first")
        return self.engine


def _refuse_other_versions() -> None:
    """Raise if TRL is here in a version for which this module is not written."""
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        return
    if ".".join(found.split(".")[:2]) not in _VERSIONS:
        raise ConfigError(
            f"aiosync.integrations.trl is written for TRL {' and '.join(_VERSIONS)}, not {found}"
        )

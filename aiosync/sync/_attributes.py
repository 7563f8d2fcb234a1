"""The options and properties of the blocking schemes: each is the async scheme's own.

Must not import torch or the portal.
"""

from __future__ import annotations

from typing import Any, Literal

import aiosync.schemes as aio
from aiosync.errors import AiosyncError
from aiosync.strategy import WeightStrategy
from aiosync.sync._blocking import option
from aiosync.sync._discovery import discover
from aiosync.transports.base import Transport
from aiosync.types import Require

__all__ = ["Attributes"]


class Attributes:
    """What a blocking scheme has besides methods."""

    _scheme: aio.WeightSyncScheme

    def _find_owner(self, context: Any) -> None:
        """See who calls the scheme, if it is a library that needs something special."""

    # -- options -------------------------------------------------------------------------------

    sync: option[bool] = option("Kept for TorchRL's signature.")
    per_worker_weights: option[bool] = option("Whether each worker gets its own weights.")
    apply: option[Literal["auto", "manual"]] = option("When a receiver applies updates.")
    apply_copy: option[bool] = option("Whether updates are copied into the parameters' memory.")
    guard: option[Literal["forward", "reading"]] = option("What keeps updates out of reads.")
    strict: option[bool] = option("Whether every name and dtype must match.")
    require: option[Require] = option("How many workers must apply an update.")
    strategy_str: option[str] = option("Name of the strategy.")
    timeout: option[float | None] = option("Default timeout of calls in seconds.")

    # -- properties ----------------------------------------------------------------------------

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are extracted and applied."""
        return self._scheme.strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Literal["tensordict", "state_dict"]) -> None:
        self._scheme.strategy = value

    @property
    def model_id(self) -> str | None:
        """Name of the model."""
        return self._scheme.model_id

    @model_id.setter
    def model_id(self, value: str) -> None:
        self._scheme.model_id = value

    @property
    def worker_idx(self) -> int | None:
        """Index of this worker; ``None`` on the sender or before the sender chose one."""
        return self._scheme.worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        self._scheme.worker_idx = value

    @property
    def context(self) -> Any:
        """Owner of the model, or ``None`` when there is none or it is gone."""
        return self._scheme.context

    @context.setter
    def context(self, value: Any) -> None:
        self._find_owner(value)
        self._scheme.context = value

    @property
    def model(self) -> Any:
        """The model as it is now: as given, or found in the context; ``None`` without one."""
        return self._scheme.model

    @model.setter
    def model(self, value: Any) -> None:
        self._scheme.model = value

    @property
    def weights(self) -> Any:
        """The weights as given, or as the strategy extracts them from the model."""
        return self._scheme.weights

    @weights.setter
    def weights(self, value: Any) -> None:
        self._scheme.weights = value

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object is a sender."""
        discover()  # the first thing that a collector asks of a scheme that was set up elsewhere
        return self._scheme.initialized_on_sender

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this object is a receiver."""
        return self._scheme.initialized_on_receiver

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect()`` succeeded on this sender."""
        return self._scheme.synchronized_on_sender

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect()`` succeeded on this receiver."""
        return self._scheme.synchronized_on_receiver

    @property
    def version(self) -> int:
        """Sender: newest version drawn. Receiver: version that the model has. 0 before any."""
        return self._scheme.version

    @property
    def lag(self) -> int:
        """How far behind: of this receiver, or of the sender's slowest worker; in versions."""
        return self._scheme.lag

    @property
    def worker_versions(self) -> dict[int, int]:
        """Sender: the version that each connected worker has applied, as far as it is known."""
        return self._scheme.worker_versions

    @property
    def sender_transports(self) -> dict[int, Transport]:
        """The link to each connected worker, by index; empty on a receiver.

        For inspection only: the scheme sends and receives on them, on its event loop.
        """
        return self._scheme.sender_transports

    @property
    def shared_transport(self) -> Transport | None:
        """``None``: each worker has a link of its own. For what was written for TorchRL."""
        return self._scheme.shared_transport

    @property
    def receiver_transport(self) -> Transport | None:
        """The link to the trainer, the last one if it was lost; ``None`` where there was none.

        For inspection only: the scheme sends and receives on it, on its event loop.
        """
        return self._scheme.receiver_transport

    @property
    def staged_version(self) -> int:
        """Receiver: version that is complete and waiting to be applied; 0 if there is none."""
        return self._scheme.staged_version

    @property
    def link_lost(self) -> AiosyncError | None:
        """Receiver: why there is no link to the trainer; ``None`` while there is one.

        The scheme may be reconnecting at this moment; :meth:`receive` raises once it gives up.
        """
        return self._scheme.link_lost

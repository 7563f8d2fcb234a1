"""Interfaces of other libraries' objects beside a blocking scheme: transports and owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aiosync.strategy import WeightStrategy

__all__ = ["InitialSyncTransport", "Owner"]


@runtime_checkable
class InitialSyncTransport(Protocol):
    """Interface of a transport that was made for TorchRL's schemes and has to meet the other side.

    Schemes of :mod:`aiosync.legacy` take such transports from a ``create_transport()`` of yours.
    """

    def setup_connection_and_weights_on_sender(self) -> None:
        """Meet the worker. Called by the trainer's ``connect()``."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Meet the trainer. Called by the worker's ``connect()``.

        Args:
            worker_idx: Index of the worker.
            weights: ``None``.
            model: ``None``: the scheme puts the returned weights into the model.
            strategy: Strategy by which the scheme takes weights out of a model.

        Returns:
            The initial weights; ``None`` if there are none yet.
        """


class Owner(Protocol):
    """Intermediary between a library's object and the scheme that it calls.

    Attributes:
        blocks_loops: True if the object blocks the event loop of its caller anyway, as in a
            notebook, where there is no other API. The scheme then blocks it, too.
    """

    blocks_loops: bool

    def call(
        self,
        name: str,
        proceed: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Carry out the object's call of the method ``name``, as the object means it.

        Args:
            name: Name of the method.
            proceed: Behaviour of the method for all other callers.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """

    def stands_for(self, context: object) -> bool:
        """Return True if the owner was made for that object."""

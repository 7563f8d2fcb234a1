"""What stands on the other side of a blocking scheme: transports and objects of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aiosync.strategy import WeightStrategy

__all__ = ["InitialSyncTransport", "Owner"]


@runtime_checkable
class InitialSyncTransport(Protocol):
    """What a transport has that was made for TorchRL's schemes, and has to meet the other side.

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
            model: ``None``: what is returned is put into the model.
            strategy: How the scheme takes weights out of a model.

        Returns:
            The initial weights; ``None`` where there are none yet.
        """


class Owner(Protocol):
    """Stands between a library's object and the scheme that it calls.

    Attributes:
        blocks_loops: Whether the object blocks the event loop of its caller anyway, as in a
            notebook, where there is no other API. The scheme does, too, then.
    """

    blocks_loops: bool

    def call(
        self,
        name: str,
        proceed: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Do what calling the method ``name`` of the scheme shall do.

        Args:
            name: Name of the method.
            proceed: What the method does for everybody else.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """

    def stands_for(self, context: object) -> bool:
        """Whether it was made for that object."""

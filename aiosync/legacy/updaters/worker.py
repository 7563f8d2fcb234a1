"""The worker's side of an updater: a receiver that keeps a collector's policy up to date.

Must not import torchrl.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.errors import ConfigError
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.sync import WeightSyncScheme

__all__ = ["WorkerCollector", "make_private", "receive", "receive_by_rpc"]


def receive(collector: Any, scheme: WeightSyncScheme, worker_idx: int) -> None:
    """Keep the policy of a collector up to date, for as long as the collector lives.

    Args:
        collector: A collector that steps its policy itself.
        scheme: A copy of the trainer's scheme, with no role yet.
        worker_idx: Index of this worker.

    Raises:
        ConfigError: The collector has workers of its own, or its policy is not a module.
        ConnectError: The trainer has ended.
        ConnectTimeout: The trainer did not answer within the scheme's ``timeout``.
    """
    policy = _policy_of(collector, worker_idx)
    make_private(policy)
    reference = weakref.ref(collector)

    def count(epoch: int, version: int) -> None:
        del epoch, version
        found = reference()
        if found is not None:
            found.increment_version()

    hooks = SchemeHooks(applied=count)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx, hooks=hooks)
    try:
        scheme.connect()
    except BaseException:  # raised again: the trainer gets it
        scheme.abort()
        raise
    # The finalizer also keeps the scheme alive as long as the collector.
    weakref.finalize(collector, scheme.abort)


class WorkerCollector:
    """Factory of the collector in a worker of a multi-process collector, with its receiver.

    It replaces the user's ``collector_class``, which TorchRL calls in each worker.

    Args:
        collector_class: The user's class or function; ``None`` for TorchRL's default.
        scheme: A copy of the trainer's scheme, with no role yet.
    """

    def __init__(
        self, collector_class: Callable[..., Any] | None, scheme: WeightSyncScheme
    ) -> None:
        self._collector_class = collector_class
        self._scheme = scheme

    @property
    def _ignore_rb(self) -> Any:
        """Option of the collector class; TorchRL reads and sets it on the ``collector_class``."""
        return self._resolve()._ignore_rb

    @_ignore_rb.setter
    def _ignore_rb(self, value: Any) -> None:
        self._resolve()._ignore_rb = value

    def _resolve(self) -> Any:
        """Return the user's class or function; without one, TorchRL's default class."""
        if self._collector_class is not None:
            return self._collector_class
        return sys.modules["torchrl.collectors"].Collector

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the collector and its receiver.

        Args:
            args: Arguments of the collector class.
            kwargs: Keyword arguments of the collector class, ``worker_idx`` among them.
        """
        factory = kwargs.get("policy_factory")
        if factory is not None:
            # The policy moves before the collector gets it, because the collector may keep views of
            # its memory.
            kwargs["policy_factory"] = lambda: make_private(factory())
        make_private(kwargs.get("policy"))
        collector = self._resolve()(*args, **kwargs)
        try:
            receive(collector, self._scheme, int(kwargs["worker_idx"]))
        except BaseException:  # raised again: the trainer gets it
            collector.shutdown()
            raise
        return collector


def receive_by_rpc(reference: Any, scheme: WeightSyncScheme, worker_idx: int) -> None:
    """Keep the policy of an RPC worker's collector up to date; called in that worker.

    ``reference`` refers to the collector, which lies in this process.
    """
    receive(reference.local_value(), scheme, worker_idx)


def make_private(module: Any) -> Any:
    """Move the tensors of a module out of memory that other processes share.

    The tensor objects stay the same.

    Args:
        module: Any object; only modules are changed.

    Returns:
        The same object.
    """
    if isinstance(module, nn.Module):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if not is_lazy(tensor):
                tensor.data = tensor.data.clone()
    return module


def _policy_of(collector: Any, worker_idx: int) -> nn.Module:
    """Return the policy of a worker's collector; raise if it cannot be kept up to date."""
    policy = getattr(collector, "policy", None)
    if hasattr(collector, "pipes") or hasattr(collector, "procs"):
        raise ConfigError(
            f"a {type(collector).__name__} hands weights on to workers of its own, which this "
            "weight updater does not reach: use weight_sync_schemes= instead"
        )
    if not isinstance(policy, nn.Module):
        raise ConfigError(
            f"the policy of worker {worker_idx} is a {type(policy).__name__}, which has no weights"
        )
    return policy

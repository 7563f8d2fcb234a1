"""What an updater has in a worker: a receiver that keeps the policy of a collector up to date.

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
from aiosync.receiver.hooks import SchemeHooks
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
    make_private(policy)
    here = weakref.ref(collector)

    def count(epoch: int, version: int) -> None:
        del epoch, version
        found = here()
        if found is not None:
            found.increment_version()

    hooks = SchemeHooks(applied=count)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker_idx, hooks=hooks)
    try:
        scheme.connect()
    except BaseException:  # goes on to the trainer
        scheme.abort()
        raise
    weakref.finalize(collector, scheme.abort)  # which keeps it as long


class WorkerCollector:
    """Makes the collector inside a worker of a multi-process collector, and its receiver.

    Stands for the ``collector_class`` that the user gave, which TorchRL calls in each worker.

    Args:
        collector_class: That class or function; ``None`` for TorchRL's default.
        scheme: A copy of the trainer's scheme, with no role yet.
    """

    def __init__(
        self, collector_class: Callable[..., Any] | None, scheme: WeightSyncScheme
    ) -> None:
        self._collector_class = collector_class
        self._scheme = scheme

    @property
    def _ignore_rb(self) -> Any:
        """An option of the class, which TorchRL sets; where it looks for it."""
        return self._resolve()._ignore_rb

    @_ignore_rb.setter
    def _ignore_rb(self, value: Any) -> None:
        self._resolve()._ignore_rb = value

    def _resolve(self) -> Any:
        if self._collector_class is not None:
            return self._collector_class
        return sys.modules["torchrl.collectors"].Collector

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the collector.

        Args:
            args: Of the collector class.
            kwargs: Of the collector class, ``worker_idx`` among them.
        """
        factory = kwargs.get("policy_factory")
        if factory is not None:
            # Before the collector looks at the policy: it may keep views of its memory.
            kwargs["policy_factory"] = lambda: make_private(factory())
        make_private(kwargs.get("policy"))
        collector = self._resolve()(*args, **kwargs)
        try:
            receive(collector, self._scheme, int(kwargs["worker_idx"]))
        except BaseException:  # goes on to the trainer
            collector.shutdown()
            raise
        return collector


def receive_by_rpc(reference: Any, scheme: WeightSyncScheme, worker_idx: int) -> None:
    """In an RPC worker: keep the policy of the collector behind a reference up to date."""
    receive(reference.local_value(), scheme, worker_idx)


def make_private(module: Any) -> Any:
    """Move tensors of a module out of memory that other processes see. Objects stay the same.

    Args:
        module: Anything; only modules are changed.

    Returns:
        The same module.
    """
    if isinstance(module, nn.Module):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if not is_lazy(tensor):
                tensor.data = tensor.data.clone()
    return module

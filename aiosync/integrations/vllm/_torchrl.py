"""Replacements for ``torchrl.weight_update.llm`` with vLLM, over :class:`AiosyncTrainerEngine`.

The names are the same. A program for TorchRL's sender and receiver of a vLLM engine changes its
import line, and starts the engine with ``WeightTransferConfig(backend="aiosync")``. Must not import
vLLM or TorchRL.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from aiosync._repr import text_of
from aiosync.errors import ConfigError, LocalProtocolError, ManifestMismatch
from aiosync.integrations.vllm._clients import HTTPClient, LLMClient, VLLMWeightSyncClient
from aiosync.integrations.vllm._trainer import AiosyncTrainerEngine, AiosyncTrainerInitInfo
from aiosync.strategy import WeightStrategy, get_strategy

__all__ = [
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "get_model_metadata",
]


def get_model_metadata(model: torch.nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and the shape of each tensor of ``model.state_dict()``, by name.

    Args:
        model: A module with the names of vLLM's checkpoint. A module with ``merge_and_unload()``,
            such as PEFT's, is copied as a whole, and its adapters are merged in the copy.
    """
    return {
        name: (tensor.dtype, tensor.shape)
        for name, tensor in _weights_of(model).items()
        if isinstance(tensor, torch.Tensor)
    }


def _weights_of(source: Any) -> Mapping[str, Any]:
    """Return the weights of a module, a TensorDict or a state dict under dotted names."""
    if hasattr(source, "merge_and_unload"):
        source = copy.deepcopy(source).merge_and_unload()
    weights: Mapping[str, Any] = WeightStrategy("state_dict").extract_weights(source) or {}
    return weights


class VLLMWeightSyncScheme:
    """Configuration of the link between a trainer and the vLLM engines that it updates.

    The trainer calls :meth:`create_sender`. The class is no
    :class:`aiosync.sync.WeightSyncScheme`, and no collector takes it.

    Attributes:
        init_info: Init info of the trainer's side.

    Args:
        master_address: Name or address of the host that the trainer listens at and engines dial;
            ``"localhost"`` by default.
        master_port: Port that the trainer listens at; by default the system chooses one.
        gpus_per_replica: Workers of one engine: tensor, pipeline and data parallel ranks.
        num_replicas: Number of engines.
        strategy: ``"tensordict"`` or ``"state_dict"``. Either sends the tensors that are named in
            the metadata.
        device: Ignored, and kept for the signature: weights travel through the hosts' memory.
        options: Fields of :class:`AiosyncTrainerInitInfo`, which override the other arguments:
            ``token=``, ``pause=`` or ``address="shm"``.

    Raises:
        ConfigError: An argument has an illegal value (a ``ValueError``).
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: str = "tensordict",
        device: torch.device | str | int = 0,
        **options: Any,
    ) -> None:
        del device
        get_strategy(strategy)
        fields: dict[str, Any] = {
            "rank": 0,
            "address": f"tcp://{master_address or 'localhost'}:{master_port or 0}",
            "num_workers": gpus_per_replica * num_replicas,
        }
        self.init_info: AiosyncTrainerInitInfo = AiosyncTrainerInitInfo(**{**fields, **options})

    def create_sender(self) -> VLLMWeightSender:
        """Return a sender for the trainer's process."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """Return a receiver, which does nothing, for the process of the engine."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender:
    """Sender that updates vLLM engines with the weights of a model.

    Any thread that runs no event loop may use it; updates run one at a time. Close it with
    :meth:`shutdown`.

    Args:
        scheme: Configuration of the link.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: Any = None
        self._collectors: list[Any] = []
        self._names: Iterable[str] = ()
        self._engine: AiosyncTrainerEngine | None = None

    def register_model(self, model: Any) -> None:
        """Set the model whose weights :meth:`update_weights` sends if it is given none."""
        self._model = model

    def register_collector(self, collector: Any) -> None:
        """Add a collector; each successful update calls its ``increment_version()``.

        An error of that method is a warning, because the engines have the update already.
        """
        self._collectors.append(collector)

    def init_all_workers_group(
        self,
        model_metadata: Mapping[str, tuple[torch.dtype, torch.Size]],
        vllm_engine: Any = None,
    ) -> None:
        """Listen, let the engines' workers connect, and wait for them. Bounded by ``timeout``.

        Args:
            model_metadata: Result of :func:`get_model_metadata`. The tensors with its names are
                sent.
            vllm_engine: A ``vllm.LLM`` of this process, the URL of a vLLM server, or a client as
                for :meth:`AiosyncTrainerEngine.trainer_init`.

        Raises:
            ConfigError: ``vllm_engine`` is another object (a ``ValueError``).
            LocalProtocolError: The workers are connected already (a ``RuntimeError``).
            AiosyncError: As for :meth:`AiosyncTrainerEngine.trainer_init`.
        """
        if self._engine is not None:
            raise LocalProtocolError("init_all_workers_group(): the workers are connected already")
        client = _client_of(vllm_engine)
        self._engine = AiosyncTrainerEngine.trainer_init(self._scheme.init_info, client=client)
        self._names = tuple(model_metadata)

    def update_weights(self, weights: Any = None) -> None:
        """Send weights, wait until every worker has them, and switch the engines to them.

        Args:
            weights: A module, a TensorDict or a state dict; by default the registered model.

        Raises:
            LocalProtocolError: :meth:`init_all_workers_group` was not called, or there is no model
                (a ``RuntimeError``).
            ManifestMismatch: A name of the metadata is missing. Nothing was sent to the engines.
            AiosyncError: As for :meth:`AiosyncTrainerEngine.send_weights`.
        """
        if self._engine is None:
            raise LocalProtocolError("update_weights(): call init_all_workers_group() first")
        source = self._model if weights is None else weights
        if source is None:
            raise LocalProtocolError("update_weights(): call register_model(), or pass weights")
        found = _weights_of(source)
        if missing := [name for name in self._names if name not in found]:
            raise ManifestMismatch(missing=missing, hint="The metadata has these names.")
        self._engine.send_weights({name: found[name] for name in self._names})
        failed = []
        for collector in self._collectors:
            try:
                collector.increment_version()
            except Exception as exc:  # noqa: BLE001 - becomes a warning: the engines have switched
                failed.append(f"{type(collector).__name__}: {type(exc).__name__}: {text_of(exc)}")
        if failed:
            text = f"the engines have the update, but increment_version() failed: {failed}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def shutdown(self) -> None:
        """Disconnect from the engines, which go on with their weights. Idempotent, bounded."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


class VLLMWeightReceiver:
    """Receiver that does nothing, because the sender reaches the engine's workers itself.

    It exists so that programs for TorchRL need no change.

    Args:
        scheme: The scheme.
        vllm_engine: The engine.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        del scheme, vllm_engine

    def init_all_workers_group(
        self, model_metadata: Mapping[str, tuple[torch.dtype, torch.Size]]
    ) -> None:
        """Do nothing: the sender lets the workers connect."""

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Do nothing: the workers have applied the update when the sender returns."""

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Return False: there is never an update to apply here."""
        del timeout
        return False


def _client_of(engine: Any) -> VLLMWeightSyncClient:
    """Return a client of an engine.

    Raises:
        ConfigError: There is no client for this object.
    """
    if isinstance(engine, str):
        return HTTPClient(engine)
    if hasattr(engine, "actors"):
        raise ConfigError(
            f"{type(engine).__name__} starts its engines with vLLM's NCCL back-end: start them "
            'with WeightTransferConfig(backend="aiosync"), and pass the URL of a server or '
            "RayVLLMWeightSyncClient(actors)"
        )
    if inspect.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        raise ConfigError(
            f"{type(engine).__name__} runs on an event loop: pass AsyncLLMClient(engine, loop)"
        )
    if hasattr(engine, "collective_rpc"):
        return LLMClient(engine)
    if not hasattr(engine, "finish_weight_update"):
        raise ConfigError(
            f"vllm_engine is a {type(engine).__name__}: pass a vllm.LLM, the URL of a vLLM server, "
            "or a client"
        )
    client: VLLMWeightSyncClient = engine
    return client

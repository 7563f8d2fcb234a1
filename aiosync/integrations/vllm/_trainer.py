"""The trainer's side: sends in the background, and pauses the engine for the activation only.

It is what vLLM expects of such a side, and none of its classes: many a trainer has no vLLM. Must
not import vLLM, nor the engine's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch

from aiosync.errors import (
    AiosyncError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
)
from aiosync.integrations.vllm._clients import VLLMWeightSyncClient, ask, pausing
from aiosync.integrations.vllm._info import SHARED
from aiosync.protocol import validate_seconds
from aiosync.schemes import SendHandle
from aiosync.schemes.inside import meeting_point
from aiosync.spans import VersionSpan
from aiosync.sync import SharedMemWeightSyncScheme, TCPWeightSyncScheme, WeightSyncScheme
from aiosync.sync._portal import refuse_inside_loop
from aiosync.sync._schemes import core_of, run_on_loop
from aiosync.transports.credentials import TLS, Secret, read_token

__all__ = ["Activation", "AiosyncTrainerEngine", "AiosyncTrainerInitInfo", "span_of"]

WeightSource: TypeAlias = Iterable[tuple[str, torch.Tensor]]
"""Names and tensors of a trainer, to be iterated anew for each update, in one order."""

_WORD_SECONDS = 2.0  # for a worker's reason to come, once the engine has said that there is one


@dataclass(frozen=True, slots=True)
class Activation:
    """What one activation took.

    Attributes:
        version: The version that the engine has now.
        staging: Seconds that were waited for workers to have all of it; the engine generated.
        paused: Seconds from asking the engine to pause until it had resumed.
        loading: How many of those seconds loading took.
    """

    version: int
    staging: float
    paused: float
    loading: float


@dataclass
class AiosyncTrainerInitInfo:
    """What the trainer's side is made of; pass it to vLLM's ``WeightTransferTrainerFactory``.

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
        rank: This trainer process's rank: rank 0 sends, the others take part in gathering.
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
    rank: int = field(kw_only=True)

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


class AiosyncTrainerEngine:
    """Brings a trainer's weights into vLLM engines.

    Made by vLLM's ``WeightTransferTrainerFactory.trainer_init()`` from an
    :class:`AiosyncTrainerInitInfo`, or by :meth:`trainer_init`. :meth:`send_weights` does all of
    it; :meth:`stage` and :meth:`activate` are its halves, with training between them. May be
    used from any thread that runs no event loop; one update at a time. Close it with
    :meth:`shutdown`.
    """

    init_info_cls = AiosyncTrainerInitInfo

    def __init__(
        self,
        init_info: AiosyncTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> None:
        self.is_sender: bool = init_info.rank == 0
        self.client: VLLMWeightSyncClient = client
        self.source: WeightSource | None = source
        self.active_version: int = 0
        """The version that the engine has; 0 before the first."""
        self.last: Activation | None = None
        """What the newest activation took."""
        self._info = init_info
        self._scheme: WeightSyncScheme | None = None
        # A version on its way, and what becomes of it: a future of the scheme's loop.
        self._staged: tuple[int, asyncio.Future[AiosyncError | None]] | None = None
        self._lock = threading.RLock()
        if init_info.pause is not None:
            self._pausing = pausing(client, init_info.activation_timeout)

    @classmethod
    def trainer_init(
        cls,
        init_info: AiosyncTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Listen, have the engine's workers connect, and wait for them. Bounded by ``timeout``.

        Args:
            init_info: Where to listen, and how.
            client: vLLM's HTTP or Ray client, or one of this package.
            source: Names and tensors in checkpoint format, iterated for each update; without
                it, :meth:`stage` and :meth:`send_weights` are given them.

        Raises:
            ConnectError: The engine refused, or its workers could not connect; it says why.
            ConnectTimeout: Fewer workers than ``num_workers`` connected.
            SyncTimeout: The engine did not answer.
            ConfigError: The init info cannot be used.
        """
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._open()
        return engine

    def _open(self) -> None:
        scheme = _sending_scheme(self._info)
        try:
            scheme.init_on_sender(model_id=self._info.model_id, num_workers=self._info.num_workers)
            self._scheme = scheme
            self._meet(scheme)
        except BaseException:  # raised again: the caller sees it
            self._scheme = None
            scheme.shutdown()
            raise

    def _meet(self, scheme: WeightSyncScheme) -> None:
        """Have the engine come, and wait for its workers."""
        errors: list[Exception] = []

        def call_engine() -> None:
            try:
                self._call_workers()
            except Exception as exc:  # noqa: BLE001 - raised again by the thread that connects
                errors.append(exc)
                scheme.abort()  # nobody will come

        caller = threading.Thread(target=call_engine, name="aiosync-vllm-init", daemon=True)
        caller.start()
        try:
            scheme.connect(timeout=self._info.timeout)
        except AiosyncError:
            caller.join(_WORD_SECONDS)
            if errors:
                raise errors[0] from None
            raise
        caller.join()  # its calls have a deadline
        if errors:
            raise errors[0]

    def _call_workers(self) -> None:
        info = self._info.for_workers(self.address)
        self._ask("init", self.client.init_weight_transfer_engine, info, refused=ConnectError)

    def _ask(self, what: str, call: Callable[..., object], *args: object, **options: Any) -> None:
        ask(what, call, *args, timeout=self._info.activation_timeout, **options)

    def rejoin(self) -> None:
        """Have the engine's workers connect again, and give them the newest version.

        After an engine was restarted, or another one has taken its address.

        Raises:
            ConnectError: The engine refused, or its workers could not connect.
            AiosyncError: As :meth:`activate`.
        """
        with self._lock:
            self._require()
            self._call_workers()
            if self._staged is not None:
                self.activate()

    # -- updates -------------------------------------------------------------------------------

    def send_weights(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send the weights, wait until workers have them, and switch. On every trainer rank.

        Args:
            weights: As for :meth:`stage`.

        Raises:
            AiosyncError: As :meth:`stage` and :meth:`activate`.
        """
        with self._lock:
            self.stage(weights)
            if self.is_sender:
                self.activate()

    def stage(self, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Take a snapshot and send it in the background; the engine goes on generating.

        On every trainer rank: gathering is collective.

        Args:
            weights: Whole tensors by their names in checkpoint format; ``None`` iterates the
                source. They may change as soon as this returns.

        Returns:
            The version that is being sent; 0 on ranks that do not send.

        Raises:
            PartialSyncError: A worker has disconnected; call :meth:`rejoin` when the engine is
            back. ConfigError: There is neither a source nor ``weights``.
        """
        if weights is None and self.source is None:
            raise ConfigError("pass weights, or a source= to trainer_init()")
        if not self.is_sender:
            for _ in () if weights is not None else self.source or ():
                pass  # takes part in gathering
            return 0
        with self._lock:
            scheme = self._require()
            self._check_workers(scheme)
            given = weights.items() if weights is not None else self.source or ()
            # One by one: gathered tensors are not all on an accelerator at a time.
            values = {name: tensor.detach().to("cpu") for name, tensor in given}

            async def start() -> tuple[int, asyncio.Future[AiosyncError | None]]:
                # It ends when the version is activated, whenever that is.
                handle = core_of(scheme).send_nowait(values, timeout=math.inf)
                return handle.version, asyncio.ensure_future(_outcome_of(handle))

            self._staged = run_on_loop(scheme, start())
            return self._staged[0]

    def activate(self) -> Activation:
        """Wait until all workers have the newest staged version, and switch the engine to it.

        The engine is paused only for the switch, and resumed whatever happens.

        Raises:
            PartialSyncError: A worker refused the version, and says why; every worker of its
                engine keeps what it had.
            ApplyError: The engine refused.
            RecvTimeout: Not all workers had it in time; the engine was not paused.
            SyncTimeout: The engine did not answer.
            LocalProtocolError: Nothing was staged.
        """
        with self._lock:
            scheme = self._require()
            if self._staged is None:
                raise LocalProtocolError("activate(): call stage() first")
            version, outcome = self._staged
            began = time.perf_counter()
            self._check_workers(scheme)
            scheme.wait_staged(version, timeout=self._info.timeout)
            staged = time.perf_counter()
            try:
                if self._info.pause is not None:
                    self._ask("pause", self._pausing.pause_generation, self._info.pause)
                loading = self._switch(scheme, version, outcome)
            except BaseException as exc:  # raised again, once the engine was told to go on
                try:
                    self._resume()
                except AiosyncError as late:
                    exc.add_note(f"The engine may still be paused: {late}")
                raise
            self._resume()
            ended = time.perf_counter()
            self.active_version = version
            self.last = Activation(version, staged - began, ended - staged, loading)
            return self.last

    def _resume(self) -> None:
        if self._info.pause is not None:
            self._ask("resume", self._pausing.resume_generation)

    def _switch(
        self,
        scheme: WeightSyncScheme,
        version: int,
        outcome: asyncio.Future[AiosyncError | None],
    ) -> float:
        client, began = self.client, time.perf_counter()
        update = {"version": version, "timeout": min(10.0, self._info.activation_timeout / 2)}
        try:
            try:
                self._ask("start", client.start_weight_update)
            except AiosyncError:
                # An update of a trainer that died may still be open: end it, and try again.
                with contextlib.suppress(AiosyncError):  # the second one says what is wrong
                    self._ask("finish", client.finish_weight_update)
                self._ask("start", client.start_weight_update)
            self._ask("update", client.update_weights, update)
            loading = time.perf_counter() - began
            label = f"{version}@{scheme.epoch:016x}"  # see span_of()
            self._ask("finish", client.finish_weight_update, label)
        except AiosyncError as exc:
            if self._info.num_workers > 1:
                # Workers of other engines may have it; this takes it back, and ends the update.
                # Those that refused it refuse this, too, and what they said is `exc` already.
                with contextlib.suppress(AiosyncError):
                    self._ask("update", client.update_weights, {**update, "undo": True})
                with contextlib.suppress(AiosyncError):
                    self._ask("finish", client.finish_weight_update)

            async def word() -> AiosyncError | None:
                done, _ = await asyncio.wait({outcome}, timeout=_WORD_SECONDS)
                return outcome.result() if done else None  # the engine did not get so far

            said = run_on_loop(scheme, word())  # by the workers themselves
            if said is not None:
                raise said from exc
            raise
        return loading

    def staleness(
        self, span: VersionSpan | None, weight: Literal["sample", "token"] = "sample"
    ) -> float | None:
        """How many versions older than the newest that was staged an answer is.

        Args:
            span: What :func:`span_of` says of the answer.
            weight: As for :func:`aiosync.staleness`.

        Returns:
            Versions; ``None`` if it is unknown, such as that of another trainer's.

        Raises:
            LocalProtocolError: This rank does not send, or was shut down.
            ConfigError: There is no such weight.
        """
        if self._scheme is None:
            raise LocalProtocolError("staleness() is for rank 0, before shutdown()")
        return self._scheme.staleness(span, weight)

    # -- the rest ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where workers dial; empty on ranks that do not send."""
        scheme = self._scheme
        if scheme is None or isinstance(scheme, TCPWeightSyncScheme):
            return "" if scheme is None else scheme.address
        found, pid = meeting_point(core_of(scheme))
        return f"{SHARED}://{found.removeprefix(chr(0))}?pid={pid}"

    def shutdown(self) -> None:
        """Disconnect from the engine, which goes on with what it has. Idempotent, bounded."""
        scheme, self._scheme = self._scheme, None
        self._staged = None
        if scheme is not None:
            scheme.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _require(self) -> WeightSyncScheme:
        refuse_inside_loop("stage() or activate", "await asyncio.to_thread(...)")
        if self._scheme is None:
            raise LocalProtocolError(
                "this side of the transfer was shut down" if self.is_sender else "only rank 0 sends"
            )
        return self._scheme

    def _check_workers(self, scheme: WeightSyncScheme) -> None:
        there = scheme.worker_versions
        if len(there) < self._info.num_workers:
            gone = {
                index: PeerClosed("the engine's worker has gone; rejoin() once it is back")
                for index in range(self._info.num_workers)
                if index not in there
            }
            version = None if self._staged is None else self._staged[0]
            raise PartialSyncError(acked=(), failed=gone, version=version)


def _sending_scheme(info: AiosyncTrainerInitInfo) -> WeightSyncScheme:
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
    if info.address == SHARED:
        return SharedMemWeightSyncScheme("state_dict", **options)
    token: Any = info.token.value if isinstance(info.token, Secret) else info.token
    token = read_token(info.token_file, "token_file") if token is None else token
    return TCPWeightSyncScheme(info.address, "state_dict", token=token, tls=info.tls, **options)


async def _outcome_of(handle: SendHandle) -> AiosyncError | None:
    """What went wrong with a send, which :meth:`AiosyncTrainerEngine.activate` says."""
    try:
        await handle
    except AiosyncError as exc:
        return exc
    return None


# -- which versions the tokens of an answer come from, as vLLM reports it -------------------------
#
# vLLM names weights by labels: here a version and its epoch, ``7@0123456789abcdef``.


def span_of(output: Any) -> VersionSpan | None:
    """The versions of an answer, and of how many of its tokens each is.

    Args:
        output: A finished ``CompletionOutput`` of vLLM, as in ``request_output.outputs``; or a
            choice of its server's ``/inference/v1/generate``, the last one of a stream.

    Returns:
        The span, with runs of (version, tokens). Of version 0 are tokens of weights that no trainer
        has sent, such as those that the engine was started with, and of another trainer than that
        of the last token. ``None`` if the answer names no version: it has no token, or is not
        finished.
    """
    spans = output.get("weight_versions") if isinstance(output, Mapping) else output.weight_versions
    if not spans:
        return None
    parts = [each if isinstance(each, Mapping) else vars(each) for each in spans]
    last = parts[-1]["version"].partition("@")[2]
    runs = list[tuple[int, int]]()
    for part in parts:
        version, _, epoch = part["version"].partition("@")
        known = version.isdecimal() and epoch == last
        runs.append((int(version) if known else 0, part["end"] - part["start"]))
    return VersionSpan.from_runs(runs, last or None)

"""The trainer's side: sends in the background, and pauses the engine for the activation only.

It has the interface that vLLM expects, but is no subclass of vLLM's class, because a trainer need
not have vLLM installed. Must not import vLLM, nor the engine's side.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import torch

from aiosync._repr import text_of
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PartialSyncError,
    PeerClosed,
)
from aiosync.integrations.vllm._clients import VLLMWeightSyncClient, ask, pausing
from aiosync.integrations.vllm._info import NO_COPY, SHARED
from aiosync.protocol import validate_seconds
from aiosync.schemes import SendHandle
from aiosync.schemes.internal import meeting_point
from aiosync.spans import VersionSpan
from aiosync.sync import SharedMemWeightSyncScheme, TCPWeightSyncScheme, WeightSyncScheme
from aiosync.sync._portal import refuse_inside_loop
from aiosync.sync._schemes import core_of, run_on_loop
from aiosync.transports.credentials import TLS, Secret, read_token

__all__ = ["Activation", "AiosyncTrainerEngine", "AiosyncTrainerInitInfo", "span_of"]

Items: TypeAlias = Iterable[tuple[str, torch.Tensor]]


class WholeTensorSource(Protocol):
    """Source of weights in the form of vLLM 0.33, which is not iterable itself."""

    def iter_full(self) -> Items:
        """Return the names and whole tensors."""


WeightSource: TypeAlias = Items | WholeTensorSource
"""Names and tensors of a trainer; each update iterates them anew, in the same order."""

# Time for a worker's error to arrive after the engine has reported a failure.
_REASON_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Activation:
    """Times of one activation.

    Attributes:
        version: Version that the engine has now.
        staging: Seconds of waiting until every worker had staged it; the engine generated.
        paused: Seconds from the request to pause until the engine had resumed.
        loading: Seconds of these that the load took.
    """

    version: int
    staging: float
    paused: float
    loading: float


@dataclass
class AiosyncTrainerInitInfo:
    """Options of the trainer's side; pass them to vLLM's ``WeightTransferTrainerFactory``.

    Attributes:
        address: Address to listen at: ``tcp://host:port`` (port 0 lets the system choose),
            ``unix:///path``, or ``"shm"`` for shared memory with engines of this host.
        connect_address: Address that engines dial, if it is another one; for example with the
            host's name in place of ``0.0.0.0``.
        model_id: Name of the model.
        num_workers: Workers of all engines together: tensor, pipeline and data parallel ranks.
        pause: Mode of the pause for requests in flight while an update is activated: ``"keep"``
            freezes them, ``"wait"`` lets them end first, ``"abort"`` ends them; ``None`` does
            not pause at all.
        wire_dtype: Floating tensors are cast to this dtype while they are sent; a dtype or a name
            such as ``"bfloat16"``.
        timeout: Seconds for the workers to connect, and for all workers to stage an update.
        activation_timeout: Seconds for each call to the engine.
        token: The shared token; ``None`` takes that in ``token_file``, or else in
            ``AIOSYNC_TOKEN``.
        token_file: File with the token on this host.
        tls: Certificates of this side.
        worker_token_file: File with the token on the engines' host.
        worker_tls: As :attr:`AiosyncInitInfo.tls`.
        check: As :attr:`AiosyncInitInfo.check`.
        rollback: As :attr:`AiosyncInitInfo.rollback`.
        first_version: Number of the first version; a trainer that resumes continues the count.
        rank: Rank of this trainer process: rank 0 sends, the others take part in gathering.
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
        """Return the init info of the engines' workers, for the address that was bound."""
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
    """Trainer's side of the transfer, which sends a trainer's weights to vLLM engines.

    vLLM's ``WeightTransferTrainerFactory.trainer_init()`` makes it from an
    :class:`AiosyncTrainerInitInfo`, or :meth:`trainer_init` does. :meth:`send_weights` makes a
    whole update; :meth:`stage` and :meth:`activate` are its halves, with training between them. Any
    thread that runs no event loop may use it; updates run one at a time. Close it with
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
        """Version that the engine has; 0 before the first."""
        self.last: Activation | None = None
        """Times of the newest activation."""
        self._info = init_info
        self._scheme: WeightSyncScheme | None = None
        # The newest staged version, and the error of its send, as a future of the scheme's loop.
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
        """Listen, let the engine's workers connect, and wait for them. Bounded by ``timeout``.

        Args:
            init_info: Options of this side.
            client: vLLM's HTTP or Ray client, or one of this package.
            source: Names and tensors in checkpoint format, iterated for each update, or an object
                whose ``iter_full()`` returns them; without it, :meth:`stage` and
                :meth:`send_weights` take them as an argument.

        Raises:
            ConnectError: The engine refused, or its workers could not connect; the text says why.
            ConnectTimeout: Fewer workers than ``num_workers`` connected.
            SyncTimeout: The engine did not answer.
            ConfigError: The init info cannot be used.
        """
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._open()
        return engine

    def _open(self) -> None:
        """Make the scheme, and let the engine's workers connect to it; after an error close it."""
        scheme = _sending_scheme(self._info)
        try:
            scheme.init_on_sender(model_id=self._info.model_id, num_workers=self._info.num_workers)
            self._scheme = scheme
            self._connect_with_workers(scheme)
        except BaseException:  # raised again: the caller sees it
            self._scheme = None
            scheme.shutdown()
            raise

    def _connect_with_workers(self, scheme: WeightSyncScheme) -> None:
        """Let the engine's workers connect while the scheme waits for them."""
        errors: list[Exception] = []

        def call_engine() -> None:
            try:
                self._call_workers()
            except Exception as exc:  # noqa: BLE001 - raised again by the thread that connects
                errors.append(exc)
                scheme.abort()  # no worker will connect, so end the wait of connect()

        caller = threading.Thread(target=call_engine, name="aiosync-vllm-init", daemon=True)
        caller.start()
        try:
            scheme.connect(timeout=self._info.timeout)
        except AiosyncError:
            caller.join(_REASON_SECONDS)
            if errors:
                raise errors[0] from None
            raise
        caller.join()  # this ends, because the call to the engine has a deadline
        if errors:
            raise errors[0]

    def _call_workers(self) -> None:
        """Have the engine tell its workers to connect to the address of this side."""
        info = self._info.for_workers(self.address)
        self._ask("init", self.client.init_weight_transfer_engine, info, refused=ConnectError)

    def _ask(self, what: str, call: Callable[..., object], *args: object, **options: Any) -> None:
        """Call the engine by a method of the client, within ``activation_timeout``."""
        ask(what, call, *args, timeout=self._info.activation_timeout, **options)

    def rejoin(self) -> None:
        """Let the engine's workers connect anew, and activate the newest staged version.

        Call it after an engine was restarted, or another engine has taken its address.

        Raises:
            ConnectError: The engine refused, or its workers could not connect.
            AiosyncError: As for :meth:`activate`.
        """
        with self._lock:
            self._require()
            self._call_workers()
            if self._staged is not None:
                self.activate()

    # -- updates -------------------------------------------------------------------------------

    def send_weights(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send the weights, wait until the workers have them, and switch the engine to them.

        Call it on every trainer rank.

        Args:
            weights: As for :meth:`stage`.

        Raises:
            AiosyncError: As for :meth:`stage` and :meth:`activate`.
        """
        with self._lock:
            self.stage(weights)
            if self.is_sender:
                self.activate()

    def stage(self, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Take a snapshot and send it in the background; the engine goes on generating.

        Call it on every trainer rank, because gathering is collective.

        Args:
            weights: Whole tensors by their names in checkpoint format; ``None`` iterates the
                source, to its end in any case. They may change as soon as the call returns.

        Returns:
            The version that is being sent; 0 on ranks that do not send.

        Raises:
            PartialSyncError: A worker has disconnected; call :meth:`rejoin` when the engine is
                back.
            ConfigError: There is neither a source nor ``weights``.
        """
        if weights is None and self.source is None:
            raise ConfigError("pass weights, or a source= to trainer_init()")
        source = _items_of(self.source if weights is None else ())
        if not self.is_sender:
            collections.deque(source, maxlen=0)  # the iteration takes part in the gathering
            return 0
        with self._lock:
            try:
                scheme = self._require()
                self._check_workers(scheme)
                given: Items = source if weights is None else weights.items()
                # Tensors are copied one by one, so that the accelerator never holds all gathered
                # tensors at a time. A source may gather each into the memory of the one before.
                copy = weights is None
                values = {name: tensor.detach().to("cpu", copy=copy) for name, tensor in given}
            except Exception:  # raised again: the other ranks wait for this one to gather with them
                collections.deque(source, maxlen=0)
                raise

            async def start() -> tuple[int, asyncio.Future[AiosyncError | None]]:
                # The send ends with the activation of the version, which has no deadline.
                handle = core_of(scheme).send_nowait(values, timeout=math.inf)
                return handle.version, asyncio.ensure_future(_outcome_of(handle))

            self._staged = run_on_loop(scheme, start())
            return self._staged[0]

    def activate(self) -> Activation:
        """Wait until all workers have the newest staged version, and switch the engine to it.

        The engine is paused only for the switch, and resumed even after an error.

        Returns:
            The times of the activation.

        Raises:
            PartialSyncError: A worker has disconnected, or refused the version, with its error;
                every worker of its engine keeps its previous weights.
            ApplyError: The engine refused.
            RecvTimeout: Not all workers had the version in time; the engine was not paused.
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
            # A send that has ended by now failed with workers from before rejoin(), which is no
            # news. One that ends later has the error of a worker of this activation.
            is_over = outcome.done()
            staged = time.perf_counter()
            try:
                if self._info.pause is not None:
                    self._ask("pause", self._pausing.pause_generation, self._info.pause)
                loading = self._switch(scheme, version, None if is_over else outcome)
            except BaseException as exc:  # raised again after the engine was asked to resume
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
        """Have the engine resume, if activations pause it at all."""
        if self._info.pause is not None:
            self._ask("resume", self._pausing.resume_generation)

    def _switch(
        self,
        scheme: WeightSyncScheme,
        version: int,
        outcome: asyncio.Future[AiosyncError | None] | None,
    ) -> float:
        """Switch the engine to a staged version, and return the seconds that its loading took."""
        client, began = self.client, time.perf_counter()
        update = {"version": version, "timeout": min(10.0, self._info.activation_timeout / 2)}
        step = "start"
        try:
            try:
                self._ask("start", client.start_weight_update)
            except AiosyncError:
                # An update of a trainer that died may still be open: end it, and try once more.
                with contextlib.suppress(AiosyncError):  # the second start reports what is wrong
                    self._ask("finish", client.finish_weight_update)
                self._ask("start", client.start_weight_update)
            step = "update"
            self._ask("update", client.update_weights, update)
            step = "finish"
            loading = time.perf_counter() - began
            label = f"{version}@{scheme.epoch:016x}"  # see span_of()
            self._ask("finish", client.finish_weight_update, label)
        except BaseException as exc:  # raised again, or the worker's own error from it
            worker_error: AiosyncError | None = None
            try:
                if outcome is not None and isinstance(exc, AiosyncError):
                    worker_error = run_on_loop(scheme, _worker_error(outcome))
            finally:
                # The engine may have loaded the version, or load it late: then its label would be
                # that of other weights. A single worker that says that it refused the version has
                # put its weights back itself; an error of the client may be that of a gateway.
                refused = _is_refusal(worker_error)
                if self._info.num_workers > 1 or not (step == "start" or refused):
                    self._undo(update, worker_error or exc)
            if worker_error is not None:
                raise worker_error from exc
            raise
        return loading

    def _undo(self, update: dict[str, Any], error: BaseException) -> None:
        """End a failed update, and have workers undo it; note in ``error`` if one cannot."""
        try:
            self._ask("update", self.client.update_weights, {**update, "undo": True})
        except AiosyncError as exc:
            # Workers that refused the update refuse this, too. activate() raises their first error.
            if NO_COPY in f"{exc}{text_of(exc.__cause__)}":
                error.add_note(f"The update cannot be undone, as {NO_COPY}")
        with contextlib.suppress(AiosyncError):
            self._ask("finish", self.client.finish_weight_update)

    def staleness(
        self, span: VersionSpan | None, weight: Literal["sample", "token"] = "sample"
    ) -> float | None:
        """Return the number of versions by which an answer is older than the newest staged one.

        Args:
            span: Result of :func:`span_of` for the answer.
            weight: ``"sample"`` or ``"token"``, as for :func:`aiosync.staleness`.

        Returns:
            Staleness in versions; ``None`` if it is unknown, for example for another trainer's
            version.

        Raises:
            LocalProtocolError: This rank does not send, or was shut down.
            ConfigError: ``weight`` has an illegal value.
        """
        if self._scheme is None:
            raise LocalProtocolError("staleness() is for rank 0, before shutdown()")
        return self._scheme.staleness(span, weight)

    # -- address and end -----------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Address that this side listens at; empty on ranks that do not send."""
        scheme = self._scheme
        if scheme is None or isinstance(scheme, TCPWeightSyncScheme):
            return "" if scheme is None else scheme.address
        found, pid = meeting_point(core_of(scheme))
        return f"{SHARED}://{found.removeprefix(chr(0))}?pid={pid}"

    def shutdown(self) -> None:
        """Disconnect from the engine, which goes on with its weights. Idempotent, bounded."""
        scheme, self._scheme = self._scheme, None
        self._staged = None
        if scheme is not None:
            scheme.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _require(self) -> WeightSyncScheme:
        """Return the scheme; raise on an event loop, on ranks other than 0, or after shutdown()."""
        refuse_inside_loop("stage() or activate", "await asyncio.to_thread(...)")
        if self._scheme is None:
            raise LocalProtocolError(
                "this side of the transfer was shut down" if self.is_sender else "only rank 0 sends"
            )
        return self._scheme

    def _check_workers(self, scheme: WeightSyncScheme) -> None:
        """Raise PartialSyncError if a worker of the engine has disconnected."""
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
    """Make the scheme of a trainer, without a role.

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


def _items_of(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and whole tensors of a source, in the form of vLLM 0.32 or of 0.33."""
    yield from source.iter_full() if hasattr(source, "iter_full") else source


async def _outcome_of(handle: SendHandle) -> AiosyncError | None:
    """Return the error of a send, or ``None``; :meth:`AiosyncTrainerEngine.activate` raises it."""
    try:
        await handle
    except AiosyncError as exc:
        return exc
    return None


async def _worker_error(outcome: asyncio.Future[AiosyncError | None]) -> AiosyncError | None:
    """Return the error of a send; ``None`` without one, or if the send has not ended in time."""
    done, _ = await asyncio.wait({outcome}, timeout=_REASON_SECONDS)
    # A send that goes on shows that the engine failed before a worker tried to load.
    return outcome.result() if done else None


def _is_refusal(error: AiosyncError | None) -> bool:
    """Return True if the workers refused a version, and so have the weights that they had."""
    failed = error.failed.values() if isinstance(error, PartialSyncError) else ()
    return {type(each) for each in failed} == {ApplyError}


# -- versions of the tokens of an answer, as vLLM reports them ------------------------------------
#
# vLLM names weights by labels: here a version and its epoch, ``7@0123456789abcdef``.


def span_of(output: Any) -> VersionSpan | None:
    """Return the versions that computed an answer, each with its number of tokens.

    Args:
        output: A finished ``CompletionOutput`` of vLLM, as in ``request_output.outputs``; or a
            choice of its server's ``/inference/v1/generate``, the last one of a stream.

    Returns:
        The span, with runs of (version, tokens). Version 0 stands for weights that no trainer has
        sent, such as those that the engine was started with, and for weights of another trainer
        than that of the last token. ``None`` if the answer names no version, because it has no
        token or is not finished.
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

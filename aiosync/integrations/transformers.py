"""Receiver for transformers' continuous batching: applies each update while generation pauses.

:class:`ContinuousBatchingReceiver` receives in the background while a ``ContinuousBatchingManager``
generates, and pauses the manager only to apply. Written for transformers 5.24, of which it uses the
manager, its scheduler and the index of its cache. See ``docs/topics/transformers.md``. Must not
import transformers.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from aiosync._log import log
from aiosync.errors import (
    AiosyncError,
    ApplyError,
    ConfigError,
    LocalProtocolError,
    RecvTimeout,
    SyncTimeout,
)
from aiosync.receiver.scheme_hooks import SchemeHooks
from aiosync.schemes.internal import follow, life_of
from aiosync.spans import VersionSpan, epoch_text
from aiosync.sync import NoWeightSyncScheme, WeightSyncScheme
from aiosync.sync._portal import refuse_inside_loop
from aiosync.sync._schemes import core_of, run_on_loop

if TYPE_CHECKING:
    from aiosync.receiver.transformer import Transform

__all__ = ["ContinuousBatchingReceiver"]

_OLDEST = (5, 23)  # The first transformers whose manager can pause in a supported way.
_RETRY_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0  # between two attempts to reach the trainer
_CLOSE_SECONDS = 10.0
# Switches and requests that are remembered for span_of().
_MOST_SWITCHES = 4096
_MOST_REQUESTS = 65536
_MARK_TOKENS = 32

_Weights: TypeAlias = tuple[int, int]
"""Epoch and version; (0, 0) for weights that no trainer sent."""


class ContinuousBatchingReceiver:
    """Receiver that keeps the model of a ``ContinuousBatchingManager`` on the newest version.

    ::

        manager = model.init_continuous_batching(generation_config)
        manager.start()
        scheme = aiosync.sync.TCPWeightSyncScheme("tcp://trainer:5555")
        with ContinuousBatchingReceiver(scheme, manager) as receiver:
            scheme.wait_for_version(1)
            manager.add_request(prompt)
            output = manager.get_result()
            print(output.generated_tokens, receiver.span_of(output))

    Updates arrive while the manager generates. A thread of this object pauses the manager when an
    update is complete and verified, applies it, and lets the manager go on with its requests. While
    the manager is stopped, updates are applied at once. An update that the model refuses changes
    nothing, and the trainer gets the error. When the trainer is lost, the manager goes on with the
    version that it has, and this object dials the trainer until it answers. Calls of the scheme
    that wait for a version apply none themselves.

    Any thread that runs no event loop may use it.

    Args:
        scheme: A scheme of :mod:`aiosync.sync` without a role, which becomes the receiver of
            ``manager.model``.
        manager: The manager, in one process without tensor parallelism.
        flush: Treatment of the keys and values that older weights computed. ``"prefix"``: running
            requests go on with theirs, and no request shares them any more. ``"abort"``: the same,
            and requests that had begun fail, with the tokens that they have. ``"keep"``: new
            requests may share them, too.
        model_id: Name of the model, as the sender calls it.
        worker_idx: Index of this worker; ``None`` lets the sender choose.
        transform: Function that changes updates before they are applied; see
            :meth:`aiosync.WeightSyncScheme.init_on_receiver`.

    Raises:
        ConfigError: An argument has an illegal value, or this transformers cannot be used.
        LocalProtocolError: The scheme already has a role.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        manager: Any,
        *,
        flush: Literal["prefix", "abort", "keep"] = "prefix",
        model_id: str | None = None,
        worker_idx: int | None = None,
        transform: Transform | None = None,
    ) -> None:
        if not isinstance(scheme, WeightSyncScheme) or isinstance(scheme, NoWeightSyncScheme):
            raise ConfigError(
                "the first argument is a blocking scheme that receives weights, such as "
                f"aiosync.sync.TCPWeightSyncScheme, not {type(scheme).__name__}"
            )
        if flush not in ("prefix", "abort", "keep"):
            raise ConfigError(f"flush must be 'prefix', 'abort' or 'keep', got {flush!r}")
        _check_manager(manager)
        if flush == "prefix" and manager.continuous_batching_config.cpu_offload_space != 0:
            raise ConfigError(
                "flush='prefix' needs a manager with cpu_offload_space=0: it would share again "
                "what was offloaded"
            )
        self.scheme: WeightSyncScheme = scheme
        self.manager: Any = manager
        self.flush: Literal["prefix", "abort", "keep"] = flush
        self.error: BaseException | None = None
        """Error that ended this receiver, if any; the model keeps its version."""
        scheme.apply = "manual"
        # Captured graphs of an accelerator read the memory that they were captured with.
        scheme.apply_copy = scheme.apply_copy or manager.model.device.type != "cpu"
        follow(core_of(scheme), longest_pause=_LONGEST_PAUSE_SECONDS)
        self._history = _History()
        # Requests that have used the weights, while an update is applied.
        self._begun: list[Any] = []
        scheme.init_on_receiver(
            model_id,
            worker_idx=worker_idx,
            model=manager.model,
            transform=transform,
            hooks=SchemeHooks(applied=self._on_flip),
        )
        self._thread = threading.Thread(target=self._run, name="aiosync-batching", daemon=True)
        self._switching = threading.Lock()
        self._closed = False

    # -- life ----------------------------------------------------------------------------------

    def connect(self, *, timeout: float | None = None) -> None:
        """Reach the trainer, and follow it from then on.

        Args:
            timeout: Seconds; ``None`` takes the scheme's, ``math.inf`` waits for ever.

        Raises:
            ConnectTimeout: The trainer was not reached in time.
            ConnectError: The trainer refused.
            LocalProtocolError: Called twice, or after :meth:`close`.
        """
        self.scheme.connect(timeout=timeout, initial=False)
        self._thread.start()

    def close(self) -> None:
        """Leave the trainer. The model keeps its version. Idempotent, bounded."""
        refuse_inside_loop("close", "await asyncio.to_thread(receiver.close)")
        late = time.monotonic() + _CLOSE_SECONDS
        # An apply that has begun must end, but a manager that is stuck may never pause for it.
        is_between = self._switching.acquire(timeout=_CLOSE_SECONDS)
        self._closed = True
        if is_between:
            self._switching.release()
        self.scheme.shutdown()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, late - time.monotonic()))

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:  # raised again: the block is not entered
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """Version that the manager generates with; 0 before the first."""
        return self._history.newest[1]

    def span_of(self, output: Any) -> VersionSpan:
        """Return the versions that computed an output, each with its number of tokens.

        A version that only computed keys and values of the prompt counts with 0 tokens. Call it
        once for each finished request; the record of the request ends then.

        Args:
            output: A ``GenerationOutput`` of the manager, also an unfinished one of a stream.

        Returns:
            The span. Version 0 stands for weights that this receiver did not apply, for versions of
            another trainer than the newest part, and for what is no longer known.
        """
        return self._history.span_of(output)

    # -- updates -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Switch to each update once it is staged, until this receiver is closed or fails."""
        try:
            while True:
                run_on_loop(self.scheme, self._wait_staged())
                with self._switching:
                    if self._closed:
                        return
                    switched = self._switch()
                if not switched:
                    time.sleep(_RETRY_SECONDS)
        except BaseException as exc:  # noqa: BLE001 - `error` has it
            if not self._closed:
                self.error = exc
                self.scheme.abort()  # the trainer must not wait for this worker any more
                text = "the receiver of a batching manager ended, and the model keeps its version"
                log(logging.ERROR, "failed", text, model=None, error=exc)

    async def _wait_staged(self) -> None:
        """Wait until an update is staged; raise if the scheme is shut down or fails before."""
        receiver = life_of(core_of(self.scheme)).receiver
        if receiver is None:
            raise LocalProtocolError("the scheme was shut down")
        await receiver.waits.wait_until(
            lambda: receiver.applier.has_staged, timeout=None, late=RecvTimeout("never")
        )

    def _switch(self) -> bool:
        """Apply the staged update while the manager pauses.

        Returns:
            False if it has to be tried again.
        """
        try:
            with self._paused() as processor:
                self._apply(processor)
        except ApplyError:
            return True  # the trainer has the error
        except (_LoopEnded, SyncTimeout):  # another thread's forward goes on
            return False
        if processor is None and self.manager.is_running():
            # The loop was started meanwhile, and may have filled the cache with older weights.
            with contextlib.suppress(_LoopEnded), self._paused() as processor:
                self._forget(processor)
        return True

    @contextlib.contextmanager
    def _paused(self) -> Iterator[Any]:
        """Pause the manager; give the processor of its loop, or ``None`` if it does not run.

        Raises:
            _LoopEnded: The loop has ended instead.
        """
        with contextlib.ExitStack() as pause:
            running = self.manager.is_running()
            if running:
                try:
                    pause.enter_context(self.manager.pause())
                except RuntimeError as exc:
                    raise _LoopEnded from exc
            yield self.manager.batch_processor if running else None

    def _apply(self, processor: Any) -> None:
        """Apply the staged update; ``processor`` is that of the paused loop, if there is one."""
        # A manager that is kept for its next session keeps its cache, too.
        self._forget(processor or self.manager.batch_processor)
        self._begun = [] if processor is None else _begun_requests(processor)
        before = self.version
        try:
            applied = self.scheme.apply_pending()
        finally:
            begun, self._begun = self._begun, []
        if self.flush == "abort" and applied is not None:
            why = f"aborted: version {applied} of the weights took the place of version {before}"
            for state in begun:
                _abort(processor, state, RuntimeError(why))

    def _on_flip(self, epoch: int, version: int) -> None:
        """Note the version that the model has now, before the trainer gets its ack."""
        outputs = [each.to_generation_output() for each in self._begun]
        self._history.switch((epoch, version), outputs)

    def _forget(self, processor: Any) -> None:
        """Have no request share what older weights have computed, unless ``flush`` is "keep"."""
        if self.flush != "keep" and processor is not None:
            _forget_prefixes(processor.cache)


class _LoopEnded(AiosyncError):
    """The manager's loop ended before it could pause."""


# -- the manager's parts -----------------------------------------------------------------------


def _check_manager(manager: Any) -> None:
    """Refuse what is no manager, or one that cannot be paused or flushed.

    Raises:
        ConfigError: The manager, or this transformers, cannot be used.
    """
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        installed = "0"
    numbers = tuple(int(each) for each in installed.split(".")[:2] if each.isdecimal())
    if numbers < _OLDEST or not hasattr(manager, "pause"):
        raise ConfigError(
            "the second argument is a ContinuousBatchingManager of transformers "
            f"{'.'.join(map(str, _OLDEST))} or newer, not {type(manager).__name__} with "
            f"transformers {installed}"
        )
    if manager.distributed_helper.tp_size > 1:
        raise ConfigError("a model with tensor parallelism is not supported: use one process each")


def _begun_requests(processor: Any) -> list[Any]:
    """Return the states of the requests that have used the weights and are not finished."""
    scheduler = processor.scheduler
    waiting = scheduler.waiting_requests.values()
    # A request that had to give up its place in the cache waits with its tokens, or its cache.
    resumed = [each for each in waiting if each.is_cpu_offloaded or _tokens_of(each)]
    return [*scheduler.active_requests.values(), *resumed]


def _tokens_of(state: Any) -> int:
    """Return the number of tokens that a request has, those before a restart of it included."""
    return len(state.to_generation_output().generated_tokens)


def _abort(processor: Any, state: Any, error: Exception) -> None:
    """Fail a request; the manager's own ``cancel_request()`` would leave its caller waiting."""
    processor.output_router.fail_and_deliver(state, error)
    # A batch that is still on its way skips requests with this status.
    state.status = type(state.status).FINISHED
    # The scheduler frees the request before the next forward; the manager's queue is a step late.
    processor.scheduler.set_request_cancellation(state.request_id)


def _forget_prefixes(cache: Any) -> None:
    """Have no request share keys and values that are in the cache now."""
    if not cache.allow_block_sharing:
        return
    cache.evict_cached_blocks()
    for allocator in cache.cache_allocators.values():
        held = {block for blocks in allocator.block_table.values() for block in blocks}
        ledger = allocator.ledger
        ledger.hash_to_block.clear()
        ledger.block_to_hash.clear()
        for block in held:
            # A block of a running request gets a random hash, which no prompt has, and so do the
            # later blocks of that request, whose hashes continue this one. Without a hash it would
            # be entered anew as soon as it is full.
            mark = secrets.randbits(64)
            ledger.block_to_hash[block] = mark
            ledger.hash_to_block[mark] = block


# -- versions of requests ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress of a request at its last switch.

    Attributes:
        runs: (weights, tokens) up to then.
        total: Number of all tokens in them.
        last: The weights since then.
        when: The time of the switch.
        mark: Length and end of the prompt with these tokens.
    """

    runs: list[tuple[_Weights, int]]
    total: int
    last: _Weights
    when: float
    mark: tuple[int, tuple[int, ...]]

    def is_of(self, output: Any) -> bool:
        """Return False if the output is that of a later request with the same id."""
        # A request that gave up its place in the cache begins anew, with the tokens that it had.
        return output.lifespan[0] <= self.when or (
            self.total > 0 and self.mark == _mark_of(output, self.total)
        )


def _mark_of(output: Any, tokens: int) -> tuple[int, tuple[int, ...]]:
    """Return the length and the end of an output with its prompt, up to a number of tokens."""
    known = [*output.prompt_ids, *output.generated_tokens[:tokens]]
    return len(known), tuple(known[-_MARK_TOKENS:])


class _History:
    """Versions and their times, and the progress of each request at each switch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: list[float] = []  # of the switches, oldest first
        self._weights: list[_Weights] = [(0, 0)]  # before, between and after these
        self._requests: dict[str, _Progress] = {}  # by id

    @property
    def newest(self) -> _Weights:
        """Epoch and version in use."""
        return self._weights[-1]

    def switch(self, weights: _Weights, outputs: list[Any]) -> None:
        """Note a switch, and the progress of each request that had begun, by its output so far."""
        with self._lock:
            old, now = self._weights[-1], time.perf_counter()
            for each in outputs:
                name, tokens = each.request_id, len(each.generated_tokens)
                found = self._requests.pop(name, None)
                runs, total = [], 0
                if found is not None and found.is_of(each):
                    runs, total = found.runs, found.total
                runs = [*runs, (old, max(tokens - total, 0))]
                mark = _mark_of(each, tokens)
                self._requests[name] = _Progress(runs, tokens, weights, now, mark)
            while len(self._requests) > _MOST_REQUESTS:
                del self._requests[next(iter(self._requests))]
            self._times.append(now)
            self._weights.append(weights)
            if len(self._times) > _MOST_SWITCHES:
                del self._times[0], self._weights[0]
                self._weights[0] = (0, 0)  # what was before is no longer known

    def span_of(self, output: Any) -> VersionSpan:
        """Return the span of an output, and forget its request if that is finished."""
        tokens, (began, ended) = len(output.generated_tokens), output.lifespan
        with self._lock:
            take = self._requests.pop if output.is_finished() else self._requests.get
            found = take(output.request_id, None)
            if found is not None and found.is_of(output):
                more = tokens - found.total
                runs = [*found.runs, (found.last, more)] if more > 0 else found.runs
            else:
                first, last = self._at(began), self._at(ended)
                # A request that saw a switch is recorded, unless there were too many.
                runs = [(last if first == last else (0, 0), tokens)]
        epoch = runs[-1][0][0]
        known = [(weights[1] if weights[0] == epoch else 0, count) for weights, count in runs]
        return VersionSpan.from_runs(known, epoch_text(epoch))

    def _at(self, when: float) -> _Weights:
        """Return the weights in use at a time of ``time.perf_counter()``; -1 stands for now."""
        return self._weights[bisect_right(self._times, when)] if when >= 0 else self._weights[-1]

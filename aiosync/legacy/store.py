"""The older generation's transport for ``torch.distributed``: weights through a store.

One side sets a key, the other one reads and deletes it. What is in it are messages of the wire
format; nothing is pickled, and no process group is touched. Must not import schemes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.distributed import DistError

from aiosync.errors import AckTimeout, LocalProtocolError, RemoteProtocolError, TransportBroken
from aiosync.legacy.endpoint import Copier, naming, rebuild
from aiosync.protocol import VersionClock
from aiosync.tensors import FlatBuffer, Layout
from aiosync.wire import ManifestMessage, Setup, Update, decode_header, encode_header

__all__ = ["DistributedTransport"]

_PART_NBYTES = 4 * 2**20  # a TCPStore hangs at values above 8 MiB
_PAUSE_SECONDS = (0.001, 0.05)  # first and last, between two looks at the store


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Say what it means that the store raised something."""
    try:
        yield
    except (DistError, RuntimeError) as exc:
        raise TransportBroken(f"the store is gone: {exc}") from exc


class DistributedTransport:
    """Weights for one worker through a store of ``torch.distributed``.

    Both sides make one with the same rank, on stores of their own that are connected. Weights
    travel through the process that has the store: for large models prefer the links of
    :class:`aiosync.sync.DistributedWeightSyncScheme`.

    Args:
        store: A ``torch.distributed`` store; the program's own, not closed.
        rank: Rank of the worker.
        sync: ``send_weights()`` waits until the worker answered.
        timeout: Seconds that answers are waited for.
    """

    def __init__(self, store: Any, rank: int, sync: bool = True, *, timeout: float = 120.0) -> None:
        self._store = store
        self.rank = rank
        self.sync = sync
        self.timeout = timeout
        self._clock = VersionClock()
        self._copier = Copier()
        self._received = 0
        self._pending: deque[int] = deque()
        self._unanswered: deque[int] = deque()

    def _key(self, version: int, what: str) -> str:
        return f"aiosync/legacy/{self.rank}/{version}/{what}"

    def _wait(self, key: str, timeout: float | None) -> bytes | None:
        give_up = None if timeout is None else time.monotonic() + timeout
        pause = _PAUSE_SECONDS[0]
        with _reaching():
            # A wait in the store would write to stderr when it ends without success, and keep
            # Ctrl-C from being seen.
            while not self._store.check([key]):
                if give_up is not None and time.monotonic() >= give_up:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_SECONDS[1])
            return self._take(key)

    def _take(self, key: str) -> bytes:
        data = bytes(self._store.get(key))
        self._store.delete_key(key)
        return data

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights, and with ``sync`` wait until the worker said that it applied them.

        Args:
            model_id: Name of the model.
            weights: TensorDict, state dict or module; copied.

        Raises:
            AckTimeout: It did not within ``timeout`` seconds (a ``TimeoutError``).
            LocalProtocolError: It said something else (a ``RuntimeError``).
            TransportBroken: The store is gone.
            ConfigError: The weights cannot travel (a ``ValueError``).
        """
        version = self._post(model_id, weights)
        if self.sync:
            self._finish(version)

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send weights without waiting for an answer; :meth:`wait_ack` does."""
        self._pending.append(self._post(model_id, weights))

    def drop_oldest(self) -> None:
        """Have the next :meth:`wait_ack` not wait for the oldest :meth:`send_weights_async`."""
        self._pending.popleft()

    def _post(self, model_id: str, weights: Any) -> int:
        snapshot, version = self._copier.copy(weights), self._clock.next()
        layout = snapshot.layout
        update = Update(self._clock.epoch, version, layout.digest, values=snapshot.values)
        parts: list[bytes | memoryview] = [
            encode_header(naming(model_id, snapshot.form)),
            encode_header(ManifestMessage(layout.manifest)),
            encode_header(update),
            snapshot.payload,
        ]
        packed = b"".join(b"".join((len(part).to_bytes(8, "little"), part)) for part in parts)
        self._copier.free(snapshot)
        with _reaching():
            starts = range(0, len(packed), _PART_NBYTES)
            for index, start in enumerate(starts):
                part = packed[start : start + _PART_NBYTES]
                self._store.set(self._key(version, f"part{index}"), part)
            self._store.set(self._key(version, "in"), str(len(starts)))
        return version

    def wait_ack(self) -> None:
        """Wait for the answer to the oldest :meth:`send_weights_async`, whatever ``sync`` says.

        Raises:
            LocalProtocolError: None is pending (a ``RuntimeError``).
            AckTimeout: As for :meth:`send_weights`.
        """
        if not self._pending:
            raise LocalProtocolError("No async send is pending. Call send_weights_async() first.")
        self._finish(self._pending.popleft())

    def _finish(self, version: int) -> None:
        said = self._wait(self._key(version, "out"), self.timeout)
        if said is None:
            raise AckTimeout(
                f"rank {self.rank} did not answer within {self.timeout:g} s", version=version
            )
        if said != b"updated":
            text = said.decode(errors="replace")
            raise LocalProtocolError(f"Expected acknowledgment 'updated', got {text!r}")

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """Wait for the next weights, in the order in which they were sent.

        Args:
            timeout: Seconds; ``None`` waits until the store is gone.

        Returns:
            ``(model_id, weights)`` on memory of their own; ``None`` when none came in time.

        Raises:
            TransportBroken: The store is gone.
            RemoteProtocolError: What came is not of this format.
        """
        data = self._wait(self._key(self._received + 1, "in"), timeout)
        if data is None:
            return None
        self._received = version = self._received + 1
        try:
            found = self._read(version, data)
        except RemoteProtocolError as exc:
            self._answer(version, f"{type(exc).__name__}: {exc}")
            raise
        self._unanswered.append(version)
        return found

    def _read(self, version: int, data: bytes) -> tuple[str, Any]:
        if not data.isdigit():
            raise RemoteProtocolError("the store holds something other than weights")
        with _reaching():
            parts = [self._take(self._key(version, f"part{index}")) for index in range(int(data))]
        return _unpack(memoryview(b"".join(parts)))

    def send_ack(self, message: str = "updated") -> None:
        """Answer the oldest weights that were received and not answered.

        Args:
            message: ``"updated"`` for success; anything else is an error to the other side.

        Raises:
            LocalProtocolError: There are none (a ``RuntimeError``).
            TransportBroken: The store is gone.
        """
        if not self._unanswered:
            raise LocalProtocolError("there is nothing to acknowledge: call receive_weights()")
        self._answer(self._unanswered.popleft(), message)

    def _answer(self, version: int, message: str) -> None:
        with _reaching():
            self._store.set(self._key(version, "out"), message)

    def check_connection(self) -> bool:
        """Whether the store answers."""
        try:
            with _reaching():
                self._store.check([self._key(0, "in")])
        except TransportBroken:
            return False
        return True


def _unpack(data: memoryview) -> tuple[str, Any]:
    parts = []
    while data:
        nbytes = int.from_bytes(data[:8], "little")
        parts.append(data[8 : 8 + nbytes])
        data = data[8 + nbytes :]
    messages: list[Any] = [decode_header(bytes(part))[0] for part in parts[:3]]
    kinds = (Setup, ManifestMessage, Update)
    if len(parts) != 4 or not all(map(isinstance, messages, kinds)):
        raise RemoteProtocolError("the store holds something other than weights")
    named, manifest, update = messages
    layout = Layout(manifest.manifest)
    if parts[3].nbytes != layout.nbytes or update.digest != layout.digest:
        raise RemoteProtocolError("weights do not fit their manifest")
    flat = FlatBuffer(layout.nbytes)
    flat.memoryview()[:] = parts[3]
    return named.key, rebuild(layout, flat, update.values, named.value.decode(errors="replace"))

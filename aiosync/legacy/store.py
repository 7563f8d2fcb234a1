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
from aiosync.legacy.endpoint import Copier, Weights
from aiosync.legacy.transports import Answered
from aiosync.protocol import VersionClock
from aiosync.tensors import FlatBuffer, Layout
from aiosync.wire import ManifestMessage, Update, decode_header, encode_header

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


class DistributedTransport(Answered):
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
        super().__init__(timeout)
        self._store = store
        self.rank = rank
        self.sync = sync
        self._clock = VersionClock()
        self._copier = Copier()
        self._received = 0
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

        See :class:`MPTransport`; the store may be gone, too (``TransportBroken``).
        """
        version = self._post(model_id, weights)
        if self.sync:
            self._finish(version, self.timeout)

    def _post(self, model_id: str, weights: Any) -> int:
        copied, version = self._copier.copy(weights), self._clock.next()
        parts: list[bytes | memoryview] = [
            encode_header(ManifestMessage(copied.layout.manifest)),
            encode_header(copied.update(model_id, self._clock.epoch, version)),
            copied.payload,
        ]
        packed = b"".join(b"".join((len(part).to_bytes(8, "little"), part)) for part in parts)
        copied.give_back()
        starts = range(0, len(packed), _PART_NBYTES)
        with _reaching():
            for index, start in enumerate(starts):
                part = packed[start : start + _PART_NBYTES]
                self._store.set(self._key(version, f"part{index}"), part)
            self._store.set(self._key(version, "in"), str(len(starts)))
        return version

    def _finish(self, sent: int, timeout: float | None) -> None:
        said = self._wait(self._key(sent, "out"), timeout)
        if said is None:
            raise AckTimeout(
                f"rank {self.rank} did not answer within {timeout or 0:g} s", version=sent
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
        version = self._received + 1
        count = self._wait(self._key(version, "in"), timeout)
        if count is None:
            return None
        self._received = version
        try:
            if not count.isdigit():
                raise RemoteProtocolError("the store holds something other than weights")
            with _reaching():
                keys = [self._key(version, f"part{index}") for index in range(int(count))]
                packed = b"".join(map(self._take, keys))
            found = _unpack(memoryview(packed))
        except RemoteProtocolError as exc:
            self._answer(version, f"{type(exc).__name__}: {exc}")
            raise
        self._unanswered.append(version)
        return found.model_id, found.rebuild()

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


def _unpack(data: memoryview) -> Weights:
    parts = []
    while data:
        nbytes = int.from_bytes(data[:8], "little")
        parts.append(data[8 : 8 + nbytes])
        data = data[8 + nbytes :]
    messages: list[Any] = [decode_header(bytes(part))[0] for part in parts[:2]]
    if len(parts) != 3 or not all(map(isinstance, messages, (ManifestMessage, Update))):
        raise RemoteProtocolError("the store holds something other than weights")
    manifest, update = messages
    layout = Layout(manifest.manifest)
    if parts[2].nbytes != layout.nbytes or update.digest != layout.digest:
        raise RemoteProtocolError("weights do not fit their manifest")
    flat = FlatBuffer(layout.nbytes)
    flat.memoryview()[:] = parts[2]
    return Weights.arrived(update.values, update.epoch, update.version, layout, flat)

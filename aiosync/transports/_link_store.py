"""Where the two ranks of a link's process group meet: a store without a server or a port.

Drives torch; must not import asyncio or schemes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from aiosync.errors import RemoteProtocolError

__all__ = ["LinkStore"]

_MEET_SECONDS = 30.0
_MAX_KEYS = 64


class LinkStore(Store):
    """A store of two processes, kept alike over their control stream.

    Args:
        say: Tells the other side a key and its value; called from torch's threads.
    """

    def __init__(self, say: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._say = say
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._unknown: set[str] = set()  # keys of this side that the other may not have yet
        self._closed = False

    def learn(self, key: str, value: bytes) -> None:
        """Take over what the other side set."""
        with self._changed:
            if len(self._values) >= _MAX_KEYS:
                raise RemoteProtocolError("the peer's process group sets too many keys")
            self._values[key] = value
            self._changed.notify_all()

    def acknowledged(self, key: str) -> None:
        """The other side has a key of this one."""
        with self._changed:
            self._unknown.discard(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Fail whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # What torch calls, from its threads.

    def set(self, key: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._unknown.add(key)
        self.learn(key, value)
        self._say(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        del timeout  # of the connection, which comes after this
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self._has(keys), _MEET_SECONDS)
            if self._closed or not there:
                raise dist.DistStoreError("the peer did not join the process group")

    def _has(self, keys: Sequence[str]) -> bool:
        # Connecting, which follows, has a short deadline: both sides have to be that far.
        return not self._unknown and all(key in self._values for key in keys)

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

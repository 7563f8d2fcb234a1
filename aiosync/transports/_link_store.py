"""Where the two ranks of a link's process group meet, a store without a server or a port, and how.

Drives torch; must not import asyncio or schemes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from aiosync.errors import RemoteProtocolError

__all__ = ["PORTS", "LinkStore", "gloo_group"]

_MEET_SECONDS = 30.0
_MAX_KEYS = 64
# Once the peer said where it is. No SYN is sent again within 2 s of this on Linux (1, 3, 7 and 15 s
# after the first one, since Linux 6.5 also 2, 4, 5, 11 and 19): one that came through just as Gloo
# gives up would find memory that is being freed.
_CONNECT_SECONDS = 13.0
_GLOO_WAITS = 5  # times the timeout of a group until a connection counts as failed

PORTS = (
    "hosts must reach each other on any port, in both directions, so open these in firewalls "
    "between them, or use TCPWeightSyncScheme, which needs one port of the trainer only"
)
"""What to do where Gloo could not connect."""


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
        self.met = False
        """Whether both sides said where they are, so that what remains is to connect."""

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
            # Each side sets one key, and asks for that of the other one.
            self.met = self.met or len(self._values) >= 2

    def _has(self, keys: Sequence[str]) -> bool:
        # Connecting, which follows, has a short deadline: both sides have to be that far.
        return not self._unknown and all(key in self._values for key in keys)

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


def gloo_group(store: LinkStore, rank: int, host: str) -> Any:
    """A group of two over Gloo; where that fails, nothing of Gloo is left when this raises.

    While its device lives, Gloo goes on to listen and to connect in a thread, also for a group that
    it has freed, and a connection that comes late ends the process. So nobody keeps the device.

    Args:
        store: Where the two meet.
        rank: 0 or 1.
        host: Address of this host that the peer can reach.

    Raises:
        RuntimeError: The peer did not come, or could not be reached within 13 s.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as new_group()
    try:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=_CONNECT_SECONDS / _GLOO_WAITS)
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, 2, options)
    finally:
        del options  # errors keep this frame

"""A peer that names shared memory which it did not give."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from aiosync import SharedMemTransport
from aiosync.errors import AiosyncError, PeerClosed, RemoteProtocolError, TransportBroken
from aiosync.wire import Segment, Update, encode_frame


@pytest.mark.parametrize(
    ("ext", "kind"),
    [
        ({"seg": 1, "slot": 1, "n": 4096}, None),
        ({"seg": 2, "slot": 0, "n": 8}, RemoteProtocolError),
        ({"seg": 1, "slot": -1, "n": 8}, RemoteProtocolError),
        ({"seg": 1, "slot": "0", "n": 8}, RemoteProtocolError),
        ({"seg": 1, "slot": 0}, RemoteProtocolError),
        ({"seg": 1, "slot": 0, "n": 4097}, RemoteProtocolError),
        ({"seg": 1, "slot": 2**40, "n": 8}, AiosyncError),
    ],
    ids=str,
)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_slot_that_was_never_given_ends_the_link(
    ext: dict[str, Any], kind: type[Exception] | None
) -> None:
    left, right = socket.socketpair()
    fd = os.memfd_create("hostile")
    try:
        os.truncate(fd, 2 * 4096)
        async with SharedMemTransport(right) as transport:
            socket.send_fds(left, [encode_frame(Segment(1, 4096, 2), 0)], [fd])
            left.sendall(encode_frame(Update(5, 1, bytes(16)), 0, ext=ext))
            if kind is None:
                received = await transport.recv(timeout=30)
                assert [view.nbytes for view in received.payload] == [4096]
                received.release()
                return
            with pytest.raises(kind) as caught:
                await transport.recv(timeout=30)
            assert not isinstance(caught.value, PeerClosed)
            with pytest.raises((RemoteProtocolError, TransportBroken)):
                await transport.recv(timeout=30)  # and it stays so
    finally:
        left.close()
        os.close(fd)

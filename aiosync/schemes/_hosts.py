"""Whether the hosts of workers are still there, of which no socket tells when they lose power.

The kernel asks them, with the probes of its keep-alive: programs there need not do anything. Must
not import torch, nor know what the links are for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager

from aiosync.transports._channel import channel_of
from aiosync.transports._io import socket_of
from aiosync.transports.base import Transport

__all__ = ["HostCheck"]

_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
# tcpi_last_data_recv and tcpi_last_ack_recv: milliseconds.
_HEARD = struct.Struct("52x I I")
_MOST_PROBES = 127  # what Linux takes


class HostCheck:
    """Has the hosts at the other ends of links asked whether they are there, until it is closed.

    A link to this host, or without a network below, needs no question. Each host is asked one
    second after it was last heard from, or at once if that was longer ago.

    Args:
        links: Those in question.
    """

    # For each link that is being asked: by how many, and its own options.
    _asked: dict[Transport, tuple[int, list[int]]] = {}  # noqa: RUF012  # shared on purpose

    def __init__(self, links: Sequence[Transport]) -> None:
        self._links = [link for link in links if is_elsewhere(link)]
        self._begun: list[Transport] = []
        self.notice_seconds: int | None = None  # until the kernel gives up a link that is silent
        for link in self._links:
            self._ask(link)

    def _ask(self, link: Transport) -> None:
        with contextlib.suppress(OSError, AttributeError), _socket_of(link) as sock:
            count, own = self._asked.get(link, (0, []))
            if not count:
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    return  # with keepalive=None nobody may ask
                own = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in _options()]
                # Many, so that a link that is asked often is not given up sooner.
                for option, value in zip(_options(), (1, own[1], _MOST_PROBES), strict=True):
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._asked[link] = count + 1, own
            self._begun.append(link)
            idle, between, probes = own
            self.notice_seconds = max(self.notice_seconds or 0, idle + between * probes)

    def all_heard(self, seconds: float) -> bool:
        """Whether every host has said something within the last ``seconds``."""
        return all(_was_heard(link, seconds) for link in self._links)

    def close(self) -> None:
        """Ask no more."""
        while self._begun:
            link = self._begun.pop()
            count, own = self._asked[link]
            if count > 1:
                self._asked[link] = count - 1, own
                continue
            del self._asked[link]
            with contextlib.suppress(OSError), _socket_of(link) as sock:
                for option, value in zip(_options(), own, strict=True):
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_elsewhere(link: Transport) -> bool:
    """Whether the other end of a link is, as far as its addresses tell, on another host."""
    with contextlib.suppress(OSError), _socket_of(link) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            here, there = sock.getsockname()[0], sock.getpeername()[0]
            return here != there and not _is_loopback(there)
    return False


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _was_heard(link: Transport, seconds: float) -> bool:
    with contextlib.suppress(OSError, AttributeError, struct.error), _socket_of(link) as sock:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _HEARD.size)
        last_data, last_ack = _HEARD.unpack(told)
        return bool(min(last_data, last_ack) <= 1000 * seconds)
    return False


def _options() -> list[int]:
    return [getattr(socket, name) for name in _OPTIONS]


def _socket_of(link: Transport) -> AbstractContextManager[socket.socket]:
    """Another object for the socket below a link.

    Raises:
        OSError: There is none, or it was closed.
    """
    channel = channel_of(link)
    if channel is None or channel.ended:
        raise OSError("no stream, or no longer")
    return socket_of(channel.io.read_fd)

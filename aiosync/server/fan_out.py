"""The fan-out of one model: which workers a server admits, and to whom it sends the others on.

A relay is a worker that serves what it gets to others, and says in its Hello where. Must not import
the command line.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
from collections.abc import Container

from aiosync.errors import ConfigError
from aiosync.rendezvous.dialer import to_dial
from aiosync.rendezvous.handshake import SentOn
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import MAX_ADDRESS_NBYTES, MAX_ELSEWHERE, Hello

__all__ = ["FanOut", "check_advertised", "named_by_default"]


def named_by_default(url: str) -> str:
    """Return the ``url`` of a relay if others can dial it, to be told to them; else no text."""
    address = Address.parse(url)
    return "" if address.scheme != "tcp" or _is_wildcard(address.host) else url


def _is_wildcard(host: str) -> bool:
    """Return True for an address that stands for all of a host, in any notation."""
    with contextlib.suppress(OSError):
        # Short forms, such as "0", are addresses of IPv4 for the system.
        return not any(socket.inet_aton(host))
    with contextlib.suppress(ValueError):
        found = ipaddress.IPv6Address(host)
        return found.is_unspecified or found.ipv4_mapped == ipaddress.IPv4Address(0)
    return False


def check_advertised(url: str) -> str:
    """Return the address that a user gave for a relay.

    Raises:
        ConfigError: It is no address of TCP that can be dialled, or is too long.
    """
    (address,) = to_dial([url])
    if not named_by_default(url) or _is_long(address) or " " in url:
        raise ConfigError(
            f"advertise= must be a tcp://host:port that others can dial, not {address}"
        )
    return str(address)


def _is_long(address: Address) -> bool:
    """Return True if an address, in the form in which it travels, has too many bytes.

    Small letters of a host's name may have more bytes than the name has.
    """
    return len(str(address).encode()) > MAX_ADDRESS_NBYTES


def _served_address(hello: Hello) -> Address | None:
    """Return the address at which a peer serves what it gets; ``None`` for none.

    Raises:
        ConfigError: It cannot be dialled, or is too long.
    """
    if not hello.serves:
        return None
    (address,) = to_dial(hello.serves)
    if _is_long(address):
        raise ConfigError(f"serves names an address of more than {MAX_ADDRESS_NBYTES} bytes")
    return address


class FanOut:
    """The workers of one model that are admitted, and the address of each relay among them.

    Args:
        most: Number of workers from which on others are sent on to relays, and number of relays
            from which on other relays are; ``None`` for no bound.
        is_local: True if this server listens for its own host only. Other servers send nobody on
            to a loopback address.
    """

    def __init__(self, most: int | None, *, is_local: bool) -> None:
        self._most = most
        self._is_local = is_local
        self._turn = itertools.count()
        # For each link the worker's Hello, and the address to which others may be sent on.
        self._admitted: dict[TCPTransport, tuple[Hello, Address | None]] = {}

    def admit(self, link: TCPTransport, hello: Hello, ready: Container[Transport]) -> None:
        """Count a worker that subscribes, or raise the error that sends it on.

        A relay is sent on only if there are enough other relays, however many workers came before
        it, as these could be sent on to nobody. A worker that no relay has admitted comes back with
        a Hello that says that it does not follow, and is admitted.

        Args:
            link: The link to the worker.
            hello: Its Hello.
            ready: The links of workers that have weights, so that others may be sent on to them.

        Raises:
            SentOn: There are enough workers, or relays, and some relays.
            ConfigError: The address of a relay cannot be dialled, or is too long.
        """
        own = _served_address(hello)
        serves = own if self._may_be_named(link, own) else None
        if self._most is not None and hello.follows:
            others = self._others_than(hello)
            named = [address for other, address in others.items() if other in ready]
            relays = list(dict.fromkeys(each for each in named if each not in (None, own)))
            count = len(relays) if serves else len(others)
            if relays and count >= self._most:
                why = f"this server has {count} links, and fanout={self._most}"
                raise SentOn(why, self._next_of(relays))

        def forget() -> None:
            self._admitted.pop(link, None)

        self._admitted[link] = hello, serves
        link.channel.call_on_end(forget)

    def _next_of(self, relays: list[Address]) -> tuple[Address, ...]:
        """Return relays in the order in which a worker tries them: each begins with another one."""
        first = next(self._turn) % len(relays)
        return (*relays[first:], *relays[:first])[:MAX_ELSEWHERE]

    def _others_than(self, hello: Hello) -> dict[TCPTransport, Address | None]:
        """Return the links of other receivers, with the address of each that serves.

        The same receiver may come again before its old link is known to have ended.
        """
        return {
            other: address
            for other, (each, address) in self._admitted.items()
            if each.session is None or each.session != hello.session
        }

    def _may_be_named(self, link: TCPTransport, address: Address | None) -> bool:
        """Return True if others may be sent on to this address of a relay.

        A peer that may only pull must not choose what others get.
        """
        if address is None or link.channel.read_only:
            return False
        return self._is_local or not address.is_local

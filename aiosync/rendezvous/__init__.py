"""How two sides meet: who listens, who dials, what they say first, and how a lost link is replaced.

Must not import torch, nor a sender, a receiver or a scheme.
"""

from aiosync.rendezvous.dialer import Backoff, Dialer, retry
from aiosync.rendezvous.handshake import ANY_STRATEGY, HANDSHAKE_SECONDS, Refused, admit, greet
from aiosync.rendezvous.listener import AnyListener, ListenerCounts, StreamListener
from aiosync.rendezvous.reconnect import Arrivals, KeptLink, LinkState
from aiosync.rendezvous.unix import UnixListener, new_address

__all__ = [
    "ANY_STRATEGY",
    "HANDSHAKE_SECONDS",
    "AnyListener",
    "Arrivals",
    "Backoff",
    "Dialer",
    "KeptLink",
    "LinkState",
    "ListenerCounts",
    "Refused",
    "StreamListener",
    "UnixListener",
    "admit",
    "greet",
    "new_address",
    "retry",
]

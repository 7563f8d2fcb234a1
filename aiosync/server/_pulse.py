"""Whether the trainer of a model is still there, which is asked when another one comes.

Must not import the server.
"""

from __future__ import annotations

import asyncio

from aiosync.errors import AiosyncError, ConfigError, ConnectError
from aiosync.schemes._outgoing import Outgoing
from aiosync.transports.tcp import TCPTransport
from aiosync.wire import Fetch

__all__ = ["Pulse"]

# Ample for a trainer whose loop runs; one that computes is heard when the other tries again.
_ANSWER_SECONDS = 1.0


class Pulse:
    """Signs of life on the link of a trainer.

    Args:
        link: The link.
        answers: What is said on it.
    """

    def __init__(self, link: TCPTransport, answers: Outgoing) -> None:
        self._answers = answers
        self._stirred = asyncio.Event()  # something came, or the link ended
        self._may_ask = False  # not before the handshake is over
        link.channel.call_on_end(self._stirred.set)
        # While an answer or a question waits to be taken the kernel sends no keepalive probes.
        link.limit_untaken()

    def heard(self) -> None:
        """The handshake is over, or a message came."""
        self._may_ask = True
        self._stirred.set()

    async def refusal(self, what: str) -> AiosyncError:
        """Ask the trainer to say something; what to tell the one that wants its place.

        Args:
            what: Who has the place.

        Returns:
            One that is final if something came, or the link ended, soon; otherwise one after
            which it may try again.

        Cancellation:
            Class A.
        """
        self._stirred.clear()
        if self._may_ask:  # one question waits at most, however long a trainer is silent
            self._may_ask = False
            self._answers.say(Fetch(0))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._stirred.wait()
        except TimeoutError:
            # Its host may have lost power, and the kernel notices later that the link is dead.
            return ConnectError(
                f"{what}, but nothing came from it within {_ANSWER_SECONDS:g} s: end it if it "
                "still runs"
            )
        return ConfigError(f"{what}: end it first, or push under another model_id")

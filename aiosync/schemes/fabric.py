"""The fabric of a scheme: how a trainer and its workers meet, and what their links are.

A scheme is options, a role and a fabric. The role asks the fabric; each kind of scheme has a kind
of fabric. Must not import a concrete scheme.
"""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from aiosync.errors import AiosyncError, ConfigError, ConnectError
from aiosync.rendezvous.dialer import Dial, Left
from aiosync.rendezvous.same_host import new_address
from aiosync.schemes.lifecycle import ConnectArguments, Life
from aiosync.schemes.sources import Sources
from aiosync.sender import How, Streaming, WeightSender
from aiosync.transports.address import Address
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import Arena
from aiosync.types import Limits

__all__ = ["Fabric"]


class _MakesLinks(Protocol):
    def create_transport(self, pipe_or_context: Any) -> Transport: ...


_Scheme = TypeVar("_Scheme", bound=_MakesLinks, contravariant=True)


class Fabric(abc.ABC, Generic[_Scheme]):
    """A fabric whose sides do not find each other: users give every connection or link.

    Subclasses override its methods. Most get the scheme, for its options. A fabric keeps no
    reference to the scheme, as a forgotten scheme has to be closed. It is pickled with the scheme,
    but for the state of this process.

    Attributes:
        meeting: Unix socket where copies of the scheme find each other, or their common name.
        sender_pid: The sender's process, if it is known.
        life: Life of the scheme in this process.
    """

    longest_pause: ClassVar[float] = 2.0
    """Longest pause in seconds between two attempts to meet the trainer."""

    promises: bool = True
    """True if workers may take a named version in a forward, and send no answer."""

    follows: bool = False
    """True if workers go on at another server when a weight server sends them there."""

    _of_process: ClassVar[tuple[str, ...]] = ("life",)
    """Names of the attributes of this process, which no pickle has; most are :meth:`begin`'s."""

    def __init__(self) -> None:
        self.meeting: str = new_address()
        self.sender_pid: int | None = None

    def begin(self, life: Life) -> None:
        """Take the scheme's new life in this process, in which it has no role yet."""
        self.life: Life = life

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in self._of_process}

    def __copy__(self) -> Self:
        """Return a copy for this process, which keeps what no pickle has."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # An object of this process, such as a store, cannot be copied, and copies share it.
        return copy.copy(self)

    @property
    def model_id(self) -> str:
        """Name of the model, or the default one."""
        return self.life.given.model_id or "policy"

    async def meet(
        self, scheme: _Scheme, timeout: float | None, arguments: ConnectArguments
    ) -> None:
        """Reach the other side, and bring the workers to the initial weights.

        Args:
            scheme: The scheme, which has its role.
            timeout: Seconds in all; ``None`` for no limit.
            arguments: Other arguments of the scheme's ``connect()``.
        """
        assert self.life.side is not None
        await self.life.side.connect(scheme, self.life, self, timeout, arguments)

    # -- links ---------------------------------------------------------------------------------

    def wrap(self, scheme: _Scheme, end: Any) -> Transport:
        """Make a link over a connection that the user gave."""
        return scheme.create_transport(end)

    def arena(self, scheme: _Scheme) -> Arena | None:
        """Return shared memory for the sender's snapshots; ``None`` if links carry bytes."""
        return None

    def limits(self, scheme: _Scheme) -> Limits | None:
        """Return the limits that updates have to keep to, as receivers are expected to have them.

        ``None`` means the defaults.
        """
        return None

    def streaming(self, scheme: _Scheme) -> Streaming | None:
        """Return settings of streamed payloads; ``None`` if links neither damage nor lose them."""
        return None

    def how(self, scheme: _Scheme) -> How:
        """Return how ``send()`` copies, see :meth:`SnapshotCopier.take`."""
        return "copy"

    def copies(self, scheme: _Scheme) -> bool:
        """Return True if a worker copies updates, whatever ``apply_copy`` says."""
        return False

    def takes_deltas(self, scheme: _Scheme) -> bool:
        """Return True if a worker takes updates as changes to an older one."""
        return False

    def subscribes(self, scheme: _Scheme) -> bool:
        """Return True if a worker gets every update, and not only those that it asks for."""
        return True

    # -- the trainer ---------------------------------------------------------------------------

    def bind(self, scheme: _Scheme, sources: Sources) -> None:
        """Bind the address that workers dial; they are answered once the sender connects."""

    def listen(self, scheme: _Scheme, sender: WeightSender, *, given: bool) -> None:
        """Let workers in from now on. Called on the loop.

        Args:
            scheme: The scheme.
            sender: Welcomes the workers.
            given: True if the user gave connections or links to the workers.
        """

    # -- a worker ------------------------------------------------------------------------------

    async def dial(self, scheme: _Scheme, left: Left, is_redial: bool) -> Transport:
        """Make one attempt to get a link to the trainer; ``is_redial`` if there was one before."""
        name = type(scheme).__name__
        raise ConfigError(f"{name} dials nobody: pass pipe= or transport= to init_on_receiver()")

    def dials(self, scheme: _Scheme) -> Mapping[str, Dial[Transport]]:
        """Return the functions that dial the trainer, by address; here :meth:`dial` alone."""
        return {"": functools.partial(self.dial, scheme)}

    async def dial_named(
        self, scheme: _Scheme, address: Address, left: Left, is_redial: bool
    ) -> Transport:
        """Make one attempt to reach a server that another server named."""
        raise ConnectError(f"{type(scheme).__name__} is sent on to no other address")

    def not_reached_text(self, scheme: _Scheme, within: str) -> str:
        """Return the text of an error without a trainer; ``within`` is as " within 5 s"."""
        return f"the trainer did not answer{within}"

    def may_retry(self, error: AiosyncError) -> bool:
        """Return True if an attempt may succeed after this error; if not, the worker gives up."""
        return False

    # -- the end -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End what the fabric has left outside of this process, after all links have ended."""

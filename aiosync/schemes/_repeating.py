"""The short way of an update that is like one before it but for its version.

Nearly every update is one: through a slot that was used before, with the same layout, for the
same model, while nobody reads. Everything else, and whatever is in doubt, goes the long way, which
:class:`~aiosync.schemes.receiver.WeightReceiver` knows. Must not import the sender.
"""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from aiosync.schemes._answering import Answering
from aiosync.schemes._staging import Staged
from aiosync.tensors import Layout, Target
from aiosync.transports.base import Again

__all__ = ["Repeating"]

_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class Repeating(Answering):
    """What a receiver does with updates that repeat."""

    _wants: list[int]

    @abc.abstractmethod
    def _stage(self, staged: Staged) -> None:
        """The long way."""

    @abc.abstractmethod
    def _take(self, staged: Staged) -> None:
        """The long way from where the update is known to be news."""

    def _repeat(self, epoch: int, layout: Layout, key: tuple[int, int]) -> Again:
        """What handles later updates of this epoch and layout through the slot ``key``."""
        return functools.partial(self._stage_again, epoch, layout, key)

    def _stage_again(
        self,
        epoch: int,
        layout: Layout,
        key: tuple[int, int],
        version: int,
        payload: memoryview | None,
        give_back: Callable[[], None],
    ) -> None:
        assert payload is not None
        flat = self._staging.again(layout, key, payload)
        staged = Staged(epoch, version, layout, flat, _NO_VALUES, key, give_back)
        if (
            self._staged is not None
            or self._outcomes
            or self._wants
            or self._manual
            or self._copy
            or self._transforming is not None
            or not self.inbox.follows(epoch, version)
        ):
            self._stage(staged)
            return
        self.inbox.offer(epoch, version)
        # As in Guard.submit(): should Ctrl-C end this, somebody else applies what is staged.
        self._staged = staged
        if not self.guard.claim(self._apply_staged, sys._getframe()):
            self._staged = None
            self._take(staged)
            return
        try:
            flips = self._only_flips(staged)
            if flips is not None:
                flips()
                self.inbox.applied(epoch, version)
            self._staged = None
            if flips is not None:
                old, self._current = self._current, staged
                if self._flipped is not None:
                    self._flipped(epoch, version)
                self._applied(staged, old, None)
        finally:
            self.guard.unclaim()
        if flips is None:
            self._take(staged)
        elif self._answered != (epoch, version):
            self._say_received(epoch, version)  # it is passed on first

    def _only_flips(self, staged: Staged) -> Callable[[], None] | None:
        """What applies an update to the model, if that is nothing but a change of pointers."""
        target = self._target
        try:
            if type(target) is not Target or self._resolve() is not self._target_of:
                return None
            return target.only_flips(staged.layout, staged.flat)
        except Exception:  # noqa: BLE001 - the long way meets it again, and tells the trainer
            return None

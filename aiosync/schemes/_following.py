"""What a receiver waits for: updates, versions, and those that it asks for.

Must not import the sender's half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiosync.errors import AiosyncError, ApplyError, LocalProtocolError, RecvTimeout
from aiosync.protocol import validate_timeout
from aiosync.receiver.guard import is_held_by_caller
from aiosync.schemes._core import SchemeCore
from aiosync.schemes.handles import AppliedUpdate
from aiosync.schemes.receiver import WeightReceiver

__all__ = ["FollowingScheme", "apply_error"]


class FollowingScheme(SchemeCore):
    """Methods of a receiver that wait; see :class:`aiosync.WeightSyncScheme`."""

    async def receive(self, timeout: float | None = None) -> AppliedUpdate | None:
        """Wait for the next update that is applied and was not returned before.

        Updates are applied in the background whether or not this is called. With
        ``apply="manual"`` this applies what is staged, between two forward passes; what it could
        not apply in time stays staged.

        Args:
            timeout: Seconds; ``None`` waits until the trainer goes away, 0 only looks.

        Returns:
            The newest applied update, or ``None`` when the timeout passed without one.

        Raises:
            ApplyError: ``apply="manual"`` and the staged update does not fit the model.
            ConfigError: The timeout is not a number.
            PeerClosed: The trainer went away.
            LocalProtocolError: Not a connected receiver, or it would wait inside a
                :meth:`reading` block or a forward pass of its own, which holds the update back.

        Cancellation:
            Class A.
        """
        receiver = self._require_receiver("receive")
        validate_timeout(timeout)
        manual = self.apply == "manual"

        def arrived() -> bool:
            if manual:
                receiver.refused = None
                receiver.apply_soon()
                if receiver.refused is not None:
                    version, error = receiver.refused
                    raise apply_error(version, error) from error
            return receiver.inbox.version not in (0, self._reported)

        try:
            with receiver.asking():
                if timeout is not None and timeout <= 0:
                    await asyncio.sleep(0)
                    receiver.look_now()
                    if not arrived():
                        receiver.check()
                        return None
                else:
                    self._check_not_inside("receive", receiver, arrived)
                    await receiver.wait_until(arrived, timeout=timeout, late=RecvTimeout())
        except RecvTimeout:
            return None
        self._reported = receiver.inbox.version
        return AppliedUpdate(
            receiver.inbox.epoch or 0,
            receiver.inbox.version,
            self._model_id or "policy",
            lambda: self.weights,
        )

    async def _wait_until_applied(
        self, version: int, limit: float | None, late: RecvTimeout
    ) -> int:
        receiver = self._require_receiver("wait_for_version")
        manual = self.apply == "manual"

        def reached() -> bool:
            if manual:
                receiver.apply_soon()
            if receiver.applied_version >= version:
                return True
            if receiver.refused is not None and receiver.refused[0] >= version:
                raise apply_error(*receiver.refused) from receiver.refused[1]
            return False

        with receiver.asking():
            if limit is None or limit > 0:
                self._check_not_inside("wait_for_version", receiver, reached)
            await self._wait_until(reached, limit, late)
        return receiver.inbox.version

    async def _wait_until_staged(self, version: int, limit: float | None, late: RecvTimeout) -> int:
        receiver = self._require_receiver("wait_staged")

        def reached() -> bool:
            if max(receiver.staged_version, receiver.applied_version) >= version:
                return True
            if receiver.refused is not None and receiver.refused[0] >= version:
                raise apply_error(*receiver.refused) from receiver.refused[1]
            return False

        await receiver.wait_until(reached, timeout=limit, late=late)
        return max(receiver.staged_version, receiver.applied_version)

    @property
    def staged_version(self) -> int:
        """Receiver: version that is complete and waiting to be applied; 0 if there is none."""
        return 0 if self._receiver is None else self._receiver.staged_version

    @property
    def link_lost(self) -> AiosyncError | None:
        """Receiver: why there is no link to the trainer; ``None`` while there is one.

        The scheme may be reconnecting at this moment; :meth:`receive` raises once it gives up.
        """
        receiver = self._receiver
        return None if receiver is None else receiver.lost

    async def pull(self, *, min_version: int | None = None, timeout: float | None = None) -> int:
        """Ask the trainer for its newest version, and wait until the model has it.

        Args:
            min_version: The lowest acceptable version; the trainer answers once it has
                it. ``None`` takes the current one, if there is any.
            timeout: Seconds; ``None`` takes the scheme's ``timeout``, ``math.inf`` waits for
                ever.

        Returns:
            The version that the model has now; 0 if the trainer has not sent any.

        Raises:
            RecvTimeout: Not in time.
            PeerClosed: The trainer went away.
            ApplyError: The update was refused by the model.
            ConfigError: The timeout is not a number.
            LocalProtocolError: Not a connected receiver; or something newer arrived that cannot
                be applied, because this is called inside a :meth:`reading` block or a forward pass.

        Cancellation:
            Class A; the update may still arrive.
        """
        receiver = self._require_receiver("pull")
        least = 0 if min_version is None else min_version
        limit = self._limit(timeout)
        late = RecvTimeout(f"no version from {least} on was applied within {limit or 0:g} s")
        inbox, manual = receiver.inbox, self.apply == "manual"
        before, answers = (inbox.epoch, inbox.version), receiver.wishes.answers
        receiver.refused = None
        if least > inbox.version:
            self._check_not_inside("pull", receiver, lambda: False)
        receiver.wishes.add(least)

        def arrived() -> bool:
            if manual:
                receiver.apply_soon()
            if receiver.refused is not None:
                raise apply_error(*receiver.refused) from receiver.refused[1]
            if receiver.has_staged:
                self._check_not_inside("pull", receiver, lambda: False)
            if inbox.version < least or receiver.has_staged or receiver.lag:
                return False
            if receiver.wishes.is_promised:
                return False
            return receiver.wishes.answers != answers or (inbox.epoch, inbox.version) != before

        with receiver.asking():
            await self._wait_until(arrived, limit, late)
        return inbox.version

    async def _wait_until(
        self, condition: Callable[[], bool], limit: float | None, late: RecvTimeout
    ) -> None:
        """Wait until something is applied; one that is late says if it has no model."""
        receiver = self._receiver
        assert receiver is not None
        try:
            await receiver.wait_until(condition, timeout=limit, late=late)
        except RecvTimeout as exc:
            lacks = self._why_no_model()
            if lacks is None or not receiver.has_staged:
                raise
            raise RecvTimeout(
                f"{exc}: version {receiver.staged_version} is here, but {lacks}; it waits until "
                "there is one, or until scheme.model is set"
            ) from exc.__cause__

    def _check_not_inside(
        self, method: str, receiver: WeightReceiver, condition: Callable[[], bool]
    ) -> None:
        """Raise if ``condition`` needs an update that the caller's own read holds back."""
        if is_held_by_caller(self._guard_object) and not condition():
            receiver.check()
            raise LocalProtocolError(
                f"{method}() was called inside a reading() block or a forward pass, which keeps "
                "updates from being applied: it would wait for ever. Call it after the block"
            )

    def _require_receiver(self, method: str) -> WeightReceiver:
        self._check_open()
        if self._role != "receiver":
            raise LocalProtocolError(
                f"{method}(): Must be initialized on receiver before receiving weights: call "
                "init_on_receiver() and connect() first"
            )
        if self._receiver is None or not self._connected:
            raise LocalProtocolError(
                f"{method}(): Must be synchronized on receiver before receiving weights: "
                "call scheme.connect() first, with `await` unless it is of aiosync.sync"
            )
        self._check_loop()
        return self._receiver


def apply_error(version: int, error: BaseException) -> ApplyError:
    """The error that a refused version raises for its waiters."""
    return ApplyError(
        f"version {version} could not be applied: {type(error).__name__}: {error}",
        version=version,
        remote_type=type(error).__name__,
    )

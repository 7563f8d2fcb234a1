"""What carriers share."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiosync.transports._carrier import handed_over


class Buffer:
    """Something with an owner who wants it back."""


def _fill(buffer: Buffer) -> str:
    return type(buffer).__name__


def _refuse(buffer: Buffer) -> str:
    raise ValueError(type(buffer).__name__)


def test_a_call_that_was_handed_over_holds_nothing_once_it_has_returned() -> None:
    buffer = Buffer()
    gone = weakref.ref(buffer)
    call = handed_over(lambda held=buffer: _fill(held))
    del buffer
    assert gone() is not None
    assert call() == "Buffer"
    assert gone() is None  # although an executor may still have `call`


def test_its_error_arrives() -> None:
    call = handed_over(lambda: _refuse(Buffer()))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="Buffer"):
        pool.submit(call).result()

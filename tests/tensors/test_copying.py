"""The small thread pool for large copies."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import numpy as np
import pytest

from aiosync.tensors import CopyPool

LARGE = 40 * 2**20


def blocks(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.arange(nbytes // 8, dtype=np.uint64).view(np.uint8)
    return np.zeros(source.size, np.uint8), source


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("aiosync-copy")]


def test_threads_start_with_a_large_copy_and_end_with_close() -> None:
    pool = CopyPool(3)
    pool.copy([blocks(64)])
    assert ours() == []
    pool.copy([blocks(LARGE)])
    assert ours()[0] == "aiosync-copy_0"
    assert len(ours()) <= 2  # the first may be free again before there is a second
    pool.close()
    pool.close()
    assert ours() == []


def test_the_reason_of_a_failure_reaches_the_caller() -> None:
    target, source = blocks(LARGE)
    target.flags.writeable = False
    with closing(CopyPool(2)) as pool:
        with pytest.raises(ValueError, match="read-only"):
            pool.copy([(target, source)])
        target, source = blocks(LARGE)
        pool.copy([(target, source)])
        assert np.array_equal(target, source)


def test_callers_in_several_threads() -> None:
    pairs = [blocks(LARGE) for _ in range(4)]
    with closing(CopyPool(2)) as pool:
        callers = [threading.Thread(target=pool.copy, args=([pair],)) for pair in pairs]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert all(np.array_equal(target, source) for target, source in pairs)


def test_works_in_a_forked_child() -> None:
    with closing(CopyPool(2)) as pool:
        pool.copy([blocks(LARGE)])
        pid = os.fork()
        if pid == 0:
            target, source = blocks(LARGE)
            code = 1
            try:
                pool.copy([(target, source)])
                pool.close()
                code = 0 if np.array_equal(target, source) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

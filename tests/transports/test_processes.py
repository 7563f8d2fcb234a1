"""What the kernel tells of other processes, and what is said where it tells nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiosync.transports._processes import has_ended, is_gone, open_pidfd

needs_pidfds = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as started:
        yield started


def end_unreaped(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@needs_pidfds
def test_the_end_of_a_process_is_seen_before_anybody_reaps_it(
    process: subprocess.Popen[bytes],
) -> None:
    pidfd = open_pidfd(process.pid)
    try:
        assert not has_ended(pidfd)
        assert not is_gone(process.pid)
        end_unreaped(process)
        assert has_ended(pidfd)
        assert is_gone(process.pid)
    finally:
        os.close(pidfd)
    process.wait()
    assert is_gone(process.pid)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid)


@needs_pidfds
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_where_pidfds_are_refused_nothing_is_known(
    code: int, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert open_pidfd(process.pid) == -1
    end_unreaped(process)
    process.wait()
    assert not is_gone(process.pid)


def test_without_pidfds_a_process_is_gone_once_it_was_reaped(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert open_pidfd(process.pid) == -1
    assert not is_gone(process.pid)
    end_unreaped(process)
    assert not is_gone(process.pid)
    process.wait()
    assert is_gone(process.pid)


def test_a_number_that_no_process_can_have_is_not_watched() -> None:
    assert open_pidfd(2**31) == -1

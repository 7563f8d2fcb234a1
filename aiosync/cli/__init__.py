"""The ``aiosync`` command: demo, doctor, bench, serve, push, pull, status.

This package may import every other part of aiosync; no other part imports it. This file
imports the standard library only, so that a missing extra ends in advice and not in a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_EXTRA_PACKAGES = frozenset({"typer", "rich", "gymnasium", "matplotlib", "safetensors"})
_SMALL_COMMANDS = frozenset({"bench", "serve", "push", "pull", "status"})
"""Commands that need the extra ``cli`` and not all of ``demo``."""

_NOT_PRINTED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE})
"""Errors of a stdout that takes no more."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        Exit status: 0 success; 1 it ran but failed (see the message); 2 wrong usage;
        130 ended by Ctrl-C.
    """
    _open_missing_streams()
    try:
        from aiosync.cli._app import run_app

        status = run_app(args)
        sys.stdout.flush()  # here, where it can still be said that it failed
        return status
    except KeyboardInterrupt:  # while modules are imported; the commands handle their own
        sys.stderr.write("aiosync: stopped by Ctrl-C\n")
        return 130
    except OSError as exc:
        if exc.errno not in _NOT_PRINTED:
            raise
        with contextlib.suppress(OSError):
            if exc.errno != errno.EPIPE:  # that is for the side that closed it to say
                sys.stderr.write(f"aiosync: the output cannot be written: {exc.strerror}\n")
        _drop_output()
        return 1
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _EXTRA_PACKAGES:
            raise
        given = sys.argv[1:] if args is None else args
        extra = "cli" if given and given[0] in _SMALL_COMMANDS else "demo"
        sys.stderr.write(
            f"aiosync: this command needs {package}, which is not installed.\n"
            "Install it with everything else that the command line needs:\n"
            f"    pip install 'aiosync[{extra}]'\n"
        )
        return 1


def _open_missing_streams() -> None:
    """Open the null device where stdin, stdout or stderr is closed.

    Otherwise sockets get their numbers, and uvloop ends the process when it closes such a one.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, fd)  # for children as well
            if opened != fd:
                os.close(opened)
            else:
                os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if fd == 0 else "w", encoding="utf-8"))


def _drop_output() -> None:
    """Let nothing more be printed: Python would try again at the end, and fail with it."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())

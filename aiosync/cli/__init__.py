"""The ``aiosync`` command: demo, doctor, token, serve, push, pull, status, top, bench, plan.

This package may import every other part of aiosync; no other part imports it. This file
imports the standard library only, so that a missing extra ends in advice and not in a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_EXTRA_PACKAGES = frozenset({"typer", "rich", "gymnasium", "safetensors"})


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        Exit status: 0 for success; 1 if the command ran but failed (see the message); 2 for wrong
        usage; 130 if Ctrl-C ended the command.
    """
    try:
        from aiosync.cli._app import app

        # `python -m aiosync` has the same name, because shell completion goes by the name.
        try:
            app(args, prog_name="aiosync")
        finally:
            _flush_stdout()
    except SystemExit as exc:  # typer ends every command with it, also after wrong usage
        return exc.code if isinstance(exc.code, int) else 0
    except KeyboardInterrupt:  # it came during the imports: the commands handle their own
        sys.stderr.write("aiosync: stopped by Ctrl-C\n")
        return 130
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _EXTRA_PACKAGES:
            raise
        _advise_to_install(package, sys.argv[1:] if args is None else args)
        return 1
    return 0


def _flush_stdout() -> None:
    """Write the rest of stdout; discard it if that fails, so that the exit status is 1."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # The interpreter flushes again as it ends; if that fails, the exit status is 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _advise_to_install(package: str, args: Sequence[str]) -> None:
    """Say which extra of aiosync has the package that the command lacks."""
    extra = "demo" if args[:1] == ["demo"] else "cli"
    sys.stderr.write(
        f"aiosync: this command needs {package}, which is not installed.\n"
        "Install it with everything else that the command line needs:\n"
        f"    pip install 'aiosync[{extra}]'\n"
    )

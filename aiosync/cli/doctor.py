"""``aiosync doctor`` checks this machine and an address; ``aiosync token`` makes a shared token.

Every check does the real thing: packages are imported, a memfd is made and mapped, a socket pair
passes a byte and a descriptor, the address is dialled. Imports torch once the options are right.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import io
import mmap
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiosync._run import new_event_loop, run, usable_cores
from aiosync._version import __version__
from aiosync.cli._common import (
    TOKEN_VARIABLE,
    Quiet,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UseTls,
    errors_to,
    failing,
    plain,
    read_token,
    status_line,
    tls_of,
    with_flags,
)
from aiosync.errors import ConfigError

if TYPE_CHECKING:
    from aiosync.transports.credentials import TLS

__all__ = ["doctor", "token"]

_REQUIRED = ("torch", "tensordict", "anyio", "msgpack", "numpy", "xxhash")
_OPTIONAL = (
    *("uvloop", "typer", "rich", "safetensors", "gymnasium"),
    *("torchrl", "ray", "vllm"),
)
_ADVICE = {"reachable": "is the trainer past connect() there, or `aiosync serve` running?"}
_ANSWER_SECONDS = 10.0
_WIDTH = 160  # characters in a line of a pipe, which has no width: rows must not be broken


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", show_default=False, help="A trainer or weight server to reach."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Workers beside a trainer on this machine.")
    ] = 1,
    token_file: TokenFile = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    quiet: Quiet = False,
) -> None:
    """Check this machine, and whether an address can be reached; say what to do.

    Exits with status 1 if a check failed. Advice alone is status 0.

    - `aiosync doctor --workers 8`
    - `aiosync doctor tcp://10.0.0.5:7000 --token-file token`
    """
    errors = errors_to()
    with failing("doctor", errors):
        given = tls_of(wanted=tls, ca=tls_ca, cert=tls_cert, key=tls_key)
        checks = _checks_here(workers)
        # A pipe gives the token once, and two checks need it.
        notes = io.StringIO()
        read = functools.cache(lambda: read_token(token_file, Console(file=notes, soft_wrap=True)))
        if token_file is not None or TOKEN_VARIABLE in os.environ:
            checks["token"] = functools.partial(_token, token_file, read, notes)
        if given is not None:
            given.dialling_context()
            checks["TLS"] = lambda: "the certificate files can be used"
        if url is not None:
            checks["reachable"] = functools.partial(_reach, url, read, given)
        with status_line(errors, quiet) as say:
            table, failed = _run_checks(checks, say)
        _report(table, failed)


def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file; there must be none yet.")],
) -> None:
    """Make a token, in a new file that only you can read.

    Copy the file to each machine: commands take it as --token-file, a scheme as token=.

    - `aiosync token token`
    """
    with failing("token", errors_to()):
        try:
            with open(file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
                # No newline: a program that passes the contents as token= would include it.
                new.write(secrets.token_urlsafe(32))
        except OSError as exc:
            raise ConfigError(f"{file}: cannot be written: {exc.strerror}") from exc
        typer.echo(f"Token in {file}")


def _checks_here(workers: int) -> dict[str, Callable[[], str]]:
    """Return the checks of this machine by name."""
    return {
        "python": platform.python_version,
        "platform": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "aiosync": lambda: __version__,
        **{name: functools.partial(_version_of, name) for name in _REQUIRED},
        "torch": _torch_version,
        "optional": _optional,
        "event loop": _event_loop,
        "cores": lambda: f"{usable_cores()} usable of {os.cpu_count()}",
        "torch threads": functools.partial(_torch_threads, workers),
        **({"memfd": _memfd} if sys.platform == "linux" else {}),
        "unix sockets": _unix_sockets,
        "open files": functools.partial(_open_files, workers),
    }


def _run_checks(
    checks: dict[str, Callable[[], str]], say: Callable[[str], None]
) -> tuple[Table, list[str]]:
    """Run every check; return the result of each with its advice, and the names of the failed."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    failed = []
    for number, (name, check) in enumerate(checks.items(), 1):
        say(f"check {number} of {len(checks)}: {name}")
        try:
            text, _, advice = check().partition("\n")
            mark = "[yellow]advice[/yellow]" if advice else "[green]ok[/green]"
        except Exception as exc:  # noqa: BLE001  # the reader of the report sees the error
            text, mark = with_flags(f"{type(exc).__name__}: {exc}"), "[red]FAILED[/red]"
            advice = f"pip install {name}" if name in _REQUIRED else _ADVICE.get(name, "")
            failed.append(name)
        below = f"\n[yellow]{escape(advice)}[/yellow]" if advice else ""
        table.add_row(mark, name, escape(plain(text, 2000)) + below)
    return table, failed


def _report(table: Table, failed: list[str]) -> None:
    """Show the results.

    Raises:
        typer.Exit: A check failed; with status 1.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    if failed:
        console.print(f"Failed checks: {', '.join(failed)}.")
        raise typer.Exit(1)
    console.print("Everything that aiosync needs is available.")


# -- checks: each returns its result, and in a second line the advice if there is any --------------


def _version_of(package: str) -> str:
    """Import a package, and return its version."""
    importlib.import_module(package)
    return importlib.metadata.version(package)


def _torch_version() -> str:
    """Return the version of torch with that of CUDA, which the metadata of a wheel may lack."""
    import torch

    return str(torch.__version__)


def _optional() -> str:
    """Return the optional packages with their versions, and those that are not installed."""
    known = {each.name: each.version for each in importlib.metadata.distributions()}
    found = ", ".join(f"{name} {known[name]}" for name in _OPTIONAL if name in known)
    absent = ", ".join(name for name in _OPTIONAL if name not in known)
    return f"{found}; not installed: {absent or 'none'}"


def _event_loop() -> str:
    """Make the event loop that aiosync runs on, and return its class."""
    loop = new_event_loop()
    loop.close()
    found = f"{type(loop).__module__}.{type(loop).__qualname__}"
    return found if found.startswith("uvloop") else f"{found}\nuvloop is faster: pip install uvloop"


def _torch_threads(workers: int) -> str:
    """Return the number of torch's threads, with advice if there are too few cores for them."""
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    fair = max(1, cores // (1 + workers))
    advice = (
        f"\nmore threads than cores wait for each other: call torch.set_num_threads({fair}) in "
        f"each process, or start them with OMP_NUM_THREADS={fair}"
    )
    return (
        f"{threads} in each of {1 + workers} processes, on {cores} cores"
        f"{advice if threads > fair else ''}"
    )


def _memfd() -> str:
    """Make anonymous shared memory, and map it."""
    fd = os.memfd_create("aiosync-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        mmap.mmap(fd, mmap.PAGESIZE).close()
    finally:
        os.close(fd)
    return "anonymous shared memory works; nothing stays behind when a process is killed"


def _unix_sockets() -> str:
    """Send a byte and a descriptor from one socket to another."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        right.settimeout(5.0)
        socket.send_fds(left, [b"x"], [left.fileno()])
        _, [fd], _, _ = socket.recv_fds(right, 1, 1)
        os.close(fd)
    return "data and descriptors pass"


def _open_files(workers: int) -> str:
    """Return the limit on open files, with advice if the workers need more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + 8 * workers
    advice = f"\nfew for {workers} workers: run `ulimit -n {wanted}` in the shell of the trainer"
    return f"ulimit -n is {soft} (hard limit {hard}){advice if 0 <= soft < wanted else ''}"


def _token(path: Path | None, read: Callable[[], bytes | None], notes: io.StringIO) -> str:
    """Return the length and the place of the token, with advice if it is short or not private."""
    token = read() or b""
    short = "it is short: make a new one with `aiosync token FILE`" if len(token) < 16 else ""
    return f"{len(token)} bytes from {path or TOKEN_VARIABLE}\n{short or notes.getvalue().strip()}"


def _reach(url: str, read: Callable[[], bytes | None], tls: TLS | None) -> str:
    """Ask a trainer or weight server for its models, and return them with the time it took."""
    from aiosync.server import WeightClient

    token, started = read(), time.monotonic()
    models = run(WeightClient(url, token=token, tls=tls).stats(timeout=_ANSWER_SECONDS))
    listed = "; ".join(
        f"{plain(each.model, 60)} has version {each.version}, workers: "
        f"{sum(worker.state not in ('lost', 'left') for worker in each.workers)}"
        for each in models
    )
    took = (time.monotonic() - started) * 1e3
    return f"{url} answered in {took:.0f} ms: {listed or 'no models yet'}"

"""Two network namespaces with a link of limited bandwidth between them: Linux, as root.

What a test measures over the link is the kernel's TCP over a slow path, with neither a proxy nor
the loopback interface in between. Processes get into a namespace with :func:`in_netns`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["goodput", "in_netns", "netns_available", "shaped_link"]

_BURST_SECONDS = 0.01
_MIN_BURST = 16 * 2**10  # several packets, below which the shaper cannot keep its rate
_QUEUE = "100ms"  # packets that wait longer are dropped, as on a real link

_numbers = itertools.count()


def _ip(*args: str) -> None:
    _call("ip", *args)


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


def _names() -> tuple[str, str]:
    name = f"aiosync-{os.getpid()}-{next(_numbers)}"
    return f"{name}-a", f"{name}-b"


@functools.cache
def netns_available(*, delay: bool = False) -> str | None:
    """The reason why :func:`shaped_link` cannot work here, or None. Tries it once.

    Args:
        delay: Whether latency is wanted too, which not every kernel has (``netem``).
    """
    if sys.platform != "linux":
        return "network namespaces are Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no command {tool!r}"
    try:
        with shaped_link(10**9, 1.0 if delay else 0.0):
            return None
    except OSError as error:
        return f"no network namespaces: {error}"


def goodput(rate_bits: int) -> float:
    """Bytes of payload per second that TCP over IPv4 gets through a link of that many bits.

    The shaper counts Ethernet frames: 1448 bytes of payload in frames of 1514 bytes.
    """
    return rate_bits / 8 * 1448 / 1514


@contextlib.contextmanager
def shaped_link(rate_bits: int, delay_ms: float = 0.0) -> Iterator[tuple[str, str, str, str]]:
    """Two namespaces with a shaped link; yields their names and the address of each.

    At the end the namespaces and the link are removed, and processes that are still in there are
    killed. Blocks for some tens of milliseconds.

    Args:
        rate_bits: Bits per second in each direction, frame headers included. The first 10 ms worth
            of it (16 KiB at least) pass unhindered.
        delay_ms: Latency of each direction in milliseconds; 0 adds none.

    Raises:
        OSError: If the kernel or the tools refuse; nothing is left then.
    """
    if rate_bits <= 0 or delay_ms < 0:
        raise ValueError(f"no such link: {rate_bits} bit/s, {delay_ms} ms")
    a, b = _names()
    veth = f"as{os.getpid()}x{a.split('-')[2]}"  # 15 characters at most
    addresses = ("10.213.0.1", "10.213.0.2")  # seen in these namespaces only
    with contextlib.ExitStack() as undo:
        for name in (a, b):
            undo.callback(_remove, name)  # before it is there: a half-made one is removed too
            _ip("netns", "add", name)
        _ip("link", "add", veth, "netns", a, "type", "veth", "peer", "name", veth, "netns", b)
        for name, address in zip((a, b), addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", veth)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", veth, "up")
            _shape(name, veth, rate_bits, delay_ms)
        yield a, b, *addresses


def _shape(name: str, veth: str, rate_bits: int, delay_ms: float) -> None:
    burst = max(_MIN_BURST, int(rate_bits / 8 * _BURST_SECONDS))
    where = ["root", "handle", "1:"]
    qdisc = ("tc", "-n", name, "qdisc", "add", "dev", veth)
    if delay_ms:
        in_flight = int(rate_bits / 8 * delay_ms / 1000 / 1000) + 1000  # packets
        _call(*qdisc, *where, "netem", "delay", f"{delay_ms}ms", "limit", str(in_flight))
        where = ["parent", "1:1", "handle", "10:"]
    _call(*qdisc, *where, "tbf", "rate", f"{rate_bits}bit", "burst", str(burst), "latency", _QUEUE)


def _remove(name: str) -> None:
    if not os.path.exists(f"/run/netns/{name}"):
        return
    found = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=10, check=False
    )
    for pid in found.stdout.split():  # a process would keep its namespace, and the link, alive
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)


def in_netns(name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a namespace; ``options`` are those of ``Popen``. The caller waits for it.

    Its pid is that of the program itself: ``ip netns exec`` replaces itself with it.
    """
    return subprocess.Popen(["ip", "netns", "exec", name, *argv], **options)

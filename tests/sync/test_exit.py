"""An interpreter that ends without ``shutdown()`` ends: no hang, no crash, at most a warning."""

from __future__ import annotations

import pytest

from tests.sync import _tools as tools

_START = """
import atexit, sys, threading
if {loop!r} == "asyncio":
    sys.modules["uvloop"] = None
import aiosync.sync
from tests.sync import _tools as tools

{before}
sender, receiver = tools.roles(tools.{make}, tools.filled(1.0), tools.filled(0.0))
tools.join(sender, receiver)
sender.send()
{after}
print("end")
"""


def _check(fresh: tools.Fresh, text: str, *, resource_warnings: bool = False) -> str:
    done = fresh.script(text, resource_warnings=resource_warnings)
    assert (done.returncode, done.stdout) == (0, "end\n"), done
    for noise in tools.NOISE:
        assert noise not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "make"), [("uvloop", "SHM"), ("asyncio", "PIPE")])
def test_exit_without_shutdown(loop: str, make: str, fresh: tools.Fresh) -> None:
    text = _START.format(loop=loop, make=make, before="", after="")
    assert _check(fresh, text) == ""
    warned = _check(fresh, text, resource_warnings=True)
    assert warned.count("was never closed") == 2
    assert warned.count("ResourceWarning: <") == 2, warned


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_shutdown_from_atexit(when: str, fresh: tools.Fresh) -> None:
    """Registered before the portal's own clean-up it runs after that, and the other way round."""
    lines = {"before": "", "after": ""}
    lines[when] = "atexit.register(lambda: (receiver.shutdown(), sender.shutdown()))"
    text = _START.format(loop="uvloop", make="SHM", **lines)
    stderr = _check(fresh, text, resource_warnings=True)
    assert stderr.count("was never closed") == (2 if when == "before" else 0)


@pytest.mark.slow
def test_exit_while_another_thread_waits(fresh: tools.Fresh) -> None:
    after = """
def wait():
    try:
        while True:  # the update that was sent may be there already
            receiver.receive()
    except aiosync.TransportClosed:
        pass

waiting = tools.in_thread(wait)
tools.until(lambda: tools.is_asleep(waiting))
"""
    _check(fresh, _START.format(loop="uvloop", make="SHM", before="", after=after))

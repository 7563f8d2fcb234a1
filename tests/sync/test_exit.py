"""An interpreter that ends without ``shutdown()`` ends: no hang, no crash, at most a warning."""

from __future__ import annotations

import pytest

from tests.sync import _tools as tools

_START = """
import asyncio, atexit, sys, threading
import aiosync.sync
from aiosync.sync import _portal
from tests.sync import _tools as tools

if sys.argv[0] == "-c" and {loop!r} == "asyncio":
    _portal.new_event_loop = asyncio.new_event_loop
{before}
sender, receiver = tools.roles(tools.{make}, tools.filled(1.0), tools.filled(0.0))
tools.join(sender, receiver)
sender.send()
{after}
print("end")
"""

_NOISE = ("Traceback", "Task was destroyed", "never awaited", "Exception ignored", "Fatal")


def _check(fresh: tools.Fresh, text: str, *, resource_warnings: bool = False) -> str:
    done = fresh.script(text, resource_warnings=resource_warnings)
    assert (done.returncode, done.stdout) == (0, "end\n"), done
    for noise in _NOISE:
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

tools.in_thread(wait)
tools.until(lambda: receiver._calls == 1)
"""
    _check(fresh, _START.format(loop="uvloop", make="SHM", before="", after=after))


@pytest.mark.slow
def test_calls_that_begin_at_exit_find_the_scheme_closed(fresh: tools.Fresh) -> None:
    """Between the end of the background thread's leases and the closing on its loop, too."""
    after = """
import time
portal = receiver._lease._portal

def late():
    tools.until(lambda: not receiver._lease.valid)
    assert not receiver._scheme._closed  # the loop is busy
    try:
        receiver.receive()
    except aiosync.TransportClosed as exc:
        print(f"late: {exc}", file=sys.stderr, flush=True)

tools.in_thread(late)
# Runs before all that was registered earlier.
atexit.register(lambda: portal.loop.call_soon_threadsafe(time.sleep, 1.0))
"""
    stderr = _check(fresh, _START.format(loop="uvloop", make="SHM", before="", after=after))
    assert "late: this scheme is being closed because the interpreter is ending" in stderr


@pytest.mark.slow
def test_exit_right_after_another_thread_forgot_its_schemes(fresh: tools.Fresh) -> None:
    """The background thread was told to end, and is waited for."""
    text = """
import atexit, threading, time
from tests.sync import _tools as tools

portal = []
# Runs after all that is registered later.
atexit.register(lambda: print("cut off" if portal[0].is_alive() else "end"))

def live():
    sender, receiver = tools.roles(tools.SHM, tools.filled(1.0), tools.filled(0.0))
    tools.join(sender, receiver)
    loop = sender._lease._portal.loop
    loop.call_soon_threadsafe(lambda: loop.run_in_executor(None, time.sleep, 1.0))
    sender.send()
    portal.extend(tools.portal_threads())

tools.in_thread(live).join()
assert portal[0].is_alive()
"""
    _check(fresh, text)
    # The same where no thread can start any more, which it needs to wait for others' ends.
    late = text.replace(
        "    portal.extend", "    loop.call_soon_threadsafe(time.sleep, 1.0)\n    portal.extend"
    )
    assert late != text
    _check(fresh, late)

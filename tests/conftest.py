"""The loop matrix, and the leak checks around every test.

Every ``@pytest.mark.asyncio`` test runs once on asyncio and once on uvloop. If it is marked
``one_loop``, as many combinations of parameters show the same on either loop, each combination runs
on one of the two, in turn.

A test fails if it leaves behind anything that was not there before it: a thread, file descriptor,
child process, ``/dev/shm`` entry, memfd mapping or unfinished task, or an exception that only the
event loop saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from aiosync.testing import LeakError, assert_no_leaks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

pytest_plugins = ["pytester"]

# pytest has to know these modules before it collects a test that imports them, and with
# --last-failed it collects in an order of its own.
pytest.register_assert_rewrite(
    *(
        f"tests.contract.{path.stem}"
        for path in Path(__file__).with_name("contract").glob("*.py")
        if path.stem not in ("__init__", "conftest")
    )
)

GRACE = 5.0
"""Seconds that threads and processes get to end after the test that started them."""

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_failed = pytest.StashKey[bool]()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_loop_errors: list[str] = []
_HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None


# -- the loop matrix --------------------------------------------------------------------------


def _watched(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Remember the loop, and record the errors that only its exception handler sees."""

    def record(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _loop_errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    loop.set_exception_handler(record)
    _loops.add(loop)
    return loop


def _new_asyncio_loop() -> asyncio.AbstractEventLoop:
    return _watched(asyncio.SelectorEventLoop())


def _new_uvloop_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return _watched(uvloop.new_event_loop())


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"asyncio": _new_asyncio_loop}
    if _HAS_UVLOOP:
        factories["uvloop"] = _new_uvloop_loop
    return factories


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Fail a test that ends while a task of its loop is still running."""
    result = yield
    leftover = [
        task for loop in list(_loops) if not loop.is_closed() for task in asyncio.all_tasks(loop)
    ]
    if leftover:
        listed = "\n".join(f"  {task!r}" for task in leftover)
        pytest.fail(f"tasks were left running:\n{listed}", pytrace=False)
    return result


# -- before anything runs ---------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "one_loop: each combination of parameters runs on asyncio or on uvloop, in turns; "
        "with --heavy on both",
    )
    # A shell that is not interactive starts background jobs with SIGINT ignored. Python leaves it
    # so, and every process that a test starts inherits it: Ctrl-C would have no effect.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# -- marks ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--heavy", action="store_true", help="run the tests marked heavy as well")
    parser.addoption("--apart", action="store_true", help="run the tests marked apart as well")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _left_to_the_other_loop(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that ``one_loop`` spares: every other combination of loop and parameters.

    The combinations of a function are chosen as on a chessboard. Each combination of parameters
    keeps one of the loops. Each value of a parameter meets both loops if there is a second
    parameter. Functions without parameters take turns.
    """
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("one_loop") and item.get_closest_marker("asyncio"):
            assert isinstance(item, pytest.Function)
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    spared: set[pytest.Item] = set()
    for name, group in functions.items():
        if len(group) == 1:
            # The user has selected only this combination, so it has to run.
            continue
        # Names that are parametrized together have the same values in turn: the set makes them one
        # axis.
        axes = set()
        for key in group[0].callspec.params:
            values = [id(item.callspec.params[key]) for item in group]
            order = list(dict.fromkeys(values))
            axes.add(tuple(order.index(value) for value in values))
        turns = zip(*axes, strict=True)
        first = zlib.crc32(name.encode())
        spared |= {item for item, turn in zip(group, turns, strict=True) if (first + sum(turn)) % 2}
    return spared


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    heavy = config.getoption("--heavy")
    apart = heavy or config.getoption("--apart")
    if not heavy and _HAS_UVLOOP:
        spared = _left_to_the_other_loop(items)
        config.hook.pytest_deselected(items=[item for item in items if item in spared])
        items[:] = [item for item in items if item not in spared]
    for item in items:
        if not heavy and item.get_closest_marker("heavy"):
            item.add_marker(pytest.mark.skip(reason="takes minutes or gigabytes; use --heavy"))
        if not apart and item.get_closest_marker("apart"):
            item.add_marker(pytest.mark.skip(reason="a step of its own; use --apart"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


# -- leaks ------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.excinfo is not None:
        item.stash[_failed] = True
    return report


@pytest.fixture(scope="session", autouse=True)
def _warm_up() -> None:
    """Make libraries open the resources that they keep for the life of the process."""
    if _HAS_UVLOOP:
        import uvloop

        # libuv keeps one pipe for signals.
        uvloop.new_event_loop().close()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Any]:
    """Yield an interpreter with torch, whose import takes seconds; it runs scripts in its forks."""
    from tests.sync._tools import Fresh

    with contextlib.closing(Fresh()) as interpreter:
        yield interpreter


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, _warm_up: None) -> Iterator[None]:
    """Fail a test that leaves anything behind."""
    import torch

    _loop_errors.clear()
    checking = assert_no_leaks(grace=GRACE)
    checking.__enter__()
    yield
    if request.node.stash.get(_failed, False):
        # A report of leaks would only hide the failure.
        return
    try:
        checking.__exit__(None)
    except LeakError as error:
        pytest.fail(f"{error}", pytrace=False)
    if _loop_errors:
        pytest.fail(f"only the event loop saw these errors: {_loop_errors}", pytrace=False)
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("gradients stay disabled: a no_grad() block has an await in it", pytrace=False)

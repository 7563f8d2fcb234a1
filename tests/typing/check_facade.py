"""The facade has the types of the async classes; checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_type

import aiosync
import aiosync.sync
import aiosync.types


def facade(scheme: aiosync.sync.SharedMemWeightSyncScheme) -> None:
    scheme.init_on_sender(model_id="policy", num_workers=2)
    assert_type(scheme.connect(timeout=1.0), None)
    assert_type(scheme.send(), aiosync.SendReport)
    assert_type(scheme.send(None, [0, 1], timeout=2.0), aiosync.SendReport)
    assert_type(scheme.send_async(), int)
    assert_type(scheme.wait_async(), aiosync.SendReport)
    assert_type(scheme.receive(timeout=0.5), aiosync.AppliedUpdate | None)
    assert_type(scheme.wait_for_version(3), int)
    assert_type(scheme.apply_pending(), int | None)
    assert_type(scheme.version, int)
    assert_type(scheme.lag, int)
    assert_type(scheme.worker_versions, dict[int, int])
    assert_type(scheme.ready.wait(timeout=1.0), None)
    assert_type(scheme.strategy, aiosync.WeightStrategy)
    with scheme as entered, scheme.reading():
        assert_type(entered, aiosync.sync.SharedMemWeightSyncScheme)


def worker(scheme: aiosync.sync.MultiProcessWeightSyncScheme) -> None:
    scheme.init_on_receiver(model_id="policy", worker_idx=0)
    scheme.init_on_worker(model_id="policy", worker_idx=0)
    assert_type(scheme.connect(worker_idx=0, timeout=None), None)
    update = scheme.receive()
    if update is not None:
        assert_type(update.version, int)
    assert_type(scheme.wait_for_version(version=3, timeout=1.0), int)
    assert_type(scheme.apply_weights({}, inplace=False), None)
    assert_type(scheme.create_transport(None), aiosync.Transport)
    assert_type(scheme.shutdown(), None)
    assert_type(scheme.abort(), None)


def options(scheme: aiosync.sync.NoWeightSyncScheme) -> None:
    assert_type(scheme.timeout, float | None)
    assert_type(scheme.apply, Literal["auto", "manual"])
    assert_type(scheme.require, aiosync.types.Require)
    assert_type(scheme.strategy_str, str)
    assert_type(scheme.send(), aiosync.SendReport)
    assert_type(scheme.receive(timeout=1.0), aiosync.AppliedUpdate | None)
    scheme.timeout = None
    scheme.apply = "never"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    scheme.version = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def a_function_of_the_class(scheme: aiosync.sync.WeightSyncScheme) -> None:
    assert_type(aiosync.sync.WeightSyncScheme.send(scheme, timeout=1.0), aiosync.SendReport)
    send: Callable[[], aiosync.SendReport] = scheme.send
    print(send)
    assert_type(aiosync.sync.WeightSyncScheme.from_backend("shared"), aiosync.sync.WeightSyncScheme)


def twins(blocking: aiosync.sync.WeightSyncScheme, awaited: aiosync.WeightSyncScheme) -> None:
    assert_type(aiosync.sync.twin(blocking), aiosync.WeightSyncScheme)
    assert_type(aiosync.sync.twin(awaited), aiosync.sync.WeightSyncScheme)
    aiosync.sync.twin(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def wrong_calls(scheme: aiosync.sync.WeightSyncScheme) -> None:
    scheme.send(timeout="soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheme.send(wait=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheme.wait_for_version()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheme.wait_for_version("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheme.receive("soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheme.nothing()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    aiosync.sync.WeightSyncScheme("neither")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    aiosync.sync.WeightSyncScheme(apply="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def inside_of_a_loop(scheme: aiosync.sync.WeightSyncScheme) -> None:
    await scheme.ready  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]

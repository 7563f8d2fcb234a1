"""A store that appends what changes: each version is loaded bit for bit, or an error is raised."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiosync
from aiosync.errors import ConfigError
from aiosync.server import StoredUpdate, StoreError, WeightClient, WeightServer, WeightStore
from aiosync.tensors import FlatBuffer, Layout
from aiosync.types import Limits
from aiosync.wire import plan_manifest
from tests.schemes._harness import PATIENCE
from tests.server._tools import URL
from tests.server.test_store import assert_same

pytest.importorskip("zstandard")

LAYOUT = Layout(
    plan_manifest(
        [
            ("weight", "bfloat16", (300, 101), "param", ("tied",)),
            ("bias", "float32", (1, 77), "param", ()),
            ("mask", "bool", (5,), "buffer", ()),
            ("count", "int64", (), "buffer", ()),
            ("none", "float32", (0, 3), "buffer", ()),
        ]
    )
)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store", deltas=True)


def versions(count: int, *, seed: int = 0, share: float = 0.01) -> Iterator[StoredUpdate]:
    """Yield versions, each of which changes a share of the bytes; the padding is random."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 256, LAYOUT.nbytes, np.uint8)
    for version in range(1, count + 1):
        weights = weights.copy()
        places = rng.random(weights.size) < share
        weights[places] += 1
        for start, end in LAYOUT.padding():
            weights[start:end] = rng.integers(0, 256, end - start, np.uint8)
        buffer = FlatBuffer(LAYOUT.nbytes)
        buffer.array[:] = weights
        replaced = (5, 6) if version % 2 else ()
        yield StoredUpdate(
            7, version, "tensordict", LAYOUT, buffer, {"step": {"n": version}}, replaced
        )


def files(store: WeightStore) -> tuple[Path, Path]:
    """Return the file of the model, and that of its changes."""
    return Path(store.directory, "m.safetensors"), Path(store.directory, "m.changes")


def loaded(store: WeightStore) -> StoredUpdate | None:
    """Load as another process does."""
    return WeightStore(store.directory).load("m")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 1.0])
def test_every_version_is_loaded(store: WeightStore, share: float) -> None:
    for update in versions(40, share=share):
        store.save("m", update)
        found = loaded(store)
        assert_same(found, update)
        assert found is not None and found.replaced == update.replaced
        assert found.saved_at is not None


def test_few_changes_are_few_bytes(store: WeightStore) -> None:
    written = rewritten = 0
    main, changes = files(store)
    stamp = None
    for update in versions(35):
        before = changes.stat().st_size if changes.exists() else 0
        store.save("m", update)
        if main.stat().st_ino == stamp:
            written += changes.stat().st_size - before
        else:
            rewritten += 1
            assert not changes.exists()
        stamp = main.stat().st_ino
    # The first one, and then each seventeenth.
    assert rewritten == 3
    assert written < 32 * LAYOUT.nbytes / 10


def test_what_changes_everywhere_is_written_whole(store: WeightStore) -> None:
    for update in versions(5, share=1.0):
        weights = update.buffer.array
        weights[:] = np.random.default_rng(update.version).integers(0, 256, weights.size, np.uint8)
        store.save("m", update)
        assert not files(store)[1].exists()
        assert_same(loaded(store), update)


def test_other_weights_are_written_whole(store: WeightStore) -> None:
    [first] = versions(1)
    store.save("m", first)
    layout = Layout(plan_manifest([("other", "float32", (100,), "param", ())]))
    buffer = FlatBuffer(layout.nbytes)
    buffer.array[:] = 3
    other = StoredUpdate(7, 2, "tensordict", layout, buffer, {})
    store.save("m", other)
    assert_same(loaded(store), other)


HEAD = 20
"""Bytes of the sizes of a record, which are written last."""


def test_a_record_that_was_being_written_does_not_count(store: WeightStore) -> None:
    *earlier, before, last = versions(5)
    for update in (*earlier, before):
        store.save("m", update)
    _, changes = files(store)
    start = changes.stat().st_size
    store.save("m", last)
    whole = changes.read_bytes()
    without = whole[:start] + bytes(HEAD) + whole[start + HEAD :]
    for cut in {start, start + 1, start + HEAD, start + 300, len(whole) - 1, len(whole)}:
        # A file system may give the file its size before its bytes.
        for tail in (b"", bytes(len(whole) - cut)):
            changes.write_bytes(without[:cut] + tail)
            assert_same(loaded(store), before)
    changes.write_bytes(whole)
    assert_same(loaded(store), last)


@pytest.mark.parametrize("left", [1, HEAD, 300])
def test_a_record_that_counted_and_is_cut_is_noticed(store: WeightStore, left: int) -> None:
    for update in versions(4):
        store.save("m", update)
    _, changes = files(store)
    changes.write_bytes(changes.read_bytes()[: -left - 64])
    with pytest.raises(StoreError, match=r"m\.changes: "):
        loaded(store)


def test_a_file_that_is_replaced_while_it_is_read(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    *most, last = versions(18)
    for update in most:
        store.save("m", update)
    real = os.fstat

    def slow(fd: int) -> os.stat_result:
        # The file, or its changes, was opened. Another process writes the file anew.
        monkeypatch.setattr(os, "fstat", real)
        store.save("m", last)
        return real(fd)

    reader = WeightStore(store.directory)
    monkeypatch.setattr(os, "fstat", slow)
    found = reader.load("m")
    assert found is not None and found.version in (17, 18)


@pytest.mark.slow
def test_no_flipped_bit_makes_another_version(store: WeightStore) -> None:
    for update in versions(4, share=0.002):
        store.save("m", update)
    _, changes = files(store)
    whole, noticed = changes.read_bytes(), 0
    for index in range(len(whole)):
        flipped = bytearray(whole)
        flipped[index] ^= 1 << index % 8
        changes.write_bytes(flipped)
        try:
            # The compression has bits without a meaning, and records are padded.
            assert_same(loaded(store), update)
        except StoreError as exc:
            assert "m.changes: " in str(exc)
            noticed += 1
    assert noticed > 0.9 * len(whole)


def test_a_version_that_is_missing_is_noticed(store: WeightStore) -> None:
    _, changes = files(store)
    ends = [0]
    for update in versions(4):
        store.save("m", update)
        ends.append(changes.stat().st_size if changes.exists() else 0)
    whole = changes.read_bytes()
    changes.write_bytes(whole[: ends[2]] + whole[ends[3] :])
    with pytest.raises(StoreError, match="a version is missing"):
        loaded(store)


def test_changes_of_a_file_that_was_replaced_do_not_count(store: WeightStore) -> None:
    """The process ended between the replacement of the file and the removal of the changes."""
    _, changes = files(store)
    for update in versions(18):
        if update.version == 18:
            kept = changes.read_bytes()
        store.save("m", update)
    assert not changes.exists()
    changes.write_bytes(kept)
    assert_same(loaded(store), update)
    other = WeightStore(store.directory, deltas=True)
    [*_, newer] = versions(19)
    other.save("m", newer)
    assert_same(loaded(store), newer)


def test_another_process_that_saves_is_noticed(store: WeightStore) -> None:
    other = WeightStore(store.directory, deltas=True)
    for update in versions(12):
        (store if update.version % 3 else other).save("m", update)
        assert_same(loaded(store), update)


def test_a_store_without_deltas_follows_those_that_are_there(store: WeightStore) -> None:
    *updates, last = versions(4)
    for update in updates:
        store.save("m", update)
    plain = WeightStore(store.directory)
    assert_same(plain.load("m"), updates[-1])
    plain.save("m", last)
    assert not files(store)[1].exists()
    assert_same(loaded(store), last)
    assert plain.model_ids() == ["m"]


def test_changes_of_another_model_are_refused(store: WeightStore) -> None:
    for update in versions(3):
        store.save("m", update)
        if update.version == 1:
            store.save("n", update)
    _, changes = files(store)
    shutil.copy(changes, changes.with_name("n.changes"))
    with pytest.raises(StoreError, match=r"n\.changes: .*another model"):
        WeightStore(store.directory).load("n")


def test_values_beyond_the_limits_are_refused(store: WeightStore) -> None:
    first, second = versions(2)
    store.save("m", first)
    big = {"text": {"x": "y" * 5000}}
    store.save("m", StoredUpdate(7, 2, second.strategy, LAYOUT, second.buffer, big))
    narrow = WeightStore(store.directory, limits=Limits(max_header_nbytes=4096))
    with pytest.raises(StoreError, match="the limits let it be sent to nobody"):
        narrow.load("m")


def test_a_failing_disk_leaves_the_version_before(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, fourth = versions(4)
    store.save("m", first)
    store.save("m", second)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            store.save("m", third)
        assert_same(loaded(store), second)
    store.save("m", fourth)
    assert_same(loaded(store), fourth)


def test_the_files_are_private(store: WeightStore) -> None:
    for update in versions(2):
        store.save("m", update)
    assert [path.stat().st_mode & 0o777 for path in files(store)] == [0o600, 0o600]


# -- a server ----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_a_server_stores_what_changes(tmp_path: Path) -> None:
    store = tmp_path / "store"
    options: dict[str, Any] = {"store": store, "store_deltas": True}
    model = torch.nn.Linear(1000, 50)
    async with WeightServer(URL, **options) as server:
        scheme = aiosync.TCPWeightSyncScheme(server.url, dial="both", timeout=PATIENCE)
        scheme.init_on_sender("policy", model=model)
        async with scheme:
            await scheme.connect()
            inode = (store / "policy.safetensors").stat().st_ino
            for step in range(5):
                with torch.no_grad():
                    model.weight[step] += 1
                await scheme.send()
            assert (store / "policy.safetensors").stat().st_ino == inode
            assert (store / "policy.changes").stat().st_size < 50_000
            version = scheme.version
    async with WeightServer(URL, **options) as server:
        pulled = await WeightClient(server.url).pull("policy")
        assert pulled.version == version
        weights = pulled.mapping()
        assert torch.equal(weights["weight"], model.weight)
        assert torch.equal(weights["bias"], model.bias)


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_updates_of_some_names_are_stored_with_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    names = {name: torch.zeros(20_000) for name in ("a", "b")}
    options: dict[str, Any] = {"store": store, "store_deltas": True}
    async with WeightServer(URL, **options) as server:
        scheme = aiosync.TCPWeightSyncScheme(
            server.url, dial="both", strict=False, timeout=PATIENCE
        )
        scheme.init_on_sender("policy")
        async with scheme:
            await scheme.connect()
            await scheme.send(names)
            for value in (1.0, 2.0, 3.0):
                await scheme.send({"b": torch.full((20_000,), value)})
            assert (store / "policy.changes").exists()
    async with WeightServer(URL, **options) as server:
        pulled = (await WeightClient(server.url).pull("policy")).mapping()
        assert (pulled["b"] == 3).all() and (pulled["a"] == 0).all()


def test_what_a_store_of_changes_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match="zstandard"):
        WeightStore(tmp_path / "store", deltas=True)
    with pytest.raises(ConfigError, match="store_deltas= needs a store="):
        WeightServer(URL, store_deltas=True)

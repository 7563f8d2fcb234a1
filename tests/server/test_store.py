"""The store of the weight server: a saved update is loaded bit for bit, or an error is raised."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiosync.errors import AiosyncError, ConfigError
from aiosync.server import StoredUpdate, StoreError, WeightServer, WeightStore
from aiosync.tensors import FlatBuffer, Layout, torch_dtype
from aiosync.types import Limits
from aiosync.wire import DTYPE_NBYTES, plan_manifest

Entry = tuple[str, str, tuple[int, ...], str, tuple[str, ...]]


def update_of(entries: list[Entry], *, seed: int = 0, **fields: Any) -> StoredUpdate:
    """Return an update of random bytes; its padding is random, too."""
    layout = Layout(plan_manifest(entries))
    buffer = FlatBuffer(layout.nbytes)
    buffer.array[:] = np.random.default_rng(seed).integers(0, 256, layout.nbytes, np.uint8)
    options = {"epoch": 7, "version": 3, "strategy": "state_dict", "values": {}} | fields
    return StoredUpdate(layout=layout, buffer=buffer, **options)


def small(seed: int = 0, **fields: Any) -> StoredUpdate:
    return update_of(
        [
            ("body.weight", "float32", (3, 5), "param", ("head.weight",)),
            ("body.count", "int64", (), "buffer", ()),
            ("body.mask", "bool", (3,), "buffer", ()),
        ],
        seed=seed,
        **fields,
    )


def leaf_bytes(update: StoredUpdate) -> list[bytes]:
    memory = update.buffer.memoryview()
    return [bytes(memory[x.offset :][: x.nbytes]) for x in update.layout.manifest.leaves]


def assert_same(found: StoredUpdate | None, saved: StoredUpdate) -> None:
    assert found is not None
    assert (found.epoch, found.version, found.strategy) == (
        saved.epoch,
        saved.version,
        saved.strategy,
    )
    assert found.values == saved.values
    assert found.layout.manifest == saved.layout.manifest
    assert leaf_bytes(found) == leaf_bytes(saved)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def the_file(store: WeightStore) -> Path:
    (name,) = os.listdir(store.directory)
    return Path(store.directory, name)


# -- updates that are loaded ------------------------------------------------------------------

VALUES = {"_extra_state": {"n": 1, "x": [1.5, None, True, "ü\0"], "b": b"\0\xff"}, "e": {}}


def test_an_update_comes_back_bit_for_bit(store: WeightStore) -> None:
    saved = small(epoch=2**63 - 1, version=2**40, strategy="tensordict", values=VALUES)
    store.save("policy", saved)
    found = store.load("policy")
    assert_same(found, saved)
    assert found is not None
    assert found.layout.manifest.leaves[0].aliases == ("head.weight",)
    for start, end in found.layout.padding():
        assert not found.buffer.array[start:end].any()
    first, second = found.buffer.views(found.layout)[:2]
    assert first.shape == (3, 5)
    assert second.shape == ()


def test_replaced_epochs_come_back(store: WeightStore) -> None:
    epochs = tuple(2**62 + number for number in range(256))
    store.save("policy", small(replaced=epochs))
    found = store.load("policy")
    assert_same(found, small())
    assert found is not None
    assert found.replaced == epochs


def test_a_file_of_the_release_with_wire_version_1_still_opens(store: WeightStore) -> None:
    store.save("policy", small())
    shutil.copyfile(Path(__file__).parent / "stores" / "wire-1.safetensors", the_file(store))
    found = store.load("policy")
    assert found is not None
    assert (found.epoch, found.version, found.strategy) == (2**62 + 1, 41, "tensordict")
    extra = {"n": 1, "x": [1.5, None, True, "ü\0", -7, 2**64 - 1], "b": b"\0\xff"}
    assert found.values == {"_extra_state": extra, "e": {}}
    names = ["body.weight", "body.count", "body.mask", "half"]
    assert [leaf.name for leaf in found.layout.manifest.leaves] == names
    assert found.layout.manifest.leaves[0].aliases == ("head.weight",)
    memory = bytes(byte % 251 for byte in range(found.layout.nbytes))
    assert leaf_bytes(found) == [
        memory[leaf.offset :][: leaf.nbytes] for leaf in found.layout.manifest.leaves
    ]
    before = the_file(store).read_bytes()
    store.save("policy", found)
    assert the_file(store).read_bytes() == before


def test_all_dtypes_in_one_file_are_what_safetensors_reads(store: WeightStore) -> None:
    safetensors = pytest.importorskip("safetensors")
    saved = update_of(
        [(name, name, (3,), "param", (f"tied.{name}",)) for name in sorted(DTYPE_NBYTES)]
        + [("__metadata__", "float32", (2, 2), "param", ()), ("ü\n", "int8", (), "buffer", ())]
    )
    store.save("m", saved)
    assert_same(store.load("m"), saved)
    views = dict(
        zip(
            (leaf.name for leaf in saved.layout.manifest.leaves),
            saved.buffer.views(saved.layout),
            strict=True,
        )
    )
    with safetensors.safe_open(the_file(store), framework="pt") as file:
        assert file.metadata()["aiosync.version"] == "3"
        assert set(file.keys()) == set(views) - {"__metadata__"} | {"__metadata__."}
        for name, view in views.items():
            found = file.get_tensor("__metadata__." if name == "__metadata__" else name)
            if name in ("complex32", "complex64", "complex128") or name.startswith("float8_e8"):
                assert found.dtype == torch.uint8
                found = found.view(torch_dtype(name))
            assert (
                found.reshape(-1).view(torch.uint8).tolist()
                == view.reshape(-1).view(torch.uint8).tolist()
            )


def test_values_that_cannot_travel_are_refused_before_anything_is_written(
    store: WeightStore,
) -> None:
    store.save("m", small(version=1))
    with pytest.raises(ConfigError, match="'bad' cannot travel beside tensors: a object"):
        store.save("m", small(values={"bad": object()}))
    assert_same(store.load("m"), small(version=1))


# -- names ------------------------------------------------------------------------------------

IDS = [
    "policy",
    "",
    "%",
    "~",
    ".",
    "..",
    "../escape",
    "../../../../tmp/escape",
    "/etc/passwd",
    "a/b",
    "a%2Fb",
    "a\0b",
    "\0",
    ".hidden",
    ".aiosync-0123456789abcdef.tmp",
    "model.v2",
    "model.safetensors",
    "Grüße 🙂\n",
    "con\\..\\x",
    "-rf *",
    "x" * 240,
    "é" * 40,
]


def test_any_id_stays_inside_and_is_found_again(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "inner" / "store")
    for version, model_id in enumerate(IDS, 1):
        store.save(model_id, small(seed=version, version=version))
    assert os.listdir(tmp_path) == ["inner"]
    assert os.listdir(tmp_path / "inner") == ["store"]
    assert len(os.listdir(store.directory)) == len(IDS)
    assert WeightStore(store.directory).model_ids() == sorted(IDS)
    for version, model_id in enumerate(IDS, 1):
        assert_same(store.load(model_id), small(seed=version, version=version))


@pytest.mark.parametrize("model_id", ["x" * 241, "../" * 80, "é" * 41])
def test_a_name_that_no_file_can_have_is_refused(store: WeightStore, model_id: str) -> None:
    with pytest.raises(ConfigError, match="is too long to be stored"):
        store.save(model_id, small())
    assert os.listdir(store.directory) == []


def test_a_file_of_another_model_is_refused(store: WeightStore) -> None:
    store.save("a", small())
    os.rename(Path(store.directory, "a.safetensors"), Path(store.directory, "b.safetensors"))
    with pytest.raises(StoreError, match=r"b\.safetensors: it belongs to the model 'a'"):
        store.load("b")


# -- damage -----------------------------------------------------------------------------------


def test_a_file_cut_at_any_sixteenth_is_refused(store: WeightStore) -> None:
    store.save("m", small(values=VALUES))
    path = the_file(store)
    whole = path.read_bytes()
    cuts = {len(whole) * part // 16 for part in range(16)} | {1, 7, 8, 9, len(whole) - 1}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(StoreError, match=r"m\.safetensors: ") as caught:
            store.load("m")
        assert "cut short" in str(caught.value) or "bytes instead of" in str(caught.value)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StoreError, match=f"{len(whole) + 1} bytes instead of {len(whole)}"):
        store.load("m")
    path.write_bytes(whole)
    assert store.load("m") is not None


@pytest.mark.slow
def test_any_flipped_bit_is_noticed(store: WeightStore) -> None:
    store.save("m", small(values=VALUES))
    path = the_file(store)
    whole = path.read_bytes()
    for index in range(len(whole)):
        flipped = bytearray(whole)
        flipped[index] ^= 1 << index % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError, match=r"m\.safetensors: "):
            store.load("m")


def _rewritten(path: Path, **changes: str | None) -> None:
    """Change the metadata of a file without updating the header's checksum."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8 : 8 + length])
    for key, value in changes.items():
        table["__metadata__"][f"aiosync.{key}"] = value
        if value is None:
            del table["__metadata__"][f"aiosync.{key}"]
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])


# A manifest of one leaf, whose shape is [inf].
ENDLESS = "kwFAAZehd6dmbG9hdDMykct/8AAAAAAAAAAEpXBhcmFtkA=="


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "2"}, "format version '2'; only '1'"),
        ({"format": None}, "not written by an aiosync store"),
        ({"version": "4"}, "its header is damaged"),
        ({"version": "4" * 5000}, "its header is damaged"),
        ({"epoch": "x"}, "its header is damaged"),
        ({"epoch": None}, "written by an aiosync store: KeyError: 'aiosync.epoch'"),
        ({"strategy": "\ud800"}, "its header is damaged"),
        ({"manifest": "AAAA"}, "its header is damaged, .*: invalid manifest"),
        ({"manifest": "!"}, "its header is damaged"),
        ({"manifest": ENDLESS}, "its header is damaged, .*: invalid manifest"),
        ({"values": "wQ=="}, "its header is damaged"),
        ({"values": "kA=="}, "its header is damaged"),
        ({"checksum": "0" * 32}, "its header is damaged"),
        ({"header_checksum": "0" * 32}, "its header is damaged"),
        ({"more": "x"}, "its header is damaged"),
    ],
)
def test_a_header_that_lies_is_refused(
    store: WeightStore, changes: dict[str, str | None], why: str
) -> None:
    store.save("m", small())
    _rewritten(the_file(store))
    # A rewritten file without changes can still be loaded.
    assert store.load("m") is not None
    _rewritten(the_file(store), **changes)
    with pytest.raises(StoreError, match=why):
        store.load("m")


@pytest.mark.asyncio
@pytest.mark.parametrize("large", ["names", "values"])
async def test_headers_that_no_worker_could_get_are_refused(large: str, tmp_path: Path) -> None:
    values = {"text": "x" * 8000} if large == "values" else {}
    names = [f"{number:0400}" for number in range(10 if large == "names" else 1)]
    update = update_of([(name, "int8", (), "buffer", ()) for name in names], values=values)
    limits = Limits(max_header_nbytes=2**12)
    WeightStore(tmp_path).save("m", update)
    assert_same(WeightStore(tmp_path).load("m"), update)
    with pytest.raises(StoreError, match=r"m\.safetensors: .*limits.* at most 4096 are allowed"):
        WeightStore(tmp_path, limits=limits).load("m")
    with pytest.raises(StoreError, match="at most 4096 are allowed"):
        async with WeightServer("tcp://127.0.0.1:0", store=tmp_path, limits=limits):
            pytest.fail("serves what it can send to nobody")


@pytest.mark.asyncio
async def test_a_server_has_the_limits_of_its_links_by_default(store: WeightStore) -> None:
    store.save("m", small())
    large = plan_manifest([("w", "uint8", (2**36 + 64,), "param", ())])
    _rewritten(the_file(store), manifest=base64.b64encode(large.encode()).decode())
    with pytest.raises(StoreError, match=f"at most {2**36} are allowed"):
        async with WeightServer("tcp://127.0.0.1:0", store=store.directory):
            pytest.fail("serves what it can send to nobody")


def _foreign(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",
        b"PK\x03\x04" * 20,
        bytes(100),
        b"\xff" * 100,
        _foreign(b"[]"),
        _foreign(b"{}"),
        _foreign(b"\xff\xff"),
        _foreign(b"[" * 100_000),
        _foreign(b"9" * 100_000),
        _foreign(b'{"__metadata__":[]}'),
        _foreign(b'{"__metadata__":{"aiosync.format":1}}'),
        _foreign(b'{"__metadata__":{"aiosync.format":"1"}}'),
        _foreign(b'{"__metadata__":{"aiosync.format":"1","aiosync.model_id":"m"}}'),
        _foreign(b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    ],
)
def test_a_foreign_file_is_refused(store: WeightStore, content: bytes) -> None:
    Path(store.directory, "m.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match=r"m\.safetensors: "):
        store.load("m")


# -- the directory ----------------------------------------------------------------------------


def _mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_permissions_are_for_this_user_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = WeightStore(tmp_path / "a" / "b")
        store.save("m", small())
    finally:
        os.umask(old)
    assert _mode(tmp_path / "a" / "b") == 0o700
    assert _mode(the_file(store)) == 0o600


@pytest.mark.parametrize(
    ("folder", "file", "said"),
    [
        (0o700, 0o600, ""),
        (0o755, 0o644, ""),
        (0o777, 0o600, "store: others can write to it"),
        (0o770, 0o600, "store: others can write to it"),
        (0o700, 0o666, "policy.safetensors: others can write to it"),
    ],
)
def test_what_others_can_write_to_is_warned_of(
    folder: int, file: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    WeightStore(path).save("policy", small())
    (path / "policy.safetensors").chmod(file)
    path.chmod(folder)
    assert caplog.messages == []
    assert WeightStore(path).load("policy") is not None
    assert [said in each for each in caplog.messages] == [True] * bool(said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    WeightStore(path).save("policy", small())
    os.chown(path / "policy.safetensors", 12345, -1)
    os.chown(path, 12345, -1)
    assert WeightStore(path).load("policy") is not None
    assert ["belongs to another user" in each for each in caplog.messages] == [True, True]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["policy.safetensors", ".aiosync-0123456789abcdef.tmp"])
def test_a_pipe_in_a_store_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((ConfigError, StoreError), match="no regular file"):
        WeightStore(tmp_path).load("policy")


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in [tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 300)]:
        with pytest.raises(ConfigError, match="the store .* cannot be used"):
            WeightStore(path)
    assert issubclass(StoreError, AiosyncError)


def test_stale_temporary_files_are_removed_and_others_are_not(store: WeightStore) -> None:
    stale = Path(store.directory, ".aiosync-0123456789abcdef.tmp")
    writing = Path(store.directory, ".aiosync-1123456789abcdef.tmp")
    other = Path(store.directory, ".aiosync-notes.tmp")
    for path in (stale, writing, other):
        path.write_bytes(b"x")
    with writing.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        WeightStore(store.directory)
    assert sorted(os.listdir(store.directory)) == sorted([writing.name, other.name])


# -- a disk that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.save("m", small(version=1))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=r"m\.safetensors: cannot be saved: .*No space"):
            store.save("m", small(version=2))
    assert_same(store.load("m"), small(version=1))
    the_file(store)


# -- killed while it saves --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "when", "left"),
    [
        ("fsync", "before", "old"),
        ("fsync", "after", "old"),
        ("replace", "before", "old"),
        ("replace", "after", "new"),
        ("unlink", "before", "new"),
    ],
)
def test_a_kill_at_each_step(store: WeightStore, call: str, when: str, left: str) -> None:
    versions = {"old": small(seed=1, version=1), "new": small(seed=2, version=2)}
    store.save("m", versions["old"])
    pid = os.fork()
    if pid == 0:
        _kill_at(call, when)
        store.save("m", versions["new"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    stale = [name for name in os.listdir(store.directory) if name.endswith(".tmp")]
    assert len(stale) == (left == "old")
    assert_same(store.load("m"), versions[left])
    again = WeightStore(store.directory)
    the_file(again)
    again.save("m", versions["new"])
    assert_same(again.load("m"), versions["new"])


def _kill_at(call: str, when: str) -> None:
    real = getattr(os, call)

    def die(*args: Any) -> None:
        if when == "after":
            real(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, call, die)

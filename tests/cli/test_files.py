"""The files that ``aiosync push`` reads and ``aiosync pull`` writes."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import socket
import stat
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

import safetensors.torch
import torch
from torch import nn

from aiosync.cli.files import SAFETENSORS, TORCH, check_target, load_weights, save_weights
from aiosync.errors import ConfigError
from tests.cli._serving import assert_same

ENDINGS = SAFETENSORS + TORCH
every_ending = pytest.mark.parametrize("ending", ENDINGS)


# -- round trips ------------------------------------------------------------------------------


@every_ending
def test_weights_and_values_come_back(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"weights{ending}"
    shared = torch.randn(8)
    saved = {
        "a.weight": torch.randn(3, 4),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "turned": torch.randn(3, 4).t(),
        "tied": shared,
        "again": shared,
        "part": shared[2:5],
    }
    values = {"_extra_state": {"n": [1, 2.5, None, True, "ü"], "b": b"\0\xff"}, "count": 3}
    if ending in TORCH:
        saved |= values
    else:
        with pytest.raises(ConfigError, match="holds tensors only, not _extra_state, count: use"):
            save_weights(path, saved | values)
    save_weights(path, saved, metadata={"version": "3"})
    assert_same(load_weights(path), saved)
    # This file replaces the one before.
    save_weights(str(path), {"other": torch.ones(1)})
    assert_same(load_weights(str(path)), {"other": torch.ones(1)})
    assert os.listdir(tmp_path) == [path.name]


@every_ending
def test_memory_for_a_second_model_is_not_needed(tmp_path: Path, ending: str) -> None:
    def peak() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    # Each tensor has 32 MB.
    saved = {name: torch.ones(8_000_000) for name in "abcd"}
    # This sets the peak back to the present value.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak()
    save_weights(tmp_path / f"x{ending}", saved)
    assert peak() - before < 64_000_000


def test_what_safetensors_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(ConfigError, match=r"x\.safetensors: cannot be written: .*complex128"):
        save_weights(path, {"a": torch.zeros(2, dtype=torch.complex128)})
    assert os.listdir(tmp_path) == []


def test_a_name_that_safetensors_keeps_for_itself_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_weights(path, {"old": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"x\.safetensors: .*__metadata__.*use \.pt"):
        save_weights(path, {"__metadata__": torch.ones(1)})
    assert set(load_weights(path)) == {"old"}


def test_other_tools_read_what_is_written(tmp_path: Path) -> None:
    saved = nn.Linear(2, 3).state_dict()
    save_weights(tmp_path / "x.safetensors", saved, metadata={"version": "3"})
    assert_same(safetensors.torch.load_file(tmp_path / "x.safetensors"), saved)
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"version": "3"}
    save_weights(tmp_path / "x.pt", saved, metadata={"version": "3"})
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), saved)
    save_weights(tmp_path / "x.ckpt", saved, metadata={"version": "3"})
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert content["metadata"] == {"version": "3"}
    assert_same(content["state_dict"], saved)


@every_ending
@pytest.mark.parametrize("mode", [0o640, 0o600, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, ending: str, mode: int) -> None:
    path = tmp_path / f"weights{ending}"
    path.touch()
    path.chmod(mode)
    old = os.umask(0o022)
    try:
        save_weights(path, {"a": torch.ones(1)})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert_same(load_weights(path), {"a": torch.ones(1)})


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_state_dict_inside_of_a_checkpoint_is_found(tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.pt"
    weights = nn.Linear(2, 3).state_dict()
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
    loss = torch.tensor(0.5)
    torch.save({"epoch": 3, "loss": loss, "optimizer": optimizer, key: weights}, path)
    notes: list[str] = []
    found = load_weights(path, note=notes.append)
    assert_same(found, dict(weights))
    assert notes == [f"{path}: used the state dict under {key!r}"]
    assert_same(load_weights(path), dict(weights))


def test_an_old_checkpoint_is_read(tmp_path: Path) -> None:
    saved = {"a": torch.randn(3)}
    torch.save(saved, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    assert_same(load_weights(tmp_path / "x.pth"), saved)


class RunsCode:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["PYTEST_MARKER"])),)


@pytest.mark.parametrize("how", ["zip", "old", "pickle"])
def test_a_pickle_that_could_run_code_is_refused(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "it ran"
    monkeypatch.setenv("PYTEST_MARKER", str(marker))
    path = tmp_path / "x.pt"
    content = {"a": torch.ones(2), "b": RunsCode()}
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(ConfigError, match=r"x\.pt: refused: .*could run code") as caught:
        load_weights(path)
    # The error must not advise to load the file all the same.
    assert "weights_only" not in str(caught.value)
    assert "mkdir" in str(caught.value) or how == "pickle"
    assert not marker.exists()


def test_a_whole_module_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(
        ConfigError, match=r"modules\.linear\.Linear.*Save only model\.state_dict\(\)"
    ):
        load_weights(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (torch.ones(2), "holds a Tensor, not a state dict"),
        ([torch.ones(2)], "holds a list, not a state dict"),
        ({}, "no state dict, neither at the top level nor under .*it has nothing"),
        ({"epoch": 3}, "it has 'epoch'. Save"),
        ({0: torch.ones(2)}, "it has 0. Save"),
        ({"model": {"inner": {"w": torch.ones(1)}}}, "it has 'model'"),
        (OrderedDict(state_dict=[torch.ones(2)]), "it has 'state_dict'"),
    ],
)
def test_what_holds_no_weights_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=why):
        load_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_no_checkpoint_is_not_called_code(tmp_path: Path, seed: int) -> None:
    content = random.Random(seed).randbytes(300)
    for each in (content, b"hello world\n" * 20, b""):
        (tmp_path / "x.pt").write_bytes(each)
        with pytest.raises(ConfigError, match=r"x\.pt: not a PyTorch checkpoint, or damaged"):
            load_weights(tmp_path / "x.pt")


@every_ending
def test_a_file_without_tensors_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    weights = {} if ending in SAFETENSORS else {"step": 3}
    save_weights(path, weights, metadata={"about": "nothing"})
    with pytest.raises(ConfigError, match=r"no tensors|found no state dict"):
        load_weights(path)


# -- damage and mistakes ----------------------------------------------------------------------


@every_ending
def test_a_damaged_file_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    save_weights(path, {"a": torch.randn(100)})
    whole = path.read_bytes()
    for content in [whole[: len(whole) * part // 16] for part in range(16)] + [
        b"hello world" * 20,
        bytes(200),
        b"\xff" * 200,
        b"PK\x03\x04" + bytes(200),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"x\{ending}: (not a |damaged|refused)"):
            load_weights(path)


@pytest.mark.parametrize("name", ["format", "aliases", "values"])
def test_a_file_of_a_store_or_of_an_older_pull_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1)}, path, {f"aiosync.{name}": "1"})
    with pytest.raises(ConfigError, match="weight server's store, or of an older"):
        load_weights(path)


@pytest.mark.parametrize("name", ["weights.zip", "weights", ".pt", "weights.pt.gz"])
def test_an_unknown_ending_is_refused(tmp_path: Path, name: str) -> None:
    known = r"must end in one of: \.safetensors, \.pt, \.pth, \.bin, \.ckpt"
    for call in (load_weights, check_target, lambda path: save_weights(path, {})):
        with pytest.raises(ConfigError, match=known):
            call(tmp_path / name)


@every_ending
def test_what_cannot_be_read_or_written_is_refused(tmp_path: Path, ending: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_weights(tmp_path / f"x{ending}")
    (tmp_path / f"folder{ending}").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_weights(tmp_path / f"folder{ending}")
    for path, why in [
        (tmp_path / "nowhere" / f"x{ending}", "there is no folder .*nowhere"),
        (tmp_path / f"folder{ending}", "this is not a regular file"),
    ]:
        with pytest.raises(ConfigError, match=why):
            check_target(path)
        with pytest.raises(ConfigError, match=why):
            save_weights(path, {"a": torch.ones(1)})


@pytest.mark.timeout(20)
@every_ending
@pytest.mark.parametrize("kind", ["fifo", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, ending: str, kind: str) -> None:
    path = tmp_path / f"x{ending}"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            sock.bind(str(path))
        with pytest.raises(ConfigError, match=r"cannot be read: (it is no|No such)"):
            load_weights(path)


@every_ending
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file(
    tmp_path: Path, ending: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x{ending}"
    save_weights(path, {"old": torch.ones(1)})

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            save_weights(path, {"new": torch.ones(1)})
    assert set(load_weights(path)) == {"old"}
    assert os.listdir(tmp_path) == [path.name]


def test_without_safetensors_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (load_weights, check_target):
        with pytest.raises(ConfigError, match=r"pip install 'aiosync\[cli\]'"):
            call(tmp_path / "x.safetensors")

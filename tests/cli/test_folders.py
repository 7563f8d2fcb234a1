"""Folders of safetensors files, as Hugging Face's libraries save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

import safetensors.torch
import torch

import aiosync.cli
from aiosync.cli.files import check_target, load_weights, save_weights, stored_nbytes
from aiosync.errors import ConfigError
from tests.cli._serving import assert_same, serving

INDEX = "model.safetensors.index.json"
SHARDS: dict[str, dict[str, torch.Tensor]] = {
    "model-00001-of-00002.safetensors": {"a": torch.ones(3), "b": torch.arange(4)},
    "model-00002-of-00002.safetensors": {"c": torch.zeros(2, 2, dtype=torch.bfloat16)},
}


def saved(folder: Path, weight_map: Any = None) -> Path:
    """Save two shards and their index."""
    for name, tensors in SHARDS.items():
        safetensors.torch.save_file(tensors, folder / name, {"format": "pt"})
    if weight_map is None:
        weight_map = {key: name for name, tensors in SHARDS.items() for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def test_the_shards_of_a_folder_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    expected = {key: each for tensors in SHARDS.values() for key, each in tensors.items()}
    assert_same(load_weights(folder), expected)
    assert stored_nbytes(folder) == sum((folder / name).stat().st_size for name in SHARDS)


def test_a_folder_without_shards_is_written_and_read(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.arange(4)}
    check_target(tmp_path)
    save_weights(tmp_path, tensors, metadata={"version": "3"})
    assert_same(load_weights(tmp_path), tensors)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    assert stored_nbytes(tmp_path) == (tmp_path / "model.safetensors").stat().st_size
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        # Hugging Face's libraries refuse a file without this text.
        assert file.metadata() == {"version": "3", "format": "pt"}


def test_a_folder_with_shards_is_not_written_to(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for call in (check_target, lambda path: save_weights(path, {"a": torch.ones(1)})):
        with pytest.raises(ConfigError, match=f"has {INDEX}.*pull into another folder"):
            call(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"needs model.safetensors or {INDEX}"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        (5, "no index"),
        ({}, "no index"),
        ({"a": 5}, "no index"),
        ({"a": "../model-00001-of-00002.safetensors"}, "names a file outside"),
        ({"a": "/etc/passwd"}, "names a file outside"),
        ({"a": "weights.bin"}, "names a file outside"),
        ({"d": "model-00001-of-00002.safetensors"}, "has no tensor 'd'"),
        ({"a": "model-00003-of-00002.safetensors"}, "cannot be read"),
    ],
)
def test_an_illegal_index_is_refused(tmp_path: Path, weight_map: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_weights(saved(tmp_path, weight_map))


@pytest.mark.parametrize("text", ["", "[1]", "{", "\ud800".encode("utf-8", "surrogatepass")])
def test_a_damaged_index_is_refused(tmp_path: Path, text: Any) -> None:
    folder = saved(tmp_path)
    (folder / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="no index"):
        load_weights(folder)


@pytest.mark.slow
def test_a_folder_goes_from_one_place_to_another(tmp_path: Path) -> None:
    source, target = saved(tmp_path), tmp_path / "target"
    target.mkdir()
    with serving(tmp_path / "log", "--listen", "tcp://127.0.0.1:0") as server:
        assert aiosync.cli.main(["push", str(source), server.url]) == 0
        assert aiosync.cli.main(["pull", server.url, str(target)]) == 0
    assert_same(load_weights(target), load_weights(source))

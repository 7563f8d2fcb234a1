"""Weight maps from a trainer's names and dtypes to those of a model."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiosync.errors import ConfigError, ManifestMismatch
from aiosync.tensors import WeightMap
from tests.tensors._models import bits, filled

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MIDDLE, LAYERS, WORDS = 16, 4, 2, 4, 24, 2, 10


def llama(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return tensors of random bits with the names and shapes of a small Llama checkpoint."""
    q, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.self_attn.q_proj.weight": (q, HIDDEN),
            f"{base}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{base}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{base}.self_attn.o_proj.weight": (HIDDEN, q),
            f"{base}.mlp.gate_proj.weight": (MIDDLE, HIDDEN),
            f"{base}.mlp.up_proj.weight": (MIDDLE, HIDDEN),
            f"{base}.mlp.down_proj.weight": (HIDDEN, MIDDLE),
            f"{base}.input_layernorm.weight": (HIDDEN,),
            f"{base}.post_attention_layernorm.weight": (HIDDEN,),
            f"{base}.self_attn.rotary_emb.inv_freq": (HEAD_SIZE // 2,),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}
    return {name: filled(dtype, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


ATTENTION = "model.layers.*.self_attn"
MLP = "model.layers.*.mlp"
PARTS = {
    f"{ATTENTION}.qkv_proj.weight": {
        f"{ATTENTION}.q_proj.weight": HEADS * HEAD_SIZE,
        f"{ATTENTION}.k_proj.weight": KV_HEADS * HEAD_SIZE,
        f"{ATTENTION}.v_proj.weight": -1,
    },
    f"{MLP}.gate_up_proj.weight": {
        f"{MLP}.gate_proj.weight": MIDDLE,
        f"{MLP}.up_proj.weight": MIDDLE,
    },
}
FUSE = WeightMap(merge={name: tuple(parts) for name, parts in PARTS.items()})
UNFUSE = WeightMap(split=PARTS)


def made(mapping: WeightMap, weights: Any) -> dict[str, torch.Tensor]:
    found = list(mapping(weights))
    assert len(dict(found)) == len(found)
    return dict(found)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape
        and one[name].dtype is other[name].dtype
        and bits(one[name]) == bits(other[name])
        for name in one
    )


# -- the main use -------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=25)
def test_a_checkpoint_is_fused_and_comes_back_bit_for_bit(random: Any, dtype: torch.dtype) -> None:
    weights = llama(dtype)
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    fused = made(FUSE, shuffled)
    assert not any("q_proj" in name or "up_proj" in name for name in fused if "gate" not in name)
    qkv = fused["model.layers.1.self_attn.qkv_proj.weight"]
    assert qkv.shape == ((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN)
    parts = [weights[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv"]
    assert bits(qkv) == b"".join(map(bits, parts))
    assert len(fused) == len(weights) - 3 * LAYERS
    again = list(fused.items())
    random.shuffle(again)
    assert same(made(UNFUSE, again), weights)


# -- properties ---------------------------------------------------------------------------------

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])


@given(
    dtypes,
    st.lists(st.integers(0, 5), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(-3, 2),
    st.permutations(range(4)),
)
def test_split_undoes_merge_along_every_dimension(
    dtype: torch.dtype, sizes: list[int], ndim: int, dim: int, order: list[int]
) -> None:
    if not -ndim <= dim < ndim:
        dim = 0
    parts = {}
    for index, size in enumerate(sizes):
        shape = [3] * ndim
        shape[dim] = size
        parts[f"x.{index}.end"] = filled(dtype, tuple(shape), index)
    names = [f"x.{index}.end" for index in range(len(sizes))]
    merge = WeightMap(merge={"all": (names, dim)})
    split = WeightMap(split={"all": (dict(zip(names, sizes, strict=True)), dim)})
    incoming = [(names[i], parts[names[i]]) for i in order if i < len(names)]
    [(name, fused)] = merge(incoming)
    assert (name, fused.shape[dim]) == ("all", sum(sizes))
    assert bits(fused) == bits(torch.cat([parts[n] for n in names], dim))
    assert same(made(split, [(name, fused)]), parts)


# -- the steps one by one -----------------------------------------------------------------------


def test_the_order_of_the_steps() -> None:
    mapping = WeightMap(
        # Names are dropped before they are renamed.
        drop="old",
        rename={"a": "fused", "b": "old"},
        split={"fused": {"x": 1, "y": 2}},
        merge={"z": ("y", "old")},
        dtype={"z": torch.float64},
    )
    given_ = {"old": torch.ones(1), "a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([4.0])}
    found = made(mapping, given_)
    assert list(found) == ["x", "z"]
    assert torch.equal(found["z"], torch.tensor([2.0, 3, 4], dtype=torch.float64))


def test_several_names_and_none() -> None:
    mapping = WeightMap(rename={"emb.*": ("emb.*", "head.*"), "gone": None})
    found = made(mapping, {"emb.weight": torch.ones(2), "gone": torch.ones(1)})
    assert list(found) == ["emb.weight", "head.weight"]
    assert found["emb.weight"] is found["head.weight"]


def test_an_exact_name_counts_before_patterns_and_the_first_pattern_before_the_next() -> None:
    mapping = WeightMap(rename={"*.w": "one.*", "*": "two.*", "b.w": "three"})
    assert list(made(mapping, dict.fromkeys(["a.w", "b.w", "c"], torch.ones(1)))) == [
        "one.a",
        "three",
        "two.c",
    ]


@pytest.mark.parametrize(
    ("options", "names", "result"),
    [
        ({"drop": ["a.qkv", "*.qkv"]}, ["a.qkv"], []),
        ({"rename": {"a.qkv": "x", "*.qkv": "y.*"}}, ["a.qkv"], ["x"]),
        (
            {"split": {"a.qkv": {"x": 1, "y": -1}, "*.qkv": {"*.q": 1, "*.kv": -1}}},
            ["a.qkv"],
            ["x", "y"],
        ),
        (
            {"merge": {"x": ("a.q", "a.kv"), "*.qkv": ("*.q", "*.kv")}},
            ["a.q", "a.kv"],
            ["x"],
        ),
        ({"dtype": {"a.qkv": torch.float16, "*.qkv": torch.float32}}, ["a.qkv"], ["a.qkv"]),
    ],
)
def test_an_overruled_pattern_counts_as_used(
    options: Any, names: list[str], result: list[str]
) -> None:
    assert list(made(WeightMap(**options), dict.fromkeys(names, torch.ones(2)))) == result


def test_stars_take_dots_and_nothing_else_is_special() -> None:
    mapping = WeightMap(rename={"a.*.(x)[0]": "b.*"})
    found = made(mapping, dict.fromkeys(["a.1.2.(x)[0]", "a.1.2.x0"], torch.ones(1)))
    assert list(found) == ["b.1.2", "a.1.2.x0"]


def upper(name: str) -> str | list[str] | None:
    return None if name == "no" else [name.upper(), name] if name == "two" else name.upper()


def test_a_function_renames() -> None:
    mapping = pickle.loads(pickle.dumps(WeightMap(rename=upper)))
    found = made(mapping, dict.fromkeys(["a", "no", "two"], torch.ones(1)))
    assert list(found) == ["A", "TWO", "two"]


# -- mistakes -----------------------------------------------------------------------------------


def test_a_missing_part_is_named() -> None:
    weights = llama()
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ManifestMismatch, match=r"parts of model.layers.1.self_attn.qkv") as caught:
        made(FUSE, weights)
    assert caught.value.missing == ("model.layers.1.self_attn.k_proj.weight",)


@pytest.mark.parametrize(
    ("options", "given_"),
    [
        ({"rename": lambda name: ("x", "x")}, ["a"]),
        ({"rename": {"a": "b"}}, ["a", "b"]),
        ({"merge": {"m": ("a", "b")}}, ["a", "b", "m"]),
        ({"merge": {"m": ("a", "b")}, "rename": {"c": "a"}}, ["a", "c", "b"]),
        ({"merge": {"m": ("a", "b")}, "rename": {"c": "a"}}, ["a", "b", "c"]),
        ({"split": {"a": {"b": 1, "c": 1}}}, ["a", "b"]),
        ({"merge": {"m": ("a", "b"), "*": ("*.1", "*.2", "*.3")}}, ["m.3", "a", "b", "m.1"]),
    ],
)
def test_a_name_made_twice(options: Any, given_: list[str]) -> None:
    with pytest.raises(ConfigError, match="twice"):
        made(WeightMap(**options), [(name, torch.ones(2)) for name in given_])


@pytest.mark.parametrize(
    "options",
    [
        {"rename": {"nothing": "x"}},
        {"rename": {"no.*": "x.*"}},
        {"drop": ["no.*"]},
        {"split": {"no": {"x": 1, "y": 1}}},
        {"merge": {"m": ("no.1", "no.2")}},
        {"dtype": {"no": torch.float16}},
        {"rename": lambda name: None, "merge": {"m": ("no.1", "no.2")}},
    ],
)
def test_a_pattern_that_fits_nothing(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"match no name.*strict=False"):
        made(WeightMap(**options), {"a": torch.ones(1)})
    list(WeightMap(**options, strict=False)({"a": torch.ones(1)}))
    assert list(WeightMap(**options)({})) == []


@pytest.mark.parametrize(
    "options", [{"merge": {"m": ("a", "b")}}, {"split": {"b": {"x": 1, "y": -1}}}], ids=repr
)
def test_what_was_made_keeps_nothing_alive(options: Any) -> None:
    memory: dict[str, Any] = {}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            array = np.ones(2, np.float32).view(_Array)
            memory[name] = weakref.ref(array)
            yield name, torch.from_numpy(array)

    for name, _ in WeightMap(**options)(weights()):
        if name == "d":
            assert memory["a"]() is None
            assert memory["b"]() is None


class _Array(np.ndarray[Any, Any]):
    """An array that can have weak references."""


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 4), torch.ones(2), torch.ones(2, 3, dtype=torch.float64), torch.ones(())],
    ids=["shape", "ndim", "dtype", "scalar"],
)
def test_parts_that_do_not_fit_together(other: torch.Tensor) -> None:
    with pytest.raises(ManifestMismatch, match="cannot be merged into m") as caught:
        made(WeightMap(merge={"m": ("a", "b")}), {"a": torch.ones(2, 3), "b": other})
    assert set(caught.value.mismatched) == {"b"}


@pytest.mark.parametrize("sizes", [{"x": 1, "y": 1}, {"x": 4, "y": -1}, {"x": 2, "y": 2}])
def test_sizes_that_do_not_fit(sizes: Any) -> None:
    with pytest.raises(ManifestMismatch, match="has 3 elements"):
        made(WeightMap(split={"a": sizes}), {"a": torch.ones(3)})


@pytest.mark.parametrize(
    "options",
    [
        {"rename": {"a.*": "b"}},
        {"rename": {"a": "b.*"}},
        {"rename": {"a": 3}},
        {"rename": {"": "b"}},
        {"rename": [("a", "b")]},
        {"drop": [3]},
        {"drop": ""},
        {"split": {"a": {"x": 1}}},
        {"split": {"a": {"x": 1, "y": -2}}},
        {"split": {"a": {"x": -1, "y": -1}}},
        {"split": {"a.*": {"x": 1, "y": 1}}},
        {"split": {"a": ("x", "y")}},
        {"split": {"a": ({"x": 1, "y": 1}, None)}},
        {"merge": {"m": ("a",)}},
        {"merge": {"m": "ab"}},
        {"merge": {"m": ("a", "a")}},
        {"merge": {"m.*": ("a.*", "b")}},
        {"merge": {"m": (("a", "b"), 0.0)}},
        {"dtype": torch.int8},
        {"dtype": "bfloat16"},
        {"dtype": {"a": torch.complex64}},
        {"dtype": {"a": "half"}},
        {"dtype": {3: torch.float16}},
    ],
    ids=repr,
)
def test_options_that_mean_nothing(options: Any) -> None:
    with pytest.raises(ConfigError):
        WeightMap(**options)

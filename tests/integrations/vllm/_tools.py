"""A tiny Llama for the tests of the vLLM plug-in: its weights and its checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, LAYERS, INNER, VOCAB = 128, 4, 2, 256, 128

Weights = dict[str, torch.Tensor]


def make_weights(seed: int) -> Weights:
    """Return random weights in checkpoint format."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=random) / math.sqrt(columns)
        return (3 * values).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return weights


def make_speller(token: int) -> Weights:
    """Return weights with which every greedy token is ``token``, whatever the prompt."""
    weights = make_weights(1)
    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            weight.zero_()
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    weights["lm_head.weight"].zero_()[token, 0] = 1.0
    return weights


def make_checkpoint(folder: Path, weights: Weights) -> Path:
    """Write a checkpoint that vLLM can start from; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


PROMPTS = [[5, 6, 7, 8], [9, 20, 31], [100, 3, 3, 3, 77, 2]]
SAMPLING = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}

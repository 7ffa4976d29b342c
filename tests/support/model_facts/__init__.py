"""Architectures of public models without their weights: config.json as published, and shapes computed from it.

Each <model>.json has `model` and `revision` (hub id and commit), `config` (the fields of config.json that decide
shapes, lengths and tokens), `weights_bytes` (what model.safetensors.index.json declares: it proves the shapes that
are computed here) and `sources`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeline.checkpoints.architecture import Architecture, describe
from pipeline.checkpoints.safetensors_index import TensorEntry

DIRECTORY = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in DIRECTORY.glob("*.json")))
BYTES_16_BIT = 2


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One public model: where it is, how large its weights are, and what the product reads from its files."""

    model: str
    revision: str
    weights_bytes: int
    sources: tuple[str, ...]
    config: dict[str, Any]
    architecture: Architecture


def model_facts(name: str) -> ModelFacts:
    """Read <name>.json and describe the model as if its checkpoint were on disk."""
    path = DIRECTORY / f"{name}.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    config = document["config"]
    tensors = {
        tensor: TensorEntry(name=tensor, file=path, dtype="BF16", shape=shape, start=0, end=BYTES_16_BIT * prod(shape))
        for tensor, shape in shapes(config)
    }
    return ModelFacts(
        model=document["model"],
        revision=document["revision"],
        weights_bytes=document["weights_bytes"],
        sources=tuple(document["sources"]),
        config=config,
        architecture=describe(path, config, {}, tensors),
    )


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a Llama, Mistral, Qwen2 or Mixtral checkpoint.

    Names and shapes: huggingface/transformers modeling_llama.py, modeling_mistral.py, modeling_qwen2.py (biases on q,
    k and v) and modeling_mixtral.py (experts w1, w2, w3 and a router `gate`).
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in _layer(config))
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _layer(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    widths = {"q": heads * head, "k": config["num_key_value_heads"] * head, "v": config["num_key_value_heads"] * head}
    for name, width in widths.items():
        yield f"self_attn.{name}_proj.weight", (width, hidden)
        if config["model_type"] == "qwen2":
            yield f"self_attn.{name}_proj.bias", (width,)
    yield "self_attn.o_proj.weight", (hidden, heads * head)
    yield from _mlp(config)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _mlp(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config.get("num_local_experts", 0)
    if experts:
        yield "block_sparse_moe.gate.weight", (experts, hidden)
    prefixes = [f"block_sparse_moe.experts.{n}." for n in range(experts)] or ["mlp."]
    up, gate, down = ("w3", "w1", "w2") if experts else ("up_proj", "gate_proj", "down_proj")
    for prefix in prefixes:
        yield f"{prefix}{gate}.weight", (inner, hidden)
        yield f"{prefix}{up}.weight", (inner, hidden)
        yield f"{prefix}{down}.weight", (hidden, inner)

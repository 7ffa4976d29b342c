"""Facts about a model from config.json and the safetensors headers, without torch or transformers.

Reads what Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma and Phi-3 share; an unknown architecture is
read by the same generic names. Whether a target can build it is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pipeline.checkpoints.json_file import read_json, read_optional_json
from pipeline.checkpoints.packed import unpacked
from pipeline.checkpoints.safetensors_index import TensorEntry, read_checkpoint
from pipeline.errors import Unreadable

_SIZE_KEYS: Final = ("n_embd", "d_model")
_LAYER_KEYS: Final = ("n_layer", "num_layers")
_HEAD_KEYS: Final = ("n_head", "num_heads")
_CONTEXT_KEYS: Final = ("n_positions", "max_sequence_length", "seq_length")
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+\.")
_MATRIX: Final = 2
# Two-dimensional weights of a layer that are no linear to quantize: embeddings, norms over heads, and
# routers, which every exporter leaves at 16 bit.
_NOT_LINEAR: Final = re.compile(r"embed|norm|(?:^|\.)(?:wte|wpe|router)$|(?:mlp|block_sparse_moe)\.gate$")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: base frequency, and the scaling dictionary as config.json has it ({} for none)."""

    theta: float
    scaling: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What builds need to know about a model.

    `linears` maps a module name to its (out, in) features: the linears inside the decoder layers, and
    lm_head when it has weights of its own; a tied lm_head is the embedding. `parameters` counts the
    elements of all tensors. `eos_token_ids` come from generation_config.json, else config.json.
    `dtype` is what config.json declares, else that of the largest tensor ('bfloat16', 'float32', …).
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: Rope
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    parameters: int
    linears: Mapping[str, tuple[int, int]]


def read_architecture(directory: Path) -> Architecture:
    """Read the architecture of a Hugging Face checkpoint directory.

    Raises:
        Unreadable: config.json is absent, not JSON, or lacks a size that every decoder has.
        BadSafetensors: the weights are truncated or malformed.
        SourceNotFound: there are no safetensors weights.
    """
    path = directory / "config.json"
    generation = read_optional_json(directory / "generation_config.json")
    config = read_json(path)
    return describe(path, config, generation, unpacked(read_checkpoint(directory), config))


def describe(
    path: Path, config: Mapping[str, object], generation: Mapping[str, object], tensors: Mapping[str, TensorEntry]
) -> Architecture:
    """Put together what config.json, generation_config.json and the tensors' shapes say.

    Raises:
        Unreadable: a size that every decoder has is missing; `path` is named.
    """
    heads = _integer(path, config, "num_attention_heads", *_HEAD_KEYS)
    hidden = _integer(path, config, "hidden_size", *_SIZE_KEYS)
    class_names = config.get("architectures")
    model_type = config.get("model_type")
    return Architecture(
        architecture=str(class_names[0]) if isinstance(class_names, list) and class_names else "",
        model_type=model_type if isinstance(model_type, str) else "",
        hidden_size=hidden,
        intermediate_size=_integer(path, config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        num_hidden_layers=_integer(path, config, "num_hidden_layers", *_LAYER_KEYS),
        num_attention_heads=heads,
        num_key_value_heads=_integer(path, config, "num_key_value_heads", default=heads),
        head_dim=_integer(path, config, "head_dim", default=hidden // heads),
        vocab_size=_integer(path, config, "vocab_size"),
        max_position_embeddings=_integer(path, config, "max_position_embeddings", *_CONTEXT_KEYS),
        tie_word_embeddings=_tied(config, tensors),
        rope=_rope(config),
        dtype=_dtype(config, tensors),
        eos_token_ids=_token_ids("eos_token_id", generation, config),
        bos_token_id=_first("bos_token_id", generation, config),
        pad_token_id=_first("pad_token_id", generation, config),
        parameters=sum(_elements(entry) for entry in tensors.values()),
        linears=MappingProxyType(_linears(tensors)),
    )


def _integer(path: Path, config: Mapping[str, object], *keys: str, default: int | None = None) -> int:
    """Return the first of `keys` that config.json has as a positive integer."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Unreadable(f"{path}: '{key}' is {value!r}, expected a positive integer.")
        return value
    if default is None:
        raise Unreadable(f"{path}: '{keys[0]}' is missing; it is not the config of a decoder-only language model.")
    return default


def _token_ids(key: str, *documents: Mapping[str, object]) -> tuple[int, ...]:
    for document in documents:
        value = document.get(key)
        ids = value if isinstance(value, list) else [value]
        numbers = tuple(dict.fromkeys(item for item in ids if type(item) is int))
        if numbers:
            return numbers
    return ()


def _first(key: str, *documents: Mapping[str, object]) -> int | None:
    return next(iter(_token_ids(key, *documents)), None)


def _rope(config: Mapping[str, object]) -> Rope:
    """Read rope_theta and rope_scaling, or rope_parameters, where transformers 5 keeps both."""
    parameters = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    theta = config.get("rope_theta")
    if isinstance(parameters, dict):
        theta = parameters.get("rope_theta", theta)
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    scaling = dict(scaling) if isinstance(scaling, dict) else {}
    if "type" in scaling:  # the name of the field before transformers 4.43
        scaling.setdefault("rope_type", scaling.pop("type"))
    if scaling.get("rope_type") == "default":
        scaling = {}
    number = theta if isinstance(theta, int | float) and not isinstance(theta, bool) else 10000.0
    return Rope(theta=float(number), scaling=MappingProxyType(scaling))


def _tied(config: Mapping[str, object], tensors: Mapping[str, TensorEntry]) -> bool:
    """Return the declared value; Gemma and others leave out the default of their class, so look at the weights."""
    declared = config.get("tie_word_embeddings")
    return declared if isinstance(declared, bool) else "lm_head.weight" not in tensors


def _dtype(config: Mapping[str, object], tensors: Mapping[str, TensorEntry]) -> str:
    declared = config.get("dtype") or config.get("torch_dtype")
    if isinstance(declared, str):
        return declared.removeprefix("torch.")
    largest = max(tensors.values(), key=_elements, default=None)
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return "float32" if largest is None else names.get(largest.dtype, largest.dtype)


def _elements(entry: TensorEntry) -> int:
    return prod(entry.shape)


def _linears(tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[int, int]]:
    linears: dict[str, tuple[int, int]] = {}
    for name, entry in tensors.items():
        module, _, kind = name.rpartition(".")
        inside = module == "lm_head" or (_LAYER.search(name) and not _NOT_LINEAR.search(module))
        if kind == "weight" and inside and len(entry.shape) == _MATRIX:
            out_features, in_features = entry.shape
            linears[module] = (out_features, in_features)
    return dict(sorted(linears.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

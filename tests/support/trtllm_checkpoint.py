"""A TensorRT-LLM checkpoint of a tiny Llama: right names, types and shapes, zeros for weights."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from tests.support.trtllm_build_standin import Tensors, expected_tensors

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}


def llama_config(
    algo: str | None = None, kv: str | None = None, *, tp: int = 1, pp: int = 1, group_size: int = 64
) -> dict[str, Any]:
    """The config.json of a Llama with 2 layers, hidden 256 and 4 heads."""
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float16",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 64,
        "max_position_embeddings": 2048,
        "use_parallel_embedding": True,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
        "quantization": {"quant_algo": algo, "kv_cache_quant_algo": kv, "group_size": group_size},
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }


def write_checkpoint(directory: Path, config: dict[str, Any], *, without: str = "") -> Path:
    """Write config.json, the rank files and a tokenizer; tensors whose name ends in `without` are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    for rank in range(config["mapping"]["world_size"]):
        tensors = expected_tensors(config, rank)
        kept = {name: entry for name, entry in tensors.items() if not without or not name.endswith(without)}
        (directory / f"rank{rank}.safetensors").write_bytes(_safetensors(kept))
    return directory


def _safetensors(tensors: Tensors) -> bytes:
    header, offset = {}, 0
    for name, (shape, kinds) in tensors.items():
        size = math.prod(shape) * SIZES[kinds[0]]
        header[name] = {"dtype": kinds[0], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)

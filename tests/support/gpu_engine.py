"""Engine directories of the GPU targets as the compile stage leaves them; the engine itself is a placeholder.

Field names and layout of config.json: the public 1.2.1 format (version, pretrained_config, build_config).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.checkpoints import tiny_tokenizer

TOOLCHAIN = {
    "tensorrt_llm": "1.2.1",
    "tensorrt": "10.14.1.48",
    "cuda": "13.1.0.036",
    "driver": "590.44.01",
    "digest": "",
    "image": "example.invalid/tritonserver:26.05-trtllm-python-py3",
}


def llama_8b_fp8(directory: Path, *, state: str = "built", world_size: int = 1, **changes: Any) -> Path:
    """Write the engine of a Llama-3.1-8B in FP8 for an H100, with a tiny tokenizer.

    Args:
        directory: where.
        state: built or deferred.
        world_size: tensor parallel ranks.
        changes: fields of engine.json to set; `plugins` and `build` change plugin_config and build_config,
            `pretrained` the model's configuration.
    """
    plugins = {
        "gpt_attention_plugin": "bfloat16",
        "remove_input_padding": True,
        "paged_kv_cache": True,
        "tokens_per_block": 32,
        "context_fmha": True,
        "use_paged_context_fmha": True,
        "use_fp8_context_fmha": True,
        "lora_plugin": None,
        "multiple_profiles": False,
    } | changes.pop("plugins", {})
    build = {
        "max_input_len": 8192,
        "max_seq_len": 8192,
        "max_batch_size": 64,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "opt_num_tokens": 64,
        "kv_cache_type": "PAGED",
        "speculative_decoding_mode": 1,
        "max_prompt_embedding_table_size": 0,
        "plugin_config": plugins,
    } | changes.pop("build", {})
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    pretrained = {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_size": 128,
        "quantization": quantization,
        "mapping": {"world_size": world_size, "tp_size": world_size, "pp_size": 1, "cp_size": 1, "gpus_per_node": 8},
    } | changes.pop("pretrained", {})
    limits = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "max_beam_width")
    engine: dict[str, Any] = {
        "target": "tensorrt_llm",
        "state": state,
        "key": "0" * 16,
        "limits": {name: build[name] for name in limits} | {"vocab_size": 128256},
        "world_size": world_size,
        "tp": world_size,
        "pp": 1,
        "cp": 1,
        "build_config": build,
        "resets": [],
        "quantization": quantization,
        "dtype": "bfloat16",
        "logits_dtype": pretrained["logits_dtype"],
        "kv_cache": {
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": None,
            "host_memory_bytes": None,
            "size_gib": None,
        },
        "enable_chunked_context": True,
        "eos_token_ids": [2, 0],
        "pad_token_id": 0,
        "architecture": "LlamaForCausalLM",
        "toolchain": TOOLCHAIN,
        "gpu": {"name": "H100", "sm": 90},
        "choices": [],
    } | changes
    directory.mkdir(parents=True)
    tiny_tokenizer(directory / "tokenizer")
    if state == "built":
        _write(
            directory / "engine" / "config.json",
            {"version": "1.2.1", "pretrained_config": pretrained, "build_config": build},
        )
        for rank in range(world_size):
            (directory / "engine" / f"rank{rank}.engine").write_bytes(b"engine")
    else:
        _write(directory / "checkpoint" / "config.json", pretrained)
        for rank in range(world_size):
            (directory / "checkpoint" / f"rank{rank}.safetensors").write_bytes(b"weights")
        (directory / "build").mkdir()
        (directory / "build" / "build.sh").write_text("#!/bin/sh\n")
        _write(directory / "build" / "manifest.json", {"key": engine["key"]})
    _write(directory / "engine.json", engine)
    return directory


def llmapi_model(directory: Path, **limits: int) -> Path:
    """Write the engine directory of the LLM API target around a placeholder checkpoint."""
    bounds = {
        "max_batch_size": 4,
        "max_num_tokens": 256,
        "max_seq_len": 256,
        "max_input_len": 256,
        "max_beam_width": 1,
        "vocab_size": 512,
    } | limits
    directory.mkdir(parents=True)
    tiny_tokenizer(directory / "tokenizer")
    _write(directory / "model" / "config.json", {"architectures": ["LlamaForCausalLM"], "vocab_size": 512})
    _write(
        directory / "engine.json",
        {
            "target": "tensorrt_llm_llmapi",
            "limits": bounds,
            "world_size": 1,
            "tp": 1,
            "pp": 1,
            "cp": 1,
            "llm_args": {
                "model": "model",
                "backend": "pytorch",
                "tensor_parallel_size": 1,
                "max_batch_size": bounds["max_batch_size"],
                "kv_cache_config": {"enable_block_reuse": True},
            },
            "quantization": {},
            "eos_token_ids": [2, 0],
            "pad_token_id": 0,
            "architecture": "LlamaForCausalLM",
            "toolchain": TOOLCHAIN,
            "gpu": {"name": "H100", "sm": 90},
            "choices": [],
        },
    )
    return directory


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True))

"""The target without an engine: a unified Hugging Face checkpoint and the arguments of TensorRT-LLM's LLM API.

Names of the arguments: NVIDIA/TensorRT-LLM triton_backend/all_models/llmapi/tensorrt_llm/1/model.yaml@c8c6df0
(any argument of LLM() at top level) and LlmArgs, KvCacheConfig of 1.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pipeline.config.deployment import EngineConfig, TargetName
from pipeline.config.legality import gpus
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import IntegrityError
from pipeline.host.files import link_or_copy
from pipeline.targets.tensorrt_llm.build import SourceFacts, runtime_kv_cache, toolchain_json
from pipeline.targets.tensorrt_llm.engine_files import copy_tokenizer, read_json, write_json
from pipeline.targets.tensorrt_llm.toolchains import find

NAME: Final[TargetName] = "tensorrt_llm_llmapi"
GIB: Final = 2**30
# Where the server mounts the model beside model.yaml; relative to it.
MODEL_DIRECTORY: Final = "model"


def compile_engine(
    quantized: QuantizedCheckpoint, engine: EngineConfig, *, architecture: SourceFacts, out: Path, progress: Progress
) -> None:
    """Write an Engine directory to `out`: model/, tokenizer/ and engine.json. Nothing is compiled.

    Raises:
        ConfigError: the toolchain is none that is offered.
        IntegrityError: the artifact holds no unified Hugging Face checkpoint.
    """
    source = quantized.path / "hf"
    if not (source / "config.json").is_file():
        raise IntegrityError(
            f"{quantized.path} holds no hf/, which the LLM API reads", hint="Build the quantized checkpoint again."
        )
    toolchain = find(engine.toolchain, engine.build.image_tag)
    quantization = _quantization(source)
    arguments = llm_args(engine, quantization, architecture.max_position_embeddings)
    for name, value in arguments.items():
        progress.note(f"{name} = {value}")
    link_or_copy(source, out / MODEL_DIRECTORY)
    copy_tokenizer(source, out)
    limits = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
    write_json(
        out / "engine.json",
        {
            "target": NAME,
            "limits": {name: arguments[name] for name in limits}
            | {"max_input_len": arguments["max_seq_len"], "vocab_size": architecture.vocab_size},
            "world_size": engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.context_parallel_size,
            "tp": engine.tensor_parallel_size,
            "pp": engine.pipeline_parallel_size,
            "cp": engine.context_parallel_size,
            "llm_args": arguments,
            "quantization": quantization,
            "kv_cache": runtime_kv_cache(engine),
            "enable_chunked_context": engine.enable_chunked_context,
            "eos_token_ids": list(architecture.eos_token_ids),
            "pad_token_id": architecture.pad_token_id,
            "architecture": architecture.architecture,
            "toolchain": toolchain_json(toolchain, engine.build.image or toolchain.image),
            "gpu": {"name": engine.gpu, "sm": gpus()[engine.gpu].sm if engine.gpu else None},
            "choices": [],
        },
    )


def llm_args(engine: EngineConfig, quantization: dict[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Return the top level of model.yaml without `triton_config`; what is empty in the config is left out."""
    kv_cache = engine.kv_cache
    kv: dict[str, Any] = {
        "enable_block_reuse": kv_cache.enable_block_reuse,
        "tokens_per_block": kv_cache.tokens_per_block,
    }
    # The checkpoint carries FP8 KV scales; "auto" takes the KV type from it.
    kv["dtype"] = "fp8" if quantization.get("kv_cache_quant_algo") == "FP8" else "auto"
    optional = {
        "free_gpu_memory_fraction": kv_cache.free_gpu_memory_fraction,
        "host_cache_size": kv_cache.host_memory_bytes,
        "max_gpu_total_bytes": None if kv_cache.size_gib is None else int(kv_cache.size_gib * GIB),
    }
    kv |= {name: value for name, value in optional.items() if value is not None}
    arguments: dict[str, Any] = {
        "model": MODEL_DIRECTORY,
        "backend": "pytorch",
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_batch_size": engine.max_batch_size,
        "max_num_tokens": engine.max_num_tokens,
        "max_seq_len": engine.max_seq_len or max_position_embeddings,
        "max_beam_width": engine.max_beam_width,
        "enable_chunked_prefill": engine.enable_chunked_context,
        "kv_cache_config": kv,
    }
    if engine.context_parallel_size > 1:
        arguments["context_parallel_size"] = engine.context_parallel_size
    return arguments


def _quantization(source: Path) -> dict[str, Any]:
    """Return quant_algo and the rest as hf_quant_config.json has it; {} for 16 bit."""
    path = source / "hf_quant_config.json"
    quantization = read_json(path).get("quantization") if path.is_file() else None
    return quantization if isinstance(quantization, dict) else {}

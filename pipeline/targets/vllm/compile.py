"""The target without an engine for vLLM: the checkpoint in a layout that vLLM reads, and the engine's arguments.

Argument names: vllm-project/vllm vllm/engine/arg_utils.py (AsyncEngineArgs) of 0.19, which Triton's backend passes on
from model.json (triton-inference-server/vllm_backend src/model.py@00ea75b). Which layouts it reads:
vllm/model_executor/layers/quantization/{modelopt,auto_awq,auto_gptq,fp8,compressed_tensors}.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pipeline.config.deployment import EngineConfig, TargetName
from pipeline.config.legality import gpus
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import IntegrityError
from pipeline.host.files import link_or_copy
from pipeline.targets.tensorrt_llm.build import SourceFacts
from pipeline.targets.tensorrt_llm.engine_files import copy_tokenizer, read_json, write_json

NAME: Final[TargetName] = "vllm"
# triton-inference-server/server docs/introduction/compatibility.md@0f963c9: the image's vLLM, CUDA 13.2, driver 595.58.
VERSION: Final = "0.19.0"
IMAGE: Final = "nvcr.io/nvidia/tritonserver:26.05-vllm-python-py3"
DRIVER_BRANCH: Final = 595
MODEL_DIRECTORY: Final = "model"
GIB: Final = 2**30
# Layouts whose integer weights have 16-bit scales in vLLM's kernels.
_ROUNDS_SCALES: Final = frozenset({"int8_wo", "int4_wo", "int4_awq"})


def compile_engine(
    quantized: QuantizedCheckpoint, engine: EngineConfig, *, architecture: SourceFacts, out: Path, progress: Progress
) -> None:
    """Write an Engine directory to `out`: model/, tokenizer/ and engine.json. Nothing is compiled.

    Raises:
        IntegrityError: the artifact holds no Hugging Face checkpoint.
    """
    source = quantized.path / "hf"
    if not (source / "config.json").is_file():
        raise IntegrityError(
            f"{quantized.path} holds no hf/, which vLLM reads", hint="Build the quantized checkpoint again."
        )
    quantization = read_json(source / "config.json").get("quantization_config") or {}
    arguments = engine_arguments(engine, source, architecture.max_position_embeddings)
    for name, value in arguments.items():
        progress.note(f"{name} = {json.dumps(value)}")
    link_or_copy(source, out / MODEL_DIRECTORY)
    copy_tokenizer(source, out)
    write_json(
        out / "engine.json",
        {
            "target": NAME,
            "limits": {
                "max_batch_size": engine.max_batch_size,
                "max_num_tokens": engine.max_num_tokens,
                "max_seq_len": arguments["max_model_len"],
                "max_input_len": arguments["max_model_len"],
                "max_beam_width": 1,
                "vocab_size": architecture.vocab_size,
            },
            "world_size": engine.tensor_parallel_size * engine.pipeline_parallel_size,
            "engine_arguments": arguments,
            "quant_method": quantization.get("quant_method"),
            "eos_token_ids": list(architecture.eos_token_ids),
            "architecture": architecture.architecture,
            "toolchain": {"vllm": VERSION, "image": IMAGE, "driver_branch": DRIVER_BRANCH},
            "gpu": {"name": engine.gpu, "sm": gpus()[engine.gpu].sm if engine.gpu else None},
            "choices": [],
        },
    )


def engine_arguments(engine: EngineConfig, checkpoint: Path, max_position_embeddings: int) -> dict[str, Any]:
    """Return model.json: what the config says, in vLLM's words; the layout of the weights vLLM finds itself."""
    kv = engine.kv_cache
    arguments: dict[str, Any] = {
        "model": MODEL_DIRECTORY,
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_num_seqs": engine.max_batch_size,
        "max_num_batched_tokens": engine.max_num_tokens,
        "max_model_len": engine.max_seq_len or max_position_embeddings,
        "enable_prefix_caching": kv.enable_block_reuse,
        "enable_chunked_prefill": engine.enable_chunked_context,
        # Needed beside REPORT_CUSTOM_METRICS for the engine's metrics (triton-inference-server/server#7583).
        "disable_log_stats": False,
    }
    settings = checkpoint / "hf_quant_config.json"
    if settings.is_file():
        quantization = read_json(settings).get("quantization") or {}
        if quantization.get("quant_algo") is not None:
            arguments["quantization"] = "modelopt"
        if quantization.get("kv_cache_quant_algo") == "FP8":
            arguments["kv_cache_dtype"] = "fp8"
    if kv.size_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv.size_gib * GIB)
    return arguments


def deviations(format_: str, dtype: str, *, kv_cache: str) -> list[str]:
    """Where vLLM computes something else than what `verify` proved of the checkpoint, in words for a user.

    Source: vllm-project/vllm modelopt.py@00155cd (`requantize_with_max_scale`, `input_scale.max()`), and
    compressed_tensors_wNa16.py@02637af (`weight_scale` is a parameter of the model's dtype).
    """
    words = []
    if format_ == "fp8":
        words.append(
            "vLLM fuses q, k and v (gate and up) and rounds their FP8 weights once more, to their largest scale; "
            "fp8_rowwise has a scale per output and is taken as it is."
        )
    if format_ in _ROUNDS_SCALES:
        error = {"bfloat16": "0.4 %", "float16": "0.05 %"}[dtype]
        words.append(
            f"vLLM loads weight scales as {dtype}: a weight can differ by {error} from the checkpoint's, whose scales "
            "are float32."
        )
    if kv_cache == "fp8":
        words.append("the scales of the FP8 KV cache are checked; its effect on text is not.")
    return words

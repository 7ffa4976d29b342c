"""What the CPU engine is told and why: device properties, scheduler settings, deviations from the GPU.

Every choice is a fixed rule over the config and the checkpoint, never a measurement of the build
machine: equal inputs give equal engines, and the machine that serves need not be the one that built.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from pipeline.config.deployment import EngineConfig
from pipeline.config.formats import INTEGER
from pipeline.config.schema import Format, KVCacheFormat
from pipeline.errors import ConfigError

Setting = str | int | bool

# OpenVINO's CPU plugin pages the KV cache in blocks of this many tokens (seen with 2026.4.1).
KV_BLOCK_TOKENS = 32
_F16_BYTES = 2
_U8_SCALE_BYTES = 8
GIB = 1 << 30
# Leaves a property to OpenVINO on the machine that serves.
AUTO = "auto"
# Device properties under which an engine computes what the dequantized model computes in float32 torch.
EXACT_PROPERTIES: dict[str, Setting] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "KV_CACHE_PRECISION": "f32",
}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the choices depend on, from the checkpoint's config.json."""

    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision with its reason, as engine.json lists it."""

    what: str
    value: Setting
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the runtime is told: `plugin_config` goes to the device, `scheduler` to SchedulerConfig."""

    plugin_config: dict[str, Setting]
    scheduler: dict[str, Setting]
    limits: dict[str, int]
    choices: tuple[Choice, ...]

    def choices_as_json(self) -> list[dict[str, Setting]]:
        """Return the choices as engine.json holds them."""
        return [asdict(choice) for choice in self.choices]


def choose(engine: EngineConfig, formats: Collection[Format], kv_cache: KVCacheFormat, model: ModelFacts) -> Plan:
    """Decide how OpenVINO runs an engine whose layers have these formats.

    Raises:
        ConfigError: engine.max_seq_len is beyond what the model was trained for, or the KV cache cannot
            hold one sequence.
    """
    limits = _limits(engine, model)
    device = _device_choices(engine, formats, kv_cache)
    precision = str(next(choice.value for choice in device if choice.what == "KV_CACHE_PRECISION"))
    scheduler = [*_batching_choices(engine, limits["max_seq_len"]), _cache_choice(engine, model, precision, limits)]
    return Plan(
        plugin_config={choice.what: choice.value for choice in device if choice.value != AUTO},
        scheduler={choice.what: choice.value for choice in scheduler},
        limits=limits,
        choices=(*device, *scheduler),
    )


def _limits(engine: EngineConfig, model: ModelFacts) -> dict[str, int]:
    longest = model.max_position_embeddings
    if engine.max_seq_len is not None and engine.max_seq_len > longest:
        raise ConfigError(
            f"engine.max_seq_len: {engine.max_seq_len} is more than the model's {longest} positions "
            "(config.json max_position_embeddings)",
            hint=f"Use {longest} or less.",
        )
    return {
        "max_batch_size": engine.max_batch_size,
        "max_num_tokens": engine.max_num_tokens,
        "max_seq_len": engine.max_seq_len or longest,
        "vocab_size": model.vocab_size,
    }


def _device_choices(engine: EngineConfig, formats: Collection[Format], kv_cache: KVCacheFormat) -> list[Choice]:
    threads = engine.num_threads
    return [
        *_precision_choices(formats, dynamic=engine.dynamic_quantization),
        _kv_choice(kv_cache),
        Choice(
            what="INFERENCE_NUM_THREADS",
            value=AUTO if threads is None else threads,
            why="every core of the machine that serves (engine.num_threads is empty)."
            if threads is None
            else "engine.num_threads.",
        ),
        Choice(
            what="CACHE_DIR",
            value=AUTO,
            why="not set: OpenVINO 2026.4 writes a compiled blob of a paged-attention graph but cannot read it back "
            "(its importer misses k_head_size), so a cache would cost time and disk at every start.",
        ),
    ]


def _precision_choices(formats: Collection[Format], *, dynamic: bool) -> list[Choice]:
    if set(INTEGER).intersection(formats):
        return [
            Choice(
                what="INFERENCE_PRECISION_HINT",
                value="f32",
                why="with integer weights f32 runs on every CPU, decodes as fast as bf16 and keeps the logits closer.",
            ),
            Choice(
                what="DYNAMIC_QUANTIZATION_GROUP_SIZE",
                value=32 if dynamic else 0,
                why="activations are rounded to int8 per 32 inputs while they are multiplied, which is what makes "
                "integer weights fast: a step of 11 sequences (135M model) took 1.8 (int8) to 3 times (int4) less CPU."
                if dynamic
                else "engine.dynamic_quantization is off: activations stay floating point.",
            ),
        ]
    return [
        Choice(
            what="INFERENCE_PRECISION_HINT",
            value=AUTO,
            why="16-bit weights: bf16 where the serving CPU multiplies bf16 in hardware, f32 elsewhere (the plugin's "
            "own rule).",
        )
    ]


def _kv_choice(kv_cache: KVCacheFormat) -> Choice:
    if kv_cache == "int8":
        return Choice(
            what="KV_CACHE_PRECISION", value="u8", why="quantization.kv_cache int8: little more than half the memory."
        )
    return Choice(
        what="KV_CACHE_PRECISION",
        value="f16",
        why="16 bit; f16 keeps more digits than bf16, and keys and values are far from its limit.",
    )


def _batching_choices(engine: EngineConfig, max_seq_len: int) -> list[Choice]:
    chunked = engine.enable_chunked_context
    # Guard: without chunking, a prompt longer than the batch ends the engine loop with an error.
    tokens = engine.max_num_tokens if chunked else max(engine.max_num_tokens, max_seq_len)
    return [
        Choice(what="max_num_seqs", value=engine.max_batch_size, why="engine.max_batch_size."),
        Choice(
            what="max_num_batched_tokens",
            value=tokens,
            why="engine.max_num_tokens."
            if tokens == engine.max_num_tokens
            else "max_seq_len: without chunked context a whole prompt has to fit into one iteration.",
        ),
        Choice(
            what="dynamic_split_fuse",
            value=chunked,
            why="engine.enable_chunked_context: prompts are cut so that running answers keep their pace."
            if chunked
            else "engine.enable_chunked_context is off: prompts and answers take turns.",
        ),
        Choice(
            what="enable_prefix_caching",
            value=engine.kv_cache.enable_block_reuse,
            why="engine.kv_cache.enable_block_reuse.",
        ),
    ]


def _cache_choice(engine: EngineConfig, model: ModelFacts, precision: str, limits: dict[str, int]) -> Choice:
    if engine.kv_cache.size_gib is None:
        return Choice(
            what="cache_size",
            value=0,
            why="engine.kv_cache.size_gib is empty: blocks are allocated as sequences need them.",
        )
    block_bytes = kv_block_bytes(model, precision)
    blocks = int(engine.kv_cache.size_gib * GIB) // block_bytes
    needed = -(-limits["max_seq_len"] // KV_BLOCK_TOKENS)
    if blocks < needed:
        raise ConfigError(
            f"engine.kv_cache.size_gib: {engine.kv_cache.size_gib} GiB holds {blocks * KV_BLOCK_TOKENS} tokens, "
            f"less than one sequence of max_seq_len {limits['max_seq_len']}",
            hint=f"Use at least {needed * block_bytes / GIB:.2f} GiB, or lower engine.max_seq_len.",
        )
    return Choice(
        what="num_kv_blocks",
        value=blocks,
        why=f"engine.kv_cache.size_gib {engine.kv_cache.size_gib} in blocks of {KV_BLOCK_TOKENS} tokens "
        f"({block_bytes} bytes).",
    )


def kv_block_bytes(model: ModelFacts, precision: str) -> int:
    """Bytes of one KV block over all layers.

    f16 holds 2 bytes a number. u8 adds a float32 scale and zero point to each channel of a block's keys
    and to each token of its values (checked against the pipeline's own count for f16 and u8).
    """
    numbers = KV_BLOCK_TOKENS * model.head_dim
    if precision == "u8":
        head_bytes = 2 * numbers + _U8_SCALE_BYTES * (model.head_dim + KV_BLOCK_TOKENS)
    else:
        head_bytes = 2 * _F16_BYTES * numbers
    return model.num_hidden_layers * model.num_key_value_heads * head_bytes


_DEVIATIONS: dict[str, str] = {
    "bf16": "bf16: the same 16-bit weights as on a GPU; a CPU without bf16 hardware computes in float32.",
    "fp16": "fp16: the same 16-bit weights as on a GPU; the CPU computes in bf16 or float32.",
    "fp8_rowwise": "fp8_rowwise: the checkpoint's E4M3 values and scales; activations are not quantized per token: "
    "CPUs have no fp8 product.",
    "fp8": "fp8: the checkpoint's E4M3 values and scales; activations are not quantized, as CPUs have no fp8 product.",
    "int8_sq": "int8_sq: the checkpoint's int8 values and scales, smoothing included; activations are "
    "{them}, and not by the calibrated per-tensor scale of a GPU.",
    "int8_wo": "int8_wo: the checkpoint's int8 values and scales; activations are {them}, where a GPU keeps "
    "them at 16 bit.",
    "int4_wo": "int4_wo: the checkpoint's int4 values and scales in groups; activations are {them}, where a "
    "GPU keeps them at 16 bit and trtllm-build takes one scale per output.",
    "int4_awq": "int4_awq: the checkpoint's int4 values and scales, pre-quant scales included; activations "
    "are {them}, where a GPU keeps them at 16 bit.",
}
_ROUNDED = "rounded to int8 at run time per token and 32 inputs"
_EXACT = "not quantized (engine.dynamic_quantization is off)"


def deviations(formats: Collection[Format], kv_cache: KVCacheFormat = "auto", *, dynamic: bool = True) -> list[str]:
    """Say in words where the CPU computes otherwise than TensorRT-LLM does on a GPU.

    Args:
        formats: of the checkpoint's layers.
        kv_cache: KV cache format that the config asked for.
        dynamic: engine.dynamic_quantization.

    Raises:
        ConfigError: the openvino target does not execute one of the formats.
    """
    for form in formats:
        if form not in _DEVIATIONS:
            raise ConfigError(
                f"quantization.format: the openvino target does not execute '{form}'",
                hint=f"Use one of {', '.join(sorted(_DEVIATIONS))}, or a GPU target.",
            )
    told = [_DEVIATIONS[form].format(them=_ROUNDED if dynamic else _EXACT) for form in formats]
    if kv_cache == "fp8":
        told.append("kv_cache fp8: the CPU plugin has no fp8 KV cache; keys and values stay 16 bit.")
    if kv_cache == "int8":
        told.append("kv_cache int8: scales are computed at run time per token or channel, not calibrated per tensor.")
    return told

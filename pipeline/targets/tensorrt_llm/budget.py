"""Memory of one GPU of a TensorRT-LLM deployment: weights, activations, overhead, and what is left for KV.

Everything is counted for the fullest pipeline rank, from the shapes of the model; what cannot be counted
is an estimate whose source budget.toml names. With those constants the closed form is within 2.5 % of
measured KV capacities on H100 (tests/unit/test_trtllm_budget.py). Not counted: draft models, Medusa and
Eagle heads, encoders, biases, other processes on the GPU, and workspace that trtllm-build itself needs.
Context parallelism is taken to save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.config.formats import formats_of
from pipeline.config.legality import gpus
from pipeline.config.schema import BuildConfig
from pipeline.targets.tensorrt_llm.budget_constants import constants
from pipeline.targets.tensorrt_llm.weights import ELEMENT_BYTES, Model, kv_heads, weight_bytes

GIB: Final = 2**30
_KV_BYTES: Final = {"auto": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of the budget: `what` takes `n_bytes` on the fullest GPU; `how` says where it comes from."""

    what: str
    n_bytes: int
    how: str


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one GPU holds.

    Attributes:
        gpu: the config's word.
        memory_gb: marketed memory of the variant that is judged: the smallest that is enough, else the largest.
        capacity: bytes that a process can allocate on it.
        ranks: GPUs of one instance.
        rows: what is taken before the KV cache, in bytes.
        kv_fraction: share of the free memory that goes to the KV pool.
        kv_pool: bytes of the KV pool, 0 without a KV cache.
        kv_bytes_per_token: keys and values of one token on this GPU.
        max_seq_len: longest sequence, draft tokens included.
        tokens_per_sequence: KV tokens that one longest sequence holds, over all beams, in whole blocks.
        tokens: KV tokens in the pool, in whole blocks.
    """

    gpu: str
    memory_gb: int | None
    capacity: int
    ranks: int
    rows: tuple[Row, ...]
    kv_fraction: float
    kv_pool: int
    kv_bytes_per_token: int
    max_seq_len: int
    tokens_per_sequence: int
    tokens: int

    @property
    def used(self) -> int:
        """Bytes taken before the KV cache."""
        return sum(row.n_bytes for row in self.rows)

    @property
    def free(self) -> int:
        """Bytes left for KV blocks and spare; negative when the model itself does not fit."""
        return self.capacity - self.used

    @property
    def sequences(self) -> int:
        """Sequences of max_seq_len tokens that fit at once."""
        return self.tokens // self.tokens_per_sequence if self.tokens_per_sequence else 0

    @property
    def fits(self) -> bool:
        """Whether the model fits and at least one longest sequence can run to its end."""
        return self.free > 0 and (self.tokens_per_sequence == 0 or self.sequences > 0)

    def table(self) -> tuple[Row, ...]:
        """All figures for printing: what is taken, the KV pool, and what is left over."""
        spare = self.free - self.kv_pool
        pool = Row(
            what="KV cache pool",
            n_bytes=self.kv_pool,
            how=f"at most {self.kv_fraction:g} of what is free; {self.tokens} tokens of {self.kv_bytes_per_token} "
            f"bytes, {self.sequences} sequences of {self.max_seq_len} tokens",
        )
        card = f"{self.gpu} of {self.memory_gb} GB" if self.memory_gb else f"this {self.gpu}"
        left = Row(what="spare", n_bytes=spare, how=f"{card}: {self.capacity / GIB:.1f} GiB can be allocated")
        return (*self.rows, pool, left)

    def document(self) -> dict[str, object]:
        """The budget as JSON values; bytes and tokens are integers."""
        return {
            "gpu": self.gpu,
            "memory_gb": self.memory_gb,
            "capacity_bytes": self.capacity,
            "ranks": self.ranks,
            "fits": self.fits,
            "rows": [{"what": row.what, "bytes": row.n_bytes, "how": row.how} for row in self.rows],
            "used_bytes": self.used,
            "free_bytes": self.free,
            "kv_fraction": self.kv_fraction,
            "kv_pool_bytes": self.kv_pool,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_tokens": self.tokens,
            "max_seq_len": self.max_seq_len,
            "sequences_at_max_seq_len": self.sequences,
        }


def usable_bytes(gpu: str, memory_gb: int) -> int:
    """Bytes that a process can allocate on a GPU sold with `memory_gb` GB."""
    return int(memory_gb * GIB * float(constants().usable[gpus()[gpu].architecture]))


def budget(config: BuildConfig, model: Model, *, memory_bytes: int | None = None) -> Budget:
    """Count the memory of the fullest GPU.

    Args:
        config: a config of a GPU target, with `engine.gpu`.
        model: shapes of the source.
        memory_bytes: memory of the GPU at hand; None judges the variants sold under the config's GPU name.

    Raises:
        ValueError: the config names no GPU.
    """
    name = config.engine.gpu
    if name is None:
        raise ValueError("a memory budget needs engine.gpu")
    if memory_bytes is not None:
        return _filled(config, model, name, None, memory_bytes)
    variants = [_filled(config, model, name, size, usable_bytes(name, size)) for size in sorted(gpus()[name].memory_gb)]
    return next((found for found in variants if found.fits), variants[-1])


def max_seq_len(config: BuildConfig, model: Model) -> int:
    """Longest sequence of the engine: the build adds the draft tokens (tensorrt_llm/builder.py@008b2b8)."""
    return (config.engine.max_seq_len or model.max_position_embeddings) + config.engine.build.max_draft_len


def max_num_tokens(config: BuildConfig, model: Model) -> int:
    """Tokens per iteration after what the build changes (tensorrt_llm/_common.py, check_max_num_tokens)."""
    engine = config.engine
    most = engine.max_batch_size * max_seq_len(config, model)
    if engine.build.remove_input_padding == "disable":
        return most
    tokens = max(min(engine.max_num_tokens, most), engine.kv_cache.tokens_per_block)
    if engine.build.max_draft_len:
        tokens = max(tokens, engine.max_batch_size * (engine.build.max_draft_len + 1))
    return tokens


def kv_bytes_per_token(config: BuildConfig, model: Model) -> int:
    """Keys and values of one token on one GPU: 2 x layers x KV heads x head size x bytes per element.

    Heads are copied when there are fewer than GPUs, so a rank never has less than one.
    """
    if config.engine.kv_cache.type == "disabled":
        return 0
    layers = -(-model.num_hidden_layers // config.engine.pipeline_parallel_size)
    heads = kv_heads(config, model)
    return 2 * layers * heads * model.head_dim * _KV_BYTES[config.quantization.kv_cache]


def _filled(config: BuildConfig, model: Model, gpu: str, memory_gb: int | None, capacity: int) -> Budget:
    """Fill one GPU: what is fixed first, then the KV pool from what is free."""
    rows = tuple(row for row in _rows(config, model) if row.n_bytes)
    free = max(0, capacity - sum(row.n_bytes for row in rows))
    if _serves_adapters(config):
        share = config.serving.tensorrt_llm.lora_cache_gpu_memory_fraction
        share = constants().fraction.lora_cache if share is None else share
        rows = (*rows, Row(what="LoRA cache", n_bytes=int(free * share), how=f"{share:g} of what is free"))
        free -= int(free * share)
    engine, per_token = config.engine, kv_bytes_per_token(config, model)
    fraction = _kv_fraction(config)
    block = engine.kv_cache.tokens_per_block
    pool = min([int(free * fraction), *_caps(config, per_token)]) if per_token else 0
    length = max_seq_len(config, model)
    windows = config.serving.tensorrt_llm.max_attention_window_size
    kept = min(length, max(int(size) for size in windows.split(","))) if windows else length
    blocks = pool // (per_token * block) if per_token else 0
    return Budget(
        gpu=gpu,
        memory_gb=memory_gb,
        capacity=capacity,
        ranks=engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.context_parallel_size,
        rows=rows,
        kv_fraction=fraction,
        kv_pool=pool,
        kv_bytes_per_token=per_token,
        max_seq_len=length,
        tokens_per_sequence=-(-kept // block) * block * engine.max_beam_width if per_token else 0,
        tokens=blocks * block,
    )


def _rows(config: BuildConfig, model: Model) -> list[Row]:
    engine, build = config.engine, config.engine.build
    tensor, tokens = engine.tensor_parallel_size, max_num_tokens(config, model)
    kept = config.serving.tensorrt_llm.gpu_weights_percent
    kept = kept if kept is not None and build.weight_streaming else 1.0
    experts = any(".experts." in name for name in model.linears)
    factor = _at(constants().activation.experts if experts else constants().activation.dense, tensor)
    talking = max(tensor, min(2, engine.pipeline_parallel_size))
    buffers, runtime = constants().communication.bytes, constants().runtime.bytes
    gathered = build.gather_context_logits or build.gather_all_token_logits
    return [
        Row(
            what="weights",
            n_bytes=int(weight_bytes(config, model) * kept),
            how=f"{' and '.join(formats_of(config.quantization))} with scales, 16-bit tables; fullest of "
            f"{engine.pipeline_parallel_size} pipeline ranks, 1/{tensor} of each layer"
            + (f"; {kept:.0%} on the GPU" if kept < 1 else ""),
        ),
        Row(
            what="activations",
            n_bytes=int(2 * tokens * model.hidden_size * factor),
            how=f"estimate: 2 bytes x {tokens} tokens x hidden {model.hidden_size} x {factor:g}",
        ),
        Row(
            what="context logits",
            n_bytes=tokens * model.vocab_size * 4 if gathered else 0,
            how=f"{tokens} tokens x vocabulary {model.vocab_size} x 4 bytes",
        ),
        Row(
            what="prompt table",
            n_bytes=build.max_prompt_embedding_table_size * model.hidden_size * ELEMENT_BYTES,
            how="max_prompt_embedding_table_size rows of 16 bit",
        ),
        Row(
            what="communication buffers",
            n_bytes=int(_at(buffers, talking)) if isinstance(buffers, Mapping) else buffers,
            how=f"estimate: NCCL with {tensor * engine.pipeline_parallel_size} GPUs",
        ),
        Row(
            what="CUDA context and libraries",
            n_bytes=runtime if isinstance(runtime, int) else 0,
            how="estimate with a margin",
        ),
    ]


def _at(values: Mapping[int, float], tensor: int) -> float:
    """The value of the largest listed number of GPUs that is not above `tensor`."""
    return values[max(number for number in values if number <= tensor)]


def _kv_fraction(config: BuildConfig) -> float:
    """The share that the running server will use: the backend's parameter, the engine's key, upstream's default."""
    chosen = config.serving.tensorrt_llm.kv_cache_free_gpu_mem_fraction
    chosen = config.engine.kv_cache.free_gpu_memory_fraction if chosen is None else chosen
    return constants().fraction.kv_cache if chosen is None else chosen


def _caps(config: BuildConfig, per_token: int) -> list[int]:
    """Limits of the pool in bytes that the config names; the smallest one rules."""
    caps = []
    if config.engine.kv_cache.size_gib is not None:
        caps.append(int(config.engine.kv_cache.size_gib * GIB))
    if config.serving.tensorrt_llm.max_tokens_in_paged_kv_cache is not None:
        caps.append(config.serving.tensorrt_llm.max_tokens_in_paged_kv_cache * per_token)
    return caps


def _serves_adapters(config: BuildConfig) -> bool:
    build = config.engine.build
    return bool(build.lora_dir or build.lora_target_modules or build.lora_plugin not in (None, "disable"))

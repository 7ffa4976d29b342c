"""Every flag of trtllm-build with its value and the reason: `choose` is a pure function of the config.

What the config names is taken as it is; what it leaves empty is decided here by format, GPU and preset.
Flags whose upstream default moved between releases (block size, paged and FP8 prompt attention) are
always written. Rules: NVIDIA/TensorRT-LLM tensorrt_llm/builder.py@008b2b8 (what the build switches off),
docs/source/legacy/performance/performance-tuning-guide/useful-build-time-flags.md@2a9abd9 (what pays).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pipeline.config.deployment import EngineConfig
from pipeline.config.legality import gpus
from pipeline.errors import ConfigError
from pipeline.targets.tensorrt_llm.facts import ModelFacts, QuantFacts

ON: Final = "enable"
OFF: Final = "disable"
# Formats with FP8 activations, whose attention can run in FP8 (builder.py@008b2b8; NVFP4 is Blackwell's).
FP8_ATTENTION: Final = ("FP8", "W4A8_AWQ", "NVFP4")
# The build resets reduce_fusion for every other architecture.
REDUCE_FUSION: Final = ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")
# use_fused_mlp is forced off for every other quant_algo.
FUSED_MLP: Final = (None, "FP8", "MIXED_PRECISION")
SM_ADA: Final = 89
SM_HOPPER: Final = 90
# Options without an opinion of ours: written when the config names them.
RARE: Final = (
    "bert_attention_plugin",
    "fp8_rowwise_gemm_plugin",
    "lora_plugin",
    "dora_plugin",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "nccl_plugin",
    "gemm_allreduce_plugin",
    "bert_context_fmha_fp32_acc",
    "fuse_fp4_quant",
    "paged_state",
    "streamingllm",
    "norm_quant_fusion",
    "pp_reduce_scatter",
    "max_encoder_input_len",
    "speculative_decoding_mode",
)
SWITCHES: Final = (
    "strip_plan",
    "weight_sparsity",
    "weight_streaming",
    "fast_build",
    "enable_debug_output",
    "dry_run",
    "monitor_memory",
    "gather_context_logits",
    "gather_generation_logits",
    "gather_all_token_logits",
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One flag of trtllm-build without its dashes; a value of None is a switch that stands alone."""

    what: str
    value: str | int | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything a decision may look at."""

    engine: EngineConfig
    quant: QuantFacts
    model: ModelFacts

    @property
    def sm(self) -> int:
        """Compute capability of the GPU, 90 for Hopper."""
        if self.engine.gpu is None:
            raise ConfigError("a TensorRT-LLM engine runs on one GPU model only, and none is named", hint="Set gpu.")
        return gpus()[self.engine.gpu].sm

    @property
    def max_seq_len(self) -> int:
        """Prompt plus output tokens."""
        return self.engine.max_seq_len or self.model.max_position_embeddings


def choose(engine: EngineConfig, quant: QuantFacts, model: ModelFacts) -> tuple[Choice, ...]:
    """Decide every flag.

    Returns:
        The flags in the order in which they are written.
    """
    case = Case(engine=engine, quant=quant, model=model)
    return (*_shapes(case), *_attention(case), *_products(case), *_scheduling(case), *_as_written(case), *_run(case))


def context_attention(case: Case) -> tuple[tuple[bool, str], tuple[bool, str]]:
    """Return whether paged and FP8 prompt attention survive the build, each with the rule.

    The order is the build's (builder.py@008b2b8): a switch that a later rule turns off is never asked for.
    """
    algo, kv, paged_kv = case.quant.quant_algo, case.quant.kv_cache_quant_algo, case.engine.kv_cache.type == "paged"
    if case.engine.build.context_fmha == OFF:
        off = (False, "context_fmha is off, and with it every other prompt attention.")
        return off, off
    fp8_capable = algo in FP8_ATTENTION and case.sm >= SM_ADA
    if not paged_kv:
        paged = (False, f"the KV cache is {case.engine.kv_cache.type}, not paged.")
    elif kv == "INT8":
        paged = (False, "an INT8 KV cache turns it off, so there is no block reuse and no chunked context.")
    elif kv == "FP8" and algo not in FP8_ATTENTION:
        paged = (False, f"an FP8 KV cache with {algo or '16-bit'} weights turns it off.")
    elif kv == "FP8" and case.sm < SM_ADA:
        paged = (False, f"an FP8 KV cache turns it off below SM 89 (this is SM {case.sm}).")
    else:
        paged = (True, "block reuse and chunked context need it; it costs less than 2 %.")
    if fp8_capable and kv == "FP8":
        return paged, (True, "weights and KV cache are FP8, so prompt attention runs in FP8.")
    if algo not in FP8_ATTENTION:
        return paged, (False, f"{algo or '16-bit'} weights have no FP8 attention.")
    if case.sm < SM_ADA:
        return paged, (False, f"FP8 attention needs SM 89 or newer (this is SM {case.sm}).")
    return paged, (False, "the KV cache is not FP8; with paged blocks FP8 attention needs an FP8 KV cache.")


def _shapes(case: Case) -> Iterator[Choice]:
    engine = case.engine
    yield Choice(what="max_batch_size", value=engine.max_batch_size, why="engine.max_batch_size.")
    yield Choice(
        what="max_input_len",
        value=min(engine.max_input_len or case.max_seq_len, case.max_seq_len),
        why="engine.max_input_len." if engine.max_input_len else "empty: as long as max_seq_len.",
    )
    yield Choice(
        what="max_seq_len",
        value=case.max_seq_len,
        why="engine.max_seq_len." if engine.max_seq_len else "empty: the model's max_position_embeddings.",
    )
    yield Choice(what="max_beam_width", value=engine.max_beam_width, why="engine.max_beam_width.")
    yield Choice(what="max_num_tokens", value=engine.max_num_tokens, why="engine.max_num_tokens.")
    if engine.opt_num_tokens is not None:
        yield Choice(what="opt_num_tokens", value=engine.opt_num_tokens, why="engine.opt_num_tokens.")
    yield Choice(what="kv_cache_type", value=engine.kv_cache.type, why="engine.kv_cache.type.")
    yield Choice(
        what="tokens_per_block",
        value=engine.kv_cache.tokens_per_block,
        why="engine.kv_cache.tokens_per_block; written because upstream's default moved from 64 to 32.",
    )


def _attention(case: Case) -> Iterator[Choice]:
    (paged, paged_why), (fp8, fp8_why) = context_attention(case)
    moved = " Written because upstream's default moved from disable to enable."
    yield _decided(case, "gpt_attention_plugin", "auto", "in-flight batching and a paged KV cache need it.")
    yield _decided(case, "context_fmha", ON, "fused prompt attention; without it FP8 and paged attention are off too.")
    yield _decided(case, "remove_input_padding", ON, "in-flight batching needs packed input.")
    yield _decided(case, "use_paged_context_fmha", ON if paged else OFF, paged_why + moved)
    yield _decided(case, "use_fp8_context_fmha", ON if fp8 else OFF, fp8_why + moved)


def _products(case: Case) -> Iterator[Choice]:
    algo, preset = case.quant.quant_algo, case.engine.preset
    if algo == "FP8" and preset == "latency":
        gemm, why = "fp8", "preset latency: cuBLASLt's FP8 products pay in small batches."
    elif algo == "FP8":
        gemm, why = OFF, "upstream recommends it off for FP8: TensorRT's own kernels are faster in large batches."
    elif algo is None and case.engine.build.weight_sparsity:
        gemm, why = OFF, "the plugin's products are dense (NVIDIA/TensorRT-LLM#1559, NVIDIA/Model-Optimizer#603)."
    elif algo is None:
        gemm, why = "auto", "upstream recommends it on at 16 bit: faster, and less memory."
    else:
        gemm, why = (
            "auto",
            f"what {algo} leaves at 16 bit, such as lm_head; quantized layers have kernels of their own.",
        )
    yield _decided(case, "gemm_plugin", gemm, why)
    unproven = "off: it changes the rounding that verify proved, and no published number asks for it."
    yield _decided(case, "gemm_swiglu_plugin", OFF, unproven)
    yield _decided(case, "low_latency_gemm_plugin", OFF, unproven)
    yield _decided(case, "low_latency_gemm_swiglu_plugin", OFF, unproven)
    fused = algo in FUSED_MLP
    why = "gate and up projection in one product." if fused else f"the build forces it off for {algo}."
    yield _decided(case, "use_fused_mlp", ON if fused else OFF, why)


def _scheduling(case: Case) -> Iterator[Choice]:
    preset = case.engine.preset
    if case.engine.opt_num_tokens is not None:
        profiles, why = OFF, "engine.opt_num_tokens tunes for one shape, and the build refuses both together."
    elif preset == "none":
        profiles, why = OFF, "preset none: upstream's default."
    else:
        profiles = ON
        why = (
            f"preset {preset}: kernels for several loads (published: +19 % tokens/s, -37 % time between tokens); the "
            "build takes longer, and the load can change an answer's rounding."
        )
    yield _decided(case, "multiple_profiles", profiles, why)
    fusion, why = _reduce_fusion(case)
    yield _decided(case, "reduce_fusion", fusion, why)
    yield _decided(case, "user_buffer", OFF, "needs reduce_fusion and FP8 Llama on SM 90; ask for it and measure.")


def _reduce_fusion(case: Case) -> tuple[str, str]:
    engine = case.engine
    if engine.tensor_parallel_size == 1:
        return OFF, "one GPU per layer: there is no all-reduce."
    if case.model.architecture not in REDUCE_FUSION:
        return OFF, f"the build resets it for {case.model.architecture}."
    if case.sm != SM_HOPPER:
        return OFF, "only tried on SM 90; wrong output under load was reported elsewhere (NVIDIA/TensorRT-LLM#2817)."
    if engine.preset in ("throughput", "latency"):
        return ON, f"preset {engine.preset}: all-reduce and norm in one kernel (published: -6 % time between tokens)."
    return OFF, f"preset {engine.preset}: it depends on the load; throughput and latency turn it on."


def _as_written(case: Case) -> Iterator[Choice]:
    """Flags that are written only when the config names them; they are off or harmless by default."""
    build = case.engine.build
    values: dict[str, str | int | None] = {name: getattr(build, name) for name in RARE}
    if build.lora_dir and build.lora_plugin is None:
        yield Choice(what="lora_plugin", value="auto", why="engine.build.lora_dir names adapters.")
    if build.lora_dir or build.lora_target_modules or build.lora_plugin not in (None, OFF):
        values |= {"lora_ckpt_source": build.lora_ckpt_source, "max_lora_rank": build.max_lora_rank}
    values["max_draft_len"] = build.max_draft_len or None
    values["max_prompt_embedding_table_size"] = build.max_prompt_embedding_table_size or None
    for name, value in values.items():
        if value is not None:
            yield Choice(what=name, value=value, why=f"engine.build.{name}.")
    for name in SWITCHES:
        if getattr(build, name):
            yield Choice(what=name, value=None, why=f"engine.build.{name}.")
    why = "written because checkpoints of ModelOpt say float16 and the repository has to name the same type."
    yield Choice(
        what="logits_dtype",
        value=build.logits_dtype or "float32",
        why="engine.build.logits_dtype." if build.logits_dtype else why,
    )


def _run(case: Case) -> Iterator[Choice]:
    build = case.engine.build
    yield Choice(what="profiling_verbosity", value=build.profiling_verbosity, why="engine.build.profiling_verbosity.")
    yield Choice(what="workers", value=build.workers, why="engine.build.workers.")
    yield Choice(what="log_level", value=build.log_level, why="engine.build.log_level.")


def _decided(case: Case, name: str, value: str, why: str) -> Choice:
    written = getattr(case.engine.build, name)
    if written is not None:
        return Choice(what=name, value=written, why=f"engine.build.{name} says so.")
    return Choice(what=name, value=value, why=why)

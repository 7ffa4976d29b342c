"""The sections `engine` and `serving`: what is compiled for which machine, and how Triton serves it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section
from pipeline.config.trtllm_options import BackendParameters, BuildOptions

TargetName = Literal["openvino", "tensorrt_llm", "tensorrt_llm_llmapi", "vllm"]
ToolchainVersion = Literal["1.2.1", "1.0.0"]
Preset = Literal["none", "throughput", "latency", "balanced"]
Gpu = Literal["H100", "H200", "A100", "L40S", "L4"]


class KVCacheConfig(Section):
    """The paged KV cache of the running engine."""

    size_gib: float | None = Field(
        default=None, gt=0, description="Memory for KV blocks in GiB; empty grows as needed."
    )
    enable_block_reuse: bool = Field(default=True, description="Reuse blocks of equal prefixes (prefix caching).")
    type: Literal["paged", "continuous", "disabled"] = Field(
        default="paged",
        title="KV cache type",
        description="paged is what in-flight batching needs; disabled builds an engine for prompts only.",
    )
    tokens_per_block: int = Field(default=32, ge=1, description="Tokens of a KV block.")
    free_gpu_memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="Share of what is free after the weights; empty is upstream's 0.9."
    )
    host_memory_bytes: int | None = Field(
        default=None, ge=0, description="Host memory for KV blocks that were pushed out of the GPU; empty is none."
    )


class EngineConfig(Section):
    """What is compiled, for which machine, within which limits."""

    target: TargetName = Field(
        default="openvino",
        title="target",
        description="openvino (CPU), tensorrt_llm (GPU, compiled engines), tensorrt_llm_llmapi (GPU, LLM API) or vllm "
        "(GPU, Triton's vLLM backend).",
    )
    gpu: Gpu | None = Field(
        default=None, title="known GPU", description="GPU the engine is for; required by the GPU targets."
    )
    toolchain: ToolchainVersion = Field(
        default="1.2.1",
        title="TensorRT-LLM version that is supported",
        description="TensorRT-LLM version: 1.2.1 (driver R590), or 1.0.0 for older drivers (R575).",
    )
    preset: Preset = Field(
        default="none",
        title="preset",
        description="Starting point of options that are left empty: throughput, latency or balanced; what it decided "
        "is shown with the reason.",
    )
    dtype: Literal["bfloat16", "float16"] = Field(
        default="bfloat16", title="16-bit type", description="16-bit type of everything that is not quantized."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share each layer.")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="Groups of consecutive layers, one per GPU.")
    context_parallel_size: int = Field(default=1, ge=1, description="GPUs that share one long sequence.")
    max_batch_size: int = Field(default=64, ge=1, description="Sequences in flight.")
    max_num_tokens: int = Field(default=2048, ge=1, description="Tokens per iteration over all sequences.")
    max_seq_len: int | None = Field(
        default=None, ge=2, description="Prompt plus output tokens; empty takes the model's."
    )
    max_input_len: int | None = Field(
        default=None, ge=1, description="Prompt tokens; empty is max_seq_len. Only engines with padding heed it."
    )
    max_beam_width: int = Field(default=1, ge=1, description="Beams of beam search; 1 is none.")
    opt_num_tokens: int | None = Field(
        default=None, ge=1, description="Tokens per iteration that kernels are tuned for; empty is upstream's choice."
    )
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig)
    enable_chunked_context: bool = Field(
        default=True, description="Split long prompts over iterations (chunked prefill)."
    )
    num_threads: int | None = Field(
        default=None,
        ge=2,
        description="CPU threads of the openvino target; empty is all cores. (1 makes OpenVINO 2026.4 divide by zero.)",
    )
    dynamic_quantization: bool = Field(
        default=True,
        description="openvino: round activations to int8 while they meet integer weights, for 2 to 3 times the speed; "
        "off computes exactly what verify proved.",
    )
    build: BuildOptions = Field(default_factory=BuildOptions)


class QueuePolicy(Section):
    """How requests wait in Triton (ModelQueuePolicy of the model configuration)."""

    default_timeout_microseconds: int = Field(default=0, ge=0, description="Longest wait; 0 is for ever.")
    timeout_action: Literal["REJECT", "DELAY"] = Field(
        default="REJECT", title="time-out action", description="What happens to a request that waited too long."
    )
    allow_timeout_override: bool = Field(default=False, description="A request may name a shorter time-out.")
    priority_levels: int = Field(default=0, ge=0, description="Levels of priority; 0 is none.")
    default_priority_level: int = Field(default=0, ge=0, description="Level of requests that name none.")


class BlsParameters(Section):
    """Parameters of the scripted endpoint tensorrt_llm_bls of the TensorRT-LLM repository."""

    tensorrt_llm_model_name: str = Field(default="tensorrt_llm", description="Model that generates.")
    tensorrt_llm_draft_model_name: str | None = Field(
        default=None, description="Model that drafts (speculative decoding with an external draft)."
    )
    multimodal_encoders_name: str | None = Field(default=None, description="Model that encodes images.")


class ServingConfig(Section):
    """How Triton serves the repository."""

    max_queue_size: int = Field(default=0, ge=0, description="Requests that may wait; 0 is no limit.")
    preprocessing_instance_count: int = Field(default=1, ge=1, description="Tokenizer processes before the engine.")
    postprocessing_instance_count: int = Field(default=1, ge=1, description="Detokenizer processes behind the engine.")
    bls_instance_count: int = Field(default=1, ge=1, description="Processes of the scripted (BLS) endpoint.")
    default_max_tokens: int = Field(default=256, ge=1, description="Output length when a request names none.")
    exclude_input_in_output: bool = Field(
        default=True, description="Answer without the prompt unless a request asks for it."
    )
    add_special_tokens: bool = Field(default=True, description="The tokenizer adds its own first tokens.")
    skip_special_tokens: bool = Field(default=True, description="Special tokens are left out of the answer.")
    warmup: bool = Field(default=False, description="Triton sends a request to the engine before it is ready.")
    launch_mode: Literal["leader", "orchestrator", "orchestrator_no_spawn"] = Field(
        default="leader",
        title="launch mode",
        description="leader: one MPI process per rank, one engine per server; orchestrator: several engines.",
    )
    queue_policy: QueuePolicy = Field(default_factory=QueuePolicy)
    bls: BlsParameters = Field(default_factory=BlsParameters)
    tensorrt_llm: BackendParameters = Field(default_factory=BackendParameters)

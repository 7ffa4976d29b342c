"""Options of the TensorRT-LLM targets, under the names and with the values that upstream gives them.

`BuildOptions` are flags of `trtllm-build` 1.2.1, `BackendParameters` the parameters of the Triton
backend `tensorrtllm`. An empty option of the build is decided by the target, written on the command
line and recorded with its reason; an empty parameter of the backend is left to the backend.

Flags, kinds and defaults: NVIDIA/TensorRT-LLM tensorrt_llm/commands/build.py@65f1d15,
tensorrt_llm/plugin/plugin.py@c20322f; parameters: triton_backend/all_models/inflight_batcher_llm
@2a9abd9 and inflight_batcher_llm/src/model_instance_state.cc of tensorrtllm_backend v0.19.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.section import Section

Switch = Literal["enable", "disable"]
PluginType = Literal["auto", "float16", "float32", "bfloat16", "int32", "disable"]
GemmPluginType = Literal["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"]
Fp8Plugin = Literal["fp8", "disable"]
SpeculativeMode = Literal["draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"]
DataType = Literal["TYPE_FP16", "TYPE_BF16", "TYPE_FP32"]

_SWITCH = "switch value (enable or disable)"
_PLUGIN = "plugin type"


class BuildOptions(Section):
    """Flags of trtllm-build; an empty one is decided here and written out."""

    where: Literal["auto", "host", "container", "deferred"] = Field(
        default="auto",
        title="place to build",
        description="Where trtllm-build runs: on this host, in the pinned container, or later on the GPU node "
        "(deferred); auto takes the first that this machine can do.",
    )
    image_tag: str | None = Field(
        default=None,
        description="Tag of the container, for example '26.05'; empty takes the default of engine.toolchain.",
    )
    image: str | None = Field(
        default=None, description="Full image reference (a mirror or a digest) in place of the one of the toolchain."
    )
    workers: int = Field(default=1, ge=1, description="Ranks built at once, one GPU each; capped at the visible GPUs.")
    input_timing_cache: Path | None = Field(
        default=None, description="Timing cache to start from; empty takes the one kept for this image and GPU."
    )
    output_timing_cache: Path | None = Field(
        default=None, description="Timing cache to write; empty keeps one for this image and GPU."
    )
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = Field(
        default="layer_names_only", title="verbosity", description="Layer details kept in the engine for profilers."
    )
    log_level: Literal["internal_error", "error", "warning", "info", "verbose", "debug", "trace"] = Field(
        default="info", title="log level", description="Log level of trtllm-build; below info there is no progress."
    )
    strip_plan: bool = Field(
        default=False, description="Engine without weights; trtllm-refit puts them in before serving."
    )
    weight_sparsity: bool = Field(default=False, description="2:4 sparse kernels; the weights must be 2:4 sparse.")
    weight_streaming: bool = Field(
        default=False, description="Weights may stay in host memory (gpu_weights_percent below 1)."
    )
    fast_build: bool = Field(
        default=False, description="Shorter build; weights become rank<r>_managed_weights.safetensors."
    )
    enable_debug_output: bool = Field(default=False, description="Debug outputs of the network.")
    visualize_network: Path | None = Field(default=None, description="Directory for an ONNX dump of the network.")
    dry_run: bool = Field(default=False, description="Everything but TensorRT's build: no engine comes out.")
    monitor_memory: bool = Field(default=False, description="Log memory during the build.")
    logits_dtype: Literal["float16", "float32"] | None = Field(
        default=None, title="logits type", description="Type of the logits; empty is float32."
    )
    gather_context_logits: bool = Field(default=False, description="Logits of every prompt token can be returned.")
    gather_generation_logits: bool = Field(
        default=False, description="Logits of every output token can be returned (needs nothing at build since 1.0)."
    )
    gather_all_token_logits: bool = Field(default=False, description="Both of the above.")
    max_prompt_embedding_table_size: int = Field(
        default=0, ge=0, description="Rows of a prompt table; above 0 turns prompt tuning on."
    )
    max_encoder_input_len: int | None = Field(
        default=None, ge=1, description="Encoder tokens (encoder-decoder models); empty is upstream's 1024."
    )
    speculative_decoding_mode: SpeculativeMode | None = Field(
        default=None, title="speculative decoding mode", description="Way of speculative decoding; empty is none."
    )
    max_draft_len: int = Field(default=0, ge=0, description="Draft tokens per step.")
    lora_dir: tuple[str, ...] = Field(
        default=(), description="Adapters copied into the engine; the first one gives the configuration."
    )
    lora_ckpt_source: Literal["hf", "nemo"] = Field(
        default="hf", title="adapter format", description="Format of the adapters."
    )
    lora_target_modules: tuple[str, ...] = Field(
        default=(), description="Modules that adapters may change, for example attn_qkv; empty takes the adapter's."
    )
    max_lora_rank: int = Field(default=64, ge=1, description="Highest rank of an adapter.")
    model_cls_file: Path | None = Field(default=None, description="Python file of a custom model class.")
    model_cls_name: str | None = Field(default=None, description="Class in model_cls_file.")

    bert_attention_plugin: PluginType | None = Field(
        default=None, title=_PLUGIN, description="Attention of encoders; empty is auto."
    )
    gpt_attention_plugin: PluginType | None = Field(
        default=None, title=_PLUGIN, description="Attention of decoders; in-flight batching needs it. Empty is auto."
    )
    gemm_plugin: GemmPluginType | None = Field(
        default=None, title=_PLUGIN, description="cuBLASLt matrix products; empty goes by format and preset."
    )
    gemm_swiglu_plugin: Fp8Plugin | None = Field(
        default=None, title="choice", description="Gated MLP in one kernel (FP8 on SM 90); empty is disable."
    )
    fp8_rowwise_gemm_plugin: PluginType | None = Field(
        default=None, title=_PLUGIN, description="Matrix products of row-wise FP8; empty is disable."
    )
    lora_plugin: PluginType | None = Field(
        default=None, title=_PLUGIN, description="LoRA adapters; empty is auto when adapters are named."
    )
    dora_plugin: Switch | None = Field(default=None, title=_SWITCH, description="DoRA adapters; empty is disable.")
    moe_plugin: PluginType | None = Field(default=None, title=_PLUGIN, description="Experts; empty is auto.")
    mamba_conv1d_plugin: PluginType | None = Field(
        default=None, title=_PLUGIN, description="Convolution of Mamba models; empty is auto."
    )
    nccl_plugin: PluginType | None = Field(
        default=None, title=_PLUGIN, description="Communication; the build overrides it by the number of ranks."
    )
    low_latency_gemm_plugin: Fp8Plugin | None = Field(
        default=None, title="choice", description="FP8 matrix products for small batches; empty goes by preset."
    )
    low_latency_gemm_swiglu_plugin: Fp8Plugin | None = Field(
        default=None, title="choice", description="Gated MLP for small FP8 batches; empty is disable."
    )
    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] | None = Field(
        default=None, title=_PLUGIN, description="Matrix product and all-reduce in one kernel; empty is disable."
    )
    context_fmha: Switch | None = Field(
        default=None, title=_SWITCH, description="Fused attention of prompts; empty is enable."
    )
    bert_context_fmha_fp32_acc: Switch | None = Field(
        default=None, title=_SWITCH, description="32-bit accumulation in attention of encoders; empty is disable."
    )
    remove_input_padding: Switch | None = Field(
        default=None, title=_SWITCH, description="Packed input; in-flight batching needs it. Empty is enable."
    )
    use_paged_context_fmha: Switch | None = Field(
        default=None,
        title=_SWITCH,
        description="Prompt attention over KV blocks, for block reuse and chunked context; empty is on where the "
        "build keeps it on.",
    )
    use_fp8_context_fmha: Switch | None = Field(
        default=None,
        title=_SWITCH,
        description="FP8 prompt attention; empty is on for FP8 weights with an FP8 KV cache on SM 89 and newer.",
    )
    fuse_fp4_quant: Switch | None = Field(
        default=None, title=_SWITCH, description="Fused FP4 quantization (Blackwell); empty is disable."
    )
    multiple_profiles: Switch | None = Field(
        default=None, title=_SWITCH, description="Several optimization profiles; empty goes by preset."
    )
    paged_state: Switch | None = Field(
        default=None, title=_SWITCH, description="Paged state of recurrent models; empty is disable for others."
    )
    streamingllm: Switch | None = Field(
        default=None, title=_SWITCH, description="No longer supported upstream; only disable builds."
    )
    norm_quant_fusion: Switch | None = Field(
        default=None, title=_SWITCH, description="Norm and FP4 quantization in one kernel; empty is disable."
    )
    reduce_fusion: Switch | None = Field(
        default=None, title=_SWITCH, description="All-reduce and norm in one kernel; empty goes by preset."
    )
    user_buffer: Switch | None = Field(
        default=None, title=_SWITCH, description="Communication buffers of reduce_fusion (FP8 Llama); empty is disable."
    )
    use_fused_mlp: Switch | None = Field(
        default=None, title=_SWITCH, description="Gate and up projection in one product; empty goes by format."
    )
    pp_reduce_scatter: Switch | None = Field(
        default=None, title=_SWITCH, description="Reduce-scatter between stages (Mixtral); empty is disable."
    )


class BackendParameters(Section):
    """Parameters of the Triton backend 'tensorrtllm'; an empty one is not written."""

    triton_max_batch_size: int | None = Field(
        default=None, ge=1, description="Requests that Triton batches; empty is the engine's max_batch_size."
    )
    decoupled_mode: bool | None = Field(default=None, description="Streaming; empty is on.")
    max_queue_delay_microseconds: int | None = Field(default=None, ge=0, description="Wait for a fuller batch.")
    batching_strategy: Literal["inflight_fused_batching", "inflight_batching"] = Field(
        default="inflight_fused_batching", title="batching strategy", description="Parameter gpt_model_type."
    )
    encoder_input_features_data_type: Literal["TYPE_FP16", "TYPE_BF16"] | None = Field(
        default=None, title="tensor type", description="Type of encoder features; empty is engine.dtype."
    )
    prompt_embedding_table_data_type: DataType | None = Field(
        default=None, title="tensor type", description="Type of prompt tables; empty is engine.dtype."
    )
    logits_datatype: Literal["TYPE_FP32", "TYPE_FP16"] | None = Field(
        default=None, title="tensor type", description="Type of returned logits; empty is the engine's."
    )
    encoder_engine_dir: str | None = Field(
        default=None, description="Encoder engine inside the container (encoder-decoder models)."
    )
    max_beam_width: int | None = Field(default=None, ge=1, description="Beams; at most the engine's.")
    max_tokens_in_paged_kv_cache: int | None = Field(default=None, ge=1, description="Tokens in the KV pool.")
    max_attention_window_size: str | None = Field(
        default=None, pattern=r"^\d+(,\d+)*$", title="comma list of window sizes", description="Attention windows."
    )
    sink_token_length: int | None = Field(default=None, ge=0, description="Tokens that a window always keeps.")
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] | None = Field(
        default=None, title="scheduler policy", description="Whether a started request can be paused for memory."
    )
    kv_cache_free_gpu_mem_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of what is free after the weights; goes before engine.kv_cache.free_gpu_memory_fraction.",
    )
    cross_kv_cache_fraction: float | None = Field(
        default=None, ge=0, le=1, description="Share of the KV pool for cross attention (encoder-decoder only)."
    )
    kv_cache_host_memory_bytes: int | None = Field(
        default=None, ge=0, description="KV blocks in host memory; goes before engine.kv_cache.host_memory_bytes."
    )
    kv_cache_onboard_blocks: bool | None = Field(default=None, description="Copy host blocks back before use.")
    cancellation_check_period_ms: int | None = Field(default=None, ge=1, description="Period of cancel checks.")
    stats_check_period_ms: int | None = Field(default=None, ge=1, description="Period of the metrics.")
    iter_stats_max_iterations: int | None = Field(default=None, ge=0, description="Iterations of statistics kept.")
    request_stats_max_iterations: int | None = Field(
        default=None, ge=0, description="Iterations of request statistics kept."
    )
    recv_poll_period_ms: int | None = Field(
        default=None, ge=0, description="Period in which followers poll; 0 is a busy loop."
    )
    enable_kv_cache_reuse: bool | None = Field(
        default=None, description="Prefix caching; empty is engine.kv_cache.enable_block_reuse where the engine can."
    )
    normalize_log_probs: bool | None = Field(default=None, description="Log probabilities divided by the length.")
    enable_chunked_context: bool | None = Field(
        default=None, description="Chunked prefill; empty is engine.enable_chunked_context where the engine can."
    )
    gpu_device_ids: str | None = Field(default=None, description="GPUs, '0,1'; of several instances '0,1;2,3'.")
    participant_ids: str | None = Field(
        default=None, description="MPI ranks, '1,2'; of several instances '1,2;3,4' (orchestrator without spawning)."
    )
    num_nodes: int | None = Field(default=None, ge=1, description="Nodes.")
    lora_cache_optimal_adapter_size: int | None = Field(default=None, ge=1, description="Rank the cache is cut for.")
    lora_cache_max_adapter_size: int | None = Field(default=None, ge=1, description="Highest rank in the cache.")
    lora_cache_gpu_memory_fraction: float | None = Field(
        default=None, ge=0, le=1, description="Share of GPU memory for adapters."
    )
    lora_cache_host_memory_bytes: int | None = Field(default=None, ge=0, description="Host memory for adapters.")
    lora_prefetch_dir: str | None = Field(
        default=None, description="Directory in the container with one numbered subdirectory per adapter."
    )
    decoding_mode: (
        Literal["top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"] | None
    ) = Field(default=None, title="decoding mode", description="Decoder; must fit the engine's speculative mode.")
    executor_worker_path: str | None = Field(
        default=None, description="Worker of the orchestrator mode; empty is the image's own."
    )
    lookahead_window_size: int | None = Field(default=None, ge=1, description="Window of lookahead decoding.")
    lookahead_ngram_size: int | None = Field(default=None, ge=1, description="N-gram of lookahead decoding.")
    lookahead_verification_set_size: int | None = Field(
        default=None, ge=1, description="Candidates verified by lookahead decoding."
    )
    medusa_choices: str | None = Field(default=None, description="Tree of Medusa, '{0}, {0, 0}, {1}'.")
    eagle_choices: str | None = Field(default=None, description="Tree of Eagle, '{0}, {0, 0}, {1}'.")
    gpu_weights_percent: float | None = Field(
        default=None, ge=0, le=1, description="Share of the weights on the GPU; below 1 needs weight_streaming."
    )
    enable_context_fmha_fp32_acc: bool | None = Field(
        default=None, description="32-bit accumulation in prompt attention."
    )
    multi_block_mode: bool | None = Field(default=None, description="Long sequences over several blocks of a GPU.")
    cuda_graph_mode: bool | None = Field(default=None, description="CUDA graphs for generation.")
    cuda_graph_cache_size: int | None = Field(default=None, ge=0, description="CUDA graphs kept.")
    speculative_decoding_fast_logits: bool | None = Field(
        default=None, description="Draft logits between processes (orchestrator mode without spawning)."
    )
    guided_decoding_backend: Literal["xgrammar"] | None = Field(
        default=None, title="guided decoding backend", description="Grammar-guided output."
    )
    xgrammar_tokenizer_info_path: str | None = Field(
        default=None, description="Tokenizer facts for xgrammar in the container; empty takes the one written here."
    )

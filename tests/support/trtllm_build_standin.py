"""A stand-in for trtllm-build 1.2.1 in tests: its flags, its loader's checks, its config.json; no engine in it.

It is written from the documented behaviour (section numbers: the project's TensorRT-LLM reference) and shares
no code with the product. The "engines" are a few bytes. What a GPU decides comes from the environment:
STANDIN_SM (90), STANDIN_VERSION (1.2.1), STANDIN_FAULT (oom | killed | norank), STANDIN_COUNT (a file that
gets a line per run), STANDIN_SECONDS (pause in the middle).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

# A configuration or a table of tensors, as JSON gives it.
Table = dict[str, Any]
Tensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]

DTYPE = ["auto", "float16", "float32", "bfloat16", "int32", "disable"]
SWITCH = ["enable", "disable"]
# 2.2: flag -> (choices, default).
PLUGINS = {
    "bert_attention_plugin": (DTYPE, "auto"),
    "gpt_attention_plugin": (DTYPE, "auto"),
    "gemm_plugin": ([*DTYPE[:5], "fp8", "nvfp4", "disable"], None),
    "gemm_swiglu_plugin": (["fp8", "disable"], None),
    "fp8_rowwise_gemm_plugin": (DTYPE, None),
    "lora_plugin": (DTYPE, None),
    "dora_plugin": (SWITCH, False),
    "moe_plugin": (DTYPE, "auto"),
    "mamba_conv1d_plugin": (DTYPE, "auto"),
    "nccl_plugin": (DTYPE, "auto"),
    "low_latency_gemm_plugin": (["fp8", "disable"], None),
    "low_latency_gemm_swiglu_plugin": (["fp8", "disable"], None),
    "gemm_allreduce_plugin": (["float16", "bfloat16", "disable"], None),
    "context_fmha": (SWITCH, True),
    "bert_context_fmha_fp32_acc": (SWITCH, False),
    "remove_input_padding": (SWITCH, True),
    "use_paged_context_fmha": (SWITCH, True),
    "use_fp8_context_fmha": (SWITCH, True),
    "fuse_fp4_quant": (SWITCH, False),
    "multiple_profiles": (SWITCH, False),
    "paged_state": (SWITCH, True),
    "streamingllm": (SWITCH, False),
    "norm_quant_fusion": (SWITCH, False),
    "reduce_fusion": (SWITCH, False),
    "user_buffer": (SWITCH, False),
    "use_fused_mlp": (SWITCH, True),
    "pp_reduce_scatter": (SWITCH, False),
}
SPECULATIVE = {
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
LOG_LEVELS = ["internal_error", "error", "warning", "info", "verbose", "debug", "trace"]
EXCLUDED = ["*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate"]
BITS16 = {"float16": "F16", "bfloat16": "BF16"}


def parser() -> argparse.ArgumentParser:
    """Exactly the flags of 2.1 and 2.2."""
    flags = argparse.ArgumentParser(prog="trtllm-build")
    for name in ("checkpoint_dir", "model_config", "build_config", "model_cls_file", "model_cls_name"):
        flags.add_argument(f"--{name}")
    flags.add_argument("--output_dir", default="engine_outputs")
    numbers = {"max_batch_size": 2048, "max_input_len": 1024, "max_beam_width": 1, "max_num_tokens": 8192}
    numbers |= {"max_encoder_input_len": 1024, "workers": 1, "max_lora_rank": 64, "max_draft_len": 0}
    for name, default in {**numbers, "opt_num_tokens": None}.items():
        flags.add_argument(f"--{name}", type=int, default=default)
    flags.add_argument("--max_seq_len", "--max_decoder_seq_len", type=int)
    flags.add_argument("--max_prompt_embedding_table_size", "--max_multimodal_len", type=int, default=0)
    flags.add_argument("--kv_cache_type", type=str.lower, choices=["continuous", "paged", "disabled"])
    for name in ("paged_kv_cache", "input_timing_cache", "visualize_network"):
        flags.add_argument(f"--{name}")
    flags.add_argument("--output_timing_cache", default="model.cache")
    verbosity = ["layer_names_only", "detailed", "none"]
    flags.add_argument("--profiling_verbosity", default=verbosity[0], choices=verbosity)
    switches = ("strip_plan", "weight_sparsity", "weight_streaming", "fast_build", "enable_debug_output", "dry_run")
    logits = ("gather_context_logits", "gather_generation_logits", "gather_all_token_logits")
    for name in (*switches, "monitor_memory", *logits):
        flags.add_argument(f"--{name}", action="store_true")
    flags.add_argument("--log_level", default="info", choices=LOG_LEVELS)
    flags.add_argument("--logits_dtype", choices=["float16", "float32"])
    flags.add_argument("--lora_dir", nargs="+")
    flags.add_argument("--lora_ckpt_source", default="hf", choices=["hf", "nemo"])
    flags.add_argument("--lora_target_modules", nargs="+")
    flags.add_argument("--speculative_decoding_mode", choices=list(SPECULATIVE))
    flags.add_argument("--tokens_per_block", type=int, default=32)
    for name, (choices, usual) in PLUGINS.items():
        flags.add_argument(f"--{name}", choices=choices, default=usual)
    return flags


def headers(path: Path) -> Table:
    """Names, types and shapes of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        table: Table = json.loads(file.read(size))
    table.pop("__metadata__", None)
    return table


def expected_tensors(config: Table, rank: int) -> Tensors:
    """3.4 and 3.5 for a Llama-type model: name -> (shape, allowed types) on one rank."""
    mapping = config.get("mapping", {})
    tp, pp = mapping.get("tp_size", 1), mapping.get("pp_size", 1)
    stage = rank // tp
    half, hidden, inter = (BITS16[config["dtype"]],), config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = max(config.get("num_key_value_heads", heads), tp)
    size = config.get("head_size") or hidden // heads
    tensors: Tensors = {}
    vocab = config["vocab_size"]
    if stage == 0:
        parallel = config.get("use_parallel_embedding", False)
        tensors["transformer.vocab_embedding.weight"] = ((vocab // tp if parallel else vocab, hidden), half)
    linears = {
        "attention.qkv": ((heads + 2 * kv_heads) * size // tp, hidden),
        "attention.dense": (hidden, heads * size // tp),
        "mlp.gate": (inter // tp, hidden),
        "mlp.fc": (inter // tp, hidden),
        "mlp.proj": (hidden, inter // tp),
    }
    quantization = config.get("quantization") or {}
    for layer in range(config["num_hidden_layers"] // pp):
        prefix = f"transformer.layers.{layer}"
        for norm in ("input_layernorm", "post_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ((hidden,), half)
        for name, shape in linears.items():
            tensors |= linear(f"{prefix}.{name}", shape, quantization, half)
        if quantization.get("kv_cache_quant_algo"):
            tensors[f"{prefix}.attention.kv_cache_scaling_factor"] = ((1,), ("F32",))
    if stage == pp - 1:
        tensors["transformer.ln_f.weight"] = ((hidden,), half)
        tensors["lm_head.weight"] = ((-(-vocab // tp), hidden), half)
    return tensors


def linear(name: str, shape: tuple[int, int], quantization: Table, half: tuple[str, ...]) -> Tensors:
    """3.5: weight and scales of one linear."""
    layers = quantization.get("quantized_layers")
    if layers is not None:  # MIXED_PRECISION: a layer that is not listed is at 16 bit
        quantization = layers.get(name, {})
    algo, group = quantization.get("quant_algo"), quantization.get("group_size", 128)
    excluded = quantization.get("exclude_modules") or EXCLUDED
    if any(fnmatch.fnmatch(name, pattern) for pattern in excluded):
        algo = None
    rows, columns = shape
    one, f32 = (1,), ("F32",)
    groups: Tensors = {f"{name}.weight": ((rows // 2, columns), ("I8", "U8"))}
    groups[f"{name}.weights_scaling_factor"] = ((rows, columns // group), (*half, "F32"))
    groups[f"{name}.prequant_scaling_factor"] = ((columns,), half)
    match algo:
        case None | "W8A16" | "W4A16":
            return {f"{name}.weight": (shape, half)}
        case "FP8":
            scales: Tensors = {f"{name}.{kind}_scaling_factor": (one, f32) for kind in ("weights", "activation")}
            return scales | {f"{name}.weight": (shape, ("F8_E4M3", "I8"))}
        case "W4A16_AWQ":
            return groups
        case "W4A8_AWQ":
            if group == 64:
                raise NotImplementedError
            more: Tensors = {
                f"{name}.{kind}": (one, f32) for kind in ("activation_scaling_factor", "weights_scaling_factor_2")
            }
            return groups | more
        case "W8A8_SQ_PER_CHANNEL":
            return {
                f"{name}.weight": (shape, ("I8",)),
                f"{name}.weights_scaling_factor": ((rows,), f32),
                f"{name}.activation_scaling_factor": (one, f32),
                f"{name}.prequant_scaling_factor": ((columns,), half),
            }
        case _:
            raise AssertionError(algo)


def load(directory: Path, config: Table, rank: int) -> None:
    """3.5, loading rules: missing is an error, extra a warning, the shape has to be right."""
    path = directory / f"rank{rank}.safetensors"
    assert path.is_file()  # 3.5: "a rank file must exist for every rank (bare assert)"
    found, wanted = headers(path), expected_tensors(config, rank)
    missing = wanted.keys() - found.keys()
    if missing:
        raise RuntimeError(f"Required but not provided tensors:{sorted(missing)}")
    for name in sorted(found.keys() - wanted.keys()):
        log("W", f"Provided but not required tensors: {{'{name}'}}")
    for name, (shape, kinds) in wanted.items():
        got = tuple(found[name]["shape"]) or (1,)
        if got != shape or found[name]["dtype"] not in kinds:
            message = f"{name}: got {found[name]['dtype']}{got}, expected one of {kinds}{shape}"
            raise ValueError(f"The value updated is not the same shape as the original. {message}")


def take_layer_config(directory: Path, config: Table) -> None:
    """3.3: a MIXED_PRECISION checkpoint needs quant_cfg.json, whose fields are known ones only."""
    if (config.get("quantization") or {}).get("quant_algo") != "MIXED_PRECISION":
        return
    path = directory / "quant_cfg.json"
    try:
        found = json.loads(path.read_text())
        assert found.keys() <= {"quant_algo", "kv_cache_quant_algo", "quantized_layers"}, found.keys()
        for layer in found["quantized_layers"].values():
            assert layer.keys() <= {"quant_algo", "group_size", "has_zero_point", "pre_quant_scale"}, layer.keys()
    except Exception as error:
        raise RuntimeError(f"Encounter error '{error}' for read quantization config '{path}'") from error
    config["quantization"] = found


def settle(args: argparse.Namespace, config: Table) -> Table:
    """2.3 and 2.4: the build_config that is written, after everything that the build resets."""
    quantization, mapping = config.get("quantization") or {}, config.get("mapping", {})
    algo, kv, tp = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo"), mapping.get("tp_size", 1)
    plugin = {name: plugin_value(getattr(args, name), name) for name in PLUGINS}
    plugin |= {"tokens_per_block": args.tokens_per_block, "manage_weights": args.fast_build, "paged_kv_cache": None}
    if args.opt_num_tokens is not None and plugin["multiple_profiles"]:
        raise RuntimeError("multiple_profiles and opt_num_tokens cannot be set together")
    if (args.gather_context_logits or args.gather_all_token_logits) and args.max_draft_len > 0:
        raise RuntimeError("gather_context_logits cannot be used with max_draft_len > 0")
    assert not plugin["streamingllm"], "StreamingLLM is no longer supported"
    if plugin["pp_reduce_scatter"]:
        assert config["architecture"] == "MixtralForCausalLM"
    longest = args.max_seq_len or config["max_position_embeddings"]
    tokens = args.max_num_tokens
    if not plugin["remove_input_padding"]:
        tokens = args.max_batch_size * longest
    tokens = min(tokens, longest * args.max_batch_size)
    tokens = max(tokens, args.tokens_per_block if plugin["context_fmha"] else args.max_input_len)
    if plugin["reduce_fusion"] and (
        tp == 1 or config["architecture"] not in ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")
    ):
        plugin["reduce_fusion"] = False
    plugin["user_buffer"] = plugin["user_buffer"] and plugin["reduce_fusion"] and algo == "FP8"
    if args.speculative_decoding_mode:
        longest += args.max_draft_len
        tokens = max(tokens, args.max_batch_size * (args.max_draft_len + 1))
    attention(plugin, algo, kv, int(os.environ.get("STANDIN_SM", "90")))
    plugin["use_fused_mlp"] = plugin["use_fused_mlp"] and algo in (None, "FP8", "MIXED_PRECISION")
    world = mapping.get("world_size", 1)
    plugin |= {"nccl_plugin": config["dtype"] if world > 1 else None, "paged_state": False}
    opt = None if plugin["multiple_profiles"] else args.opt_num_tokens or args.max_batch_size * args.max_beam_width
    return {
        "max_input_len": min(args.max_input_len, longest),
        "max_seq_len": longest,
        "opt_batch_size": 8,
        "max_batch_size": args.max_batch_size,
        "max_beam_width": args.max_beam_width,
        "max_num_tokens": tokens,
        "opt_num_tokens": None if opt is None else min(opt, tokens),
        "max_prompt_embedding_table_size": args.max_prompt_embedding_table_size,
        "kv_cache_type": (args.kv_cache_type or "paged").upper(),
        "gather_context_logits": args.gather_context_logits or args.gather_all_token_logits,
        "gather_generation_logits": args.gather_generation_logits or args.gather_all_token_logits,
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": args.profiling_verbosity,
        "enable_debug_output": args.enable_debug_output,
        "max_draft_len": args.max_draft_len,
        "speculative_decoding_mode": SPECULATIVE.get(args.speculative_decoding_mode, 1),
        "use_refit": False,
        "input_timing_cache": args.input_timing_cache,
        "output_timing_cache": args.output_timing_cache,
        "lora_config": {"lora_dir": args.lora_dir or [], "max_lora_rank": args.max_lora_rank},
        "weight_sparsity": args.weight_sparsity,
        "weight_streaming": args.weight_streaming,
        "plugin_config": plugin,
        "use_strip_plan": args.strip_plan,
        "max_encoder_input_len": args.max_encoder_input_len,
        "monitor_memory": args.monitor_memory,
        "use_mrope": False,
    }


def plugin_value(value: object, name: str) -> object:
    """PluginConfig holds booleans for switches and null for a plugin that is off."""
    if value == "disable":
        return None if name.endswith("plugin") and PLUGINS[name][0] is not SWITCH else False
    return True if value == "enable" else value


def attention(plugin: Table, algo: str | None, kv: str | None, sm: int) -> None:
    """2.4, rules 8 and 9 in their order."""
    if not plugin["context_fmha"]:
        plugin |= {"use_fp8_context_fmha": False, "use_paged_context_fmha": False}
    for no_fp8 in (algo not in ("FP8", "W4A8_AWQ", "NVFP4"), sm < 89):
        if no_fp8:
            plugin["use_fp8_context_fmha"] = False
            if kv == "FP8":
                plugin["use_paged_context_fmha"] = False
    if plugin["use_paged_context_fmha"] and plugin["use_fp8_context_fmha"] and kv != "FP8":
        plugin["use_fp8_context_fmha"] = False
    if plugin["use_paged_context_fmha"] and kv == "FP8" and not plugin["use_fp8_context_fmha"]:
        plugin["use_fp8_context_fmha"] = True
    if kv == "INT8":
        plugin["use_paged_context_fmha"] = False


def log(level: str, text: str, source: str = "TRT-LLM") -> None:
    """A line as the real tool prints it."""
    sys.stdout.write(f"[05/01/2026-10:00:00] [{source}] [{level}] {text}\n")
    sys.stdout.flush()


def build(args: argparse.Namespace) -> None:
    """Everything but the engine."""
    directory, out = Path(args.checkpoint_dir), Path(args.output_dir)
    config = json.loads((directory / "config.json").read_text())
    config["architecture"]  # KeyError for an HF directory (10, row 25)
    take_layer_config(directory, config)
    build_config = settle(args, config)
    algo = (config.get("quantization") or {}).get("quant_algo")
    out.mkdir(parents=True, exist_ok=True)
    version, fault = os.environ.get("STANDIN_VERSION", "1.2.1"), os.environ.get("STANDIN_FAULT")
    log("I", f"TensorRT-LLM version: {version}")
    world = config.get("mapping", {}).get("world_size", 1)
    for rank in range(world):
        load(directory, config, rank)
        log("I", "Total time of constructing network from module object 2.1 seconds")
        if int(os.environ.get("STANDIN_SM", "90")) < 89 and algo in ("FP8", "W4A8_AWQ"):
            log("E", "Networks with FP8 precision require hardware with FP8 support.", "TRT")
            raise RuntimeError("Engine building failed, please check the error log.")
        if fault == "oom":
            log("W", "Requested amount of GPU memory (85899345920 bytes) could not be allocated.", "TRT")
            log("E", "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)", "TRT")
            raise RuntimeError("Engine building failed, please check the error log.")
        time.sleep(float(os.environ.get("STANDIN_SECONDS", "0")))
        log("I", "Engine generation completed in 35.9738 seconds.", "TRT")
        log("I", "Total time of building Unnamed Network 0: 00:00:36")
        log("I", f"Serializing engine to {out}/rank{rank}.engine...")
        if fault != "norank" or rank < world - 1:
            (out / f"rank{rank}.engine").write_bytes(b"stand-in, not an engine")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        log("I", "Engine serialized. Total time: 00:00:02")
    config.pop("producer", None)
    if args.logits_dtype:
        config["logits_dtype"] = args.logits_dtype
    document = {"version": version, "pretrained_config": config, "build_config": build_config}
    (out / "config.json").write_text(json.dumps(document, indent=4))
    Path(args.output_timing_cache).write_bytes(b"timing")
    log("I", "Total time of building all engines: 00:00:41")


def main() -> int:
    """Run like the command."""
    args = parser().parse_args()
    if os.environ.get("STANDIN_COUNT"):
        with Path(os.environ["STANDIN_COUNT"]).open("a") as file:
            file.write(" ".join(sys.argv[1:]) + "\n")
    build(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line of trtllm-build against upstream's facts, written by hand.

"2.1" and the like are sections of the project's TensorRT-LLM reference.
"""

from __future__ import annotations

import pytest

from pipeline.config.deployment import EngineConfig
from pipeline.config.schema import BuildConfig
from pipeline.examine import with_sparse_kernels
from pipeline.targets.tensorrt_llm.choices import choose
from pipeline.targets.tensorrt_llm.command import build_argv
from pipeline.targets.tensorrt_llm.facts import QuantFacts
from pipeline.targets.tensorrt_llm.readback import Ranks, expect
from tests.support import trtllm_build_standin as standin
from tests.support.architectures import LLAMA_8B, Facts

pytestmark = pytest.mark.fast

MISTRAL = Facts(architecture="MistralForCausalLM")


def quant(format_: str = "bf16", kv_cache: str = "auto") -> QuantFacts:
    """Facts of a checkpoint of that format."""
    return QuantFacts.of_format(format_, kv_cache, "bfloat16")  # type: ignore[arg-type]


def engine(gpu: str = "H100", **values: object) -> EngineConfig:
    """An engine section for a GPU."""
    return EngineConfig.model_validate({"target": "tensorrt_llm", "gpu": gpu, **values})


def flags(config: EngineConfig, facts: QuantFacts, model: Facts = LLAMA_8B) -> dict[str, str]:
    """Flag -> value of the command line."""
    argv = build_argv(config, quant=facts, checkpoint_dir="c", engine_dir="e", architecture=model)
    names = [word.removeprefix("--") for word in argv[1::2]]
    return dict(zip(names, argv[2::2], strict=True))


# --- golden command lines ---------------------------------------------------------------------------


def test_llama_3_1_8b_in_fp8_on_an_h100() -> None:
    """The shipped config llama-3.1-8b/fp8-tensorrt-llm-h100."""
    config = engine(max_batch_size=256, max_num_tokens=8192, max_seq_len=8192)
    argv = build_argv(
        config, quant=quant("fp8", "fp8"), checkpoint_dir="/checkpoint", engine_dir="/engine", architecture=LLAMA_8B
    )
    assert " ".join(argv).replace(" --", "\n--").splitlines() == [
        "trtllm-build",
        "--checkpoint_dir /checkpoint",
        "--output_dir /engine",
        "--max_batch_size 256",
        "--max_input_len 8192",  # 2.1: clipped to max_seq_len, ignored with packed input and context FMHA
        "--max_seq_len 8192",
        "--max_beam_width 1",
        "--max_num_tokens 8192",
        "--kv_cache_type paged",
        "--tokens_per_block 32",  # 2.2: moved from 64 to 32, so it is written
        "--gpt_attention_plugin auto",  # 2.2: paged KV, in-flight batching
        "--context_fmha enable",
        "--remove_input_padding enable",  # 2.2: in-flight batching
        "--use_paged_context_fmha enable",  # 2.4: FP8 weights + FP8 KV on SM 90 keep it
        "--use_fp8_context_fmha enable",  # 2.4 rule 8: paged FMHA with FP8 KV needs it
        "--gemm_plugin disable",  # 2.2: recommended off for FP8
        "--gemm_swiglu_plugin disable",
        "--low_latency_gemm_plugin disable",
        "--low_latency_gemm_swiglu_plugin disable",
        "--use_fused_mlp enable",  # 2.2: kept for FP8
        "--multiple_profiles disable",  # 2.2: upstream's default
        "--reduce_fusion disable",  # 2.2: reset with tp 1
        "--user_buffer disable",
        "--logits_dtype float32",  # 3.2: ModelOpt writes float16; 7.2: TYPE_FP32 in the repository
        "--profiling_verbosity layer_names_only",
        "--workers 1",
        "--log_level info",
    ]


def test_llama_3_1_8b_in_int4_awq_on_an_a100() -> None:
    """The balanced preset, 16-bit KV cache."""
    config = engine("A100", preset="balanced", max_batch_size=64, max_num_tokens=4096, max_seq_len=4096)
    argv = build_argv(
        config, quant=quant("int4_awq"), checkpoint_dir="/checkpoint", engine_dir="/engine", architecture=LLAMA_8B
    )
    assert " ".join(argv).replace(" --", "\n--").splitlines() == [
        "trtllm-build",
        "--checkpoint_dir /checkpoint",
        "--output_dir /engine",
        "--max_batch_size 64",
        "--max_input_len 4096",
        "--max_seq_len 4096",
        "--max_beam_width 1",
        "--max_num_tokens 4096",
        "--kv_cache_type paged",
        "--tokens_per_block 32",
        "--gpt_attention_plugin auto",
        "--context_fmha enable",
        "--remove_input_padding enable",
        "--use_paged_context_fmha enable",  # 2.4: any weights + 16-bit KV on SM 80 keep it
        "--use_fp8_context_fmha disable",  # 2.4 rule 8: quant_algo not FP8; 5.1: no FP8 on SM 80
        "--gemm_plugin auto",  # 2.2: on for what stays at 16 bit
        "--gemm_swiglu_plugin disable",
        "--low_latency_gemm_plugin disable",
        "--low_latency_gemm_swiglu_plugin disable",
        "--use_fused_mlp disable",  # 2.2: forced off for W4A16_AWQ
        "--multiple_profiles enable",  # 2.5: recommended always
        "--reduce_fusion disable",
        "--user_buffer disable",
        "--logits_dtype float32",
        "--profiling_verbosity layer_names_only",
        "--workers 1",
        "--log_level info",
    ]


# --- prompt attention: the table at the end of 2.4 ----------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "format_", "kv_cache", "paged", "fp8"),
    [
        ("H100", "fp8", "fp8", True, True),
        ("L40S", "fp8", "fp8", True, True),
        ("H100", "fp8", "auto", True, False),  # FP8 FMHA with a 16-bit KV cache is reset
        ("H100", "fp8", "int8", False, False),  # rule 9
        ("H100", "w4a8_awq", "fp8", True, True),
        ("H100", "int4_awq", "fp8", False, False),
        ("H100", "int8_wo", "fp8", False, False),
        ("H100", "bf16", "fp8", False, False),
        ("H100", "bf16", "int8", False, False),
        ("H100", "bf16", "auto", True, False),
        ("A100", "bf16", "auto", True, False),
        ("A100", "int8_sq", "auto", True, False),
        ("A100", "int8_sq", "int8", False, False),
        ("A100", "bf16", "fp8", False, False),
    ],
)
def test_paged_and_fp8_context_attention_are_asked_for_where_the_build_keeps_them(
    gpu: str, format_: str, kv_cache: str, *, paged: bool, fp8: bool
) -> None:
    """2.4 rules 8 and 9, and their consequences."""
    found = flags(engine(gpu), quant(format_, kv_cache))
    words = {True: "enable", False: "disable"}
    assert (found["use_paged_context_fmha"], found["use_fp8_context_fmha"]) == (words[paged], words[fp8])


@pytest.mark.parametrize("gpu", ["H100", "A100", "L4"])
@pytest.mark.parametrize("preset", ["none", "throughput", "latency", "balanced"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("format_", ["bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_nothing_that_we_decide_is_reset_by_the_build(
    gpu: str, preset: str, kv_cache: str, format_: str, tensor: int
) -> None:
    """An option that the rules would turn off is never asked for (2.4), in any combination."""
    facts = quant(format_, kv_cache)
    config = engine(gpu, preset=preset, max_seq_len=4096, tensor_parallel_size=tensor)
    choices = choose(config, facts, LLAMA_8B)
    sm = {"H100": 90, "A100": 80, "L4": 89}[gpu]
    ranks = Ranks(tensor=tensor)
    assert expect(choices, quant=facts, architecture="LlamaForCausalLM", sm=sm, ranks=ranks).resets == ()


def test_without_context_fmha_no_other_prompt_attention_is_asked_for() -> None:
    """2.2: context_fmha off turns both off."""
    found = flags(engine(build={"context_fmha": "disable"}), quant("fp8", "fp8"))
    assert {found[name] for name in ("context_fmha", "use_paged_context_fmha", "use_fp8_context_fmha")} == {"disable"}


# --- presets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "format_", "expected"),
    [
        ("none", "fp8", {"gemm_plugin": "disable", "multiple_profiles": "disable", "reduce_fusion": "disable"}),
        ("throughput", "fp8", {"gemm_plugin": "disable", "multiple_profiles": "enable", "reduce_fusion": "enable"}),
        ("latency", "fp8", {"gemm_plugin": "fp8", "multiple_profiles": "enable", "reduce_fusion": "enable"}),
        ("balanced", "fp8", {"gemm_plugin": "disable", "multiple_profiles": "enable", "reduce_fusion": "disable"}),
        ("throughput", "bf16", {"gemm_plugin": "auto", "multiple_profiles": "enable", "reduce_fusion": "enable"}),
        ("latency", "int4_awq", {"gemm_plugin": "auto", "multiple_profiles": "enable", "reduce_fusion": "enable"}),
    ],
)
def test_a_preset_decides_what_the_config_leaves_empty(preset: str, format_: str, expected: dict[str, str]) -> None:
    """2.2 (GEMM plugin off for FP8 except in small batches) and 2.5 (profiles, reduce fusion with TP)."""
    found = flags(engine(preset=preset, tensor_parallel_size=2), quant(format_))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("gpu", "tensor", "model", "why"),
    [
        ("H100", 1, LLAMA_8B, "there is no all-reduce"),
        ("H100", 2, MISTRAL, "the build resets it for MistralForCausalLM"),  # 2.2
        ("L40S", 2, LLAMA_8B, "#2817"),  # 10.3 row 37
    ],
)
def test_reduce_fusion_stays_off_where_it_cannot_help(gpu: str, tensor: int, model: Facts, why: str) -> None:
    """One GPU, another architecture or another GPU than Hopper; the reason is told."""
    config = engine(gpu, preset="throughput", tensor_parallel_size=tensor)
    choice = next(item for item in choose(config, quant(), model) if item.what == "reduce_fusion")
    assert choice.value == "disable"
    assert why in choice.why


def test_what_the_config_names_goes_before_the_preset_and_says_so() -> None:
    """A written value is never overridden."""
    config = engine(preset="throughput", build={"gemm_plugin": "fp8", "multiple_profiles": "disable"})
    choices = {choice.what: choice for choice in choose(config, quant("fp8"), LLAMA_8B)}
    assert choices["gemm_plugin"].value == "fp8"
    assert choices["multiple_profiles"].value == "disable"
    assert choices["gemm_plugin"].why == "engine.build.gemm_plugin says so."


def test_opt_num_tokens_turns_the_profiles_of_a_preset_off() -> None:
    """2.2: the build refuses both together."""
    found = flags(engine(preset="throughput", opt_num_tokens=512), quant())
    assert (found["opt_num_tokens"], found["multiple_profiles"]) == ("512", "disable")


def test_sparse_kernels_are_looked_for_without_the_plugin_whose_products_are_dense() -> None:
    """At 16 bit TensorRT must run the products itself; in fp8 it does so anyway."""

    def added(format_: str) -> set[tuple[str, object]]:
        dense, sparse = (
            {(choice.what, choice.value) for choice in choose(engine(build=build), quant(format_), LLAMA_8B)}
            for build in ({}, {"weight_sparsity": True})
        )
        return sparse - dense

    assert added("bf16") == {("weight_sparsity", None), ("gemm_plugin", "disable")}
    assert added("fp8") == {("weight_sparsity", None)}


def test_every_choice_has_a_reason() -> None:
    """What a plan shows explains itself."""
    choices = choose(engine(preset="latency"), quant("fp8", "fp8"), LLAMA_8B)
    assert all(choice.why.endswith(".") for choice in choices)
    assert len({choice.what for choice in choices}) == len(choices)


# --- every option -------------------------------------------------------------------------------------

OPTIONS: dict[str, object] = {
    "profiling_verbosity": "detailed",
    "log_level": "verbose",
    "workers": 4,
    "logits_dtype": "float16",
    "max_prompt_embedding_table_size": 8,
    "max_encoder_input_len": 64,
    "speculative_decoding_mode": "draft_tokens_external",
    "max_draft_len": 5,
    "lora_dir": ["/a", "/b"],
    "lora_ckpt_source": "nemo",
    "lora_target_modules": ["attn_qkv"],
    "max_lora_rank": 16,
    **dict.fromkeys(
        (
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
        ),
        True,
    ),
    **{name: choices[-1] for name, (choices, _) in standin.PLUGINS.items()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_command_line_and_is_a_flag_of_trtllm_build(name: str) -> None:
    """The parser of 2.1 and 2.2 takes the line and gives the value back."""
    value = OPTIONS[name]
    build = {name: value}
    if name in ("lora_ckpt_source", "max_lora_rank"):
        build["lora_dir"] = ["/a"]
    argv = build_argv(engine(build=build), quant=quant(), checkpoint_dir="c", engine_dir="e", architecture=LLAMA_8B)
    assert getattr(standin.parser().parse_args(argv[1:]), name) == value


def test_the_stand_in_refuses_a_flag_of_older_guides(capsys: pytest.CaptureFixture[str]) -> None:
    """2.2, end: flags that no longer exist fail in argparse."""
    with pytest.raises(SystemExit):
        standin.parser().parse_args(["--use_inflight_batching"])
    assert "trtllm-build: error: unrecognized arguments: --use_inflight_batching" in capsys.readouterr().err


@pytest.mark.parametrize(("format_", "expected"), [("fp8", True), ("bf16", True), ("int4_awq", False)])
def test_a_sparse_build_asks_for_sparse_kernels_where_the_format_has_them(format_: str, expected: bool) -> None:
    """Formats whose products are plugins would not use them."""
    config = BuildConfig.model_validate(
        {
            "name": "a",
            "source": {"path": "m"},
            "quantization": {"format": format_},
            "sparsity": {"method": "magnitude"},
            "engine": {"target": "tensorrt_llm", "gpu": "H100"},
        }
    )
    assert with_sparse_kernels(config).engine.build.weight_sparsity is expected

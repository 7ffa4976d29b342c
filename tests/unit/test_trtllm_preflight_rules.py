"""Every row of rules.toml with a config that it is about and one that it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.keys import KEYS
from pipeline.targets.tensorrt_llm.preflight.finding import Case
from pipeline.targets.tensorrt_llm.preflight.rules import check, facts, rules
from tests.support.trtllm_cases import LLAMA_3_1_8B, decoder, gpu_config

pytestmark = pytest.mark.fast

B = "engine__build__"
S = "serving__tensorrt_llm__"
FP8 = {"quantization__format": "fp8"}
FP8_KV = {"quantization__kv_cache": "fp8"}
AWQ = {"quantization__format": "int4_awq"}
A100 = {"engine__gpu": "A100"}
L40S = {"engine__gpu": "L40S"}
TP2 = {"engine__tensor_parallel_size": 2}
EAGLE = {f"{B}speculative_decoding_mode": "eagle", f"{B}max_draft_len": 63}
MEDUSA = {f"{B}speculative_decoding_mode": "medusa", f"{B}max_draft_len": 63}
LOOKAHEAD = {
    f"{B}speculative_decoding_mode": "lookahead_decoding",
    f"{S}decoding_mode": "lookahead",
    f"{S}lookahead_window_size": 7,
    f"{S}lookahead_ngram_size": 7,
    f"{S}lookahead_verification_set_size": 7,
}
NOT_ASKED = {"engine__enable_chunked_context": False, "engine__kv_cache__enable_block_reuse": False}
UNPAGED = {f"{B}use_paged_context_fmha": "disable"}
WIDE_A100 = {**A100, **TP2, f"{B}reduce_fusion": "enable"}
FUSED = {**TP2, f"{B}reduce_fusion": "enable"}
FP8_FUSED = {**FP8, **FUSED, f"{B}user_buffer": "enable"}

# name of the row -> (keys that it is about, keys that differ in the point in question and are fine)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own_timing_cache": ({f"{B}input_timing_cache": "model.cache"}, {f"{B}output_timing_cache": "model.cache"}),
    "rowwise_plugin_before_ada": (
        {**A100, f"{B}fp8_rowwise_gemm_plugin": "auto"},
        {**A100, f"{B}fp8_rowwise_gemm_plugin": "disable"},
    ),
    "rowwise_plugin_without_rowwise_weights": (
        {f"{B}fp8_rowwise_gemm_plugin": "auto"},
        {f"{B}fp8_rowwise_gemm_plugin": "disable"},
    ),
    "chunked_context_without_paged_attention": (UNPAGED, {**UNPAGED, **NOT_ASKED}),
    "backend_chunked_context_without_paged_attention": (
        {**UNPAGED, **NOT_ASKED, f"{S}enable_chunked_context": True},
        {**NOT_ASKED, f"{S}enable_chunked_context": True},
    ),
    "profiles_with_opt_num_tokens": (
        {"engine__opt_num_tokens": 512, f"{B}multiple_profiles": "enable"},
        {"engine__opt_num_tokens": 512},
    ),
    "context_logits_with_drafts": ({**MEDUSA, f"{B}gather_context_logits": True}, {f"{B}gather_context_logits": True}),
    "all_logits_with_drafts": ({**MEDUSA, f"{B}gather_all_token_logits": True}, {f"{B}gather_all_token_logits": True}),
    "swiglu_without_fused_mlp": (
        {**FP8, f"{B}gemm_swiglu_plugin": "fp8", f"{B}use_fused_mlp": "disable"},
        {**FP8, f"{B}gemm_swiglu_plugin": "fp8"},
    ),
    "low_latency_swiglu_without_fused_mlp": (
        {**FP8, f"{B}low_latency_gemm_swiglu_plugin": "fp8", f"{B}use_fused_mlp": "disable"},
        {**FP8, f"{B}low_latency_gemm_swiglu_plugin": "fp8"},
    ),
    "swiglu_off_hopper": ({**FP8, **L40S, f"{B}gemm_swiglu_plugin": "fp8"}, {**FP8, f"{B}gemm_swiglu_plugin": "fp8"}),
    "swiglu_without_fp8": ({**AWQ, f"{B}gemm_swiglu_plugin": "fp8"}, {**FP8, f"{B}gemm_swiglu_plugin": "fp8"}),
    "low_latency_gemm_without_fp8": (
        {f"{B}low_latency_gemm_plugin": "fp8"},
        {**FP8, f"{B}low_latency_gemm_plugin": "fp8"},
    ),
    "low_latency_swiglu_without_fp8": (
        {f"{B}low_latency_gemm_swiglu_plugin": "fp8"},
        {**FP8, f"{B}low_latency_gemm_swiglu_plugin": "fp8"},
    ),
    "fp8_gemm_without_fp8": ({**AWQ, f"{B}gemm_plugin": "fp8"}, {**FP8, f"{B}gemm_plugin": "fp8"}),
    "fp4_gemm_before_blackwell": ({f"{B}gemm_plugin": "nvfp4"}, {f"{B}gemm_plugin": "auto"}),
    "fp4_fusion_before_blackwell": ({f"{B}fuse_fp4_quant": "enable"}, {f"{B}fuse_fp4_quant": "disable"}),
    "reduce_scatter_without_mixtral": ({f"{B}pp_reduce_scatter": "enable"}, {f"{B}pp_reduce_scatter": "disable"}),
    "streamingllm": ({f"{B}streamingllm": "enable"}, {f"{B}streamingllm": "disable"}),
    "model_class_without_file": (
        {f"{B}model_cls_name": "Mine"},
        {f"{B}model_cls_name": "Mine", f"{B}model_cls_file": "mine.py"},
    ),
    "model_file_without_class": (
        {f"{B}model_cls_file": "mine.py"},
        {f"{B}model_cls_name": "Mine", f"{B}model_cls_file": "mine.py"},
    ),
    "adapters_without_plugin": ({f"{B}lora_plugin": "disable", f"{B}lora_dir": ("l",)}, {f"{B}lora_dir": ("l",)}),
    "dora_without_lora": ({f"{B}dora_plugin": "enable"}, {f"{B}dora_plugin": "enable", f"{B}lora_plugin": "auto"}),
    "streamed_weights_without_streaming": (
        {f"{S}gpu_weights_percent": 0.5},
        {f"{S}gpu_weights_percent": 0.5, f"{B}weight_streaming": True},
    ),
    "eagle_batch": ({**EAGLE, "engine__max_batch_size": 513}, {**EAGLE, "engine__max_batch_size": 512}),
    "eagle_draft_length": ({**EAGLE, f"{B}max_draft_len": 257}, {**EAGLE, f"{B}max_draft_len": 256}),
    "mode_without_drafts": ({**MEDUSA, f"{B}max_draft_len": 0}, MEDUSA),
    "drafts_without_mode": ({f"{B}max_draft_len": 8}, MEDUSA),
    "medusa_decoder_without_engine": ({f"{S}decoding_mode": "medusa"}, {**MEDUSA, f"{S}decoding_mode": "medusa"}),
    "lookahead_decoder_without_engine": ({**LOOKAHEAD, f"{B}speculative_decoding_mode": None}, LOOKAHEAD),
    "eagle_decoder_without_engine": ({**MEDUSA, f"{S}decoding_mode": "eagle"}, {**EAGLE, f"{S}decoding_mode": "eagle"}),
    "redrafter_decoder_without_engine": (
        {f"{S}decoding_mode": "redrafter"},
        {
            f"{S}decoding_mode": "redrafter",
            f"{B}speculative_decoding_mode": "explicit_draft_tokens",
            f"{B}max_draft_len": 4,
        },
    ),
    "lookahead_without_window": ({**LOOKAHEAD, f"{S}lookahead_window_size": None}, LOOKAHEAD),
    "lookahead_without_ngram": ({**LOOKAHEAD, f"{S}lookahead_ngram_size": None}, LOOKAHEAD),
    "lookahead_without_verification": ({**LOOKAHEAD, f"{S}lookahead_verification_set_size": None}, LOOKAHEAD),
    "beam_decoder_without_beams": (
        {f"{S}decoding_mode": "beam_search"},
        {f"{S}decoding_mode": "beam_search", "engine__max_beam_width": 4},
    ),
    "fast_logits_launch": (
        {f"{S}speculative_decoding_fast_logits": True},
        {
            f"{S}speculative_decoding_fast_logits": True,
            "serving__launch_mode": "orchestrator_no_spawn",
            f"{S}participant_ids": "1",
        },
    ),
    "reduce_fusion_on_one_gpu": ({f"{B}reduce_fusion": "enable"}, FUSED),
    "reduce_fusion_of_other_architecture": ({**FUSED, "architecture": "MistralForCausalLM"}, FUSED),
    "user_buffer_without_fusion": ({**FP8, **TP2, f"{B}user_buffer": "enable"}, FP8_FUSED),
    "user_buffer_without_fp8_llama": ({**FUSED, f"{B}user_buffer": "enable"}, FP8_FUSED),
    "norm_quant_fusion": ({f"{B}norm_quant_fusion": "enable"}, {f"{B}norm_quant_fusion": "disable"}),
    "fused_mlp_of_other_format": ({**AWQ, f"{B}use_fused_mlp": "enable"}, {**FP8, f"{B}use_fused_mlp": "enable"}),
    "paged_attention_of_precision": (
        {**AWQ, **FP8_KV, f"{B}use_paged_context_fmha": "enable"},
        {**FP8, **FP8_KV, f"{B}use_paged_context_fmha": "enable"},
    ),
    "paged_attention_without_fused": (
        {f"{B}use_paged_context_fmha": "enable", f"{B}context_fmha": "disable"},
        {f"{B}use_paged_context_fmha": "enable", f"{B}context_fmha": "enable"},
    ),
    "fp8_attention_without_fused": (
        {**FP8, **FP8_KV, f"{B}use_fp8_context_fmha": "enable", f"{B}context_fmha": "disable"},
        {**FP8, **FP8_KV, f"{B}use_fp8_context_fmha": "enable"},
    ),
    "fp8_attention_of_other_format": (
        {**AWQ, f"{B}use_fp8_context_fmha": "enable"},
        {**FP8, **FP8_KV, f"{B}use_fp8_context_fmha": "enable"},
    ),
    "fp8_attention_before_ada": (
        {**A100, f"{B}use_fp8_context_fmha": "enable"},
        {**L40S, f"{B}use_fp8_context_fmha": "enable"},
    ),
    "fp8_attention_switched_on": (
        {**FP8, **FP8_KV, f"{B}use_fp8_context_fmha": "disable"},
        {**FP8, **FP8_KV, **UNPAGED, f"{B}use_fp8_context_fmha": "disable"},
    ),
    "eagle_paged_attention": ({**EAGLE, **UNPAGED}, {**MEDUSA, **UNPAGED}),
    "nccl_plugin": ({f"{B}nccl_plugin": "float16"}, {f"{B}nccl_plugin": "auto"}),
    "paged_state": (
        {f"{B}paged_state": "enable"},
        {f"{B}paged_state": "enable", "architecture": "RecurrentGemmaForCausalLM"},
    ),
    "input_length_of_packed_input": (
        {"engine__max_input_len": 512},
        {"engine__max_input_len": 512, f"{B}context_fmha": "disable"},
    ),
    "fp8_attention_without_fp8_cache": (
        {**FP8, f"{B}use_fp8_context_fmha": "enable"},
        {**FP8, **FP8_KV, f"{B}use_fp8_context_fmha": "enable"},
    ),
    "user_buffer_off_hopper": ({**FP8_FUSED, **L40S}, FP8_FUSED),
    "reduce_fusion_off_hopper": (WIDE_A100, FUSED),
    "block_reuse_without_paged_attention": (UNPAGED, {**UNPAGED, **NOT_ASKED}),
    "backend_block_reuse_without_paged_attention": (
        {**NOT_ASKED, "quantization__kv_cache": "int8", f"{S}enable_kv_cache_reuse": True},
        {**NOT_ASKED, f"{S}enable_kv_cache_reuse": True},
    ),
    "draft_engine_in_leader_mode": (
        {"serving__bls__tensorrt_llm_draft_model_name": "draft"},
        {"serving__bls__tensorrt_llm_draft_model_name": "draft", "serving__launch_mode": "orchestrator"},
    ),
    "no_participants": (
        {"serving__launch_mode": "orchestrator_no_spawn"},
        {"serving__launch_mode": "orchestrator_no_spawn", f"{S}participant_ids": "1"},
    ),
    "encoder_without_cross_fraction": (
        {f"{S}encoder_engine_dir": "/e"},
        {f"{S}encoder_engine_dir": "/e", f"{S}cross_kv_cache_fraction": 0.5},
    ),
    "cross_fraction_without_encoder": (
        {f"{S}cross_kv_cache_fraction": 0.5},
        {f"{S}encoder_engine_dir": "/e", f"{S}cross_kv_cache_fraction": 0.5},
    ),
    "no_attention_plugin": ({f"{B}gpt_attention_plugin": "disable"}, {f"{B}gpt_attention_plugin": "bfloat16"}),
    "padded_input": ({f"{B}remove_input_padding": "disable"}, {f"{B}remove_input_padding": "enable"}),
    "continuous_cache": ({"engine__kv_cache__type": "continuous"}, {"engine__kv_cache__type": "paged"}),
    "no_cache": ({"engine__kv_cache__type": "disabled"}, {"engine__kv_cache__type": "paged"}),
    "adapters_without_cache": (
        {f"{B}lora_plugin": "auto", "engine__kv_cache__type": "disabled"},
        {f"{B}lora_plugin": "auto"},
    ),
    "tokenizer_facts_without_guided_decoding": (
        {f"{S}xgrammar_tokenizer_info_path": "/t.json"},
        {f"{S}xgrammar_tokenizer_info_path": "/t.json", f"{S}guided_decoding_backend": "xgrammar"},
    ),
    "half_logits_of_float_engine": (
        {f"{S}logits_datatype": "TYPE_FP16"},
        {f"{S}logits_datatype": "TYPE_FP16", f"{B}logits_dtype": "float16"},
    ),
    "float_logits_of_half_engine": (
        {f"{S}logits_datatype": "TYPE_FP32", f"{B}logits_dtype": "float16"},
        {f"{S}logits_datatype": "TYPE_FP32"},
    ),
    "llama_pipeline_fp8_of_1_0": (
        {**FP8, "engine__pipeline_parallel_size": 2, "engine__toolchain": "1.0.0"},
        {**FP8, "engine__pipeline_parallel_size": 2},
    ),
}


def _case(values: dict[str, Any]) -> Case:
    architecture = values.get("architecture", "LlamaForCausalLM")
    config = gpu_config(**{key: value for key, value in values.items() if key != "architecture"})
    return Case(config=config, model=decoder(architecture=architecture, num_hidden_layers=2))


def _said(name: str, values: dict[str, Any]) -> list[str]:
    """What the row of this name says about a config; rows are told apart by their reason."""
    rule = next(rule for rule in rules() if rule.name == name)
    start = rule.reason.split("{")[0]
    found = [finding for finding in check(_case(values)) if (finding.id, finding.where) == (rule.id, rule.key)]
    return [finding.message for finding in found if finding.message.startswith(start)]


@pytest.mark.parametrize("name", CASES)
def test_row_speaks_up(name: str) -> None:
    """The config that the row is about gets one finding of it."""
    assert len(_said(name, CASES[name][0])) == 1


@pytest.mark.parametrize("name", CASES)
def test_row_keeps_quiet(name: str) -> None:
    """The config that is fine gets none."""
    assert _said(name, CASES[name][1]) == []


def test_every_row_has_its_two_cases() -> None:
    """A new row without a failing and a passing config fails here."""
    names = [rule.name for rule in rules()]
    assert sorted(names) == sorted(CASES)


def test_every_row_blames_a_key_and_asks_for_facts_that_exist() -> None:
    """Names in the table are checked, because a misspelt one would never match."""
    known = set(facts(Case(config=gpu_config(), model=LLAMA_3_1_8B)))
    for rule in rules():
        assert rule.key in KEYS
        assert set(rule.when) <= known
        assert len(rule.source) > 15


def test_plain_config_has_no_finding_of_the_table() -> None:
    """Defaults on H100, A100 and L40S are quiet."""
    for gpu in ("H100", "A100", "L40S"):
        assert list(check(_case({"engine__gpu": gpu}))) == []


def test_reason_and_advice_name_the_values() -> None:
    """The message has the GPU and the format in question, and the finding its number."""
    (finding,) = check(_case({**AWQ, **L40S, f"{B}low_latency_gemm_plugin": "fp8"}))
    assert str(finding) == (
        "engine.build.low_latency_gemm_plugin: it multiplies FP8 weights, and the format is int4_awq. "
        "Remove it, or set quantization.format: fp8. [TL32]"
    )

"""Parameters of TensorRT-LLM's Triton backend: what is written for a config and an engine, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.config.trtllm_options import BackendParameters
from pipeline.errors import ConfigError
from pipeline.triton.backend_parameters import FIELDS
from pipeline.triton.model_config import parse
from pipeline.triton.repository import MODELS, emit
from tests.support.gpu_engine import llama_8b_fp8

pytestmark = pytest.mark.fast

# Option of the config -> parameter, value in the config, value in config.pbtxt: the table of the backend's settings
# (tensorrtllm_backend docs/model_config.md@5419275, model_instance_state.cc@0c8de69), each with a value of its own.
EVERY_PARAMETER: dict[str, tuple[str, Any, str]] = {
    "batching_strategy": ("gpt_model_type", "inflight_batching", "inflight_batching"),
    "encoder_engine_dir": ("encoder_model_path", "/models/encoder", "/models/encoder"),
    "max_beam_width": ("max_beam_width", 1, "1"),
    "max_tokens_in_paged_kv_cache": ("max_tokens_in_paged_kv_cache", 100000, "100000"),
    "max_attention_window_size": ("max_attention_window_size", "4096,8192", "4096,8192"),
    "sink_token_length": ("sink_token_length", 4, "4"),
    "batch_scheduler_policy": ("batch_scheduler_policy", "max_utilization", "max_utilization"),
    "kv_cache_free_gpu_mem_fraction": ("kv_cache_free_gpu_mem_fraction", 0.85, "0.85"),
    "cross_kv_cache_fraction": ("cross_kv_cache_fraction", 0.5, "0.5"),
    "kv_cache_host_memory_bytes": ("kv_cache_host_memory_bytes", 45000000, "45000000"),
    "kv_cache_onboard_blocks": ("kv_cache_onboard_blocks", False, "false"),
    "cancellation_check_period_ms": ("cancellation_check_period_ms", 50, "50"),
    "stats_check_period_ms": ("stats_check_period_ms", 200, "200"),
    "iter_stats_max_iterations": ("iter_stats_max_iterations", 10, "10"),
    "request_stats_max_iterations": ("request_stats_max_iterations", 11, "11"),
    "recv_poll_period_ms": ("recv_poll_period_ms", 5, "5"),
    "enable_kv_cache_reuse": ("enable_kv_cache_reuse", False, "false"),
    "normalize_log_probs": ("normalize_log_probs", False, "false"),
    "enable_chunked_context": ("enable_chunked_context", False, "false"),
    "gpu_device_ids": ("gpu_device_ids", "1", "1"),
    "participant_ids": ("participant_ids", "1", "1"),
    "num_nodes": ("num_nodes", 1, "1"),
    "lora_cache_optimal_adapter_size": ("lora_cache_optimal_adapter_size", 16, "16"),
    "lora_cache_max_adapter_size": ("lora_cache_max_adapter_size", 32, "32"),
    "lora_cache_gpu_memory_fraction": ("lora_cache_gpu_memory_fraction", 0.1, "0.1"),
    "lora_cache_host_memory_bytes": ("lora_cache_host_memory_bytes", 1 << 30, "1073741824"),
    "lora_prefetch_dir": ("lora_prefetch_dir", "/adapters", "/adapters"),
    "decoding_mode": ("decoding_mode", "lookahead", "lookahead"),
    "executor_worker_path": ("executor_worker_path", "/w/trtllmExecutorWorker", "/w/trtllmExecutorWorker"),
    "lookahead_window_size": ("lookahead_window_size", 3, "3"),
    "lookahead_ngram_size": ("lookahead_ngram_size", 4, "4"),
    "lookahead_verification_set_size": ("lookahead_verification_set_size", 5, "5"),
    "medusa_choices": ("medusa_choices", "{0}, {0, 0}", "{0}, {0, 0}"),
    "eagle_choices": ("eagle_choices", "{0}, {0, 1}", "{0}, {0, 1}"),
    "gpu_weights_percent": ("gpu_weights_percent", 0.9, "0.9"),
    "enable_context_fmha_fp32_acc": ("enable_context_fmha_fp32_acc", True, "true"),
    "multi_block_mode": ("multi_block_mode", False, "false"),
    "cuda_graph_mode": ("cuda_graph_mode", True, "true"),
    "cuda_graph_cache_size": ("cuda_graph_cache_size", 8, "8"),
    "speculative_decoding_fast_logits": ("speculative_decoding_fast_logits", True, "true"),
    "guided_decoding_backend": ("guided_decoding_backend", "xgrammar", "xgrammar"),
    "xgrammar_tokenizer_info_path": ("xgrammar_tokenizer_info_path", "/x.json", "/x.json"),
}


def emitted(tmp_path: Path, serving: dict[str, Any] | None = None, **engine: Any) -> tuple[dict[str, Any], Path]:
    """Configurations of an emitted repository, and the repository."""
    out = tmp_path / "out"
    emit(llama_8b_fp8(tmp_path / "engine", **engine), ServingConfig.model_validate(serving or {}), name="x", out=out)
    return {model: parse((out / model / "config.pbtxt").read_text(), model) for model in MODELS}, out


def parameters(tmp_path: Path, serving: dict[str, Any] | None = None, **engine: Any) -> dict[str, str]:
    """Parameters of the core model."""
    configs, _ = emitted(tmp_path, serving, **engine)
    return {key: value.string_value for key, value in configs["tensorrt_llm"].parameters.items()}


def test_every_parameter_of_the_backend_has_a_key_in_the_config() -> None:
    """The schema offers the whole table, and nothing beside it but fields of the configuration."""
    assert set(BackendParameters.model_fields) == {*EVERY_PARAMETER, *FIELDS}


def test_every_parameter_is_reachable_under_upstreams_name(tmp_path: Path) -> None:
    """What the config says is what config.pbtxt says."""
    wishes = {option: value for option, (_, value, _) in EVERY_PARAMETER.items()}
    serving = {"tensorrt_llm": wishes, "launch_mode": "orchestrator_no_spawn"}
    build = {"speculative_decoding_mode": 8, "weight_streaming": True}
    written = parameters(tmp_path, serving, build=build, plugins={"lora_plugin": "bfloat16"})
    assert {key: written[key] for key, _, _ in EVERY_PARAMETER.values()} == {
        key: text for key, _, text in EVERY_PARAMETER.values()
    }


def test_default_for_llama_8b_fp8_on_h100(tmp_path: Path) -> None:
    """The whole parameter section: what is decided, the three keys that must exist, and nothing else."""
    assert parameters(tmp_path) == {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "enable_chunked_context": "true",
        "enable_kv_cache_reuse": "true",
        "exclude_input_in_output": "true",
        "gpt_model_path": "/models/tensorrt_llm/1/engine",
        "gpt_model_type": "inflight_fused_batching",
        "guided_decoding_backend": "",
        "max_beam_width": "1",
        "tokenizer_dir": "",
        "xgrammar_tokenizer_info_path": "",
    }


def test_engine_without_paged_attention_serves_without_reuse_and_says_why(tmp_path: Path) -> None:
    """INT8 KV and others turn paged context FMHA off; the model would not load with reuse or chunked context."""
    choice = {"what": "use_paged_context_fmha", "value": "disable", "why": "an INT8 KV cache turns it off."}
    plugins = {"use_paged_context_fmha": False}
    configs, out = emitted(tmp_path, plugins=plugins, choices=[choice])
    written = configs["tensorrt_llm"].parameters
    assert written["enable_kv_cache_reuse"].string_value == "false"
    assert written["enable_chunked_context"].string_value == "false"
    assert "an INT8 KV cache turns it off" in (out / "README.md").read_text()


def test_engine_wins_over_kv_section_and_serving_over_both(tmp_path: Path) -> None:
    """engine.kv_cache values are used; serving.tensorrt_llm goes before them."""
    cache = {
        "enable_block_reuse": False,
        "free_gpu_memory_fraction": 0.8,
        "host_memory_bytes": 1000,
        "size_gib": 2.0,
    }
    serving = {"tensorrt_llm": {"kv_cache_host_memory_bytes": 7}}
    written = parameters(tmp_path, serving, kv_cache=cache)
    assert written["enable_kv_cache_reuse"] == "false"
    assert written["kv_cache_free_gpu_mem_fraction"] == "0.8"
    assert written["kv_cache_host_memory_bytes"] == "7"
    # 2 GiB over 2 (key, value) x 32 layers x 8 heads x 128 x 1 byte (FP8).
    assert written["max_tokens_in_paged_kv_cache"] == str(2 * 2**30 // (2 * 32 * 8 * 128))


def test_speculative_mode_of_the_engine_sets_the_decoder(tmp_path: Path) -> None:
    """A Medusa engine is decoded as one."""
    assert parameters(tmp_path, build={"speculative_decoding_mode": 4})["decoding_mode"] == "medusa"


def test_orchestrator_without_spawning_gets_participant_ids(tmp_path: Path) -> None:
    """Ranks count from 1; rank 0 orchestrates."""
    written = parameters(tmp_path, {"launch_mode": "orchestrator_no_spawn"}, world_size=2)
    assert written["participant_ids"] == "1,2"


def test_adapters_of_a_high_rank_fit_the_cache(tmp_path: Path) -> None:
    """The backend's default of 64 would refuse them."""
    choices = [{"what": "max_lora_rank", "value": 128, "why": ""}]
    written = parameters(tmp_path, plugins={"lora_plugin": "bfloat16"}, choices=choices)
    assert written["lora_cache_max_adapter_size"] == "128"


def test_guided_decoding_gets_its_tokenizer_facts(tmp_path: Path) -> None:
    """The file has the keys that the backend reads, and its vocabulary is by id."""
    from tokenizers import Tokenizer

    configs, out = emitted(tmp_path, {"tensorrt_llm": {"guided_decoding_backend": "xgrammar"}})
    path = configs["tensorrt_llm"].parameters["xgrammar_tokenizer_info_path"].string_value
    assert path == "/models/tensorrt_llm/1/xgrammar_tokenizer_info.json"
    info = json.loads((out / path.removeprefix("/models/")).read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "engine" / "tokenizer" / "tokenizer.json"))
    assert set(info) == {"encoded_vocab", "tokenizer_str", "stop_token_ids"}
    assert [tokenizer.token_to_id(token) for token in info["encoded_vocab"]] == list(range(tokenizer.get_vocab_size()))
    assert Tokenizer.from_str(info["tokenizer_str"]).encode("Paris").ids == tokenizer.encode("Paris").ids
    assert info["stop_token_ids"] == [2, 0]


def test_logits_type_is_the_engines_in_every_model(tmp_path: Path) -> None:
    """float16 logits are TYPE_FP16 in core, ensemble and BLS."""
    from tritonclient.grpc.model_config_pb2 import TYPE_FP16

    configs, _ = emitted(tmp_path, pretrained={"logits_dtype": "float16"})
    types = {
        (model, tensor.name): tensor.data_type
        for model, config in configs.items()
        for tensor in (*config.input, *config.output)
        if tensor.name in ("draft_logits", "context_logits", "generation_logits")
    }
    assert len(types) == 7
    assert set(types.values()) == {TYPE_FP16}


def test_prompt_tables_take_the_engines_type_when_it_has_them(tmp_path: Path) -> None:
    """A bfloat16 engine with prompt tuning reads TYPE_BF16 in core, ensemble and BLS."""
    from tritonclient.grpc.model_config_pb2 import TYPE_BF16

    configs, _ = emitted(tmp_path, build={"max_prompt_embedding_table_size": 1024})
    tables = [t for config in configs.values() for t in config.input if t.name == "prompt_embedding_table"]
    assert [table.data_type for table in tables] == [TYPE_BF16] * 3


def test_batch_sizes_are_equal_and_follow_the_wish(tmp_path: Path) -> None:
    """All five models get the smaller batch size."""
    configs, _ = emitted(tmp_path, {"tensorrt_llm": {"triton_max_batch_size": 8}})
    assert {config.max_batch_size for config in configs.values()} == {8}
    assert list(configs["tensorrt_llm"].dynamic_batching.preferred_batch_size) == [8]


def test_queue_policy_is_written(tmp_path: Path) -> None:
    """Limit, time-out, priorities and delay stand where Triton and the backend read them."""
    policy = {
        "default_timeout_microseconds": 5000,
        "timeout_action": "DELAY",
        "allow_timeout_override": True,
        "priority_levels": 3,
        "default_priority_level": 2,
    }
    serving = {
        "max_queue_size": 17,
        "queue_policy": policy,
        "tensorrt_llm": {"max_queue_delay_microseconds": 100},
    }
    configs, _ = emitted(tmp_path, serving)
    batching = configs["tensorrt_llm"].dynamic_batching
    queue = batching.default_queue_policy
    assert (queue.max_queue_size, queue.default_timeout_microseconds, queue.timeout_action) == (17, 5000, queue.DELAY)
    assert queue.allow_timeout_override
    assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
    assert batching.max_queue_delay_microseconds == 100


@pytest.mark.parametrize(
    ("serving", "engine", "words"),
    [
        ({"tensorrt_llm": {"triton_max_batch_size": 65}}, {}, "65 is more than the engine's max_batch_size 64"),
        ({"tensorrt_llm": {"max_beam_width": 2}}, {}, "2 is more than the engine's max_beam_width 1"),
        ({"tensorrt_llm": {"logits_datatype": "TYPE_FP16"}}, {}, "the engine's logits are TYPE_FP32"),
        (
            {"tensorrt_llm": {"enable_kv_cache_reuse": True}},
            {"plugins": {"use_paged_context_fmha": False}},
            "no paged context FMHA",
        ),
        (
            {"tensorrt_llm": {"enable_chunked_context": True}},
            {"plugins": {"use_paged_context_fmha": False}},
            "serving.tensorrt_llm.enable_chunked_context: true",
        ),
        ({"tensorrt_llm": {"decoding_mode": "eagle"}}, {}, "built for none of its kind"),
        (
            {"tensorrt_llm": {"decoding_mode": "top_k"}},
            {"build": {"speculative_decoding_mode": 4}},
            "the engine was built for medusa",
        ),
        ({}, {"build": {"speculative_decoding_mode": 8}}, "lookahead_ngram_size: is empty"),
        ({"tensorrt_llm": {"speculative_decoding_fast_logits": True}}, {}, "processes that are not spawned"),
        ({"tensorrt_llm": {"gpu_weights_percent": 0.5}}, {}, "the engine cannot stream weights"),
        ({"tensorrt_llm": {"lora_prefetch_dir": "/a"}}, {}, "the engine has no lora_plugin"),
        ({"tensorrt_llm": {"max_tokens_in_paged_kv_cache": 100}}, {}, "do not hold one sequence of max_seq_len 8192"),
        ({"tensorrt_llm": {"cross_kv_cache_fraction": 0.5}}, {}, "belong together"),
        ({"tensorrt_llm": {"decoupled_mode": False}}, {}, "answer through streams"),
        ({"bls": {"tensorrt_llm_draft_model_name": "draft"}}, {}, "'draft' cannot be called"),
        ({"bls": {"tensorrt_llm_model_name": "other"}}, {}, "'other' is not the engine's model"),
        ({"queue_policy": {"priority_levels": 2}}, {}, "0 is not one of the levels 1 to 2"),
    ],
)
def test_wish_that_cannot_be_honoured_is_refused(
    tmp_path: Path, serving: dict[str, Any], engine: dict[str, Any], words: str
) -> None:
    """Each refusal names the key and the reason."""
    with pytest.raises(ConfigError) as caught:
        emitted(tmp_path, serving, **engine)
    assert words in str(caught.value)


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    """Three impossible wishes are three problems."""
    wishes = {"max_beam_width": 4, "lora_prefetch_dir": "/a", "decoding_mode": "medusa"}
    with pytest.raises(ConfigError) as caught:
        emitted(tmp_path, {"tensorrt_llm": wishes})
    assert len(caught.value.problems) == 3

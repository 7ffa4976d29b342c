"""Options of the GPU targets: upstream's names and values, one key each, and what has no effect elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.keys import KEYS
from pipeline.config.load import load
from pipeline.config.trtllm_options import BackendParameters, BuildOptions
from pipeline.errors import ConfigError
from tests.support import trtllm_build_standin as standin

pytestmark = pytest.mark.fast

# Flags of trtllm-build (2.1) that are a key elsewhere, or that the build itself decides.
ELSEWHERE = {
    "checkpoint_dir": "a path of the build",
    "output_dir": "a path of the build",
    "model_config": "no weights",
    "build_config": "would switch the shape flags off",
    "paged_kv_cache": "deprecated",
    "max_batch_size": "engine.max_batch_size",
    "max_input_len": "engine.max_input_len",
    "max_seq_len": "engine.max_seq_len",
    "max_beam_width": "engine.max_beam_width",
    "max_num_tokens": "engine.max_num_tokens",
    "opt_num_tokens": "engine.opt_num_tokens",
    "kv_cache_type": "engine.kv_cache.type",
    "tokens_per_block": "engine.kv_cache.tokens_per_block",
}
# Parameters of the backend in 7.2, copied by hand: every template variable and every key without one.
BACKEND = [
    "triton_max_batch_size",
    "decoupled_mode",
    "max_queue_delay_microseconds",
    "batching_strategy",
    "encoder_input_features_data_type",
    "prompt_embedding_table_data_type",
    "logits_datatype",
    "encoder_engine_dir",
    "max_beam_width",
    "max_tokens_in_paged_kv_cache",
    "max_attention_window_size",
    "sink_token_length",
    "batch_scheduler_policy",
    "kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction",
    "kv_cache_host_memory_bytes",
    "kv_cache_onboard_blocks",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "recv_poll_period_ms",
    "enable_kv_cache_reuse",
    "normalize_log_probs",
    "enable_chunked_context",
    "gpu_device_ids",
    "participant_ids",
    "num_nodes",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_prefetch_dir",
    "decoding_mode",
    "executor_worker_path",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "medusa_choices",
    "eagle_choices",
    "gpu_weights_percent",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
    "cuda_graph_cache_size",
    "speculative_decoding_fast_logits",
    "guided_decoding_backend",
    "xgrammar_tokenizer_info_path",
]


def written(tmp_path: Path, *lines: str) -> Path:
    """A config file with these lines below name and source."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nsource: {path: m}\n" + "\n".join(lines) + "\n")
    return path


def test_every_flag_of_trtllm_build_is_a_key_or_is_decided_elsewhere() -> None:
    """No option of 2.1 and 2.2 is out of reach, and none is invented."""
    flags = {action.dest for action in standin.parser()._actions} - {"help"}
    own = {"where", "image_tag", "image"}
    assert set(BuildOptions.model_fields) - own == flags - set(ELSEWHERE)
    assert all(place in KEYS for place in ELSEWHERE.values() if place.startswith("engine."))


def test_the_values_of_a_flag_are_upstreams() -> None:
    """An enumeration takes exactly what argparse takes."""
    for action in standin.parser()._actions:
        key = KEYS.get(f"engine.build.{action.dest}")
        if key is not None and action.choices is not None:
            assert set(key.choices) == set(action.choices), action.dest


def test_every_parameter_of_the_backend_is_a_key() -> None:
    """7.2: all but engine_dir, tokenizer_dir, max_queue_size and triton_backend, which the repository fills."""
    assert set(BackendParameters.model_fields) == set(BACKEND)


def test_backend_parameters_are_unset_unless_written() -> None:
    """Only the batching strategy, which is mandatory, has a value."""
    values = BackendParameters().model_dump()
    assert {name for name, value in values.items() if value is not None} == {"batching_strategy"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine: {target: tensorrt_llm, gpu: H100, toolchain: 1.3.0rc9}", "have no trtllm-build"),
        (
            "engine: {target: tensorrt_llm, gpu: H100, build: {reduce_fusion: true}}",
            "Write enable, as trtllm-build does",
        ),
        ("engine: {target: tensorrt_llm, gpu: H100, build: {gemm_plugin: int8}}", "is not a plugin type"),
        ("engine: {target: tensorrt_llm, gpu: H100, build: {use_xqa: on}}", "unknown key 'use_xqa'"),
        ("serving: {tensorrt_llm: {max_attention_window_size: '1;2'}}", "is not a comma list of window sizes"),
    ],
)
def test_a_value_that_upstream_does_not_take_is_refused(tmp_path: Path, line: str, expected: str) -> None:
    """The message says what to write."""
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, line))
    assert expected in str(caught.value)


def test_a_tag_that_looks_like_a_number_stays_a_text(tmp_path: Path) -> None:
    """26.10 is a release and no 26.1."""
    line = "engine: {target: tensorrt_llm, gpu: H100, build: {image_tag: 26.10}}"
    assert load(written(tmp_path, line)).config.engine.build.image_tag == "26.10"


@pytest.mark.parametrize(
    ("target", "line", "key"),
    [
        ("openvino", "  build: {gemm_plugin: auto}", "engine.build.gemm_plugin"),
        ("openvino", "  preset: latency", "engine.preset"),
        ("openvino", "  toolchain: 1.0.0", "engine.toolchain"),
        ("tensorrt_llm_llmapi, gpu: H100", "  build: {multiple_profiles: enable}", "engine.build.multiple_profiles"),
    ],
)
def test_an_option_of_another_target_is_a_warning(tmp_path: Path, target: str, line: str, key: str) -> None:
    """The same config switches targets by one key, and is told what it loses."""
    path = written(tmp_path, "engine:", *f"  target: {target}".replace(", ", "\n  ").split("\n"), line)
    (warning,) = load(path).warnings
    assert warning.where.endswith(key)
    assert "has no effect with target" in warning.message


def test_every_option_has_an_effect_on_the_engine_target(tmp_path: Path) -> None:
    """No warning for a full engine config."""
    lines = ["engine:", "  target: tensorrt_llm", "  gpu: H100", "  preset: latency", "  max_beam_width: 2"]
    lines += ["  build: {gemm_plugin: fp8}", "serving:", "  tensorrt_llm: {multi_block_mode: true}"]
    assert load(written(tmp_path, *lines)).warnings == ()

"""Words of other tools: each is answered with ours, or with the reason why there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.keys import KEYS
from pipeline.config.load import load
from pipeline.config.words import key_hint, nearest, path_hint, plain, value_hint, vocabulary
from pipeline.errors import ConfigError

pytestmark = pytest.mark.fast


def test_the_vocabulary_points_only_at_keys_and_values_that_exist() -> None:
    """Every `use` is a key path or an allowed value, every word has a source, and none is our own word."""
    words = vocabulary()
    assert len(words.keys) >= 120
    for name, word in words.keys.items():
        assert word.source, name
        assert word.use or word.why, name
        assert not word.use or word.use in KEYS, name
    assert {"quantization.format", "quantization.kv_cache", "engine.target", "engine.gpu", "engine.dtype"} <= set(
        words.values
    )
    assert set(words.values) <= set(KEYS)
    for path, values in words.values.items():
        for name, word in values.items():
            assert word.source, name
            assert word.use in KEYS[path].choices if word.use else word.why, name
            assert name not in [plain(str(choice)) for choice in KEYS[path].choices]


@pytest.mark.parametrize(
    ("section", "name", "expected"),
    [
        ("engine", "max_num_seqs", "Here it is 'engine.max_batch_size'."),
        ("engine", "max-num-batched-tokens", "Here it is 'engine.max_num_tokens'."),
        ("engine", "tp_size", "Here it is 'engine.tensor_parallel_size'."),
        ("quantization", "qformat", "Here it is 'quantization.format'."),
        ("quantization", "awq_block_size", "Here it is 'quantization.group_size'."),
        ("calibration", "calib_size", "Here it is 'calibration.num_samples'."),
        ("engine", "KV_CACHE_PRECISION", "Here it is 'quantization.kv_cache'."),
        ("engine", "gpu_memory_utilization", "share of the whole device"),
        (
            "engine",
            "free_gpu_memory_fraction",
            "It belongs to another section: 'engine.kv_cache.free_gpu_memory_fraction'",
        ),
        ("engine", "kv_cache_free_gpu_mem_fraction", "'serving.tensorrt_llm.kv_cache_free_gpu_mem_fraction'"),
        ("engine", "beam_width", "Here it is 'engine.max_beam_width'."),
        ("engine", "gemm_plugin", "It belongs to another section: 'engine.build.gemm_plugin'."),
        ("engine.build", "tokens_per_block", "It belongs to another section: 'engine.kv_cache.tokens_per_block'."),
        ("engine.build", "max_output_len", "Here it is 'serving.default_max_tokens'"),
        ("engine.build", "use_custom_all_reduce", "It is no setting here (trtllm-build chooses the all-reduce"),
        ("engine.build", "enable_xqa", "the flag was removed in 0.16"),
        ("engine.build", "use_inflight_batching", "Here it is 'engine.kv_cache.type'"),
        ("engine.build", "world_size", "It is no setting here (it is tensor_parallel_size x"),
        ("engine.build", "builder_force_num_profiles", "Here it is 'engine.build.multiple_profiles'"),
        ("engine.build", "use_embedding_sharing", "It is no setting here (the flag is gone"),
        ("engine.build", "lookup_plugin", "It is no setting here (the flag is gone"),
        (
            "engine.build",
            "context_fmha_fp32_acc",
            "Here it is 'serving.tensorrt_llm.enable_context_fmha_fp32_acc' (it moved from the build to the runtime).",
        ),
        ("engine.build", "paged_kv_cache", "Here it is 'engine.kv_cache.type'"),
        ("engine.build", "multi_block_mode", "It belongs to another section: 'serving.tensorrt_llm.multi_block_mode'."),
        ("quantization", "max_batch_size", "It belongs to another section: 'engine.max_batch_size'."),
        ("engine", "max_batchsize", "Did you mean 'max_batch_size'?"),
        ("quantization", "max_batchsize", "Did you mean 'engine.max_batch_size'?"),
        ("serving", "zzz", "Valid: max_queue_size, preprocessing_instance_count"),
    ],
)
def test_a_foreign_key_is_answered_with_ours(section: str, name: str, expected: str) -> None:
    """The hint names our key, and the difference when the meaning is another."""
    assert expected in key_hint(KEYS[section], name)


@pytest.mark.parametrize(
    ("path", "value", "reason", "hint"),
    [
        ("quantization.format", "nvfp4", "needs SM 100 or newer", "Valid: bf16"),
        ("quantization.format", "INT2", "15 to 30 %", "Valid: bf16"),
        ("quantization.format", "mxfp4", "Blackwell (SM 100)", "Valid: bf16"),
        ("quantization.format", "mxfp8", "Blackwell (SM 100)", "Valid: bf16"),
        ("quantization.format", "INT3", "trtpipe probe CONFIG --format int2", "Valid: bf16"),
        ("quantization.format", "gptq", "name it in source and leave the format out", "Valid: bf16"),
        ("quantization.format", "int4_gptq", "name it in source and leave the format out", "Valid: bf16"),
        ("quantization.format", "AutoAWQ", "names a tool, not a format", "Valid: bf16"),
        ("quantization.format", "fp8_per_channel_per_token", "", "Here it is 'fp8_rowwise'"),
        ("quantization.format", "fp8_block_scales", "passed on to tensorrt_llm_llmapi and vllm", "Valid: bf16"),
        ("quantization.format", "hqq", "no target here serves it", "Valid: bf16"),
        ("quantization.format", "w4a8", "", "Here it is 'w4a8_awq' (INT4 weights with FP8 activations)."),
        ("engine.toolchain", "1.3.0rc7", "have no trtllm-build", "Valid: 1.2.1, 1.0.0."),
        ("engine.toolchain", "1.3", "have no trtllm-build", "Valid: 1.2.1, 1.0.0."),
        ("engine.toolchain", "latest", "an open one resolves to a release without trtllm-build", "Valid: 1.2.1"),
        ("engine.toolchain", ">=1.2", "an open one resolves to a release without trtllm-build", "Valid: 1.2.1"),
        ("engine.build.reduce_fusion", True, "", "Write enable, as trtllm-build does."),
        ("engine.build.reduce_fusion", "off", "", "Write disable, as trtllm-build does."),
        ("engine.build.speculative_decoding_mode", "redrafter", "", "Here it is 'explicit_draft_tokens'"),
        ("serving.tensorrt_llm.batching_strategy", "V1", "static batching was removed", "Valid: inflight_fused"),
        ("quantization.format", "nf4", "trtpipe probe CONFIG --format nf4", "Valid: bf16"),
        ("quantization.format", "awq", "", "Here it is 'int4_awq'."),
        ("quantization.format", "FP8", "", "Did you mean 'fp8'?"),
        ("quantization.kv_cache", "fp8_cast", "silently loses", "Valid: auto"),
        ("engine.gpu", "h100", "", "Did you mean 'H100'?"),
        ("engine.gpu", "B200", "Blackwell is not supported", "Valid: H100"),
        ("engine.dtype", "half", "", "Here it is 'float16'."),
        ("engine.target", "sglang", "no such target", "Valid: openvino, tensorrt_llm"),
        ("quantization.group_size", 48, "", "The nearest is 32."),
    ],
)
def test_a_foreign_value_is_translated_or_refused_with_a_reason(
    path: str, value: object, reason: str, hint: str
) -> None:
    """Known formats that are not taken say why, instead of only 'not a format'."""
    why, what = value_hint(KEYS[path], value)
    assert reason in why if reason else why == ""
    assert hint in what


def test_a_refused_format_reaches_the_user_with_its_reason(tmp_path: Path) -> None:
    """The reason is part of the config error."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nsource: {path: m}\nquantization:\n  format: nvfp4\n")
    with pytest.raises(ConfigError, match=r":4 quantization.format: 'nvfp4' is refused: NVFP4 needs SM 100"):
        load(path)


def test_every_reason_against_a_format_names_what_to_write() -> None:
    """A refusal that only refuses leaves the user where he was."""
    for name, word in vocabulary().values["quantization.format"].items():
        assert word.use or re.search(r"[Pp]ick \w|leave the format out", word.why), name


def test_nearest_gives_nothing_when_nothing_is_close() -> None:
    """A wild guess is worse than none."""
    assert nearest("banana", ["max_batch_size", "name"]) is None


def test_a_path_below_a_value_says_that_it_has_no_keys() -> None:
    """`--set engine.max_batch_size.x=1` is told what max_batch_size takes."""
    assert path_hint("engine.max_batch_size.x").startswith("'engine.max_batch_size' takes a whole number")

"""What the CPU engine is told: fixed rules over config and model, each with a reason."""

from __future__ import annotations

import pytest

from pipeline.config.deployment import EngineConfig, KVCacheConfig
from pipeline.config.schema import Format
from pipeline.errors import ConfigError
from pipeline.targets.openvino.choices import AUTO, ModelFacts, choose, deviations, kv_block_bytes

pytestmark = pytest.mark.fast

MODEL = ModelFacts(
    vocab_size=49152, max_position_embeddings=8192, num_hidden_layers=30, num_key_value_heads=3, head_dim=64
)
FORMATS: tuple[Format, ...] = ("bf16", "fp16", "fp8", "int8_sq", "int4_awq")


@pytest.mark.parametrize("name", FORMATS)
def test_every_choice_has_a_reason(name: Format) -> None:
    """No setting reaches the device or the scheduler unexplained."""
    plan = choose(EngineConfig(), [name], "auto", MODEL)
    explained = {choice.what for choice in plan.choices if choice.why}
    assert set(plan.plugin_config) | set(plan.scheduler) <= explained


def test_what_is_left_to_the_serving_machine_is_not_in_the_device_properties() -> None:
    """'auto' is a word for people; OpenVINO would refuse it as a number of threads."""
    plan = choose(EngineConfig(), ["bf16"], "auto", MODEL)
    assert AUTO not in plan.plugin_config.values()
    assert "INFERENCE_NUM_THREADS" not in plan.plugin_config
    assert choose(EngineConfig(num_threads=3), ["bf16"], "auto", MODEL).plugin_config["INFERENCE_NUM_THREADS"] == 3


def test_paging_chunking_and_prefix_caching_are_on_by_default() -> None:
    """The defaults of a config give continuous batching with all that serving expects."""
    scheduler = choose(EngineConfig(), ["int4_awq"], "auto", MODEL).scheduler
    assert scheduler == {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": True,
        "cache_size": 0,
    }


def test_without_chunking_a_whole_prompt_fits_into_an_iteration() -> None:
    """A longer prompt would end the engine loop with an error."""
    engine = EngineConfig(enable_chunked_context=False, max_num_tokens=512, max_seq_len=4096)
    assert choose(engine, ["bf16"], "auto", MODEL).scheduler["max_num_batched_tokens"] == 4096


def test_a_kv_cache_size_becomes_blocks() -> None:
    """OpenVINO counts cache_size in whole GB; blocks allow any size."""
    engine = EngineConfig(kv_cache=KVCacheConfig(size_gib=0.5))
    scheduler = choose(engine, ["bf16"], "auto", MODEL).scheduler
    assert "cache_size" not in scheduler
    assert scheduler["num_kv_blocks"] == (1 << 29) // (32 * 30 * 2 * 3 * 64 * 2)


def test_a_kv_cache_too_small_for_one_sequence_is_refused() -> None:
    """Such an engine would reject its longest legal request."""
    engine = EngineConfig(kv_cache=KVCacheConfig(size_gib=0.1))
    with pytest.raises(ConfigError, match="size_gib") as caught:
        choose(engine, ["bf16"], "auto", MODEL)
    assert "0.18 GiB" in caught.value.hint


def test_kv_blocks_have_the_size_that_openvino_reports() -> None:
    """PipelineMetrics.cache_size_in_bytes / num_kv_blocks of SmolLM2-135M, OpenVINO GenAI 2026.4.1."""
    assert kv_block_bytes(MODEL, "f16") == 737_280
    assert kv_block_bytes(MODEL, "u8") == 437_760


def test_an_int8_kv_cache_is_kept_as_u8() -> None:
    """The plugin's name for it."""
    assert choose(EngineConfig(), ["bf16"], "int8", MODEL).plugin_config["KV_CACHE_PRECISION"] == "u8"


def test_a_sequence_longer_than_the_model_knows_is_refused() -> None:
    """max_seq_len beyond max_position_embeddings gives garbage, not an error, at run time."""
    with pytest.raises(ConfigError, match="8192 positions"):
        choose(EngineConfig(max_seq_len=8193), ["bf16"], "auto", MODEL)


@pytest.mark.parametrize("name", FORMATS)
def test_deviations_name_the_format(name: Format) -> None:
    """The plan can say in words where the CPU differs."""
    assert deviations([name])[0].startswith(f"{name}: ")


def test_an_int8_kv_cache_is_told_as_a_deviation() -> None:
    """Its scales are not the calibrated ones."""
    assert len(deviations(["fp8"], "int8")) == 2


def test_layers_of_several_formats_deviate_as_each_format_does() -> None:
    """One sentence per format."""
    assert [words.partition(":")[0] for words in deviations(["int4_awq", "fp8"])] == ["int4_awq", "fp8"]


def test_one_integer_format_among_the_layers_decides_the_precision() -> None:
    """Dynamic quantization is for the integer weights; the others are multiplied in float32."""
    plan = choose(EngineConfig(), ["fp8", "int4_awq"], "auto", MODEL)
    assert plan.plugin_config["INFERENCE_PRECISION_HINT"] == "f32"
    assert plan.plugin_config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 32


def test_a_format_that_the_cpu_does_not_execute_is_refused_by_name() -> None:
    """The hint lists the formats that work."""
    with pytest.raises(ConfigError, match="w4a8_awq") as caught:
        deviations(["w4a8_awq"])
    assert "int4_awq" in caught.value.hint

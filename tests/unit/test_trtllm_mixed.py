"""Layers of several formats on the TensorRT-LLM targets: what may be mixed, and what the engine build is told."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.legality import check
from pipeline.config.schema import BuildConfig
from pipeline.quantize.trtllm_config import Ranks, checkpoint_config, layer_config
from pipeline.targets.tensorrt_llm.facts import QuantFacts
from pipeline.targets.tensorrt_llm.weights import weight_bytes
from tests.support.architectures import LLAMA_8B
from tests.support.model_facts import model_facts

pytestmark = pytest.mark.fast

NO_PAGING = {
    "enable_chunked_context": False,
    "max_seq_len": 4096,
    "max_num_tokens": 8192,
    "kv_cache": {"enable_block_reuse": False},
}


def build(*overrides: tuple[str, str], **changes: Any) -> BuildConfig:
    """int4_awq on an H100 with these overrides."""
    listed = tuple({"layers": layers, "format": form} for layers, form in overrides)
    engine = {"target": "tensorrt_llm", "gpu": "H100", **changes.pop("engine", {})}
    quantization = {"format": "int4_awq", "overrides": listed, **changes}
    return BuildConfig.model_validate(
        {"name": "a", "source": {"path": "m"}, "quantization": quantization, "engine": engine}
    )


def errors(config: BuildConfig) -> list[str]:
    """What stops the build."""
    return [str(problem) for problem in check(config, LLAMA_8B) if problem.severity == "error"]


@pytest.mark.parametrize("form", ["fp8", "w4a8_awq", "bf16"])
def test_what_upstream_mixes_is_allowed(form: str) -> None:
    """The formats of TensorRT-LLM's own mixtures, and layers at 16 bit."""
    assert errors(build(("*.mlp", form))) == []


@pytest.mark.parametrize(
    ("main", "other", "words"),
    [
        ("int4_awq", "int8_wo", "int8_wo is rounded by trtllm-build, for all layers or none"),
        ("fp8", "int8_sq", "TensorRT-LLM does not mix int8_sq with fp8"),
        ("int8_sq", "fp8", "TensorRT-LLM does not mix int8_sq with fp8"),
    ],
)
def test_what_upstream_does_not_mix_is_refused(main: str, other: str, words: str) -> None:
    """At the key to change."""
    (found,) = errors(build(("*.mlp", other), format=main))
    assert found.startswith("quantization.overrides: ")
    assert words in found


def test_an_fp8_cache_with_several_formats_has_no_paged_context() -> None:
    """FP8 attention is for checkpoints of one FP8 format; each of them alone would allow it."""
    found = errors(build(("*.mlp", "fp8"), format="w4a8_awq", kv_cache="fp8"))
    assert [problem.partition(":")[0] for problem in found] == [
        "engine.kv_cache.enable_block_reuse",
        "engine.enable_chunked_context",
    ]
    assert errors(build(("*.mlp", "fp8"), format="w4a8_awq", kv_cache="fp8", engine=NO_PAGING)) == []


def test_the_llm_api_reads_mixtures_of_its_formats() -> None:
    """fp8 and int4; int8_sq is refused in a mixture as it is alone."""
    target = {"target": "tensorrt_llm_llmapi"}
    assert errors(build(("*.mlp", "fp8"), engine=target)) == []
    assert len(errors(build(("*.mlp", "int8_sq"), engine=target))) == 1


def test_pipeline_stages_must_have_equal_layers() -> None:
    """One list names the layers of every stage from 0 on, of formats as of excludes."""
    pipeline = {"pipeline_parallel_size": 2}
    assert errors(build(("*.down_proj", "fp8"), engine=pipeline)) == []
    (found,) = errors(build(("model.layers.0.mlp", "fp8"), engine=pipeline))
    assert "layers 16 apart must have one format; mlp.gate_proj of layer 0 and 2 more do not." in found
    assert errors(build(("model.layers.0.mlp", "fp8"), ("model.layers.16.mlp", "fp8"), engine=pipeline)) == []
    (excluded,) = errors(build(exclude=("lm_head", "model.layers.0.mlp"), engine=pipeline))
    assert excluded.startswith("quantization.exclude: ")


def test_the_engine_build_is_told_mixed_precision_only_where_layers_differ() -> None:
    """Overrides that leave one format give a checkpoint of that format."""
    mixed = build(("*.mlp", "fp8")).quantization
    facts = QuantFacts.of_config(mixed, LLAMA_8B.linears, "bfloat16")
    assert facts.quant_algo == "MIXED_PRECISION"
    alike = build(("*.mlp", "fp8"), ("*.self_attn", "fp8")).quantization
    assert QuantFacts.of_config(alike, LLAMA_8B.linears, "bfloat16").quant_algo == "FP8"


def test_weights_are_counted_by_the_format_of_each_layer() -> None:
    """Twice the bits in one matrix of seven."""
    model = model_facts("llama-3.1-8b").architecture
    plain, mixed = (weight_bytes(build(*overrides), model) for overrides in ((), (("*.down_proj", "fp8"),)))
    down = sum(rows * columns for name, (rows, columns) in model.linears.items() if name.endswith("down_proj"))
    scales = down // 128 * 2 + 32 * model.intermediate_size * 2
    assert mixed - plain == pytest.approx(down / 2 - scales, rel=1e-3)


def test_quant_cfg_has_the_fields_that_the_engine_build_takes() -> None:
    """As ModelOpt 0.47 writes them; config.json keeps what is one for all layers."""
    quantization = build(group_size=64, kv_cache="int8").quantization
    written = layer_config(
        quantization, {"transformer.layers.0.mlp.fc": "int4_awq", "transformer.layers.0.mlp.proj": "fp8"}
    )
    assert written == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "INT8",
        "quantized_layers": {
            "transformer.layers.0.mlp.fc": {
                "quant_algo": "W4A16_AWQ",
                "group_size": 64,
                "has_zero_point": False,
                "pre_quant_scale": True,
            },
            "transformer.layers.0.mlp.proj": {"quant_algo": "FP8"},
        },
    }
    hf = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }  # fmt: skip
    config = checkpoint_config(hf, quantization, Ranks(), dtype="bfloat16", formats=("fp8", "int4_awq"))
    assert config["quantization"] == {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "INT8"}
    assert config["vocab_size"] == 512

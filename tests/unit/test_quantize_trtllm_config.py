"""config.json of a TensorRT-LLM checkpoint, against what upstream's config classes read."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.schema import QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.quantize.trtllm_config import Ranks, checkpoint_config, padded_vocabulary
from pipeline.quantize.trtllm_structure import MAPPING_KEYS, QUANTIZATION_KEYS
from tests.support.model_facts import model_facts

pytestmark = pytest.mark.fast

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
GEMMA_7B = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072, "intermediate_size": 24576, "max_position_embeddings": 8192, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip
PHI3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip


def config_of(
    hf: dict[str, Any], ranks: Ranks | None = None, excluded: tuple[str, ...] = (), **quantization: Any
) -> dict[str, Any]:
    """The checkpoint config of a bfloat16 model."""
    return checkpoint_config(
        hf, QuantizationConfig(**quantization), ranks or Ranks(), dtype="bfloat16", excluded=excluded
    )


def has(config: dict[str, Any], **wanted: object) -> bool:
    """Whether `config` holds every wanted field; shows those that differ."""
    found = {key: config.get(key) for key in wanted}
    assert found == wanted
    return True


def test_llama_31_keeps_its_rope_base_and_scaling() -> None:
    """Without rotary_scaling long prompts degrade in silence."""
    hf = model_facts("llama-3.1-8b").config
    config = config_of(hf)
    assert has(
        config, architecture="LlamaForCausalLM", rotary_base=500000.0, position_embedding_type="rope_gpt_neox",
        head_size=128, num_key_value_heads=8, vocab_size=128256, hidden_act="silu", norm_epsilon=1e-05,
        attn_bias=False, mlp_bias=False, intermediate_size=14336, max_position_embeddings=131072,
    )  # fmt: skip
    assert config["rotary_scaling"] == {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip


def test_rope_of_transformers_5_is_found() -> None:
    """From version 5 on base and scaling live in rope_parameters."""
    hf = dict(model_facts("llama-3.1-8b").config)
    scaling = hf.pop("rope_scaling")
    moved = hf | {"rope_parameters": {**scaling, "rope_theta": hf.pop("rope_theta")}, "rope_theta": None}
    assert has(config_of(moved), rotary_base=500000.0, rotary_scaling=scaling)


def test_a_default_rope_type_is_no_scaling() -> None:
    """Transformers writes it out; TensorRT-LLM knows no such type."""
    hf = model_facts("mistral-7b").config | {"rope_scaling": {"rope_type": "default"}}
    assert has(config_of(hf), rotary_scaling=None, rotary_base=1000000.0)


def test_llama_with_biases_says_so() -> None:
    """Otherwise the biases in the file are dropped with a warning."""
    hf = model_facts("llama-3.1-8b").config | {"attention_bias": True, "mlp_bias": True}
    assert has(config_of(hf), attn_bias=True, mlp_bias=True)


def test_qwen2_has_its_type_and_its_attention_bias() -> None:
    """No field of its Hugging Face config tells the bias."""
    assert has(
        config_of(model_facts("qwen2.5-7b").config), qwen_type="qwen2", attn_bias=True, mlp_bias=False,
        qk_layernorm=False, norm_epsilon=1e-06, rotary_base=1000000.0, intermediate_size=18944,
    )  # fmt: skip


def test_qwen3_normalizes_its_heads_and_has_no_bias() -> None:
    """And its head size is not hidden size over heads for every model."""
    assert has(
        config_of(QWEN3_8B), qwen_type="qwen3", attn_bias=False, qk_layernorm=True, head_size=128,
        rotary_embedding_dim=128,
    )  # fmt: skip


def test_gemma_keeps_its_activation_and_head_size() -> None:
    """head_dim 256 with 16 heads is wider than the hidden size."""
    assert has(config_of(GEMMA_7B), head_size=256, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)


def test_phi3_is_gated_in_one_tensor() -> None:
    """gate_up_proj is stored as one, and the activation is named swiglu."""
    assert has(config_of(PHI3_MINI_4K), hidden_act="swiglu", rotary_pct=1.0, position_embedding_type="rope_gpt_neox")


def test_phi3_with_long_context_has_two_sets_of_factors() -> None:
    """As Phi3Config.from_hugging_face writes them."""
    scaling = {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.2]}
    config = config_of(PHI3_MINI_4K | {"max_position_embeddings": 131072, "rope_scaling": scaling})
    assert has(
        config, position_embedding_type="long_rope", original_max_position_embeddings=4096,
        longrope_scaling_short_factors=[1.0, 1.1], longrope_scaling_long_factors=[2.0, 2.2],
    )  # fmt: skip


def test_mixtral_names_its_experts() -> None:
    """moe, an explicit gated activation, and experts cut like layers."""
    config = config_of(model_facts("mixtral-8x7b").config, Ranks(tensor=2))
    assert has(config, moe={"num_experts": 8, "top_k": 2, "normalization_mode": 1}, hidden_act="swiglu")
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1, "moe_tp_size": 2, "moe_ep_size": 1}


def test_an_unknown_architecture_is_refused_by_name() -> None:
    """Defaults for a model that nobody checked would build a wrong engine."""
    with pytest.raises(ConfigError, match="FalconForCausalLM"):
        config_of(model_facts("mistral-7b").config | {"architectures": ["FalconForCausalLM"]})


@pytest.mark.parametrize(
    ("form", "algorithm"),
    [
        ("bf16", None), ("fp8", "FP8"), ("int8_sq", "W8A8_SQ_PER_CHANNEL"), ("int4_awq", "W4A16_AWQ"),
        ("w4a8_awq", "W4A8_AWQ"), ("int8_wo", "W8A16"), ("int4_wo", "W4A16"),
    ],
)  # fmt: skip
def test_the_algorithm_is_one_of_the_librarys_names(form: str, algorithm: str | None) -> None:
    """An unknown string fails when the config is read."""
    quantization = config_of(model_facts("mistral-7b").config, format=form)["quantization"]
    assert quantization["quant_algo"] == algorithm


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo"])
def test_strict_sections_hold_known_keys_only(form: str) -> None:
    """Any other key is a TypeError in the engine build."""
    config = config_of(model_facts("mixtral-8x7b").config, Ranks(tensor=2, pipeline=2), format=form)
    assert set(config["quantization"]) <= QUANTIZATION_KEYS
    assert set(config["mapping"]) <= MAPPING_KEYS


def test_grouped_formats_say_their_group() -> None:
    """AWQ: group size, no zero point, a pre-quant scale."""
    quantization = config_of(model_facts("mistral-7b").config, format="int4_awq", group_size=64)["quantization"]
    assert has(quantization, group_size=64, has_zero_point=False, pre_quant_scale=True)


def test_the_kv_cache_has_its_own_algorithm() -> None:
    """FP8 or INT8 keys and values go with any weights."""
    quantization = config_of(model_facts("mistral-7b").config, kv_cache="int8")["quantization"]
    assert has(quantization, quant_algo=None, kv_cache_quant_algo="INT8")


def test_excludes_add_to_the_librarys_own_list_in_order() -> None:
    """A list of one's own replaces the default, so the default is part of it; sorted, because sets are not."""
    quantization = config_of(
        model_facts("mistral-7b").config, format="fp8", excluded=("transformer.layers.1.mlp.proj", "a")
    )["quantization"]
    assert quantization["exclude_modules"] == [
        "*block_embedding", "*lm_head", "*position_embedding", "*router", "*shared_expert_gate", "*vocab_embedding",
        "a", "transformer.layers.1.mlp.proj",
    ]  # fmt: skip


@pytest.mark.parametrize(("form", "vocabulary"), [("int4_awq", 512), ("w4a8_awq", 512), ("fp8", 500), ("bf16", 500)])
def test_awq_pads_the_vocabulary(form: Any, vocabulary: int) -> None:
    """To a multiple of 64; the engine's vocabulary is the padded one."""
    assert padded_vocabulary(500, (form,)) == vocabulary


def test_world_size_is_the_product_of_the_ranks() -> None:
    """Anything else is refused by the mapping."""
    mapping = config_of(model_facts("mistral-7b").config, Ranks(tensor=4, pipeline=2))["mapping"]
    assert mapping == {"world_size": 8, "tp_size": 4, "pp_size": 2}

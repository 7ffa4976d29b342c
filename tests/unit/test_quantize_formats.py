"""Which layers a format takes, and the config that says so to ModelOpt."""

from __future__ import annotations

import pytest

from pipeline.config.schema import QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.quantize.formats import (
    check_group_size,
    needs_calibration,
    quantizer_config,
    select_layers,
    stores_kv_scales,
)

pytestmark = pytest.mark.fast

LINEARS = {
    "model.layers.0.self_attn.q_proj": (576, 576),
    "model.layers.0.self_attn.o_proj": (576, 576),
    "model.layers.0.mlp.down_proj": (576, 1536),
    "lm_head": (49152, 576),
}
MODULES = ["model", "model.embed_tokens", "model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp", *LINEARS]


def _awq(**fields: object) -> QuantizationConfig:
    return QuantizationConfig.model_validate({"format": "int4_awq", **fields})


def test_the_head_stays_at_16_bit_by_default() -> None:
    """Everything else is quantized, in the model's order."""
    assert select_layers(LINEARS, MODULES, _awq()) == tuple(LINEARS)[:3]


def test_a_glob_that_names_a_container_excludes_what_is_in_it() -> None:
    """'*.mlp' means its projections."""
    selected = select_layers(LINEARS, MODULES, _awq(exclude=("lm_head", "*.mlp")))
    assert selected == tuple(LINEARS)[:2]


def test_a_glob_that_matches_nothing_is_refused() -> None:
    """A typing error must not quantize what was meant to stay."""
    with pytest.raises(ConfigError) as raised:
        select_layers(LINEARS, MODULES, _awq(exclude=("lm_head", "*.dwon_proj")))
    assert [problem.message for problem in raised.value.problems] == ["'*.dwon_proj' matches no module of this model."]


def test_excluding_everything_is_refused() -> None:
    """A quantized format with nothing quantized is a mistake."""
    with pytest.raises(ConfigError, match="leaves no layer"):
        select_layers(LINEARS, MODULES, _awq(exclude=("*",)))


def test_16_bit_formats_quantize_no_layer() -> None:
    """bf16 selects nothing, whatever is excluded."""
    assert select_layers(LINEARS, MODULES, QuantizationConfig(format="bf16")) == ()


def test_a_group_size_that_does_not_fit_names_the_layers_and_the_largest_that_does() -> None:
    """576 inputs are not a multiple of 128, and 64 fits all."""
    with pytest.raises(ConfigError, match="128 does not fit 3 of 4 layers") as raised:
        check_group_size(LINEARS, 128, 1)
    assert [problem.where for problem in raised.value.problems] == [name for name in LINEARS if "down" not in name]
    assert "group_size to 64" in raised.value.hint


def test_a_group_size_that_fits_is_accepted() -> None:
    """No error at 64."""
    check_group_size(LINEARS, 64, 1)


def test_tensor_parallel_ranks_cut_only_row_parallel_layers() -> None:
    """o_proj has 288 inputs on each of two ranks; q_proj keeps 576."""
    with pytest.raises(ConfigError) as raised:
        check_group_size(LINEARS, 64, 2)
    assert [problem.where for problem in raised.value.problems] == ["model.layers.0.self_attn.o_proj"]
    assert "group_size to 32" in raised.value.hint


def test_an_odd_number_of_outputs_cannot_be_packed() -> None:
    """Int4 packs two output rows into a byte."""
    with pytest.raises(ConfigError) as raised:
        check_group_size({"odd": (7, 64)}, 64, 1)
    assert raised.value.problems[0].where == "odd"
    assert "Exclude" in raised.value.hint


def test_no_group_size_that_fits_points_elsewhere() -> None:
    """17 inputs have no usable group."""
    with pytest.raises(ConfigError) as raised:
        check_group_size({"prime": (8, 17)}, 64, 1)
    assert "exclude" in raised.value.hint.lower()


def test_the_quantizer_list_denies_all_first_and_excludes_last() -> None:
    """The last match wins in ModelOpt, so excludes must close the list."""
    entries = quantizer_config(_awq(group_size=32), ["lm_head"], export="hf")["quant_cfg"]
    assert entries[0] == {"quantizer_name": "*", "enable": False}
    assert entries[-1] == {"quantizer_name": "lm_head.*", "enable": False}
    assert entries[1]["cfg"]["block_sizes"] == {-1: 32, "type": "static"}


def test_an_fp8_cache_adds_observers_of_keys_and_values() -> None:
    """In any weight format."""
    for name in ("bf16", "int8_sq"):
        quantization = QuantizationConfig.model_validate({"format": name, "kv_cache": "fp8"})
        assert quantizer_config(quantization, [], export="hf")["quant_cfg"][-1]["quantizer_name"] == (
            "*[kv]_bmm_quantizer"
        )
        assert needs_calibration(quantization, export="hf")


def test_smoothquant_takes_its_alpha_from_the_config() -> None:
    """Alpha is the user's."""
    quantization = QuantizationConfig(format="int8_sq", smoothquant_alpha=0.75)
    assert quantizer_config(quantization, [], export="hf")["algorithm"] == {"method": "smoothquant", "alpha": 0.75}


def test_weight_only_formats_name_the_layers_that_the_build_rounds() -> None:
    """ModelOpt quantizes nothing for them; the exclude list still has to say what stays."""
    quantization = QuantizationConfig(format="int8_wo", exclude=("lm_head", "*.mlp"))
    assert select_layers(LINEARS, MODULES, quantization) == tuple(LINEARS)[:2]
    assert [entry["quantizer_name"] for entry in quantizer_config(quantization, [], export="trtllm")["quant_cfg"]] == [
        "*"
    ]


def test_w4a8_rounds_weights_twice_and_activations_once() -> None:
    """Int4 in groups, then float8; activations to float8."""
    entries = quantizer_config(_awq(format="w4a8_awq", group_size=128), [], export="trtllm")["quant_cfg"]
    assert [stage["num_bits"] for stage in entries[1]["cfg"]] == [4, (4, 3)]
    assert entries[2] == {
        "quantizer_name": "*input_quantizer",
        "parent_class": "nn.Linear",
        "cfg": {"num_bits": (4, 3), "axis": None},
    }


def test_an_int8_cache_has_scales_in_the_tensorrt_llm_checkpoint_only() -> None:
    """The unified Hugging Face checkpoint has no place for them."""
    quantization = QuantizationConfig(format="bf16", kv_cache="int8")
    assert stores_kv_scales(quantization, export="trtllm")
    assert not needs_calibration(quantization, export="hf")

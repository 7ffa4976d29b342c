"""Which layers a format takes, and the config that says so to ModelOpt."""

from __future__ import annotations

import pytest

from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.quantize.formats import (
    algorithm,
    by_glob,
    check_group_size,
    layer_formats,
    needs_text,
    observes,
    quantizer_config,
    stores_kv_scales,
    whole_model_config,
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
    assert layer_formats(LINEARS, MODULES, _awq()) == dict.fromkeys(tuple(LINEARS)[:3], "int4_awq")


def test_a_glob_that_names_a_container_excludes_what_is_in_it() -> None:
    """'*.mlp' means its projections."""
    selected = tuple(layer_formats(LINEARS, MODULES, _awq(exclude=("lm_head", "*.mlp"))))
    assert selected == tuple(LINEARS)[:2]


def test_a_glob_that_matches_nothing_is_refused() -> None:
    """A typing error must not quantize what was meant to stay."""
    with pytest.raises(ConfigError) as raised:
        layer_formats(LINEARS, MODULES, _awq(exclude=("lm_head", "*.dwon_proj")))
    assert [problem.message for problem in raised.value.problems] == ["'*.dwon_proj' matches no module of this model."]


def test_excluding_everything_is_refused() -> None:
    """A quantized format with nothing quantized is a mistake."""
    with pytest.raises(ConfigError, match="leaves no layer"):
        layer_formats(LINEARS, MODULES, _awq(exclude=("*",)))


def test_16_bit_formats_quantize_no_layer() -> None:
    """bf16 selects nothing, whatever is excluded."""
    assert layer_formats(LINEARS, MODULES, QuantizationConfig(format="bf16")) == {}


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


def test_the_quantizer_list_denies_all_first_and_then_names_each_layer() -> None:
    """The last match wins in ModelOpt; a name matches one layer, so no entry undoes another."""
    entries = quantizer_config(_awq(group_size=32), {"a.q_proj": "int4_awq"}, kv_scales=False)["quant_cfg"]
    assert entries[0] == {"quantizer_name": "*", "enable": False}
    assert [entry["quantizer_name"] for entry in entries[1:]] == ["a.q_proj.weight_quantizer"]
    assert entries[1]["cfg"]["block_sizes"] == {-1: 32, "type": "static"}


def test_layers_that_differ_in_numbers_alone_are_one_entry() -> None:
    """Unless the glob would match a layer that is not meant."""
    formats: dict[str, Format] = {
        "layers.0.q": "fp8", "layers.1.q": "fp8", "layers.0.k": "fp8", "layers.0.v": "fp8", "layers.1.v": "int8_wo",
    }  # fmt: skip
    assert by_glob(formats, [*formats, "layers.1.k", "head"]) == {
        "layers.*.q": "fp8", "layers.0.k": "fp8", "layers.0.v": "fp8", "layers.1.v": "int8_wo",
    }  # fmt: skip


def test_the_config_of_a_whole_model_names_only_the_layers_that_differ() -> None:
    """An entry a layer takes ModelOpt minutes on a large model; the last match wins, so who differs comes last."""
    formats: dict[str, Format] = {"a": "fp8", "b": "fp8", "c": "int8_wo"}
    entries = whole_model_config(_awq(), formats, [*formats, "lm_head"], kv_scales=False)["quant_cfg"]
    assert [entry["quantizer_name"] for entry in entries] == [
        "*", "*weight_quantizer", "*input_quantizer", "c.*", "lm_head.*", "c.weight_quantizer",
    ]  # fmt: skip


def test_an_fp8_cache_adds_observers_of_keys_and_values() -> None:
    """In any weight format."""
    for name in ("bf16", "int8_sq"):
        quantization = QuantizationConfig.model_validate({"format": name, "kv_cache": "fp8"})
        entries = quantizer_config(quantization, {}, kv_scales=True)["quant_cfg"]
        assert entries[-1]["quantizer_name"] == "*[kv]_bmm_quantizer"
        assert needs_text(quantization, export="hf")


def test_smoothquant_takes_its_alpha_from_the_config() -> None:
    """Alpha is the user's."""
    quantization = QuantizationConfig(format="int8_sq", smoothquant_alpha=0.75)
    assert algorithm("int8_sq", quantization) == {"method": "smoothquant", "alpha": 0.75}


def test_weight_only_formats_name_the_layers_that_the_build_rounds() -> None:
    """ModelOpt quantizes nothing for them; the exclude list still has to say what stays."""
    quantization = QuantizationConfig(format="int8_wo", exclude=("lm_head", "*.mlp"))
    formats = layer_formats(LINEARS, MODULES, quantization)
    assert tuple(formats) == tuple(LINEARS)[:2]
    assert not needs_text(quantization, export="trtllm")


def test_w4a8_rounds_weights_twice_and_activations_once() -> None:
    """Int4 in groups, then float8; activations to float8."""
    entries = quantizer_config(_awq(format="w4a8_awq"), {"q": "w4a8_awq"}, kv_scales=False)["quant_cfg"]
    assert [stage["num_bits"] for stage in entries[1]["cfg"]] == [4, (4, 3)]
    assert entries[2] == {"quantizer_name": "q.input_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}


def _mixed(*overrides: tuple[str, str], **fields: object) -> QuantizationConfig:
    return _awq(overrides=tuple({"layers": layers, "format": form} for layers, form in overrides), **fields)


def test_the_last_override_that_names_a_layer_decides_and_an_exclude_before_all() -> None:
    """A 16-bit override keeps a layer as an exclude does."""
    quantization = _mixed(("*.mlp", "fp8"), ("model.layers.0", "int8_wo"), ("*.o_proj", "bf16"))
    assert layer_formats(LINEARS, MODULES, quantization) == dict.fromkeys(
        ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"], "int8_wo"
    )


def test_an_override_that_matches_nothing_is_refused() -> None:
    """As an exclude is."""
    with pytest.raises(ConfigError) as raised:
        layer_formats(LINEARS, MODULES, _mixed(("*.dwon_proj", "fp8")))
    assert [problem.where for problem in raised.value.problems] == ["quantization.overrides"]


def test_an_override_that_splits_layers_of_one_input_is_refused() -> None:
    """q, k and v are one matrix to an engine."""
    linears = LINEARS | {"model.layers.0.self_attn.k_proj": (192, 576)}
    with pytest.raises(ConfigError, match="must share one format") as raised:
        layer_formats(linears, [*MODULES, *linears], _mixed(("*.q_proj", "int8_wo")))
    assert [str(problem) for problem in raised.value.problems] == [
        "model.layers.0.self_attn: q_proj, k_proj read one tensor, and would be int8_wo, int4_awq."
    ]


def test_overrides_may_quantize_what_a_16_bit_format_leaves() -> None:
    """format: bf16 with one layer at fp8."""
    quantization = QuantizationConfig.model_validate(
        {"format": "bf16", "overrides": ({"layers": "*.mlp", "format": "fp8"},)}
    )
    assert layer_formats(LINEARS, MODULES, quantization) == {"model.layers.0.mlp.down_proj": "fp8"}
    assert needs_text(quantization, export="hf")


def test_each_format_has_its_own_way_to_find_ranges() -> None:
    """Plain rounding looks at weights alone, so it observes nothing."""
    forms: tuple[Format, ...] = ("int8_sq", "int4_awq", "fp8", "int4_wo")
    found = [algorithm(form, _awq()) for form in forms]
    assert [way if isinstance(way, str) else way["method"] for way in found] == [
        "smoothquant",
        "awq_lite",
        "max",
        "max",
    ]
    assert [form for form in forms if not observes(form)] == ["int4_wo"]


def test_an_int8_cache_has_scales_in_the_tensorrt_llm_checkpoint_only() -> None:
    """The unified Hugging Face checkpoint has no place for them."""
    quantization = QuantizationConfig(format="bf16", kv_cache="int8")
    assert stores_kv_scales(quantization, export="trtllm")
    assert not needs_text(quantization, export="hf")

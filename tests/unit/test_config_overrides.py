"""Layers of another format: how they are written, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.formats import format_label, formats_of
from pipeline.config.legality import check
from pipeline.config.load import load, render
from pipeline.config.schema import BuildConfig, QuantizationConfig
from pipeline.errors import ConfigError
from tests.support.architectures import LLAMA_8B

pytestmark = pytest.mark.fast

HEADER = "name: a\nsource: {path: m}\nquantization:\n  format: int4_awq\n  overrides:\n"


def problems(tmp_path: Path, text: str) -> list[str]:
    """What load says about a config, as 'line key: message hint'."""
    path = tmp_path / "x.yaml"
    path.write_text(HEADER + text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]


def judge(*overrides: tuple[str, str], **fields: object) -> list[str]:
    """Errors for Llama 3 8B on an H100, or another target."""
    target = fields.pop("target", "openvino")
    engine = {"target": target} | ({} if target == "openvino" else {"gpu": fields.pop("gpu", "H100")})
    listed = tuple({"layers": layers, "format": form} for layers, form in overrides)
    values = {"format": "int4_awq", "overrides": listed} | fields
    config = BuildConfig.model_validate(
        {"name": "a", "source": {"path": "m"}, "quantization": values, "engine": engine}
    )
    return [str(problem) for problem in check(config, LLAMA_8B) if problem.severity == "error"]


def test_overrides_are_read_in_order_and_shown_as_they_load(tmp_path: Path) -> None:
    """Both ways to write an item; what is shown loads to the same."""
    path = tmp_path / "x.yaml"
    path.write_text(
        HEADER + "    - {layers: '*.down_proj', format: int8_wo}\n    - layers: '*.0'\n      format: bf16\n"
    )
    loaded = load(path)
    assert [tuple(dict(item).values()) for item in loaded.config.quantization.overrides] == [
        ("*.down_proj", "int8_wo"),
        ("*.0", "bf16"),
    ]
    assert formats_of(loaded.config.quantization) == ("int4_awq", "int8_wo")
    shown = tmp_path / "shown.yaml"
    shown.write_text(render(loaded), "utf-8")
    assert load(shown).config == loaded.config


def test_a_build_is_called_by_its_formats(tmp_path: Path) -> None:
    """The main format, and what others are where."""
    path = tmp_path / "x.yaml"
    path.write_text(HEADER + "    - {layers: '*.down_proj', format: int8_wo}\n", "utf-8")
    assert format_label(load(path).config.quantization) == "int4_awq, int8_wo in *.down_proj"
    assert format_label(load(path, ["quantization.overrides=[]"]).config.quantization) == "int4_awq"


def test_formats_that_no_layer_takes_do_not_count() -> None:
    """With the model's layers at hand, an overridden main format is none of the checkpoint's."""
    listed = ({"layers": "*.mlp", "format": "fp8"}, {"layers": "*.self_attn", "format": "fp8"})
    quantization = QuantizationConfig.model_validate({"format": "int4_awq", "overrides": listed})
    assert formats_of(quantization) == ("int4_awq", "fp8")
    assert formats_of(quantization, LLAMA_8B.linears) == ("fp8",)


def test_overrides_can_be_set_from_outside(tmp_path: Path) -> None:
    """The value of --set is YAML, and replaces the list."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nsource: {path: m}\n")
    loaded = load(path, ["quantization.overrides=[{layers: '*.mlp', format: int8_wo}]"])
    assert formats_of(loaded.config.quantization) == ("int8_wo",)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            "{layers: '*.mlp', format: int9_wo}",
            "6 quantization.overrides.format: 'int9_wo' is not a format. Did you mean",
        ),
        ("{layers: '*.mlp'}", "6 quantization.overrides.format: is required. Add 'format': Format of these layers"),
        (
            "{layer: '*.mlp', format: fp8}",
            "6 quantization.overrides.layer: unknown key 'layer'. Valid: layers, format.",
        ),
        ("'*.mlp'", "6 quantization.overrides: takes a mapping as an item, not '*.mlp'. Write {layers: …, format: …}"),
        ("{layers: [a], format: fp8}", "6 quantization.overrides.layers: takes a text, not a list."),
        (
            "{layers: '*', format: fp8}",
            "5 quantization.overrides: '*' names every layer, so quantization.format is of none.",
        ),
        (
            "{layers: a, format: fp16}",
            "5 quantization.overrides: layers at 16 bit are of engine.dtype, which is bfloat16.",
        ),
    ],
)
def test_a_mistake_in_an_item_is_named_at_its_line(tmp_path: Path, item: str, expected: str) -> None:
    """One problem, with what to write."""
    (found,) = problems(tmp_path, f"    - {item}\n")
    assert found.startswith(expected)


def test_settings_of_an_overriding_format_have_an_effect(tmp_path: Path) -> None:
    """smoothquant_alpha belongs to the layers at int8_sq; without them it is warned about."""
    path = tmp_path / "x.yaml"
    path.write_text(HEADER + "    - {layers: '*.down_proj', format: int8_sq}\n  smoothquant_alpha: 0.7\n")
    assert load(path).warnings == ()
    (warning,) = load(path, ["quantization.overrides=[]"]).warnings
    assert "quantization.smoothquant_alpha" in warning.where


def test_formats_may_differ_between_layers_that_read_different_tensors() -> None:
    """Attention and MLP, down_proj and the rest."""
    assert judge(("*.down_proj", "int8_wo"), ("*.self_attn.[qkv]_proj", "int8_sq"), ("*.o_proj", "bf16")) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            ("*.q_proj", "int8_wo"),
            "in 32 layers q_proj int8_wo, k_proj int4_awq, v_proj int4_awq: they read one tensor",
        ),
        (("*.up_proj", "bf16"), "in 32 layers gate_proj int4_awq, up_proj at 16 bit: they read one tensor"),
        (("*.dwon_proj", "int8_wo"), "'*.dwon_proj' matches no layer of this model."),
        (("lm_head", "int8_wo"), "every layer that 'lm_head' matches is excluded, and stays at 16 bit."),
    ],
)
def test_an_override_that_cannot_be_is_refused(override: tuple[str, str], expected: str) -> None:
    """Layers of one input share one format, and a glob names something."""
    (found,) = judge(override)
    assert found.startswith(f"quantization.overrides: {expected}")


def test_every_format_is_judged() -> None:
    """w4a8_awq has no kernels on the CPU, whatever the other layers are."""
    (found,) = judge(("*.down_proj", "w4a8_awq"))
    assert "w4a8_awq" in found


def test_group_sizes_are_those_of_the_layers_in_groups() -> None:
    """An odd width at int8 does not stop int4 elsewhere."""
    facts = LLAMA_8B.linears | {"model.layers.0.mlp.down_proj": (4096, 14300)}
    listed = ({"layers": "model.layers.0.mlp.down_proj", "format": "int8_wo"},)
    values = {"format": "int4_awq", "overrides": listed}
    config = BuildConfig.model_validate({"name": "a", "source": {"path": "m"}, "quantization": values})
    from dataclasses import replace

    errors = [problem for problem in check(config, replace(LLAMA_8B, linears=facts)) if problem.severity == "error"]
    assert errors == []

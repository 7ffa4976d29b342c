"""Checkpoints whose layers have several formats: each layer is read and judged as what it is, and lies are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from pipeline.config.schema import CalibrationConfig, Format, LayerOverride, QuantizationConfig
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError, IntegrityError, VerificationError
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.readers import read_quantized
from pipeline.quantize.verify import verify
from tests.support.families import copy_of, held, quantize_family, tiny_family
from tests.support.making import make_quantized
from tests.support.quantized import held_text, tiny_quantized, tiny_source

pytestmark = pytest.mark.heavy

DOWN = "model.layers.1.mlp.down_proj"
OVERRIDES: tuple[tuple[str, Format], ...] = (
    ("*.self_attn", "int8_sq"),
    ("model.layers.0.mlp.down_proj", "fp8"),
    (DOWN, "int8_wo"),
    ("model.layers.1.mlp.[gu]*_proj", "int4_wo"),
)
COUNTS = {"fp8": 1, "int4_awq": 2, "int4_wo": 2, "int8_sq": 8, "int8_wo": 1}
# What TensorRT-LLM mixes.
ENGINE: tuple[tuple[str, Format], ...] = (("*.self_attn", "fp8"), ("*.down_proj", "w4a8_awq"))


def overrides(listed: tuple[tuple[str, Format], ...]) -> tuple[LayerOverride, ...]:
    """As a config has them."""
    return tuple(LayerOverride(layers=layers, format=form) for layers, form in listed)


@cache
def _unified() -> Path:
    out = Path(mkdtemp()) / "mixed"
    make_quantized(
        tiny_source(),
        QuantizationConfig(format="int4_awq", group_size=64, overrides=overrides(OVERRIDES)),
        CalibrationConfig(dataset=tiny_source().path / "text.jsonl", num_samples=8, max_seq_len=64),
        WantedCheckpoint(export="hf"),
        out,
    )
    return out


def unified(directory: Path) -> QuantizedCheckpoint:
    """int4_awq with four other formats among its layers, in the unified layout."""
    shutil.copytree(_unified(), directory / "mixed")
    return QuantizedCheckpoint(path=directory / "mixed", digest="sha256:quantized")


def ranks(directory: Path, tp: int, pp: int, name: str = "Llama", **more: Any) -> QuantizedCheckpoint:
    """int4_awq with attention at fp8 and down_proj at w4a8_awq, as TensorRT-LLM ranks."""
    return copy_of(name, directory / "mixed", tp=tp, pp=pp, format="int4_awq", overrides=overrides(ENGINE), **more)


def report(directory: Path) -> dict[str, Any]:
    """The report that verify wrote."""
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


def test_every_layer_is_read_and_judged_as_what_it_is(tmp_path: Path) -> None:
    """Five formats in one checkpoint pass, and the report counts and measures each."""
    made = unified(tmp_path)
    verify(tiny_source(), made, held_text(), out=tmp_path, progress=Silent())
    found = report(tmp_path)
    assert found["passed"]
    assert found["format"] == "mixed"
    assert {form: row["layers"] for form, row in found["formats"].items()} == COUNTS
    assert found["formats"]["int8_wo"]["largest"]["weight.relative_l2"] < 0.02
    assert found["formats"]["int4_awq"]["largest"]["weight.relative_l2"] > 0.05
    reader = read_quantized(made.path)
    assert reader.linear(DOWN).format == "int8_wo"
    assert reader.linear("model.layers.0.self_attn.q_proj").format == "int8_sq"


@pytest.mark.parametrize(
    ("name", "tp", "pp", "more"),
    [
        ("Llama", 1, 1, {}),
        ("Llama", 2, 2, {"kv_cache": "int8"}),
        ("Llama", 4, 1, {"group_size": 32}),  # more ranks than KV heads
        ("Qwen2", 2, 2, {}),
        ("Qwen3", 1, 2, {"kv_cache": "fp8"}),
        ("Gemma", 2, 1, {}),
    ],
)
def test_every_rank_of_a_mixed_checkpoint_passes(
    name: str, tp: int, pp: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """quant_cfg.json says how each stored layer of every rank computes."""
    made = ranks(tmp_path, tp, pp, name, **more)
    verify(tiny_family(name), made, held(tiny_family(name)), out=tmp_path, progress=Silent())
    found = report(tmp_path)
    assert found["passed"]
    assert {form: row["layers"] for form, row in found["formats"].items()} == {
        "fp8": 8,
        "int4_awq": 4,
        "w4a8_awq": 2,
    }


Edit = Callable[[dict[str, Any]], None]


def edit_json(path: Path, edit: Edit) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


LIES: list[tuple[str, Edit, str, str]] = [
    ("missing", lambda q: q.pop(DOWN), DOWN, "quantized_layers of MIXED_PRECISION does not list it"),
    ("other", lambda q: q[DOWN].update(quant_algo="FP8"), DOWN, "is I8, F8_E4M3 was expected"),
    ("bits", lambda q: q[DOWN].update(quant_algo="W4A16_AWQ", group_size=64), DOWN, "is I8, U8 was expected"),
    ("kind", lambda q: q[DOWN].update(quant_algo="W8A8_SQ_PER_CHANNEL"), DOWN, "input_scale is missing"),
    ("extra", lambda q: q.update({"model.norm": {"quant_algo": "FP8"}}), "model.norm", "the source has no such layer"),
    (
        "groups",
        lambda q: q["model.layers.0.mlp.up_proj"].update(group_size=32),
        "model.layers.0.mlp.up_proj",
        "wrong group size: 32 is declared, the scales are for 64",
    ),
]


@pytest.mark.parametrize(("edit", "layer", "words"), [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_an_entry_that_lies_is_named(edit: Edit, layer: str, words: str, tmp_path: Path) -> None:
    """A wrong or missing line of the list is how an engine would load nonsense."""
    made = unified(tmp_path)
    edit_json(made.path / "hf" / "hf_quant_config.json", lambda doc: edit(doc["quantization"]["quantized_layers"]))
    with pytest.raises(VerificationError) as raised:
        verify(tiny_source(), made, held_text(), out=tmp_path, progress=Silent())
    named = {problem.where: str(problem) for problem in raised.value.problems}
    assert words in named[layer]
    assert set(named) == {layer}


def test_a_layer_of_another_format_than_was_asked_for_is_named(tmp_path: Path) -> None:
    """The record says which layer was to be what."""
    made = unified(tmp_path)
    edit_json(made.path / "quantization.json", lambda doc: doc["formats"].update({DOWN: "fp8"}))
    with pytest.raises(VerificationError) as raised:
        verify(tiny_source(), made, held_text(), out=tmp_path, progress=Silent())
    assert [str(problem) for problem in raised.value.problems] == [
        f"{DOWN}: the checkpoint says int8_wo, fp8 was asked for. Cause: wrong entry."
    ]


def test_a_norm_that_carries_a_scale_for_a_layer_without_one_is_found(tmp_path: Path) -> None:
    """int8_sq keeps its scale itself, so nothing may be folded into the norm in front of it."""
    made = unified(tmp_path)
    other = tiny_quantized("int4_awq", tmp_path / "awq").path
    from safetensors.torch import load_file, save_file

    tensors = load_file(made.path / "hf" / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm] = load_file(other / "hf" / "model.safetensors")[norm]
    save_file(tensors, made.path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError) as raised:
        verify(tiny_source(), made, held_text(), out=tmp_path, progress=Silent())
    assert [problem.where for problem in raised.value.problems] == ["model.layers.0.input_layernorm"]


def test_a_mixed_checkpoint_without_quant_cfg_is_refused(tmp_path: Path) -> None:
    """The engine build stops there as well."""
    made = ranks(tmp_path, 1, 1)
    (made.path / "trtllm" / "quant_cfg.json").unlink()
    with pytest.raises(IntegrityError, match=r"quant_cfg\.json"):
        read_quantized(made.path)


ENGINE_LIES: list[tuple[str, Edit, str]] = [
    (
        "algorithm",
        lambda doc: doc.update(kv_cache_quant_algo="FP8"),
        "kv_cache_quant_algo is 'FP8', and None in",
    ),
    ("field", lambda doc: doc.update(exclude_modules=[]), "quant_cfg.json: exclude_modules is no field of it"),
    (
        "layer field",
        lambda doc: doc["quantized_layers"]["transformer.layers.0.mlp.fc"].update(bits=4),
        "quant_cfg.json: bits is no field of a layer",
    ),
    (
        "missing",
        lambda doc: doc["quantized_layers"].pop("transformer.layers.0.mlp.fc"),
        "quantized_layers of MIXED_PRECISION does not list it",
    ),
    (
        "place",
        lambda doc: doc["quantized_layers"].update({"transformer.layers.9.mlp.fc": {"quant_algo": "FP8"}}),
        "quant_cfg.json lists it, and the layout has no such layer",
    ),
]


@pytest.mark.parametrize(("edit", "words"), [row[1:] for row in ENGINE_LIES], ids=[row[0] for row in ENGINE_LIES])
def test_what_the_engine_build_would_stumble_over_is_named(edit: Edit, words: str, tmp_path: Path) -> None:
    """Fields that it refuses, and layers that it would not find."""
    made = ranks(tmp_path, 1, 1)
    edit_json(made.path / "trtllm" / "quant_cfg.json", edit)
    with pytest.raises(VerificationError) as raised:
        verify(tiny_family("Llama"), made, held(tiny_family("Llama")), out=tmp_path, progress=Silent())
    assert any(words in str(problem) for problem in raised.value.problems)


def test_a_layer_has_in_a_mixture_what_it_has_alone(tmp_path: Path) -> None:
    """Codes and scales are those of a checkpoint of the layer's own format, bit for bit."""
    mixed = read_quantized(unified(tmp_path).path)
    for name in mixed.quantized_modules():
        alone = read_quantized(tiny_quantized(mixed.format_of(name), tmp_path / name).path)
        ours, theirs = mixed.linear(name), alone.linear(name)
        np.testing.assert_array_equal(ours.codes, theirs.codes, err_msg=name)
        np.testing.assert_array_equal(ours.scale, theirs.scale, err_msg=name)
        assert ours.input_scale == theirs.input_scale
        np.testing.assert_array_equal(ours.pre_quant_scale, theirs.pre_quant_scale, err_msg=name)


@pytest.mark.parametrize(
    ("listed", "more", "cache"),
    [
        (ENGINE, {"kv_cache": "fp8"}, "FP8"),  # what the LLM API reads
        ((("*.down_proj", "int8_wo"),), {"awq": "full"}, None),
        ((("*.self_attn", "fp8_rowwise"), ("*.down_proj", "bf16")), {"kv_cache": "int8"}, None),
    ],
)
def test_other_mixtures_pass(
    listed: tuple[tuple[str, Format], ...], more: dict[str, Any], cache: str | None, tmp_path: Path
) -> None:
    """With KV scales, with clipped weights beside others, and with layers at 16 bit."""
    out = tmp_path / "other"
    make_quantized(
        tiny_source(),
        QuantizationConfig(format="int4_awq", group_size=64, overrides=overrides(listed), **more),
        CalibrationConfig(dataset=tiny_source().path / "text.jsonl", num_samples=8, max_seq_len=64),
        WantedCheckpoint(export="hf"),
        out,
    )
    made = QuantizedCheckpoint(path=out, digest="sha256:quantized")
    verify(tiny_source(), made, held_text(), out=tmp_path, progress=Silent())
    assert report(tmp_path)["passed"]
    assert read_quantized(out).kv_cache_algorithm == cache


def test_overrides_that_leave_one_format_give_its_plain_checkpoint(tmp_path: Path) -> None:
    """Nothing says MIXED_PRECISION where every quantized layer is alike."""
    out = tmp_path / "alike"
    make_quantized(
        tiny_source(),
        QuantizationConfig(format="bf16", overrides=overrides((("*.mlp", "int8_wo"),))),
        CalibrationConfig(dataset=tiny_source().path / "text.jsonl", num_samples=8, max_seq_len=64),
        WantedCheckpoint(export="hf"),
        out,
    )
    made = QuantizedCheckpoint(path=out, digest="sha256:quantized")
    verify(tiny_source(), made, held_text(), out=tmp_path, progress=Silent())
    found = report(tmp_path)
    assert found["passed"]
    assert found["format"] == "int8_wo"
    assert found["summary"]["quantized_layers"] == 6


def test_a_mixture_that_engine_builds_cannot_round_is_refused(tmp_path: Path) -> None:
    """int8_wo is rounded by trtllm-build, for all layers or none."""
    with pytest.raises(ConfigError) as raised:
        quantize_family(
            tiny_family("Llama"), tmp_path / "q", format="fp8", overrides=overrides((("*.mlp", "int8_wo"),))
        )
    assert [problem.where for problem in raised.value.problems] == ["quantization.overrides"]

"""ModelOpt on a tiny Llama: what the quantized checkpoint holds is what was calibrated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.schema import CalibrationConfig, QuantizationConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.errors import BadSafetensors, ConfigError, ToolError
from pipeline.quantize.formats import Export, WantedCheckpoint
from tests.support.checkpoints import tiny_llama
from tests.support.making import make_quantized

pytestmark = pytest.mark.heavy

Tensors = dict[str, torch.Tensor]
CALIBRATION = CalibrationConfig(num_samples=4, max_seq_len=64, batch_size=2)
# Against the exported tensors decoded here: float32 sums, and for activations rare rounding ties.
LIMITS = {
    "fp8": 1e-3,
    "fp8_rowwise": 1e-3,
    "int8_sq": 1e-3,
    "int8_wo": 1e-5,
    "int4_awq": 1e-5,
    "int4_awq clip": 1e-5,
    "int4_awq full": 1e-5,
    "int4_wo": 1e-5,
}


def _run(source: Path, out: Path, *, export: Export = "hf", tensor_parallel_size: int = 1, **fields: object) -> Path:
    make_quantized(
        SourceCheckpoint(path=source, digest="sha256:0"),
        QuantizationConfig.model_validate({"group_size": 64, **fields}),
        CALIBRATION,
        WantedCheckpoint(export=export, tensor_parallel_size=tensor_parallel_size),
        out,
    )
    return out


@dataclass(frozen=True)
class Checkpoint:
    """An open quantized checkpoint."""

    path: Path
    description: dict[str, Any]
    weights: Tensors
    probes: Tensors


def _open(path: Path) -> Checkpoint:
    return Checkpoint(
        path=path,
        description=json.loads((path / "quantization.json").read_text()),
        weights=load_file(path / "hf" / "model.safetensors"),
        probes=load_file(path / "probes.safetensors"),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random two-layer Llama with norms that are not all one, so that folding shows."""
    directory = tiny_llama(tmp_path_factory.mktemp("source"))
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if "norm" in name:
            weights[name] = 0.5 + torch.rand(tensor.shape, generator=generator)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoints(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Quantize the source once to each format."""
    root = tmp_path_factory.mktemp("quantized")
    made = {}
    for name in LIMITS:
        form, _, awq = name.partition(" ")
        made[name] = _open(_run(source, root / name, format=form, awq=awq or "lite"))
    return made


def _pre_quant_scale(checkpoint: Checkpoint, source_weights: Tensors, layer: str) -> torch.Tensor | float:
    if f"{layer}.pre_quant_scale" in checkpoint.weights:
        return checkpoint.weights[f"{layer}.pre_quant_scale"].float()
    norm = checkpoint.description["folded"].get(layer)
    if norm is None:
        return 1.0
    return checkpoint.weights[f"{norm}.weight"].float() / source_weights[f"{norm}.weight"].float()


def _decoded_output(checkpoint: Checkpoint, source_weights: Tensors, layer: str) -> torch.Tensor:
    """Compute the layer from the files alone, by the formulas of each format."""
    codes = checkpoint.weights[f"{layer}.weight"]
    scale = checkpoint.weights[f"{layer}.weight_scale"]
    fed = checkpoint.probes[f"{layer}.input"] * _pre_quant_scale(checkpoint, source_weights, layer)
    match checkpoint.description["format"]:
        case "fp8":
            step = checkpoint.weights[f"{layer}.input_scale"]
            fed = (fed / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
            weight = codes.float() * scale
        case "fp8_rowwise":
            step = fed.abs().amax(dim=1, keepdim=True) / 448
            fed = (fed / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
            weight = codes.float() * scale[:, None]
        case "int8_sq":
            step = checkpoint.weights[f"{layer}.input_scale"]
            fed = (fed / step).round().clamp(-128, 127) * step
            weight = codes.float() * scale[:, None]
        case "int8_wo":
            weight = codes.float() * scale[:, None]
        case _:
            nibbles = torch.stack([codes & 15, codes >> 4], dim=1).reshape(-1, codes.shape[1]).float()
            signed = torch.where(nibbles > 7, nibbles - 16, nibbles)
            weight = signed * scale.repeat_interleave(64, dim=1)
    return fed @ weight.T


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", LIMITS)
def test_the_exported_tensors_compute_the_recorded_outputs(
    name: str, checkpoints: dict[str, Checkpoint], source: Path
) -> None:
    """Every quantized layer, decoded from the files, gives what ModelOpt's live layer gave."""
    checkpoint, source_weights = checkpoints[name], load_file(source / "model.safetensors")
    layers = checkpoint.description["quantized_layers"]
    assert len(layers) == 14
    for layer in layers:
        found = _decoded_output(checkpoint, source_weights, layer)
        assert _relative_error(found, checkpoint.probes[f"{layer}.output"]) <= LIMITS[name], layer


@pytest.mark.parametrize(
    ("name", "limit"),
    [("fp8", 0.06), ("fp8_rowwise", 0.06), ("int8_sq", 0.04), ("int8_wo", 0.02), ("int4_awq", 0.2), ("int4_wo", 0.2)],
)
def test_a_recorded_output_is_close_to_the_source_layer(
    name: str, limit: float, checkpoints: dict[str, Checkpoint], source: Path
) -> None:
    """The recorded input is the source layer's, so W x is what quantization approximates."""
    checkpoint, source_weights = checkpoints[name], load_file(source / "model.safetensors")
    for layer in checkpoint.description["quantized_layers"]:
        exact = checkpoint.probes[f"{layer}.input"] @ source_weights[f"{layer}.weight"].T
        assert 0 < _relative_error(checkpoint.probes[f"{layer}.output"], exact) < limit, layer


def test_awq_folds_the_scale_of_shared_inputs_into_the_norm(checkpoints: dict[str, Checkpoint]) -> None:
    """q, k, v and gate, up are folded; o and down keep their scale."""
    checkpoint = checkpoints["int4_awq"]
    folded = checkpoint.description["folded"]
    assert len(folded) == 10
    assert folded["model.layers.0.self_attn.k_proj"] == "model.layers.0.input_layernorm"
    assert folded["model.layers.1.mlp.up_proj"] == "model.layers.1.post_attention_layernorm"
    kept = {name.split(".")[-2] for name in checkpoint.weights if name.endswith("pre_quant_scale")}
    assert kept == {"o_proj", "down_proj"}


def test_smoothquant_layers_that_share_their_input_share_their_scales(checkpoints: dict[str, Checkpoint]) -> None:
    """An engine that fuses q, k and v finds one pre-quant scale and one input scale."""
    weights = checkpoints["int8_sq"].weights
    for suffix in ("pre_quant_scale", "input_scale"):
        q, k, v = (weights[f"model.layers.0.self_attn.{name}_proj.{suffix}"] for name in "qkv")
        assert torch.equal(q, k)
        assert torch.equal(q, v)


@pytest.mark.parametrize("name", LIMITS)
def test_everything_but_codes_and_scales_is_16_bit(name: str, checkpoints: dict[str, Checkpoint]) -> None:
    """Norms, embeddings, the head and pre-quant scales are bfloat16; scales stay float32."""
    weights = checkpoints[name].weights
    codes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}[name.partition("_")[0]]
    for tensor_name, tensor in weights.items():
        if tensor_name.endswith(("weight_scale", "input_scale")):
            assert tensor.dtype == torch.float32, tensor_name
        elif tensor_name.endswith("_proj.weight"):
            assert tensor.dtype == codes, tensor_name
        else:
            assert tensor.dtype == torch.bfloat16, tensor_name
    assert json.loads((checkpoints[name].path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_checkpoint_carries_the_tokenizer_and_generation_config(
    checkpoints: dict[str, Checkpoint], source: Path
) -> None:
    """They are the source's, byte for byte."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copied = (checkpoints["fp8"].path / "hf" / name).read_bytes()
        assert copied == (source / name).read_bytes()


def test_the_record_says_what_was_fed(checkpoints: dict[str, Checkpoint]) -> None:
    """calibration.json holds the digest of the ids and their number."""
    record = json.loads((checkpoints["fp8"].path / "calibration.json").read_text())
    assert (record["sequences"], record["tokens"]) == (4, 256)
    assert record["ids_sha256"].startswith("sha256:")


@pytest.mark.parametrize("name", ["int8_wo", "int4_wo"])
def test_a_weight_only_format_stores_codes_and_weight_scales_alone(
    name: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """No activation was looked at, so one sequence was run, for the recorded rows."""
    stored = {key.rpartition(".")[2] for key in checkpoints[name].weights if "_proj." in key}
    assert stored == {"weight", "weight_scale"}
    assert checkpoints[name].description["folded"] == {}
    assert json.loads((checkpoints[name].path / "calibration.json").read_text())["sequences"] == 1


def test_two_processes_write_identical_bytes(source: Path, tmp_path: Path) -> None:
    """Whatever the hash seed, for the files of the Hugging Face checkpoint and the records."""
    script = (
        "import sys; from pathlib import Path; from tests.heavy.test_quantize_checkpoint import _run;"
        "_run(Path(sys.argv[1]), Path(sys.argv[2]), format='int4_awq', kv_cache='fp8', "
        "exclude=('lm_head', '*.down_proj'))"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", script, str(source), str(tmp_path / seed)],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
        )
    files = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*") if path.is_file())
    assert len(files) == 9
    differing = [
        str(name) for name in files if (tmp_path / "1" / name).read_bytes() != (tmp_path / "2" / name).read_bytes()
    ]
    assert differing == []


def test_no_path_of_this_machine_is_written(checkpoints: dict[str, Checkpoint], source: Path) -> None:
    """A checkpoint moved elsewhere has the same bytes."""
    for path in checkpoints["fp8"].path.rglob("*.json"):
        assert str(source) not in path.read_text(), path
        assert str(checkpoints["fp8"].path) not in path.read_text(), path


def test_an_excluded_layer_keeps_its_weight_and_is_declared(source: Path, tmp_path: Path) -> None:
    """The 16-bit layer is named in hf_quant_config.json, where servers look."""
    checkpoint = _open(_run(source, tmp_path, format="fp8", exclude=("lm_head", "*.0.mlp.down_proj")))
    layer = "model.layers.0.mlp.down_proj"
    expected = load_file(source / "model.safetensors")[f"{layer}.weight"].bfloat16()
    assert torch.equal(checkpoint.weights[f"{layer}.weight"], expected)
    declared = json.loads((tmp_path / "hf" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert declared == sorted(declared)
    assert {layer, "lm_head"} <= set(declared)


def test_an_untied_head_can_be_quantized(source: Path, tmp_path: Path) -> None:
    """With an empty exclude list, lm_head is observed and packed like any other layer."""
    checkpoint = _open(_run(source, tmp_path, format="fp8", exclude=()))
    assert checkpoint.weights["lm_head.weight"].dtype == torch.float8_e4m3fn
    found = _decoded_output(checkpoint, {}, "lm_head")
    assert _relative_error(found, checkpoint.probes["lm_head.output"]) <= LIMITS["fp8"]


def test_a_tied_head_cannot_be_quantized_alone(tmp_path: Path) -> None:
    """Its weight is the embedding's."""
    source = tiny_llama(tmp_path / "source", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="shares its weight"):
        _run(source, tmp_path / "out", format="fp8", exclude=())


def test_awq_refuses_to_split_layers_that_share_a_norm(source: Path, tmp_path: Path) -> None:
    """A folded scale would reach the excluded q_proj, which does not undo it."""
    with pytest.raises(ConfigError, match="share their input") as raised:
        _run(source, tmp_path, format="int4_awq", exclude=("lm_head", "*.q_proj"))
    assert "model.layers.0.self_attn.q_proj" in raised.value.problems[0].where


def test_a_group_size_that_does_not_fit_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    """The two ranks have 64 inputs of o_proj each."""
    with pytest.raises(ConfigError, match="128 does not fit 2 of 14 layers"):
        _run(source, tmp_path / "out", format="int4_awq", group_size=128, tensor_parallel_size=2)
    assert not (tmp_path / "out").exists()


def test_an_fp8_cache_stores_a_positive_scale_for_each_layer(source: Path, tmp_path: Path) -> None:
    """Also when the weights stay at 16 bit."""
    weights = _open(_run(source, tmp_path, format="bf16", kv_cache="fp8")).weights
    scales = {name: tensor for name, tensor in weights.items() if name.endswith(("k_scale", "v_scale"))}
    assert len(scales) == 4
    assert all(float(scale) > 0 for scale in scales.values())


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_16_bit_checkpoint_is_the_rounded_source(name: str, dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    """Every tensor, and nothing was fed."""
    checkpoint = _open(_run(source, tmp_path, format=name))
    expected = load_file(source / "model.safetensors")
    assert checkpoint.weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key].to(dtype)) for key, tensor in checkpoint.weights.items())
    assert json.loads((tmp_path / "calibration.json").read_text()) == {"sequences": 0, "source": None}
    assert checkpoint.probes == {}


def test_a_missing_weight_is_never_filled_with_random_numbers(source: Path, tmp_path: Path) -> None:
    """The lost tensor is named."""
    broken = tmp_path / "source"
    shutil.copytree(source, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadSafetensors) as raised:
        _run(broken, tmp_path / "out", format="fp8")
    assert raised.value.problems[0].where == "model.layers.1.mlp.up_proj.weight"


def test_weights_that_are_not_numbers_are_explained(source: Path, tmp_path: Path) -> None:
    """ModelOpt's assertion becomes an error with a cause."""
    broken = tmp_path / "source"
    shutil.copytree(source, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ToolError, match="nan") as raised:
        _run(broken, tmp_path / "out", format="int8_sq")
    assert "source checkpoint is broken" in raised.value.hint


def test_nothing_is_printed(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Stdout belongs to results, and progress is told to the listener."""
    _run(source, tmp_path, format="int4_awq", kv_cache="fp8")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""

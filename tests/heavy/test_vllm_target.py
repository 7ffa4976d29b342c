"""The target vllm: what is written is read by our reader of foreign checkpoints and by compressed-tensors itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.progress import Silent
from pipeline.errors import ConfigError, VerificationError
from pipeline.quantize import repack as repacking
from pipeline.quantize.fake_quant import build_model, load_reference_model
from pipeline.quantize.foreign.reader import read_foreign
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.repack import repack
from tests.support.checkpoints import tiny_llama
from tests.support.commands import CONFIG, trtpipe
from tests.support.quantized import tiny_quantized

pytestmark = pytest.mark.heavy

VLLM = ("--set", "engine.target=vllm", "--set", "engine.gpu=H100")
IDS = np.random.default_rng(3).integers(3, 512, (1, 40))


@pytest.fixture(scope="module")
def full_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with as many KV heads as heads."""
    return tiny_llama(tmp_path_factory.mktemp("source") / "checkpoint", kv_heads=4)


def _project(directory: Path, source: Path, form: str) -> Path:
    path = directory / "tiny.yaml"
    path.write_text(CONFIG.format(source=source, format=form))
    return path


def _logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(IDS)).logits[0].float().numpy()
    return logits


@pytest.mark.parametrize("form", ["int8_wo", "int4_wo"])
def test_repacked_weights_are_the_verified_ones(tmp_path: Path, form: str) -> None:
    """Decoded by the reader of foreign checkpoints and by compressed-tensors in transformers: equal bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    quantized = tiny_quantized(form, tmp_path / "q")  # type: ignore[arg-type]
    repack(quantized, out=tmp_path / "out", progress=Silent())
    ours, theirs = HuggingFaceReader(tmp_path / "q" / "hf"), read_foreign(tmp_path / "out" / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf", dtype=torch.float32)
    loaded(torch.from_numpy(IDS))  # decompresses
    assert len(ours.quantized_modules()) == 14
    for module in ours.quantized_modules():
        weight = ours.linear(module).weight
        assert np.array_equal(theirs.foreign_linear(module).weight(), weight)
        assert np.array_equal(loaded.get_submodule(module).weight.detach().numpy(), weight)
    np.testing.assert_allclose(_logits(loaded), _logits(load_reference_model(tmp_path / "q")), atol=1e-4)


def test_the_description_is_one_that_compressed_tensors_takes(tmp_path: Path) -> None:
    """Its own model of quantization_config validates it, and names what is not quantized."""
    from compressed_tensors.quantization import QuantizationConfig

    repack(tiny_quantized("int4_wo", tmp_path / "q"), out=tmp_path / "out", progress=Silent())
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    settings = QuantizationConfig.model_validate(config["quantization_config"])
    (group,) = settings.config_groups.values()
    assert (group.weights.num_bits, group.weights.group_size, str(settings.format)) == (4, 64, "pack-quantized")
    assert settings.ignore == ["lm_head"]


def test_awq_scales_are_folded_where_the_model_lets_them(full_heads: Path, tmp_path: Path) -> None:
    """Built through the command line: no input scale is left, and the model predicts what the AWQ checkpoint does."""
    document = trtpipe("build", _project(tmp_path, full_heads, "int4_awq"), *VLLM, "--json", cwd=tmp_path).document
    stages = {name: Path(stage["path"]) for name, stage in document["stages"].items()}
    assert set(stages) == {"calibrate", "quantize", "verify", "repack", "compile", "emit"}
    smoothed = HuggingFaceReader(stages["quantize"] / "hf")
    assert smoothed.linear("model.layers.0.mlp.down_proj").pre_quant_scale is not None
    model = Path(document["repository"]) / "vllm_model" / "1" / "model"
    served = read_foreign(tmp_path / model)
    assert not [name for name in served.tensors if "pre_quant" in name]
    expected = _logits(load_reference_model(stages["quantize"]))
    found = _logits(build_model(tmp_path / model, served, resident=True))
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6


def test_awq_of_grouped_heads_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Fewer KV heads than heads: the reason, and three ways out, the first of which works."""
    source = tiny_llama(tmp_path / "source")
    config = _project(tmp_path, source, "int4_awq")
    outcome = trtpipe("plan", config, *VLLM, cwd=tmp_path, code=3)
    assert "fewer KV heads than heads" in outcome.stderr
    exclude = ("--set", "quantization.exclude=[lm_head, '*.o_proj']")
    document = trtpipe("build", config, *VLLM, *exclude, "--json", cwd=tmp_path).document
    served = read_foreign(tmp_path / document["repository"] / "vllm_model" / "1" / "model")
    assert len(served.quantized_modules()) == 12


def test_a_scale_that_cannot_be_folded_is_refused_by_name(tmp_path: Path) -> None:
    """The repacking itself does not trust the config."""
    with pytest.raises(ConfigError, match="cannot be folded") as caught:
        repack(tiny_quantized("int4_awq", tmp_path / "q"), out=tmp_path / "out", progress=Silent())
    assert {problem.where.rpartition(".")[2] for problem in caught.value.problems} == {"o_proj"}


def test_a_packing_error_is_found_before_it_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is decoded again; one wrong bit is named with its layer."""
    right = repacking.pack_columns

    def wrong(codes: np.ndarray, bits: int) -> np.ndarray:
        return right(codes, bits) ^ np.int32(1)

    monkeypatch.setattr(repacking, "pack_columns", wrong)
    with pytest.raises(VerificationError, match="not the one that was verified"):
        repack(tiny_quantized("int8_wo", tmp_path / "q"), out=tmp_path / "out", progress=Silent())


@pytest.mark.parametrize(("form", "kv_cache"), [("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8")])
def test_what_vllm_reads_as_modelopt_writes_it_stays_as_it_is(tmp_path: Path, form: str, kv_cache: str) -> None:
    """16 bit and FP8: the quantized checkpoint's own files, with the arguments that belong to them."""
    source = tiny_llama(tmp_path / "source")
    settings = (*VLLM, "--set", f"quantization.kv_cache={kv_cache}")
    document = trtpipe("build", _project(tmp_path, source, form), *settings, "--json", cwd=tmp_path).document
    assert "repack" not in document["stages"]
    model = tmp_path / document["repository"] / "vllm_model"
    made = Path(document["stages"]["quantize"]["path"]) / "hf"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (model / "1" / "model" / name).read_bytes() == (made / name).read_bytes()
    arguments = json.loads((model / "1" / "model.json").read_text())
    assert arguments["model"] == "/models/vllm_model/1/model"
    assert arguments.get("quantization") == (None if form == "bf16" else "modelopt")
    assert arguments.get("kv_cache_dtype") == (None if kv_cache == "auto" else "fp8")
    assert trtpipe("check", model.parent, cwd=tmp_path).code == 0

"""A checkpoint that another tool quantized is built, proven and served as it is: nothing is rounded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.schema import VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import VerificationError
from pipeline.quantize.foreign.convert import convert, identify
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.verify import verify
from pipeline.targets.openvino.choices import EXACT_PROPERTIES
from tests.support import foreign
from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe

pytestmark = pytest.mark.heavy

CONFIG = """\
name: tiny
source:
  path: {source}
verify:
  num_tokens: 256
{reference}engine:
  max_batch_size: 4
  max_num_tokens: 256
  max_seq_len: 256
serving:
  default_max_tokens: 32
"""
IDS = np.random.default_rng(3).integers(3, 512, 40).tolist()


def _mixed_groups(name: str, columns: int) -> np.ndarray:
    """Act-order: each input's group of 64, mixed differently in each layer."""
    return np.random.default_rng(len(name)).permutation(np.arange(columns) // 64)


INT8_GROUPS = foreign.config_groups(8, strategy="channel", group_size=None)
STORES: dict[str, tuple[dict[str, Any], Callable[[str, np.ndarray], foreign.Tensors]]] = {
    "awq": (
        foreign.AWQ_CONFIG | {"zero_point": False},
        lambda name, w: foreign.awq(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=True)),
    ),
    "awq_with_zero_points": (
        foreign.AWQ_CONFIG,
        lambda name, w: foreign.awq(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=False)),
    ),
    "gptq": (
        foreign.GPTQ_CONFIG,
        lambda name, w: foreign.gptq(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=True)),
    ),
    "gptq_act_order": (
        foreign.GPTQ_CONFIG | {"desc_act": True},
        lambda name, w: foreign.gptq(
            name,
            foreign.round_matrix(
                w, bits=4, group_size=64, symmetric=True, group_of=_mixed_groups(f"{name}.weight", w.shape[1])
            ),
        ),
    ),
    "int8": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT8_GROUPS},
        lambda name, w: foreign.packed(name, foreign.round_matrix(w, bits=8, group_size=w.shape[1], symmetric=True)),
    ),
}
CODES = {"gptq_act_order": "i4", "awq": "i4", "awq_with_zero_points": "u4", "gptq": "i4", "int8": "i8"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32."""
    return tiny_llama(tmp_path_factory.mktemp("source") / "checkpoint")


def _project(directory: Path, source: Path, store: str, *, reference: bool = False) -> Path:
    """Write the quantized checkpoint and a config that names nothing but it."""
    config, pack = STORES[store]
    made = foreign.quantize_checkpoint(source, directory / "checkpoint", config, pack)
    path = directory / "tiny.yaml"
    path.write_text(CONFIG.format(source=made, reference=f"  reference: {source}\n" if reference else ""))
    return path


def _dequantized_logits(source: Path, store: str) -> np.ndarray:
    """The torch model over weights that were dequantized by the plain formula, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    bits, group_size = (8, None) if store == "int8" else (4, 64)
    symmetric = store != "awq_with_zero_points"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if name.endswith("_proj.weight"):
            size = group_size or value.shape[1]
            mixed = _mixed_groups(name, value.shape[1]) if store == "gptq_act_order" else None
            rounded = foreign.round_matrix(value, bits=bits, group_size=size, symmetric=symmetric, group_of=mixed)
            value = rounded.weight()
        else:
            value = value.astype(np.float16).astype(np.float32)
        parameter.data = torch.from_numpy(value)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


def _engine_logits(engine: Path) -> np.ndarray:
    import openvino as ov

    compiled = ov.Core().compile_model(engine / "openvino_model.xml", "CPU", EXACT_PROPERTIES)
    answer = compiled(
        {
            "input_ids": np.array([IDS]),
            "attention_mask": np.ones((1, len(IDS)), np.int64),
            "position_ids": np.arange(len(IDS))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    return np.array(answer["logits"])[0]


@pytest.mark.parametrize("store", list(STORES))
def test_the_engine_computes_what_the_foreign_checkpoint_means(source: Path, tmp_path: Path, store: str) -> None:
    """Built through the command line; logits equal the dequantized torch model, with low-bit constants."""
    document = trtpipe("build", _project(tmp_path, source, store), "--json", cwd=tmp_path).document
    assert set(document["stages"]) == {"convert", "verify", "compile", "emit"}
    engine = Path(document["stages"]["compile"]["path"])
    expected, found = _dequantized_logits(source, store), _engine_logits(engine)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-5
    facts = json.loads((engine / "engine.json").read_text())
    assert facts["weights"][CODES[store]]["tensors"] == 14
    report = json.loads((Path(document["stages"]["verify"]["path"]) / "report.json").read_text())
    assert report["passed"]
    assert report["end_to_end"] is None
    assert report["not_run"][0].startswith("end to end")


def _static_fp8(name: str, w: np.ndarray) -> foreign.Tensors:
    import torch

    scale = np.float32(np.abs(w).max() / 448)
    codes = torch.from_numpy(w / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    scales = {f"{name}.weight_scale": np.array(scale), f"{name}.input_scale": np.array(0.02, np.float32)}
    return {f"{name}.weight": codes} | scales


def _int8(name: str, w: np.ndarray, *, static: bool) -> foreign.Tensors:
    rounded = foreign.round_matrix(w, bits=8, group_size=w.shape[1], symmetric=True)
    tensors = {f"{name}.weight": (rounded.codes - 128).astype(np.int8), f"{name}.weight_scale": rounded.scales}
    return tensors | ({f"{name}.input_scale": np.array([0.02], np.float32)} if static else {})


def _asymmetric(name: str, w: np.ndarray) -> foreign.Tensors:
    return foreign.packed(name, foreign.round_matrix(w, bits=4, group_size=32, symmetric=False), symmetric=False)


INT_QUANTIZED = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": INT8_GROUPS}
ASYMMETRIC = foreign.config_groups(4, strategy="group", group_size=32, symmetric=False)
CONVERTED: list[tuple[dict[str, Any], Callable[[str, np.ndarray], foreign.Tensors], str]] = [
    ({"quant_method": "fp8", "activation_scheme": "static"}, _static_fp8, "fp8"),
    (INT_QUANTIZED, partial(_int8, static=True), "int8_sq"),
    (INT_QUANTIZED, partial(_int8, static=False), "int8_wo"),
    (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": ASYMMETRIC},
        _asymmetric,
        "int4_wo",
    ),
]


@pytest.mark.parametrize(("config", "store", "format_"), CONVERTED)
def test_a_conversion_is_proven_against_the_16_bit_model(
    source: Path,
    tmp_path: Path,
    config: dict[str, Any],
    store: Callable[[str, np.ndarray], foreign.Tensors],
    format_: str,
) -> None:
    """Every weight is the source's own, and the whole model is near the reference."""
    made = SourceCheckpoint(path=foreign.quantize_checkpoint(source, tmp_path / "a", config, store), digest="sha256:0")
    what = identify(made.path)
    assert what.format == format_
    convert(made, what, WantedCheckpoint(export="hf"), kv_cache="auto", out=tmp_path / "out", progress=Silent())
    (tmp_path / "report").mkdir()
    converted = QuantizedCheckpoint(path=tmp_path / "out", digest="sha256:1")
    limits = VerifyConfig(num_tokens=64, reference=source, min_top1_agreement=0.1)
    verify(made, converted, limits, out=tmp_path / "report", progress=Silent())
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["end_to_end"]["mean_kl_nats"] < 0.1


def test_a_reference_gives_the_end_to_end_figures(source: Path, tmp_path: Path) -> None:
    """Perplexity and agreement against the 16-bit model that the config names."""
    config = _project(tmp_path, source, "gptq", reference=True)
    document = trtpipe("verify", config, "--json", "--set", "verify.min_top1_agreement=0.1", cwd=tmp_path).document
    assert 0 < document["verification"]["mean_kl_nats"] < 0.8
    assert document["verification"]["tokens"] > 0


def test_a_changed_conversion_is_found(source: Path, tmp_path: Path) -> None:
    """Verification decodes the source by itself: one changed code in the converted checkpoint is named."""
    from safetensors.torch import load_file, save_file

    _project(tmp_path, source, "gptq")
    made = SourceCheckpoint(path=tmp_path / "checkpoint", digest="sha256:" + "0" * 64)
    wanted = WantedCheckpoint(export="hf")
    convert(made, identify(made.path), wanted, kv_cache="auto", out=tmp_path / "out", progress=Silent())
    file = tmp_path / "out" / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] ^= 1
    save_file(tensors, file)
    (tmp_path / "report").mkdir()
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.up_proj.*1 of "):
        verify(
            made,
            QuantizedCheckpoint(path=tmp_path / "out", digest="sha256:" + "1" * 64),
            VerifyConfig(num_tokens=64),
            out=tmp_path / "report",
            progress=Silent(),
        )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("quantization.format=fp8", "is int4_wo already"),
        ("quantization.group_size=128", "is 64 already"),
        ("engine.target=tensorrt_llm_llmapi", "'gptq int4' is not read by tensorrt_llm_llmapi on H100"),
        ("quantization.kv_cache=fp8", "nothing is calibrated"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(
    source: Path, tmp_path: Path, override: str, said: str
) -> None:
    """The format is a fact of the checkpoint; a key that contradicts it is named, with its line."""
    config = _project(tmp_path, source, "gptq")
    outcome = trtpipe("plan", config, "--set", override, "--set", "engine.gpu=H100", cwd=tmp_path, code=3)
    assert said in outcome.stderr

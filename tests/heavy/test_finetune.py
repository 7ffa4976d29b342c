"""Training through the rounding on a tiny Llama: what trains, what stays, and how a killed run ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.config.schema import CalibrationConfig, FinetuneConfig, Format, QuantizationConfig, SparsityConfig
from pipeline.core.artifacts import Calibration, QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ToolError
from pipeline.quantize.calibrate import calibrate
from pipeline.quantize.finetune import finetune
from pipeline.quantize.formats import Export, WantedCheckpoint
from pipeline.quantize.quantize import plan_formats, quantize
from pipeline.quantize.readers import read_quantized
from pipeline.quantize.source_model import load_model
from pipeline.quantize.sparsify import sparsify
from pipeline.quantize.training.ranges import trained_layers
from pipeline.quantize.training.student import LayerRanges, StudentLinear, make_student
from pipeline.quantize.training.trainer import newest_checkpoint
from pipeline.quantize.verify import verify
from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe, write_config
from tests.support.quantized import held_text, tiny_source

pytestmark = pytest.mark.heavy

GROUPED: tuple[Format, ...] = ("int4_awq", "w4a8_awq", "int4_wo")
STATIC: tuple[Format, ...] = ("fp8", "int8_sq", "w4a8_awq")
FILES = ("model.safetensors", "training.json", "config.json", "tokenizer.json")


def _layers(form: Format) -> dict[str, LayerRanges]:
    """Ranges of every layer of the tiny model, invented: training takes them as they are."""
    names = [name.removesuffix(".weight") for name in load_file(tiny_source().path / "model.safetensors")]
    ranges = LayerRanges(
        format=form,
        group_size=64 if form in GROUPED else None,
        input_range=torch.tensor(6.0) if form in STATIC else None,
    )
    return {name: ranges for name in names if name.endswith("_proj")}


def _train(out: Path, source: SourceCheckpoint | None = None, form: Format = "int4_wo", **settings: object) -> Path:
    values = {"method": "qad", "steps": 6, "max_seq_len": 32, "learning_rate": 1e-3, "warmup_steps": 1, **settings}
    resume = out.parent / f"{out.name}.resume"
    resume.mkdir(exist_ok=True)
    finetune(
        source or tiny_source(),
        _layers(form),
        FinetuneConfig.model_validate(values),
        out=out,
        resume=resume,
        progress=Silent(),
    )
    return out


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def _losses(directory: Path) -> list[float]:
    return [step["loss"] for step in json.loads((directory / "training.json").read_text())["curve"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny source after six steps of distillation."""
    return _train(tmp_path_factory.mktemp("trained") / "out")


def test_only_weights_of_quantized_layers_change(trained: Path) -> None:
    """Norms, embeddings and head keep the source's bits; every trained weight moved, in float32."""
    before, after = _weights(tiny_source().path), _weights(trained)
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) is not name.endswith("_proj.weight"), name
        assert weight.dtype == torch.float32


def test_equal_inputs_give_equal_bytes(trained: Path, tmp_path: Path) -> None:
    """Weights and record, file by file."""
    again = _train(tmp_path / "out")
    for name in FILES:
        assert (again / name).read_bytes() == (trained / name).read_bytes(), name


@pytest.mark.parametrize("form", ["int4_wo", "int8_wo", "fp8", "fp8_rowwise", "int8_sq", "w4a8_awq"])
def test_distillation_brings_the_student_closer_to_its_teacher(form: Format, tmp_path: Path) -> None:
    """On the rows it trains on, in every format."""
    # Large embeddings would hide the layers; small steps of a format are hidden by few digits.
    losses = _losses(_train(tmp_path / "out", form=form, steps=30, learning_rate=3e-3, batch_size=4))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_next_token_training_learns_the_text(tmp_path: Path) -> None:
    """A random model knows nothing, so its loss falls far."""
    losses = _losses(_train(tmp_path / "out", method="qat", steps=20, learning_rate=3e-3))
    assert losses[-1] < losses[0] - 0.2


def test_low_rank_training_merges_its_additions(tmp_path: Path) -> None:
    """Far fewer parameters train, and each weight moves by a matrix of that rank."""
    made = _train(tmp_path / "out", lora_rank=2, learning_rate=1e-2)
    record = json.loads((made / "training.json").read_text())
    before, after = _weights(tiny_source().path), _weights(made)
    whole = sum(weight.numel() for name, weight in after.items() if name.endswith("_proj.weight"))
    assert record["trainable_parameters"] < whole / 10
    for name, weight in after.items():
        if name.endswith("_proj.weight"):
            assert torch.linalg.matrix_rank(weight.double() - before[name].double(), atol=1e-6) == 2, name


def test_zeros_of_a_sparse_source_stay_zero(tmp_path: Path) -> None:
    """Both ways of training; the record that it is sparse goes along."""
    settings = SparsityConfig(method="magnitude")
    sparsify(tiny_source(), settings, CalibrationConfig(), out=tmp_path / "sparse", progress=Silent())
    source = SourceCheckpoint(path=tmp_path / "sparse", digest="sha256:sparse")
    for rank in (None, 2):
        made = _train(tmp_path / f"out {rank}", source, lora_rank=rank)
        before = _weights(source.path)
        for name, weight in _weights(made).items():
            if name.endswith("_proj.weight"):
                assert torch.equal(weight == 0, before[name] == 0), name
        assert (made / "sparsity.json").read_bytes() == (source.path / "sparsity.json").read_bytes()


def test_a_killed_training_ends_with_the_bytes_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Killed once two states are there; the second process goes on from the newest."""
    whole = _train(tmp_path / "whole", steps=40, save_every=4)
    script = (
        "import sys; from pathlib import Path; from tests.heavy.test_finetune import _train;"
        "_train(Path(sys.argv[1]), steps=40, save_every=4)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "killed")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=dict(os.environ))
    sealed = tmp_path / "killed.resume" / "checkpoint-8" / "complete.json"
    deadline = time.monotonic() + 200
    while not sealed.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "training.json").exists()
    found = newest_checkpoint(tmp_path / "killed.resume")
    assert found is not None
    assert found.name != "checkpoint-40"
    _train(tmp_path / "killed", steps=40, save_every=4)
    for name in FILES:
        assert (tmp_path / "killed" / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_state_that_was_cut_short_is_not_continued(tmp_path: Path) -> None:
    """The newest whole one is; the other is removed."""
    _train(tmp_path / "out", steps=4, save_every=2)
    resume = tmp_path / "out.resume"
    with (resume / "checkpoint-4" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    assert newest_checkpoint(resume) == resume / "checkpoint-2"
    assert not (resume / "checkpoint-4").exists()


def test_a_loss_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    """At the step where it happens; nothing is written."""
    source = SourceCheckpoint(path=shutil.copytree(tiny_source().path, tmp_path / "broken"), digest="sha256:broken")
    weights = _weights(source.path)
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, source.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ToolError, match="the loss of step 1 is not a number"):
        _train(tmp_path / "out", source)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def _student(form: Format, **ranges: object) -> StudentLinear:
    model = nn.Module()
    model.layer = nn.Linear(64, 32)
    found = LayerRanges(format=form, group_size=32 if form in GROUPED else None, **ranges)  # type: ignore[arg-type]
    make_student(model, {"layer": found}, rank=None, keep_zeros=False, keep_source=True)
    student = model.layer
    assert isinstance(student, StudentLinear)
    return student


def test_an_input_beyond_its_range_is_cut_and_gets_no_gradient() -> None:
    """What rounds to the last code does not move when the input does."""
    student = _student("fp8", input_range=torch.tensor(1.0))
    x = torch.tensor([[0.5] * 32 + [3.0] * 32], requires_grad=True)
    student(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad[0, :32].abs().min() > 0
    assert not x.grad[0, 32:].any()


def test_the_teacher_is_the_layer_before_training() -> None:
    """Unrounded, whatever the student has become."""
    torch.manual_seed(0)
    student = _student("int4_wo")
    x = torch.randn(2, 64)
    expected = nn.functional.linear(x, student.weight.detach().clone(), student.bias)
    with torch.no_grad():
        student.weight.add_(1.0)
    with student.role.teacher():
        assert torch.equal(student(x), expected)
    assert not torch.allclose(student(x), expected)


@pytest.mark.parametrize(
    ("form", "awq", "export"),
    [
        ("int4_awq", "lite", "hf"),
        ("int4_awq", "full", "hf"),
        ("int4_wo", "lite", "hf"),
        ("int8_sq", "lite", "trtllm"),
        ("fp8", "lite", "trtllm"),
        ("fp8_rowwise", "lite", "hf"),
        ("w4a8_awq", "lite", "trtllm"),
    ],
)
def test_what_was_trained_is_what_is_exported(
    form: Format, awq: Literal["lite", "full"], export: Export, tmp_path: Path
) -> None:
    """Quantized with the same calibration, the trained weights become the very numbers that training computed with."""
    source, wanted = tiny_source(), WantedCheckpoint(export=export)
    quantization = QuantizationConfig(format=form, group_size=64, awq=awq)
    calibrate(
        source,
        quantization,
        CalibrationConfig(dataset=source.path / "text.jsonl", num_samples=8, max_seq_len=64),
        formats=plan_formats(source, quantization, wanted),
        kv_ranges=False,
        out=tmp_path / "calibration",
        progress=Silent(),
    )
    calibration = Calibration(path=tmp_path / "calibration", digest="sha256:calibration")
    layers = trained_layers(source, quantization, calibration, wanted)
    settings = FinetuneConfig(method="qad", steps=4, max_seq_len=32, learning_rate=1e-3, warmup_steps=1)
    (tmp_path / "resume").mkdir()
    finetune(source, layers, settings, out=tmp_path / "trained", resume=tmp_path / "resume", progress=Silent())
    trained = SourceCheckpoint(path=tmp_path / "trained", digest="sha256:trained")
    quantize(trained, quantization, calibration, wanted, out=tmp_path / "quantized", progress=Silent())

    student = load_model(trained.path, "float32", Silent())
    make_student(student, layers, rank=None, keep_zeros=False, keep_source=False)
    reader = read_quantized(tmp_path / "quantized")
    for name in layers:
        module = student.get_submodule(name)
        assert isinstance(module, StudentLinear)
        exported = torch.from_numpy(reader.linear(name).weight)
        # Two roundings of the same number may differ where it lies between two codes: one weight in thousands.
        differ = (module.rounded_weight().detach() - exported).abs() > 1e-5 * exported.abs().max()
        assert differ.float().mean() < 1e-3, name
    (tmp_path / "report").mkdir()
    artifact = QuantizedCheckpoint(path=tmp_path / "quantized", digest="sha256:quantized")
    # Random weights have no favourite token.
    limits = held_text().model_copy(update={"min_top1_agreement": 0.1})
    verify(trained, artifact, limits, out=tmp_path / "report", progress=Silent(), original=source)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["changed_weights"]["training"]["method"] == "qad"


def test_a_build_trains_between_calibration_and_quantization(tmp_path: Path) -> None:
    """A change of the rate trains again with the same calibration; how often states are kept changes nothing."""
    write_config(tmp_path, tiny_llama(tmp_path / "checkpoint"), "int4_wo")
    training = ("finetune.method=qad", "finetune.steps=3", "finetune.max_seq_len=32", "finetune.warmup_steps=1")

    def hits(*changes: str) -> dict[str, bool]:
        words = [word for change in (*training, *changes) for word in ("--set", change)]
        document = trtpipe("build", "tiny.yaml", "--json", "--until", "verify", *words, cwd=tmp_path).document
        return {name: stage["hit"] for name, stage in document["stages"].items()}

    assert set(hits().values()) == {False}
    assert set(hits("finetune.save_every=1").values()) == {True}
    again = hits("finetune.learning_rate=1e-4")
    assert again == {"calibrate": True, "finetune": False, "quantize": False, "verify": False}


def test_a_sparse_model_at_16_bit_can_be_trained(tmp_path: Path) -> None:
    """Nothing is rounded; the weights that stayed learn to do without the others."""
    out = tmp_path / "sparse"
    sparsify(tiny_source(), SparsityConfig(method="magnitude"), CalibrationConfig(), out=out, progress=Silent())
    source = SourceCheckpoint(path=out, digest="sha256:sparse")
    layers = trained_layers(source, QuantizationConfig(format="bf16"), None, WantedCheckpoint(export="hf"))
    assert len(layers) == 14
    assert {ranges.format for ranges in layers.values()} == {"bf16"}

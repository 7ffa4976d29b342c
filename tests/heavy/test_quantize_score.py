"""Scores of a tiny random Llama: the same in every run, the same by two methods, independent of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import AutoConfig, CalibrationConfig, LayerOverride, QuantizationConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError
from pipeline.quantize import score as scoring
from pipeline.quantize import sensitivities
from pipeline.quantize.choice import Table
from tests.support.checkpoints import tiny_llama

pytestmark = pytest.mark.heavy

CALIBRATION = CalibrationConfig(num_samples=8, max_seq_len=64, batch_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceCheckpoint:
    """A checkpoint of two decoder layers."""
    return SourceCheckpoint(path=tiny_llama(tmp_path_factory.mktemp("source")), digest="sha256:0")


def scored(source: SourceCheckpoint, out: Path, group_size: Any = 64, **auto: Any) -> sensitivities.Sensitivities:
    """Score with four sequences unless told otherwise and read the result."""
    chosen = {"candidates": ("int4_awq", "int8_wo"), "num_score_samples": 4} | auto
    overrides = (LayerOverride(layers="model.layers.1.mlp.down_proj", format="fp8"),)
    quantization = QuantizationConfig(
        format="auto", group_size=group_size, overrides=overrides, auto=AutoConfig(**chosen)
    )
    out.mkdir()
    scoring.score(source, quantization, CALIBRATION, out=out, progress=Silent())
    return sensitivities.read(out)


@pytest.mark.parametrize("method", ["gradient", "kl_div"])
def test_scores_are_the_same_bytes_in_every_run_and_for_every_budget(
    source: SourceCheckpoint, tmp_path: Path, method: str
) -> None:
    """Two runs that differ only in the budget."""
    scored(source, tmp_path / "first", method=method, effective_bits=5)
    scored(source, tmp_path / "second", method=method, effective_bits=12)
    first, second = ((tmp_path / name / sensitivities.FILE).read_bytes() for name in ("first", "second"))
    assert first == second


def test_only_what_the_search_decides_is_scored_in_groups_that_engines_fuse(
    source: SourceCheckpoint, tmp_path: Path
) -> None:
    """Neither the excluded head nor the overridden layer; q, k and v are one, gate and up are one."""
    found = scored(source, tmp_path / "out")
    assert [group.name for group in found.groups] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj+k_proj+v_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_proj+up_proj",
    ]
    assert found.groups[0].weights == 128 * (128 + 64 + 64)
    assert found.fixed == {"model.layers.1.mlp.down_proj": "fp8"}
    assert found.layers["lm_head"] == 512 * 128
    assert found.text["sequences"] == 4
    assert all(group.scores["int4_awq"] > 20 * group.scores["int8_wo"] > 0 for group in found.groups)
    lowest = Table(found).choose(5)
    assert lowest.effective_bits <= 5
    assert lowest.formats["model.layers.1.mlp.down_proj"] == "fp8"


def test_the_gradient_estimates_what_kl_div_measures(source: SourceCheckpoint, tmp_path: Path) -> None:
    """Both in nats per token: within a factor of four for every layer and candidate."""
    estimated = scored(source, tmp_path / "gradient")
    measured = scored(source, tmp_path / "kl_div", method="kl_div")
    for one, other in zip(estimated.groups, measured.groups, strict=True):
        for name in ("int4_awq", "int8_wo"):
            assert other.scores[name] / 4 < one.scores[name] < other.scores[name] * 4, one.name  # type: ignore[index]


def test_outputs_taken_from_before_change_no_score(
    source: SourceCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kl_div with and without computing again the layers in front of the changed one."""
    skipping = scored(source, tmp_path / "skipping", method="kl_div")
    monkeypatch.setattr(scoring._Measured, "decoder", [])
    whole = scored(source, tmp_path / "whole", method="kl_div")
    assert skipping == whole


def test_a_group_size_that_fits_no_layer_is_refused_before_anything_is_loaded(
    source: SourceCheckpoint, tmp_path: Path
) -> None:
    """Only where a candidate has groups."""
    with pytest.raises(ConfigError, match="group_size: 128 does not fit"):
        scored(
            SourceCheckpoint(path=tiny_llama(tmp_path / "narrow", hidden_size=64), digest="sha256:1"),
            tmp_path / "out",
            group_size=128,
        )

"""Scores of a tiny random Llama: the same in every run, the same by two methods, independent of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import AutoConfig, CalibrationConfig, LayerOverride, QuantizationConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError, ToolError
from pipeline.quantize import score as scoring
from pipeline.quantize import sensitivities
from pipeline.quantize.choice import Table, options
from tests.support.checkpoints import tiny_llama
from tests.support.families import tiny_family

pytestmark = pytest.mark.heavy

DOWN = "model.layers.1.mlp.down_proj"
METHODS = ("gradient", "kl_div")
CALIBRATION = CalibrationConfig(num_samples=8, max_seq_len=64, batch_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceCheckpoint:
    """A checkpoint of two decoder layers."""
    return SourceCheckpoint(path=tiny_llama(tmp_path_factory.mktemp("source")), digest="sha256:0")


def scored(
    source: SourceCheckpoint, out: Path, group_size: Any = 64, overridden: str = DOWN, **auto: Any
) -> sensitivities.Sensitivities:
    """Score with four sequences unless told otherwise and read the result."""
    chosen = {"candidates": ("int4_awq", "int8_wo"), "num_score_samples": 4} | auto
    overrides = (LayerOverride(layers=overridden, format="fp8"),)
    quantization = QuantizationConfig(
        format="auto", group_size=group_size, overrides=overrides, auto=AutoConfig(**chosen)
    )
    out.mkdir()
    scoring.score(source, quantization, CALIBRATION, out=out, progress=Silent())
    return sensitivities.read(out)


@pytest.fixture(scope="module")
def results(source: SourceCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run of each method."""
    directory = tmp_path_factory.mktemp("scores")
    for method in METHODS:
        scored(source, directory / method, method=method, effective_bits=5)
    return {method: directory / method for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_the_same_bytes_in_every_run_and_for_every_budget(
    source: SourceCheckpoint, results: dict[str, Path], tmp_path: Path, method: str
) -> None:
    """A second run that differs only in the budget."""
    scored(source, tmp_path / "second", method=method, effective_bits=12)
    first, second = (path / sensitivities.FILE for path in (results[method], tmp_path / "second"))
    assert first.read_bytes() == second.read_bytes()


def test_only_what_the_search_decides_is_scored_in_groups_that_engines_fuse(results: dict[str, Path]) -> None:
    """Neither the excluded head nor the overridden layer; q, k and v are one, gate and up are one."""
    found = sensitivities.read(results["gradient"])
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
    assert found.fixed == {DOWN: "fp8"}
    assert found.layers["lm_head"] == 512 * 128
    assert found.text["sequences"] == 4
    assert all(group.scores["int4_awq"] > 20 * group.scores["int8_wo"] > 0 for group in found.groups)
    lowest = Table(found).choose(5)
    assert lowest.effective_bits <= 5
    assert lowest.formats[DOWN] == "fp8"


def test_the_gradient_estimates_what_kl_div_measures(results: dict[str, Path]) -> None:
    """Both in nats per token: within a factor of four for every layer and candidate."""
    estimated, measured = (sensitivities.read(results[method]) for method in METHODS)
    for one, other in zip(estimated.groups, measured.groups, strict=True):
        for name, score in one.scores.items():
            assert other.scores[name] / 4 < score < other.scores[name] * 4, one.name


def test_outputs_taken_from_before_change_no_score(
    source: SourceCheckpoint, results: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kl_div with and without computing again the layers in front of the changed one."""
    monkeypatch.setattr(scoring._Measured, "decoder", [])
    whole = scored(source, tmp_path / "whole", method="kl_div")
    assert whole == sensitivities.read(results["kl_div"])


@pytest.mark.parametrize("bits", [5, 6, 7.5])
def test_modelopts_own_solver_finds_nothing_better(results: dict[str, Path], bits: float) -> None:
    """Its linear program on the same scores, scaled so that its tolerance does not matter."""
    from modelopt.torch.opt.searcher import LPS

    known = sensitivities.read(results["gradient"])
    choice = Table(known).choose(bits)
    rows = [options(group) for group in known.groups]
    room = bits * (sum(group.weights for group in known.groups) + 256 * 128) - 8 * 256 * 128
    solver = LPS(
        name="budget",
        constraints={"bits": room},
        constraints_to_candidate_costs={"bits": [[float(option.bits) for option in row] for row in rows]},
        candidate_scores=[[1e6 * option.score for option in row] for row in rows],
    )
    selected, status = solver()
    assert status == "Optimal"
    theirs = sum(row[number].score for row, number in zip(rows, selected, strict=True))
    assert choice.loss == pytest.approx(theirs, rel=1e-6)


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


def test_layers_without_a_score_are_refused_not_taken_for_free(tmp_path: Path) -> None:
    """ModelOpt's gradient method does not reach the experts of a mixture; kl_div does."""
    source = tiny_family("Mixtral")
    options: dict[str, Any] = {"candidates": ("int8_wo",), "overridden": "model.layers.1.self_attn.o_proj"}
    with pytest.raises(ToolError, match="ModelOpt gave no score to 2 groups of layers"):
        scored(source, tmp_path / "gradient", **options)
    groups = scored(source, tmp_path / "kl_div", method="kl_div", **options).groups
    assert all(group.scores["int8_wo"] > 0 for group in groups)

"""The measures give what pencil and paper give."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipeline.config.schema import VerifyConfig
from pipeline.quantize.checks import Check, rounded, rule
from pipeline.quantize.limits import LIMITS, limits_for
from pipeline.quantize.numerics import DistributionComparison, norm, relative_l2, sqnr_db

pytestmark = pytest.mark.fast


def test_relative_error() -> None:
    """|(3, 4) - (0, 4)| / |(0, 4)| is 3 / 4."""
    assert relative_l2(np.array([3, 4], np.float32), np.array([0, 4], np.float32)) == 0.75


def test_relative_error_against_zero_is_infinite() -> None:
    """Something instead of nothing is infinitely wrong; nothing instead of nothing is right."""
    zero = np.zeros(2, np.float32)
    assert relative_l2(zero + 1, zero) == math.inf
    assert relative_l2(zero, zero) == 0


def test_nan_is_an_infinite_error() -> None:
    """A NaN never passes a limit."""
    assert relative_l2(np.array([np.nan], np.float32), np.ones(1, np.float32)) == math.inf


def test_norm_keeps_small_terms() -> None:
    """A float32 sum would lose a million ones beside 1e8 squared."""
    values = np.ones(1_000_001, np.float32)
    values[0] = 1e4
    assert norm(values) == math.sqrt(1e8 + 1e6)


def test_a_tenth_is_twenty_decibels() -> None:
    """SQNR of a relative error."""
    assert sqnr_db(0.1) == pytest.approx(20)
    assert sqnr_db(0) == 300


def test_distribution_of_two_known_models() -> None:
    """KL, agreement and perplexities of two positions over two tokens."""
    baseline = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    tested = np.log(np.array([[0.75, 0.25], [0.2, 0.8]], np.float32))
    comparison = DistributionComparison()
    for row, target in ((0, 1), (1, 0)):  # in two blocks: accumulation changes nothing
        comparison.add(baseline[row : row + 1], tested[row : row + 1], np.array([target]))
    result = comparison.result()
    kl = [
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25),
        0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8),
    ]
    assert result.tokens == 2
    assert result.mean_kl == pytest.approx(sum(kl) / 2, rel=1e-6)
    assert result.top1_agreement == 0.5
    assert result.baseline_perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.9), rel=1e-6)
    assert result.perplexity == pytest.approx(1 / math.sqrt(0.25 * 0.2), rel=1e-6)
    assert result.perplexity_increase == pytest.approx(math.sqrt(0.45 / 0.05) - 1, rel=1e-6)


def test_blocks_of_text_never_cross_a_sequence_and_add_up_to_the_whole() -> None:
    """Two sequences of 130 positions give two blocks of 65 each; their sums give the means again."""
    logits = np.random.default_rng(0).normal(size=(2, 260, 4)).astype(np.float32)
    baseline, tested = (np.log(np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)) for x in logits)
    comparison = DistributionComparison()
    comparison.add(baseline, tested, np.zeros(260, np.int64))
    result = comparison.result()
    blocks = result.blocks(sequences=2)
    assert blocks["tokens"] == [65, 65, 65, 65]
    assert blocks["kl"][1] == pytest.approx(result.kl[65:130].sum())
    assert sum(blocks["agreed"]) / 260 == pytest.approx(result.top1_agreement)
    assert math.exp(sum(blocks["nll"]) / 260) == pytest.approx(result.perplexity)
    assert math.exp(sum(blocks["source_nll"]) / 260) == pytest.approx(result.baseline_perplexity)


@pytest.mark.parametrize(
    ("value", "bound", "passed"),
    [(1.0, "max", True), (1.1, "max", False), (1.1, "min", True), (math.nan, "max", False)],
)
def test_a_check_passes_within_its_limit(value: float, bound: str, passed: bool) -> None:
    """The limit itself is allowed, NaN is not."""
    assert Check(name="x", value=value, limit=1.0, bound=bound).passed is passed  # type: ignore[arg-type]


def test_a_check_is_json_even_when_infinite() -> None:
    """JSON has no infinity and no NaN."""
    text = json.dumps(Check(name="x", value=math.inf, limit=1.0).to_json(), allow_nan=False)
    assert json.loads(text)["value"] == "inf"


def test_rounding_hides_the_last_bits() -> None:
    """Six significant digits are kept."""
    assert rounded(0.1 + 0.2) == 0.3
    assert rounded(123456789.0) == 123457000.0


def test_an_unbroken_rule_is_one_passed_check() -> None:
    """A rule that holds leaves one line in the report."""
    assert [check.passed for check in rule("structure.shape", [])] == [True]
    assert [check.layer for check in rule("structure.shape", [("a", "d", ""), ("b", "d", "")])] == ["a", "b"]


def test_config_limits_replace_the_formats() -> None:
    """What the config leaves empty stays."""
    limits = limits_for("fp8", VerifyConfig(max_kl=0.5))
    assert limits.max_kl == 0.5
    assert limits.max_layer_error == LIMITS["fp8"].max_layer_error

"""Confidence intervals against published values, and their coverage on data whose truth is known."""

from __future__ import annotations

import math
import random

import pytest

from pipeline.measure.quality import (
    MIN_BLOCKS,
    drop_between_items,
    mean_per_token,
    share_of_items,
    share_of_tokens,
    student_t,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 7, 2.36462), (0.99, 30, 2.75000), (0.9, 10, 1.81246)],
)
def test_student_quantiles_are_those_of_the_tables(confidence: float, degrees: int, expected: float) -> None:
    """Odd and even degrees of freedom."""
    assert student_t(confidence, degrees) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_a_share_of_items_has_the_published_interval(right: int, of: int, low: float, high: float) -> None:
    """Table I, method 3 of Newcombe, Statistics in Medicine 17 (1998) 857."""
    interval = share_of_items([1] * right + [0] * (of - right), 0.95)
    assert interval.estimate == right / of
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_a_drop_without_one_changed_answer_is_still_uncertain() -> None:
    """Ten equal answers do not prove that an eleventh would be equal."""
    interval = drop_between_items([1] * 10, [1] * 10, 0.95)
    assert interval.estimate == 0
    assert interval.low < -0.2
    assert interval.high > 0.2


def test_a_drop_knows_which_model_is_worse() -> None:
    """Twelve answers lost and two won of fifty: method 10 of Newcombe, Statistics in Medicine 17 (1998) 2635."""
    before, after = [1] * 48 + [0] * 2, [1] * 36 + [0] * 12 + [1] * 2
    interval = drop_between_items(before, after, 0.95)
    assert interval.estimate == pytest.approx(0.2)
    assert (interval.low, interval.high) == (pytest.approx(0.0569, abs=5e-5), pytest.approx(0.3404, abs=5e-5))
    assert drop_between_items(after, before, 0.95).high == pytest.approx(-interval.low)


def test_the_interval_of_a_mean_is_the_textbook_one_for_equal_blocks() -> None:
    """Mean 4.5 and standard error sqrt(6/8) of 1 to 8, at 7 degrees of freedom."""
    interval = mean_per_token([10.0 * value for value in range(1, 9)], [10] * 8, 0.95)
    assert interval.estimate == pytest.approx(4.5)
    assert interval.high - interval.estimate == pytest.approx(2.36462 * math.sqrt(6 / 8), rel=1e-5)


def test_the_interval_of_a_mean_holds_the_truth_as_often_as_it_says() -> None:
    """Blocks of unequal length whose tokens move together: 95 % of 600 intervals hold the true mean."""
    draw = random.Random(7)
    held = 0
    for _ in range(600):
        tokens = [draw.choice((63, 64)) for _ in range(32)]
        sums = [n * (0.3 + draw.gauss(0, 0.1)) + draw.gauss(0, math.sqrt(n)) for n in tokens]
        interval = mean_per_token(sums, tokens, 0.95)
        held += interval.low <= 0.3 <= interval.high
    assert 0.93 < held / 600 < 0.97


def test_the_interval_of_a_share_of_tokens_grows_when_tokens_of_a_block_agree_together() -> None:
    """The same share, spread evenly or in whole blocks, is known far better when it is spread."""
    even = share_of_tokens([32] * 16, [64] * 16, 0.95)
    clumped = share_of_tokens([64] * 8 + [0] * 8, [64] * 16, 0.95)
    assert even.estimate == clumped.estimate == 0.5
    assert clumped.high - clumped.low > 5 * (even.high - even.low)


def test_complete_agreement_is_not_certainty() -> None:
    """512 equal tokens leave room for a small disagreement."""
    interval = share_of_tokens([64] * 8, [64] * 8, 0.95)
    assert interval.estimate == interval.high == 1
    assert 0.98 < interval.low < 1


def test_too_few_blocks_say_nothing() -> None:
    """The interval is everything that is possible, in JSON null."""
    few = MIN_BLOCKS - 1
    assert mean_per_token([1.0] * few, [64] * few, 0.95).document() == {"estimate": 0.015625, "low": None, "high": None}
    share = share_of_tokens([64] * few, [64] * few, 0.95)
    assert (share.low, share.high) == (0, 1)

"""How sure a measured loss of quality is: estimates with confidence intervals. Pure arithmetic on plain numbers.

Neighbouring tokens are not independent, so tokens are summed over blocks of text first and the blocks are
the sample: the intervals are as wide as blocks differ, not as tokens do. Two models are always compared
on the same blocks, so what is hard about a text cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_BLOCKS = 8
"""With fewer blocks their spread is not known well enough to say anything."""
_BISECTIONS = 100


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and where the true value lies with the confidence asked for; infinite ends: nothing is known."""

    estimate: float
    low: float
    high: float

    def document(self) -> dict[str, float | None]:
        """As JSON with six significant digits; null for an infinite end."""
        return {name: _rounded(value) for name, value in vars(self).items()}


def mean_per_token(sums: Sequence[float], tokens: Sequence[int], confidence: float) -> Interval:
    """Mean of a quantity per token, from its sums over blocks of nearly equal length.

    Ratio estimator r = sum(x_i) / sum(n_i) with the variance b/(b-1) * sum((x_i - r n_i)^2) / sum(n_i)^2
    (Cochran, Sampling Techniques, 3rd ed., 6.4, without the finite-population factor) and Student's t with
    b - 1 degrees of freedom.
    """
    total = sum(tokens)
    mean = math.fsum(sums) / total
    blocks = len(sums)
    if blocks < MIN_BLOCKS:
        return Interval(estimate=mean, low=-math.inf, high=math.inf)
    half = student_t(confidence, blocks - 1) * math.sqrt(_ratio_variance(sums, tokens, mean))
    return Interval(estimate=mean, low=mean - half, high=mean + half)


def share_of_tokens(counts: Sequence[int], tokens: Sequence[int], confidence: float) -> Interval:
    """Share of tokens with a property, from counts over blocks; never certain, even when all or none have it.

    Wilson's score interval over the effective number of tokens, which is the number divided by how much more
    the share varies between blocks than between independent tokens (design effect, at least 1; Korn and
    Graubard, Survey Methodology 24 (1998) 193), with Student's t for the normal quantile.
    """
    total, blocks = sum(tokens), len(counts)
    share = sum(counts) / total
    if blocks < MIN_BLOCKS:
        return Interval(estimate=share, low=0, high=1)
    independent = share * (1 - share) / total
    effect = max(1.0, _ratio_variance(counts, tokens, share) / independent) if independent else 1.0
    low, high = _wilson(share, total / effect, student_t(confidence, blocks - 1))
    return Interval(estimate=share, low=low, high=high)


def share_of_items(passed: Sequence[int], confidence: float) -> Interval:
    """Share of independent items answered correctly (1) rather than not (0): Wilson's score interval."""
    share = sum(passed) / len(passed)
    low, high = _wilson(share, len(passed), _normal(confidence))
    return Interval(estimate=share, low=low, high=high)


def drop_between_items(before: Sequence[int], after: Sequence[int], confidence: float) -> Interval:
    """Share of items answered correctly before, less the share after; the same items in the same order.

    Newcombe's interval for paired proportions (Statistics in Medicine 17 (1998) 2635, method 10): the score
    intervals of both shares, joined with the correlation of the answers.
    """
    n = len(before)
    both: int = sum(x * y for x, y in zip(before, after, strict=True))
    lost, won = sum(before) - both, sum(after) - both
    neither = n - both - lost - won
    z = _normal(confidence)
    p1, p2 = sum(before) / n, sum(after) / n
    (low1, high1), (low2, high2) = _wilson(p1, n, z), _wilson(p2, n, z)
    margins = math.prod((both + lost, won + neither, both + won, lost + neither))
    cross: float = both * neither - lost * won
    # Continuity correction of the correlation, only where it is positive (same source).
    cross = max(cross - n / 2, 0) if cross > 0 else cross
    correlation = cross / math.sqrt(margins) if margins else 0.0
    below = _joined(p1 - low1, high2 - p2, correlation)
    above = _joined(high1 - p1, p2 - low2, correlation)
    return Interval(estimate=p1 - p2, low=p1 - p2 - below, high=p1 - p2 + above)


def student_t(confidence: float, degrees: int) -> float:
    """The t that a Student variable stays within, on both sides, with this probability; by bisection."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2 == 1
    term, series = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 if odd else 1, degrees, 2):
        series += term
        term *= cosine * cosine * k / (k + 1)
    series *= math.sin(angle)
    return 2 / math.pi * (angle + series) if odd else series


def _normal(confidence: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf((1 + confidence) / 2)


def _ratio_variance(sums: Sequence[float], tokens: Sequence[int], ratio: float) -> float:
    residuals = math.fsum((x - ratio * n) ** 2 for x, n in zip(sums, tokens, strict=True))
    return len(sums) / (len(sums) - 1) * residuals / sum(tokens) ** 2


def _wilson(share: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's score interval (Journal of the American Statistical Association 22 (1927) 209)."""
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    # The ends at 0 and 1 are exact; rounding would miss them.
    low = 0.0 if share == 0 else (middle - spread) / scale
    return low, 1.0 if share == 1 else (middle + spread) / scale


def _joined(first: float, second: float, correlation: float) -> float:
    return math.sqrt(max(0.0, first * first - 2 * correlation * first * second + second * second))


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None

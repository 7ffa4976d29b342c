"""Measures of how far two arrays, layers or models are apart. Pure numpy; sums are taken in float64.

Float32 sums are not good enough here: over a million products a cosine or a norm can drift past the very
limits that are checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.quantize.tensor_files import FloatArray


def norm(values: FloatArray) -> float:
    """L2 norm over all elements, summed in float64."""
    flat = values.reshape(-1)
    return math.sqrt(float(np.einsum("i,i->", flat, flat, dtype=np.float64)))


def relative_l2(approximation: FloatArray, exact: FloatArray) -> float:
    """||approximation - exact|| / ||exact||; 0 for two zeros, infinity against a zero `exact` or with NaN."""
    error, size = norm(approximation - exact), norm(exact)
    if not math.isfinite(error):
        return math.inf
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def sqnr_db(relative_error: float) -> float:
    """Signal to quantization noise ratio in dB of a relative L2 error: -20 log10(error); 300 at zero error."""
    return 300.0 if relative_error == 0 else -20 * math.log10(relative_error)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a model under test predicts a text, beside its baseline.

    Attributes:
        tokens: predictions scored.
        mean_kl: KL(baseline || tested) per token in nats.
        top1_agreement: share of positions with the same most likely token, 0 to 1.
        baseline_perplexity, perplexity: exp of the mean negative log-likelihood of the text.
    """

    tokens: int
    mean_kl: float
    top1_agreement: float
    baseline_perplexity: float
    perplexity: float

    @property
    def perplexity_increase(self) -> float:
        """Relative increase over the baseline: 0.1 is 10 %."""
        return self.perplexity / self.baseline_perplexity - 1


class DistributionComparison:
    """Accumulates `Distribution` over blocks of positions."""

    def __init__(self) -> None:
        self._tokens = self._agreed = 0
        self._kl = self._baseline_nll = self._nll = 0.0

    def add(self, baseline: FloatArray, tested: FloatArray, targets: npt.NDArray[np.int64]) -> None:
        """Add a block of n positions.

        Args:
            baseline: log-probabilities, float32 [n, vocab].
            tested: the same of the model under test.
            targets: the token that follows in the text, [n].
        """
        rows = np.arange(len(targets))
        self._tokens += len(targets)
        self._kl += float((np.exp(baseline) * (baseline - tested)).sum(dtype=np.float64))
        self._agreed += int(np.count_nonzero(baseline.argmax(axis=1) == tested.argmax(axis=1)))
        self._baseline_nll -= float(baseline[rows, targets].sum(dtype=np.float64))
        self._nll -= float(tested[rows, targets].sum(dtype=np.float64))

    def result(self) -> Distribution:
        """The measures over everything added so far; at least one position."""
        return Distribution(
            tokens=self._tokens,
            mean_kl=self._kl / self._tokens,
            top1_agreement=self._agreed / self._tokens,
            baseline_perplexity=math.exp(self._baseline_nll / self._tokens),
            perplexity=math.exp(self._nll / self._tokens),
        )

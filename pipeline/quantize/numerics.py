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


_BLOCK = 64  # positions; nearer ones tell much of the same


@dataclass(frozen=True, kw_only=True, eq=False)
class Distribution:
    """How a model under test predicts a text, beside its baseline.

    Attributes:
        tokens: predictions scored.
        mean_kl: KL(baseline || tested) per token in nats.
        top1_agreement: share of positions with the same most likely token, 0 to 1.
        baseline_perplexity, perplexity: exp of the mean negative log-likelihood of the text.
        kl, agreed, baseline_nll, nll: the same per position, float64 [tokens], in the order of the text.
    """

    tokens: int
    mean_kl: float
    top1_agreement: float
    baseline_perplexity: float
    perplexity: float
    kl: npt.NDArray[np.float64]
    agreed: npt.NDArray[np.float64]
    baseline_nll: npt.NDArray[np.float64]
    nll: npt.NDArray[np.float64]

    @property
    def perplexity_increase(self) -> float:
        """Relative increase over the baseline: 0.1 is 10 %."""
        return self.perplexity / self.baseline_perplexity - 1

    def blocks(self, sequences: int) -> dict[str, list[float]]:
        """Sums over blocks of neighbouring positions, what a confidence interval is made of.

        Each of the `sequences` equal parts of the text is cut into nearly equal blocks of about 64 positions.
        """
        n_blocks = max(1, round(self.tokens / sequences / _BLOCK))
        series = {"kl": self.kl, "agreed": self.agreed, "source_nll": self.baseline_nll, "nll": self.nll}
        cut = {
            name: [part for row in values.reshape(sequences, -1) for part in np.array_split(row, n_blocks)]
            for name, values in series.items()
        }
        sums = {name: [float(part.sum()) for part in parts] for name, parts in cut.items()}
        return {"tokens": [len(part) for part in cut["kl"]], **sums}


class DistributionComparison:
    """Accumulates `Distribution` over blocks of positions."""

    def __init__(self) -> None:
        self._positions: list[npt.NDArray[np.float64]] = []

    def add(self, baseline: FloatArray, tested: FloatArray, targets: npt.NDArray[np.int64]) -> None:
        """Add a block of n positions.

        Args:
            baseline: log-probabilities, float32 [n, vocab].
            tested: the same of the model under test.
            targets: the token that follows in the text, [n].
        """
        rows = np.arange(len(targets))
        measures = (
            (np.exp(baseline) * (baseline - tested)).sum(axis=1, dtype=np.float64),
            baseline.argmax(axis=1) == tested.argmax(axis=1),
            -baseline[rows, targets],
            -tested[rows, targets],
        )
        self._positions.append(np.array(measures, np.float64))

    def result(self) -> Distribution:
        """The measures over everything added so far; at least one position."""
        kl, agreed, baseline_nll, nll = np.concatenate(self._positions, axis=1)
        return Distribution(
            tokens=len(kl),
            mean_kl=float(kl.mean()),
            top1_agreement=float(agreed.mean()),
            baseline_perplexity=math.exp(baseline_nll.mean()),
            perplexity=math.exp(nll.mean()),
            kl=kl,
            agreed=agreed,
            baseline_nll=baseline_nll,
            nll=nll,
        )

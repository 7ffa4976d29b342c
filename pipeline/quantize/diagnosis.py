"""Why a quantized layer is wrong: tries repairs until one makes it right, and names that one.

Each hypothesis changes the stored layer (or what it is compared with) in one way; the first after which
every weight lies within its rounding step again is the cause. Nothing here is a guess from symptoms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeline.quantize.numerics import relative_l2
from pipeline.quantize.reference import (
    FP8_ACTIVATIONS,
    PACKED,
    SMOOTHED,
    Array,
    QuantizedLinear,
    pack_int4,
    unpack_int4,
)
from pipeline.quantize.tensor_files import FloatArray

Mask = npt.NDArray[np.bool_]

# A scale fitted to rounded weights is an estimate, and a stored one may be rounded to 16 bit: with it the
# largest codes still land within half a step more than the limit.
_FIT_SLACK = 0.5
INT4_MAX = 7
_HALF_STEP = 0.5
_NEAR_ONE = 0.02  # a fitted scale this close to the stored one is not the thing that is wrong


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A layer under suspicion.

    Attributes:
        layer: as stored; its pre_quant_scale includes one that was folded into the norm in front.
        source: W of the source, float32 [out, in].
        max_step_error: the limit within which each weight must lie, in rounding steps.
        max_clip: int4 weights up to this multiple of the largest code may be cut to it; 1 where none are.
    """

    layer: QuantizedLinear
    source: FloatArray
    max_step_error: float
    max_clip: float = 1.0

    @property
    def target(self) -> FloatArray:
        """W / p: what the stored weight should mean, cut to the codes' range where the format clips."""
        p = self.layer.pre_quant_scale
        wanted = self.source if p is None else self.source / p
        return wanted if self.max_clip == 1 else clipped(wanted, self.layer.step(), self.max_clip)

    @cached_property
    def bad(self) -> Mask:
        """Weights farther than the limit from their target, [out, in]."""
        return ~(step_errors(self.layer, self.target) <= self.max_step_error)

    def repaired_by(self, layer: QuantizedLinear, *, slack: float = 0) -> bool:
        """Whether `layer` in place of the stored one is right, up to `slack` more steps."""
        return not replace(self, layer=layer, max_step_error=self.max_step_error + slack).bad.any()


def clipped(wanted: FloatArray, step: FloatArray, max_clip: float) -> FloatArray:
    """Weights [out, in] cut to the range of int4 codes `step` apart, but for those beyond `max_clip` times that."""
    within = np.abs(wanted) <= (INT4_MAX * max_clip + _HALF_STEP) * step
    return np.where(within, np.clip(wanted, -(INT4_MAX + 1) * step, INT4_MAX * step), wanted)


def step_errors(layer: QuantizedLinear, target: FloatArray) -> FloatArray:
    """|grid_weight - target| in units of the distance between neighbouring codes, [out, in].

    Correct rounding gives at most 0.5. Where two codes are unequally spaced (fp8) the wider gap is not
    known from the code alone, so a value just below a power of two still gives at most 0.5.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.abs(layer.grid_weight - target) / layer.step())


def weight_cause(suspect: Suspect) -> str:
    """Say what is wrong with a layer's weight, its scale or its pre-quant scale."""
    if not np.isfinite(suspect.layer.weight).all():
        count = int(np.count_nonzero(~np.isfinite(suspect.layer.weight)))
        return f"{count} weights are not finite: corrupted codes or scale"
    hypotheses: tuple[Callable[[Suspect], str], ...] = (
        _nibbles, _scale, _smoothing, _transposition, _permutation, _other_weight,
    )  # fmt: skip
    return next((cause for cause in (test(suspect) for test in hypotheses) if cause), _region(suspect))


def input_cause(layer: QuantizedLinear, x: FloatArray, y: FloatArray, limit: float) -> str:
    """Say what is wrong with a layer whose weight is right and whose output is not.

    Args:
        layer: as stored, with the pre-quant scale it should have.
        x: recorded input, float32 [n, in].
        y: recorded output, float32 [n, out].
        limit: relative L2 error allowed.
    """
    if layer.input_scale is not None:
        scaled = x if layer.pre_quant_scale is None else x * layer.pre_quant_scale
        top = float(np.abs(scaled).max()) / (448 if layer.format in FP8_ACTIVATIONS else 127)
        factors = {2.0**power for power in range(-10, 11) if power} | {top / layer.input_scale}
        errors = {
            factor: relative_l2(replace(layer, input_scale=layer.input_scale * factor).forward(x), y)
            for factor in factors
        }
        # fp8 forgives powers of two; of equally good factors the one nearest to 1 is the likely one.
        best = min(errors, key=lambda factor: (round(errors[factor], 6), abs(math.log(factor))))
        if errors[best] <= limit:
            return f"corrupted scale: input_scale times {best:.3g} repairs the layer"
    if layer.bias is not None:
        shift = (y - layer.forward(x)).mean(axis=0)
        if relative_l2(replace(layer, bias=layer.bias + shift).forward(x), y) <= limit:
            return "the bias is wrong"
    if layer.input_scale is not None:
        return "corrupted scale: the weight is right, input_scale is not"
    return "the weight agrees with the source; the recorded input and output do not belong to it"


def _nibbles(suspect: Suspect) -> str:
    layer = suspect.layer
    if layer.format not in PACKED:
        return ""
    swapped = replace(layer, codes=(layer.codes << 4) | (layer.codes >> 4))
    return "swapped nibble order: the high nibble holds the even row" if suspect.repaired_by(swapped) else ""


def _scale(suspect: Suspect) -> str:
    """Fit one factor per stored scale by least squares and see whether that repairs the layer."""
    layer = suspect.layer
    if layer.scale is None:
        return ""
    groups = layer.scale.shape[1] if layer.scale.ndim == 2 else 1  # noqa: PLR2004 - [out, groups]
    rows, columns = layer.shape
    stored, target = (array.reshape(rows, groups, columns // groups) for array in (layer.grid_weight, suspect.target))
    over = "rgi,rgi->rg" if layer.scale.ndim else "rgi,rgi->"
    with np.errstate(divide="ignore", invalid="ignore"):
        # Rounding noise is nearly independent of the target, so this ratio is not biased by it.
        factor = np.einsum(over, target, target, dtype=np.float64) / np.einsum(over, stored, target, dtype=np.float64)
    factor = np.nan_to_num(factor, nan=1.0, posinf=1.0).astype(np.float32).reshape(layer.scale.shape)
    damaged = suspect.bad.reshape(rows, groups, -1).any(axis=2) if layer.scale.ndim else suspect.bad.any()
    wrong = (factor > 0) & (np.abs(factor - 1) > _NEAR_ONE) & np.reshape(damaged, factor.shape)
    fitted = replace(layer, scale=layer.scale * np.where(wrong, factor, 1).astype(np.float32))
    if not wrong.any() or not suspect.repaired_by(fitted, slack=_FIT_SLACK):
        return ""
    if (layer.scale == 1).all():
        return "scale not applied: every weight_scale is 1"
    first = tuple(int(index[0]) for index in np.nonzero(np.atleast_1d(wrong)))
    times = float(np.median(factor[wrong]))
    where = (
        f"{int(wrong.sum())} of {layer.scale.size} values, first at {list(first)}" if layer.scale.ndim else "the scalar"
    )
    return f"corrupted scale: weight_scale ({where}) times {times:.2g} repairs the layer"


def _smoothing(suspect: Suspect) -> str:
    """The pre-quant scale: not in the weight, inverted, or wrong for some inputs."""
    layer, p = suspect.layer, suspect.layer.pre_quant_scale
    if layer.format not in SMOOTHED:
        return ""
    if p is not None:
        if suspect.repaired_by(replace(layer, pre_quant_scale=None), slack=_FIT_SLACK):
            return "pre-quant scale without effect on the weight: the stored weight was never divided by it"
        if suspect.repaired_by(replace(layer, pre_quant_scale=1 / p), slack=_FIT_SLACK):
            return "pre-quant scale inverted"
    with np.errstate(divide="ignore", invalid="ignore"):
        fitted = np.einsum("oi,oi->i", suspect.source, suspect.source, dtype=np.float64) / np.einsum(
            "oi,oi->i", suspect.source, layer.grid_weight, dtype=np.float64
        )
    current = np.ones(layer.shape[1], np.float32) if p is None else p
    fitted = np.nan_to_num(fitted, nan=1.0, posinf=1.0).astype(np.float32)
    wrong = (np.abs(fitted / current - 1) > _NEAR_ONE) & suspect.bad.any(axis=0)
    corrected = replace(layer, pre_quant_scale=np.where(wrong, fitted, current))
    if not wrong.any() or not suspect.repaired_by(corrected, slack=_FIT_SLACK):
        return ""
    first = int(np.flatnonzero(wrong)[0])
    what = "pre-quant scale missing" if p is None else "pre-quant scale wrong"
    stored, fits = f"{current[first]:.4g}", f"{fitted[first]:.4g}"
    return f"{what}: {int(wrong.sum())} inputs, first {first}: {stored} is stored, about {fits} fits"


def _transposition(suspect: Suspect) -> str:
    """A square block of codes, or of packed bytes, whose rows and columns were exchanged."""
    layer = suspect.layer
    for box in _square_boxes(suspect.bad):
        rows, columns = box
        where = f"rows {rows.start} to {rows.stop - 1}, columns {columns.start} to {columns.stop - 1}"
        for codes in _transposed(layer, rows, columns):
            if suspect.repaired_by(replace(layer, codes=codes)):
                return f"transposed block: {where}"
    return ""


def _square_boxes(bad: Mask) -> Iterator[tuple[slice, slice]]:
    """Squares around the bad weights: the tight one, and those aligned to powers of two around it."""
    rows, columns = (np.flatnonzero(bad.any(axis=axis)) for axis in (1, 0))
    low = int(rows[0]), int(columns[0])
    high = int(rows[-1]) + 1, int(columns[-1]) + 1
    size = max(high[0] - low[0], high[1] - low[1])
    for extent in sorted({size, *(2**power for power in range(15) if size <= 2**power < 2 * size + 2), *bad.shape}):
        for start in {low, (low[0] // extent * extent, low[1] // extent * extent)}:
            stop = start[0] + extent, start[1] + extent
            if stop[0] <= bad.shape[0] and stop[1] <= bad.shape[1] and stop >= high:
                yield slice(start[0], stop[0]), slice(start[1], stop[1])


def _transposed(layer: QuantizedLinear, rows: slice, columns: slice) -> Iterator[Array]:
    """`layer.codes` with the block transposed, in each unit in which it can have happened."""
    if layer.format not in PACKED:
        codes = layer.codes.copy()
        codes[rows, columns] = codes[rows, columns].T
        yield codes
        return
    numbers = unpack_int4(layer.codes)
    numbers[rows, columns] = numbers[rows, columns].T
    yield pack_int4(numbers)
    for extent in {(rows.stop - rows.start + 1) // 2, columns.stop - columns.start}:
        start = rows.start // 2
        block = slice(start, start + extent), slice(columns.start, columns.start + extent)
        codes = layer.codes.copy()
        if codes[block].shape == (extent, extent):
            codes[block] = codes[block].T
            yield codes


def _permutation(suspect: Suspect) -> str:
    """Rows that are right and in the wrong order (codes alone, or codes with their scales)."""
    rows = np.flatnonzero(suspect.bad.any(axis=1))
    stored, target = suspect.layer.weight[rows], suspect.target[rows]
    lengths = np.linalg.norm(stored, axis=1)[:, None] * np.linalg.norm(target, axis=1)
    order = np.argmax(stored @ target.T / np.maximum(lengths, np.finfo(np.float32).tiny), axis=0)
    if (order == np.arange(len(rows))).all() or len(set(order.tolist())) != len(rows):
        return ""
    moved = f"permuted rows: row {rows[order[0]]} of the file is row {rows[0]} of the source, {len(rows)} rows in all"
    errors = np.linalg.norm(stored[order] - target, axis=1) / np.maximum(np.linalg.norm(target, axis=1), 1e-30)
    return moved if float(np.median(errors)) < 0.5 else ""  # noqa: PLR2004 - uncorrelated rows are at 1.4


def _other_weight(suspect: Suspect) -> str:
    """Nothing in common with the source: another tensor's data."""
    error = relative_l2(suspect.layer.weight, suspect.target)
    return "the weight is another tensor's: it has nothing in common with the source" if error > 1.2 else ""  # noqa: PLR2004


def _region(suspect: Suspect) -> str:
    """Where the damage is, when no single repair explains it."""
    bad = suspect.bad
    rows, columns = (np.flatnonzero(bad.any(axis=axis)) for axis in (1, 0))
    return (
        f"corrupted weight: {int(bad.sum())} values in rows {rows[0]} to {rows[-1]}, "
        f"columns {columns[0]} to {columns[-1]}"
    )

"""How good a format would be, without making it: weights are rounded as they are read, and the model is scored.

A trial answers in minutes what a format would cost, also one that no target takes (NF4, two and three bits).
Weights alone are rounded, each layer when it computes; nothing is calibrated and nothing is written. The text, the
measures and the 16-bit model to compare with are those of `verify`.

NF4 is rounded by bitsandbytes, layer by layer, and every layer is compared with the formula of `rounding`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.config.formats import covers
from pipeline.config.schema import VerifyConfig
from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, HostError, ToolError
from pipeline.quantize.fake_quant import build_model, compare_hidden, last_hidden
from pipeline.quantize.numerics import Distribution
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.reference import QuantizedLinear
from pipeline.quantize.rounding import STATISTICS_BLOCK, TREE_STEP, round_fp8, round_integer, round_levels, round_nf4
from pipeline.quantize.structure import linear_modules
from pipeline.quantize.tensor_files import FloatArray, cast
from pipeline.quantize.verify import held_ids

TrialFormat = Literal["nf4", "int2", "int3", "int4_wo", "int8_wo", "fp8", "fp8_rowwise"]
NF4_BLOCK = 64
_SCALE_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A format to try.

    Attributes:
        format: its word.
        block_size: weights that share a scale (nf4, int2, int3, int4_wo).
        double_quant: nf4: the scales are rounded too.
    """

    format: TrialFormat
    block_size: int = NF4_BLOCK
    double_quant: bool = False

    @property
    def label(self) -> str:
        """The format with what it was tried with, for people."""
        if self.format in ("int8_wo", "fp8_rowwise"):
            return f"{self.format} (per output)"
        if self.format == "fp8":
            return "fp8 (weights only)"
        return f"{self.format} ({'double quantization, ' if self.double_quant else ''}{self.block_size} per scale)"

    @property
    def bits(self) -> float:
        """Bits per weight with scales as float32; rows are taken as long, so that a scale per row counts nothing."""
        whole: Mapping[str, int] = {"nf4": 4, "int2": 2, "int3": 3, "int4_wo": 4}
        if self.format not in whole:
            return 8.0
        bits = whole[self.format]
        if self.double_quant:
            return bits + 8 / self.block_size + _SCALE_BITS / (self.block_size * STATISTICS_BLOCK)
        zero_point = bits if self.format in ("int2", "int3") else 0
        return bits + (_SCALE_BITS + zero_point) / self.block_size

    def rounding(self) -> Callable[[FloatArray], FloatArray]:
        """The function that rounds one weight.

        Raises:
            HostError: nf4 without bitsandbytes.
        """
        match self.format:
            case "nf4":
                return _nf4_of_bitsandbytes(self.block_size, double_quant=self.double_quant)
            case "int2" | "int3":
                bits = int(self.format[3])
                return lambda weight: round_levels(weight, bits, self.block_size)
            case "int4_wo":
                return lambda weight: round_integer(weight, 4, self.block_size)
            case "int8_wo":
                return lambda weight: round_integer(weight, 8, weight.shape[1])
            case "fp8" | "fp8_rowwise":
                return lambda weight: round_fp8(weight, per_row=self.format == "fp8_rowwise")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a format did to the model.

    Attributes:
        trial: what was tried.
        scores: against the 16-bit model on the held text.
        weight_error: relative L2 error of each rounded weight, layer -> error.
    """

    trial: Trial
    scores: Distribution
    weight_error: Mapping[str, float]

    def document(self) -> dict[str, Any]:
        """The row as JSON."""
        errors = sorted(self.weight_error.values())
        return {
            "format": self.trial.format,
            "label": self.trial.label,
            "bits_per_weight": round(self.trial.bits, 3),
            "layers": len(errors),
            "median_weight_error": round(float(np.median(errors)), 5),
            "max_weight_error": round(errors[-1], 5),
            "tokens": self.scores.tokens,
            "source_perplexity": round(self.scores.baseline_perplexity, 4),
            "perplexity": round(self.scores.perplexity, 4),
            "perplexity_increase": round(self.scores.perplexity_increase, 5),
            "mean_kl_nats": round(self.scores.mean_kl, 5),
            "top1_agreement": round(self.scores.top1_agreement, 4),
        }


@dataclass(kw_only=True)
class _RoundedReader:
    """A 16-bit checkpoint whose linear layers are rounded as they are read."""

    source: HuggingFaceReader
    plain: HuggingFaceReader
    excluded: tuple[str, ...]
    rounding: Callable[[FloatArray], FloatArray]
    weight_error: dict[str, float] = field(default_factory=dict)

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer, rounded or not."""
        if covers(self.excluded, module):
            return self.plain.linear(module)
        layer = self.source.linear(module)
        weight = np.asarray(layer.codes, np.float32)
        rounded = self.rounding(weight)
        self.weight_error[module] = float(np.linalg.norm(rounded - weight) / (np.linalg.norm(weight) or 1))
        return QuantizedLinear(format="float", codes=rounded, bias=self.plain.linear(module).bias)

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter that is not a linear layer's."""
        return self.plain.tensor(name)


def try_formats(
    source: Path,
    trials: Sequence[Trial],
    *,
    dtype: str,
    excluded: tuple[str, ...],
    limits: VerifyConfig,
    progress: Progress,
) -> list[TrialResult]:
    """Score each format on the held text.

    Args:
        source: a 16- or 32-bit Hugging Face checkpoint.
        trials: what to try, in this order.
        dtype: what stays unrounded is held in: "bfloat16" or "float16".
        excluded: globs of modules that stay at 16 bit.
        limits: text and number of tokens; nothing is judged.
        progress: told of each pass.

    Raises:
        ConfigError: a block size does not divide the inputs of a layer, or everything is excluded.
        HostError: bitsandbytes is missing.
        ToolError: bitsandbytes computes another NF4 than its paper defines.
    """
    original = HuggingFaceReader(source)
    chosen = {name: shape for name, shape in linear_modules(original).items() if not covers(excluded, name)}
    if not chosen:
        raise ConfigError("quantization.exclude leaves no layer to probe", hint="Exclude fewer modules.")
    for each in trials:
        _check_blocks(each, chosen)
    roundings = [each.rounding() for each in trials]
    ids = held_ids(source, limits)
    plain = HuggingFaceReader(source, rounding=lambda _name, values: cast(values, dtype))
    baseline = build_model(source, plain, resident=False)
    expected = last_hidden(baseline, ids, "16-bit source", progress)
    found = []
    for each, rounding in zip(trials, roundings, strict=True):
        reader = _RoundedReader(source=original, plain=plain, excluded=excluded, rounding=rounding)
        model = build_model(source, reader, resident=False)
        hidden = last_hidden(model, ids, each.label, progress)
        scores = compare_hidden((baseline, expected), (model, hidden), ids, progress)
        found.append(TrialResult(trial=each, scores=scores, weight_error=dict(reader.weight_error)))
    return found


def _check_blocks(each: Trial, shapes: Mapping[str, tuple[int, int]]) -> None:
    if each.format not in ("int2", "int3", "int4_wo"):
        return
    unfit = [name for name, (_rows, columns) in shapes.items() if columns % each.block_size]
    if unfit:
        fitting = [size for size in (128, 64, 32, 16) if all(columns % size == 0 for _, columns in shapes.values())]
        hint = f"Add --block-size {fitting[0]}." if fitting else "Exclude these layers (quantization.exclude)."
        message = f"{each.format}: {each.block_size} does not divide the inputs of {unfit[0]} and {len(unfit) - 1} more"
        raise ConfigError(message, hint=hint)


def _nf4_of_bitsandbytes(block_size: int, *, double_quant: bool) -> Callable[[FloatArray], FloatArray]:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise HostError("nf4 is rounded by bitsandbytes, which is not installed", hint="pip install 'trtpipe[probe]'.")
    # It advises an optional GPU kernel package on every import.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import torch
    from bitsandbytes import functional

    def rounded(weight: FloatArray) -> FloatArray:
        # As one row: 0.50.2 decodes wrongly on AVX-512 when a block of 64 or more runs over the end of a row.
        row = torch.from_numpy(weight.reshape(1, -1))
        packed, state = functional.quantize_4bit(
            row, blocksize=block_size, quant_type="nf4", compress_statistics=double_quant
        )
        values: FloatArray = functional.dequantize_4bit(packed, state).numpy().reshape(weight.shape)
        formula = round_nf4(weight, block_size, double_quant=double_quant)
        # Its CPU code misses the nearest 8-bit number where two are nearly as near: a scale is one step off then.
        allowed = TREE_STEP * np.abs(weight).max() if double_quant else 0
        same = bool(np.all(np.abs(values - formula) <= allowed))
        if not same:
            raise ToolError(
                "bitsandbytes computes another NF4 than the QLoRA paper defines",
                hint="Install the version that trtpipe pins: pip install 'trtpipe[probe]'.",
            )
        return values

    return rounded

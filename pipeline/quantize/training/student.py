"""The trainable form of a quantized layer: it computes what the exported layer will, and passes gradients.

With W the trained weight, p the pre-quant scale and A the input range of a calibrated layer,

    y = Qa(x * p) Qw(W / p)^T + b

where Qw rounds with scales that follow the weight (one per tensor, output or group, times the share of its range
that clipping left) and Qa with the range that calibration froze. That is the arithmetic of `reference` and of the
exporter, so quantizing the trained weights with the same calibration gives this layer's codes. Rounding has no
gradient; it is taken as the identity (the straight-through estimator, arXiv:1308.3432), and a value that is
clipped gets none.

The layer also holds the weight that it started from and gives the teacher's output with it, so a teacher costs no
second copy of embeddings, norms and head; with low-rank additions the start *is* the frozen weight and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config.formats import UNQUANTIZED
from pipeline.config.schema import Format

E4M3_MAX = 448.0
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class LayerRanges:
    """What calibration found for one layer, and what its format needs to round it.

    Attributes:
        format: the layer's format; a 16-bit one rounds nothing while it trains.
        group_size: inputs that share one weight scale; None where the format has no groups.
        input_range: largest |x * p|, float32 []; None where inputs are not rounded.
        pre_quant_scale: p, float32 [in]; None where the layer is not smoothed.
        clipping: share of each group's range that is used, float32 [out, in / group_size]; None for all of it.
        shares_scale_with: layers whose one scale of the whole weight is the same number, which the exporter makes
            the largest of theirs.
    """

    format: Format
    group_size: int | None = None
    input_range: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None
    clipping: torch.Tensor | None = None
    shares_scale_with: tuple[str, ...] = ()


class Role:
    """Whether the layers of a model compute as the teacher: with the weights they started from, unrounded."""

    def __init__(self) -> None:
        self.teaching = False

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Compute as the teacher for a while."""
        before, self.teaching = self.teaching, True
        try:
            yield
        finally:
            self.teaching = before


class StudentLinear(nn.Module):
    """A linear layer that trains through its rounding.

    Args:
        layer: the source's layer, float32.
        ranges: of the layer.
        role: shared by all layers of the model.
        rank: of the low-rank addition that trains in place of the weight; None trains the weight.
        keep_zeros: zeros of the source stay zero (2:4 sparsity).
        keep_source: a teacher will be asked.
    """

    bias: torch.Tensor | None
    source_weight: torch.Tensor | None
    mask: torch.Tensor | None

    def __init__(
        self,
        layer: nn.Linear,
        ranges: LayerRanges,
        role: Role,
        *,
        rank: int | None,
        keep_zeros: bool,
        keep_source: bool,
    ) -> None:
        super().__init__()
        self._ranges, self.role = ranges, role
        self.partners: tuple[StudentLinear, ...] = ()  # a tuple, so that they are not modules inside this one
        weight = layer.weight.detach()
        self.weight = nn.Parameter(weight, requires_grad=rank is None)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)
        source = weight.clone() if keep_source and rank is None else None
        self.register_buffer("source_weight", source, persistent=False)
        self.register_buffer("mask", (weight != 0) if keep_zeros else None, persistent=False)
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        if rank is not None:
            rows, columns = weight.shape
            # Uniform with variance 1 / (3 in), and zero: the addition starts at nothing (arXiv:2106.09685).
            bound = columns**-0.5
            self.down = nn.Parameter(torch.empty(rank, columns, device=weight.device).uniform_(-bound, bound))
            self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., out] of x [..., in]."""
        if self.role.teaching:
            source = self.weight if self.source_weight is None else self.source_weight
            return nn.functional.linear(x, source, self.bias)
        return nn.functional.linear(self._rounded_input(x), self.rounded_weight(), self.bias)

    def trained_weight(self) -> torch.Tensor:
        """W float32 [out, in]: the weight with its low-rank addition, zeros kept."""
        weight: torch.Tensor = self.weight
        if self.down is not None and self.up is not None:
            weight = weight + self.up @ self.down
        return weight if self.mask is None else weight * self.mask

    def _rounded_input(self, x: torch.Tensor) -> torch.Tensor:
        p, bound = self._ranges.pre_quant_scale, self._ranges.input_range
        scaled = x if p is None else x * p
        if self._ranges.format == "fp8_rowwise":  # each token has its own range, so nothing is clipped
            with torch.no_grad():
                error = _to_e4m3(scaled, scaled.abs().amax(dim=-1, keepdim=True) / E4M3_MAX) - scaled
            return scaled + error
        if bound is None:
            return scaled
        clipped = torch.clamp(scaled, -bound, bound)
        with torch.no_grad():
            if self._ranges.format == "int8_sq":
                step = bound / 127
                rounded = torch.clamp(torch.round(scaled / step), -128, 127) * step
            else:
                rounded = _to_e4m3(scaled, bound / E4M3_MAX)
            error = rounded - clipped
        return clipped + error

    def rounded_weight(self) -> torch.Tensor:
        """Qw(W / p), float32 [out, in]: what the exported codes and scales stand for."""
        weight = self._scaled_weight()
        if self._ranges.format in UNQUANTIZED:
            return weight
        with torch.no_grad():
            bounds = _bounds(weight, self._ranges)
            largest = torch.stack([bounds.amax(), *(partner.largest_bound() for partner in self.partners)]).max()
            error = _round_weight(weight, bounds, largest, self._ranges) - weight
        return weight + error

    def largest_bound(self) -> torch.Tensor:
        """The largest |W / p| that has a code, float32 []."""
        return _bounds(self._scaled_weight(), self._ranges).amax()

    def _scaled_weight(self) -> torch.Tensor:
        p = self._ranges.pre_quant_scale
        return self.trained_weight() if p is None else self.trained_weight() / p


def _bounds(weight: torch.Tensor, ranges: LayerRanges) -> torch.Tensor:
    """The largest |W / p| that has a code: of each output [out, 1], or of each group [out, in / group_size, 1]."""
    if ranges.group_size is None:
        return weight.abs().amax(dim=1, keepdim=True)
    bounds = weight.reshape(len(weight), -1, ranges.group_size).abs().amax(dim=2, keepdim=True)
    return bounds if ranges.clipping is None else bounds * ranges.clipping.reshape(bounds.shape)


def _round_weight(
    weight: torch.Tensor, bounds: torch.Tensor, largest: torch.Tensor, ranges: LayerRanges
) -> torch.Tensor:
    """Round to the grid that the exporter chooses; `largest` is the bound of a scale of the whole weight."""
    if ranges.format == "fp8":
        return _to_e4m3(weight, largest / E4M3_MAX)
    if ranges.format == "fp8_rowwise":
        return _to_e4m3(weight, bounds / E4M3_MAX)
    if ranges.group_size is None:
        scale = (bounds / 127).clamp_min(_TINY)
        return torch.clamp(torch.round(weight / scale), -128, 127) * scale
    scale = (bounds / 7).clamp_min(_TINY)
    groups = weight.reshape(len(weight), -1, ranges.group_size)
    rounded = (torch.clamp(torch.round(groups / scale), -8, 7) * scale).reshape(weight.shape)
    return _to_e4m3(rounded, largest / E4M3_MAX) if ranges.format == "w4a8_awq" else rounded


def _to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clamp_min(_TINY)
    codes = torch.clamp(values / scale, -E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale


def make_student(
    model: nn.Module,
    layers: Mapping[str, LayerRanges],
    *,
    rank: int | None,
    keep_zeros: bool,
    keep_source: bool,
) -> Role:
    """Put a `StudentLinear` in the place of each named layer; nothing else of the model trains.

    Args:
        model: the source in float32.
        layers: name -> ranges, every layer that is quantized.
        rank: of low-rank additions; None trains the layers' weights.
        keep_zeros: zeros of these layers stay zero.
        keep_source: the model will be asked to teach.
    """
    role = Role()
    students: dict[str, StudentLinear] = {}
    model.requires_grad_(requires_grad=False)
    for name, ranges in layers.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"{name} is {type(layer).__name__}, not a linear layer")
        student = StudentLinear(layer, ranges, role, rank=rank, keep_zeros=keep_zeros, keep_source=keep_source)
        model.set_submodule(name, student)
        students[name] = student
    for name, ranges in layers.items():
        students[name].partners = tuple(students[partner] for partner in ranges.shares_scale_with)
    return role

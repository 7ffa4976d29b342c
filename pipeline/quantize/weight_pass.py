"""One pass over a layer's weights: decode, compare with the source, apply to recorded rows; block by block.

`reference` says what the stored numbers mean. The same is computed here with torch, into arrays that are used again
for every block and so stay in cache: two thirds of the time that a new array for each step takes. A test
holds the two together, format by format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.quantize.diagnosis import clipped
from pipeline.quantize.reference import FP8, PACKED, QuantizedLinear, round_to_e4m3
from pipeline.quantize.side_by_side import row_blocks
from pipeline.quantize.tensor_files import FloatArray, FloatRows

if TYPE_CHECKING:
    import torch

_TINY = float(np.finfo(np.float32).tiny)
# The 7 bits of an E4M3 magnitude, with zeros behind them and one before, are a half float of 2^-8 times its value,
# subnormal numbers included: the exponents' biases are 7 and 15.
_HALF = 2.0**8
_SMALLEST_NORMAL = 2.0**-6 / _HALF
_MANTISSA = 2.0**3  # E4M3 numbers between one power of two and the next
_E4M3_NAN = 0x7F  # without its sign, the one pattern that is none
_FLOAT32_EXPONENT = 0x7F800000
_HALF_EXPONENT_TOP = 0x4000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one pass over a layer's weights gives.

    Attributes:
        step_error: of the worst weight, in rounding steps.
        weight_error: relative L2 error of the weight, its pre-quant scale put back.
        outputs: float32 [n, out] of the stored layer for the recorded rows, without bias.
        source_outputs: the same of the source's layer.
    """

    step_error: float
    weight_error: float
    outputs: FloatArray
    source_outputs: FloatArray


def measure(layer: QuantizedLinear, source: FloatRows, x: FloatArray, *, max_clip: float) -> Measured:
    """Compare a stored layer with the source's weight; each weight is read from memory once.

    Args:
        layer: quantized here: its columns are in order and its codes have no zero points.
        source: W of the source [out, in], mapped.
        x: recorded input, float32 [n, in]; n may be 0.
        max_clip: int4 weights up to this multiple of the largest code may be cut to it; 1 where none are.
    """
    import torch

    work = _Pass(layer, source, x, max_clip=max_clip)
    for rows in row_blocks(layer.shape):
        work.block(rows)
    return Measured(
        step_error=float(torch.stack(work.worst).max()),
        weight_error=math.sqrt(sum(work.errors)) / max(math.sqrt(sum(work.sizes)), _TINY),
        outputs=work.outputs.numpy(),
        source_outputs=work.source_outputs.numpy(),
    )


class _Pass:
    """A layer, the arrays of one block, and what was found so far.

    A block is seen as float32 [rows, groups, inputs of a group], with one group where the format has none.
    """

    def __init__(self, layer: QuantizedLinear, source: FloatRows, x: FloatArray, *, max_clip: float) -> None:
        import torch

        if layer.zero_point is not None or layer.input_order is not None:
            raise TypeError("only layers that were quantized here are measured, which have no zero points")
        out_features, in_features = layer.shape
        scale = np.ascontiguousarray(layer.grouped_scale(), np.float32)
        self.layer, self.max_clip = layer, max_clip
        self.groups = scale.shape[1]
        self.codes = torch.from_numpy(layer.codes.view(np.int8))
        self.source = _mapped(source)
        self.scale = torch.from_numpy(scale)[:, :, None].expand(out_features, -1, 1)
        self.unit = _HALF if layer.format in FP8 else 1.0  # of a decoded code
        self.p = None if layer.pre_quant_scale is None else torch.from_numpy(layer.pre_quant_scale)
        self.fed, self.fed_source = torch.from_numpy(layer.quantized_input(x)), torch.from_numpy(x)
        self.outputs, self.source_outputs = torch.empty((2, len(x), out_features))
        self.worst: list[torch.Tensor] = []
        self.errors: list[float] = []
        self.sizes: list[float] = []
        most = next(iter(row_blocks(layer.shape))).stop
        self.arrays = torch.empty((4, most, in_features))
        self.halves = torch.empty((most, in_features), dtype=torch.int16)

    def block(self, rows: slice) -> None:
        """Measure the outputs from `rows.start` to `rows.stop`."""
        import torch

        levels, grid, source, spare = (array[: rows.stop - rows.start] for array in self.arrays)
        source.copy_(self.source[rows])
        self._decode(rows, levels)
        scale = self.scale[rows] * self.unit
        torch.mul(self._grouped(levels), scale, out=self._grouped(grid))
        weight = grid
        if self.layer.second_scale is not None:
            s2 = np.float32(self.layer.second_scale)
            weight = torch.from_numpy(round_to_e4m3(grid.numpy() / s2) * s2)
        if len(self.fed):
            torch.mm(self.fed, weight.T, out=self.outputs[:, rows])
            torch.mm(self.fed_source, source.T, out=self.source_outputs[:, rows])
        self.sizes.append(_sum_of_squares(source))
        target = source if self.p is None else torch.div(source, self.p, out=spare)
        if self.max_clip != 1:
            cut = clipped(self._grouped(target).numpy(), scale.numpy(), self.max_clip)
            target = torch.from_numpy(cut).view(target.shape)
        if weight is grid and self.max_clip == 1:
            distance = torch.sub(grid, target, out=grid)
            deviation = distance if self.p is None else torch.mul(distance, self.p, out=spare)
        else:
            deviation = (weight if self.p is None else weight * self.p) - source
            distance = torch.sub(grid, target, out=grid)
        self.errors.append(_sum_of_squares(deviation))
        self.worst.append(self._largest_step_error(distance, levels, scale))

    def _grouped(self, array: torch.Tensor) -> torch.Tensor:
        return array.view(len(array), self.groups, -1)

    def _decode(self, rows: slice, levels: torch.Tensor) -> None:
        """Write the codes as numbers, E4M3 as numbers times 2^-8."""
        import torch

        form = self.layer.format
        if form in PACKED:
            packed = self.codes[rows.start // 2 : rows.stop // 2]
            pairs = levels.view(len(packed), 2, -1)
            pairs[:, 0].copy_(torch.bitwise_left_shift(packed, 4).bitwise_right_shift_(4))
            pairs[:, 1].copy_(torch.bitwise_right_shift(packed, 4))
        elif form in FP8:
            codes, halves = self.codes[rows], self.halves[: len(levels)]
            halves.copy_(codes).bitwise_left_shift_(7).bitwise_and_(~_HALF_EXPONENT_TOP)  # the sign is there too
            levels.copy_(halves.view(torch.float16))
            magnitudes = torch.bitwise_and(codes, 0x7F)
            if int(magnitudes.max()) == _E4M3_NAN:
                levels.masked_fill_(magnitudes == _E4M3_NAN, math.nan)
        else:
            levels.copy_(self.codes[rows])

    def _largest_step_error(self, distance: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The largest |distance| in rounding steps (`diagnosis.step_errors`); both arrays are overwritten."""
        import torch

        if self.layer.format in FP8:
            # What remains of a float without its mantissa is the power of two below it.
            levels.view(torch.int32).bitwise_and_(_FLOAT32_EXPONENT)
            distance.div_(levels.clamp_min_(_SMALLEST_NORMAL))
            scale = scale / _MANTISSA
        grouped = self._grouped(distance)  # a group shares its scale: dividing its largest is enough
        return (torch.maximum(grouped.amax(dim=2), -grouped.amin(dim=2)) / scale[:, :, 0]).max()


def _mapped(rows: FloatRows) -> torch.Tensor:
    import torch

    bits = torch.from_numpy(rows.bits)
    return bits.view(torch.bfloat16) if rows.dtype == "BF16" else bits


def _sum_of_squares(values: torch.Tensor) -> float:
    """Each row in float32, which errs by less than 1e-5 of it, the rows' sums in float64."""
    import torch

    return float(torch.linalg.vector_norm(values, dim=1).double().square().sum())

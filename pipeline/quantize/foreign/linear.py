"""One linear layer of a checkpoint made elsewhere, in the one form that every layout is read into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import IntegrityError
from pipeline.quantize.reference import decode_e4m3
from pipeline.quantize.tensor_files import FloatArray

Element = Literal["int4", "int8", "e4m3"]
BITS: dict[Element, int] = {"int4": 4, "int8": 8, "e4m3": 8}


@dataclass(frozen=True, kw_only=True)
class ForeignLinear:
    """Codes, scales and zero points of a layer: W[r, c] = (codes[r, c] - z) * s at scale [r // row_block, group[c]].

    Attributes:
        element: what a code is.
        codes: uint8 [out, in]: unsigned integers, or E4M3 bit patterns. Signed integers are stored raised by half
            their range, and so are their zero points: an int4 of -8 is the code 0.
        scales: float32 [ceil(out / row_block), groups].
        zero_points: int16, the shape of `scales`; None for e4m3, which has none.
        group_of_input: int32 [in], the column of `scales` that belongs to each input (GPTQ's g_idx).
        row_block: outputs that share a scale: 1, all, or the block's height.
        input_scale: of a statically quantized activation, per tensor.
        dynamic_activations: activations are to be quantized when the model runs.
        pre_quant_scale: float32 [in], multiplies the input; None is all ones.
        smoothed: layers of this checkpoint may have a pre-quant scale, in the layer or in the norm in front.
        bias: float32 [out].
    """

    element: Element
    codes: npt.NDArray[np.uint8]
    scales: FloatArray
    zero_points: npt.NDArray[np.int16] | None
    group_of_input: npt.NDArray[np.int32]
    row_block: int = 1
    input_scale: float | None = None
    dynamic_activations: bool = False
    pre_quant_scale: FloatArray | None = None
    smoothed: bool = False
    bias: FloatArray | None = None

    def __post_init__(self) -> None:
        """Check that the shapes belong together.

        Raises:
            IntegrityError: they do not, or a group has no scale.
        """
        rows, columns = self.codes.shape
        wrong = self.scales.ndim != 2 or len(self.scales) != -(-rows // self.row_block)  # noqa: PLR2004 - a matrix
        wrong = wrong or self.group_of_input.shape != (columns,)
        wrong = wrong or (self.zero_points is not None and self.zero_points.shape != self.scales.shape)
        if not wrong:
            low, high = int(self.group_of_input.min()), int(self.group_of_input.max())
            wrong = low < 0 or high >= self.scales.shape[1]
        if wrong:
            raise IntegrityError(
                f"scales {list(self.scales.shape)} and zero points do not fit a weight {[rows, columns]} whose groups "
                f"are {self.group_of_input.shape[0]} inputs and {self.row_block} outputs."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the middle of the range, so that a code is a signed integer."""
        return self.zero_points is None or bool((self.zero_points == 2 ** (BITS[self.element] - 1)).all())

    @property
    def ordered(self) -> bool:
        """Whether groups are consecutive inputs of equal number: false with act-order."""
        columns, groups = self.shape[1], self.scales.shape[1]
        return columns % groups == 0 and np.array_equal(self.group_of_input, consecutive(columns, columns // groups))

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, where all groups are of one size."""
        return self.shape[1] // self.scales.shape[1]

    def input_order(self) -> npt.NDArray[np.int32] | None:
        """The inputs sorted by group, int32 [in]: columns in this order have consecutive groups of equal size.

        None where groups are of unequal size, as no order helps there.
        """
        order = np.argsort(self.group_of_input, kind="stable").astype(np.int32)
        columns, groups = self.shape[1], self.scales.shape[1]
        regular = columns % groups == 0
        regular = regular and np.array_equal(self.group_of_input[order], consecutive(columns, columns // groups))
        return order if regular else None

    def signed(self) -> npt.NDArray[np.int8]:
        """The codes of an integer layer lowered by half their range, as signed integers: int8 [out, in]."""
        middle = 2 ** (BITS[self.element] - 1)
        return np.asarray(self.codes.astype(np.int16) - middle, np.int8)

    def weight(self) -> FloatArray:
        """W, float32 [out, in], one float32 product per weight."""
        rows = np.arange(self.shape[0]) // self.row_block
        scales = self.scales[rows][:, self.group_of_input]
        if self.zero_points is None:
            return np.asarray(decode_e4m3(self.codes) * scales, np.float32)
        levels = self.codes.astype(np.int16) - self.zero_points[rows][:, self.group_of_input]
        return np.asarray(levels.astype(np.float32) * scales, np.float32)


def consecutive(columns: int, group_size: int) -> npt.NDArray[np.int32]:
    """The group map of consecutive groups: int32 [columns]."""
    return (np.arange(columns) // group_size).astype(np.int32)


def as_matrix(values: npt.NDArray[Any], rows: int) -> FloatArray:
    """Stored scales of any rank as float32 [rows, groups]; one number becomes [1, 1]."""
    return np.asarray(values.reshape(1, 1) if values.size == 1 and rows != 1 else values.reshape(rows, -1), np.float32)

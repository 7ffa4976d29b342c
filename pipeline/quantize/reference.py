"""The reading of every quantized format: what the stored numbers mean, and nothing else.

This module defines the formats for the rest of the project. It is written from their description, with
numpy alone, and never imports the tool that produces them, so that a mistake there cannot hide here.

With W of shape [out, in] and x of shape [n, in], a quantized linear layer computes y = x_hat W_hat^T + b:

    format       W_hat                                       x_hat
    float        w                                           x
    fp8          w_e4m3 * s, s scalar                        e4m3(x / a) * a
    fp8_rowwise  w_e4m3 * s[:, None]                         e4m3(x / a) * a, a = max |x| / 448 of each row of x
    int8_sq      w_i8 * s[:, None]                           clamp(round(x p / a), -128, 127) * a
    int8_wo      w_i8 * s[:, None]                           x
    int4_awq     q * s, each s repeated over g inputs        x p
    int4_wo      (q - z) * s, each repeated over g inputs    x
    w4a8_awq     e4m3(q * s / s2) * s2                       e4m3(x p / a) * a

s is `weight_scale`, z is `weight_zero_point` (0 when absent; only int4 made elsewhere has one), s2 is
`weight_scale_2`, a is `input_scale`, p is `pre_quant_scale` ([in], all ones when absent), e4m3 rounds to float8
E4M3 after clamping to +-448. int4 codes are packed in pairs along *out*: byte [r, c] holds row 2r in its low nibble
and row 2r + 1 in its high nibble, two's complement.

A weight smoothed by p was stored as W / p: the layer computes the source's function only with both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.errors import IntegrityError
from pipeline.quantize.tensor_files import FloatArray

LinearFormat = Literal["float", "fp8", "fp8_rowwise", "int8_sq", "int8_wo", "int4_awq", "int4_wo", "w4a8_awq"]
FP8: frozenset[LinearFormat] = frozenset({"fp8", "fp8_rowwise"})
INT8: frozenset[LinearFormat] = frozenset({"int8_sq", "int8_wo"})
PACKED: frozenset[LinearFormat] = frozenset({"int4_awq", "int4_wo", "w4a8_awq"})
SMOOTHED: frozenset[LinearFormat] = frozenset({"int8_sq", "int4_awq", "w4a8_awq"})
FP8_ACTIVATIONS: frozenset[LinearFormat] = frozenset({"fp8", "w4a8_awq"})
Array = npt.NDArray[Any]

E4M3_MAX = 448.0
_E4M3_MIN_NORMAL = 2.0**-6
_E4M3_MANTISSA = 2.0**-3  # spacing of the numbers between 1 and 2


def _e4m3_table() -> FloatArray:
    """The 256 values of float8 E4M3FN: no infinities, NaN at 0x7F and 0xFF (arXiv:2209.05433)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * _E4M3_MIN_NORMAL, normal)
    magnitude[(code & 0x7F) == 0x7F] = np.nan  # noqa: PLR2004 - the one NaN pattern of E4M3FN
    return np.asarray(np.where(code < 128, magnitude, -magnitude), np.float32)  # noqa: PLR2004 - the sign bit


_E4M3: FloatArray = _e4m3_table()


def _pairs(table: FloatArray) -> npt.NDArray[np.uint64]:
    """A table of 256 values as one of 65536 pairs, low byte first: numpy looks up two codes in the time of one."""
    both = np.empty((256, 256, 2), np.float32)
    both[..., 0], both[..., 1] = table, table[:, None]
    return both.view(np.uint64).reshape(-1)


def _look_up(table: FloatArray, pairs: npt.NDArray[np.uint64], codes: npt.NDArray[np.uint8]) -> FloatArray:
    """Values of uint8 `codes`, float32 of the same shape."""
    if codes.ndim == 0 or codes.shape[-1] % 2 or not codes.flags.c_contiguous:
        return np.asarray(np.take(table, codes), np.float32)
    # Every index is within the table; to say "wrap" spares numpy the look before.
    return np.take(pairs, codes.view("<u2"), mode="wrap").view(np.float32)


_E4M3_PAIRS = _pairs(_E4M3)


def decode_e4m3(codes: npt.NDArray[np.uint8]) -> FloatArray:
    """Decode float8 E4M3FN bit patterns to float32."""
    return _look_up(_E4M3, _E4M3_PAIRS, codes)


def e4m3_spacing(values: FloatArray) -> FloatArray:
    """The distance between neighbouring E4M3 numbers at `values` (2^-9 among the subnormals)."""
    power_of_two = (np.abs(values).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    return np.maximum(power_of_two, np.float32(_E4M3_MIN_NORMAL)) * np.float32(_E4M3_MANTISSA)


def round_to_e4m3(values: FloatArray) -> FloatArray:
    """Clamp to +-448 and round to the nearest E4M3 number, ties to even; float32 in and out."""
    clamped = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(np.float32, copy=False)
    spacing = e4m3_spacing(clamped)
    return np.asarray(np.rint(clamped / spacing) * spacing, np.float32)


def unpack_int4(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Unpack [out / 2, in] bytes to [out, in] integers from -8 to 7; low nibble first, along out."""
    half, columns = packed.shape
    codes = np.empty((half, 2, columns), np.int8)
    # Shifting a signed number right repeats its sign.
    np.right_shift((packed << 4).view(np.int8), 4, out=codes[:, 0])
    np.right_shift(packed.view(np.int8), 4, out=codes[:, 1])
    return codes.reshape(2 * half, columns)


def pack_int4(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Pack [out, in] integers from -8 to 7 to [out / 2, in] bytes; the inverse of `unpack_int4`."""
    nibbles = codes.view(np.uint8) & 15
    return np.asarray(nibbles[0::2] | (nibbles[1::2] << 4), np.uint8)


T = TypeVar("T")


class remembered(Generic[T]):  # noqa: N801 - stands where functools.cached_property would
    """A property that is computed once per object, by any thread.

    functools.cached_property would do but for Python 3.11, where all objects of a class wait for one lock.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:  # noqa: ANN401 - a descriptor serves any class
        """Compute the value; from then on Python finds it in the object itself."""
        found: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return found


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """One linear layer as stored; also a layer that is not quantized (format "float").

    Attributes:
        codes: float: float32 [out, in]; fp8: uint8 bit patterns [out, in]; int8: int8 [out, in];
            int4: uint8 [out / 2, in], packed.
        scale: `weight_scale`, float32: fp8 []; fp8_rowwise and int8 [out]; int4 [out, in / group_size].
        second_scale: `weight_scale_2` (w4a8_awq): of the float8 numbers that q * s are rounded to.
        input_scale: scale of the activation per tensor (fp8, int8_sq, w4a8_awq).
        pre_quant_scale: float32 [in], multiplies the input.
        zero_point: `weight_zero_point` (int4_wo): int8, the shape of `scale`, subtracted from the codes.
        input_order: `weight_input_order` (int4_wo): int32 [in], the input that each stored column belongs to; None
            where they are in order. Act-order mixes the groups, and only columns sorted by group have groups.
        bias: float32 [out].
    """

    format: LinearFormat
    codes: Array
    scale: FloatArray | None = None
    second_scale: float | None = None
    input_scale: float | None = None
    pre_quant_scale: FloatArray | None = None
    zero_point: Array | None = None
    input_order: Array | None = None
    bias: FloatArray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        rows, columns = self.codes.shape
        return (2 * rows if self.format in PACKED else rows, columns)

    @property
    def group_size(self) -> int | None:
        """Inputs that share one scale (int4)."""
        if self.format not in PACKED or self.scale is None:
            return None
        return self.shape[1] // self.scale.shape[1]

    def levels(self) -> FloatArray:
        """The codes as numbers less their zero points, before any scale: float32 [out, in]."""
        match self.format:
            case "float":
                return np.asarray(self.codes, np.float32)
            case "fp8" | "fp8_rowwise":
                return decode_e4m3(self.codes)
            case "int8_sq" | "int8_wo":
                return self.codes.astype(np.float32)
            case "int4_awq" | "int4_wo" | "w4a8_awq":
                levels = unpack_int4(self.codes).astype(np.float32)
                if self.zero_point is not None:
                    levels -= np.repeat(self.zero_point, levels.shape[1] // self.zero_point.shape[1], axis=1)
                return levels

    def grouped_scale(self) -> FloatArray:
        """`scale` as [out, groups] of equally many inputs, or with one in place of either; one where there is none.

        Raises:
            IntegrityError: the scale's shape does not belong to the weight's.
        """
        out_features, in_features = self.shape
        if self.scale is None:
            return np.ones((1, 1), np.float32)
        if self.format == "fp8" and self.scale.size == 1:
            return self.scale.reshape(1, 1)
        if self.format in INT8 | {"fp8_rowwise"} and self.scale.shape == (out_features,):
            return self.scale[:, None]
        if self.format in PACKED and self.scale.ndim == 2 and self.scale.shape[0] == out_features:  # noqa: PLR2004
            groups = self.scale.shape[1]
            if groups and in_features % groups == 0:
                return self.scale
        raise IntegrityError(
            f"weight_scale {list(self.scale.shape)} does not fit a {self.format} weight {list(self.shape)}."
        )

    def expanded_scale(self) -> FloatArray:
        """`grouped_scale` in a shape that broadcasts over [out, in].

        Raises:
            IntegrityError: the scale's shape does not belong to the weight's.
        """
        scale = self.grouped_scale()
        return scale if scale.shape[1] == 1 else np.repeat(scale, self.shape[1] // scale.shape[1], axis=1)

    @remembered
    def grid_weight(self) -> FloatArray:
        """Codes times scale, float32 [out, in]: the value that each weight was rounded to; decoded once per object."""
        stored = self.levels() * self.expanded_scale()
        return stored if self.input_order is None else stored[:, np.argsort(self.input_order)]

    @remembered
    def weight(self) -> FloatArray:
        """W_hat, float32 [out, in]: what the stored weight means to the kernel, after w4a8_awq's second rounding."""
        if self.second_scale is None:
            return self.grid_weight
        s2 = np.float32(self.second_scale)
        return round_to_e4m3(self.grid_weight / s2) * s2

    def step(self) -> FloatArray:
        """Distance from each value of `grid_weight` to its neighbour, broadcastable over [out, in].

        Rounding moves a value by half of it at most.
        """
        if self.format in FP8:
            return e4m3_spacing(self.levels()) * self.expanded_scale()
        return self.expanded_scale()

    def quantized_input(self, x: FloatArray) -> FloatArray:
        """x_hat, float32 [n, in]: the input as the layer's kernel sees it."""
        scaled = x if self.pre_quant_scale is None else x * self.pre_quant_scale
        if self.format == "fp8_rowwise":
            largest = np.abs(scaled).max(axis=1, keepdims=True)
            scale = np.where(largest > 0, largest, np.float32(E4M3_MAX)) / np.float32(E4M3_MAX)
            return round_to_e4m3(scaled / scale) * scale
        if self.input_scale is None:
            return scaled
        a = np.float32(self.input_scale)
        if self.format in FP8_ACTIVATIONS:
            return round_to_e4m3(scaled / a) * a
        return np.asarray(np.clip(np.rint(scaled / a), -128, 127) * a, np.float32)

    def forward(self, x: FloatArray) -> FloatArray:
        """Compute y = x_hat W_hat^T + b for x float32 [n, in]; float32 [n, out]."""
        y = self.quantized_input(x) @ self.weight.T
        return y if self.bias is None else y + self.bias

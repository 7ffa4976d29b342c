"""Rounding of a weight to formats that are probed and never written: what each weight would become.

    nf4        blocks of B consecutive weights (row by row), a = max |w|, code = the nearest of 16 quantiles of the
               normal distribution to w / a, W_hat = quantile[code] * a
    nf4, double quantization   the a themselves in blocks of 256, less their mean, in 8-bit dynamic tree numbers
    int4, int8 s = max |w| / (2^(b-1) - 1) over a group of inputs or a row, W_hat = clip(round(w / s)) * s
    int2, int3 with a zero point, as every 2- and 3-bit scheme has: 2^b levels from the smallest to the largest
               weight of a group, zero among them
    fp8        s = max |w| / 448 over the weight, or over each row, W_hat = e4m3(w / s) * s

Written with numpy alone. Source: QLoRA, arXiv:2305.14314 (NF4: appendix E lists the quantiles; double quantization:
section 3); 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861 (dynamic tree quantization).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from pipeline.quantize.reference import E4M3_MAX, round_to_e4m3
from pipeline.quantize.tensor_files import FloatArray

# Equal areas under the normal distribution, zero among them, scaled to [-1, 1] (arXiv:2305.14314, E).
NF4_QUANTILES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
STATISTICS_BLOCK = 256  # block maxima that share an 8-bit scale in double quantization
_TREE_BITS = 7
TREE_STEP = 0.01416  # the widest gap of the dynamic tree's numbers


@cache
def dynamic_tree() -> FloatArray:
    """The 256 numbers of signed 8-bit dynamic tree quantization, sorted: finer towards zero, from -1 to 1."""
    numbers: list[float] = [0.0, 1.0]
    for exponent in range(_TREE_BITS):
        edges = np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32)
        middles = ((edges[:-1] + edges[1:]) / np.float32(2)) * np.float32(10.0 ** (exponent - (_TREE_BITS - 1)))
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return np.sort(np.array(numbers, np.float32))


def _nearest(values: FloatArray, levels: FloatArray) -> FloatArray:
    """Each value's nearest level; levels are sorted, and a value in the middle takes the lower one."""
    middles = (levels[:-1] + levels[1:]) / np.float32(2)
    return np.asarray(levels[np.searchsorted(middles, values, side="left")], np.float32)


def _in_blocks(values: FloatArray, size: int) -> FloatArray:
    """Consecutive values in rows of `size`, the last row filled up with zeros."""
    flat = values.reshape(-1)
    rows = -(-flat.size // size)
    return np.pad(flat, (0, rows * size - flat.size)).reshape(rows, size)


def round_nf4(weight: FloatArray, block_size: int, *, double_quant: bool) -> FloatArray:
    """Round to NF4: float32 [out, in] in and out."""
    blocks = _in_blocks(weight, block_size)
    largest = np.abs(blocks).max(axis=1)
    inverse = np.float32(1) / np.maximum(largest, np.float32(1e-38))
    quantiles = _nearest(np.clip(blocks * inverse[:, None], -1, 1), NF4_QUANTILES)
    scales = _round_statistics(largest) if double_quant else largest
    return (quantiles * scales[:, None]).reshape(-1)[: weight.size].reshape(weight.shape)


def _round_statistics(largest: FloatArray) -> FloatArray:
    """Block maxima as double quantization stores them."""
    mean = largest.mean(dtype=np.float32)
    blocks = _in_blocks(largest - mean, STATISTICS_BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    normed = blocks / np.where(scale > 0, scale, np.float32(1))
    return np.asarray((_nearest(normed, dynamic_tree()) * scale).reshape(-1)[: largest.size] + mean, np.float32)


def round_integer(weight: FloatArray, bits: int, group_size: int) -> FloatArray:
    """Round to symmetric integers with one scale per `group_size` inputs: float32 [out, in] in and out."""
    groups = weight.reshape(len(weight), -1, group_size)
    largest = 2 ** (bits - 1) - 1
    scale = np.abs(groups).max(axis=2, keepdims=True) / np.float32(largest)
    scale = np.where(scale > 0, scale, np.float32(1))
    return np.asarray(
        (np.clip(np.rint(groups / scale), -largest - 1, largest) * scale).reshape(weight.shape), np.float32
    )


def round_levels(weight: FloatArray, bits: int, group_size: int) -> FloatArray:
    """Round to 2^bits levels between the ends of each group, with an integer zero point: float32 in and out."""
    groups = weight.reshape(len(weight), -1, group_size)
    low, high = np.minimum(groups.min(axis=2, keepdims=True), 0), np.maximum(groups.max(axis=2, keepdims=True), 0)
    last = 2**bits - 1
    scale = (high - low) / np.float32(last)
    scale = np.where(scale > 0, scale, np.float32(1))
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(groups / scale) + zero, 0, last)
    return np.asarray(((codes - zero) * scale).reshape(weight.shape), np.float32)


def round_fp8(weight: FloatArray, *, per_row: bool) -> FloatArray:
    """Round to E4M3 with one scale per weight or per row: float32 [out, in] in and out."""
    largest = np.abs(weight).max(axis=1, keepdims=True) if per_row else np.abs(weight).max()
    scale = np.maximum(largest / np.float32(E4M3_MAX), np.float32(1e-38))
    return np.asarray(round_to_e4m3(weight / scale) * scale, np.float32)

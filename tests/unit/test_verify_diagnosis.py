"""The cause of a damaged layer is found by undoing the damage, without any model or tool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.quantize.diagnosis import Suspect, step_errors, weight_cause
from pipeline.quantize.limits import LIMITS
from pipeline.quantize.reference import QuantizedLinear, pack_int4

pytestmark = pytest.mark.fast

LIMIT = LIMITS["int4_awq"].max_step_error


def int4_layer() -> tuple[QuantizedLinear, np.ndarray]:
    """A weight [64, 128] and its int4 layer in groups of 32."""
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    groups = weight.reshape(64, 4, 32)
    scale = np.abs(groups).max(axis=2) / 7
    codes = np.rint(groups / scale[:, :, None]).astype(np.int8).reshape(64, 128)
    return QuantizedLinear(format="int4_awq", codes=pack_int4(codes), scale=scale), weight


def cause(layer: QuantizedLinear, weight: np.ndarray) -> str:
    """What the diagnosis says."""
    return weight_cause(Suspect(layer=layer, source=weight, max_step_error=LIMIT))


def test_a_healthy_layer_lies_within_half_a_step() -> None:
    """Rounding to the nearest code moves a weight by half a step at most."""
    layer, weight = int4_layer()
    assert step_errors(layer, weight).max() <= LIMIT


def test_swapped_nibbles() -> None:
    """The other nibble order repairs it."""
    layer, weight = int4_layer()
    assert "swapped nibble order" in cause(replace(layer, codes=(layer.codes << 4) | (layer.codes >> 4)), weight)


def test_one_scale_too_large() -> None:
    """The one group that is wrong is named, and by how much."""
    layer, weight = int4_layer()
    assert layer.scale is not None
    scale = layer.scale.copy()
    scale[9, 2] *= 4
    assert cause(replace(layer, scale=scale), weight) == (
        "corrupted scale: weight_scale (1 of 256 values, first at [9, 2]) times 0.25 repairs the layer"
    )


def test_transposed_packed_block() -> None:
    """A block of bytes, 8 rows of pairs by 8 columns, transposed."""
    layer, weight = int4_layer()
    codes = layer.codes.copy()
    codes[8:16, 16:24] = codes[8:16, 16:24].T.copy()
    assert cause(replace(layer, codes=codes), weight).startswith("transposed block: rows 16 to ")


def test_rotated_rows() -> None:
    """Rows in another order are recognized by their direction."""
    layer, weight = int4_layer()
    assert layer.scale is not None
    moved = replace(layer, codes=np.roll(layer.codes, 1, axis=0), scale=np.roll(layer.scale, 2, axis=0))
    assert cause(moved, weight) == "permuted rows: row 2 of the file is row 0 of the source, 64 rows in all"


def test_another_tensor() -> None:
    """A weight that has nothing to do with the source."""
    layer, _ = int4_layer()
    other = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    assert "another tensor's" in cause(layer, other)


def test_damage_without_a_single_repair_is_located() -> None:
    """Random codes in a region are reported by rows and columns."""
    layer, weight = int4_layer()
    codes = layer.codes.copy()
    codes[3:5, 7:9] ^= 0x44
    assert "rows 6 to 9, columns 7 to 8" in cause(replace(layer, codes=codes), weight)

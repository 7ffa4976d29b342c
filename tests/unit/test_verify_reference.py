"""The formats mean what their description says, on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from pipeline.errors import IntegrityError
from pipeline.quantize.reference import (
    QuantizedLinear,
    decode_e4m3,
    e4m3_spacing,
    pack_int4,
    round_to_e4m3,
    unpack_int4,
)

pytestmark = pytest.mark.fast


def f32(*values: object) -> np.ndarray:
    """A float32 array."""
    return np.array(*values, np.float32)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0b0_0000_000, 0.0),
        (0b0_0000_001, 2**-9),  # the smallest subnormal
        (0b0_0001_000, 2**-6),  # the smallest normal
        (0b0_0111_000, 1.0),
        (0b0_0111_001, 1.125),
        (0b1_1000_100, -3.0),
        (0b0_1111_110, 448.0),  # the largest; there is no infinity
        (0b1_1111_110, -448.0),
    ],
)
def test_e4m3_code_decodes(code: int, value: float) -> None:
    """Sign, 4-bit exponent with bias 7, 3-bit mantissa."""
    assert decode_e4m3(np.array([code], np.uint8))[0] == value


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_has_one_nan_per_sign(code: int) -> None:
    """All exponent and mantissa bits set is NaN."""
    assert np.isnan(decode_e4m3(np.array([code], np.uint8))[0])


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0625, 1.0),  # a tie goes to the even mantissa
        (1.1875, 1.25),
        (1.07, 1.125),
        (500.0, 448.0),
        (-1e9, -448.0),
        (2**-10, 0.0),  # half of the smallest subnormal, a tie to zero
        (1.5 * 2**-9, 2**-8),
        (15.9, 16.0),
    ],
)
def test_rounding_to_e4m3(value: float, rounded: float) -> None:
    """Nearest, ties to even, saturating."""
    assert round_to_e4m3(f32([value]))[0] == rounded


def test_every_e4m3_number_rounds_to_itself() -> None:
    """Rounding is idempotent."""
    numbers = decode_e4m3(np.arange(256, dtype=np.uint8))
    finite = numbers[np.isfinite(numbers)]
    np.testing.assert_array_equal(round_to_e4m3(finite), finite)


def test_e4m3_spacing_doubles_with_each_power_of_two() -> None:
    """An eighth of the power of two below, and 2^-9 under the smallest normal number."""
    np.testing.assert_array_equal(e4m3_spacing(f32([1.0, -1.9, 2.0, 448.0, 0.0])), f32([0.125, 0.125, 0.25, 32, 2**-9]))


def test_int4_low_nibble_is_the_even_row() -> None:
    """Byte 0x2F holds -1 for row 0 and 2 for row 1; 0x87 holds 7 and -8."""
    np.testing.assert_array_equal(unpack_int4(np.array([[0x2F, 0x87]], np.uint8)), [[-1, 7], [2, -8]])


@given(arrays(np.int8, (6, 5), elements={"min_value": -8, "max_value": 7}))
def test_packing_int4_is_undone_by_unpacking(codes: np.ndarray) -> None:
    """No code is lost or moved."""
    np.testing.assert_array_equal(unpack_int4(pack_int4(codes)), codes)


def test_fp8_layer() -> None:
    """W = codes * s; x is clamped to 448 a and rounded to E4M3."""
    layer = QuantizedLinear(
        format="fp8", codes=np.array([[0x38, 0xC4]], np.uint8), scale=f32(0.5), input_scale=0.25, bias=f32([10.0])
    )
    np.testing.assert_array_equal(layer.weight, [[0.5, -1.5]])
    # 0.27 / 0.25 = 1.08 rounds to 1.125; 200 / 0.25 saturates at 448.
    np.testing.assert_allclose(layer.forward(f32([[0.27, 200.0]])), [[0.5 * 0.28125 - 1.5 * 112 + 10]])


def test_fp8_rowwise_layer() -> None:
    """By hand: a scale per output, and each row of the input scaled by its own largest value; a row of zeros stays."""
    layer = QuantizedLinear(
        format="fp8_rowwise",
        codes=np.array([[0x38, 0x40], [0xB8, 0x30]], np.uint8),  # [[1, 2], [-1, 0.5]]
        scale=np.array([0.5, 2.0], np.float32),
    )
    assert layer.weight.tolist() == [[0.5, 1.0], [-2.0, 1.0]]
    x = np.array([[448.0, 1.03], [4.48, 0.0103], [0.0, 0.0]], np.float32)
    rounded = layer.quantized_input(x)
    assert rounded[0].tolist() == [448.0, 1.0]
    np.testing.assert_allclose(rounded[1], [4.48, 0.01], rtol=1e-6)
    assert not rounded[2].any()
    np.testing.assert_allclose(layer.forward(x)[0], [225.0, -895.0])
    np.testing.assert_array_equal(layer.step(), [[0.0625, 0.125], [0.25, 0.125]])


def test_int8_smoothquant_layer() -> None:
    """W = codes * s per row; x p / a is rounded half to even and clamped to -128..127."""
    layer = QuantizedLinear(
        format="int8_sq",
        codes=np.array([[2, -3], [127, -128]], np.int8),
        scale=f32([0.5, 2.0]),
        input_scale=0.1,
        pre_quant_scale=f32([2.0, 0.5]),
    )
    np.testing.assert_array_equal(layer.weight, [[1.0, -1.5], [254.0, -256.0]])
    # 0.125 * 2 / 0.1 = 2.5 -> 2; 100 * 0.5 / 0.1 = 500 -> 127; -100 * 0.5 / 0.1 -> -128.
    x_hat = layer.quantized_input(f32([[0.125, 100.0], [0.0, -100.0]]))
    np.testing.assert_allclose(x_hat, [[0.2, 12.7], [0.0, -12.8]], rtol=1e-6)
    np.testing.assert_allclose(layer.forward(f32([[0.125, 100.0]])), [[0.2 - 19.05, 50.8 - 3251.2]], rtol=1e-6)


def test_int4_awq_layer() -> None:
    """Each scale covers one group of inputs of one row; x is only multiplied by p."""
    layer = QuantizedLinear(
        format="int4_awq",
        codes=np.array([[0x21, 0x43, 0x65, 0xFF]], np.uint8),  # rows [1, 3, 5, -1] and [2, 4, 6, -1]
        scale=f32([[1.0, 10.0], [0.5, 2.0]]),
        pre_quant_scale=f32([1, 2, 1, 1]),
    )
    assert layer.shape == (2, 4)
    assert layer.group_size == 2
    np.testing.assert_array_equal(layer.weight, [[1, 3, 50, -10], [1, 2, 12, -2]])
    np.testing.assert_array_equal(layer.forward(f32([[1, 1, 1, 1]])), [[1 + 6 + 50 - 10, 1 + 4 + 12 - 2]])


def test_plain_layer() -> None:
    """A layer that is not quantized is a matrix product and a bias."""
    layer = QuantizedLinear(format="float", codes=f32([[1, 2], [3, 4]]), bias=f32([0.5, -0.5]))
    np.testing.assert_array_equal(layer.forward(f32([[1, 1]])), [[3.5, 6.5]])


def test_scale_of_another_shape_is_refused() -> None:
    """A scale that does not divide the weight has no meaning."""
    layer = QuantizedLinear(format="int4_awq", codes=np.zeros((1, 4), np.uint8), scale=np.ones((2, 3), np.float32))
    with pytest.raises(IntegrityError, match=r"weight_scale \[2, 3\] does not fit a int4_awq weight \[2, 4\]"):
        _ = layer.weight


def test_w4a8_rounds_to_float8_what_int4_means() -> None:
    """Codes 3 and -5 at 0.5 are 1.5 and -2.5; with s2 = 0.3 they become e4m3(5) and e4m3(-8.33) times 0.3."""
    layer = QuantizedLinear(
        format="w4a8_awq",
        codes=pack_int4(np.array([[3], [-5]], np.int8)),
        scale=f32([[0.5], [0.5]]),
        second_scale=0.3,
        input_scale=0.5,
        pre_quant_scale=f32([2.0]),
    )
    np.testing.assert_allclose(layer.grid_weight, [[1.5], [-2.5]])
    np.testing.assert_allclose(layer.weight, [[5.0 * 0.3], [-8.0 * 0.3]], rtol=1e-6)
    # x p / a = 0.53 * 2 / 0.5 = 2.12, which float8 holds as 2.0 (spacing 0.25); times a is 1.0.
    np.testing.assert_allclose(layer.quantized_input(f32([[0.53]])), [[1.0]])

"""The formulas of probed formats, from their papers and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.quantize.reference import QuantizedLinear, pack_int4
from pipeline.quantize.rounding import (
    NF4_QUANTILES,
    TREE_STEP,
    dynamic_tree,
    round_fp8,
    round_integer,
    round_levels,
    round_nf4,
)

pytestmark = pytest.mark.fast
WEIGHT = np.random.default_rng(5).normal(size=(6, 128)).astype(np.float32)


def error(rounded: np.ndarray) -> float:
    """Relative L2 error against WEIGHT."""
    return float(np.linalg.norm(rounded - WEIGHT) / np.linalg.norm(WEIGHT))


def test_nf4_takes_the_nearest_quantile_of_each_block() -> None:
    """By hand, block for block: no other quantile is nearer, and the largest weight is exact."""
    rounded = round_nf4(WEIGHT, 64, double_quant=False)
    for block, found in zip(WEIGHT.reshape(-1, 64), rounded.reshape(-1, 64), strict=True):
        largest = np.abs(block).max()
        distances = np.abs(block[:, None] - NF4_QUANTILES * largest)
        np.testing.assert_allclose(np.abs(block - found), distances.min(axis=1), atol=1e-6)
        assert found[np.abs(block).argmax()] == block[np.abs(block).argmax()]


def test_nf4_blocks_run_over_the_ends_of_rows() -> None:
    """QLoRA counts weights, not rows: 6 x 96 weights have nine blocks of 64."""
    weight = np.ascontiguousarray(WEIGHT[:, :96])
    rounded = round_nf4(weight, 64, double_quant=False)
    assert np.array_equal(rounded.reshape(-1), round_nf4(weight.reshape(1, -1), 64, double_quant=False)[0])


def test_a_last_block_that_is_not_full_keeps_its_own_scale() -> None:
    """Ten weights behind two full blocks."""
    weight = WEIGHT.reshape(1, -1)[:, :138]
    assert np.abs(round_nf4(weight, 64, double_quant=False)[0, 128:]).max() == np.abs(weight[0, 128:]).max()


def test_double_quantization_moves_scales_by_less_than_a_percent() -> None:
    """The 8-bit tree is fine: weights hardly differ from those with exact scales."""
    exact, doubled = (round_nf4(WEIGHT, 64, double_quant=double) for double in (False, True))
    assert 0 < np.abs(doubled - exact).max() < 0.02 * np.abs(WEIGHT).max()
    assert error(doubled) < 1.05 * error(exact)


def test_a_weight_of_zeros_stays_zero() -> None:
    """No block divides by nothing."""
    zeros = np.zeros((2, 64), np.float32)
    for rounded in (
        round_nf4(zeros, 64, double_quant=False),
        round_nf4(zeros, 64, double_quant=True),
        round_integer(zeros, 4, 32),
        round_levels(zeros, 2, 32),
        round_fp8(zeros, per_row=True),
    ):
        assert np.array_equal(rounded, zeros)


def test_dynamic_tree_has_256_sorted_numbers() -> None:
    """arXiv:2110.02861: 127 of each sign, zero and one."""
    tree = dynamic_tree()
    assert tree.shape == (256,)
    assert np.all(np.diff(tree) > 0)
    assert np.diff(tree).max() < TREE_STEP
    assert (tree[0], tree[-1], tree[127]) == (-np.float32(0.99296875), 1.0, 0.0)


def test_int4_is_what_the_definition_of_the_format_stores() -> None:
    """The same numbers as int4_wo's codes and scales in pipeline/quantize/reference.py."""
    scale = np.abs(WEIGHT.reshape(6, 4, 32)).max(axis=2) / np.float32(7)
    codes = np.clip(np.rint(WEIGHT / np.repeat(scale, 32, axis=1)), -8, 7).astype(np.int8)
    stored = QuantizedLinear(format="int4_wo", codes=pack_int4(codes), scale=scale)
    assert np.array_equal(round_integer(WEIGHT, 4, 32), stored.weight)


@pytest.mark.parametrize("bits", [2, 3])
def test_few_bits_have_all_their_levels(bits: int) -> None:
    """2^bits different numbers per group at most, zero among them, ends within half a step."""
    groups = round_levels(WEIGHT, bits, 32).reshape(-1, 32)
    assert max(len(np.unique(group)) for group in groups) == 2**bits
    steps = (WEIGHT.reshape(-1, 32).max(axis=1) - WEIGHT.reshape(-1, 32).min(axis=1)) / (2**bits - 1)
    assert np.all(np.abs(groups - WEIGHT.reshape(-1, 32)) <= 1.01 * steps[:, None])


def test_fewer_bits_lose_more() -> None:
    """8, 4 (NF4 before integers), 3 and 2 bits in order of their error."""
    errors = [
        error(round_integer(WEIGHT, 8, 128)),
        error(round_fp8(WEIGHT, per_row=True)),
        error(round_nf4(WEIGHT, 64, double_quant=False)),
        error(round_integer(WEIGHT, 4, 64)),
        error(round_levels(WEIGHT, 3, 64)),
        error(round_levels(WEIGHT, 2, 64)),
    ]
    assert errors == sorted(errors)
    assert errors[-1] > 0.3

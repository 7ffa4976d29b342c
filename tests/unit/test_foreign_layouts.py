"""Each layout of a checkpoint quantized elsewhere is read to exactly the numbers that were packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors import ConfigError, IntegrityError
from pipeline.quantize.foreign.packing import unpack_columns, unpack_rows
from pipeline.quantize.foreign.reader import read_foreign
from pipeline.quantize.reference import decode_e4m3
from tests.support import foreign

pytestmark = pytest.mark.fast

ROWS, COLUMNS = 16, 128


@pytest.fixture
def weight() -> np.ndarray:
    """A matrix with an outlier and an all-positive row."""
    values = np.random.default_rng(3).standard_normal((ROWS, COLUMNS))
    values[1, 5], values[2] = 40.0, np.abs(values[2])
    return values


def _read(directory: Path, config: dict[str, Any], tensors: foreign.Tensors) -> Any:
    return read_foreign(foreign.write_layers(directory, config, tensors)).foreign_linear("a")


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_is_read_exactly(tmp_path: Path, weight: np.ndarray, symmetric: bool) -> None:
    """Codes, zero points and every weight are what was packed, in AWQ's order of nibbles."""
    rounded = foreign.round_matrix(weight, bits=4, group_size=64, symmetric=symmetric)
    layer = _read(tmp_path, foreign.AWQ_CONFIG, foreign.awq("a", rounded))
    assert np.array_equal(layer.codes, rounded.codes)
    assert np.array_equal(layer.zero_points, rounded.zeros)
    assert layer.symmetric is symmetric
    assert (layer.ordered, layer.group_size) == (True, 64)
    assert np.array_equal(layer.weight(), rounded.weight())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_is_read_exactly(tmp_path: Path, weight: np.ndarray, bits: int, symmetric: bool, version: int) -> None:
    """Both versions, with and without zero points, a zero point of 0 included."""
    rounded = foreign.round_matrix(weight, bits=bits, group_size=32, symmetric=symmetric)
    assert symmetric or 0 in rounded.zeros
    config = foreign.GPTQ_CONFIG | {"bits": bits, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    layer = _read(tmp_path, config, foreign.gptq("a", rounded, version=version))
    assert layer.element == f"int{bits}"
    assert layer.symmetric is symmetric
    assert np.array_equal(layer.weight(), rounded.weight())


def test_act_order_is_read_exactly_and_not_called_ordered(tmp_path: Path, weight: np.ndarray) -> None:
    """g_idx gives each input its group, however mixed."""
    mixed = np.random.default_rng(5).permutation(np.arange(COLUMNS) // 32)
    rounded = foreign.round_matrix(weight, bits=4, group_size=32, symmetric=True, group_of=mixed)
    layer = _read(tmp_path, foreign.GPTQ_CONFIG | {"desc_act": True}, foreign.gptq("a", rounded))
    assert not layer.ordered
    assert np.array_equal(layer.weight(), rounded.weight())


def test_desc_act_with_groups_in_order_is_ordered(tmp_path: Path, weight: np.ndarray) -> None:
    """What counts is g_idx, not the flag."""
    rounded = foreign.round_matrix(weight, bits=4, group_size=32, symmetric=True)
    assert _read(tmp_path, foreign.GPTQ_CONFIG | {"desc_act": True}, foreign.gptq("a", rounded)).ordered


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, COLUMNS])
def test_pack_quantized_is_read_exactly(
    tmp_path: Path, weight: np.ndarray, bits: int, symmetric: bool, group_size: int
) -> None:
    """Group and channel scales; zero points are packed along the other axis."""
    rounded = foreign.round_matrix(weight, bits=bits, group_size=group_size, symmetric=symmetric)
    groups = foreign.config_groups(bits, strategy="group", group_size=group_size, symmetric=symmetric)
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    layer = _read(tmp_path, config, foreign.packed("a", rounded, symmetric=symmetric))
    assert layer.symmetric is symmetric
    assert np.array_equal(layer.weight(), rounded.weight())


@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized_is_read_exactly(tmp_path: Path, weight: np.ndarray, symmetric: bool) -> None:
    """int8 codes are signed, and so are their zero points."""
    rounded = foreign.round_matrix(weight, bits=8, group_size=COLUMNS, symmetric=symmetric)
    groups = foreign.config_groups(8, strategy="channel", group_size=None, symmetric=symmetric)
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    tensors = {"a.weight": (rounded.codes - 128).astype(np.int8), "a.weight_scale": rounded.scales}
    if not symmetric:
        tensors["a.weight_zero_point"] = (rounded.zeros - 128).astype(np.int8)
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    layer = _read(tmp_path, config, tensors)
    assert layer.dynamic_activations
    assert np.array_equal(layer.weight(), rounded.weight())


def _write_fp8(directory: Path, config: dict[str, Any], codes: np.ndarray, others: foreign.Tensors) -> Any:
    """Write and read a layer of float8 codes."""
    foreign.write_layers(directory, config, {"a.weight": codes} | others, float8=("a.weight",))
    return read_foreign(directory).foreign_linear("a")


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_fp8_blocks_are_read_exactly(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Each block has its multiplier, also where the last block is cut."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7E, shape, np.uint8)
    scales = rng.random((-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    layer = _write_fp8(tmp_path, config, codes, {"a.weight_scale_inv": scales})
    values = decode_e4m3(codes)
    for r, c in np.ndindex(*scales.shape):
        values[128 * r : 128 * r + 128, 128 * c : 128 * c + 128] *= scales[r, c]
    assert np.array_equal(layer.weight(), values)


def test_static_fp8_is_read_exactly(tmp_path: Path) -> None:
    """One scale for the weight and one for the input."""
    codes = np.random.default_rng(0).integers(0, 0x7E, (8, 16), np.uint8)
    others = {"a.weight_scale": np.array(0.25, np.float32), "a.input_scale": np.array(0.5, np.float32)}
    layer = _write_fp8(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, codes, others)
    assert (layer.input_scale, layer.dynamic_activations) == (0.5, False)
    assert np.array_equal(layer.weight(), decode_e4m3(codes) * np.float32(0.25))


@pytest.mark.parametrize(("strategy", "rows"), [("tensor", 1), ("channel", 8)])
def test_float_quantized_is_read_exactly(tmp_path: Path, strategy: str, rows: int) -> None:
    """Scales per tensor and per output channel."""
    codes = np.random.default_rng(0).integers(0, 0x7E, (8, 16), np.uint8)
    scales = np.linspace(0.5, 2, rows, dtype=np.float32).reshape(rows, 1)
    groups = foreign.config_groups(8, strategy=strategy, group_size=None, type="float")
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    layer = _write_fp8(tmp_path, config, codes, {"a.weight_scale": scales.reshape(-1) if rows == 1 else scales})
    assert np.array_equal(layer.weight(), decode_e4m3(codes) * scales)


def test_modelopts_own_checkpoint_is_read_exactly(tmp_path: Path, weight: np.ndarray) -> None:
    """int4 in pairs along the outputs, two's complement, low nibble first; the pre-quant scale is kept apart."""
    rounded = foreign.round_matrix(weight, bits=4, group_size=64, symmetric=True)
    nibbles = (rounded.codes - 8) % 16
    tensors = {
        "a.weight": (nibbles[0::2] + 16 * nibbles[1::2]).astype(np.uint8),
        "a.weight_scale": rounded.scales.astype(np.float32),
        "a.pre_quant_scale": np.linspace(0.5, 2, COLUMNS, dtype=np.float32),
    }
    layer = _read(tmp_path, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, tensors)
    assert np.array_equal(layer.weight(), rounded.weight())
    assert np.array_equal(layer.pre_quant_scale, tensors["a.pre_quant_scale"])


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=30, deadline=None)
@given(data=st.data(), bits=st.sampled_from([2, 4, 8]))
def test_unpacking_undoes_packing(data: st.DataObject, bits: int) -> None:
    """Any codes, along either axis."""
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)) * 32 // bits)
    codes = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 2**bits - 1)))
    words = foreign.pack_along_last(codes, bits)
    assert np.array_equal(unpack_columns(words, bits), codes)
    assert np.array_equal(unpack_rows(words.T, bits), codes.T)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}}, "marlin-24"),
    ],
)
def test_another_layout_is_refused_by_name(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """A layout that is not read is never guessed."""
    foreign.write_layers(tmp_path, config, {"a.qweight": np.zeros((8, 1), np.int32)})
    with pytest.raises(ConfigError, match=said):
        read_foreign(tmp_path)


def test_bits_that_are_not_read_are_refused(tmp_path: Path, weight: np.ndarray) -> None:
    """A 2-bit GPTQ layer is recognised by its own shapes."""
    rounded = foreign.round_matrix(weight, bits=2, group_size=32, symmetric=False)
    foreign.write_layers(tmp_path, foreign.GPTQ_CONFIG, foreign.gptq("a", rounded))
    with pytest.raises(ConfigError, match="2-bit"):
        read_foreign(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path, weight: np.ndarray) -> None:
    """Scales that are not there are an integrity error with the tensor's name."""
    tensors = foreign.awq("a", foreign.round_matrix(weight, bits=4, group_size=64, symmetric=True))
    del tensors["a.scales"]
    foreign.write_layers(tmp_path, foreign.AWQ_CONFIG, tensors)
    with pytest.raises(IntegrityError, match=r"a\.scales"):
        read_foreign(tmp_path).foreign_linear("a")

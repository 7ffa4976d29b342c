"""What one pass over a layer's weights measures is what the definition of its format says, array by array."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.quantize import side_by_side
from pipeline.quantize.diagnosis import Suspect, step_errors
from pipeline.quantize.numerics import relative_l2
from pipeline.quantize.reference import PACKED, SMOOTHED, LinearFormat, QuantizedLinear
from pipeline.quantize.tensor_files import FloatRows
from pipeline.quantize.weight_pass import measure

pytestmark = pytest.mark.fast

ROWS, COLUMNS, GROUP = 96, 128, 32
FORMATS: tuple[LinearFormat, ...] = (
    "fp8", "fp8_rowwise", "int8_sq", "int8_wo", "int4_awq", "int4_wo", "w4a8_awq",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_BLOCK", 20 * COLUMNS)


def layer_of(form: LinearFormat) -> QuantizedLinear:
    """Any codes of a format, each of them once at least, with any scales."""
    random = np.random.default_rng(FORMATS.index(form))
    packed = form in PACKED
    codes = random.integers(0, 256, (ROWS // 2 if packed else ROWS, COLUMNS), np.uint8)
    if form.startswith("fp8"):
        codes[codes & 0x7F == 0x7F] = 1
    shape = {"fp8": (), **dict.fromkeys(PACKED, (ROWS, COLUMNS // GROUP))}.get(form, (ROWS,))
    return QuantizedLinear(
        format=form,
        codes=codes if packed or form.startswith("fp8") else codes.view(np.int8),
        scale=random.uniform(0.001, 0.1, shape).astype(np.float32),
        second_scale=0.01 if form == "w4a8_awq" else None,
        input_scale=0.02 if form in {"fp8", "int8_sq", "w4a8_awq"} else None,
        pre_quant_scale=random.uniform(0.5, 2, COLUMNS).astype(np.float32) if form in SMOOTHED else None,
    )


def source_of(layer: QuantizedLinear) -> np.ndarray:
    """Weights near what a layer stores."""
    noise = np.random.default_rng(1).uniform(-0.3, 0.3, layer.shape) * layer.step()
    p = 1 if layer.pre_quant_scale is None else layer.pre_quant_scale
    return ((layer.grid_weight + noise) * p).astype(np.float32)


def rows_of(values: np.ndarray) -> FloatRows:
    """Rows as a float32 file has them."""
    return FloatRows(bits=values, dtype="F32")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_measured_as_it_is_defined(form: LinearFormat) -> None:
    """Step error exactly, errors and outputs up to the order of float32 sums."""
    layer = layer_of(form)
    weight = source_of(layer)
    x = np.random.default_rng(2).standard_normal((5, COLUMNS)).astype(np.float32)
    p = np.float32(1) if layer.pre_quant_scale is None else layer.pre_quant_scale
    measured = measure(layer, rows_of(weight), x, max_clip=1)
    assert measured.step_error == step_errors(layer, weight / p).max()
    assert measured.step_error > 0.25
    assert measured.weight_error == pytest.approx(relative_l2(layer.weight * p, weight), rel=1e-4)
    np.testing.assert_allclose(measured.outputs, layer.forward(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(measured.source_outputs, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "F16"), (np.float64, "F64"), (np.uint16, "BF16")])
def test_a_source_of_any_floating_type_is_widened(dtype: type, name: str) -> None:
    """Stored numbers mean what they mean, whatever their type."""
    layer = layer_of("int8_wo")
    weight = source_of(layer)
    bits = (weight.view(np.uint32) >> 16).astype(np.uint16) if name == "BF16" else weight.astype(dtype)
    stored = FloatRows(bits=bits, dtype=name)
    measured = measure(layer, stored, np.empty((0, COLUMNS), np.float32), max_clip=1)
    assert measured.step_error == step_errors(layer, stored.rows(slice(None))).max()
    assert measured.outputs.shape == (0, ROWS)


def test_weights_that_were_clipped_are_held_to_the_largest_code() -> None:
    """Up to the share that a search may cut; what lies farther out counts with its whole distance."""
    layer = replace(layer_of("int4_awq"), pre_quant_scale=None)
    weight = source_of(layer) * np.float32(1.8)
    for max_clip in (1.0, 1.5, 2.0):
        suspect = Suspect(layer=layer, source=weight, max_step_error=0.5, max_clip=max_clip)
        measured = measure(layer, rows_of(weight), np.empty((0, COLUMNS), np.float32), max_clip=max_clip)
        assert measured.step_error == step_errors(layer, suspect.target).max()
        assert measured.weight_error == pytest.approx(relative_l2(layer.weight, weight), rel=1e-4)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_not_taken_for_one(code: int) -> None:
    """One such code anywhere makes every measure of its layer NaN, which is within no limit."""
    layer = layer_of("fp8")
    weight = source_of(layer)
    layer.codes[ROWS - 1, 3] = code
    measured = measure(layer, rows_of(weight), np.ones((1, COLUMNS), np.float32), max_clip=1)
    assert np.isnan(measured.step_error)
    assert np.isnan(measured.weight_error)
    assert np.isnan(measured.outputs[0, ROWS - 1])
    assert np.isfinite(measured.outputs[0, : ROWS - 1]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_scale_that_is_no_scale_is_within_no_limit(value: float) -> None:
    """Whatever it makes of the weights."""
    for form in FORMATS:
        layer = layer_of(form)
        weight = source_of(layer)
        assert layer.scale is not None
        layer.scale.reshape(-1)[-1] = value
        measured = measure(layer, rows_of(weight), np.empty((0, COLUMNS), np.float32), max_clip=1)
        assert not measured.step_error <= 0.5


def test_layers_of_other_tools_are_refused() -> None:
    """Zero points and columns out of order are checked where they are converted."""
    layer = replace(layer_of("int4_wo"), zero_point=np.zeros((ROWS, COLUMNS // GROUP), np.int8))
    with pytest.raises(TypeError, match="no zero points"):
        measure(layer, rows_of(layer.grid_weight), np.empty((0, COLUMNS), np.float32), max_clip=1)

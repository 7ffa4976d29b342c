"""Safetensors are read with numpy alone, and damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import BadSafetensors, SourceNotFound
from pipeline.quantize.tensor_files import TensorFiles, bfloat16_to_float32, cast

pytestmark = pytest.mark.fast


def write(file: Path, dtype: str, shape: list[int], data: bytes, *, name: str = "w", end: int | None = None) -> None:
    """Write a safetensors file of one tensor by hand."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data) if end is None else end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    """0x3FC0 is 1.5 and 0xC000 is -2."""
    write(tmp_path / "a.safetensors", "BF16", [2], bytes.fromhex("c03f00c0"))
    np.testing.assert_array_equal(TensorFiles(tmp_path).floats("w"), [1.5, -2.0])


def test_float8_stays_bit_patterns(tmp_path: Path) -> None:
    """Codes are returned as stored."""
    write(tmp_path / "a.safetensors", "F8_E4M3", [1, 2], b"\x38\xff")
    raw = TensorFiles(tmp_path).raw("w")
    assert raw.dtype == np.uint8
    assert raw.tolist() == [[0x38, 0xFF]]


def test_codes_are_not_floats(tmp_path: Path) -> None:
    """Reading codes without their scale is an error."""
    write(tmp_path / "a.safetensors", "I8", [2], b"\x01\x02")
    with pytest.raises(BadSafetensors, match="tensor w is I8"):
        TensorFiles(tmp_path).floats("w")


def test_shards_are_one_mapping(tmp_path: Path) -> None:
    """Tensors of all files are found by name."""
    write(tmp_path / "a.safetensors", "F32", [], np.float32(2).tobytes(), name="a")
    write(tmp_path / "b.safetensors", "F16", [1], np.float16(3).tobytes(), name="b")
    files = TensorFiles(tmp_path)
    assert list(files) == ["a", "b"]
    assert files.floats("a") == 2
    assert files.floats("b").tolist() == [3]


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which one is meant cannot be known."""
    write(tmp_path / "a.safetensors", "U8", [1], b"\x00")
    write(tmp_path / "b.safetensors", "U8", [1], b"\x00")
    with pytest.raises(BadSafetensors, match=r"tensor w is also in a\.safetensors"):
        TensorFiles(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """The error gives both sizes."""
    write(tmp_path / "a.safetensors", "F32", [4], bytes(16))
    file = tmp_path / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadSafetensors, match=r"is truncated: \d+ bytes, its tensors need"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 64, b"\x02" + bytes(7) + b"{]" + bytes(9)])
def test_what_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    """Any other content is an error of its own, not a crash."""
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(BadSafetensors):
        TensorFiles(tmp_path)


def test_a_shape_that_does_not_fill_its_bytes_is_refused(tmp_path: Path) -> None:
    """Shape, dtype and offsets must agree."""
    write(tmp_path / "a.safetensors", "F32", [3], bytes(16))
    with pytest.raises(BadSafetensors, match="malformed header"):
        TensorFiles(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    """No file, no checkpoint."""
    with pytest.raises(SourceNotFound):
        TensorFiles(tmp_path)


def test_cast_to_bfloat16_rounds_ties_to_even() -> None:
    """Half a last place above 1 goes down, above 1 + 2^-7 it goes up; NaN stays NaN."""
    values = np.array([1 + 2**-8, 1 + 2**-7 + 2**-8, -1.0, np.nan, np.inf], np.float32)
    np.testing.assert_array_equal(cast(values, "bfloat16"), [1.0, 1 + 2**-6, -1.0, np.nan, np.inf])


def test_cast_to_float16_overflows_to_infinity() -> None:
    """float16 ends at 65504."""
    np.testing.assert_array_equal(
        cast(np.array([65504, 1e6, 0.1], np.float32), "float16"), [65504, np.inf, np.float16(0.1)]
    )


def test_cast_undoes_widening() -> None:
    """Every finite bfloat16 number survives."""
    bits = np.arange(0, 0x7F80, 7, dtype=np.uint16)
    values = bfloat16_to_float32(bits)
    np.testing.assert_array_equal(cast(values, "bfloat16"), values)

"""Reads tensors from safetensors files with numpy alone, one at a time, never a whole checkpoint.

This is the ground on which the reference reading stands: it shares no code with the tool that wrote
the files, and it covers the dtypes numpy lacks (bfloat16, float8 E4M3). A file is mapped, not loaded;
only the pages of the tensors that are asked for are read.

Layout of a safetensors file: 8 bytes little-endian header length n, n bytes of JSON (name -> dtype,
shape, data_offsets relative to the end of the header), then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import BadSafetensors, SourceNotFound, Unreadable

FloatArray = npt.NDArray[np.float32]

# dtype name in the header -> the numpy dtype of its raw storage. BF16 and F8_E4M3 stay bit patterns.
_STORAGE: Mapping[str, npt.DTypeLike] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
_HEADER_LIMIT = 100_000_000  # the format's own limit
_READ_AHEAD_BYTES = 1 << 20  # faults fetch smaller tensors in one or two reads anyway


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: header dtype name, shape, file and absolute byte offset."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int


@dataclass(frozen=True, kw_only=True, eq=False)
class FloatRows:
    """A floating tensor that is widened to float32 a few rows at a time; nothing is read before that.

    Attributes:
        bits: as stored, mapped: bit patterns (uint16) for BF16.
        dtype: name in the header: F64, F32, F16 or BF16.
    """

    bits: npt.NDArray[Any]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.bits.shape

    def rows(self, rows: slice) -> FloatArray:
        """Rows as float32; exact for F32, F16 and BF16."""
        return _widen(self.bits[rows], self.dtype)


class TensorFiles(Mapping[str, TensorInfo]):
    """All tensors of a directory's *.safetensors files, by name.

    Args:
        directory: holds one file, or shards.
        pattern: glob of the files to read.

    Raises:
        SourceNotFound: no safetensors file.
        Unreadable: a file cannot be opened.
        BadSafetensors: a file is truncated, malformed or repeats a name.
    """

    def __init__(self, directory: Path, pattern: str = "*.safetensors") -> None:
        files = sorted(directory.glob(pattern))
        if not files:
            raise SourceNotFound(f"{directory} holds no {pattern} file.")
        self._tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in _read_header(file).items():
                if name in self._tensors:
                    raise BadSafetensors(f"{file}: tensor {name} is also in {self._tensors[name].file.name}.")
                self._tensors[name] = info

    def __getitem__(self, name: str) -> TensorInfo:
        """Where tensor `name` lies."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Names, in file order."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._tensors)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """Map a tensor's stored values: bit patterns (uint16, uint8) for BF16 and F8_E4M3.

        The kernel starts to read a large one, so that who maps the next tensor early finds it there later.
        The map is private: torch takes arrays that can be written, and nothing that is written reaches the file.
        """
        info = self._tensors[name]
        if 0 in info.shape:
            return np.zeros(info.shape, _STORAGE[info.dtype])
        _read_ahead(info)
        values = np.memmap(info.file, _STORAGE[info.dtype], "c", info.offset, (math.prod(info.shape),))
        return np.asarray(values).reshape(info.shape)

    def floats(self, name: str) -> FloatArray:
        """Read a floating tensor as float32; exact for F32, F16 and BF16.

        Raises:
            BadSafetensors: the tensor holds codes (integers or float8), which have no meaning without a scale.
        """
        tensor = self.float_rows(name)
        return _widen(tensor.bits, tensor.dtype)

    def float_rows(self, name: str) -> FloatRows:
        """Map a floating tensor.

        Raises:
            BadSafetensors: the tensor holds codes.
        """
        dtype = self._tensors[name].dtype
        if dtype not in {"F64", "F32", "F16", "BF16"}:
            raise BadSafetensors(f"{self._tensors[name].file}: tensor {name} is {dtype}, a floating type was expected.")
        return FloatRows(bits=self.raw(name), dtype=dtype)


def _widen(stored: npt.NDArray[Any], dtype: str) -> FloatArray:
    return bfloat16_to_float32(stored) if dtype == "BF16" else stored.astype(np.float32)


def _read_ahead(info: TensorInfo) -> None:
    n_bytes = math.prod(info.shape) * np.dtype(_STORAGE[info.dtype]).itemsize
    if n_bytes < _READ_AHEAD_BYTES:
        return
    descriptor = os.open(info.file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, info.offset, n_bytes, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """Widen bfloat16 bit patterns to float32: the upper half of the same number, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cast(values: FloatArray, dtype: str) -> FloatArray:
    """Round float32 to "bfloat16" or "float16" (nearest, ties to even) and widen back to float32.

    float16 overflows to infinity above 65504, as every cast does; NaN stays NaN.
    """
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32)).astype(np.float32, copy=False)


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Parse one file's header and check that every tensor lies within the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if 0 < length <= min(size - 8, _HEADER_LIMIT) else None
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}.") from error
    if header is None:
        raise BadSafetensors(f"{file} is truncated or not a safetensors file ({size} bytes).")
    try:
        return {
            name: _tensor_info(entry, file, start=8 + length, size=size)
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadSafetensors(f"{file} has a malformed header: {error}.") from error


def _tensor_info(entry: Mapping[str, Any], file: Path, *, start: int, size: int) -> TensorInfo:
    dtype, shape = entry["dtype"], tuple(int(extent) for extent in entry["shape"])
    begin, end = (int(position) for position in entry["data_offsets"])
    if dtype not in _STORAGE:
        raise ValueError(f"unknown dtype {dtype}")
    if end - begin != math.prod(shape) * np.dtype(_STORAGE[dtype]).itemsize:
        raise ValueError(f"{dtype} {list(shape)} does not fill bytes {begin} to {end}")
    if start + end > size:
        raise BadSafetensors(f"{file} is truncated: {size} bytes, its tensors need {start + end}.")
    return TensorInfo(dtype=dtype, shape=shape, file=file, offset=start + begin)

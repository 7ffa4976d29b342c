"""The only place that parses a GGUF file: header, metadata and tensor table, every byte checked.

The format is GGUF version 2 or 3, little endian (specification: ggml-org/ggml, docs/gguf.md). A file
that is truncated, corrupt or foreign raises BadGGUF with the byte offset and what was expected
there; nothing is allocated on the word of a length that the file cannot hold.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pipeline.errors import BadGGUF, Unreadable

Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
# Value type ids of the specification -> struct codes.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
# Guard: a string needs a length, a key-value pair a key, a type and one byte, a tensor a name, a
# rank, one dimension, a type and an offset; a count that cannot fit is refused before any loop.
_MIN_STRING: Final = 8
_MIN_PAIR: Final = _MIN_STRING + 4 + 1
_MIN_TENSOR: Final = _MIN_STRING + 4 + 8 + 4 + 8
_LFS_POINTER: Final = b"version https://git-lfs"

# Tensor type id -> (name, elements per block, bytes per block), from ggml's type table. Only types
# whose dequantization is exact and tested here.
TENSOR_TYPES: Final[Mapping[int, tuple[str, int, int]]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        30: ("BF16", 1, 2),
    }
)


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One row of the tensor table.

    `shape` is row major, as numpy and safetensors write it (the file lists dimensions the other way
    round); `offset` counts bytes from the start of the file.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """Name of the storage type, such as 'Q4_1'."""
        return TENSOR_TYPES[self.type_id][0]


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """Metadata and tensor table of one file; weights stay on disk."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]

    def text(self, key: str) -> str:
        """Return a required string."""
        value = self._required(key)
        if not isinstance(value, str):
            raise self._wrong_type(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or `default` when the key is absent and a default exists."""
        value = self._required(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return an integer or float, or `default` when the key is absent and a default exists."""
        value = self._required(key) if default is None else self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self._wrong_type(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or `default` when the key is absent."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong_type(key, value, "a boolean")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a required array of strings."""
        value = self._required(key)
        if not isinstance(value, tuple):
            raise self._wrong_type(key, value, "an array of strings")
        strings = tuple(item for item in value if isinstance(item, str))
        if len(strings) != len(value):
            raise self._wrong_type(key, value, "an array of strings")
        return strings

    def numbers(self, key: str) -> tuple[int | float, ...]:
        """Return a required array of integers or floats."""
        value = self._required(key)
        if not isinstance(value, tuple):
            raise self._wrong_type(key, value, "an array of finite numbers")
        numbers = tuple(item for item in value if isinstance(item, int | float) and isfinite(item))
        if len(numbers) != len(value):
            raise self._wrong_type(key, value, "an array of finite numbers")
        return numbers

    def _required(self, key: str) -> Value:
        if key not in self.metadata:
            raise BadGGUF(
                f"{self.path}: metadata key '{key}' is missing.",
                hint="Convert the model again with a current llama.cpp, or use the original Hugging Face checkpoint.",
            )
        return self.metadata[key]

    def _wrong_type(self, key: str, value: Value, expected: str) -> BadGGUF:
        shown = "an array" if isinstance(value, tuple) else repr(value)
        return BadGGUF(f"{self.path}: metadata key '{key}' is {shown}, expected {expected}.")


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file.

    Raises:
        Unreadable: the file cannot be opened.
        BadGGUF: it is not a GGUF file that can be imported; the message names the byte offset.
    """
    check_magic(path)  # Guard: also keeps an empty file, which cannot be mapped, from mmap
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror or error}).") from error


def check_magic(path: Path) -> None:
    """Look at the first bytes only, to refuse a file of another kind before it is hashed.

    Raises:
        Unreadable: the file cannot be opened.
        BadGGUF: it does not start as a GGUF file does.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror or error}).") from error
    if start == _LFS_POINTER:
        raise BadGGUF(
            f"{path}: this is a Git LFS pointer, not the model.", hint="Run 'git lfs pull' in its repository."
        )
    magic = start[: len(_MAGIC)]
    if magic != _MAGIC:
        raise BadGGUF(f"{path}: at byte 0: {magic!r}, expected {_MAGIC!r}; this is not a GGUF file.")


class _Parser:
    """A cursor over the mapped file that refuses to step outside it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def parse(self) -> GGUFFile:
        self._preamble()
        tensor_count = self._count("tensor count", _MIN_TENSOR)
        pair_count = self._count("metadata count", _MIN_PAIR)
        metadata = self._metadata(pair_count)
        rows = [self._tensor_info() for _ in range(tensor_count)]
        tensors = self._place(rows, metadata)
        return GGUFFile(path=self.path, metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors))

    def fail(self, at: int, problem: str, hint: str = "") -> BadGGUF:
        return BadGGUF(f"{self.path}: at byte {at}: {problem}.", hint=hint)

    def _preamble(self) -> None:
        self.at = len(_MAGIC)
        version = self._unpack("I", "version")
        if version in _VERSIONS:
            return
        at = len(_MAGIC)
        if version & 0xFFFF == 0 and int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise self.fail(at, "the file is big endian, expected little endian", "Convert it on a little-endian host.")
        raise self.fail(at, f"version {version}, expected 2 or 3", "Convert the model again with a current llama.cpp.")

    def _unpack(self, code: str, what: str) -> int:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))
        return int(value)

    def _take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            left = self.size - self.at
            raise self.fail(self.at, f"{what} needs {count} bytes and {left} are left; the file is truncated")
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken

    def _count(self, what: str, smallest: int) -> int:
        at = self.at
        count = self._unpack("Q", what)
        if count * smallest > self.size - self.at:
            raise self.fail(at, f"{what} {count} cannot fit in a file of {self.size} bytes")
        return count

    def _string(self, what: str) -> str:
        at = self.at
        length = self._unpack("Q", f"length of {what}")
        raw = self._take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(at + 8 + error.start, f"{what} is not UTF-8") from error

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            at = self.at
            key = self._string("a metadata key")
            if key in metadata:
                raise self.fail(at, f"metadata key '{key}' appears twice")
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> Value:
        at = self.at
        kind = self._unpack("I", f"value type of '{key}'")
        if kind != _ARRAY:
            return self._elements(kind, 1, key, at)[0]
        item_at = self.at
        item_kind = self._unpack("I", f"element type of '{key}'")
        smallest = struct.calcsize(_SCALARS[item_kind]) if item_kind in _SCALARS else _MIN_STRING
        length = self._count(f"length of '{key}'", smallest)
        return self._elements(item_kind, length, key, item_at)

    def _elements(self, kind: int, count: int, key: str, kind_at: int) -> tuple[Scalar, ...]:
        if kind == _STRING:
            return tuple(self._string(f"the value of '{key}'") for _ in range(count))
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(kind_at, f"'{key}' has value type {kind}, expected 0 to 12 without nested arrays")
        at = self.at
        values = struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code), f"the value of '{key}'"))
        if kind != _BOOL:
            return values
        if not set(values) <= {0, 1}:
            raise self.fail(at, f"'{key}' is a boolean of value {max(values)}, expected 0 or 1")
        return tuple(value == 1 for value in values)

    def _tensor_info(self) -> tuple[int, GGUFTensor]:
        """Read one row of the table; its offset is still relative to the data section."""
        at = self.at
        name = self._string("a tensor name")
        rank = self._unpack("I", f"rank of tensor '{name}'")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self.fail(at, f"tensor '{name}' has {rank} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        dimensions = [self._unpack("Q", f"a dimension of tensor '{name}'") for _ in range(rank)]
        type_id = self._unpack("I", f"type of tensor '{name}'")
        offset = self._unpack("Q", f"offset of tensor '{name}'")
        if type_id not in TENSOR_TYPES:
            known = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
            raise self.fail(at, f"tensor '{name}' has type {type_id}, which is not one of {known}")
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        if dimensions[0] == 0 or prod(dimensions) == 0 or dimensions[0] % block:
            shape = list(reversed(dimensions))
            raise self.fail(at, f"tensor '{name}' has shape {shape}; rows of {type_name} are multiples of {block}")
        tensor = GGUFTensor(
            name=name,
            type_id=type_id,
            shape=tuple(reversed(dimensions)),
            offset=offset,
            nbytes=prod(dimensions) // block * block_bytes,
        )
        return at, tensor

    def _place(self, rows: Iterable[tuple[int, GGUFTensor]], metadata: Mapping[str, Value]) -> dict[str, GGUFTensor]:
        """Turn relative offsets into absolute ones and check that the tensors tile the data section."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise BadGGUF(f"{self.path}: general.alignment is {alignment!r}, expected a power of two.")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for at, row in rows:
            offset, end = start + row.offset, start + row.offset + row.nbytes
            if row.name in tensors:
                raise self.fail(at, f"tensor '{row.name}' appears twice")
            if row.offset % alignment:
                raise self.fail(at, f"tensor '{row.name}' starts at {row.offset}, not a multiple of {alignment}")
            if end > self.size:
                problem = f"tensor '{row.name}' ends at byte {end} and the file at {self.size}; the file is truncated"
                raise self.fail(at, problem)
            tensors[row.name] = GGUFTensor(
                name=row.name, type_id=row.type_id, shape=row.shape, offset=offset, nbytes=row.nbytes
            )
        by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(by_offset):
            if before.offset + before.nbytes > after.offset:
                raise self.fail(after.offset, f"tensors '{before.name}' and '{after.name}' overlap")
        return tensors

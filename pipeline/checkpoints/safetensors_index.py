"""Read what safetensors files contain, without torch and without reading the weights.

The format: 8-byte little-endian header length, a JSON header of that length, then the tensors' bytes
without holes (safetensors' own format description; its reader refuses headers over 100 MB, as this
one does). Truncated files, Git LFS pointers, lying offsets and missing shards are found here, in
milliseconds, instead of in the middle of a build.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from pipeline.errors import BadSafetensors, SourceNotFound, Unreadable

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
_LFS_POINTER: Final = b"version https://git-lfs"
_DTYPE_BITS: Final = MappingProxyType(
    {
        "F4": 4,
        "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
        "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
        "U32": 32, "I32": 32, "F32": 32,
        "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: file, dtype as safetensors names it, shape, absolute byte range."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint, and before them the index if it is sharded.

    Raises:
        SourceNotFound: there are no safetensors weights.
        BadSafetensors: the index is malformed or names a file that is not there.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.exists():
        return (single,)
    if not index.exists():
        others = sorted(path.name for path in directory.glob("*.safetensors"))
        found = f" Found: {', '.join(others)}." if others else ""
        raise SourceNotFound(f"{directory}: neither {SINGLE} nor {INDEX} exists.{found}")
    shards = sorted(set(_weight_map(index).values()))
    missing = [name for name in shards if not (directory / name).exists()]
    if missing:
        raise BadSafetensors(
            f"{index}: shard '{missing[0]}' is missing ({len(missing)} of {len(shards)} are).",
            hint="Download the checkpoint again.",
        )
    return (index, *(directory / name for name in shards))


def read_checkpoint(directory: Path) -> Mapping[str, TensorEntry]:
    """Return every tensor of a checkpoint by name, sharded or not, all files checked.

    Raises:
        SourceNotFound: there are no safetensors weights.
        BadSafetensors: a file is truncated or malformed, a shard is missing, a tensor is missing or twice there.
        Unreadable: a file exists and cannot be read.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in weight_files(directory):
        if file.name == INDEX:
            continue
        for name, entry in read_header(file).items():
            if name in tensors:
                raise BadSafetensors(f"{file}: tensor '{name}' is also in {tensors[name].file.name}.")
            tensors[name] = entry
    if not (directory / SINGLE).exists():
        _check_index(directory / INDEX, tensors)
    return MappingProxyType(dict(sorted(tensors.items())))


def read_header(file: Path) -> Mapping[str, TensorEntry]:
    """Return the tensors of one safetensors file by name.

    Raises:
        BadSafetensors: the file is truncated or malformed; the message names the tensor.
        Unreadable: the file cannot be opened or read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            length = _header_length(file, prefix, size)
            raw = stream.read(length)
    except OSError as error:
        raise Unreadable(f"{file}: cannot be read ({error.strerror or error}).") from error
    header = _parse_header(file, raw)
    base = _LENGTH_BYTES + length
    entries = [_entry(file, name, value, base) for name, value in header.items() if name != "__metadata__"]
    _check_ranges(file, entries, base, size)
    return MappingProxyType({entry.name: entry for entry in entries})


def _fail(file: Path, problem: str, hint: str = "") -> NoReturn:
    raise BadSafetensors(f"{file}: {problem}.", hint=hint)


def _header_length(file: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < _LENGTH_BYTES:
        _fail(file, f"{size} bytes are no safetensors file", "Download the file again.")
    if _LFS_POINTER.startswith(prefix):
        _fail(file, "this is a Git LFS pointer, not the weights", "Run 'git lfs pull' in its repository.")
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER_BYTES:
        _fail(file, f"the header claims {length} bytes, at most {_MAX_HEADER_BYTES} are allowed")
    if length > size - _LENGTH_BYTES:
        _fail(
            file,
            f"the header claims {length} bytes and the file has {size}; it is truncated or no safetensors file",
            "Download the file again.",
        )
    return int(length)


def _parse_header(file: Path, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        items = dict(pairs)
        if len(items) != len(pairs):
            names = [name for name, _ in pairs]
            _fail(file, f"'{next(name for name in names if names.count(name) > 1)}' is twice in the header")
        return items

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadSafetensors(f"{file}: the header is not JSON ({error}).") from error
    if not isinstance(header, dict):
        _fail(file, "the header is not a JSON object")
    return header


def _entry(file: Path, name: str, value: object, base: int) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            _fail(file, f"tensor '{name}' has no dtype, shape and data_offsets")
    if dtype not in _DTYPE_BITS:
        _fail(file, f"tensor '{name}' has dtype '{dtype}', which is not one of {', '.join(_DTYPE_BITS)}")
    if not all(type(length) is int and length >= 0 for length in shape):
        _fail(file, f"tensor '{name}' has shape {shape}")
    bits = prod(shape) * _DTYPE_BITS[dtype]
    if start < 0 or (end - start) * 8 != bits:
        _fail(
            file,
            f"tensor '{name}' ({dtype} {shape}) needs {bits // 8} bytes and its offsets say {start} to {end}",
        )
    return TensorEntry(name=name, file=file, dtype=dtype, shape=tuple(shape), start=base + start, end=base + end)


def _check_ranges(file: Path, entries: list[TensorEntry], base: int, size: int) -> None:
    """Check that the tensors tile the data section: no overlap, no hole, nothing missing or left over."""
    ordered = sorted(entries, key=lambda entry: (entry.start, entry.end))
    for before, after in pairwise(ordered):
        if before.end > after.start:
            _fail(file, f"tensors '{before.name}' and '{after.name}' overlap")
        if before.end < after.start:
            _fail(file, f"{after.start - before.end} bytes between '{before.name}' and '{after.name}' are no tensor's")
    if ordered and ordered[0].start != base:
        _fail(file, f"{ordered[0].start - base} bytes before tensor '{ordered[0].name}' are no tensor's")
    cut = [entry for entry in ordered if entry.end > size]
    if cut:
        first = cut[0]
        _fail(
            file,
            f"truncated: tensor '{first.name}' ends at byte {first.end} and the file at {size} "
            f"({len(cut)} of {len(ordered)} tensors are cut)",
            "Download the file again.",
        )
    end = ordered[-1].end if ordered else base
    if end != size:
        _fail(file, f"{size - end} bytes after the last tensor are no tensor's")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        document = json.loads(index.read_bytes())
    except OSError as error:
        raise Unreadable(f"{index}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        raise BadSafetensors(f"{index}: not JSON ({error}).") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(index, "'weight_map' is missing or empty")
    for tensor, name in weight_map.items():
        # Guard: a shard outside the directory would be read, hashed and copied from anywhere.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            _fail(index, f"tensor '{tensor}' is in {name!r}, which is no safetensors file of this directory")
    return weight_map


def _check_index(index: Path, tensors: Mapping[str, TensorEntry]) -> None:
    for name, shard in _weight_map(index).items():
        if name not in tensors or tensors[name].file.name != shard:
            _fail(index, f"tensor '{name}' is not in '{shard}'", "Download the checkpoint again.")

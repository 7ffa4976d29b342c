"""Finished parts of what a step writes, each one safetensors file, and how they become one file.

A part appears by one rename, so what lies there after a crash is whole. Parts are joined by copying bytes:
no tensor is loaded, and a file larger than memory can be made.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import BadSafetensors
from pipeline.host.files import disk_errors, fsync
from pipeline.quantize.tensor_files import TensorFiles

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 24


class Pieces:
    """Parts in one directory, by name.

    Args:
        directory: made if it does not exist; what an earlier run left in it is found again.
        durable: a part is on the disk once it is written; without, it may be lost with the machine's power.
    """

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._durable = durable

    def path(self, name: str) -> Path:
        """Where a part lies, finished or not."""
        return self.directory / f"{name}.safetensors"

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str] | None = None) -> None:
        """Write a part; notes go into its header."""
        from safetensors.torch import save_file

        unfinished = self.directory / f"{name}.unfinished"
        with disk_errors(self.directory):
            # Guard: given {} and no tensor, safetensors 0.8 writes a header that is not JSON.
            metadata = dict(notes) if notes else None
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished, metadata=metadata)
            if self._durable:
                fsync(unfinished)
            unfinished.rename(self.path(name))
            if self._durable:
                fsync(self.directory)

    def notes(self, name: str) -> dict[str, str] | None:
        """Notes of a finished part; None when there is none that is whole."""
        path = self.path(name)
        if not path.is_file():
            return None
        try:
            TensorFiles(self.directory, path.name)  # checks that every tensor lies within the file
        except BadSafetensors:
            return None
        header, _length = _read_header(path)
        found: dict[str, str] = header.get("__metadata__", {})
        return found

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Read a part into memory."""
        from safetensors.torch import load

        tensors: dict[str, torch.Tensor] = load(self.path(name).read_bytes())
        return tensors


def join(parts: Sequence[Path], path: Path, *, notes: Mapping[str, str] | None = None) -> int:
    """Write one safetensors file with the tensors of all parts, in the parts' order.

    Returns:
        How many bytes of tensors it holds.
    """
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    spans: list[tuple[Path, int, int]] = []
    start = 0
    for part in parts:
        tensors, length = _read_header(part)
        tensors.pop("__metadata__", None)
        size = 0
        for name, entry in tensors.items():
            begin, end = entry["data_offsets"]
            header[name] = {**entry, "data_offsets": [start + begin, start + end]}
            size = max(size, end)
        spans.append((part, 8 + length, size))
        start += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with disk_errors(path.parent), path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for part, offset, size in spans:
            with part.open("rb") as source:
                source.seek(offset)
                _copy(source, stream, size)
    return start


def _copy(source: Any, target: Any, size: int) -> None:  # noqa: ANN401 - open binary files
    while size:
        block = source.read(min(size, _BLOCK))
        if not block:
            raise BadSafetensors(f"{source.name} is truncated.")
        target.write(block)
        size -= len(block)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return header, length


def write_shards(parts: Sequence[Path], directory: Path, *, limit: int) -> None:
    """Join parts into model.safetensors, or into shards of at most `limit` bytes (where a part fits) with an index."""
    groups: list[list[Path]] = [[]]
    size = 0
    for part in parts:
        n_bytes = part.stat().st_size
        if groups[-1] and size + n_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += n_bytes
    if len(groups) == 1:
        join(groups[0], directory / "model.safetensors", notes={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        total += join(group, directory / name, notes={"format": "pt"})
        weight_map |= dict.fromkeys(TensorFiles(directory, name), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, "utf-8")


def discard(directory: Path) -> None:
    """Remove a directory of parts."""
    shutil.rmtree(directory, ignore_errors=True)

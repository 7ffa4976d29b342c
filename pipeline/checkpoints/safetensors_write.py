"""Write safetensors files tensor by tensor, so that a checkpoint larger than memory can be made.

The layout (8-byte little-endian header length, JSON header padded with spaces to 8 bytes, tensor
data without holes) is that of the safetensors format description.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

_DTYPE: Final = "F32"
_ITEM_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A float32 tensor to be written: its name and row-major shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * _ITEM_BYTES


# Yields the little-endian float32 bytes of a tensor in pieces.
TensorData = Callable[[TensorSpec], Iterator[bytes]]


def shard(tensors: Sequence[TensorSpec], shard_bytes: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Distribute tensors over files in order, none split, each file within `shard_bytes` where it can be.

    Returns:
        file name -> tensors; one file is called model.safetensors, several model-00001-of-0000N.safetensors.
    """
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": tuple(groups[0])}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": tuple(group) for number, group in enumerate(groups, start=1)
    }


def write_shard(path: Path, tensors: Sequence[TensorSpec], data: TensorData) -> None:
    """Write one file whose tensors lie in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        offsets = [start, start + tensor.nbytes]
        header[tensor.name] = {"dtype": _DTYPE, "shape": list(tensor.shape), "data_offsets": offsets}
        start = offsets[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            written = sum(stream.write(piece) for piece in data(tensor))
            if written != tensor.nbytes:
                raise ValueError(f"tensor {tensor.name}: {written} bytes given, {tensor.nbytes} declared")

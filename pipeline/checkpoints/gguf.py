"""Import a GGUF file: an exact float32 Hugging Face checkpoint, written tensor by tensor.

Weights are dequantized by the formulas of ggml (through the `gguf` package, which implements them
in numpy); nothing is rounded to a narrower type. The same file gives byte-identical output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoints.architecture import Architecture, describe
from pipeline.checkpoints.gguf_file import TENSOR_TYPES, GGUFFile, GGUFTensor, read_gguf
from pipeline.checkpoints.gguf_layout import ROPE_FACTORS, MappedTensor, original_row_order, read_layout
from pipeline.checkpoints.gguf_tokenizer import TokenizerFiles, build_tokenizer
from pipeline.checkpoints.safetensors_index import TensorEntry
from pipeline.checkpoints.safetensors_write import TensorData, TensorSpec, shard, write_shard
from pipeline.core.progress import Progress
from pipeline.errors import BadGGUF
from pipeline.host.files import disk_errors, require_free_space

SHARD_BYTES: Final = 5 * 1000**3
# Rows are dequantized in pieces of at most this many float32 bytes, so that memory stays flat.
_PIECE_BYTES: Final = 32 * 1024**2


def import_gguf(file: Path, out: Path, progress: Progress, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the checkpoint that a GGUF file holds as a Hugging Face directory.

    Args:
        file: GGUF file of architecture llama, qwen2 or qwen3.
        out: directory to fill with config.json, generation_config.json, tokenizer files and float32
            safetensors; created when absent.
        progress: told the choices made, and tracked in bytes.
        shard_bytes: most bytes of tensor data per safetensors file.

    Raises:
        BadGGUF: truncated, corrupt or unsupported file.
        Unreadable: the file cannot be opened.
        DiskFull: `out` has no room for the float32 weights.
    """
    parsed = read_gguf(file)
    with file.open("rb") as stream:
        layout = read_layout(parsed, _rope_factors(parsed, stream))
        tokens = build_tokenizer(parsed, layout.vocab_size, layout.context_length)
        ids = {"bos_token_id": tokens.bos, "eos_token_id": list(tokens.eos), "pad_token_id": tokens.pad}
        ids = {key: value for key, value in ids.items() if value not in (None, [])}
        progress.note(f"GGUF {layout.config['model_type']}: stop ids {list(tokens.eos)} from the file's metadata.")
        mapped = {tensor.name: tensor for tensor in layout.tensors}
        specs = [TensorSpec(name=tensor.name, shape=tensor.shape) for tensor in layout.tensors]
        total = sum(spec.nbytes for spec in specs)
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            require_free_space(out, total)
            _write_json(out / "config.json", {**layout.config, **ids, "eos_token_id": _one_or_all(tokens.eos)})
            _write_json(out / "generation_config.json", ids)
            _write_tokenizer(tokens, out)
            with progress.track("import GGUF", total, "B") as advance:

                def data(spec: TensorSpec) -> Iterator[bytes]:
                    for piece in _dequantized(parsed, stream, mapped[spec.name]):
                        yield piece.astype("<f4", copy=False).tobytes()
                        advance(piece.nbytes)

                _write_weights(out, shard(specs, shard_bytes), data)


def import_tokenizer(file: Path, out: Path) -> None:
    """Write the tokenizer files alone of what `import_gguf` writes.

    Raises:
        BadGGUF, Unreadable: as `import_gguf`.
    """
    parsed = read_gguf(file)
    with file.open("rb") as stream:
        layout = read_layout(parsed, _rope_factors(parsed, stream))
    _write_tokenizer(build_tokenizer(parsed, layout.vocab_size, layout.context_length), out)


def _write_tokenizer(tokens: TokenizerFiles, out: Path) -> None:
    _write_json(out / "tokenizer.json", tokens.tokenizer)
    _write_json(out / "tokenizer_config.json", tokens.tokenizer_config)


def read_gguf_architecture(file: Path) -> Architecture:
    """Read from the header what an import would give; the token ids are left to the import.

    Raises:
        BadGGUF: truncated, corrupt or unsupported file.
    """
    parsed = read_gguf(file)
    with file.open("rb") as stream:
        layout = read_layout(parsed, _rope_factors(parsed, stream))
    tensors = {
        tensor.name: TensorEntry(name=tensor.name, file=file, dtype="F32", shape=tensor.shape, start=0, end=0)
        for tensor in layout.tensors
    }
    return describe(file, layout.config, {}, tensors)


def _one_or_all(ids: tuple[int, ...]) -> int | list[int] | None:
    """Return what config.json holds: a number for one stop id, a list for several."""
    return ids[0] if len(ids) == 1 else list(ids) or None


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", newline="")


def _rope_factors(file: GGUFFile, stream: BinaryIO) -> NDArray[np.float32] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    plain = MappedTensor(name=tensor.name, shape=tensor.shape, source=tensor, heads=0)
    factors: NDArray[np.float32] = np.concatenate(list(_dequantized(file, stream, plain)), axis=None)
    return factors


def _write_weights(out: Path, shards: Mapping[str, tuple[TensorSpec, ...]], data: TensorData) -> None:
    for name, members in shards.items():
        write_shard(out / name, members, data)
    if len(shards) > 1:
        total = sum(spec.nbytes for members in shards.values() for spec in members)
        weight_map = {spec.name: name for name, members in shards.items() for spec in members}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(out / "model.safetensors.index.json", index)


def _dequantized(file: GGUFFile, stream: BinaryIO, mapped: MappedTensor) -> Iterator[NDArray[np.float32]]:
    """Yield float32 [rows, columns] pieces of a tensor; rows that were interleaved come in their first order.

    Quantization blocks run along a row, so rows can be put in order while they are still packed. A
    vector is a column of one-element rows.
    """
    tensor = mapped.source
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    row_bytes = _row_bytes(file, tensor, columns)
    rows = tensor.nbytes // row_bytes
    step = rows if mapped.heads else max(1, _PIECE_BYTES // (4 * columns))
    for first in range(0, rows, step):
        packed = _read_rows(file, stream, tensor, row_bytes, range(first, min(first + step, rows)))
        if mapped.heads:
            packed = packed[original_row_order(rows, mapped.heads)]
        piece = _unpack(packed, tensor.type_id)
        if not np.isfinite(piece).all():
            raise BadGGUF(f"{file.path}: tensor '{tensor.name}' holds values that are not finite.")
        yield piece


def _row_bytes(file: GGUFFile, tensor: GGUFTensor, columns: int) -> int:
    _, block, block_bytes = TENSOR_TYPES[tensor.type_id]
    if columns % block:
        raise BadGGUF(
            f"{file.path}: tensor '{tensor.name}' is a vector of type {tensor.type_name}, expected F32, F16 or BF16."
        )
    return columns // block * block_bytes


def _read_rows(file: GGUFFile, stream: BinaryIO, tensor: GGUFTensor, row_bytes: int, rows: range) -> NDArray[np.uint8]:
    stream.seek(tensor.offset + rows.start * row_bytes)
    raw = stream.read(len(rows) * row_bytes)
    if len(raw) != len(rows) * row_bytes:
        raise BadGGUF(f"{file.path}: tensor '{tensor.name}' ends early; the file shrank while it was read.")
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(rows), row_bytes)


def _unpack(packed: NDArray[np.uint8], type_id: int) -> NDArray[np.float32]:
    """Dequantize packed rows: uint8 [rows, bytes] -> float32 [rows, columns]."""
    from gguf import GGMLQuantizationType, quants  # the import costs time that only an import should pay

    with np.errstate(invalid="ignore", over="ignore"):  # the caller refuses values that are not finite
        unpacked: NDArray[np.float32] = quants.dequantize(packed, GGMLQuantizationType(type_id))
    return unpacked

"""Layers and checkpoints in the layouts of other tools, packed bit by bit from the formulas.

Written without the readers under test: every code goes through Python integers, one at a time.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which output lies in each nibble, lowest first
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A matrix rounded by plain formulas: W[r, c] = (codes[r, c] - zeros[r, g]) * scales[r, g], g = group_of[c].

    codes and zeros are unsigned; scales are float16.
    """

    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float16]
    group_of: NDArray[np.int64]
    bits: int

    def weight(self) -> NDArray[np.float32]:
        """W, one weight at a time."""
        out = np.empty(self.codes.shape, np.float32)
        for r, c in np.ndindex(*out.shape):
            group = self.group_of[c]
            level = np.float32(self.codes[r, c] - self.zeros[r, group])
            out[r, c] = level * np.float32(self.scales[r, group])
        return out


def round_matrix(
    weight: NDArray[Any], *, bits: int, group_size: int, symmetric: bool, group_of: NDArray[np.int64] | None = None
) -> Rounded:
    """Round each group of a matrix [out, in] to `bits` bits: absolute maximum, or minimum and maximum."""
    rows, columns = weight.shape
    groups = columns // group_size
    where = np.arange(columns) // group_size if group_of is None else group_of
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    scales, zeros = np.empty((rows, groups), np.float16), np.full((rows, groups), middle, np.int64)
    for r, g in np.ndindex(rows, groups):
        values = weight[r, where == g].astype(np.float64)
        if symmetric:
            scales[r, g] = np.abs(values).max() / (middle - 1)
        else:
            low, high = min(values.min(), 0.0), max(values.max(), 0.0)
            scales[r, g] = (high - low) / top
            zeros[r, g] = min(max(round(-low / float(scales[r, g])), 0), top)
    levels = np.rint(weight / scales.astype(np.float64)[:, where]) + zeros[:, where]
    codes = np.clip(levels, 0, top).astype(np.int64)
    return Rounded(codes=codes, zeros=zeros, scales=scales, group_of=where, bits=bits)


def _word(codes: list[int], bits: int) -> int:
    """One signed 32-bit word, the first code in the lowest bits."""
    value = sum(code << (bits * place) for place, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def pack_along_last(codes: NDArray[np.int64], bits: int, places: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Pack [rows, columns] along the columns; `places` names the code in each place of a word."""
    per_word = 32 // bits
    order = places or tuple(range(per_word))
    words = np.zeros((len(codes), codes.shape[1] // per_word), np.int32)
    for r, w in np.ndindex(*words.shape):
        words[r, w] = _word([int(codes[r, w * per_word + k]) for k in order], bits)
    return words


def awq(module: str, rounded: Rounded) -> Tensors:
    """AutoAWQ, gemm."""
    return {
        f"{module}.qweight": pack_along_last(rounded.codes.T, 4, AWQ_NIBBLES),
        f"{module}.qzeros": pack_along_last(rounded.zeros.T, 4, AWQ_NIBBLES),
        f"{module}.scales": np.ascontiguousarray(rounded.scales.T),
    }


def gptq(module: str, rounded: Rounded, *, version: int = 1) -> Tensors:
    """GPTQ: v1 stores zero points less one, modulo the range."""
    zeros = (rounded.zeros - (1 if version == 1 else 0)) % 2**rounded.bits
    return {
        f"{module}.qweight": np.ascontiguousarray(pack_along_last(rounded.codes, rounded.bits).T),
        f"{module}.qzeros": pack_along_last(zeros.T, rounded.bits),
        f"{module}.scales": np.ascontiguousarray(rounded.scales.T),
        f"{module}.g_idx": rounded.group_of.astype(np.int32),
    }


def packed(module: str, rounded: Rounded, *, symmetric: bool = True) -> Tensors:
    """compressed-tensors pack-quantized."""
    tensors: Tensors = {
        f"{module}.weight_packed": pack_along_last(rounded.codes, rounded.bits),
        f"{module}.weight_scale": rounded.scales,
        f"{module}.weight_shape": np.array(rounded.codes.shape, np.int64),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = np.ascontiguousarray(pack_along_last(rounded.zeros.T, rounded.bits).T)
    return tensors


def config_groups(bits: int, *, strategy: str, group_size: int | None, **weights: Any) -> dict[str, Any]:
    """The one group of a compressed-tensors config."""
    arguments = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size}
    return {"group_0": {"targets": ["Linear"], "weights": arguments | weights, "input_activations": None}}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}


_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8"}


def write_layers(
    directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], *, float8: tuple[str, ...] = ()
) -> Path:
    """Write a checkpoint directory of a config and these tensors alone; those in `float8` hold E4M3 bit patterns."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"quantization_config": dict(settings)}))
    _write_tensors(directory / "model.safetensors", tensors, float8)
    return directory


def _write_tensors(file: Path, tensors: Mapping[str, NDArray[Any]], float8: tuple[str, ...]) -> None:
    """Write a safetensors file by hand; numpy has no float8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        dtype = "F8_E4M3" if name in float8 else _DTYPES[value.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def quantize_checkpoint(
    source: Path,
    out: Path,
    settings: Mapping[str, Any],
    store: Callable[[str, NDArray[np.float32]], Tensors],
) -> Path:
    """Copy a float32 checkpoint; every linear layer but lm_head as `store` writes it, the rest as float16.

    A uint8 `weight` holds E4M3 bit patterns.
    """
    from safetensors.numpy import load_file

    shutil.copytree(source, out)
    tensors: Tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= store(name.removesuffix(".weight"), value)
        else:
            tensors[name] = value.astype(np.float16)
    float8 = tuple(name for name, value in tensors.items() if name.endswith(".weight") and value.dtype == np.uint8)
    _write_tensors(out / "model.safetensors", tensors, float8)
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "float16", "quantization_config": dict(settings)}
    (out / "config.json").write_text(json.dumps(config))
    return out

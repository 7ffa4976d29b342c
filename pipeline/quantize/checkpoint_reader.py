"""What every reader of a checkpoint offers, and what the readers share."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import IntegrityError, Unreadable
from pipeline.quantize.reference import LinearFormat, QuantizedLinear
from pipeline.quantize.tensor_files import FloatArray, TensorFiles, TensorInfo

# quant_algo in the export's own config -> how a layer computes; absent means 16 bit.
FORMAT_OF_ALGORITHM: Mapping[str | None, LinearFormat] = {
    None: "float",
    "FP8": "fp8",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "W8A16": "int8_wo",
    "W4A16": "int4_wo",
}
CODES = frozenset({"F8_E4M3", "I8", "U8"})  # dtypes that hold codes, never numbers


class SourceReader(Protocol):
    """What a checkpoint was made from: a 16-bit one, or one quantized elsewhere, read as what it stands for.

    Attributes:
        config: config.json.
        tensors: every tensor by its name in the model; of a weight quantized elsewhere, the shape alone counts.
    """

    config: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        ...

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter as float32."""
        ...

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer; it is of format float."""
        ...


class CheckpointReader(Protocol):
    """A checkpoint as named linear layers and plain parameters; names are the source model's.

    Attributes:
        directory: where its config.json is.
        format: how its quantized layers compute.
        group_size: inputs per scale, None where there are no groups.
        excluded: the exclude list as stored.
        kv_cache_algorithm: upstream's name of the KV cache format, None for 16 bit.
    """

    directory: Path
    format: LinearFormat
    group_size: int | None
    excluded: tuple[str, ...]
    kv_cache_algorithm: str | None

    @property
    def name(self) -> str:
        """The config's word for the format."""
        ...

    @property
    def dtype(self) -> str:
        """The 16-bit type of what is not quantized: "bfloat16" or "float16"."""
        ...

    def quantized_modules(self) -> tuple[str, ...]:
        """Names of the layers whose weight is stored as codes, in model order."""
        ...

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer, quantized or not."""
        ...

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter that is not quantized, as float32."""
        ...

    def has_tensor(self, name: str) -> bool:
        """Whether the parameter `name` of the source model is stored here."""
        ...

    def rounded(self, name: str, values: FloatArray) -> FloatArray:
        """What a faithful 16-bit copy of the source's parameter `name` reads as in this layout."""
        ...


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from `file`.

    Raises:
        Unreadable: it cannot be read.
        IntegrityError: it is not a JSON object.
    """
    try:
        value = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise IntegrityError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{file} does not hold a JSON object.")
    return value


def sixteen_bit_dtype(tensors: TensorFiles) -> str:
    """The type of a checkpoint's unquantized tensors: "bfloat16" or "float16", whichever most of them have.

    Raises:
        IntegrityError: no tensor has either.
    """
    counts = Counter(info.dtype for info in tensors.values() if info.dtype in {"BF16", "F16"})
    if not counts:
        raise IntegrityError("the quantized checkpoint holds no bfloat16 or float16 tensor.")
    return "bfloat16" if counts["BF16"] >= counts["F16"] else "float16"


def model_order(names: set[str]) -> tuple[str, ...]:
    """Sort names with numbers in them by number: layers.2 before layers.10."""
    return tuple(
        sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    )


def format_of(quantization: Mapping[str, Any], file: Path) -> LinearFormat:
    """The format that a `quantization` section names.

    Raises:
        IntegrityError: its quant_algo is not one this project defines.
    """
    algorithm = quantization.get("quant_algo")
    if algorithm not in FORMAT_OF_ALGORITHM:
        known = ", ".join(str(name) for name in FORMAT_OF_ALGORITHM if name)
        raise IntegrityError(f"{file}: quant_algo {algorithm!r} is not one this reader knows ({known}).")
    return FORMAT_OF_ALGORITHM[algorithm]


def format_name(format_: LinearFormat, dtype: str) -> str:
    """The config's word for a format whose unquantized tensors are of `dtype`."""
    if format_ != "float":
        return format_
    return "bf16" if dtype == "bfloat16" else "fp16"

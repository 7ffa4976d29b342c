"""What every reader of a checkpoint offers, and what the readers share."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pipeline.config.formats import SIXTEEN_BIT, covers
from pipeline.errors import IntegrityError, Unreadable
from pipeline.quantize.reference import LinearFormat, QuantizedLinear
from pipeline.quantize.tensor_files import FloatArray, TensorFiles, TensorInfo

# quant_algo in the export's own config -> how a layer computes; absent means 16 bit.
FORMAT_OF_ALGORITHM: Mapping[str | None, LinearFormat] = {
    None: "float",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_rowwise",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "W8A16": "int8_wo",
    "W4A16": "int4_wo",
}
MIXED = "MIXED_PRECISION"  # upstream's quant_algo of a checkpoint whose layers have several
CheckpointFormat = LinearFormat | Literal["mixed"]
CODES = frozenset({"F8_E4M3", "I8", "U8"})  # dtypes that hold codes, never numbers


class SourceReader(Protocol):
    """What a checkpoint was made from: a 16-bit one, or one quantized elsewhere, read as what it stands for.

    Attributes:
        directory: where its config.json is.
        config: config.json.
        tensors: every tensor by its name in the model; of a weight quantized elsewhere, the shape alone counts.
    """

    directory: Path
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
        format: how its quantized layers compute; "mixed" where they do so in several ways.
        group_size: inputs per scale, None where there are no groups, or several sizes.
        excluded: the exclude list as stored.
        kv_cache_algorithm: upstream's name of the KV cache format, None for 16 bit.
    """

    directory: Path
    format: CheckpointFormat
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

    def format_of(self, module: str) -> LinearFormat:
        """How a layer computes according to the checkpoint's own config."""
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
    if algorithm == "W4A16_AWQ" and quantization.get("pre_quant_scale") is False:
        return "int4_wo"  # ModelOpt calls all int4 in groups AWQ; nothing was weighed by activations here
    if algorithm not in FORMAT_OF_ALGORITHM:
        known = ", ".join(str(name) for name in FORMAT_OF_ALGORITHM if name)
        raise IntegrityError(f"{file}: quant_algo {algorithm!r} is not one this reader knows ({known}).")
    return FORMAT_OF_ALGORITHM[algorithm]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a checkpoint's own config says about its layers.

    Attributes:
        format: of every quantized layer, or "mixed".
        group_size: inputs per scale where one format is for all.
        excluded: globs of layers at 16 bit, where one format is for all.
        layers: layer -> (format, group size), where formats are mixed; the others are at 16 bit.
    """

    format: CheckpointFormat
    group_size: int | None = None
    excluded: tuple[str, ...] = ()
    layers: Mapping[str, tuple[LinearFormat, int | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, quantization: Mapping[str, Any], listed: Mapping[str, Any], file: Path) -> Declared:
        """Read a `quantization` section.

        Args:
            quantization: the section that names the algorithm of all.
            listed: layer -> its own section, where the algorithm is MIXED_PRECISION.
            file: for messages.

        Raises:
            IntegrityError: a quant_algo is not one this project defines, or nothing is listed.
        """
        if quantization.get("quant_algo") != MIXED:
            return cls(
                format=format_of(quantization, file),
                group_size=quantization.get("group_size"),
                excluded=tuple(sorted(quantization.get("exclude_modules") or ())),
            )
        if not listed:
            raise IntegrityError(f"{file}: quant_algo is {MIXED}, and quantized_layers lists no layer.")
        layers = {name: (format_of(section, file), section.get("group_size")) for name, section in listed.items()}
        sizes = {size for _, size in layers.values() if size is not None}
        return cls(format="mixed", group_size=sizes.pop() if len(sizes) == 1 else None, layers=layers)

    def format_of(self, name: str) -> LinearFormat:
        """How the layer `name` computes."""
        if self.format == "mixed":
            return self.layers.get(name, ("float", None))[0]
        return "float" if covers(self.excluded, name) else self.format

    def group_size_of(self, name: str) -> int | None:
        """Inputs per scale of the layer `name`, None without groups."""
        return self.layers.get(name, ("float", None))[1] if self.format == "mixed" else self.group_size


def format_name(format_: CheckpointFormat, dtype: str) -> str:
    """The config's word for a format whose unquantized tensors are of `dtype`."""
    return SIXTEEN_BIT.get(dtype, dtype) if format_ == "float" else format_

"""Opens a checkpoint that another tool quantized, as the 16-bit checkpoint that its numbers stand for.

The layer names and shapes are those of the model; where a layer lies quantized, its weight is decoded when it
is asked for. Nothing is kept in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError
from pipeline.quantize.checkpoint_reader import model_order, read_json
from pipeline.quantize.foreign.awq import AwqLayout
from pipeline.quantize.foreign.compressed_tensors import CompressedTensorsLayout
from pipeline.quantize.foreign.fp8 import Fp8Layout
from pipeline.quantize.foreign.gptq import GptqLayout
from pipeline.quantize.foreign.layout import Layout, Settings, refused
from pipeline.quantize.foreign.linear import ForeignLinear
from pipeline.quantize.foreign.modelopt_unified import ModelOptLayout
from pipeline.quantize.reference import QuantizedLinear
from pipeline.quantize.tensor_files import FloatArray, TensorFiles, TensorInfo, cast

_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt")
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_quantized(directory: Path) -> bool:
    """Whether config.json says that the weights are quantized already."""
    return "quantization_config" in read_json(directory / "config.json")


def read_foreign(directory: Path) -> ForeignReader:
    """Open a checkpoint that another tool quantized.

    Raises:
        ConfigError: a method or variant that is not read, by name.
        IntegrityError: config.json does not say how the checkpoint is quantized, or no layer is.
        BadSafetensors, Unreadable: a file is damaged.
    """
    return ForeignReader(directory, *open_layout(directory))


def open_layout(directory: Path) -> tuple[dict[str, Any], Layout]:
    """Read config.json and what it says about the layout; raises as `read_foreign` does."""
    config = read_json(directory / "config.json")
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        raise IntegrityError(f"{directory}/config.json has no quantization_config.")
    return config, _layout(settings)


def _layout(settings: Settings) -> Layout:
    match settings.get("quant_method"):
        case "awq":
            return AwqLayout(settings)
        case "gptq":
            return GptqLayout(settings)
        case "compressed-tensors":
            return CompressedTensorsLayout(settings)
        case "fp8":
            return Fp8Layout(settings)
        case "modelopt":
            return ModelOptLayout(settings)
        case method:
            raise refused(
                f"quant_method '{method}' is not read",
                f"These are: {', '.join(_METHODS)}. Otherwise name the 16-bit checkpoint it was made from.",
            )


class ForeignReader:
    """A checkpoint quantized elsewhere.

    Attributes:
        directory: where its config.json is.
        config: config.json without quantization_config.
        method: the layout's name, for people.
        tensors: the tensors of the 16-bit checkpoint that it stands for, by name; of a quantized weight only dtype
            ("CODES") and shape mean anything.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], layout: Layout) -> None:
        self.directory = directory
        self.config = {key: value for key, value in config.items() if key != "quantization_config"}
        self.method = layout.name
        self._layout = layout
        self._stored = TensorFiles(directory)
        marker = f".{layout.marker}"
        names = {name.removesuffix(marker) for name in self._stored if name.endswith(marker)}
        if not names:
            raise IntegrityError(f"{directory}: config.json says {layout.name}, and no tensor '*{marker}' exists.")
        self._modules = model_order(names)
        self.tensors: Mapping[str, TensorInfo] = self._logical()

    def _logical(self) -> dict[str, TensorInfo]:
        parts = {f"{module}.{suffix}" for module in self._modules for suffix in self._layout.suffixes}
        logical = {name: info for name, info in self._stored.items() if name not in parts}
        for module in self._modules:
            marker = self._stored[f"{module}.{self._layout.marker}"]
            shape = self._layout.shape(self._stored, module)
            logical[f"{module}.weight"] = TensorInfo(dtype="CODES", shape=shape, file=marker.file, offset=marker.offset)
        return logical

    @property
    def dtype(self) -> str:
        """The type that most unquantized tensors have: "float16", "bfloat16" or "float32"."""
        counts = Counter(_PLAIN[info.dtype] for info in self.tensors.values() if info.dtype in _PLAIN)
        return max(sorted(counts), key=lambda name: counts[name], default="float32")

    @property
    def layout(self) -> str:
        """The layout with what a runtime chooses its kernel by, as legality.toml's [[passed_on]] names it."""
        return self._layout.kind(self.foreign_linear(self._modules[0]))

    def quantized_modules(self) -> tuple[str, ...]:
        """Names of the quantized layers, in model order."""
        return self._modules

    def foreign_linear(self, module: str) -> ForeignLinear:
        """Read one quantized layer: codes, scales, zero points and groups.

        Raises:
            ConfigError: bits or element that are not read.
            IntegrityError: a tensor is missing, or shapes do not belong together.
        """
        try:
            return self._layout.decode(self._stored, module)
        except KeyError as error:
            raise IntegrityError(f"{self.directory}: tensor {error} of layer {module} is missing.") from error

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer as the 16-bit layer it stands for: float32 weights, decoded where quantized."""
        bias = f"{module}.bias"
        return QuantizedLinear(
            format="float",
            codes=self.tensor(f"{module}.weight"),
            bias=self.tensor(bias) if bias in self.tensors else None,
        )

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter as float32, decoded where it is a quantized weight."""
        stored = self._stored_name(name)
        if stored not in self.tensors:
            raise IntegrityError(f"{self.directory} lacks tensor {name}.")
        if self.tensors[stored].dtype == "CODES":
            return self.foreign_linear(stored.removesuffix(".weight")).weight()
        return self._stored.floats(stored)

    def has_tensor(self, name: str) -> bool:
        """Whether `name` is stored here, quantized, plain or as the tied embedding."""
        return self._stored_name(name) in self.tensors

    def rounded(self, name: str, values: FloatArray) -> FloatArray:
        """Round to the 16-bit type of the checkpoint."""
        del name
        return values if self.dtype == "float32" else cast(values, self.dtype)

    def _stored_name(self, name: str) -> str:
        tied = name not in self.tensors and self.config.get("tie_word_embeddings") is not False
        return "model.embed_tokens.weight" if name == "lm_head.weight" and tied else name

"""Opens both checkpoint layouts that quantization exports as one thing: layers by their Hugging Face name.

    hf/      unified Hugging Face checkpoint: config.json, hf_quant_config.json, *.safetensors
    trtllm/  TensorRT-LLM checkpoint: config.json, rank<r>.safetensors, see trtllm_reader

Tensor names and suffixes of both layouts are those that NVIDIA ModelOpt 0.47 writes. Nothing is kept in
memory: every call reads what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.errors import IntegrityError
from pipeline.quantize.checkpoint_reader import (
    CODES,
    CheckpointFormat,
    CheckpointReader,
    Declared,
    format_name,
    model_order,
    read_json,
    sixteen_bit_dtype,
)
from pipeline.quantize.reference import FP8, INT8, PACKED, LinearFormat, QuantizedLinear
from pipeline.quantize.tensor_files import FloatArray, FloatRows, TensorFiles, cast
from pipeline.quantize.trtllm_reader import TensorRTLLMReader


def read_quantized(directory: Path) -> CheckpointReader:
    """Open a quantized checkpoint: an artifact directory, or its hf/ or trtllm/ part.

    Raises:
        IntegrityError: neither layout, or a quantization algorithm that this project does not define.
        BadSafetensors, Unreadable: a file is damaged.
    """
    if (directory / "hf").is_dir():
        return HuggingFaceReader(directory / "hf")
    if (directory / "trtllm").is_dir():
        return TensorRTLLMReader(directory / "trtllm")
    if (directory / "rank0.safetensors").exists():
        return TensorRTLLMReader(directory)
    return HuggingFaceReader(directory)


class HuggingFaceReader:
    """The unified Hugging Face layout; also reads a plain checkpoint, such as the source itself.

    Args:
        directory: config.json and *.safetensors.
        rounding: applied to every parameter, by name, as it is read.
    """

    def __init__(self, directory: Path, rounding: Callable[[str, FloatArray], FloatArray] | None = None) -> None:
        self.directory = directory
        self._rounding = rounding
        self.config = read_json(directory / "config.json")
        self.tensors = TensorFiles(directory)
        file = directory / "hf_quant_config.json"
        quantization = read_json(file).get("quantization", {}) if file.exists() else {}
        self.declared = Declared.of(quantization, quantization.get("quantized_layers") or {}, file)
        self.format: CheckpointFormat = self.declared.format
        self.group_size: int | None = self.declared.group_size
        self.excluded = self.declared.excluded
        self.kv_cache_algorithm: str | None = quantization.get("kv_cache_quant_algo")

    @property
    def dtype(self) -> str:
        """The 16-bit type of what is not quantized."""
        return sixteen_bit_dtype(self.tensors)

    @property
    def name(self) -> str:
        """The config's word for the format."""
        return format_name(self.format, self.dtype)

    def quantized_modules(self) -> tuple[str, ...]:
        """Names of the layers whose weight is stored as codes, in model order."""
        return model_order(
            {
                name.removesuffix(".weight")
                for name, info in self.tensors.items()
                if name.endswith(".weight") and info.dtype in CODES
            }
        )

    def format_of(self, module: str) -> LinearFormat:
        """How a layer computes according to hf_quant_config.json."""
        return self.declared.format_of(module)

    def has_tensor(self, name: str) -> bool:
        """Whether `name` is stored here, under its own name or as the tied embedding."""
        return self._stored_name(name) in self.tensors

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter that is not quantized, as float32."""
        stored = self._stored_name(name)
        if stored not in self.tensors:
            raise IntegrityError(f"{self.directory} lacks tensor {name}.")
        values = self.tensors.floats(stored)
        return values if self._rounding is None else self._rounding(name, values)

    def tensor_rows(self, name: str) -> FloatRows:
        """Map a parameter as it is stored, without `rounding`, to be read a few rows at a time."""
        return self.tensors.float_rows(self._stored_name(name))

    def rounded(self, name: str, values: FloatArray) -> FloatArray:
        """Round to the 16-bit type; this layout stores every parameter as it is."""
        del name
        return cast(values, self.dtype)

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer, quantized or not."""
        weight, bias = f"{module}.weight", f"{module}.bias"
        stored_bias = self.tensor(bias) if bias in self.tensors else None
        if not self.has_tensor(weight):
            raise IntegrityError(f"{self.directory} lacks tensor {weight}.")
        kind = self._kind(module, self.tensors[self._stored_name(weight)].dtype)
        zero_point, order = f"{module}.weight_zero_point", f"{module}.weight_input_order"
        if kind == "float":
            return QuantizedLinear(format=kind, codes=self.tensor(weight), bias=stored_bias)
        return QuantizedLinear(
            format=kind,
            codes=self.tensors.raw(weight),
            scale=self.tensor(f"{module}.weight_scale"),
            second_scale=self._scalar(f"{module}.weight_scale_2"),
            input_scale=self._scalar(f"{module}.input_scale"),
            pre_quant_scale=self._optional(f"{module}.pre_quant_scale"),
            zero_point=self.tensors.raw(zero_point) if zero_point in self.tensors else None,
            input_order=self.tensors.raw(order) if order in self.tensors else None,
            bias=stored_bias,
        )

    def _kind(self, module: str, dtype: str) -> LinearFormat:
        """How a weight of a storage type computes; several formats share one, and the declared one decides."""
        declared = self.format_of(module) if self.format == "mixed" else self.format
        packed: LinearFormat = declared if declared in PACKED else "int4_awq"
        whole: LinearFormat = declared if declared in INT8 else "int8_sq"
        float8: LinearFormat = declared if declared in FP8 else "fp8"
        kinds: dict[str, LinearFormat] = {"F8_E4M3": float8, "I8": whole, "U8": packed}
        return kinds.get(dtype, "float")

    def _optional(self, name: str) -> FloatArray | None:
        return self.tensors.floats(name) if name in self.tensors else None

    def _scalar(self, name: str) -> float | None:
        value = self._optional(name)
        return None if value is None else float(value.reshape(()))

    def _stored_name(self, name: str) -> str:
        # Some families leave out the default of their class, so an absent flag with an absent head means tied.
        tied = name not in self.tensors and self.config.get("tie_word_embeddings") is not False
        return "model.embed_tokens.weight" if name == "lm_head.weight" and tied else name

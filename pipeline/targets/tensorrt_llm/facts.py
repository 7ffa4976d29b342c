"""What decisions about an engine depend on: the quantization of the checkpoint, the model, the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pipeline.config.formats import DTYPE_OF, formats_of
from pipeline.config.schema import Format, KVCacheFormat, QuantizationConfig

# Names of the config -> upstream's (NVIDIA/TensorRT-LLM examples/quantization/quantize.py@c8c6df0).
QUANT_ALGO: Final[Mapping[Format, str | None]] = {
    "bf16": None,
    "fp16": None,
    "fp8": "FP8",
    "fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
}
MIXED: Final = "MIXED_PRECISION"  # layers of several formats; quant_cfg.json says which has which
KV_ALGO: Final[Mapping[KVCacheFormat, str | None]] = {"auto": None, "fp8": "FP8", "int8": "INT8"}


@dataclass(frozen=True, kw_only=True)
class QuantFacts:
    """The quantization of a TensorRT-LLM checkpoint, in upstream's words (`quantization` of its config.json).

    quant_algo, kv_cache_quant_algo: None for 16 bit.
    dtype: of what is not quantized, "bfloat16" or "float16".
    """

    quant_algo: str | None
    kv_cache_quant_algo: str | None
    dtype: str

    @classmethod
    def of_config(cls, quantization: QuantizationConfig, layers: Iterable[str], dtype: str) -> QuantFacts:
        """Return what a checkpoint of these linear layers will say."""
        formats = formats_of(quantization, layers)
        if len(formats) == 1:
            return cls.of_format(formats[0], quantization.kv_cache, dtype)
        return cls(quant_algo=MIXED, kv_cache_quant_algo=KV_ALGO[quantization.kv_cache], dtype=dtype)

    @classmethod
    def of_format(cls, quantization_format: Format, kv_cache: KVCacheFormat, dtype: str) -> QuantFacts:
        """Return what a checkpoint of these config words will say."""
        own = DTYPE_OF.get(quantization_format, dtype)
        return cls(quant_algo=QUANT_ALGO[quantization_format], kv_cache_quant_algo=KV_ALGO[kv_cache], dtype=own)

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> QuantFacts:
        """Return what the config.json of a TensorRT-LLM checkpoint says."""
        quantization = config.get("quantization") or {}
        return cls(
            quant_algo=quantization.get("quant_algo"),
            kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
            dtype=str(config["dtype"]),
        )


class ModelFacts(Protocol):
    """What the decisions want to know about a model; checkpoints/architecture.py provides it."""

    @property
    def architecture(self) -> str: ...  # noqa: D102 (the names are those of config.json)
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102

"""What a config asks of the checkpoint that is made."""

from __future__ import annotations

from typing import Literal

from pipeline.config.formats import DTYPE_OF, SIXTEEN_BIT, DType
from pipeline.config.schema import BuildConfig, QuantizationConfig
from pipeline.core.artifacts import FormatChoice
from pipeline.core.stage import StepContext
from pipeline.examine import Build
from pipeline.quantize.formats import WantedCheckpoint


def export_layout(config: BuildConfig) -> Literal["hf", "trtllm"]:
    """Layout of the checkpoint that the target reads."""
    return "trtllm" if config.engine.target == "tensorrt_llm" else "hf"


def unquantized_dtype(config: BuildConfig) -> DType:
    """16-bit type of what is not quantized; an unquantized format names it itself."""
    return DTYPE_OF.get(config.quantization.format, config.engine.dtype)


def wanted(config: BuildConfig) -> WantedCheckpoint:
    """The checkpoint that the target reads."""
    return WantedCheckpoint(
        export=export_layout(config),
        tensor_parallel_size=config.engine.tensor_parallel_size,
        pipeline_parallel_size=config.engine.pipeline_parallel_size,
        dtype=unquantized_dtype(config),
    )


def decided(ctx: StepContext, config: BuildConfig) -> QuantizationConfig:
    """The quantization that the config asks for, with the formats that were chosen where it leaves them open."""
    from pipeline.quantize import choice

    if config.quantization.format != "auto":
        return config.quantization
    formats = choice.read_formats(ctx.input("choice", FormatChoice).path)
    return choice.decided(config.quantization, formats, SIXTEEN_BIT[config.engine.dtype])


def is_repacked(build: Build) -> bool:
    """Whether the target reads the format in another layout than the one that is quantized and verified."""
    from pipeline.quantize.repack import REPACKED

    config = build.config
    return config.engine.target == "vllm" and build.made is None and config.quantization.format in REPACKED

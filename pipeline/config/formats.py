"""What is known of formats without ModelOpt, and which of them each layer takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from pipeline.config.schema import BuildConfig, Format, QuantizationConfig

UNQUANTIZED: tuple[Format, ...] = ("bf16", "fp16")
DType = Literal["bfloat16", "float16"]
DTYPE_OF: Mapping[str, DType] = {"bf16": "bfloat16", "fp16": "float16"}
SIXTEEN_BIT: Mapping[str, Literal["bf16", "fp16"]] = {"bfloat16": "bf16", "float16": "fp16"}
# AWQ folds scales into the norm that the router reads too, and SmoothQuant weighs inputs that an expert may never see.
FORMATS_OF_EXPERTS: tuple[Format, ...] = ("fp8", "int8_wo")
# Bits of one weight's code, as ModelOpt counts them: scales are not part of it.
CODE_BITS: Mapping[Format, int] = {
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "fp8_rowwise": 8,
    "int8_sq": 8,
    "int4_awq": 4,
    "w4a8_awq": 4,
    "int8_wo": 8,
    "int4_wo": 4,
}
# TensorRT-LLM's loader rounds these itself and wants scales that ModelOpt does not write.
ROUNDED_BY_BUILD: tuple[Format, ...] = ("int8_wo", "int4_wo")
# Formats whose codes are integers.
INTEGER: tuple[Format, ...] = ("int8_sq", "int8_wo", "int4_awq", "int4_wo")
# Formats that search scales by the activations.
AWQ: tuple[Format, ...] = ("int4_awq", "w4a8_awq")


def covers(globs: Iterable[str], name: str) -> bool:
    """Whether a glob names a module or one that contains it: 'model.layers.0' covers its q_proj."""
    parts = name.split(".")
    ancestors = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatchcase(ancestor, glob) for glob in globs for ancestor in ancestors)


def is_router(name: str) -> bool:
    """Whether a linear layer chooses experts: tiny, and a changed choice is a changed model; none is ever quantized."""
    return name.endswith((".mlp.gate", ".block_sparse_moe.gate", ".shared_expert_gate"))


def layer_format(quantization: QuantizationConfig, name: str) -> Format | None:
    """The format of a linear layer, None for 16 bit: excludes first, then the last override, then the format.

    With format auto, that is auto for the layers that the search decides.
    """
    if covers(quantization.exclude, name) or is_router(name):
        return None
    matching = [override.format for override in quantization.overrides if covers((override.layers,), name)]
    chosen = matching[-1] if matching else quantization.format
    return None if chosen in UNQUANTIZED else chosen


def formats_of(quantization: QuantizationConfig, layers: Iterable[str] = ()) -> tuple[Format, ...]:
    """Every format that layers may take, the main one first; a 16-bit one only where it is the only one.

    With format auto, its candidates are in its place. With `layers`, only what those do take.
    """
    main = quantization.auto.candidates if quantization.format == "auto" else (quantization.format,)
    named: dict[Format, None] = dict.fromkeys((*main, *(override.format for override in quantization.overrides)))
    found = tuple(form for form in named if form not in UNQUANTIZED) or (quantization.format,)
    taken = {layer_format(quantization, name) for name in layers} - {None}
    if not taken or "auto" in taken:
        return found
    return tuple(form for form in found if form in taken)


def format_label(quantization: QuantizationConfig) -> str:
    """What a person calls the formats of a build: 'int4_awq', or 'int4_awq, int8_wo in *.down_proj'."""
    return ", ".join((quantization.format, *map(str, quantization.overrides)))


def is_grouped(form: Format, target: str) -> bool:
    """Whether weights share scales in groups of group_size; trtllm-build takes one scale per output for int4_wo."""
    return form in AWQ or (form == "int4_wo" and target in ("openvino", "vllm"))


def has_groups(config: BuildConfig) -> bool:
    """Whether any layer's weights share scales in groups of group_size."""
    return any(is_grouped(form, config.engine.target) for form in formats_of(config.quantization))

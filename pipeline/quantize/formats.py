"""What each quantization format means to ModelOpt, and which layers of a model it can take.

Pure data and arithmetic: layers come in as name -> (out, in), configs go out as plain dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import ConfigError, Problem

Shapes = Mapping[str, tuple[int, int]]

# Layers that tensor parallelism cuts along the input axis in the Llama family.
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, kw_only=True)
class FormatTraits:
    """What distinguishes one format from the others while it is made.

    `quantized`: the checkpoint holds codes. `rounded_by_build`: it holds 16-bit weights, and trtllm-build rounds them
    when it loads them.
    """

    quantized: bool
    rounded_by_build: bool = False
    grouped: bool = False
    smoothed: bool = False
    static_activations: bool = False


_TRAITS: Mapping[Format, FormatTraits] = {
    "bf16": FormatTraits(quantized=False),
    "fp16": FormatTraits(quantized=False),
    "fp8": FormatTraits(quantized=True, static_activations=True),
    "int8_sq": FormatTraits(quantized=True, smoothed=True, static_activations=True),
    "int4_awq": FormatTraits(quantized=True, smoothed=True, grouped=True),
    "w4a8_awq": FormatTraits(quantized=True, smoothed=True, grouped=True, static_activations=True),
    "int8_wo": FormatTraits(quantized=True),
    "int4_wo": FormatTraits(quantized=True, grouped=True),
}
# TensorRT-LLM's loader rounds these itself and wants scales that ModelOpt does not write.
_ROUNDED_BY_BUILD: frozenset[Format] = frozenset({"int8_wo", "int4_wo"})


def traits(name: Format, *, export: str) -> FormatTraits:
    """Look a format up as it is in the checkpoint layout `export`, "hf" or "trtllm"."""
    if export == "trtllm" and name in _ROUNDED_BY_BUILD:
        return FormatTraits(quantized=False, rounded_by_build=True)
    return _TRAITS[name]


_E4M3_PER_TENSOR: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_INT8_PER_TENSOR: dict[str, Any] = {"num_bits": 8, "axis": None}
_INT8_PER_CHANNEL: dict[str, Any] = {"num_bits": 8, "axis": 0}


def clips_weights(quantization: QuantizationConfig) -> bool:
    """Whether ranges are narrower than the weights, so that the largest ones are cut to the last code."""
    return quantization.format == "int4_awq" and quantization.awq != "lite"


def needs_text(quantization: QuantizationConfig, *, export: str) -> bool:
    """Whether text is fed at all: to observers, or once, for the rows that `probes` records of quantized layers."""
    return traits(quantization.format, export=export).quantized or needs_calibration(quantization, export=export)


def needs_calibration(quantization: QuantizationConfig, *, export: str) -> bool:
    """Whether any quantizer has to see text; plain rounding of weights (int8_wo, int4_wo) does not."""
    made = traits(quantization.format, export=export)
    return made.smoothed or made.static_activations or stores_kv_scales(quantization, export=export)


def stores_kv_scales(quantization: QuantizationConfig, *, export: str) -> bool:
    """Whether the checkpoint carries KV cache scales.

    An int8 KV cache has no place in the unified Hugging Face checkpoint (ModelOpt asserts "Invalid KV
    cache quantization format"); a runtime that keeps one computes its scales per token by itself.
    """
    return quantization.kv_cache == "fp8" or (quantization.kv_cache == "int8" and export == "trtllm")


def select_layers(linears: Shapes, modules: Iterable[str], quantization: QuantizationConfig) -> tuple[str, ...]:
    """Name the linear layers that will be quantized, here or by the engine build, in the model's order.

    A glob of `exclude` names a linear layer, or a module that contains some.

    Args:
        linears: every linear layer, name -> (out, in).
        modules: every module name, so that a glob that names nothing is an error.
        quantization: format and excludes.

    Raises:
        ConfigError: a glob matches no module, or nothing is left to quantize.
    """
    names = tuple(modules)
    problems = [
        Problem(
            where="quantization.exclude",
            message=f"'{glob}' matches no module of this model.",
            hint=f"Modules are named like '{next(iter(linears), 'lm_head')}'.",
        )
        for glob in quantization.exclude
        if not any(fnmatchcase(name, glob) for name in names)
    ]
    if problems:
        raise ConfigError("quantization.exclude names modules that do not exist", problems=problems)
    if not _TRAITS[quantization.format].quantized:
        return ()
    selected = tuple(name for name in linears if not _is_excluded(name, quantization.exclude))
    if not selected:
        raise ConfigError(
            f"quantization.exclude {list(quantization.exclude)} leaves no layer to quantize to '{quantization.format}'",
            hint="Exclude fewer modules, or set quantization.format to bf16.",
        )
    return selected


def _is_excluded(name: str, globs: Iterable[str]) -> bool:
    parts = name.split(".")
    ancestors = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatchcase(ancestor, glob) for glob in globs for ancestor in ancestors)


def check_group_size(layers: Shapes, group_size: int, tensor_parallel_size: int) -> None:
    """Refuse a group size that does not divide the input axis of every layer on every rank.

    ModelOpt packs two output rows into a byte, so an odd number of rows is refused as well.

    Raises:
        ConfigError: names every layer kind that does not fit and the largest group size that does.
    """
    per_rank = {
        name: columns // tensor_parallel_size if _is_row_parallel(name) else columns
        for name, (_rows, columns) in layers.items()
    }
    bad = [name for name, columns in per_rank.items() if columns % group_size]
    odd = [name for name, (rows, _columns) in layers.items() if rows % 2]
    if not bad and not odd:
        return
    fitting = [size for size in GROUP_SIZES if all(columns % size == 0 for columns in per_rank.values())]
    problems = [
        Problem(where=name, message=f"{per_rank[name]} inputs per rank are not a multiple of {group_size}.")
        for name in bad
    ]
    problems += [Problem(where=name, message=f"{layers[name][0]} outputs are odd; int4 packs pairs.") for name in odd]
    if bad and fitting:
        hint = f"Set quantization.group_size to {fitting[0]}, the largest that fits every layer."
    else:
        hint = "Exclude these layers (quantization.exclude), or pick fp8 or int8_sq."
    raise ConfigError(
        f"quantization.group_size: {group_size} does not fit {len(bad) + len(odd)} of {len(layers)} layers "
        f"(tensor_parallel_size {tensor_parallel_size})",
        problems=problems,
        hint=hint,
    )


def _is_row_parallel(name: str) -> bool:
    return name.rpartition(".")[2] in ROW_PARALLEL


def quantizer_config(quantization: QuantizationConfig, excluded: Iterable[str], *, export: str) -> dict[str, Any]:
    """Write ModelOpt's config: an ordered list in which the last match wins (ModelOpt 0.44 and later).

    Starts from "nothing is quantized", enables the format's quantizers on linear layers and closes with
    the excluded layers by name, so that no entry can undo an earlier one by accident.
    """
    made = traits(quantization.format, export=export)
    weights, activations, algorithm = _format_entries(quantization) if made.quantized else (None, None, "max")
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    if weights is not None:
        entries.append({"quantizer_name": "*weight_quantizer", "parent_class": "nn.Linear", "cfg": weights})
    if activations is not None:
        entries.append({"quantizer_name": "*input_quantizer", "parent_class": "nn.Linear", "cfg": activations})
    entries += [{"quantizer_name": f"{name}.*", "enable": False} for name in excluded]
    if stores_kv_scales(quantization, export=export):
        kv = _E4M3_PER_TENSOR if quantization.kv_cache == "fp8" else _INT8_PER_TENSOR
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": dict(kv)})
    return {"quant_cfg": entries, "algorithm": algorithm}


_Attributes = dict[str, Any]


def _format_entries(
    quantization: QuantizationConfig,
) -> tuple[_Attributes | list[_Attributes] | None, _Attributes | None, str | dict[str, Any]]:
    """Attributes of weight and of input quantizers, None for none, and the algorithm that sets their ranges."""
    grouped: _Attributes = {"num_bits": 4, "block_sizes": {-1: quantization.group_size, "type": "static"}}
    # int4 in groups, and what that gives once more to float8, which the kernel multiplies with.
    twice = [grouped, dict(_E4M3_PER_TENSOR)]
    weights: Mapping[Format, _Attributes | list[_Attributes]] = {
        "fp8": dict(_E4M3_PER_TENSOR),
        "int8_sq": dict(_INT8_PER_CHANNEL),
        "int8_wo": dict(_INT8_PER_CHANNEL),
        "int4_awq": grouped,
        "int4_wo": grouped,
        "w4a8_awq": twice,
    }
    activations: Mapping[Format, _Attributes] = {
        "fp8": dict(_E4M3_PER_TENSOR),
        "int8_sq": dict(_INT8_PER_TENSOR),
        "w4a8_awq": dict(_E4M3_PER_TENSOR),
    }
    awq: dict[str, Any] = {"method": f"awq_{quantization.awq}"}
    if quantization.awq != "clip":
        awq["alpha_step"] = 0.1
    algorithms: Mapping[Format, dict[str, Any]] = {
        "int8_sq": {"method": "smoothquant", "alpha": quantization.smoothquant_alpha},
        "int4_awq": awq,
        "w4a8_awq": awq,
    }
    name = quantization.format
    return weights.get(name), activations.get(name), algorithms.get(name, "max")

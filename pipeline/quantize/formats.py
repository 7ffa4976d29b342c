"""What each quantization format means to ModelOpt, and which layers of a model it can take.

Pure data and arithmetic: layers come in as name -> (out, in), configs go out as plain dicts.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pipeline.config.formats import AWQ, ROUNDED_BY_BUILD, DType, formats_of, layer_format
from pipeline.config.legality import table
from pipeline.config.schema import Format, QuantizationConfig
from pipeline.config.shapes import split_by_overrides
from pipeline.errors import ConfigError, Problem

Shapes = Mapping[str, tuple[int, int]]
Export = Literal["hf", "trtllm"]

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


@dataclass(frozen=True, kw_only=True)
class WantedCheckpoint:
    """The checkpoint that a target asks for.

    Attributes:
        export: "hf" writes hf/, "trtllm" writes trtllm/.
        tensor_parallel_size: ranks that share each layer (shards trtllm/; limits the group size).
        pipeline_parallel_size: groups of consecutive layers (shards trtllm/).
        dtype: of norms, embeddings and unquantized layers; the formats bf16 and fp16 have their own.
    """

    export: Export
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: DType = "bfloat16"


_TRAITS: Mapping[Format, FormatTraits] = {
    "bf16": FormatTraits(quantized=False),
    "fp16": FormatTraits(quantized=False),
    "fp8": FormatTraits(quantized=True, static_activations=True),
    "fp8_rowwise": FormatTraits(quantized=True),
    "int8_sq": FormatTraits(quantized=True, smoothed=True, static_activations=True),
    "int4_awq": FormatTraits(quantized=True, smoothed=True, grouped=True),
    "w4a8_awq": FormatTraits(quantized=True, smoothed=True, grouped=True, static_activations=True),
    "int8_wo": FormatTraits(quantized=True),
    "int4_wo": FormatTraits(quantized=True, grouped=True),
}


def traits(name: Format, *, export: str) -> FormatTraits:
    """Look a format up as it is in the checkpoint layout `export`, "hf" or "trtllm"."""
    if export == "trtllm" and name in ROUNDED_BY_BUILD:
        return FormatTraits(quantized=False, rounded_by_build=True)
    return _TRAITS[name]


_E4M3_PER_TENSOR: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_E4M3_PER_CHANNEL: dict[str, Any] = {"num_bits": (4, 3), "axis": 0}
# Ranges are taken from each row of the input as it comes, so nothing is calibrated.
_E4M3_PER_TOKEN: dict[str, Any] = {"num_bits": (4, 3), "type": "dynamic", "block_sizes": {-1: None}}
_INT8_PER_TENSOR: dict[str, Any] = {"num_bits": 8, "axis": None}
_INT8_PER_CHANNEL: dict[str, Any] = {"num_bits": 8, "axis": 0}


def needs_text(quantization: QuantizationConfig, *, export: str) -> bool:
    """Whether text is fed at all: to observers, or once, for the rows that `probes` records of quantized layers."""
    made = any(traits(form, export=export).quantized for form in formats_of(quantization))
    return made or stores_kv_scales(quantization, export=export)


def observes(form: Format) -> bool:
    """Whether layers of a format have to see text; plain rounding of weights (int8_wo, int4_wo) does not."""
    return searches(form) or _TRAITS[form].static_activations


def searches(form: Format) -> bool:
    """Whether ModelOpt has to look for pre-quant scales; the other ranges are the widest that was seen."""
    return _TRAITS[form].smoothed


def stores_kv_scales(quantization: QuantizationConfig, *, export: str) -> bool:
    """Whether the checkpoint carries KV cache scales.

    An int8 KV cache has no place in the unified Hugging Face checkpoint (ModelOpt asserts "Invalid KV
    cache quantization format"); a runtime that keeps one computes its scales per token by itself.
    """
    return quantization.kv_cache == "fp8" or (quantization.kv_cache == "int8" and export == "trtllm")


def layer_formats(linears: Shapes, modules: Iterable[str], quantization: QuantizationConfig) -> dict[str, Format]:
    """Name the linear layers that will be quantized, here or by the engine build, with their formats, in model order.

    A glob names a linear layer, or a module that contains some. The last override that names a layer decides, and
    an exclude decides before all of them.

    Args:
        linears: every linear layer, name -> (out, in).
        modules: every module name, so that a glob that names nothing is an error.
        quantization: format, overrides and excludes.

    Raises:
        ConfigError: a glob matches no module, overrides give layers that read one tensor several formats, or nothing
            is left to quantize.
    """
    _check_globs(linears, tuple(modules), quantization)
    _check_fused(linears, quantization)
    formats = {name: form for name in linears if (form := layer_format(quantization, name)) is not None}
    wanted = formats_of(quantization)
    if not formats and _TRAITS[wanted[0]].quantized:
        raise ConfigError(
            f"quantization.exclude {list(quantization.exclude)} leaves no layer to quantize to '{wanted[0]}'",
            hint="Exclude fewer modules, or set quantization.format to bf16.",
        )
    return formats


def _check_globs(linears: Shapes, modules: Sequence[str], quantization: QuantizationConfig) -> None:
    globs = {
        "quantization.exclude": quantization.exclude,
        "quantization.overrides": tuple(override.layers for override in quantization.overrides),
    }
    problems = [
        Problem(
            where=key,
            message=f"'{glob}' matches no module of this model.",
            hint=f"Modules are named like '{next(iter(linears), 'lm_head')}'.",
        )
        for key, patterns in globs.items()
        for glob in patterns
        if not any(fnmatchcase(name, glob) for name in modules)
    ]
    if problems:
        keys = " and ".join(dict.fromkeys(problem.where for problem in problems))
        raise ConfigError(f"{keys} names modules that do not exist", problems=problems)


def _check_fused(linears: Shapes, quantization: QuantizationConfig) -> None:
    fused = tuple(row.names for row in table().fused)
    problems = [
        Problem(
            where=parent,
            message=f"{', '.join(members)} read one tensor, and would be "
            f"{', '.join(form or '16 bit' for form in members.values())}.",
        )
        for parent, members in split_by_overrides(quantization, linears, fused).items()
    ]
    if problems:
        raise ConfigError(
            "quantization.overrides splits layers that must share one format",
            problems=problems,
            hint="Name all of them (q_proj, k_proj, v_proj; gate_proj, up_proj), or the module around them.",
        )


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


def search_config(quantization: QuantizationConfig, form: Format) -> dict[str, Any]:
    """Write ModelOpt's config for one candidate of a search, which applies it to one layer at a time."""
    weights, activations = _attributes(form, quantization)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    entries.append({"quantizer_name": "*weight_quantizer", "cfg": weights})
    if activations:
        entries.append({"quantizer_name": "*input_quantizer", "cfg": activations})
    return {"quant_cfg": entries, "algorithm": algorithm(form, quantization)}


Attributes = dict[str, Any]
Algorithm = str | dict[str, Any]


def quantizer_config(
    quantization: QuantizationConfig, formats: Mapping[str, Format], *, kv_scales: bool
) -> dict[str, Any]:
    """Write ModelOpt's config: an ordered list in which the last match wins (ModelOpt 0.44 and later).

    Starts from "nothing is quantized" and enables the quantizers of each layer by name, so that no entry can undo
    an earlier one by accident. How ranges are found is not said: see `algorithm`.

    Args:
        quantization: group size and KV cache.
        formats: layer -> format, of the layers that ModelOpt quantizes.
        kv_scales: whether keys and values are quantized too.
    """
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, form in formats.items():
        weights, activations = _attributes(form, quantization)
        if weights:
            entries.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": weights})
        if activations:
            entries.append({"quantizer_name": f"{name}.input_quantizer", "cfg": activations})
    if kv_scales:
        kv = _INT8_PER_TENSOR if quantization.kv_cache == "int8" else _E4M3_PER_TENSOR
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": dict(kv)})
    return {"quant_cfg": entries, "algorithm": None}


def by_glob(formats: Mapping[str, Format], linears: Iterable[str]) -> dict[str, Format]:
    """The same formats in fewer entries: one for all layers whose names differ in numbers alone, where it is exact.

    ModelOpt matches every entry against every module.

    Args:
        formats: layer -> format.
        linears: every linear layer of the model, so that no glob matches one that is not meant.
    """
    known = tuple(linears)
    alike: dict[tuple[str, Format], list[str]] = {}
    for name, form in formats.items():
        alike.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), form), []).append(name)
    found: dict[str, Format] = {}
    for (glob, form), names in alike.items():
        exact = set(fnmatch.filter(known, glob)) == set(names)
        found |= dict.fromkeys([glob] if exact else names, form)
    return found


def whole_model_config(
    quantization: QuantizationConfig, formats: Mapping[str, Format], linears: Iterable[str], *, kv_scales: bool
) -> dict[str, Any]:
    """`quantizer_config` of every layer, in few entries: the commonest format for all, then who differs by name.

    ModelOpt matches every entry against every module, so an entry a layer takes minutes on a large model.
    """
    main = Counter(formats.values()).most_common(1)[0][0] if formats else None
    different = {name: form for name, form in formats.items() if form != main}
    entries: list[dict[str, Any]] = []
    if main is not None:
        weights, activations = _attributes(main, quantization)
        entries.append({"quantizer_name": "*weight_quantizer", "parent_class": "nn.Linear", "cfg": weights})
        if activations:
            entries.append({"quantizer_name": "*input_quantizer", "parent_class": "nn.Linear", "cfg": activations})
        others = (name for name in linears if formats.get(name) != main)
        entries += [{"quantizer_name": f"{name}.*", "enable": False} for name in others]
    by_name = quantizer_config(quantization, different, kv_scales=kv_scales)
    denied, *named = by_name["quant_cfg"]
    return by_name | {"quant_cfg": [denied, *entries, *named]}


def _attributes(form: Format, quantization: QuantizationConfig) -> tuple[Attributes | list[Attributes], Attributes]:
    """Attributes of the weight and of the input quantizer of a layer; empty for none."""
    grouped: Attributes = {"num_bits": 4, "block_sizes": {-1: quantization.group_size, "type": "static"}}
    # int4 in groups, and what that gives once more to float8, which the kernel multiplies with.
    twice = [grouped, dict(_E4M3_PER_TENSOR)]
    weights: Mapping[Format, Attributes | list[Attributes]] = {
        "fp8": dict(_E4M3_PER_TENSOR),
        "fp8_rowwise": dict(_E4M3_PER_CHANNEL),
        "int8_sq": dict(_INT8_PER_CHANNEL),
        "int8_wo": dict(_INT8_PER_CHANNEL),
        "int4_awq": grouped,
        "int4_wo": grouped,
        "w4a8_awq": twice,
    }
    activations: Mapping[Format, Attributes] = {
        "fp8": dict(_E4M3_PER_TENSOR),
        "fp8_rowwise": dict(_E4M3_PER_TOKEN),
        "int8_sq": dict(_INT8_PER_TENSOR),
        "w4a8_awq": dict(_E4M3_PER_TENSOR),
    }
    return weights.get(form, {}), activations.get(form, {})


def algorithm(form: Format, quantization: QuantizationConfig) -> Algorithm:
    """ModelOpt's name and options for how the ranges of a format are found.

    Several cannot run as ModelOpt's own list: each one touches every enabled quantizer. smoothquant leaves the inputs
    of fp8 layers with one range per channel, and awq_lite scales the inputs of every layer. So each format is
    calibrated with the quantizers of all other layers disabled, and a layer gets what it would get alone.
    """
    if form == "int8_sq":
        return {"method": "smoothquant", "alpha": quantization.smoothquant_alpha}
    if form in AWQ:
        step = {} if quantization.awq == "clip" else {"alpha_step": 0.1}
        return {"method": f"awq_{quantization.awq}", **step}
    return "max"

"""From a checkpoint quantized elsewhere to our QuantizedCheckpoint, code for code: nothing is rounded again.

    int4 in groups of equal size, 32, 64 or 128              int4_wo, with zero points where asymmetric, and columns
                                                             sorted by group after act-order; ModelOpt's int4_awq
    symmetric int8, one scale per output                     int8_wo; with static activations int8_sq, p = 1
    FP8, one scale per weight, static activations            fp8
    FP8, one scale per output, activations scaled per token  fp8_rowwise

The files of TensorRT-LLM's ranks hold fewer (engine_layout). Anything else is refused by name. Codes and scales are
copied (16-bit scales widened to float32, which is exact), so the converted layer is the same function of its input.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.formats import DType
from pipeline.config.legality import readers_of
from pipeline.config.schema import Format, KVCacheFormat
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, Problem
from pipeline.quantize.export import copy_tokenizer, write_json
from pipeline.quantize.foreign.engine_layout import engine_obstacle, target_of, write_ranks
from pipeline.quantize.foreign.linear import ForeignLinear
from pipeline.quantize.foreign.reader import ForeignReader, read_foreign
from pipeline.quantize.formats import GROUP_SIZES, Export, WantedCheckpoint
from pipeline.quantize.reference import pack_int4
from pipeline.quantize.shards import write_shards
from pipeline.quantize.structure import linear_modules
from pipeline.quantize.tensor_files import TensorFiles

if TYPE_CHECKING:
    import torch


_ALGORITHM: Mapping[Format, str] = {
    "int4_awq": "W4A16_AWQ",
    "int4_wo": "W4A16_AWQ",  # ModelOpt's name of every int4 in groups; pre_quant_scale says which
    "int8_wo": "W8A16",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "fp8": "FP8",
    "fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
}
_NOT_ROUNDED = (
    "its activations are made to be rounded to int8 per token at run time; here they are not rounded to the "
    "checkpoint's int8, so answers are those of its weights alone (int8_wo)"
)
_NAME_16_BIT = "or name the 16-bit checkpoint it was made from, to quantize it here."


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a checkpoint made elsewhere is in this project's words.

    Attributes:
        method: the tool's layout, for people.
        format: as quantization.format names it.
        group_size: inputs per scale; None where there are no groups.
        dtype: of what is not quantized.
        layout: as legality.toml's [[passed_on]] names it.
        passed_on: the target's runtime reads the layout, so the files stay as they are.
        note: what of the checkpoint is not computed here, for people; empty when nothing is left out.
    """

    method: str
    format: Format
    group_size: int | None
    dtype: DType
    layout: str = ""
    passed_on: bool = False
    note: str = ""


def identify(directory: Path, *, export: Export = "hf") -> Made:
    """Say what a checkpoint is, from config.json, the headers and one layer; `convert` checks the others.

    Args:
        directory: the checkpoint made elsewhere.
        export: the layout that it is to be written in.

    Raises:
        ConfigError: a method, variant or layer that cannot be converted, by name.
        IntegrityError: a tensor is missing or does not fit.
    """
    reader = read_foreign(directory)
    module = reader.quantized_modules()[0]
    layer = reader.foreign_linear(module)
    found = obstacle(layer, export=export)
    if found:
        raise _cannot(reader, [Problem(where=module, message=found)])
    format_, group_size = format_of(layer, export)
    rounded_at_run_time = layer.element == "int8" and layer.dynamic_activations and layer.input_scale is None
    return Made(
        method=reader.method,
        format=format_,
        group_size=group_size,
        dtype="bfloat16" if reader.dtype == "bfloat16" else "float16",
        layout=reader.layout,
        note=_NOT_ROUNDED if rounded_at_run_time else "",
    )


def obstacle(layer: ForeignLinear, *, export: Export = "hf") -> str:
    """Why no format of a layout holds a layer exactly; empty where one does."""
    if export == "trtllm" and (found := engine_obstacle(layer)):
        return found
    return _without_format(layer)


def _without_format(layer: ForeignLinear) -> str:
    if not layer.symmetric and layer.element != "int4":
        return f"has zero points (asymmetric {layer.element}); only int4 weights have them here."
    if layer.element == "e4m3":
        whole, per_output = layer.scales.size == 1, layer.scales.shape == (layer.shape[0], 1)
        static = layer.input_scale is not None
        found = {
            "is FP8 with a scale per block; fp8 has one per weight, fp8_rowwise one per output.": not (
                whole or per_output
            ),
            "is FP8 with activations scaled at run time; fp8 has a static input scale.": whole and not static,
            "is FP8 per output with static activations; fp8_rowwise scales them per token.": not whole and static,
        }
    else:
        int4 = layer.element == "int4"
        found = {
            "has groups of unequal size (act-order).": layer.input_order() is None,
            "has int8 weights in groups out of order (act-order).": not int4 and not layer.ordered,
            f"has one scale per {layer.group_size} inputs; groups are 32, 64 or 128.": int4
            and layer.group_size not in GROUP_SIZES,
            "has an odd number of outputs; int4 packs pairs.": int4 and layer.shape[0] % 2 != 0,
            "has int4 weights with static activations.": int4 and layer.input_scale is not None,
            f"is int8 in groups of {layer.group_size}; int8 has one scale per output.": not int4
            and layer.scales.shape[1] != 1,
        }
    return next((words for words, holds in found.items() if holds), "")


def format_of(layer: ForeignLinear, export: Export) -> tuple[Format, int | None]:
    """The format that holds a layer without an obstacle exactly, and its group size.

    An engine's checkpoint has int4 in groups with a pre-quant scale alone, which may be one.
    """
    if layer.element == "e4m3":
        return ("fp8" if layer.scales.size == 1 else "fp8_rowwise"), None
    if layer.element == "int4":
        return ("int4_awq" if layer.smoothed or export == "trtllm" else "int4_wo"), layer.group_size
    return ("int8_wo" if layer.input_scale is None else "int8_sq"), None


def _cannot(reader: ForeignReader, problems: list[Problem]) -> ConfigError:
    hints = {
        "zero points": "Quantize it with symmetric weights (zero_point: false, sym: true), ",
        "act-order": "Quantize it without act-order (desc_act: false), ",
        "FP8": "Quantize it to FP8 per tensor with static activations, ",
    }
    hint = next((words for key, words in hints.items() if key in problems[0].message), "Quantize it otherwise, ")
    return ConfigError(
        f"{reader.directory.name} ({reader.method}) cannot be converted without rounding again: "
        f"{len(problems)} or more of {len(reader.quantized_modules())} quantized layers",
        problems=problems[:20],
        hint=hint + _NAME_16_BIT + _read_by(reader.layout),
    )


def _read_by(layout: str) -> str:
    targets = " or ".join(readers_of(layout))
    return f" engine.target: {targets} reads its files as they are." if targets else ""


def convert(
    source: SourceCheckpoint,
    made: Made,
    wanted: WantedCheckpoint,
    *,
    kv_cache: KVCacheFormat,
    out: Path,
    progress: Progress,
) -> None:
    """Write a QuantizedCheckpoint directory (core/artifacts.py) of a checkpoint made elsewhere to `out`.

    Args:
        source: the checkpoint made elsewhere.
        made: what it is, from `identify`.
        wanted: layout and ranks.
        kv_cache: auto, or int8 whose scales the runtime finds.
        out: an existing or new directory.
        progress: told of each layer.

    Raises:
        ConfigError: layers that cannot be converted without rounding again; each is named.
        IntegrityError: a tensor is missing or does not fit.
    """
    reader = read_foreign(source.path)
    progress.note(f"convert {reader.method} to {made.format}: codes and scales are copied, nothing is quantized again")
    quantized = reader.quantized_modules()
    excluded = [name for name in linear_modules(reader) if name not in set(quantized)]
    directory = out / wanted.export
    directory.mkdir(parents=True)
    with progress.track("convert layers", len(quantized), "layers") as advance:
        if wanted.export == "trtllm":
            target = target_of(reader, made.format, made.group_size, wanted)
            read = partial(_checked, reader, made, wanted.export)
            problems = write_ranks(reader, target, read, directory, advance)
        else:
            problems = write_shards(directory, _tensors(reader, made, advance))
    if problems:
        raise _cannot(reader, problems)
    if wanted.export == "hf":
        _write_configs(directory, reader, made, sorted({"lm_head", *excluded} - set(quantized)))
        copy_tokenizer(source.path, directory)
    _write_records(out, reader, made, wanted, kv_cache=kv_cache, excluded=excluded)


def _checked(reader: ForeignReader, made: Made, export: Export, module: str) -> ForeignLinear | Problem:
    """A quantized layer, or why it cannot be written like the first one."""
    layer = reader.foreign_linear(module)
    problem = obstacle(layer, export=export)
    if not problem and format_of(layer, export) != (made.format, made.group_size):
        found = format_of(layer, export)
        problem = f"is {found}, another layer is {(made.format, made.group_size)}; all must be alike."
    return Problem(where=module, message=problem) if problem else layer


def _tensors(reader: ForeignReader, made: Made, advance: Any) -> Iterator[tuple[str, torch.Tensor] | Problem]:  # noqa: ANN401 - a callback
    """Every tensor of the unified layout, in model order, and a problem for each layer that has none."""
    import torch

    dtype = getattr(torch, made.dtype)
    quantized = set(reader.quantized_modules())
    for name, info in reader.tensors.items():
        module = name.removesuffix(".weight")
        if module not in quantized or not name.endswith(".weight"):
            values = torch.from_numpy(np.array(reader.tensor(name)))
            yield name, values.to(dtype) if info.dtype in {"F32", "F16", "BF16"} else values
            continue
        layer = _checked(reader, made, "hf", module)
        if isinstance(layer, Problem):
            yield layer
        else:
            for suffix, tensor in _unified(layer, made.format, dtype).items():
                yield f"{module}.{suffix}", tensor
        advance(1)


def _unified(layer: ForeignLinear, format_: Format, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of one layer as ModelOpt's unified checkpoint names and packs them."""
    import torch

    scale = torch.from_numpy(np.ascontiguousarray(layer.scales))
    if format_ in ("fp8", "fp8_rowwise"):
        codes = torch.from_numpy(np.array(layer.codes)).view(torch.float8_e4m3fn)
        if format_ == "fp8_rowwise":
            return {"weight": codes, "weight_scale": scale.reshape(-1)}
        return {"weight": codes, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(layer.input_scale)}
    smoothing = {}
    if layer.pre_quant_scale is not None:
        smoothing["pre_quant_scale"] = torch.from_numpy(layer.pre_quant_scale).to(dtype)
    if layer.element == "int4":
        levels, order = layer.signed(), layer.input_order()
        if order is not None and not layer.ordered:
            levels = np.ascontiguousarray(levels[:, order])
            smoothing["weight_input_order"] = torch.from_numpy(order)
        packed = {"weight": torch.from_numpy(pack_int4(levels)), "weight_scale": scale} | smoothing
        if layer.zero_points is not None and not layer.symmetric:
            packed["weight_zero_point"] = torch.from_numpy((layer.zero_points - 8).astype(np.int8))
        return packed
    rows, columns = layer.shape
    per_row = scale.expand(rows, 1).reshape(rows).clone()
    tensors = {"weight": torch.from_numpy(layer.signed()), "weight_scale": per_row}
    if format_ == "int8_sq":
        tensors["input_scale"] = torch.tensor(layer.input_scale)
        tensors |= smoothing or {"pre_quant_scale": torch.ones(columns, dtype=dtype)}
    return tensors


def _write_configs(hf: Path, reader: ForeignReader, made: Made, excluded: list[str]) -> None:
    algorithm = _ALGORITHM[made.format]
    has_zero_point = any(name.endswith(".weight_zero_point") for name in TensorFiles(hf))
    producer = {"name": f"converted from {reader.method}", "version": version("trtpipe")}
    quantization: dict[str, Any] = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "exclude_modules": excluded,
    }
    if made.group_size is not None:
        quantization |= {"group_size": made.group_size, "has_zero_point": has_zero_point}
        quantization["pre_quant_scale"] = made.format == "int4_awq"
    write_json(hf / "hf_quant_config.json", {"producer": producer, "quantization": quantization})
    config = {key: value for key, value in reader.config.items() if key not in {"_name_or_path", "torch_dtype"}}
    described = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded, "producer": producer}
    write_json(hf / "config.json", config | {"dtype": made.dtype, "quantization_config": described})


def _write_records(
    out: Path,
    reader: ForeignReader,
    made: Made,
    wanted: WantedCheckpoint,
    *,
    kv_cache: KVCacheFormat,
    excluded: list[str],
) -> None:
    from safetensors.torch import save_file

    settings = json.loads((reader.directory / "config.json").read_text("utf-8"))["quantization_config"]
    elsewhere = {"method": reader.method, "quantization_config": settings}
    write_json(
        out / "quantization.json",
        {
            "format": made.format,
            "group_size": made.group_size,
            "smoothquant_alpha": None,
            "kv_cache": kv_cache,
            "kv_cache_scales": False,
            "export": wanted.export,
            "dtype": made.dtype,
            "tensor_parallel_size": wanted.tensor_parallel_size,
            "pipeline_parallel_size": wanted.pipeline_parallel_size,
            "exclude": excluded,
            "quantized_layers": list(reader.quantized_modules()),
            "excluded_layers": excluded,
            "folded": {},
            "norm_offset": 0.0,
            "made_elsewhere": elsewhere,
            "versions": {"trtpipe": version("trtpipe")},
        },
    )
    write_json(out / "calibration.json", {"source": None, "sequences": 0, "made_elsewhere": elsewhere})
    save_file({}, out / "probes.safetensors")

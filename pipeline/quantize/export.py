"""What lies in hf/ beside the weights: config.json, hf_quant_config.json and the tokenizer files; canonical JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import Format
from pipeline.quantize import modelopt
from pipeline.quantize.formats import traits

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Stay float32: a rounded scale would move every weight or activation it belongs to.
SCALE_SUFFIXES = (".weight_scale", ".input_scale", ".weight_scale_2", ".k_scale", ".v_scale")


def rounded(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Round to the checkpoint's 16-bit type what is not a code or a scale."""
    import torch

    floats = (torch.float32, torch.bfloat16, torch.float16)
    return {
        name: tensor.to(dtype) if tensor.dtype in floats and not name.endswith(SCALE_SUFFIXES) else tensor
        for name, tensor in tensors.items()
    }


def describe_hf(
    skeleton: Any,  # noqa: ANN401 - a transformers model
    quantizers: Mapping[str, Any] | None,
    source: Path,
    directory: Path,
    *,
    dtype: torch.dtype,
    formats: Mapping[str, Format],
) -> None:
    """Write everything of hf/ but the weights.

    Args:
        skeleton: the whole model without weights.
        quantizers: ModelOpt's config of all its quantizers; None when there are none.
        source: the Hugging Face directory.
        directory: hf/.
        dtype: of what is not quantized.
        formats: of the layers that are quantized.
    """
    described = modelopt.describe_hf(skeleton, quantizers, directory)
    if described is not None:
        write_json(directory / "hf_quant_config.json", described)
        _rewrite_quantization(directory / "hf_quant_config.json", formats=formats)
    _rewrite_config(directory / "config.json", dtype=dtype)
    copy_tokenizer(source, directory)


def _rewrite_quantization(path: Path, *, formats: Mapping[str, Format]) -> None:
    """Sort the lists, and say whether layers have pre-quant scales: ModelOpt says so of every int4 in groups."""
    if not path.is_file():
        return
    content = json.loads(path.read_text("utf-8"))
    section = content["quantization"]
    if "pre_quant_scale" in section:
        section["pre_quant_scale"] = any(traits(form, export="hf").smoothed for form in formats.values())
    for name, layer in section.get("quantized_layers", {}).items():
        if "pre_quant_scale" in layer:
            layer["pre_quant_scale"] = traits(formats[name], export="hf").smoothed
    write_json(path, _sort_lists(content))


def _rewrite_config(path: Path, *, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text("utf-8"))
    config.pop("_name_or_path", None)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(path, _sort_lists(config))


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the source's tokenizer files and generation config, replacing what an exporter wrote."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _sort_lists(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the lists that ModelOpt makes from sets: exclude_modules, ignore and targets."""
    unordered = {"exclude_modules", "ignore", "targets"}

    def clean(key: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if isinstance(value, dict):
            return {inner: clean(inner, item) for inner, item in value.items()}
        if isinstance(value, list) and key in unordered:
            return sorted(value)
        return value

    return {key: clean(key, value) for key, value in config.items()}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write canonical JSON: sorted keys, two-space indent, one final newline."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")

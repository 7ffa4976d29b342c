"""Checkpoints whose layers have several formats, put together from real ones of one format each.

A layer's numbers depend on its own format alone (and on what its norm carries), so the layers of two checkpoints of
one source can stand beside each other; this needs no code of the stage that makes mixed ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.config.schema import Format, QuantizationConfig
from pipeline.quantize.trtllm_config import layer_config
from pipeline.quantize.trtllm_reader import TensorRTLLMReader

# Readers of each norm in the unified layout, where the norm may carry their scale.
_NORMS = {"input_layernorm": "self_attn.q_proj", "post_attention_layernorm": "mlp.gate_proj"}


def splice(main: Path, others: Mapping[str, Path]) -> None:
    """Give layers of the quantized checkpoint `main` the numbers that another one has; changes `main`.

    Args:
        main: an artifact directory with hf/ or trtllm/.
        others: glob of layers -> artifact of the same source and layout that they are taken from.
    """
    record = _read(main / "quantization.json")
    formats: dict[str, Format] = dict.fromkeys(record["quantized_layers"], record["format"])
    taken: dict[str, Path] = {}
    for glob, other in others.items():
        for name in formats:
            if fnmatchcase(name, glob):
                formats[name], taken[name] = _read(other / "quantization.json")["format"], other
    quantization = QuantizationConfig(format=record["format"], group_size=record["group_size"] or 64)
    if (main / "hf").is_dir():
        _splice_tensors(main, "hf/model.safetensors", _owners(taken))
        _declare_unified(main / "hf", formats, quantization)
    else:
        reader = TensorRTLLMReader(main / "trtllm")
        places = {name: reader.layout.place(name) for name in formats}
        stored = {place.stored: formats[name] for name, place in places.items() if place is not None}
        for stage in range(reader.layout.pp):
            owners = {
                place.stored: taken[name]
                for name, place in places.items()
                if place is not None and name in taken and place.stage == stage
            }
            for rank in reader.layout.ranks(stage):
                _splice_tensors(main, f"trtllm/rank{rank}.safetensors", owners)
        content = layer_config(quantization, stored)
        _write(main / "trtllm" / "quant_cfg.json", content)
        config = _read(main / "trtllm" / "config.json")
        config["quantization"] = {key: content[key] for key in ("quant_algo", "kv_cache_quant_algo")}
        _write(main / "trtllm" / "config.json", config)
    _splice_tensors(main, "probes.safetensors", taken)
    _write(main / "quantization.json", record | {"format": "mixed", "formats": formats})


def _owners(taken: Mapping[str, Path]) -> dict[str, Path]:
    """Modules of the unified layout whose tensors are another checkpoint's: layers, and norms of such layers."""
    norms = {}
    for name, other in taken.items():
        for norm, reader in _NORMS.items():
            if name.endswith(f".{reader}"):
                norms[f"{name.removesuffix(reader)}{norm}"] = other
    return {**taken, **norms}


def _splice_tensors(main: Path, file: str, owners: Mapping[str, Path]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(main / file)
    tensors = {key: value for key, value in tensors.items() if key.rpartition(".")[0] not in owners}
    for other in set(owners.values()):
        for key, value in load_file(other / file).items():
            if owners.get(key.rpartition(".")[0]) == other:
                tensors[key] = value
    save_file(tensors, main / file, metadata={"format": "pt"})


def _declare_unified(directory: Path, formats: Mapping[str, Format], quantization: QuantizationConfig) -> None:
    layers = layer_config(quantization, formats)["quantized_layers"]
    for name, form in formats.items():
        if form == "int4_wo":
            grouped = {"group_size": quantization.group_size, "has_zero_point": False, "pre_quant_scale": False}
            layers[name] = {"quant_algo": "W4A16_AWQ", **grouped}
    document = _read(directory / "hf_quant_config.json")
    section = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    _write(directory / "hf_quant_config.json", document | {"quantization": section})


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True), "utf-8")

"""From a calibrated live model to checkpoint files: settle, write, round to 16 bit, canonicalize.

`settle` first makes the live model equal to what will be written, so that probes recorded from it hold
for the files:

- layers that read the same tensor (q, k, v; gate, up) get one shared pre-quant scale p, their mean, which
  is ModelOpt's own rule for fused layers;
- p is rounded to the checkpoint's 16-bit dtype *before* the weights are divided by it, so the rounding
  costs nothing;
- in the Hugging Face export of AWQ, p of layers that read a norm is folded into the norm's weight. The
  folded weight is rounded to 16 bit first and p is taken back from it, so this is exact as well;
- in the TensorRT-LLM export, and in w4a8_awq always, layers that read the same tensor share scalar ranges
  (ModelOpt merges them);
- where weights are clipped, each group keeps the share of its range that was found best, although its
  weights were rescaled by the shared p (ModelOpt's exporter would forget it);
- weights are moved onto the quantization grid, by the exporter's own rounding (modelopt.snap_weights).

ModelOpt's exporters then find nothing left to change. Weights are packed from float32, and only
afterwards is everything that is not a scale or a code cast to 16 bit in the files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import QuantizationConfig
from pipeline.errors import ConfigError, Problem
from pipeline.quantize import modelopt
from pipeline.quantize.formats import clips_weights, traits

if TYPE_CHECKING:
    import torch
    from torch import nn

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
# Norms that multiply by (1 + weight).
UNIT_OFFSET_NORMS = frozenset({"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"})


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Where each pre-quant scale went.

    `folded_into`: layer -> norm; `folded`: layer -> p float32 [in] that the norm now carries.
    """

    folded_into: dict[str, str] = field(default_factory=dict)
    folded: dict[str, torch.Tensor] = field(default_factory=dict)
    norm_offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SharedInput:
    """Layers that read one tensor, and the norm that wrote it, if a norm did."""

    quantized: tuple[str, ...]
    others: tuple[str, ...]
    norm: str | None


def find_shared_inputs(model: nn.Module) -> list[SharedInput]:
    """Run two tokens through the model and group its linear layers by the tensor they read."""
    import torch
    from torch import nn as torch_nn

    readers: dict[int, list[str]] = {}
    writers: dict[int, str] = {}
    alive: list[torch.Tensor] = []  # an id is only unique while its tensor lives

    def on_linear(name: str, tensor: torch.Tensor) -> None:
        alive.append(tensor)
        readers.setdefault(id(tensor), []).append(name)

    def on_norm(name: str, tensor: torch.Tensor) -> None:
        alive.append(tensor)
        writers[id(tensor)] = name

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch_nn.Linear):
            hook = lambda _module, args, name=name: on_linear(name, args[0])  # noqa: E731 - binds name
            handles.append(module.register_forward_pre_hook(hook))
        elif type(module).__name__.endswith("Norm"):
            handles.append(module.register_forward_hook(lambda _m, _a, out, name=name: on_norm(name, out)))
    try:
        with torch.no_grad():
            model(torch.ones((1, 2), dtype=torch.long, device=next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    enabled = modelopt.weight_quantizers(model)
    return [
        SharedInput(
            quantized=tuple(name for name in names if name in enabled),
            others=tuple(name for name in names if name not in enabled),
            norm=writers.get(tensor_id),
        )
        for tensor_id, names in readers.items()
    ]


def settle(
    model: nn.Module,
    quantization: QuantizationConfig,
    *,
    export: str,
    dtype: torch.dtype,
    forward_loop: modelopt.ForwardLoop | None,
) -> Settled:
    """Make the live model equal to what the exporter will write (see the module's docstring).

    Raises:
        ConfigError: an AWQ format, and an excluded layer reads the same norm as quantized ones, which
            would then see the folded scale as well.
    """
    made = traits(quantization.format, export=export)
    groups = [group for group in find_shared_inputs(model) if group.quantized]
    settled = Settled(norm_offset=_norm_offset(model, groups))
    if made.smoothed:
        clipping = modelopt.take_clipping(model) if clips_weights(quantization) else {}
        fold = made.grouped and export == "hf"
        if fold:
            _refuse_mixed(groups)
        for group in groups:
            _share_pre_quant_scale(model, group, settled, fold=fold, dtype=dtype)
        modelopt.recalibrate(model, forward_loop if made.static_activations else None)
        modelopt.apply_clipping(model, clipping)
    if export == "trtllm" or (made.grouped and made.static_activations):
        for group in groups:
            _share_scalar_ranges(model, group)
    modelopt.snap_weights(model)
    return settled


def _norm_offset(model: nn.Module, groups: list[SharedInput]) -> float:
    norms = {type(model.get_submodule(group.norm)).__name__ for group in groups if group.norm}
    return 1.0 if norms & UNIT_OFFSET_NORMS else 0.0


def _refuse_mixed(groups: list[SharedInput]) -> None:
    problems = [
        Problem(
            where=", ".join(group.others),
            message=f"reads the same norm as {', '.join(group.quantized)}, into which the AWQ scale is folded.",
        )
        for group in groups
        if group.others and len(group.quantized) > 1
    ]
    if problems:
        raise ConfigError(
            "quantization.exclude splits layers that share their input, which AWQ cannot do",
            problems=problems,
            hint="Exclude all layers that share the input (q, k, v; or gate, up), or none of them.",
        )


def _share_pre_quant_scale(
    model: nn.Module, group: SharedInput, settled: Settled, *, fold: bool, dtype: torch.dtype
) -> None:
    import torch

    scales = [modelopt.pre_quant_scale(model.get_submodule(name)) for name in group.quantized]
    present = [scale.float() for scale in scales if scale is not None]
    if len(present) != len(group.quantized):
        return  # ModelOpt did not smooth these layers
    shared = torch.stack(present).mean(dim=0)
    into = group.norm if fold and len(group.quantized) > 1 else None
    if into is None:
        shared = shared.to(dtype).float()
    else:
        norm: Any = model.get_submodule(into)
        gain = norm.weight.float() + settled.norm_offset
        rounded = (gain * shared - settled.norm_offset).to(dtype).float()
        shared = torch.where(gain == 0, torch.ones_like(gain), (rounded + settled.norm_offset) / gain)
        with torch.no_grad():
            norm.weight.data = rounded
    for name in group.quantized:
        modelopt.set_pre_quant_scale(model.get_submodule(name), shared, folded=into is not None)
        if into is not None:
            settled.folded_into[name] = into
            settled.folded[name] = shared.cpu()


def _share_scalar_ranges(model: nn.Module, group: SharedInput) -> None:
    import torch

    for find in (modelopt.weight_quantizers, modelopt.input_quantizers):
        enabled = find(model)
        quantizers = [modelopt.stages(enabled[name])[-1] for name in group.quantized if name in enabled]
        if len(quantizers) > 1 and all(
            quantizer.amax is not None and quantizer.amax.numel() == 1 for quantizer in quantizers
        ):
            widest = torch.stack([quantizer.amax for quantizer in quantizers]).max()
            for quantizer in quantizers:
                quantizer.amax = widest.reshape(quantizer.amax.shape)


def finish_hf(source: Path, directory: Path, *, dtype: torch.dtype, smoothed: bool) -> None:
    """Round what is not a code or scale to `dtype`, canonicalize the JSON, add the tokenizer files."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        for name, tensor in tensors.items():
            if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and not name.endswith(SCALE_SUFFIXES):
                tensors[name] = tensor.to(dtype)
        save_file(tensors, shard, metadata={"format": "pt"})
    _rewrite_index(directory)
    _rewrite_config(directory / "config.json", dtype=dtype)
    _rewrite_quantization(directory / "hf_quant_config.json", smoothed=smoothed)
    copy_tokenizer(source, directory)


def _rewrite_quantization(path: Path, *, smoothed: bool) -> None:
    """Sort the lists, and say whether there are pre-quant scales: ModelOpt says so of every int4 in groups."""
    if not path.is_file():
        return
    content = json.loads(path.read_text("utf-8"))
    if "pre_quant_scale" in content["quantization"]:
        content["quantization"]["pre_quant_scale"] = smoothed
    write_json(path, _sort_lists(content))


def _rewrite_index(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text("utf-8"))
        sizes = (shard.stat().st_size for shard in directory.glob("*.safetensors"))
        write_json(index, {"metadata": {"total_size": sum(sizes)}, "weight_map": content["weight_map"]})


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

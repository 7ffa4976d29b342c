"""Makes a live layer equal to what will be written of it, so that probes recorded from it hold for the files.

- layers that read the same tensor (q, k, v; gate, up) get one shared pre-quant scale p, their mean, which
  is ModelOpt's own rule for fused layers;
- p is rounded to the checkpoint's 16-bit dtype *before* the weights are divided by it, so the rounding
  costs nothing;
- in the Hugging Face export of AWQ, p of layers that read a norm is folded into the norm's weight. The
  folded weight is rounded to 16 bit first and p is taken back from it, so this is exact as well;
- a static input range is the largest |x| p: of each channel the largest |x| was kept, so it is exact for
  whatever p the layer ends with;
- in the TensorRT-LLM export, and in w4a8_awq always, layers that read the same tensor share scalar ranges
  (ModelOpt merges them), and so do the weights of an expert's fused layers;
- where weights are clipped, each group keeps the share of its range that was found best, although its
  weights were rescaled by the shared p (ModelOpt's exporter would forget it);
- weights are moved onto the quantization grid, by the exporter's own rounding (modelopt.snap_weights).

ModelOpt's exporters then find nothing left to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import Format
from pipeline.errors import ConfigError, Problem
from pipeline.quantize import modelopt
from pipeline.quantize.experts import fused_pairs
from pipeline.quantize.formats import traits

if TYPE_CHECKING:
    import torch
    from torch import nn

# Norms that multiply by (1 + weight).
UNIT_OFFSET_NORMS = frozenset({"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"})


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """What a calibration found for one layer; see core/artifacts.py Calibration for the tensors."""

    input_amax: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None
    clip: torch.Tensor | None = None


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
    """Linear layers that read one tensor, and the norm that wrote it, if a norm did."""

    layers: tuple[str, ...]
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
    return [SharedInput(layers=tuple(names), norm=writers.get(key)) for key, names in readers.items()]


def folds(form: Format, *, export: str) -> bool:
    """Whether pre-quant scales of a format are multiplied into norms: AWQ in the Hugging Face layout."""
    made = traits(form, export=export)
    return made.smoothed and made.grouped and export == "hf"


def settle(
    model: nn.Module,
    formats: Mapping[str, Format],
    states: Mapping[str, LayerState],
    groups: Sequence[SharedInput],
    *,
    export: str,
    dtype: torch.dtype,
) -> Settled:
    """Settle a model with quantizers (see the module's docstring); any number of decoder layers.

    Args:
        model: float32, its quantizers inserted, its weights' ranges not measured.
        formats: format of each of its quantized layers.
        states: what a calibration found for them.
        groups: from `find_shared_inputs`.
        export: "hf" or "trtllm".
        dtype: the checkpoint's 16-bit type.

    Raises:
        ConfigError: see `refuse_split`.
    """
    refuse_split(groups, formats, export=export)
    settled = Settled(norm_offset=_norm_offset(model, groups, formats))
    for name, state in states.items():
        if state.pre_quant_scale is not None:
            layer = model.get_submodule(name)
            modelopt.smooth(layer, state.pre_quant_scale.to(next(layer.parameters()).device))
    for group in groups:
        for form in sorted({formats[name] for name in group.layers if name in formats}):
            alike = tuple(name for name in group.layers if formats.get(name) == form)
            fold = folds(form, export=export) and len(alike) > 1
            _share_pre_quant_scale(model, alike, settled, norm=group.norm if fold else None, dtype=dtype)
    modelopt.measure_weights(model)
    modelopt.apply_clipping(model, {name: state.clip for name, state in states.items() if state.clip is not None})
    for name, state in states.items():
        if state.input_amax is not None:
            _set_input_range(model, name, state.input_amax, settled)
    for group in groups:
        _share_scalar_ranges(model, group, formats, export=export)
    for pair in fused_pairs(formats):
        enabled = modelopt.weight_quantizers(model)
        _share([modelopt.stages(enabled[name])[-1] for name in pair if name in enabled])
    modelopt.snap_weights(model)
    return settled


def refuse_split(groups: Iterable[SharedInput], formats: Mapping[str, Format], *, export: str) -> None:
    """Refuse formats that split layers whose common input would carry the scale of some of them.

    Raises:
        ConfigError: names the layers.
    """
    problems = []
    for group in groups:
        smoothed = [name for name in group.layers if name in formats and folds(formats[name], export=export)]
        others = [name for name in group.layers if name not in smoothed]
        if others and len(smoothed) > 1:
            message = f"reads the same norm as {', '.join(smoothed)}, into which the AWQ scale is folded."
            problems.append(Problem(where=", ".join(others), message=message))
    if problems:
        raise ConfigError(
            "quantization.exclude splits layers that share their input, which AWQ cannot do",
            problems=problems,
            hint="Exclude all layers that share the input (q, k, v; or gate, up), or none of them.",
        )


def _norm_offset(model: nn.Module, groups: Sequence[SharedInput], formats: Mapping[str, Format]) -> float:
    norms = {
        type(model.get_submodule(group.norm)).__name__
        for group in groups
        if group.norm and any(name in formats for name in group.layers)
    }
    return 1.0 if norms & UNIT_OFFSET_NORMS else 0.0


def _share_pre_quant_scale(
    model: nn.Module, names: Sequence[str], settled: Settled, *, norm: str | None, dtype: torch.dtype
) -> None:
    """Give layers that read one tensor the mean of their scales; `norm` is what it is folded into, if anything."""
    import torch

    scales = [modelopt.pre_quant_scale(model.get_submodule(name)) for name in names]
    present = [scale.float() for scale in scales if scale is not None]
    if len(present) != len(names):
        return  # ModelOpt did not smooth these layers
    shared = torch.stack(present).mean(dim=0)
    if norm is None:
        shared = shared.to(dtype).float()
    else:
        carrier: Any = model.get_submodule(norm)
        gain = carrier.weight.float() + settled.norm_offset
        rounded = (gain * shared - settled.norm_offset).to(dtype).float()
        shared = torch.where(gain == 0, torch.ones_like(gain), (rounded + settled.norm_offset) / gain)
        with torch.no_grad():
            carrier.weight.data = rounded
    for name in names:
        modelopt.set_pre_quant_scale(model.get_submodule(name), shared, folded=norm is not None)
        if norm is not None:
            settled.folded_into[name] = norm
            settled.folded[name] = shared.cpu()


def _set_input_range(model: nn.Module, name: str, channels: torch.Tensor, settled: Settled) -> None:
    layer: Any = model.get_submodule(name)
    scale = settled.folded.get(name, modelopt.pre_quant_scale(layer))
    widest = (channels if scale is None else channels * scale.float().cpu()).max()
    layer.input_quantizer.amax = widest.to(next(layer.parameters()).device)


def shares_scalar_ranges(form: Format, *, export: str) -> bool:
    """Whether layers of a format that read the same tensor have one scalar range in a layout."""
    made = traits(form, export=export)
    return export == "trtllm" or (made.grouped and made.static_activations)


def _share_scalar_ranges(model: nn.Module, group: SharedInput, formats: Mapping[str, Format], *, export: str) -> None:
    for form in sorted({formats[name] for name in group.layers if name in formats}):
        if not shares_scalar_ranges(form, export=export):
            continue
        for find in (modelopt.weight_quantizers, modelopt.input_quantizers):
            enabled = find(model)
            quantizers = [
                modelopt.stages(enabled[name])[-1]
                for name in group.layers
                if formats.get(name) == form and name in enabled
            ]
            if all(quantizer.amax is not None and quantizer.amax.numel() == 1 for quantizer in quantizers):
                _share(quantizers)


def _share(quantizers: Sequence[Any]) -> None:
    """Give quantizers of as many ranges each (one, or one a row) the widest of theirs."""
    import torch

    if len(quantizers) > 1:
        widest = torch.stack([quantizer.amax for quantizer in quantizers]).amax(dim=0)
        for quantizer in quantizers:
            quantizer.amax = widest

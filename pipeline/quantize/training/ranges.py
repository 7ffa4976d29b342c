"""From a calibration to what each layer rounds with, exactly as `quantize` will settle it for the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.config.formats import SIXTEEN_BIT
from pipeline.config.schema import Format, QuantizationConfig
from pipeline.core.artifacts import Calibration, SourceCheckpoint
from pipeline.quantize import modelopt
from pipeline.quantize.calibrated import CalibrationReader
from pipeline.quantize.formats import WantedCheckpoint, by_glob, quantizer_config, traits
from pipeline.quantize.layered import LayeredModel
from pipeline.quantize.settle import SharedInput, find_shared_inputs, settle, shares_scalar_ranges
from pipeline.quantize.source_model import linear_layers
from pipeline.quantize.sparsity import read_sparsity
from pipeline.quantize.training.student import LayerRanges

if TYPE_CHECKING:
    from torch import nn


def trained_layers(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    calibration: Calibration | None,
    wanted: WantedCheckpoint,
) -> dict[str, LayerRanges]:
    """Return layer -> ranges of what there is to train: every layer that is rounded, else every sparse one."""
    found = {} if calibration is None else settled_ranges(source, quantization, calibration, wanted)
    sparse = read_sparsity(source.path)
    if found or sparse is None:
        return found
    return dict.fromkeys(sparse["layers"], LayerRanges(format=SIXTEEN_BIT[wanted.dtype]))


def settled_ranges(
    source: SourceCheckpoint, quantization: QuantizationConfig, calibration: Calibration, wanted: WantedCheckpoint
) -> dict[str, LayerRanges]:
    """Return layer -> ranges of every layer that ModelOpt will quantize, on the CPU.

    Pre-quant scales are shared, folded and rounded as the wanted layout has them; a few decoder layers are in memory.

    Args:
        source: the model that was calibrated.
        quantization: group size.
        calibration: its calibration.
        wanted: the checkpoint that will be made of the trained weights.
    """
    found = CalibrationReader(calibration.path)
    model = LayeredModel.open(source.path)
    ranges: dict[str, LayerRanges] = {}
    for indices in model.groups(range(model.count), lambda index: model.kind(index, found.formats)):
        mine = {
            name: form for name, form in found.formats.items() if any(model.inside(index, name) for index in indices)
        }
        if mine:
            with model.borrow(indices) as live:
                ranges |= _settled(live, mine, found, quantization, wanted)
    if model.head in found.formats:
        with model.borrow([model.count - 1], head=True) as live:
            ranges |= _settled(live, {model.head: found.formats[model.head]}, found, quantization, wanted)
    return ranges


def _settled(
    live: nn.Module,
    formats: Mapping[str, Format],
    found: CalibrationReader,
    quantization: QuantizationConfig,
    wanted: WantedCheckpoint,
) -> dict[str, LayerRanges]:
    import torch

    groups = find_shared_inputs(live)
    modelopt.insert(live, quantizer_config(quantization, by_glob(formats, linear_layers(live)), kv_scales=False))
    states = {name: found.layer(name) for name in formats}
    settled = settle(live, formats, states, groups, export=wanted.export, dtype=getattr(torch, wanted.dtype))
    inputs = modelopt.input_quantizers(live)
    ranges = {}
    for name, form in formats.items():
        made = traits(form, export=wanted.export)
        p = settled.folded.get(name, modelopt.pre_quant_scale(live.get_submodule(name)))
        ranges[name] = LayerRanges(
            format=form,
            group_size=quantization.group_size if made.grouped else None,
            input_range=inputs[name].amax.float().cpu().reshape(()) if made.static_activations else None,
            pre_quant_scale=None if p is None else p.float().cpu(),
            clipping=states[name].clip,
            shares_scale_with=_partners(name, formats, groups, wanted),
        )
    return ranges


def _partners(
    name: str, formats: Mapping[str, Format], groups: Sequence[SharedInput], wanted: WantedCheckpoint
) -> tuple[str, ...]:
    """Other layers of the format that read the same tensor, where the layout has one scale for all of them."""
    if not shares_scalar_ranges(formats[name], export=wanted.export):
        return ()
    readers = next(group.layers for group in groups if name in group.layers)
    return tuple(other for other in readers if other != name and formats.get(other) == formats[name])

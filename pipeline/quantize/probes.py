"""Recorded rows of every quantized layer: what its exported tensors must compute.

probes.safetensors holds, for each quantized linear layer by its Hugging Face module name,

    <module>.input   float32 [n, in]   x: rows of the layer's input in the *source* model, recorded in a
                                       float32 forward pass before ModelOpt touched the model
    <module>.output  float32 [n, out]  y: what ModelOpt's fake-quantized layer gives for x, bias included

and y is exactly the function that the exported tensors stand for:

    y = Qa(x * p) Qw(W / p)^T + b

    Qw  the stored codes and scales of `<module>.weight`
    Qa  activation quantization, static (fp8, int8_sq) or per row (fp8_rowwise); the identity for weight-only formats
    p   [in], 1 where the format does not smooth. `<module>.pre_quant_scale` where the checkpoint holds it;
        otherwise, where quantization.json lists the layer under "folded", p is in the weight of the norm in
        front of it: p = (norm exported + offset) / (norm source + offset), float32, and 1 where the
        denominator is 0; offset is 0 for RMSNorm and 1 for Gemma's norms, which add 1 to their weight
        (quantization.json "norm_offset").

So x is never scaled by p: a reader multiplies. This holds bit for bit up to float32 rounding because
settle.settle makes the live model equal to what is written, 16-bit rounding of p and of the norms
included, before `record` runs. What is stored is not what the source model's layer gives: that is
x W^T + b with the source's W, which a reader has.

n is 8 unless fewer tokens exist; rows are spread evenly over the first calibration sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

ROWS = 8


def choose_rows(x: torch.Tensor) -> torch.Tensor:
    """ROWS rows of a layer's input [tokens, in], spread evenly."""
    import torch

    positions = torch.linspace(0, len(x) - 1, min(ROWS, len(x))).round().long()
    return x[positions.to(x.device)].clone()


def record(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], folded: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run recorded rows through settled fake-quantized layers.

    Args:
        model: holds the layers.
        inputs: layer -> rows of its input in the source model.
        folded: layer -> p [in] for layers whose p lives in the norm in front of them.

    Returns:
        The tensors of probes.safetensors, on the CPU.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, rows in inputs.items():
            layer = model.get_submodule(name)
            device = next(layer.parameters()).device
            fed = rows.to(device)
            if name in folded:
                fed = fed * folded[name].to(device)
            tensors[f"{name}.input"] = rows
            # As one sequence: a quantizer with a range per token is made for the rank of its first input, 3.
            tensors[f"{name}.output"] = layer(fed[None])[0].float().cpu()
    return {name: tensors[name].contiguous() for name in sorted(tensors)}

"""The shapes of the 16-bit model that a checkpoint quantized elsewhere stands for, from its headers.

Only names and shapes: what the numbers mean is read, and refused, when the checkpoint is converted.

    AutoAWQ             qweight [in, out * bits / 32], scales [groups, out]
    GPTQ                qweight [in * bits / 32, out], scales [groups, out], qzeros [groups, out * bits / 32]
    compressed-tensors  weight_packed [out, in * bits / 32], weight_scale [out, groups]
    ModelOpt, int4      weight U8 [out / 2, in]

(Sources are in pipeline/quantize/foreign.) FP8 and int8 weights keep their name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.checkpoints.safetensors_index import TensorEntry

_WORD_BITS = 32
# Tensors beside a weight that the 16-bit model does not have.
_PARTS = (
    "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
    "weight_g_idx", "input_scale", "pre_quant_scale",
)  # fmt: skip


def unpacked(tensors: Mapping[str, TensorEntry], config: Mapping[str, object]) -> Mapping[str, TensorEntry]:
    """Return the entries as the 16-bit model would have them; unchanged where config.json says not quantized."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return tensors
    logical: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            logical[f"{module}.weight"] = replace(entry, name=f"{module}.weight", shape=_words(module, tensors))
        elif kind == "weight_packed":
            rows, words = entry.shape
            shape = (rows, words * _WORD_BITS // _bits(settings))
            logical[f"{module}.weight"] = replace(entry, name=f"{module}.weight", shape=shape)
        elif kind == "weight" and entry.dtype == "U8":
            rows, columns = entry.shape
            logical[name] = replace(entry, shape=(2 * rows, columns))
        elif kind not in _PARTS:
            logical[name] = entry
    return logical


def _words(module: str, tensors: Mapping[str, TensorEntry]) -> tuple[int, ...]:
    """(out, in) of a layer in the layout of AutoAWQ or GPTQ; the packed shape where its scales are missing."""
    first, second = tensors[f"{module}.qweight"].shape
    scales, zeros = tensors.get(f"{module}.scales"), tensors.get(f"{module}.qzeros")
    if scales is None or zeros is None:
        return (second, first)
    rows = scales.shape[-1]
    if second != rows:  # packed along out: AutoAWQ
        return (rows, first)
    bits = max(1, _WORD_BITS * zeros.shape[-1] // rows)
    return (rows, first * _WORD_BITS // bits)


def _bits(settings: Mapping[str, object]) -> int:
    """Bits of the packed weights of compressed-tensors: those of the first config group."""
    groups = settings.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    return bits if type(bits) is int and 0 < bits <= _WORD_BITS else 4

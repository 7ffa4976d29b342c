"""The layouts of compressed-tensors (llm-compressor): pack-quantized, int-quantized and float-quantized.

    pack-quantized   weight_packed     int32 [out, ceil(in * bits / 32)]   code + 2^(bits - 1), inputs in a word from
                                                                           the lowest bits
                     weight_shape      int64 [2]                           (out, in)
                     weight_zero_point int32 [ceil(out * bits / 32), n]    only where asymmetric; packed along out
                     weight_g_idx      int32 [in]                          only with act-order
    int-quantized    weight            int8 [out, in]; weight_zero_point int8 like the scale where asymmetric
    float-quantized  weight            float8 E4M3 [out, in]
    all              weight_scale      [1], [out, 1], [out, in / g], or [out / b, in / b]: strategy tensor, channel,
                                       group, block; W = (q - z) * s
                     input_scale       [1], only with static activations

Source: compressed-tensors 0.20.1, compressors/pack_quantized/helpers.py (`pack_to_int32`), pack_quantized/base.py and
naive_quantized/base.py (names, zero point packed along dimension 0); quantization/quant_args.py (strategies).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.quantize.foreign.layout import Settings, activations, integer_element, refused, scaling
from pipeline.quantize.foreign.linear import BITS, Element, ForeignLinear, as_matrix, consecutive
from pipeline.quantize.foreign.packing import WORD_BITS, unpack_columns, unpack_rows
from pipeline.quantize.tensor_files import TensorFiles

_FORMATS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"})
_E4M3_BITS = 8
_BLOCK = 2


class CompressedTensorsLayout:
    """compressed-tensors as llm-compressor writes it.

    Raises:
        ConfigError: another format, a sparse checkpoint, or a quantized KV cache.
    """

    marker = "weight_scale"
    suffixes = frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale"}
    )

    def __init__(self, settings: Settings) -> None:
        groups: Mapping[str, Any] = settings.get("config_groups") or {}
        self._groups = list(groups.values())
        formats = {str(settings.get("format"))} | {
            str(group["format"]) for group in self._groups if group.get("format")
        }
        if not self._groups or formats - _FORMATS:
            read = ", ".join(sorted(_FORMATS))
            raise refused(f"compressed-tensors format {sorted(formats)}", f"These are read: {read}.")
        sparsity = settings.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise refused(
                f"compressed-tensors with sparsity '{sparsity['format']}'", "Save it without sparse compression."
            )
        if settings.get("kv_cache_scheme"):
            raise refused("compressed-tensors with a quantized KV cache", "Quantize it without kv_cache_scheme.")
        self._format = str(settings.get("format"))
        self.name = f"compressed-tensors {self._format}"

    def shape(self, tensors: TensorFiles, module: str) -> tuple[int, int]:
        """(out, in) of a layer: of packed weights, stored beside them."""
        if f"{module}.weight_packed" in tensors:
            rows, columns = (int(extent) for extent in tensors.raw(f"{module}.weight_shape"))
        else:
            rows, columns = tensors[f"{module}.weight"].shape
        return rows, columns

    def decode(self, tensors: TensorFiles, module: str) -> ForeignLinear:
        """Read one layer."""
        scheme = self._scheme(module)
        arguments: Mapping[str, Any] = scheme["weights"]
        activations: Mapping[str, Any] = scheme.get("input_activations") or {}
        element = _element(arguments, module)
        rows, columns = self.shape(tensors, module)
        stored = tensors.floats(f"{module}.weight_scale")
        row_block, scale_rows, group = 1, rows, 0
        if arguments.get("strategy") == "block":
            row_block, group = (int(extent) for extent in arguments["block_structure"])
            scale_rows = -(-rows // row_block)
        elif stored.size == 1:
            row_block, scale_rows = rows, 1
        scales = as_matrix(stored, scale_rows)
        stored_map = f"{module}.weight_g_idx"
        if stored_map in tensors:
            group_of_input = np.asarray(tensors.raw(stored_map), np.int32)
        else:
            group_of_input = consecutive(columns, group or columns // scales.shape[1])
        static = f"{module}.input_scale"
        return ForeignLinear(
            element=element,
            codes=_codes(tensors, module, element, columns),
            scales=scales,
            zero_points=_zero_points(tensors, module, element, scales),
            group_of_input=group_of_input,
            row_block=row_block,
            input_scale=float(tensors.floats(static).reshape(())) if static in tensors else None,
            dynamic_activations=bool(activations.get("dynamic")),
            bias=tensors.floats(f"{module}.bias") if f"{module}.bias" in tensors else None,
        )

    def kind(self, layer: ForeignLinear) -> str:
        """Element, scales of weights and activations."""
        blocks = [group["weights"].get("block_structure") for group in self._groups]
        block = None if blocks[0] is None else (int(blocks[0][0]), int(blocks[0][1]))
        return f"{self._format} {layer.element} {scaling(layer, block)} {activations(layer)}"

    def _scheme(self, module: str) -> Mapping[str, Any]:
        """The config group of a layer: by its name or a pattern, else the one for all linear layers."""
        for group in self._groups:
            targets: list[str] = group.get("targets") or []
            named = (
                target == module or (target.startswith("re:") and re.match(target[3:], module)) for target in targets
            )
            if any(named):
                return dict(group)
        for group in self._groups:
            if "Linear" in (group.get("targets") or []):
                return dict(group)
        raise refused(f"{module} is quantized and belongs to no config group", "Export the checkpoint again.")


def _element(arguments: Mapping[str, Any], module: str) -> Element:
    bits = int(arguments["num_bits"])
    if arguments.get("type", "int") == "int":
        return integer_element(bits, module)
    if bits != _E4M3_BITS:
        raise refused(f"{module} holds {bits}-bit floating-point weights", "Of these, only FP8 (E4M3) is read.")
    return "e4m3"


def _codes(tensors: TensorFiles, module: str, element: Element, columns: int) -> Any:  # noqa: ANN401 - uint8 array
    if f"{module}.weight_packed" in tensors:
        words = tensors.raw(f"{module}.weight_packed")
        return np.ascontiguousarray(unpack_columns(words, BITS[element])[:, :columns])
    stored = tensors.raw(f"{module}.weight")
    wanted = "F8_E4M3" if element == "e4m3" else "I8"
    if tensors[f"{module}.weight"].dtype != wanted:
        raise refused(f"{module}.weight is {tensors[f'{module}.weight'].dtype}, {wanted} belongs to its scheme", "")
    return np.asarray(stored) if element == "e4m3" else (stored.astype(np.int16) + _middle(element)).astype(np.uint8)


def _zero_points(tensors: TensorFiles, module: str, element: Element, scales: Any) -> Any:  # noqa: ANN401 - arrays
    if element == "e4m3":
        return None
    name = f"{module}.weight_zero_point"
    if name not in tensors:
        return np.full(scales.shape, _middle(element), np.int16)
    stored = tensors.raw(name)
    if (
        tensors[name].dtype == "I32"
        and stored.ndim == _BLOCK
        and len(stored) * WORD_BITS // BITS[element] >= len(scales)
    ):
        return unpack_rows(stored, BITS[element])[: len(scales)].astype(np.int16)
    return (stored.astype(np.int16) + _middle(element)).reshape(scales.shape)


def _middle(element: Element) -> int:
    return int(2 ** (BITS[element] - 1))

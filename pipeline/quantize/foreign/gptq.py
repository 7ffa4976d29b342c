"""The GPTQ layout of AutoGPTQ and GPTQModel, 4 and 8 bits.

    qweight  int32   [in * bits / 32, out]       codes, consecutive inputs in a word from the lowest bits
    qzeros   int32   [groups, out * bits / 32]   zero points, consecutive outputs in a word
    scales   float16 [groups, out]               W[r, c] = (q[c, r] - z[g, r]) * s[g, r] with g = g_idx[c]
    g_idx    int32   [in]                        the group of each input; out of order with act-order (desc_act)

Format "gptq" (v1) stores z - 1, "gptq_v2" stores z. A v1 zero point of 0 wraps around to 2^bits - 1. Source: AutoGPTQ
auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py@179776b (packing, `zeros -= 1`); GPTQModel gptqmodel/utils/model.py
(`convert_gptq_v1_to_v2_format_module`) and its round trip test, which compares modulo 2^bits.
"""

from __future__ import annotations

import numpy as np

from pipeline.quantize.foreign.layout import Settings, integer_element, refused
from pipeline.quantize.foreign.linear import BITS, Element, ForeignLinear, consecutive
from pipeline.quantize.foreign.packing import WORD_BITS, unpack_columns, unpack_rows
from pipeline.quantize.tensor_files import TensorFiles

_STORED_LESS = {"gptq": 1, "gptq_v2": 0}


class GptqLayout:
    """AutoGPTQ and GPTQModel.

    Raises:
        ConfigError: another format than gptq and gptq_v2.
    """

    marker = "qweight"
    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, settings: Settings) -> None:
        stored = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        if stored not in _STORED_LESS:
            raise refused(
                f"GPTQ in the kernel's own format '{stored}'", "Save it with checkpoint_format: gptq or gptq_v2."
            )
        self.name = "GPTQ v2" if stored == "gptq_v2" else "GPTQ v1"
        self._add = _STORED_LESS[stored]

    def shape(self, tensors: TensorFiles, module: str) -> tuple[int, int]:
        """(out, in) of a layer, from the headers."""
        words, rows = tensors[f"{module}.qweight"].shape
        return rows, words * WORD_BITS // BITS[self._element(tensors, module)]

    def decode(self, tensors: TensorFiles, module: str) -> ForeignLinear:
        """Read one layer."""
        element = self._element(tensors, module)
        bits = BITS[element]
        codes = unpack_rows(tensors.raw(f"{module}.qweight"), bits)
        scales = tensors.floats(f"{module}.scales")
        zeros = (unpack_columns(tensors.raw(f"{module}.qzeros"), bits).astype(np.int16) + self._add) % 2**bits
        stored_map = f"{module}.g_idx"
        if stored_map in tensors:
            group_of_input = np.asarray(tensors.raw(stored_map), np.int32)
        else:
            group_of_input = consecutive(len(codes), len(codes) // len(scales))
        return ForeignLinear(
            element=element,
            codes=np.ascontiguousarray(codes.T),
            scales=np.ascontiguousarray(scales.T),
            zero_points=np.ascontiguousarray(zeros.T).astype(np.int16),
            group_of_input=group_of_input,
            bias=tensors.floats(f"{module}.bias") if f"{module}.bias" in tensors else None,
        )

    def kind(self, layer: ForeignLinear) -> str:
        """Act-order takes a kernel of its own."""
        return f"gptq {layer.element}{'' if layer.ordered else ' act-order'}"

    def _element(self, tensors: TensorFiles, module: str) -> Element:
        """Bits of a layer from its own shapes, which also holds where single layers differ from the config."""
        rows = tensors[f"{module}.qweight"].shape[1]
        return integer_element(WORD_BITS * tensors[f"{module}.qzeros"].shape[1] // rows, module)

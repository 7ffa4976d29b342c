"""AutoAWQ's gemm layout.

    qweight  int32   [in, out / 8]       codes, eight outputs to a word
    qzeros   int32   [in / g, out / 8]   zero points, packed alike
    scales   float16 [in / g, out]       W[r, c] = (q[c, r] - z[c // g, r]) * s[c // g, r]

Within a word, from the lowest nibble, lie outputs 0, 2, 4, 6, 1, 3, 5, 7: output j is at place
(0, 4, 1, 5, 2, 6, 3, 7)[j]. Source: casper-hansen/AutoAWQ awq/modules/linear/gemm.py@030fe2a (packing, shapes) and
awq/utils/packing_utils.py@7ee2873 (`dequantize_gemm`).
"""

from __future__ import annotations

import numpy as np

from pipeline.quantize.foreign.layout import Settings, refused
from pipeline.quantize.foreign.linear import ForeignLinear, consecutive
from pipeline.quantize.foreign.packing import WORD_BITS, unpack_columns
from pipeline.quantize.tensor_files import TensorFiles

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqLayout:
    """AutoAWQ, version gemm.

    Raises:
        ConfigError: another version, or other than 4 bits.
    """

    name = "AutoAWQ gemm"
    marker = "qweight"
    suffixes = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, settings: Settings) -> None:
        version = str(settings.get("version") or settings.get("checkpoint_format") or "gemm").lower()
        bits = settings.get("bits", settings.get("w_bit", _BITS))
        if version != "gemm":
            raise refused(f"AWQ version '{version}'", "Only version gemm is read; export the model with version: gemm.")
        if bits != _BITS:
            raise refused(f"AWQ with {bits} bits", "AutoAWQ's gemm layout has 4 bits.")

    def shape(self, tensors: TensorFiles, module: str) -> tuple[int, int]:
        """(out, in) of a layer, from the headers."""
        columns, words = tensors[f"{module}.qweight"].shape
        return words * WORD_BITS // _BITS, columns

    def decode(self, tensors: TensorFiles, module: str) -> ForeignLinear:
        """Read one layer."""
        codes = unpack_columns(tensors.raw(f"{module}.qweight"), _BITS, _PLACES)
        zeros = unpack_columns(tensors.raw(f"{module}.qzeros"), _BITS, _PLACES)
        scales = tensors.floats(f"{module}.scales")
        return ForeignLinear(
            element="int4",
            codes=np.ascontiguousarray(codes.T),
            scales=np.ascontiguousarray(scales.T),
            zero_points=np.ascontiguousarray(zeros.T).astype(np.int16),
            group_of_input=consecutive(len(codes), len(codes) // len(scales)),
            bias=tensors.floats(f"{module}.bias") if f"{module}.bias" in tensors else None,
        )

    def kind(self, layer: ForeignLinear) -> str:
        """One kernel for all."""
        del layer
        return "awq"

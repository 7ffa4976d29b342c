"""ModelOpt's unified Hugging Face checkpoint, made by another run of ModelOpt.

    weight           U8 [out / 2, in] (int4, pairs along out), I8 [out, in] or float8 E4M3 [out, in]
    weight_scale     int4 [out, in / g]; int8 [out]; fp8 one number
    input_scale      one number, with static activations
    pre_quant_scale  [in], multiplies the input; absent where it is folded into the norm in front

The formulas are those of pipeline/quantize/reference.py. Source: NVIDIA/Model-Optimizer 0.47
modelopt/torch/export/unified_export_hf.py and quant_utils.py (names, packing).
"""

from __future__ import annotations

import numpy as np

from pipeline.quantize.foreign.layout import Settings, refused
from pipeline.quantize.foreign.linear import Element, ForeignLinear, as_matrix, consecutive
from pipeline.quantize.reference import unpack_int4
from pipeline.quantize.tensor_files import TensorFiles

_ALGORITHMS = ("FP8", "INT4_AWQ", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16")
_ELEMENTS: dict[str, Element] = {"U8": "int4", "I8": "int8", "F8_E4M3": "e4m3"}


class ModelOptLayout:
    """ModelOpt's unified checkpoint.

    Raises:
        ConfigError: an algorithm that is not read, or a quantized KV cache.
    """

    marker = "weight_scale"
    suffixes = frozenset({"weight", "weight_scale", "input_scale", "pre_quant_scale"})

    def __init__(self, settings: Settings) -> None:
        algorithm = settings.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            raise refused(
                f"ModelOpt's {algorithm}", f"Of ModelOpt's formats, these are read: {', '.join(_ALGORITHMS)}."
            )
        if settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo"):
            raise refused(
                "ModelOpt with a quantized KV cache", "Export it without one; kv_cache: int8 needs no scales."
            )
        self._algorithm = algorithm
        self.name = f"ModelOpt {algorithm}"

    def shape(self, tensors: TensorFiles, module: str) -> tuple[int, int]:
        """(out, in) of a layer, from the headers."""
        info = tensors[f"{module}.weight"]
        rows, columns = info.shape
        return (2 * rows if info.dtype == "U8" else rows), columns

    def kind(self, layer: ForeignLinear) -> str:
        """ModelOpt's own name of the format."""
        del layer
        return f"modelopt {self._algorithm}"

    def decode(self, tensors: TensorFiles, module: str) -> ForeignLinear:
        """Read one layer."""
        stored = tensors.raw(f"{module}.weight")
        dtype = tensors[f"{module}.weight"].dtype
        if dtype not in _ELEMENTS:
            raise refused(f"{module}.weight is {dtype}", "A ModelOpt weight is U8, I8 or F8_E4M3.")
        element = _ELEMENTS[dtype]
        codes = stored
        if element == "int4":
            codes = np.asarray(unpack_int4(stored) + np.int8(8), np.uint8)
        elif element == "int8":
            codes = np.asarray(stored.astype(np.int16) + 128, np.uint8)
        rows, columns = codes.shape
        values = tensors.floats(f"{module}.weight_scale")
        row_block = rows if values.size == 1 else 1
        scales = as_matrix(values, 1 if values.size == 1 else rows)
        static, smoothing = f"{module}.input_scale", f"{module}.pre_quant_scale"
        middle = {"int4": 8, "int8": 128}
        return ForeignLinear(
            element=element,
            codes=codes,
            scales=scales,
            zero_points=np.full(scales.shape, middle[element], np.int16) if element in middle else None,
            group_of_input=consecutive(columns, columns // scales.shape[1]),
            row_block=row_block,
            input_scale=float(tensors.floats(static).reshape(())) if static in tensors else None,
            pre_quant_scale=tensors.floats(smoothing) if smoothing in tensors else None,
            smoothed=element == "int4",
            bias=tensors.floats(f"{module}.bias") if f"{module}.bias" in tensors else None,
        )

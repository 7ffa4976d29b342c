"""quant_method "fp8": one scale per tensor, or one per block of 128 x 128 weights.

    weight            float8 E4M3 [out, in]
    weight_scale      scalar                                 W = w * s   (per tensor)
    input_scale       scalar, with activation_scheme static
    weight_scale_inv  float32 [ceil(out / b), ceil(in / b)]  W = w * s   (per block; a multiplier despite its name)

Source: transformers 4.57 integrations/finegrained_fp8.py (`FP8Linear`: shapes) and quantizers for dequantization;
DeepSeek-V3 inference/kernel.py (`weight_dequant`); vLLM model_executor/layers/quantization/fp8.py (per tensor).
"""

from __future__ import annotations

from pipeline.quantize.foreign.layout import Settings, activations, scaling
from pipeline.quantize.foreign.linear import ForeignLinear, as_matrix, consecutive
from pipeline.quantize.tensor_files import TensorFiles


class Fp8Layout:
    """FP8 as transformers, vLLM and DeepSeek write it."""

    def __init__(self, settings: Settings) -> None:
        block = settings.get("weight_block_size")
        self._block = None if block is None else (int(block[0]), int(block[1]))
        self._dynamic = settings.get("activation_scheme", "dynamic") == "dynamic"
        self.marker = "weight_scale" if block is None else "weight_scale_inv"
        self.suffixes = frozenset({"weight", self.marker, "input_scale"})
        self.name = "FP8 per tensor" if block is None else f"FP8 in blocks of {self._block}"

    def shape(self, tensors: TensorFiles, module: str) -> tuple[int, int]:
        """(out, in) of a layer, from the headers."""
        rows, columns = tensors[f"{module}.weight"].shape
        return rows, columns

    def kind(self, layer: ForeignLinear) -> str:
        """Scales of weights and of activations."""
        return f"fp8 {scaling(layer, self._block)} {activations(layer)}"

    def decode(self, tensors: TensorFiles, module: str) -> ForeignLinear:
        """Read one layer."""
        rows, columns = self.shape(tensors, module)
        stored = tensors.floats(f"{module}.{self.marker}")
        row_block, column_block = self._block or (rows if stored.size == 1 else 1, columns)
        static = f"{module}.input_scale"
        return ForeignLinear(
            element="e4m3",
            codes=tensors.raw(f"{module}.weight"),
            scales=as_matrix(stored, -(-rows // row_block)),
            zero_points=None,
            group_of_input=consecutive(columns, column_block),
            row_block=row_block,
            input_scale=float(tensors.floats(static).reshape(())) if static in tensors else None,
            dynamic_activations=self._dynamic,
            bias=tensors.floats(f"{module}.bias") if f"{module}.bias" in tensors else None,
        )

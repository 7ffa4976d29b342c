"""ModelOpt's exported tensors of each quantized linear layer, as integers and scales, undequantized.

Reads the unified Hugging Face checkpoint. Formulas and packing, W is [out, in] (checked against ModelOpt's
own fake quantization by the tests):

    int4      W[r, c] = q[r, c] * s[r, c // g]   q int4 in -8..7; byte [r, c] of the U8 tensor holds row 2r in its
                                                 low nibble and row 2r + 1 in its high nibble; with a
                                                 weight_zero_point z, (q[r, c] - z[r, c // g]) * s[r, c // g]
    int8      W[r, c] = q[r, c] * s[r]           q int8
    fp8       W[r, c] = e4m3(byte) * s           s one number

and the layer computes y = (x * p) W^T with p = pre_quant_scale [in], absent where it was folded away
and in the weight-only formats int8_wo and int4_wo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.errors import IntegrityError, Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Code = Literal["i4", "u4", "i8", "f8e4m3"]
INT4: frozenset[Code] = frozenset({"i4", "u4"})

_SUFFIXES = (
    "weight_input_order",
    "weight_zero_point",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
)
_KV_SUFFIXES = ("k_scale", "v_scale")


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """One linear layer's weight as ModelOpt exported it.

    Attributes:
        layer: module name, for example 'model.layers.0.mlp.down_proj'.
        code: element type of `codes`.
        shape: (out, in).
        codes: i4: uint8 [out * in / 2], row-major, the even element in the low nibble (OpenVINO's i4
            layout), u4: the same with every code raised by 8; i8: int8 [out, in]; f8e4m3: uint8 bit patterns [out, in].
        scales: float32; i4 and u4 [out, in / group_size], i8 [out, 1], f8e4m3 [1, 1].
        pre_quant_scale: float32 [in] that multiplies the layer's input, or None.
        zero_points: u4: uint8, the shape of `scales`, subtracted from the codes; None otherwise.
        input_order: int32 [in], the input that each column of `codes` belongs to, or None for columns in order.
        input_scale: static activation scale a (x is rounded to multiples of a), or None.
    """

    layer: str
    code: Code
    shape: tuple[int, int]
    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float32]
    pre_quant_scale: npt.NDArray[np.float32] | None
    input_scale: float | None
    zero_points: npt.NDArray[np.uint8] | None = None
    input_order: npt.NDArray[np.int32] | None = None

    @property
    def group_size(self) -> int:
        """Weights of a row that share one scale."""
        return self.shape[1] // self.scales.shape[1]


class Checkpoint:
    """The tensors of a unified Hugging Face checkpoint, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of = _tensor_files(directory)

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Names of the layers whose weight carries a scale, sorted."""
        suffix = ".weight_scale"
        return tuple(sorted(name.removesuffix(suffix) for name in self._file_of if name.endswith(suffix)))

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            IntegrityError: the checkpoint holds no tensor of that name.
        """
        from safetensors import safe_open

        if name not in self._file_of:
            raise IntegrityError(
                f"{self.directory}: tensor '{name}' is missing", hint="Rebuild the quantized checkpoint."
            )
        with safe_open(self._file_of[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def optional(self, name: str) -> torch.Tensor | None:
        """Read one tensor, or None when the checkpoint holds none of that name."""
        return self.tensor(name) if name in self._file_of else None

    def read_layer(self, layer: str) -> QuantizedWeight:
        """Read one quantized layer.

        Raises:
            IntegrityError: dtype and shapes of its tensors are of no format known here.
        """
        import numpy as np

        weight, scale = self.tensor(f"{layer}.weight"), self.tensor(f"{layer}.weight_scale")
        code, shape, codes = _codes(layer, weight)
        zero_point, order = self.optional(f"{layer}.weight_zero_point"), self.optional(f"{layer}.weight_input_order")
        if zero_point is not None:
            # Raising a code of two's complement by 8 flips the highest bit of its nibble.
            code, codes = "u4", np.bitwise_xor(codes.view(np.uint8), np.uint8(0x88))
        smoothing, activation = self.optional(f"{layer}.pre_quant_scale"), self.optional(f"{layer}.input_scale")
        return QuantizedWeight(
            layer=layer,
            code=code,
            shape=shape,
            codes=codes,
            scales=_scales(layer, code, shape, scale),
            pre_quant_scale=None if smoothing is None else smoothing.float().reshape(-1).numpy(),
            input_scale=None if activation is None else float(activation),
            zero_points=None if zero_point is None else (zero_point + 8).numpy().astype("uint8"),
            input_order=None if order is None else order.numpy(),
        )

    def plain_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an ordinary 16-bit checkpoint of the same model: weights dequantized to `dtype`."""
        layers = set(self.quantized_layers)
        for name in sorted(self._file_of):
            layer, _, suffix = name.rpartition(".")
            if suffix in _KV_SUFFIXES or (suffix in _SUFFIXES and layer in layers):
                continue
            if suffix == "weight" and layer in layers:
                yield name, dequantize(self.read_layer(layer)).to(dtype)
            else:
                yield name, self.tensor(name).to(dtype)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Return W float32 [out, in] = codes * scales (without the pre-quant scale)."""
    import numpy as np
    import torch

    rows, columns = weight.shape
    if weight.code in INT4:
        packed = torch.from_numpy(weight.codes).to(torch.int16)
        nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(rows, columns)
        if weight.zero_points is not None:
            zeros = torch.from_numpy(weight.zero_points).to(torch.int16)
            values = (nibbles - zeros.repeat_interleave(weight.group_size, dim=1)).float()
        else:
            values = torch.where(nibbles > 7, nibbles - 16, nibbles).float()  # noqa: PLR2004 - the largest int4
    elif weight.code == "i8":
        values = torch.from_numpy(weight.codes).float()
    else:
        values = torch.from_numpy(weight.codes).view(torch.float8_e4m3fn).float()
    scales = torch.from_numpy(np.ascontiguousarray(weight.scales))
    stored = (values.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(rows, columns)
    return stored if weight.input_order is None else stored[:, np.argsort(weight.input_order)]


def _codes(layer: str, weight: torch.Tensor) -> tuple[Code, tuple[int, int], npt.NDArray[np.generic]]:
    import torch

    if weight.dim() == 2:  # noqa: PLR2004 - a matrix
        rows, columns = int(weight.shape[0]), int(weight.shape[1])
        if weight.dtype == torch.int8:
            return "i8", (rows, columns), weight.numpy()
        if weight.dtype == torch.float8_e4m3fn:
            return "f8e4m3", (rows, columns), weight.view(torch.uint8).numpy()
        if weight.dtype == torch.uint8:
            return "i4", (2 * rows, columns), repack_int4(weight).numpy()
    raise IntegrityError(
        f"layer {layer}: weight of dtype {weight.dtype} and shape {list(weight.shape)} is of no format that the "
        "openvino target executes",
        hint="Formats: fp8, int8_sq, int8_wo, int4_awq, int4_wo.",
    )


def repack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Turn pairs along `out` (ModelOpt) into pairs along `in` (OpenVINO); the nibbles stay as they are.

    Args:
        packed: uint8 [out / 2, in].

    Returns:
        uint8 [out * in / 2]: element 2k of the row-major [out, in] matrix in the low nibble of byte k.
    """
    import torch

    rows, columns = packed.shape
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).reshape(2 * rows * columns)
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _scales(layer: str, code: Code, shape: tuple[int, int], scale: torch.Tensor) -> npt.NDArray[np.float32]:
    rows, columns = shape
    values = scale.float()
    if code == "f8e4m3" and values.numel() == 1:
        return values.reshape(1, 1).numpy()
    if code in ("i8", "f8e4m3") and values.numel() == rows:
        return values.reshape(rows, 1).numpy()
    if code in INT4 and values.dim() == 2 and values.shape[0] == rows and columns % values.shape[1] == 0:  # noqa: PLR2004
        return values.numpy()
    raise IntegrityError(
        f"layer {layer}: scales of shape {list(scale.shape)} do not fit a {code} weight of shape {list(shape)}",
        hint="Rebuild the quantized checkpoint.",
    )


def _tensor_files(directory: Path) -> Mapping[str, Path]:
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise IntegrityError(
            f"{directory}: no model.safetensors and no index of shards",
            problems=[Problem(where=str(path.name), message="found instead") for path in sorted(directory.glob("*"))],
            hint="The openvino target compiles the unified Hugging Face checkpoint (hf/) that quantize writes.",
        )
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)

"""Reads a TensorRT-LLM checkpoint of any number of ranks as the Hugging Face model that it came from.

What a rank holds is put together again: rows or columns of the tensor ranks, layers of the pipeline ranks;
q, k and v are taken out of their common tensor, experts out of their stack. Nothing here knows the tool
that wrote the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.formats import ROUNDED_BY_BUILD
from pipeline.errors import IntegrityError
from pipeline.quantize.checkpoint_reader import (
    CODES,
    MIXED,
    CheckpointFormat,
    Declared,
    format_name,
    model_order,
    read_json,
)
from pipeline.quantize.reference import PACKED, Array, LinearFormat, QuantizedLinear
from pipeline.quantize.tensor_files import FloatArray, TensorFiles, cast
from pipeline.quantize.trtllm_layout import Layout, Place

# Stored suffixes that hold one number per output (and perhaps per group of inputs), or one per input.
_PER_INPUT = "prequant_scaling_factor"
_SCALAR_SIZE = 1


class TensorRTLLMReader:
    """A TensorRT-LLM checkpoint directory.

    Args:
        directory: config.json and one rank<r>.safetensors per rank; quant_cfg.json where formats are mixed.

    Raises:
        IntegrityError: a rank file or quant_cfg.json is missing, the config lacks a field, or the layout is unknown.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: dict[str, Any] = read_json(directory / "config.json")
        self.layout = Layout.of(self.config)
        world = self.layout.tp * self.layout.pp
        missing = [rank for rank in range(world) if not (directory / f"rank{rank}.safetensors").is_file()]
        if missing:
            raise IntegrityError(
                f"{directory} lacks rank{missing[0]}.safetensors: its config.json says {world} ranks "
                f"({len(missing)} missing).",
                hint="Quantize again; every rank has its own file.",
            )
        self.ranks = tuple(TensorFiles(directory, f"rank{rank}.safetensors") for rank in range(world))
        self.quantization: dict[str, Any] = self.config.get("quantization") or {}
        self.layer_config: dict[str, Any] = self._read_layer_config()
        listed = self.layer_config.get("quantized_layers") or {}
        # By stored names, which count layers from 0 on every pipeline rank.
        self.declared = Declared.of(self.quantization, listed, directory / "config.json")
        # The weights of these are 16 bit in the file; trtllm-build rounds them when it loads them.
        rounded = self.declared.format in ROUNDED_BY_BUILD
        self.format: CheckpointFormat = "float" if rounded else self.declared.format
        self.group_size: int | None = self.declared.group_size if self.format in {*PACKED, "mixed"} else None
        self.excluded = self.declared.excluded
        self.kv_cache_algorithm: str | None = self.quantization.get("kv_cache_quant_algo")
        self.dtype = str(self.config.get("dtype"))
        self.name = format_name(self.declared.format, self.dtype)

    def _read_layer_config(self) -> dict[str, Any]:
        file = self.directory / "quant_cfg.json"
        if self.quantization.get("quant_algo") != MIXED:
            return {}
        if not file.is_file():
            raise IntegrityError(
                f"{self.directory} lacks quant_cfg.json, which says how each layer of a {MIXED} checkpoint computes.",
                hint="Quantize again; trtllm-build stops without it.",
            )
        return read_json(file)

    def format_of(self, module: str) -> LinearFormat:
        """How a layer computes according to config.json, or quant_cfg.json where formats are mixed."""
        place = self.layout.place(module)
        return "float" if place is None or self.format == "float" else self.declared.format_of(place.stored)

    def quantized_modules(self) -> tuple[str, ...]:
        """Names of the layers whose weight is stored as codes, in model order."""
        quantized = set()
        for module in self.layout.modules():
            place = self.layout.place(module)
            if place is None or "*" in module:
                continue
            info = self.ranks[self.layout.ranks(place.stage)[0]].get(f"{place.stored}.weight")
            if info is not None and info.dtype in CODES:
                quantized.add(module)
        return model_order(quantized)

    def has_tensor(self, name: str) -> bool:
        """Whether the parameter `name` of the source model is stored here, on all of its ranks."""
        module, _, parameter = name.rpartition(".")
        place = self.layout.place(module)
        return place is not None and self._stored(place, parameter)

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter that is not quantized, as float32; the vocabulary may be padded.

        Raises:
            IntegrityError: it is not stored.
        """
        module, _, parameter = name.rpartition(".")
        values = self._join(self._place(module), parameter, TensorFiles.floats)
        return np.asarray(values - np.float32(self._offset(module)), np.float32)

    def rounded(self, name: str, values: FloatArray) -> FloatArray:
        """Round as this layout stores it: where norms multiply by (1 + weight), that sum is what is rounded.

        The router of a mixture is stored as float32 and may hold the source's numbers without any rounding.
        """
        module = name.rpartition(".")[0]
        if self._place(module).part.stored == "mlp.router" and np.array_equal(self.tensor(name), values):
            return values
        offset = np.float32(self._offset(module))
        return cast(values + offset, self.dtype) - offset

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer, quantized or not.

        Raises:
            IntegrityError: a tensor of it is not stored.
        """
        place = self._place(module)
        bias = self._optional(place, "bias")
        info = self.ranks[self.layout.ranks(place.stage)[0]].get(f"{place.stored}.weight")
        if info is None or info.dtype not in CODES:
            return QuantizedLinear(format="float", codes=self.tensor(f"{module}.weight"), bias=bias)
        # One format is for all; what the exclude list says is for structure checks to compare.
        form = self.declared.format_of(place.stored) if self.format == "mixed" else self.format
        if form == "float":
            raise IntegrityError(f"{self.directory}: {place.stored} holds codes, and no config says of which format.")
        codes = self._join(place, "weight", TensorFiles.raw, packed=form in PACKED)
        scale = self._join(place, "weights_scaling_factor", TensorFiles.floats)
        return QuantizedLinear(
            format=form,
            codes=codes.view(np.uint8) if form in PACKED else codes,
            scale=scale.reshape(()) if scale.size == _SCALAR_SIZE else scale,
            second_scale=self._scalar(place, "weights_scaling_factor_2"),
            input_scale=self._scalar(place, "activation_scaling_factor"),
            pre_quant_scale=self._optional(place, _PER_INPUT),
            bias=bias,
        )

    def _offset(self, module: str) -> float:
        is_norm = module.endswith("layernorm") or module == "model.norm"
        return self.layout.family.norm_offset if is_norm else 0.0

    def _place(self, module: str) -> Place:
        place = self.layout.place(module)
        if place is None:
            raise IntegrityError(f"{self.directory}: {module} has no place in the layout of this architecture.")
        return place

    def _stored(self, place: Place, parameter: str) -> bool:
        return all(f"{place.stored}.{parameter}" in self.ranks[rank] for rank in self.layout.ranks(place.stage))

    def _optional(self, place: Place, parameter: str) -> FloatArray | None:
        return self._join(place, parameter, TensorFiles.floats) if self._stored(place, parameter) else None

    def _scalar(self, place: Place, parameter: str) -> float | None:
        value = self._optional(place, parameter)
        return None if value is None else float(value.reshape(-1)[0])

    def _join(
        self, place: Place, parameter: str, read: Callable[[TensorFiles, str], Array], *, packed: bool = False
    ) -> Array:
        """Put a tensor of one module together from its ranks.

        Args:
            place: the module.
            parameter: suffix of the stored name.
            read: `TensorFiles.raw` or `TensorFiles.floats`.
            packed: two rows share one.
        """
        name = f"{place.stored}.{parameter}"
        ranks = [self.ranks[rank] for rank in self.layout.ranks(place.stage)]
        if not self._stored(place, parameter):
            raise IntegrityError(f"{self.directory} lacks tensor {name} on one of its ranks.")
        pieces = [read(rank, name) for rank in ranks]
        if place.expert is not None:
            pieces = [piece[place.expert] for piece in pieces]
        first = pieces[0]
        if place.part.split == "none" or first.size == _SCALAR_SIZE:
            return first
        if place.part.split == "row":
            if parameter == _PER_INPUT:
                return np.concatenate(pieces)
            return np.concatenate(pieces, axis=1) if first.ndim > 1 else first
        if parameter == _PER_INPUT:
            return first
        rows = []
        for block in place.part.blocks:
            where = self.layout.block_slice(place.part, block)
            where = slice(where.start // 2, where.stop // 2) if packed else where
            rows += [piece[where] for piece in pieces[:: self.layout.copies(block)]]
        return np.concatenate(rows)

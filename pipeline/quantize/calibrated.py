"""Reads a Calibration directory; core/artifacts.py says what lies in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.schema import Format
from pipeline.quantize.checkpoint_reader import read_json
from pipeline.quantize.settle import LayerState
from pipeline.quantize.tensor_files import TensorFiles

if TYPE_CHECKING:
    import torch


class CalibrationReader:
    """What a calibration found, tensor by tensor.

    Attributes:
        formats: quantized layer -> format, in no order that means anything.
        record: of the text that was fed.
    """

    def __init__(self, directory: Path) -> None:
        self.formats: Mapping[str, Format] = read_json(directory / "formats.json")
        self.record: Mapping[str, Any] = read_json(directory / "calibration.json")
        self._state = TensorFiles(directory, "state.safetensors")
        self._inputs = TensorFiles(directory, "inputs.safetensors")

    def layer(self, name: str) -> LayerState:
        """What was found for one quantized layer."""
        return LayerState(
            input_amax=self._tensor(f"{name}.input_amax"),
            pre_quant_scale=self._tensor(f"{name}.pre_quant_scale"),
            clip=self._tensor(f"{name}.clip"),
        )

    def cached_amax(self, name: str) -> torch.Tensor | None:
        """The largest |key| ('<attention>.k') or |value| ('<attention>.v'), [1]."""
        return self._tensor(f"{name}_amax")

    def rows(self, name: str) -> torch.Tensor:
        """Recorded rows of a layer's input, float32 [n, in]."""
        import torch

        return torch.from_numpy(np.array(self._inputs.floats(f"{name}.input")))

    def _tensor(self, name: str) -> torch.Tensor | None:
        import torch

        return torch.from_numpy(np.array(self._state.floats(name))) if name in self._state else None

"""Checkpoints made elsewhere that a target's runtime reads as they are: nothing is converted, every layer is decoded.

What is passed on is the checkpoint's own files. The proof is that each quantized layer has a meaning (decodes to
finite numbers with positive scales, by the readers of this package), and with `verify.reference` what the decoded
model predicts beside the 16-bit one. What the runtime makes of the files is not run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeline.config.formats import DType
from pipeline.config.schema import Format
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.host.files import link_or_copy
from pipeline.quantize.checkpoint_reader import CheckpointFormat, read_json
from pipeline.quantize.checks import Check, rule
from pipeline.quantize.export import write_json
from pipeline.quantize.foreign.convert import Made
from pipeline.quantize.foreign.linear import ForeignLinear
from pipeline.quantize.foreign.reader import ForeignReader, open_layout, read_foreign
from pipeline.quantize.reference import LinearFormat
from pipeline.quantize.structure import linear_modules

_FORMAT_OF_ELEMENT: Final[Mapping[str, Format]] = {"int4": "int4_wo", "int8": "int8_wo", "e4m3": "fp8"}
# Code that a checkpoint brings is never passed on; weights in other forms than safetensors neither.
_PASSED: Final = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def recognise(directory: Path) -> Made:
    """Say what a checkpoint is, for a runtime that reads its layout; from config.json, the headers and one layer.

    Raises:
        ConfigError: a method or variant that is not read, by name.
        IntegrityError: a tensor is missing or does not fit.
    """
    reader = read_foreign(directory)
    layer = reader.foreign_linear(reader.quantized_modules()[0])
    format_ = _FORMAT_OF_ELEMENT[layer.element]
    if layer.smoothed:
        format_ = "int4_awq"
    elif layer.element == "int8" and layer.input_scale is not None:
        format_ = "int8_sq"
    dtype: DType = "bfloat16" if reader.dtype == "bfloat16" else "float16"
    groups = layer.element == "int4" and layer.shape[1] % layer.scales.shape[1] == 0
    return Made(
        method=reader.method,
        format=format_,
        group_size=layer.group_size if groups else None,
        dtype=dtype,
        layout=reader.layout,
        passed_on=True,
    )


def pass_on(source: SourceCheckpoint, made: Made, *, out: Path, progress: Progress) -> None:
    """Write a QuantizedCheckpoint directory to `out` whose hf/ holds the checkpoint's own files."""
    from safetensors.torch import save_file

    reader = read_foreign(source.path)
    progress.note(f"pass {reader.method} on as it is: the target's runtime reads this layout")
    hf = out / "hf"
    hf.mkdir(parents=True)
    for file in sorted({path for pattern in _PASSED for path in source.path.glob(pattern)}):
        link_or_copy(file, hf / file.name)
    quantized = reader.quantized_modules()
    excluded = [name for name in linear_modules(reader) if name not in set(quantized)]
    elsewhere = {
        "method": reader.method,
        "layout": made.layout,
        "quantization_config": read_json(source.path / "config.json")["quantization_config"],
    }
    record: dict[str, Any] = {
        "format": made.format,
        "group_size": made.group_size,
        "kv_cache": "auto",
        "kv_cache_scales": False,
        "export": "hf",
        "dtype": made.dtype,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "exclude": excluded,
        "quantized_layers": list(quantized),
        "excluded_layers": excluded,
        "folded": {},
        "norm_offset": 0.0,
        "passed_on": True,
        "made_elsewhere": elsewhere,
        "versions": {"trtpipe": version("trtpipe")},
    }
    write_json(out / "quantization.json", record)
    write_json(out / "calibration.json", {"source": None, "sequences": 0, "made_elsewhere": elsewhere})
    save_file({}, out / "probes.safetensors")


class PassedOnReader(ForeignReader):
    """A checkpoint that was passed on, as the readers of our own layouts look to `verify`."""

    def __init__(self, artifact: Path) -> None:
        config, layout = open_layout(artifact / "hf")
        super().__init__(artifact / "hf", config, layout)
        record = read_json(artifact / "quantization.json")
        self.name: str = record["format"]
        self._of_layers: LinearFormat = record["format"]
        self.format: CheckpointFormat = self._of_layers
        self.group_size: int | None = record["group_size"]
        self.excluded: tuple[str, ...] = tuple(record["exclude"])
        self.kv_cache_algorithm: str | None = None

    def format_of(self, module: str) -> LinearFormat:
        """How a layer computes; one format is for all that are quantized."""
        return "float" if module in self.excluded else self._of_layers


def check_passed_on(source: ForeignReader, reader: PassedOnReader, progress: Progress) -> list[Check]:
    """Every quantized layer decodes, and to what the source's does."""
    return rule("weight.decodes", _undecodable(source, reader, progress))


def _undecodable(source: ForeignReader, reader: PassedOnReader, progress: Progress) -> Iterator[tuple[str, str, str]]:
    modules = reader.quantized_modules()
    if modules != source.quantized_modules():
        yield "", "other layers are quantized than in the source", "files are missing, or changed since"
    with progress.track("decode layers", len(modules), "layers") as advance:
        for module in modules:
            layer = reader.foreign_linear(module)
            problem = _unsound(layer)
            if problem:
                yield module, problem, "corrupted scale"
            elif not np.array_equal(layer.codes, source.foreign_linear(module).codes):
                yield module, "other codes than in the source", "changed since"
            advance(1)


def _unsound(layer: ForeignLinear) -> str:
    bad = int(np.count_nonzero(~(np.isfinite(layer.scales) & (layer.scales != 0))))
    if bad:
        return f"{bad} of {layer.scales.size} scales are 0 or not finite"
    if not bool(np.isfinite(layer.weight()).all()):
        return "weights decode to numbers that are not finite"
    return ""

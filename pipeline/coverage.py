"""What becomes of every format and every quantized source on every target, and why.

Nothing is decided here. Formats that are made and layouts that are passed on are asked from config/legality.py, what
is converted from quantize/foreign/convert.py too, with one small layer of each layout as its reader would give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Final, Literal, get_args

import numpy as np

from pipeline.config import legality
from pipeline.config.deployment import Gpu, TargetName
from pipeline.config.elsewhere import CONVERTED
from pipeline.config.schema import BuildConfig, LayerFormat
from pipeline.quantize.foreign.convert import format_of, obstacle
from pipeline.quantize.foreign.linear import BITS, Element, ForeignLinear, consecutive
from pipeline.quantize.formats import Export

Verdict = Literal["made", "converted", "passed on", "refused"]
HEADER: Final = ("source", "format", "target", "verdict", "why")
_SIXTEEN_BIT: Final = "16-bit checkpoint"
_ROWS, _COLUMNS, _GROUP = 256, 256, 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """One source in one format on one target.

    Attributes:
        source: what the user has.
        format: quantization.format, or the layout that the source has.
        target: engine.target.
        verdict: what becomes of it.
        why: the reason of a refusal with what to write instead; else what is done, "" where nothing is to be said.
    """

    source: str
    format: str
    target: str
    verdict: Verdict
    why: str

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of HEADER."""
        return (self.source, self.format, self.target, self.verdict, self.why or "-")

    def document(self) -> dict[str, Any]:
        """The row as JSON."""
        return asdict(self)


def rows(gpu: Gpu = "H100") -> list[Row]:
    """Every format of a 16-bit source and every layout of other tools, on every target; GPU targets on `gpu`."""
    return [*_of_16_bit(gpu), *_made_elsewhere(gpu)]


def _of_16_bit(gpu: Gpu) -> Iterator[Row]:
    for form in get_args(LayerFormat):
        for target in get_args(TargetName):
            why = _refusal(target, gpu, form)
            yield Row(source=_SIXTEEN_BIT, format=form, target=target, verdict="refused" if why else "made", why=why)


def _made_elsewhere(gpu: Gpu) -> Iterator[Row]:
    for layout, (source, layer) in layouts().items():
        for target in get_args(TargetName):
            export = CONVERTED.get(target)
            if export is None:
                why = _refusal(target, gpu, "bf16", layout=layout)
                verdict: Verdict = "refused" if why else "passed on"
            else:
                why = obstacle(layer, export=export) or _refusal(target, gpu, format_of(layer, export)[0])
                verdict = "refused" if why else "converted"
                why = why or _taken(layer, export)
            yield Row(source=source, format=layout, target=target, verdict=verdict, why=why)


def _refusal(target: str, gpu: Gpu, form: str, *, layout: str | None = None) -> str:
    """Why the legality table refuses a format, or a layout that would be passed on; empty where it does not."""
    problems = legality.check(_config(target, gpu, form), None, layout=layout)
    return " ".join(f"{problem.message} {problem.hint}" for problem in problems if problem.severity == "error")


def _taken(layer: ForeignLinear, export: Export) -> str:
    """What of a convertible layer is not computed as its maker meant it, or not of every such checkpoint."""
    if export == "trtllm":
        int4, fp8 = "where no weight has a zero point", "where q, k and v have one scale; most tools give each its own"
        return {"int4": int4, "e4m3": fp8}.get(layer.element, "")
    rounded_at_run_time = layer.dynamic_activations and layer.input_scale is None
    return "weights only: its activations are not rounded at run time" if rounded_at_run_time else ""


def _config(target: str, gpu: Gpu, form: str) -> BuildConfig:
    return BuildConfig.model_validate(
        {
            "name": "coverage",
            "source": {"path": "."},
            "quantization": {"format": form},
            "engine": {"target": target, "gpu": gpu, "dtype": "float16" if form == "fp16" else "bfloat16"},
        }
    )


@cache
def layouts() -> Mapping[str, tuple[str, ForeignLinear]]:
    """Layouts of other tools that are read: kind (legality.toml's [[passed_on]]) -> who makes it, and a layer of it."""
    int4, int8 = _integers("int4", _GROUP), _integers("int8", _COLUMNS)
    mixed = replace(int4, group_of_input=int4.group_of_input[::-1].copy())
    tensor, channel, block = _e4m3(1, 1, _ROWS), _e4m3(_ROWS, 1, 1), _e4m3(2, 2, 128)
    llmc = "compressed-tensors"
    return {
        "awq": ("AutoAWQ gemm", int4),
        "gptq int4": ("GPTQ", int4),
        "gptq int4 act-order": ("GPTQ with act-order", mixed),
        "gptq int8": ("GPTQ", int8),
        "pack-quantized int4 group 16 bit": (llmc, int4),
        "pack-quantized int8 channel 16 bit": (llmc, int8),
        "pack-quantized int8 group 16 bit": (llmc, _integers("int8", _GROUP)),
        "int-quantized int8 channel static": (llmc, _static(int8)),
        "int-quantized int8 channel dynamic": (llmc, _dynamic(int8)),
        "int-quantized int8 channel 16 bit": (llmc, int8),
        "float-quantized e4m3 tensor static": (llmc, _static(tensor)),
        "float-quantized e4m3 channel dynamic": (llmc, _dynamic(channel)),
        "float-quantized e4m3 block dynamic": (llmc, _dynamic(block)),
        "fp8 tensor static": ("FP8 per tensor", _static(tensor)),
        "fp8 tensor dynamic": ("FP8 per tensor", _dynamic(tensor)),
        "fp8 block dynamic": ("FP8 in blocks (DeepSeek)", _dynamic(block)),
        "modelopt FP8": ("ModelOpt unified", _static(tensor)),
        "modelopt W4A16_AWQ": ("ModelOpt unified", replace(int4, smoothed=True)),
        "modelopt W8A8_SQ_PER_CHANNEL": ("ModelOpt unified", _static(int8)),
    }


def _static(layer: ForeignLinear) -> ForeignLinear:
    return replace(layer, input_scale=0.02)


def _dynamic(layer: ForeignLinear) -> ForeignLinear:
    return replace(layer, dynamic_activations=True)


def _integers(element: Element, group_size: int) -> ForeignLinear:
    scales = np.ones((_ROWS, _COLUMNS // group_size), np.float32)
    middle = 2 ** (BITS[element] - 1)
    return ForeignLinear(
        element=element,
        codes=np.full((_ROWS, _COLUMNS), middle, np.uint8),
        scales=scales,
        zero_points=np.full(scales.shape, middle, np.int16),
        group_of_input=consecutive(_COLUMNS, group_size),
    )


def _e4m3(rows_of_scales: int, columns_of_scales: int, row_block: int) -> ForeignLinear:
    return ForeignLinear(
        element="e4m3",
        codes=np.zeros((_ROWS, _COLUMNS), np.uint8),
        scales=np.ones((rows_of_scales, columns_of_scales), np.float32),
        zero_points=None,
        group_of_input=consecutive(_COLUMNS, _COLUMNS // columns_of_scales),
        row_block=row_block,
    )

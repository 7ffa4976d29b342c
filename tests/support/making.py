"""Source in, quantized checkpoint out, as a build does it: calibrate where the format has something to find."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pipeline.config.schema import CalibrationConfig, QuantizationConfig
from pipeline.core.artifacts import Calibration, SourceCheckpoint
from pipeline.core.progress import Progress, Silent
from pipeline.quantize.formats import WantedCheckpoint, needs_text, stores_kv_scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema import Format


def make_calibration(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    text: CalibrationConfig,
    wanted: WantedCheckpoint,
    out: Path,
    *,
    formats: Mapping[str, Format] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Write a calibration directory; `formats` where the config does not say them."""
    from pipeline.quantize.calibrate import calibrate
    from pipeline.quantize.quantize import plan_formats

    calibrate(
        source,
        quantization,
        text,
        formats=plan_formats(source, quantization, wanted, formats=formats),
        kv_ranges=stores_kv_scales(quantization, export=wanted.export),
        out=out,
        progress=progress or Silent(),
    )
    return Calibration(path=out, digest="sha256:calibration")


def make_quantized(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    text: CalibrationConfig,
    wanted: WantedCheckpoint,
    out: Path,
    *,
    progress: Progress | None = None,
) -> None:
    """Write a quantized checkpoint directory."""
    from pipeline.quantize.quantize import plan_formats, quantize

    progress = progress or Silent()
    with TemporaryDirectory() as scratch:
        calibration = None
        if needs_text(quantization, export=wanted.export):
            calibration = make_calibration(
                source, quantization, text, wanted, Path(scratch) / "calibration", progress=progress
            )
        else:
            plan_formats(source, quantization, wanted)
        quantize(source, quantization, calibration, wanted, out=out, progress=progress)

"""What of a config and its files decides a step's bytes: so much of it is in the step's key, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoints.resolve import resolve
from pipeline.config.formats import AWQ, UNQUANTIZED, formats_of, has_groups
from pipeline.config.schema import BuildConfig, CalibrationConfig, SourceConfig
from pipeline.core.digest import FileHasher


def relevant_quantization(config: BuildConfig) -> dict[str, Any]:
    """Return only what the format reads, so that an unused knob does not requantize."""
    quantization = config.quantization.model_dump(mode="json")
    if config.quantization.format != "auto":
        del quantization["auto"]
    if not has_groups(config):
        del quantization["group_size"]
    forms = formats_of(config.quantization)
    if not set(forms).intersection(AWQ):
        del quantization["awq"]
    if "int8_sq" not in forms:
        del quantization["smoothquant_alpha"]
    if not config.quantization.overrides:
        del quantization["overrides"]
    return quantization


def calibration_identity(config: BuildConfig, hasher: FileHasher) -> Mapping[str, Any] | None:
    """The text that calibrates; None where nothing reads it."""
    if formats_of(config.quantization)[0] in UNQUANTIZED and config.quantization.kv_cache == "auto":
        return None
    return text_identity(config.calibration, hasher)


def text_identity(calibration: CalibrationConfig, hasher: FileHasher) -> Mapping[str, Any]:
    """The section with the content of its files in place of where they lie."""
    sets = [
        {
            "text": file_identity(one.path, hasher),
            "weight": one.weight,
            "name": one.file or (one.path and one.path.name),
        }
        for one in calibration.datasets
    ]
    # AWQ averages over passes, and a product may round otherwise in another batch, so the size of one counts.
    return calibration.model_dump(mode="json") | {
        "dataset": file_identity(calibration.dataset, hasher),
        "datasets": sets,
        "batch_size": calibration.sequences_per_pass,
    }


def reference_identity(directory: Path | None, hasher: FileHasher) -> str | None:
    """Digest of a checkpoint."""
    return None if directory is None else resolve(SourceConfig(path=directory), hasher).digest


def file_identity(path: Path | None, hasher: FileHasher) -> str | None:
    """Digest of a file."""
    return None if path is None else hasher.digest(path)

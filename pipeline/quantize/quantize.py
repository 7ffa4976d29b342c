"""Source checkpoint and its calibration in, quantized checkpoint out: read `quantize` top to bottom.

Decoder layers are loaded in float32, a few at a time: on a CPU that is also the fastest dtype, and it makes what is
packed equal to what was calibrated. No text is read here. The device is CUDA when one has room.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.config.schema import Format, QuantizationConfig
from pipeline.core.artifacts import Calibration, SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.quantize import export as writing
from pipeline.quantize.calibrated import CalibrationReader
from pipeline.quantize.formats import WantedCheckpoint, traits
from pipeline.quantize.job import Job, plan_job, refuse_splits
from pipeline.quantize.layered import LayeredModel
from pipeline.quantize.maker import Maker
from pipeline.quantize.pieces import Pieces, discard
from pipeline.quantize.settle import Settled
from pipeline.quantize.source_model import quiet_transformers


def plan_formats(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    wanted: WantedCheckpoint,
    *,
    formats: Mapping[str, Format] | None = None,
) -> dict[str, Format]:
    """The format of every layer that will be quantized, after refusing what could not be written at the end.

    Args:
        source: a Hugging Face directory.
        quantization: format, group size, KV cache, excludes.
        wanted: the checkpoint.
        formats: where they were chosen elsewhere.

    Raises:
        ConfigError: excludes, group size or architecture do not fit.
        BadSafetensors: weights are missing or have the wrong shape.
    """
    with quiet_transformers():
        model = LayeredModel.open(source.path)
        job = plan_job(model, source.path, quantization, wanted, formats=formats)
        refuse_splits(job)
    return dict(job.formats)


def quantize(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    calibration: Calibration | None,
    wanted: WantedCheckpoint,
    *,
    out: Path,
    progress: Progress,
    resume: Path | None = None,
) -> None:
    """Quantize `source` and write a QuantizedCheckpoint directory (core/artifacts.py) to `out`.

    Equal inputs give byte-identical files on one machine.

    Args:
        source: a Hugging Face directory with safetensors and tokenizer.json.
        quantization: group size, KV cache, excludes; the format where there is no calibration.
        calibration: of this model, or of the one whose weights it was trained from; None when nothing needs text.
        wanted: layout, ranks and 16-bit type.
        out: an existing or new directory.
        progress: told of choices and of each layer.
        resume: keeps finished layers; a later run goes on behind them.

    Raises:
        ConfigError: excludes, group size or architecture do not fit.
        BadSafetensors: weights are missing or have the wrong shape.
        ToolError: ModelOpt failed, or left a layer unquantized or uncalibrated.
    """
    found = None if calibration is None else CalibrationReader(calibration.path)
    with quiet_transformers():
        model = LayeredModel.open(source.path)
        job = plan_job(model, source.path, quantization, wanted, formats=None if found is None else found.formats)
        progress.note(f"quantize on {model.device}, layer by layer: {model.why}")
        if quantization.kv_cache == "int8" and not job.kv_scales:
            progress.note("kv_cache int8: the checkpoint carries no scales; the runtime finds its own")
        out.mkdir(parents=True, exist_ok=True)
        kept = Pieces(resume or out / "unfinished", durable=resume is not None)
        notes = Maker(job=job, found=found, kept=kept, progress=progress).make(out)
    if resume is None:
        discard(kept.directory)
    writing.write_json(out / "quantization.json", _describe(job, notes))
    record = {"source": None, "sequences": 0} if found is None else found.record
    writing.write_json(out / "calibration.json", record)


def _describe(job: Job, settled: Settled) -> dict[str, Any]:
    quantization, made = job.quantization, [traits(form, export=job.export) for form in job.kinds]
    searched = {"awq": quantization.awq} if any(form.grouped and form.smoothed for form in made) else {}
    mixed = {"formats": dict(job.made)} if len(job.kinds) > 1 else {}
    return (
        searched
        | mixed
        | {
            "format": "mixed" if mixed else job.kinds[0],
            "group_size": quantization.group_size if any(form.grouped for form in made) else None,
            "smoothquant_alpha": quantization.smoothquant_alpha if "int8_sq" in job.kinds else None,
            "kv_cache": quantization.kv_cache,
            "kv_cache_scales": job.kv_scales,
            "export": job.export,
            "dtype": job.dtype,
            "tensor_parallel_size": job.wanted.tensor_parallel_size,
            "pipeline_parallel_size": job.wanted.pipeline_parallel_size,
            "exclude": list(quantization.exclude),
            "quantized_layers": list(job.made),
            "excluded_layers": list(job.excluded),
            "folded": settled.folded_into,
            "norm_offset": settled.norm_offset,
            "versions": {name: version(name) for name in ("nvidia-modelopt", "torch", "transformers")},
        }
    )

"""Source checkpoint in, quantized checkpoint out: read `quantize` top to bottom.

The model is loaded and calibrated in float32 on any device: on a CPU that is also the fastest dtype, and
it makes what is packed equal to what was calibrated. The device is CUDA when one has room for the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config.schema import CalibrationConfig, QuantizationConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, Problem, ToolError
from pipeline.quantize import calibration as text
from pipeline.quantize import export as writing
from pipeline.quantize import modelopt, probes, trtllm_export
from pipeline.quantize.formats import (
    FormatTraits,
    check_group_size,
    layer_formats,
    needs_calibration,
    needs_text,
    quantizer_config,
    stores_kv_scales,
    traits,
)
from pipeline.quantize.source_model import load_model, quiet_transformers, read_config, read_layout
from pipeline.quantize.trtllm_config import Ranks
from pipeline.quantize.trtllm_layout import Family

if TYPE_CHECKING:
    from torch import nn

Export = Literal["hf", "trtllm"]
DType = Literal["bfloat16", "float16"]

_OWN_DTYPE: Mapping[str, DType] = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What one call of `quantize` was asked for, and which layers that concerns.

    `family` is the layout of a TensorRT-LLM checkpoint, None for the Hugging Face export. `selected` are the
    layers that end up quantized; for formats that the engine build rounds, not by ModelOpt.
    """

    source: Path
    quantization: QuantizationConfig
    export: Export
    dtype: DType
    ranks: Ranks
    config: Mapping[str, Any]
    family: Family | None
    selected: tuple[str, ...]
    excluded: tuple[str, ...]
    num_hidden_layers: int
    progress: Progress

    @property
    def quantized(self) -> tuple[str, ...]:
        """Layers that ModelOpt quantizes."""
        return self.selected if self.made.quantized else ()

    @property
    def made(self) -> FormatTraits:
        """What the format is in the layout that was asked for."""
        return traits(self.quantization.format, export=self.export)

    @property
    def target(self) -> trtllm_export.Target:
        """The TensorRT-LLM checkpoint that was asked for."""
        return trtllm_export.Target(
            source=self.source,
            config=self.config,
            quantization=self.quantization,
            ranks=self.ranks,
            dtype=self.dtype,
            selected=self.selected,
            excluded=self.excluded,
        )


def quantize(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig,
    *,
    export: Export,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    dtype: DType,
    out: Path,
    progress: Progress,
) -> None:
    """Quantize `source` and write a QuantizedCheckpoint directory (core/artifacts.py) to `out`.

    Equal inputs give byte-identical files on one machine.

    Args:
        source: a Hugging Face directory with safetensors and tokenizer.json.
        quantization: format, group size, KV cache, excludes.
        calibration: the text that observers see.
        export: "hf" writes hf/, "trtllm" writes trtllm/.
        tensor_parallel_size: ranks that share each layer (shards trtllm/; limits the group size).
        pipeline_parallel_size: groups of consecutive layers (shards trtllm/).
        dtype: of norms, embeddings and unquantized layers; the formats bf16 and fp16 have their own.
        out: an existing or new directory.
        progress: told of choices and of each calibration batch.

    Raises:
        ConfigError: excludes, group size, text or architecture do not fit.
        BadSafetensors: weights are missing or have the wrong shape.
        ToolError: ModelOpt failed, or left a layer unquantized or uncalibrated.
    """
    config = read_config(source.path)
    linears, modules = read_layout(config)
    formats = layer_formats(linears, modules, quantization)
    if len(set(formats.values())) > 1:
        raise ConfigError(
            "quantization.overrides: a checkpoint of several formats is not made yet",
            hint="Remove quantization.overrides.",
        )
    for only in set(formats.values()):
        quantization = quantization.model_copy(update={"format": only})
    selected = tuple(formats)
    _check(config, quantization, selected, export=export)
    job = _Job(
        source=source.path,
        quantization=quantization,
        export=export,
        dtype=_OWN_DTYPE.get(quantization.format, dtype),
        ranks=Ranks(tensor=tensor_parallel_size, pipeline=pipeline_parallel_size),
        config=config.to_dict(),
        family=None,
        selected=selected,
        excluded=tuple(name for name in linears if name not in selected),
        num_hidden_layers=config.num_hidden_layers,
        progress=progress,
    )
    if export == "trtllm":
        job = replace(job, family=trtllm_export.check_target(job.target))
    if job.made.grouped:
        check_group_size({name: linears[name] for name in selected}, quantization.group_size, tensor_parallel_size)
    rows = _draw(job, calibration)
    out.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        if job.family is not None and job.family.decoder is None:
            settled = _copy(job, out)
        else:
            settled = _make(job, rows, calibration.sequences_per_pass, out)
    writing.write_json(out / "quantization.json", _describe(job, settled))
    writing.write_json(out / "calibration.json", {"source": None, "sequences": 0} if rows is None else rows.record)


def _copy(job: _Job, out: Path) -> writing.Settled:
    """Write a 16-bit checkpoint of a family that ModelOpt does not export without TensorRT-LLM."""
    from safetensors.torch import save_file

    job.progress.note("export trtllm/ from the source's tensors: nothing is calibrated")
    trtllm_export.write_plain(job.target, out / "trtllm")
    _finish_trtllm(job, out / "trtllm")
    save_file({}, out / "probes.safetensors")
    return writing.Settled()


def _make(job: _Job, rows: text.TokenRows | None, batch_size: int, out: Path) -> writing.Settled:
    """Load, calibrate, record and write; one live model per call, because exporters change it."""
    # A norm that is stored as 1 + weight is rounded once, after the sum.
    shifted = job.family is not None and job.family.norm_offset != 0
    model = load_model(job.source, "float32" if rows is not None or shifted else job.dtype, job.progress)
    settled, inputs = writing.Settled(), {}
    if rows is not None:
        inputs = probes.capture_inputs(model, job.quantized, list(rows.rows[0]))
        settled = _calibrate(job, model, rows, batch_size)
    probes.record(model, inputs, settled.folded, out / "probes.safetensors")
    _export(job, model, out)
    return settled


def _check(config: Any, quantization: QuantizationConfig, selected: tuple[str, ...], *, export: Export) -> None:  # noqa: ANN401 - see read_config
    architecture = (config.architectures or ["unknown"])[0]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and traits(quantization.format, export=export).quantized:
        raise ConfigError(
            f"{architecture} has {experts} experts per layer; quantizing mixtures of experts is not supported",
            hint="Set quantization.format to bf16 or fp16.",
        )
    if export == "hf" and config.tie_word_embeddings and "lm_head" in selected:
        raise ConfigError(
            "lm_head shares its weight with the embedding (tie_word_embeddings), so it cannot be quantized alone",
            hint="Add 'lm_head' to quantization.exclude.",
        )


def _draw(job: _Job, calibration: CalibrationConfig) -> text.TokenRows | None:
    if job.quantization.kv_cache == "int8" and not stores_kv_scales(job.quantization, export=job.export):
        job.progress.note("kv_cache int8: the checkpoint carries no scales; the runtime finds its own")
    if not needs_text(job.quantization, export=job.export):
        return None
    wanted = calibration.num_samples if needs_calibration(job.quantization, export=job.export) else 1
    rows = text.sample(
        text.text_sets(calibration),
        job.source,
        num_samples=wanted,
        max_seq_len=calibration.max_seq_len,
        seed=calibration.seed,
    )
    if not needs_calibration(job.quantization, export=job.export):
        job.progress.note(f"{job.quantization.format}: nothing is calibrated; one sequence is recorded for the proof")
        return rows
    job.progress.note(f"calibration: {len(rows.rows)} sequences of {len(rows.rows[0])} tokens from {rows.origin}")
    for words in text.warnings(rows.record):
        job.progress.note(f"warning: {words}")
    return rows


def _calibrate(job: _Job, model: nn.Module, rows: text.TokenRows, batch_size: int) -> writing.Settled:
    import torch

    observed = needs_calibration(job.quantization, export=job.export)
    forward_loop = _forward_loop(job, rows, batch_size) if observed else None
    formats = dict.fromkeys(job.selected, job.quantization.format)
    config = quantizer_config(job.quantization, formats, export=job.export)
    modelopt.quantize_in_place(model, config, forward_loop)
    settled = writing.settle(
        model, job.quantization, export=job.export, dtype=getattr(torch, job.dtype), forward_loop=forward_loop
    )
    _check_quantizers(job, model)
    return settled


def _forward_loop(job: _Job, rows: text.TokenRows, batch_size: int) -> modelopt.ForwardLoop:
    """Feed every row once per call; ModelOpt calls it once or twice, according to the algorithm."""
    import torch

    batches = [rows.rows[start : start + batch_size] for start in range(0, len(rows.rows), batch_size)]
    head_observed = "lm_head" in job.quantized

    def run(model: nn.Module) -> None:
        # Guard: the head of a large vocabulary costs as much as several layers, for nothing when it is excluded.
        body: Any = model if head_observed else model.base_model
        device = next(model.parameters()).device
        with torch.no_grad(), job.progress.track("calibrate", len(rows.rows), "sequences") as advance:
            for batch in batches:
                body(torch.tensor(batch, device=device), use_cache=False)
                advance(len(batch))

    return run


def _check_quantizers(job: _Job, model: nn.Module) -> None:
    """Refuse a model in which a layer was silently left out, or an observer saw nothing."""
    import torch

    weights, inputs = modelopt.weight_quantizers(model), modelopt.input_quantizers(model)
    cache = modelopt.kv_quantizers(model)
    problems = [Problem(where=name, message="is not quantized.") for name in job.quantized if name not in weights]
    problems += [
        Problem(where=name, message="is quantized and should not be.")
        for name in sorted(weights.keys() - set(job.quantized))
    ]
    if job.made.static_activations:
        problems += [
            Problem(where=name, message="has no activation observer.") for name in job.quantized if name not in inputs
        ]
    else:
        inputs = {}  # weight-only: enabled for the pre-quant scale alone, and they hold no range
    expected = 2 * job.num_hidden_layers * stores_kv_scales(job.quantization, export=job.export)
    if len(cache) != expected:
        problems.append(Problem(where="kv_cache", message=f"{len(cache)} observers, {expected} expected."))
    observers = [(name, stage) for name, quantizer in weights.items() for stage in modelopt.stages(quantizer)]
    for name, quantizer in [*observers, *inputs.items(), *cache.items()]:
        if quantizer.amax is None:
            problems.append(Problem(where=name, message="saw no calibration data."))
        elif not torch.isfinite(quantizer.amax).all():
            problems.append(Problem(where=name, message="has a range that is not finite."))
        elif not (quantizer.amax > 0).all() and quantizer.amax.numel() == 1:
            problems.append(Problem(where=name, message="saw only zeros."))
    if problems:
        raise ToolError(
            f"ModelOpt {version('nvidia-modelopt')} did not quantize the model to '{job.quantization.format}' as asked",
            problems=problems[:20],
            hint="Use more calibration text, or exclude these layers (quantization.exclude).",
        )


def _export(job: _Job, model: nn.Module, out: Path) -> None:
    import torch

    dtype = getattr(torch, job.dtype)
    directory = out / job.export
    job.progress.note(f"export {job.export}/")
    if job.export == "hf":
        modelopt.export_hf(model, directory)
        writing.finish_hf(job.source, directory, dtype=dtype, smoothed=job.made.smoothed)
    else:
        decoder = job.family.decoder if job.family else None
        if decoder is None:
            raise TypeError("a family without an exporter is written by _copy")
        modelopt.export_trtllm(
            model,
            directory,
            decoder=decoder,
            dtype=dtype,
            tensor_parallel_size=job.ranks.tensor,
            pipeline_parallel_size=job.ranks.pipeline,
        )
        _finish_trtllm(job, directory)


def _finish_trtllm(job: _Job, directory: Path) -> None:
    if job.family is None:
        raise TypeError("a TensorRT-LLM checkpoint needs a layout")
    trtllm_export.finish(job.target, job.family, directory)
    if job.made.rounded_by_build:
        job.progress.note(
            f"{job.quantization.format}: the checkpoint holds 16-bit weights; trtllm-build rounds them on the GPU "
            "node, and what that costs in quality is not measured here"
        )


def _describe(job: _Job, settled: writing.Settled) -> dict[str, Any]:
    smoothed = {"awq": job.quantization.awq} if job.made.grouped and job.made.smoothed else {}
    return smoothed | {
        "format": job.quantization.format,
        "group_size": job.quantization.group_size if job.made.grouped else None,
        "smoothquant_alpha": job.quantization.smoothquant_alpha if job.quantization.format == "int8_sq" else None,
        "kv_cache": job.quantization.kv_cache,
        "kv_cache_scales": stores_kv_scales(job.quantization, export=job.export),
        "export": job.export,
        "dtype": job.dtype,
        "tensor_parallel_size": job.ranks.tensor,
        "pipeline_parallel_size": job.ranks.pipeline,
        "exclude": list(job.quantization.exclude),
        "quantized_layers": list(job.quantized),
        "excluded_layers": list(job.excluded),
        "folded": settled.folded_into,
        "norm_offset": settled.norm_offset,
        "versions": {name: version(name) for name in ("nvidia-modelopt", "torch", "transformers")},
    }

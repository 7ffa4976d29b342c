"""Source checkpoint and its calibration in, quantized checkpoint out: read `quantize` top to bottom.

Decoder layers are loaded in float32 one at a time: on a CPU that is also the fastest dtype, and it makes what is
packed equal to what was calibrated. A layer gets ModelOpt's quantizers and what the calibration found, is settled,
recorded and written by ModelOpt's exporter. No text is read here. The device is CUDA when one has room.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeline.config.rules import FORMATS_OF_EXPERTS, UNQUANTIZED
from pipeline.config.schema import Format, QuantizationConfig
from pipeline.core.artifacts import Calibration, SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, Problem, ToolError
from pipeline.quantize import export as writing
from pipeline.quantize import modelopt, probes, trtllm_export
from pipeline.quantize.calibrated import CalibrationReader
from pipeline.quantize.formats import (
    DType,
    Export,
    WantedCheckpoint,
    check_group_size,
    layer_formats,
    quantizer_config,
    stores_kv_scales,
    traits,
    whole_model_config,
)
from pipeline.quantize.layered import LayeredModel
from pipeline.quantize.pieces import Pieces, discard, join, write_shards
from pipeline.quantize.settle import Settled, find_shared_inputs, folds, refuse_split, settle
from pipeline.quantize.source_model import quiet_transformers
from pipeline.quantize.trtllm_config import Ranks
from pipeline.quantize.trtllm_layout import Family

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = dict[str, "torch.Tensor"]

SHARD_BYTES = 4_000_000_000
_OWN_DTYPE: Mapping[str, DType] = {"bf16": "bfloat16", "fp16": "float16"}
_SIXTEEN_BIT: Mapping[DType, Format] = {"bfloat16": "bf16", "float16": "fp16"}


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
        job = _plan(model, source.path, quantization, wanted, formats=formats)
        _refuse_splits(job)
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
        job = _plan(model, source.path, quantization, wanted, formats=None if found is None else found.formats)
        progress.note(f"quantize on {model.device}, layer by layer: {model.why}")
        if quantization.kv_cache == "int8" and not job.kv_scales:
            progress.note("kv_cache int8: the checkpoint carries no scales; the runtime finds its own")
        out.mkdir(parents=True, exist_ok=True)
        kept = Pieces(resume or out / "unfinished")
        notes = _Maker(job=job, found=found, kept=kept, progress=progress).make(out)
    if resume is None:
        discard(kept.directory)
    writing.write_json(out / "quantization.json", _describe(job, notes))
    record = {"source": None, "sequences": 0} if found is None else found.record
    writing.write_json(out / "calibration.json", record)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What one call of `quantize` was asked for, and which layers that concerns.

    `family` is the layout of a TensorRT-LLM checkpoint, None for the Hugging Face export. `formats` has every
    layer that ends up quantized, also those that the engine build rounds, not ModelOpt.
    """

    model: LayeredModel
    source: Path
    quantization: QuantizationConfig
    wanted: WantedCheckpoint
    dtype: DType
    formats: Mapping[str, Format]
    excluded: tuple[str, ...]
    family: Family | None

    @property
    def export(self) -> Export:
        """The layout."""
        return self.wanted.export

    @property
    def made(self) -> Mapping[str, Format]:
        """Layers that ModelOpt quantizes."""
        return {name: form for name, form in self.formats.items() if traits(form, export=self.export).quantized}

    @property
    def kv_scales(self) -> bool:
        """Whether the checkpoint carries scales of the KV cache."""
        return stores_kv_scales(self.quantization, export=self.export)

    @property
    def kinds(self) -> Sequence[Format]:
        """The formats that layers have, each once; the 16-bit one where none is quantized."""
        return tuple(dict.fromkeys(self.formats.values())) or (self.quantization.format,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The 16-bit type."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def target(self) -> trtllm_export.Target:
        """The TensorRT-LLM checkpoint that was asked for."""
        return trtllm_export.Target(
            source=self.source,
            config=self.model.config.to_dict(),
            quantization=self.quantization,
            ranks=Ranks(tensor=self.wanted.tensor_parallel_size, pipeline=self.wanted.pipeline_parallel_size),
            dtype=self.dtype,
            formats=self.formats,
            excluded=self.excluded,
        )


def _plan(
    model: LayeredModel,
    source: Path,
    quantization: QuantizationConfig,
    wanted: WantedCheckpoint,
    *,
    formats: Mapping[str, Format] | None,
) -> _Job:
    linears = model.linears
    chosen = layer_formats(linears, model.modules, quantization) if formats is None else formats
    ordered = {name: chosen[name] for name in linears if name in chosen}
    plain = quantization.format if quantization.format in UNQUANTIZED else _SIXTEEN_BIT[wanted.dtype]
    kinds = set(ordered.values()) or {plain}
    if len(kinds) == 1:  # whatever the overrides, the checkpoint is of that one format
        quantization = quantization.model_copy(update={"format": kinds.pop(), "overrides": ()})
    job = _Job(
        model=model,
        source=source,
        quantization=quantization,
        wanted=wanted,
        dtype=_OWN_DTYPE.get(quantization.format, wanted.dtype),
        formats=ordered,
        excluded=tuple(name for name in linears if name not in ordered),
        family=None,
    )
    _check(job)
    if wanted.export == "trtllm":
        job = replace(job, family=trtllm_export.check_target(job.target))
    grouped = {name: linears[name] for name, form in job.made.items() if traits(form, export=wanted.export).grouped}
    if grouped:
        check_group_size(grouped, quantization.group_size, wanted.tensor_parallel_size)
    return job


def _check(job: _Job) -> None:
    config = job.model.config
    architecture = (config.architectures or ["unknown"])[0]
    experts = {form for name, form in job.made.items() if ".experts." in name}
    refused = ", ".join(sorted(experts - set(FORMATS_OF_EXPERTS if job.export == "hf" else ())))
    if refused:
        raise ConfigError(
            f"{architecture} is a mixture of experts, and {refused} of experts is not supported",
            hint="Exclude '*.experts.*', or set quantization.format to bf16 or fp16"
            + (f", {' or '.join(FORMATS_OF_EXPERTS)}." if job.export == "hf" else "."),
        )
    outside = [name for name in job.made if not name.startswith(f"{job.model.layers}.") and name != job.model.head]
    if outside:
        raise ConfigError(
            f"{', '.join(outside)} of {architecture} lie outside the decoder layers and cannot be quantized",
            hint="Add them to quantization.exclude.",
        )
    if job.export == "hf" and config.tie_word_embeddings and job.model.head in job.formats:
        raise ConfigError(
            "lm_head shares its weight with the embedding (tie_word_embeddings), so it cannot be quantized alone",
            hint="Add 'lm_head' to quantization.exclude.",
        )


def _refuse_splits(job: _Job) -> None:
    """Refuse layers that share their input with unlike ones, by looking at one decoder layer of each kind."""
    seen: set[tuple[tuple[str, Format | None], ...]] = set()
    for index in range(job.model.count):
        prefix = f"{job.model.layer_name(index)}."
        names = [name for name in job.model.linears if name.startswith(prefix)]
        kind = tuple((name.removeprefix(prefix), job.formats.get(name)) for name in names)
        split = len({form for _name, form in kind}) > 1
        if split and kind not in seen and any(folds(form, export=job.export) for form in job.made.values()):
            with job.model.borrow(index) as live:
                refuse_split(find_shared_inputs(live), job.made, export=job.export)
        seen.add(kind)


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes the parts of a checkpoint, layer by layer, and joins them."""

    job: _Job
    found: CalibrationReader | None
    kept: Pieces
    progress: Progress

    def make(self, out: Path) -> Settled:
        """Write hf/ or trtllm/ and probes.safetensors; return where all pre-quant scales went."""
        model = self.job.model
        steps = [*range(model.count), *([-1] if model.head in self.job.made else [])]
        with self.progress.track("quantize", len(steps), "layers") as advance:
            for index in steps:
                if self.kept.notes(_probes(index)) is None:
                    self._layer(index)
                advance(1)
        settled = Settled()
        for index in steps:
            notes = json.loads((self.kept.notes(_probes(index)) or {})["settled"])
            settled.folded_into.update(notes["folded_into"])
            settled = replace(settled, norm_offset=max(settled.norm_offset, notes["norm_offset"]))
        self.progress.note(f"export {self.job.export}/")
        directory = out / self.job.export
        directory.mkdir(exist_ok=True)
        if self.job.family is None:
            self._finish_hf(directory)
        else:
            self._finish_trtllm(directory, self.job.family)
        join([self.kept.path(_probes(index)) for index in steps], out / "probes.safetensors")
        return settled

    def _layer(self, index: int) -> None:
        """Make one decoder layer, or the head (-1), and keep its parts; the probes come last and mark it done."""
        job, head = self.job, index < 0
        position = job.model.count - 1 if head else index
        mine = {
            name: form
            for name, form in job.made.items()
            if (name == job.model.head if head else job.model.inside(index, name))
        }
        kv_scales = job.kv_scales and not head
        settled = Settled()
        recorded: Tensors = {}
        if mine or kv_scales or (job.family is not None and job.family.decoder is not None):
            # A norm that is stored as 1 + weight is rounded once, after the sum.
            shifted = job.family is not None and job.family.norm_offset != 0
            dtype = "float32" if self.found is not None or shifted else job.dtype
            with job.model.borrow(position, dtype=dtype, head=head) as live:
                if mine or kv_scales:
                    settled, recorded = self._settle(live, mine, kv_scales=kv_scales)
                self._export(live, index)
        else:
            self._copy(index)
        notes = {"folded_into": settled.folded_into, "norm_offset": settled.norm_offset}
        self.kept.write(_probes(index), recorded, {"settled": json.dumps(notes, sort_keys=True)})

    def _settle(self, live: nn.Module, mine: Mapping[str, Format], *, kv_scales: bool) -> tuple[Settled, Tensors]:
        """Insert quantizers, give them what the calibration found, and record what they compute."""
        job, found = self.job, self.found
        if found is None:
            raise TypeError("a format that ModelOpt makes needs a calibration")
        groups = find_shared_inputs(live)
        modelopt.insert(live, quantizer_config(job.quantization, mine, kv_scales=kv_scales))
        states = {name: found.layer(name) for name in mine}
        settled = settle(live, mine, states, groups, export=job.export, dtype=job.torch_dtype)
        for name, quantizer in modelopt.kv_quantizers(live).items():
            amax = found.cached_amax(name)
            if amax is not None:
                quantizer.amax = amax.reshape(()).to(job.model.device)
        self._check_quantizers(live, mine, kv_scales=kv_scales)
        return settled, probes.record(live, {name: found.rows(name) for name in mine}, settled.folded)

    def _check_quantizers(self, live: nn.Module, mine: Mapping[str, Format], *, kv_scales: bool) -> None:
        """Refuse a layer in which something was silently left out, or has no range."""
        import torch

        weights, inputs = modelopt.weight_quantizers(live), modelopt.input_quantizers(live)
        cache = modelopt.kv_quantizers(live)
        problems = [Problem(where=name, message="is not quantized.") for name in mine if name not in weights]
        problems += [
            Problem(where=name, message="is quantized and should not be.") for name in weights if name not in mine
        ]
        static = {name for name, form in mine.items() if traits(form, export=self.job.export).static_activations}
        problems += [
            Problem(where=name, message="has no activation observer.") for name in static if name not in inputs
        ]
        if len(cache) != 2 * kv_scales:
            problems.append(Problem(where="kv_cache", message=f"{len(cache)} observers, {2 * kv_scales} expected."))
        observers = [(name, stage) for name, quantizer in weights.items() for stage in modelopt.stages(quantizer)]
        # Weight-only formats: enabled for the pre-quant scale alone, and they hold no range.
        ranged = {name: quantizer for name, quantizer in inputs.items() if name in static}
        for name, quantizer in [*observers, *ranged.items(), *cache.items()]:
            if quantizer.amax is None:
                problems.append(Problem(where=name, message="saw no calibration data."))
            elif not torch.isfinite(quantizer.amax).all():
                problems.append(Problem(where=name, message="has a range that is not finite."))
            elif not (quantizer.amax > 0).all() and quantizer.amax.numel() == 1:
                problems.append(Problem(where=name, message="saw only zeros."))
        if problems:
            raise ToolError(
                f"ModelOpt {version('nvidia-modelopt')} did not quantize the model as asked",
                problems=problems[:20],
                hint="Use more calibration text, or exclude these layers (quantization.exclude).",
            )

    def _export(self, live: nn.Module, index: int) -> None:
        """Write a live layer with ModelOpt and keep the tensors that are its own."""
        from safetensors.torch import load

        job = self.job
        with TemporaryDirectory(dir=self.kept.directory) as scratch:
            directory = Path(scratch)
            if job.family is None:
                modelopt.export_hf(live, directory)
                prefix = f"{job.model.head}." if index < 0 else f"{job.model.layer_name(index)}."
                tensors = load((directory / "model.safetensors").read_bytes())
                own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
                self.kept.write(_part(index), writing.rounded(own, job.torch_dtype))
                return
            ranks = job.wanted.tensor_parallel_size
            modelopt.export_trtllm(
                live,
                directory,
                decoder=str(job.family.decoder),
                dtype=job.torch_dtype,
                tensor_parallel_size=ranks,
                pipeline_parallel_size=1,
            )
            stored = f"transformer.layers.{index % (job.model.count // job.wanted.pipeline_parallel_size)}."
            for rank in range(ranks):
                tensors = load((directory / f"rank{rank}.safetensors").read_bytes())
                own = {
                    stored + name.removeprefix(_FIRST_LAYER): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(_FIRST_LAYER)
                }
                self.kept.write(_part(index, rank), own)

    def _copy(self, index: int) -> None:
        """Keep a layer that nothing is done to but rounding."""
        job = self.job
        names = [name for name in job.model.parameters if job.model.inside(index, name)]
        if job.family is None:
            self.kept.write(_part(index), {name: job.model.read(name, job.torch_dtype) for name in names})
            return
        layout = trtllm_export.layout_of(job.target)
        stage = index // (layout.layers // layout.pp)
        for number, rank in enumerate(layout.ranks(stage)):
            tensors = trtllm_export.plain_tensors(layout, job.model.files, names, rank=rank, dtype=job.torch_dtype)
            self.kept.write(_part(index, number), tensors)

    def _finish_hf(self, directory: Path) -> None:
        """Add what lies outside the decoder layers, in the model's order, and join everything."""
        job, parts = self.job, []
        for name in job.model.parameters:
            if name.startswith(f"{job.model.layers}."):
                part = _part(int(name.removeprefix(f"{job.model.layers}.").partition(".")[0]))
            elif name.startswith(f"{job.model.head}.") and job.model.head in job.made:
                part = _part(-1)
            else:
                part = f"plain-{name}"
                if self.kept.notes(part) is None:
                    self.kept.write(part, {name: job.model.read(name, job.torch_dtype)})
            if part not in parts:
                parts.append(part)
        quantizers = None
        if job.made or job.kv_scales:
            quantizers = whole_model_config(job.quantization, job.made, job.model.linears, kv_scales=job.kv_scales)
        writing.describe_hf(
            job.model.skeleton, quantizers, job.source, directory, dtype=job.torch_dtype, formats=job.made
        )
        write_shards([self.kept.path(part) for part in parts], directory, limit=SHARD_BYTES)

    def _finish_trtllm(self, directory: Path, family: Family) -> None:
        job, layout = self.job, trtllm_export.layout_of(self.job.target)
        names = [name for name in job.model.parameters if not name.startswith(f"{job.model.layers}.")]
        names += [name for name in (f"{job.model.head}.weight",) if name not in names]
        per_stage = layout.layers // layout.pp
        for stage in range(layout.pp):
            for number, rank in enumerate(layout.ranks(stage)):
                self.kept.write(
                    f"plain-{rank}",
                    trtllm_export.plain_tensors(layout, job.model.files, names, rank=rank, dtype=job.torch_dtype),
                )
                layers = range(stage * per_stage, (stage + 1) * per_stage)
                parts = [f"plain-{rank}", *(_part(index, number) for index in layers)]
                join([self.kept.path(part) for part in parts], directory / f"rank{rank}.safetensors")
        producer = {"name": "modelopt", "version": version("nvidia-modelopt")} if family.decoder else None
        trtllm_export.describe(job.target, directory, producer)
        for form in job.kinds:
            if not traits(form, export=job.export).rounded_by_build:
                continue
            self.progress.note(
                f"{form}: the checkpoint holds 16-bit weights; trtllm-build rounds them on the GPU "
                "node, and what that costs in quality is not measured here"
            )


_FIRST_LAYER = "transformer.layers.0."


def _part(index: int, rank: int | None = None) -> str:
    name = "head" if index < 0 else f"layer-{index:05d}"
    return name if rank is None else f"{name}-{rank}"


def _probes(index: int) -> str:
    return f"probes-{_part(index)}"


def _describe(job: _Job, settled: Settled) -> dict[str, Any]:
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

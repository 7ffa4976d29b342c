"""What one call of `quantize` is to make: which layers in which formats, and what cannot be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.formats import DTYPE_OF, FORMATS_OF_EXPERTS, SIXTEEN_BIT, UNQUANTIZED, DType
from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.quantize import trtllm_export
from pipeline.quantize.formats import (
    Export,
    WantedCheckpoint,
    check_group_size,
    layer_formats,
    stores_kv_scales,
    traits,
)
from pipeline.quantize.layered import LayeredModel
from pipeline.quantize.settle import find_shared_inputs, folds, refuse_split
from pipeline.quantize.trtllm_config import Ranks
from pipeline.quantize.trtllm_layout import Family

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Job:
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


def plan_job(
    model: LayeredModel,
    source: Path,
    quantization: QuantizationConfig,
    wanted: WantedCheckpoint,
    *,
    formats: Mapping[str, Format] | None,
) -> Job:
    """Put together what is to be made.

    Args:
        model: the source.
        source: its directory.
        quantization: format, group size, KV cache, excludes.
        wanted: the checkpoint.
        formats: where they were chosen elsewhere.

    Raises:
        ConfigError: excludes, group size or architecture do not fit.
    """
    linears = model.linears
    chosen = layer_formats(linears, model.modules, quantization) if formats is None else formats
    ordered = {name: chosen[name] for name in linears if name in chosen}
    plain = quantization.format if quantization.format in UNQUANTIZED else SIXTEEN_BIT[wanted.dtype]
    kinds = set(ordered.values()) or {plain}
    if len(kinds) == 1:  # whatever the overrides, the checkpoint is of that one format
        quantization = quantization.model_copy(update={"format": kinds.pop(), "overrides": ()})
    job = Job(
        model=model,
        source=source,
        quantization=quantization,
        wanted=wanted,
        dtype=DTYPE_OF.get(quantization.format, wanted.dtype),
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


def _check(job: Job) -> None:
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


def refuse_splits(job: Job) -> None:
    """Refuse layers that share their input with unlike ones, by looking at one decoder layer of each kind.

    Raises:
        ConfigError: names them.
    """
    seen: set[tuple[tuple[str, Format | None], ...]] = set()
    for index in range(job.model.count):
        kind = job.model.kind(index, job.formats)
        split = len({form for _name, form in kind}) > 1
        if split and kind not in seen and any(folds(form, export=job.export) for form in job.made.values()):
            with job.model.borrow([index]) as live:
                refuse_split(find_shared_inputs(live), job.made, export=job.export)
        seen.add(kind)

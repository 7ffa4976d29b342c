"""The parts of a quantized checkpoint: made of a few decoder layers at a time, then joined.

A group of layers is loaded, gets ModelOpt's quantizers and what the calibration found, is settled, recorded and
written by ModelOpt's exporter; each layer's tensors become a part of their own, so that a later run goes on behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pipeline.config.schema import Format
from pipeline.core.progress import Progress
from pipeline.errors import Problem, ToolError
from pipeline.quantize import export as writing
from pipeline.quantize import modelopt, probes, trtllm_export
from pipeline.quantize.calibrated import CalibrationReader
from pipeline.quantize.formats import by_glob, quantizer_config, traits, whole_model_config
from pipeline.quantize.job import Job
from pipeline.quantize.pieces import Pieces, join, write_shards
from pipeline.quantize.settle import Settled, find_shared_inputs, settle
from pipeline.quantize.source_model import linear_layers
from pipeline.quantize.trtllm_layout import Family

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = dict[str, "torch.Tensor"]

SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes the parts of a checkpoint, layer by layer, and joins them."""

    job: Job
    found: CalibrationReader | None
    kept: Pieces
    progress: Progress

    def make(self, out: Path) -> Settled:
        """Write hf/ or trtllm/ and probes.safetensors; return where all pre-quant scales went."""
        model = self.job.model
        steps = [*range(model.count), *([-1] if model.head in self.job.made else [])]
        with self.progress.track("quantize", len(steps), "layers") as advance:
            missing = [index for index in steps if self.kept.notes(_probes(index)) is None]
            advance(len(steps) - len(missing))
            for indices in model.groups([index for index in missing if index >= 0], self._alike):
                self._layers(indices, advance)
            if -1 in missing:
                self._layers([-1], advance)
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

    def _alike(self, index: int) -> Hashable:
        """What is equal for neighbouring layers that can be made as one model."""
        return self.job.model.kind(index, self.job.formats)

    def _layers(self, indices: Sequence[int], advance: Callable[[int], None]) -> None:
        """Make decoder layers that are alike, or the head (-1), and keep their parts.

        The probes of a layer come last and mark it done.
        """
        job, head = self.job, indices == [-1]
        inside = [self._prefix(index) for index in indices]
        mine = {name: form for name, form in job.made.items() if f"{name}.".startswith(tuple(inside))}
        kv_scales = job.kv_scales and not head
        settled = Settled()
        recorded: Tensors = {}
        parts: dict[str, Tensors] = {}
        if mine or kv_scales or (job.family is not None and job.family.decoder is not None):
            # A norm that is stored as 1 + weight is rounded once, after the sum.
            shifted = job.family is not None and job.family.norm_offset != 0
            dtype = "float32" if self.found is not None or shifted else job.dtype
            with job.model.borrow([job.model.count - 1] if head else indices, dtype=dtype, head=head) as live:
                if mine or kv_scales:
                    settled, recorded = self._settle(live, indices, mine, kv_scales=kv_scales)
                parts = self._export(live, indices)
        for index, prefix in zip(indices, inside, strict=True):
            own = {name: tensors for name, tensors in parts.items() if name.startswith(_part(index))}
            for name, tensors in (own or self._copy(index)).items():
                self.kept.write(name, tensors)
            folded = {name: norm for name, norm in settled.folded_into.items() if name.startswith(prefix)}
            notes = {"folded_into": folded, "norm_offset": settled.norm_offset}
            probed = {name: tensor for name, tensor in recorded.items() if name.startswith(prefix)}
            self.kept.write(_probes(index), probed, {"settled": json.dumps(notes, sort_keys=True)})
            advance(1)

    def _settle(
        self, live: nn.Module, indices: Sequence[int], mine: Mapping[str, Format], *, kv_scales: bool
    ) -> tuple[Settled, Tensors]:
        """Insert quantizers, give them what the calibration found, and record what they compute."""
        job, found = self.job, self.found
        if found is None:
            raise TypeError("a format that ModelOpt makes needs a calibration")
        groups = find_shared_inputs(live)
        modelopt.insert(
            live, quantizer_config(job.quantization, by_glob(mine, linear_layers(live)), kv_scales=kv_scales)
        )
        states = {name: found.layer(name) for name in mine}
        settled = settle(live, mine, states, groups, export=job.export, dtype=job.torch_dtype)
        for name, quantizer in modelopt.kv_quantizers(live).items():
            amax = found.cached_amax(name)
            if amax is not None:
                quantizer.amax = amax.reshape(()).to(job.model.device)
        self._check_quantizers(live, mine, caches=len(indices) * kv_scales)
        return settled, probes.record(live, {name: found.rows(name) for name in mine}, settled.folded)

    def _check_quantizers(self, live: nn.Module, mine: Mapping[str, Format], *, caches: int) -> None:
        """Refuse layers in which something was silently left out, or has no range."""
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
        if len(cache) != 2 * caches:
            problems.append(Problem(where="kv_cache", message=f"{len(cache)} observers, {2 * caches} expected."))
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

    def _export(self, live: nn.Module, indices: Sequence[int]) -> dict[str, Tensors]:
        """Write live layers with ModelOpt and return the tensors of each one's parts."""
        from safetensors.torch import load

        job = self.job
        with TemporaryDirectory(dir=self.kept.directory) as scratch:
            directory = Path(scratch)
            if job.family is None:
                modelopt.export_hf(live, directory)
                tensors = load((directory / "model.safetensors").read_bytes())
                return {
                    _part(index): writing.rounded(_own(tensors, prefix), job.torch_dtype)
                    for index, prefix in ((index, self._prefix(index)) for index in indices)
                }
            ranks = job.wanted.tensor_parallel_size
            modelopt.export_trtllm(
                live,
                directory,
                decoder=str(job.family.decoder),
                dtype=job.torch_dtype,
                tensor_parallel_size=ranks,
                pipeline_parallel_size=1,
            )
            parts: dict[str, Tensors] = {}
            for rank in range(ranks):
                tensors = load((directory / f"rank{rank}.safetensors").read_bytes())
                for position, index in enumerate(indices):
                    written = _LAYER.format(position)
                    stored = _LAYER.format(index % (job.model.count // job.wanted.pipeline_parallel_size))
                    parts[_part(index, rank)] = {
                        stored + name.removeprefix(written): tensor for name, tensor in _own(tensors, written).items()
                    }
            return parts

    def _prefix(self, index: int) -> str:
        """What the names of everything in a decoder layer, or the head (-1), begin with."""
        return f"{self.job.model.head if index < 0 else self.job.model.layer_name(index)}."

    def _copy(self, index: int) -> dict[str, Tensors]:
        """The parts of a layer that nothing is done to but rounding."""
        job = self.job
        names = [name for name in job.model.parameters if job.model.inside(index, name)]
        if job.family is None:
            return {_part(index): {name: job.model.read(name, job.torch_dtype) for name in names}}
        layout = trtllm_export.layout_of(job.target)
        return {
            _part(index, number): trtllm_export.plain_tensors(
                layout, job.model.files, names, rank=rank, dtype=job.torch_dtype
            )
            for number, rank in enumerate(layout.ranks(index // (layout.layers // layout.pp)))
        }

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


_LAYER = "transformer.layers.{}."  # of TensorRT-LLM


def _own(tensors: Tensors, prefix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _part(index: int, rank: int | None = None) -> str:
    name = "head" if index < 0 else f"layer-{index:05d}"
    return name if rank is None else f"{name}-{rank}"


def _probes(index: int) -> str:
    return f"probes-{_part(index)}"

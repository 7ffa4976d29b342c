"""A checkpoint quantized elsewhere in the files of TensorRT-LLM's ranks, code for code: nothing is rounded again.

    symmetric int4 in consecutive groups               W4A16_AWQ
    symmetric int8, one scale per output, static       W8A8_SQ_PER_CHANNEL
    FP8, one scale per weight, static activations      FP8

The first two have a pre-quant scale in this layout, which is one wherever the tool has none. Layers that lie in one
stored tensor (q, k and v) share what it has one of: where theirs differ, they are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import Problem
from pipeline.quantize.foreign.linear import ForeignLinear
from pipeline.quantize.foreign.reader import ForeignReader
from pipeline.quantize.formats import WantedCheckpoint, check_group_size
from pipeline.quantize.pieces import Pieces, discard, join
from pipeline.quantize.reference import pack_int4
from pipeline.quantize.source_model import read_config
from pipeline.quantize.structure import linear_modules
from pipeline.quantize.tensor_files import TensorFiles
from pipeline.quantize.trtllm_config import Ranks
from pipeline.quantize.trtllm_export import (
    Target,
    assemble,
    check_target,
    describe,
    layout_of,
    plain_tensors,
    stored_groups,
)
from pipeline.quantize.trtllm_layout import Layout, Place

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Members = Sequence[tuple[str, Place]]

_OUTSIDE = "outside"  # the part of a rank that is in no decoder layer; the others are called as their names begin


def engine_obstacle(layer: ForeignLinear) -> str:
    """Why an engine's checkpoint cannot hold a layer that another layout can; empty where it can."""
    found = {
        "is FP8 with several scales; an engine's checkpoint has one per weight.": layer.element == "e4m3"
        and layer.scales.size != 1,
        "has zero points; int4 weights of an engine's checkpoint have none.": not layer.symmetric,
        "has groups out of order (act-order); those of an engine's checkpoint are consecutive.": layer.element == "int4"
        and not layer.ordered,
        "is int8 with 16-bit activations; trtllm-build takes 16-bit weights and rounds them itself.": layer.element
        == "int8"
        and layer.input_scale is None,
    }
    return next((words for words, holds in found.items() if holds), "")


def target_of(reader: ForeignReader, form: Format, group_size: int | None, wanted: WantedCheckpoint) -> Target:
    """The TensorRT-LLM checkpoint that is to be written.

    Raises:
        ConfigError: architecture, ranks or group size do not fit.
    """
    linears, quantized = linear_modules(reader), reader.quantized_modules()
    groups = {} if group_size is None else {"group_size": group_size}
    if group_size is not None:
        check_group_size({name: linears[name] for name in quantized}, group_size, wanted.tensor_parallel_size)
    target = Target(
        source=reader.directory,
        config=read_config(reader.directory).to_dict(),
        quantization=QuantizationConfig.model_validate({"format": form, **groups}),
        ranks=Ranks(tensor=wanted.tensor_parallel_size, pipeline=wanted.pipeline_parallel_size),
        dtype=wanted.dtype,
        formats=dict.fromkeys(quantized, form),
        excluded=tuple(name for name in linears if name not in set(quantized)),
    )
    check_target(target)
    return target


def write_ranks(
    reader: ForeignReader,
    target: Target,
    layer: Callable[[str], ForeignLinear | Problem],
    directory: Path,
    advance: Callable[[int], None],
) -> list[Problem]:
    """Write config.json, the tokenizer and rank<r>.safetensors; return what could not be written.

    Args:
        reader: the checkpoint made elsewhere.
        target: from `target_of`.
        layer: reads one quantized layer, or says why it does not fit.
        directory: trtllm/, empty.
        advance: told of quantized layers.
    """
    layout = layout_of(target)
    kept = Pieces(directory / "unfinished", durable=False)
    files = TensorFiles(reader.directory)
    cutter = _Cutter(reader=reader, files=files, layout=layout, dtype=target.dtype, layer=layer, kept=kept)
    per_stage = layout.layers // layout.pp
    problems: list[Problem] = []
    for stage in range(layout.pp):
        parts = [_OUTSIDE, *(f"model.layers.{stage * per_stage + index}." for index in range(per_stage))]
        for part in parts:
            problems += cutter.write(part, stage)
            advance(len(cutter.modules(part)))
        if not problems:
            for rank in layout.ranks(stage):
                join([kept.path(f"{rank}-{part}") for part in parts], directory / f"rank{rank}.safetensors")
    discard(kept.directory)
    if not problems:
        describe(target, directory, None)
    return problems


@dataclass(frozen=True, kw_only=True)
class _Cutter:
    """Cuts a checkpoint made elsewhere for ranks, a decoder layer at a time."""

    reader: ForeignReader
    files: TensorFiles
    layout: Layout
    dtype: str
    layer: Callable[[str], ForeignLinear | Problem]
    kept: Pieces

    def modules(self, part: str) -> list[str]:
        """The quantized layers of a part."""
        return [name for name in self.reader.quantized_modules() if name.startswith(part)]

    def write(self, part: str, stage: int) -> list[Problem]:
        """Write a part for every tensor rank of a pipeline stage, or return why it cannot be."""
        import torch

        read = {f"{name}.weight": self.layer(name) for name in self.modules(part)}
        layers = {name: found for name, found in read.items() if isinstance(found, ForeignLinear)}
        groups = stored_groups(self.layout, list(layers), stage)
        problems = [found for found in read.values() if isinstance(found, Problem)]
        problems += [problem for members in groups.values() for problem in _unlike(members, layers)]
        if problems:
            return problems
        dtype = getattr(torch, self.dtype)
        for rank in self.layout.ranks(stage):
            tensors = plain_tensors(self.layout, self.files, self._plain(part), rank=rank, dtype=dtype)
            for stored, members in groups.items():
                linear = _stored_linear(self.layout, members, layers, dtype, rank % self.layout.tp)
                base = stored.removesuffix(".weight")
                tensors |= {f"{base}.{suffix}": tensor for suffix, tensor in linear.items()}
            self.kept.write(f"{rank}-{part}", tensors)
        return []

    def _plain(self, part: str) -> list[str]:
        """The parameters of a part that are not quantized; the head is one of them, tied or not."""
        plain = [name for name, info in self.reader.tensors.items() if info.dtype != "CODES"]
        if part != _OUTSIDE:
            return [name for name in plain if name.startswith(part)]
        return [name for name in dict.fromkeys([*plain, "lm_head.weight"]) if not name.startswith("model.layers.")]


def _unlike(members: Members, layers: Mapping[str, ForeignLinear]) -> Iterator[Problem]:
    """Layers of one stored tensor that differ in what it has one of."""
    linears = [layers[name] for name, _place in members]
    first = linears[0]
    one_of: dict[str, list[object]] = {
        "input scales": [linear.input_scale for linear in linears],
        "pre-quant scales": [_smoothing(linear).tobytes() for linear in linears],
        "weight scales": [linear.scales.tobytes() for linear in linears] if first.element == "e4m3" else [],
    }
    for what, values in one_of.items():
        if len(set(values)) > 1:
            where = ", ".join(name.removesuffix(".weight") for name, _place in members)
            message = f"have unlike {what}; in an engine's checkpoint they are one tensor, which has one."
            yield Problem(where=where, message=message)


def _smoothing(layer: ForeignLinear) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The pre-quant scale, float32 [in]."""
    return np.ones(layer.shape[1], np.float32) if layer.pre_quant_scale is None else layer.pre_quant_scale


def _stored_linear(
    layout: Layout, members: Members, layers: Mapping[str, ForeignLinear], dtype: torch.dtype, index: int
) -> Tensors:
    """The tensors of one stored layer on tensor rank `index`, without bias."""
    import torch

    first, split = layers[members[0][0]], members[0][1].part.split

    def cut(values: Callable[[ForeignLinear], np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> torch.Tensor:
        read = {name: torch.from_numpy(np.array(values(layers[name]))) for name, _place in members}
        return assemble(layout, read.__getitem__, members, index).contiguous()

    tensors: Tensors = {}
    if first.input_scale is not None:
        tensors["activation_scaling_factor"] = torch.tensor([first.input_scale])
    if first.element == "e4m3":
        tensors["weight"] = cut(lambda layer: layer.codes).view(torch.float8_e4m3fn)
        return tensors | {"weights_scaling_factor": torch.from_numpy(first.scales.reshape(1).copy())}
    codes = cut(ForeignLinear.signed)
    if first.element == "int4":
        tensors["weight"] = torch.from_numpy(pack_int4(codes.numpy())).view(torch.int8)
        tensors["weights_scaling_factor"] = cut(lambda layer: layer.scales)
    else:
        tensors["weight"] = codes
        tensors["weights_scaling_factor"] = cut(lambda layer: np.broadcast_to(layer.scales[:, 0], layer.shape[0]))
    smoothing = torch.from_numpy(_smoothing(first)).to(dtype)
    cuts = smoothing.chunk(layout.tp) if split == "row" else [smoothing] * layout.tp
    return tensors | {"prequant_scaling_factor": cuts[index].clone()}

"""Writes trtllm/: by ModelOpt's exporter where it can, tensor by tensor where a 16-bit copy is all there is to it.

ModelOpt refuses some families unless TensorRT-LLM is installed beside it. Their unquantized checkpoint is
renamed, cut and rounded source tensors, which is written here; their quantized one is made on the GPU node.
In both cases config.json comes from `trtllm_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import ConfigError, Problem
from pipeline.quantize.export import copy_tokenizer, write_json
from pipeline.quantize.formats import traits
from pipeline.quantize.tensor_files import TensorFiles
from pipeline.quantize.trtllm_config import Ranks, checkpoint_config, layer_config
from pipeline.quantize.trtllm_layout import FAMILIES, Family, Layout, Place, find_family

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a TensorRT-LLM checkpoint is made for.

    Attributes:
        source: the Hugging Face directory.
        config: its config with defaults filled in.
        quantization: format, KV cache, group size.
        ranks: what it is cut for.
        dtype: "bfloat16" or "float16".
        formats: format of each linear layer that is quantized, by Hugging Face name.
        excluded: the other linear layers.
    """

    source: Path
    config: Config
    quantization: QuantizationConfig
    ranks: Ranks
    dtype: str
    formats: Mapping[str, Format]
    excluded: tuple[str, ...]

    @property
    def kinds(self) -> tuple[Format, ...]:
        """The formats that layers have, each once; the 16-bit one where none is quantized."""
        return tuple(dict.fromkeys(self.formats.values())) or (self.quantization.format,)


def check_target(target: Target) -> Family:
    """Refuse, before any weight is read, a checkpoint that cannot be made here; return the family's layout.

    Raises:
        ConfigError: architecture, format, ranks or excludes do not fit; lists every problem.
    """
    architecture = str((target.config.get("architectures") or ["unknown"])[0])
    family = find_family(architecture)
    if family is None:
        known = sorted(name for family in FAMILIES for name in family.architectures)
        raise ConfigError(
            f"a TensorRT-LLM checkpoint of {architecture} cannot be made here; can be: {', '.join(known)}",
            hint="Use engine.target: tensorrt_llm_llmapi, which reads the Hugging Face form, or another source.",
        )
    problems = [*_format_problems(target, family, architecture), *_rank_problems(target)]
    if not problems:
        problems = _exclude_problems(target)
    if problems:
        raise ConfigError(
            f"a TensorRT-LLM checkpoint of {architecture} cannot be made as asked: {len(problems)} problem(s)",
            problems=problems,
        )
    return family


def _format_problems(target: Target, family: Family, architecture: str) -> list[Problem]:
    kv_cache = target.quantization.kv_cache
    on_the_node = "Quantize it on the GPU node with TensorRT-LLM's examples/quantization/quantize.py, or "
    problems = [
        Problem(
            where="quantization.format",
            message=f"{form} of {architecture} is not made here: it was never exported and verified on a CPU.",
            hint=f"{on_the_node}pick one of {', '.join(sorted(family.formats))}.",
        )
        for form in target.kinds
        if form not in family.formats
    ]
    problems += [
        Problem(
            where="quantization.overrides",
            message=f"{form} is rounded by trtllm-build, for all layers or none.",
            hint="Mix fp8, int4_awq, w4a8_awq, or int8_sq.",
        )
        for form in target.kinds
        if len(target.kinds) > 1 and traits(form, export="trtllm").rounded_by_build
    ]
    if kv_cache != "auto" and family.decoder is None:
        problems.append(
            Problem(
                where="quantization.kv_cache",
                message=f"KV scales of {architecture} are not made here: ModelOpt needs TensorRT-LLM beside it.",
                hint=f"{on_the_node}set kv_cache: auto.",
            )
        )
    if "lm_head" in target.formats:
        problems.append(
            Problem(
                where="quantization.exclude",
                message="lm_head would be quantized; TensorRT-LLM keeps it at 16 bit and drops its scales.",
                hint="Add 'lm_head' to quantization.exclude.",
            )
        )
    return problems


def _rank_problems(target: Target) -> list[Problem]:
    """Sizes that the ranks must divide (tensorrt_llm/mapping.py, models/modeling_utils.py)."""
    tensor, pipeline, config = target.ranks.tensor, target.ranks.pipeline, target.config
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    sizes = {"attention heads": heads, "rows of the MLP": config["intermediate_size"]}
    problems = [
        Problem(where="engine.tensor_parallel_size", message=f"{tensor} does not divide the {count} {what}.")
        for what, count in sizes.items()
        if count % tensor
    ]
    if kv_heads % tensor and tensor % kv_heads:
        message = f"{kv_heads} KV heads cannot be shared by {tensor} ranks: neither divides the other."
        problems.append(Problem(where="engine.tensor_parallel_size", message=message))
    if tensor > kv_heads and "int8_sq" in target.kinds:
        message = f"{tensor} ranks share {kv_heads} KV heads; ModelOpt cannot copy the per-channel scales of int8_sq."
        hint = f"Set it to {kv_heads} or less, or pick fp8 or int4_awq."
        problems.append(Problem(where="engine.tensor_parallel_size", message=message, hint=hint))
    if config["num_hidden_layers"] % pipeline:
        message = f"{pipeline} does not divide the {config['num_hidden_layers']} layers; the rest would be dropped."
        problems.append(Problem(where="engine.pipeline_parallel_size", message=message))
    return problems


def _exclude_problems(target: Target) -> list[Problem]:
    """Formats that one list of stored names cannot say: layers are counted from 0 on every pipeline rank."""
    split = [name for name, formats in _stored_formats(target).items() if len(formats) > 1]
    return [
        Problem(
            where="quantization.overrides" if len(target.kinds) > 1 else "quantization.exclude",
            message=f"{name} is quantized in part: it holds several layers, or is another layer on another "
            "pipeline rank, and one list of names is for all of them.",
            hint="Name all of q, k and v (or gate and up), and equal layers on every pipeline rank.",
        )
        for name in sorted(split)
    ]


def _stored_formats(target: Target) -> dict[str, set[Format | None]]:
    """Stored name -> the formats of the layers that it holds, on any pipeline rank; None for 16 bit."""
    layout = layout_of(target)
    found: dict[str, set[Format | None]] = {}
    for name in (*target.formats, *target.excluded):
        place = layout.place(name)
        if place is not None:
            found.setdefault(place.stored, set()).add(target.formats.get(name))
    return found


def stored_excludes(target: Target) -> tuple[str, ...]:
    """TensorRT-LLM names of the excluded layers, without lm_head, which is always excluded."""
    layout = layout_of(target)
    places = (layout.place(name) for name in target.excluded if name != "lm_head")
    return tuple(sorted({place.stored for place in places if place is not None}))


def describe(target: Target, directory: Path, producer: Mapping[str, str] | None) -> None:
    """Write everything of trtllm/ but the tensors; `producer` is the tool that made them."""
    config = checkpoint_config(
        target.config,
        target.quantization,
        target.ranks,
        dtype=target.dtype,
        excluded=stored_excludes(target) if target.formats else (),
        formats=target.kinds,
        producer=producer,
    )
    write_json(directory / "config.json", config)
    if len(target.kinds) > 1:
        stored = {name: form for name, formats in _stored_formats(target).items() for form in formats if form}
        write_json(directory / "quant_cfg.json", layer_config(target.quantization, stored))
    copy_tokenizer(target.source, directory)


def layout_of(target: Target) -> Layout:
    """Where the source's modules lie in the checkpoint."""
    config = checkpoint_config(
        target.config, target.quantization, target.ranks, dtype=target.dtype, formats=target.kinds
    )
    return Layout.of(config)


def plain_tensors(
    layout: Layout, source: TensorFiles, names: Sequence[str], *, rank: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A rank's 16-bit tensors of some of the source's parameters, straight from the source.

    Norms of families with an offset are stored as 1 + weight; a mixture's router is stored as float32.
    """
    import torch

    def read(name: str) -> torch.Tensor:
        whole = torch.from_numpy(source.floats("model.embed_tokens.weight" if name not in source else name))
        norm = name.endswith(("layernorm.weight", "model.norm.weight"))
        return whole + layout.family.norm_offset if norm else whole

    stage, index = divmod(rank, layout.tp)
    return {
        stored: assemble(layout, read, members, index).to(torch.float32 if stored.endswith("router.weight") else dtype)
        for stored, members in stored_groups(layout, names, stage).items()
    }


def stored_groups(layout: Layout, names: Sequence[str], stage: int) -> dict[str, list[tuple[str, Place]]]:
    """Stored tensor of a pipeline stage -> the source's parameters that make it up."""
    groups: dict[str, list[tuple[str, Place]]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        place = layout.place(module)
        if place is not None and place.stage == stage:
            groups.setdefault(f"{place.stored}.{parameter}", []).append((name, place))
    return groups


def assemble(
    layout: Layout, read: Callable[[str], torch.Tensor], members: Sequence[tuple[str, Place]], index: int
) -> torch.Tensor:
    """One stored tensor of tensor rank `index`: its share of what `read` gives, experts stacked, blocks in file order.

    Args:
        layout: of the checkpoint.
        read: a member's whole tensor, its rows the layer's outputs, its columns inputs or groups of inputs.
        members: from `stored_groups`.
        index: of the tensor rank.
    """
    import torch

    experts: dict[int | None, list[tuple[str, Place]]] = {}
    for name, place in members:
        experts.setdefault(place.expert, []).append((name, place))
    stacked = [_assemble_rows(layout, read, experts[key], index) for key in sorted(experts, key=lambda k: k or 0)]
    return torch.stack(stacked) if None not in experts else stacked[0]


def _assemble_rows(
    layout: Layout, read: Callable[[str], torch.Tensor], members: Sequence[tuple[str, Place]], index: int
) -> torch.Tensor:
    import torch

    blocks: dict[str, torch.Tensor] = {}
    for name, place in members:
        whole = read(name)
        if not place.part.blocks:
            row_cut = place.part.split == "row" and whole.ndim > 1
            return whole.chunk(layout.tp, dim=1)[index] if row_cut else whole
        start = 0
        for block in place.part.blocks:
            rows = layout.rows[block]
            blocks[block] = _cut(layout, whole[start : start + rows], block, index)
            start += rows
    part = members[0][1].part
    return torch.cat([blocks[block] for block in layout.family.row_blocks.get(part.stored, part.blocks)])


def _cut(layout: Layout, rows: torch.Tensor, block: str, index: int) -> torch.Tensor:
    """A tensor rank's rows of a block, padded with zeros to the same number on every rank."""
    import torch

    size = layout.rank_rows(block)
    start = index // layout.copies(block) * size
    piece = rows[start : start + size]
    padding = torch.zeros((size - len(piece), *piece.shape[1:]), dtype=piece.dtype)
    return torch.cat([piece, padding]) if len(padding) else piece

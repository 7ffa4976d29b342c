"""Writes a checkpoint as it comes, tensor by tensor, in files of about 4 GiB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import Problem
from pipeline.quantize.export import write_json

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 4 << 30


def write_shards(directory: Path, tensors: Iterator[tuple[str, torch.Tensor] | Problem]) -> list[Problem]:
    """Write model.safetensors, or shards of about 4 GiB with an index; returns the problems that came along."""
    from safetensors.torch import save_file

    problems: list[Problem] = []
    pending: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    held = 0

    def flush() -> None:
        nonlocal held
        save_file(pending, directory / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        held = 0

    for item in tensors:
        if isinstance(item, Problem):
            problems.append(item)
            continue
        name, tensor = item
        pending[name] = tensor.contiguous()
        held += tensor.nbytes
        if held >= _SHARD_BYTES:
            flush()
    if pending:
        flush()
    weight_map: dict[str, str] = {}
    for at, names in enumerate(shards):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{at + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{at}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum((directory / file).stat().st_size for file in set(weight_map.values()))
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    return problems

"""A source checkpoint with some of its weights replaced: trained ones, or ones with zeros."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.quantize.checkpoint_reader import read_json
from pipeline.quantize.export import copy_tokenizer, write_json
from pipeline.quantize.sparsity import SPARSITY

if TYPE_CHECKING:
    import torch

# What a tensor of the source becomes: its name and value in, its new value out.
Change = Callable[[str, "torch.Tensor"], "torch.Tensor"]


def rewrite_source(source: Path, out: Path, change: Change) -> None:
    """Copy the checkpoint in `source` to `out`, every tensor passed through `change`, one file at a time.

    Files keep their names. What says that the source is sparse is kept as well.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    sizes = 0
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as opened:
            tensors = {name: change(name, opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - not a dict
        save_file(tensors, out / shard.name, metadata={"format": "pt"})
        sizes += sum(tensor.nbytes for tensor in tensors.values())
    index = source / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index)["weight_map"]
        write_json(out / index.name, {"metadata": {"total_size": sizes}, "weight_map": weight_map})
    shutil.copyfile(source / "config.json", out / "config.json")
    copy_tokenizer(source, out)
    if (source / SPARSITY).is_file():
        shutil.copyfile(source / SPARSITY, out / SPARSITY)

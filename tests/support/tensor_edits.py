"""Damage to real checkpoint files, for tests that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Any], Any]


def edit_tensor(file: Path, name: str, edit: Edit) -> None:
    """Replace tensor `name` of a safetensors file by `edit(tensor)`; None removes it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    changed = edit(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})

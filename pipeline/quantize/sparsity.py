"""The 2:4 pattern in a checkpoint's stored codes: what sparse kernels rely on, and nobody else checks.

A kernel keeps two of every four neighbouring inputs of an output and an index of which; a third one that is not zero
would be lost without a word. Codes are counted, not numbers: a scale of any size leaves a code of 0 at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.quantize.checkpoint_reader import CheckpointReader, read_json
from pipeline.quantize.checks import Check, rule

SPARSITY = "sparsity.json"
_OF = 4
_NOT_ZERO = 2


def read_sparsity(source: Path) -> dict[str, Any] | None:
    """Read what made a source checkpoint sparse: method, pattern, layers; None where it is dense."""
    return read_json(source / SPARSITY) if (source / SPARSITY).is_file() else None


def check_sparsity(source: Path, reader: CheckpointReader, *, skip: frozenset[str]) -> list[Check]:
    """Check that every layer that is sparse in `source` is so in the quantized checkpoint; nothing if it is dense."""
    sparse = read_sparsity(source)
    return [] if sparse is None else rule("sparsity.pattern", _dense(sparse["layers"], reader, skip))


def _dense(layers: list[str], reader: CheckpointReader, skip: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    for module in layers:
        if module in skip:
            continue
        levels = reader.linear(module).levels()
        counts = np.count_nonzero(levels.reshape(len(levels), -1, _OF), axis=2)
        broken = int(np.count_nonzero(counts > _NOT_ZERO))
        if broken:
            detail = f"{broken} of {counts.size} groups of four weights have more than two that are not zero"
            yield module, detail, "zeros were lost after sparsify"

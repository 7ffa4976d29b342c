"""Checks that a converted checkpoint holds, weight for weight, what the checkpoint made elsewhere means."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.core.progress import Progress
from pipeline.quantize.checkpoint_reader import CheckpointReader
from pipeline.quantize.checks import Check, rule
from pipeline.quantize.foreign.reader import ForeignReader
from pipeline.quantize.tensor_files import FloatArray


def check_converted(
    source: ForeignReader, reader: CheckpointReader, *, skip: frozenset[str], progress: Progress
) -> list[Check]:
    """Every decoded weight and input scale equals the source's, bit for bit.

    Args:
        source: the checkpoint made elsewhere.
        reader: what it was converted to.
        skip: layers whose structure is broken already.
        progress: told of each layer.
    """
    return rule("weight.equal", _unequal(source, reader, skip, progress))


def _same_smoothing(wanted: FloatArray | None, converted: FloatArray | None) -> bool:
    """Equal, where no scale is a scale of ones."""
    ones = np.ones(1, np.float32)
    return bool(np.all((ones if wanted is None else wanted) == (ones if converted is None else converted)))


def _unequal(
    source: ForeignReader, reader: CheckpointReader, skip: frozenset[str], progress: Progress
) -> Iterator[tuple[str, str, str]]:
    stored = set(reader.quantized_modules())
    modules = [name for name in source.quantized_modules() if name not in skip]
    with progress.track("verify layers", len(modules), "layers") as advance:
        for module in modules:
            if module not in stored:
                yield module, f"{source.method} quantizes the layer, the converted checkpoint does not", ""
                continue
            wanted, converted = source.foreign_linear(module), reader.linear(module)
            weight = wanted.weight()
            differ = int(np.count_nonzero(weight != converted.weight))
            if differ:
                detail = f"{differ} of {weight.size} weights are not what {source.method} stores"
                yield module, detail, "converted wrongly, or changed since"
            if wanted.input_scale != converted.input_scale:
                detail = f"input scale {converted.input_scale}, {source.method} stores {wanted.input_scale}"
                yield module, detail, "converted wrongly, or changed since"
            if not _same_smoothing(wanted.pre_quant_scale, converted.pre_quant_scale):
                yield (
                    module,
                    f"pre_quant_scale is not what {source.method} stores",
                    "converted wrongly, or changed since",
                )
            advance(1)

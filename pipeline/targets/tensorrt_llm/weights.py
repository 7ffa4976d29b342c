"""How many bytes a model's weights take on one rank of a TensorRT-LLM engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.config.formats import layer_format
from pipeline.config.legality import table
from pipeline.config.schema import BuildConfig
from pipeline.config.shapes import ArchitectureFacts
from pipeline.targets.tensorrt_llm.budget_constants import constants

ELEMENT_BYTES: Final = 2
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


class Model(ArchitectureFacts, Protocol):
    """What the budget wants to know about a model; checkpoints/architecture.py provides it."""

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How a quantized linear is stored: bits per weight, bytes per output (and group), bytes per input."""

    bits: int
    row_bytes: int = 0
    column_bytes: int = 0
    grouped: bool = False


# Parameters of the engine's layers (NVIDIA/TensorRT-LLM tensorrt_llm/quantization/layers.py@b171e87);
# scales of the whole tensor, a few bytes, are left out. 16-bit formats have no row.
_LAYOUTS: Final = {
    "fp8": _Layout(bits=8),
    "fp8_rowwise": _Layout(bits=8, row_bytes=4),
    "int8_sq": _Layout(bits=8, row_bytes=4, column_bytes=2),
    "int8_wo": _Layout(bits=8, row_bytes=2),
    "int4_wo": _Layout(bits=4, row_bytes=2),
    "int4_awq": _Layout(bits=4, row_bytes=2, column_bytes=2, grouped=True),
    "w4a8_awq": _Layout(bits=4, row_bytes=2, column_bytes=2, grouped=True),
}


def weight_bytes(config: BuildConfig, model: Model) -> int:
    """Weights with their scales on the fullest pipeline rank, as the engine holds them."""
    pipeline, tensor = config.engine.pipeline_parallel_size, config.engine.tensor_parallel_size
    stages = [0] * pipeline
    per_stage = -(-model.num_hidden_layers // pipeline)
    for name, shape in model.linears.items():
        layer = _LAYER.search(name)
        if layer:
            stages[min(int(layer[1]) // per_stage, pipeline - 1)] += _linear_bytes(config, model, name, shape)
    norms = 2 * model.hidden_size * ELEMENT_BYTES
    stages = [size + per_stage * norms for size in stages]
    stages[-1] += norms // 2
    rows = -(-model.vocab_size // tensor)
    head = rows * model.hidden_size * ELEMENT_BYTES
    stages[0] += head
    shared = model.tie_word_embeddings and pipeline == 1
    if not (shared and model.architecture in constants().shared_head.architectures):
        stages[-1] += head
    return max(stages)


def _linear_bytes(config: BuildConfig, model: Model, name: str, shape: tuple[int, int]) -> int:
    """Bytes of one linear on one tensor parallel rank, scales included."""
    out_features, in_features = _rank_shape(config, model, name, shape)
    quantization = config.quantization
    form = layer_format(quantization, name)
    layout = None if form is None else _LAYOUTS.get(form)
    if layout is None:
        return out_features * in_features * ELEMENT_BYTES
    groups = -(-in_features // quantization.group_size) if layout.grouped else 1
    scales = groups * out_features * layout.row_bytes + in_features * layout.column_bytes
    return out_features * in_features * layout.bits // 8 + scales


def _rank_shape(config: BuildConfig, model: Model, name: str, shape: tuple[int, int]) -> tuple[int, int]:
    out_features, in_features = shape
    tensor, last = config.engine.tensor_parallel_size, name.rpartition(".")[2]
    if last in ("k_proj", "v_proj"):
        return kv_heads(config, model) * model.head_dim, in_features
    if last in table().row_parallel.names:
        return out_features, -(-in_features // tensor)
    return -(-out_features // tensor), in_features


def kv_heads(config: BuildConfig, model: Model) -> int:
    """KV heads on one tensor parallel rank: at least one."""
    return max(1, -(-model.num_key_value_heads // config.engine.tensor_parallel_size))

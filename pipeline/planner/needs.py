"""How much memory and disk a build and its server need, before anything starts.

Weights are counted from the architecture, not guessed from a name. All results are bytes. The
factors are those of the steps themselves: calibration and quantization hold one layer, a stage
writes beside what it reads, and a committed artifact is kept once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeline.config.formats import CODE_BITS, ROUNDED_BY_BUILD, formats_of, has_groups, is_grouped, layer_format
from pipeline.config.schema import BuildConfig

FLOAT32 = 4
FLOAT16 = 2
# Stay 16 bit in a TensorRT-LLM checkpoint: trtllm-build rounds them.
SCALE_BITS = 32
KV_BYTES = {"auto": 2, "fp8": 1, "int8": 1}
# Interpreter, torch, transformers and ModelOpt loaded, nothing of the model yet (measured as RSS).
RUNTIME_BYTES = 900 * 2**20
# Of one decoder layer while ModelOpt works on it: the weights, what it rounds them to, and what is written.
_LAYER_COPIES = 4


class Shapes(Protocol):
    """What counting needs to know of a model."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def num_key_value_heads(self) -> int:
        """KV heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Tokens the model was made for."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """True when lm_head is the embedding."""
        ...

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Module name -> (out, in) features."""
        ...


@dataclass(frozen=True, kw_only=True)
class Need:
    """One figure: `what` needs `n_bytes` of memory or disk, because of `why`."""

    what: str
    n_bytes: int
    why: str


def parameters(model: Shapes) -> tuple[int, int]:
    """Return (weights of the decoder's linears, all other weights); a tied head counts once.

    Norm weights are left out: they are below 0.1 % of any model that is worth serving.
    """
    linear = sum(rows * columns for name, (rows, columns) in model.linears.items() if "lm_head" not in name)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return linear, tables


def checkpoint_bytes(model: Shapes, config: BuildConfig) -> int:
    """Size of the quantized checkpoint: codes, one float32 scale per group, 16-bit tables."""
    _, tables = parameters(model)
    bits = sum(
        rows * columns * _bits_per_weight(config, name)
        for name, (rows, columns) in model.linears.items()
        if "lm_head" not in name
    )
    return int(bits / 8) + tables * FLOAT16


def _bits_per_weight(config: BuildConfig, name: str) -> float:
    """Bits of one weight of a layer in the checkpoint, with its share of the scales."""
    form = layer_format(config.quantization, name)
    target = config.engine.target
    if form == "auto":
        scales = SCALE_BITS / config.quantization.group_size if has_groups(config) else 0
        return (config.quantization.auto.effective_bits or 8 * FLOAT16) + scales
    if form is None or (target == "tensorrt_llm" and form in ROUNDED_BY_BUILD):
        return 8 * FLOAT16
    grouped = is_grouped(form, target)
    return CODE_BITS[form] + (SCALE_BITS / config.quantization.group_size if grouped else 0)


def kv_bytes_per_token(model: Shapes, config: BuildConfig) -> int:
    """K and V of every layer for one token: 2 x layers x KV heads x head size x bytes."""
    element = KV_BYTES[config.quantization.kv_cache]
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * element


def _making(model: Shapes, config: BuildConfig) -> Need:
    """Memory of the stages up to compile.

    Calibration and quantization hold a few float32 copies of one decoder layer and the text's activations before and
    behind it; the proof holds embedding and head of both models. What needs the model at once is named.
    """
    linear, tables = parameters(model)
    if config.engine.target == "openvino":
        why = "float32 copies of the whole model while OpenVINO converts it"
        return Need(what="build memory", n_bytes=2 * (linear + tables) * FLOAT32 + RUNTIME_BYTES, why=why)
    if config.sparsity.method != "none" or config.quantization.format == "auto":
        why = "a float32 copy of the whole model to score or sparsify it"
        return Need(what="build memory", n_bytes=2 * (linear + tables) * FLOAT32 + RUNTIME_BYTES, why=why)
    layer = linear // max(1, model.num_hidden_layers)
    tokens = config.calibration.num_samples * config.calibration.max_seq_len
    work = max(_LAYER_COPIES * layer + 2 * tokens * model.hidden_size, 2 * tables)
    why = "one decoder layer in float32 with the text's activations, or embedding and head of both models in the proof"
    return Need(what="build memory", n_bytes=work * FLOAT32 + RUNTIME_BYTES, why=why)


def _scoring(model: Shapes, config: BuildConfig) -> Need:
    """Memory of `score`: one float32 copy, what the head makes of a batch, and one decoder layer's outputs.

    The loss and its gradient hold ten times the logits (measured as peak memory on a model of 135M parameters). A
    layer keeps its outputs and what each candidate changes in them; the others are computed again for the gradient.
    """
    linear, tables = parameters(model)
    tokens = config.calibration.sequences_per_pass * config.calibration.max_seq_len
    head = tokens * model.vocab_size * 10
    outputs = sum(rows for name, (rows, _columns) in model.linears.items() if "lm_head" not in name)
    layer = tokens * outputs // max(1, model.num_hidden_layers) * (2 + len(config.quantization.auto.candidates))
    n_bytes = (linear + tables + head + layer) * FLOAT32 + RUNTIME_BYTES
    fed = config.calibration.sequences_per_pass
    why = f"float32 copy, logits and one layer for {fed} sequences (calibration.batch_size)"
    return Need(what="score memory", n_bytes=n_bytes, why=why)


def needs(model: Shapes, config: BuildConfig) -> tuple[Need, ...]:
    """Return what building takes, and on the CPU what serving takes; a GPU has its own budget."""
    linear, tables = parameters(model)
    source = (linear + tables) * FLOAT32
    checkpoint = checkpoint_bytes(model, config)
    build: tuple[Need, ...] = (
        _making(model, config),
        Need(
            what="build disk",
            n_bytes=source + 2 * checkpoint + (linear + tables) * FLOAT16,
            why="source copy, checkpoint, engine",
        ),
    )
    if config.quantization.format == "auto":
        build = (*build, _scoring(model, config))
    if config.engine.target != "openvino":
        return build
    engine = config.engine
    tokens = engine.max_batch_size * (engine.max_seq_len or model.max_position_embeddings)
    kv = int((engine.kv_cache.size_gib or 0) * 2**30) or tokens * kv_bytes_per_token(model, config)
    kv_why = "engine.kv_cache.size_gib" if engine.kv_cache.size_gib else f"at most, {tokens} tokens in flight"
    return (
        *build,
        Need(
            what="serve memory: weights",
            n_bytes=checkpoint,
            why=f"{' and '.join(formats_of(config.quantization))} weights",
        ),
        Need(what="serve memory: KV cache", n_bytes=kv, why=kv_why),
    )

"""How the tensors and metadata of a GGUF file become a Hugging Face model: names, shapes, config.json.

Covers the Llama family as llama.cpp writes it: `llama` (Llama, Mistral, SmolLM), `qwen2` and
`qwen3`. Everything else is refused by name. Facts about the layout come from llama.cpp's
convert_hf_to_gguf.py, whose transformations are undone here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoints.gguf_file import GGUFFile, GGUFTensor
from pipeline.errors import BadGGUF

JSON = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """One GGUF architecture and its Hugging Face counterpart."""

    model_type: str
    class_name: str
    rows_permuted: bool  # llama.cpp reorders the rows of q and k for its own rope layout
    qkv_bias: bool  # biases of q, k and v are part of the architecture
    head_norms: bool  # RMS norms of q and k heads


_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "llama": _Family(
            model_type="llama",
            class_name="LlamaForCausalLM",
            rows_permuted=True,
            qkv_bias=False,
            head_norms=False,
        ),
        "qwen2": _Family(
            model_type="qwen2", class_name="Qwen2ForCausalLM", rows_permuted=False, qkv_bias=True, head_norms=False
        ),
        "qwen3": _Family(
            model_type="qwen3", class_name="Qwen3ForCausalLM", rows_permuted=False, qkv_bias=False, head_norms=True
        ),
    }
)
_MODULES: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_ATTENTION: Final = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP: Final = ("ffn_gate", "ffn_up", "ffn_down")
# The one set of constants that Llama 3.1, 3.2 and 3.3 were published with; `factor` varies.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
ROPE_FACTORS: Final = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """A tensor of the checkpoint: its name and shape there, where it is, and its row order.

    `heads` is the number of heads whose rows llama.cpp interleaved, 0 when it left them alone.
    """

    name: str
    shape: tuple[int, ...]
    source: GGUFTensor
    heads: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the header of a GGUF file says about the model."""

    tensors: tuple[MappedTensor, ...]
    config: JSON
    vocab_size: int
    context_length: int


def read_layout(file: GGUFFile, rope_factors: NDArray[np.float32] | None) -> Layout:
    """Map a GGUF file to a Hugging Face checkpoint without touching the weights.

    Args:
        file: parsed GGUF file.
        rope_factors: float32 [head_dim / 2] of tensor `rope_freqs.weight`, when the file has it.

    Raises:
        BadGGUF: the architecture is not supported, or tensors are missing, unexpected or of a wrong shape.
    """
    name = file.text("general.architecture")
    family = _FAMILIES.get(name)
    if family is None:
        raise BadGGUF(
            f"{file.path}: architecture '{name}' is not supported. Supported: {', '.join(sorted(_FAMILIES))}.",
            hint="Use the original Hugging Face checkpoint with source.path or source.hub.",
        )
    if file.integer(f"{name}.expert_count", 0):
        raise BadGGUF(f"{file.path}: mixture-of-experts models ({name}.expert_count) cannot be imported from GGUF.")
    sizes = _Sizes.read(file, name)
    tensors = _map_tensors(file, family, sizes)
    present = {tensor.name for tensor in tensors}
    config: JSON = {
        "architectures": [family.class_name],
        "attention_dropout": 0.0,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": sizes.context,
        "model_type": family.model_type,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": _shortest(file.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_scaling": _rope_scaling(file, name, sizes, rope_factors),
        "rope_theta": _shortest(file.number(f"{name}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in present,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": sizes.vocab,
    }
    if family.model_type == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in present
        config["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in present
    return Layout(tensors=tensors, config=config, vocab_size=sizes.vocab, context_length=sizes.context)


def original_row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the index array that undoes llama.cpp's interleaving of the rows of q or k.

    llama.cpp's rope rotates neighbours (2i, 2i + 1) of a head where Hugging Face rotates halves
    (i, i + d/2), so its converter stores row i of half h of a head at 2i + h. `stored[order]` is
    the Hugging Face order.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    @staticmethod
    def read(file: GGUFFile, name: str) -> _Sizes:
        hidden = file.integer(f"{name}.embedding_length")
        heads = file.integer(f"{name}.attention.head_count")
        kv_heads = file.integer(f"{name}.attention.head_count_kv", heads)
        layers = file.integer(f"{name}.block_count")
        # Guard: no count of layers beyond the tensors, or a corrupt one would be looped over.
        if min(hidden, heads, kv_heads, layers) < 1 or heads % kv_heads or layers > len(file.tensors):
            raise BadGGUF(
                f"{file.path}: {layers} layers, hidden size {hidden}, {heads} heads and {kv_heads} key-value heads "
                "do not make a model."
            )
        head_dim = file.integer(f"{name}.attention.key_length", hidden // heads)
        rotated = file.integer(f"{name}.rope.dimension_count", head_dim)
        value_dim = file.integer(f"{name}.attention.value_length", head_dim)
        if not head_dim == rotated == value_dim or head_dim % 2 or head_dim < 1:
            raise BadGGUF(
                f"{file.path}: heads of {head_dim} with {rotated} rotated and values of {value_dim} are not "
                "supported; all three must be equal and even."
            )
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise BadGGUF(f"{file.path}: tensor 'token_embd.weight' is missing.")
        return _Sizes(
            layers=layers,
            hidden=hidden,
            intermediate=file.integer(f"{name}.feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=embedding.shape[0],
            context=file.integer(f"{name}.context_length"),
        )

    def shape(self, role: str) -> tuple[int, ...]:
        """Return the Hugging Face shape of the weight of a layer's part."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }
        return shapes.get(role, (self.hidden,))


def _map_tensors(file: GGUFFile, family: _Family, sizes: _Sizes) -> tuple[MappedTensor, ...]:
    """List the checkpoint's tensors in model order, each found, of the right shape, and none left over."""
    wanted: list[tuple[str, str, tuple[int, ...], int]] = [
        ("token_embd.weight", "model.embed_tokens.weight", (sizes.vocab, sizes.hidden), 0)
    ]
    for layer in range(sizes.layers):
        for role, suffix in _layer_parts(file, family):
            shape = sizes.shape(role)[:1] if suffix == "bias" else sizes.shape(role)
            heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(role, 0) if family.rows_permuted else 0
            target = f"model.layers.{layer}.{_MODULES[role]}.{suffix}"
            wanted.append((f"blk.{layer}.{role}.{suffix}", target, shape, heads))
    wanted.append(("output_norm.weight", "model.norm.weight", (sizes.hidden,), 0))
    if "output.weight" in file.tensors:
        wanted.append(("output.weight", "lm_head.weight", (sizes.vocab, sizes.hidden), 0))
    names = {source for source, _, _, _ in wanted}
    missing = sorted(names - file.tensors.keys())
    unexpected = sorted(file.tensors.keys() - names - {ROPE_FACTORS})
    if missing or unexpected:
        said = f"tensor '{missing[0]}' is missing" if missing else f"tensor '{unexpected[0]}' has no place in the model"
        count = f" ({len(missing)} missing, {len(unexpected)} unexpected)"
        raise BadGGUF(f"{file.path}: {said}{count}.")
    for source, _, shape, _ in wanted:
        found = file.tensors[source].shape
        if found != shape:
            raise BadGGUF(f"{file.path}: tensor '{source}' has shape {list(found)}, expected {list(shape)}.")
    return tuple(
        MappedTensor(name=target, shape=shape, source=file.tensors[source], heads=heads)
        for source, target, shape, heads in wanted
    )


def _layer_parts(file: GGUFFile, family: _Family) -> list[tuple[str, str]]:
    """Return (role, 'weight' or 'bias') of every tensor of a layer; optional biases as layer 0 has them."""
    parts = [(role, "weight") for role in _MODULES if family.head_norms or not role.endswith(("q_norm", "k_norm"))]
    if family.qkv_bias:
        parts += [(role, "bias") for role in _ATTENTION[:3]]
    elif family.model_type == "llama":
        for group in (_ATTENTION, _MLP):
            if f"blk.0.{group[0]}.bias" in file.tensors:
                parts += [(role, "bias") for role in group]
    return parts


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32, so that 1e-5 does not read 9.99999975e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    file: GGUFFile, name: str, sizes: _Sizes, factors: NDArray[np.float32] | None
) -> dict[str, object] | None:
    if factors is not None:
        return _llama3_scaling(file, name, sizes, factors)
    kind = file.text(f"{name}.rope.scaling.type") if f"{name}.rope.scaling.type" in file.metadata else "none"
    if kind == "none":
        return None
    factor = _shortest(file.number(f"{name}.rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.integer(f"{name}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise BadGGUF(f"{file.path}: rope scaling '{kind}' is not supported. Supported: none, linear, yarn, llama3.")


def _llama3_scaling(file: GGUFFile, name: str, sizes: _Sizes, factors: NDArray[np.float32]) -> dict[str, object]:
    """Find the llama3 parameters whose divisors are exactly those that the file stores per frequency."""
    theta = file.number(f"{name}.rope.freq_base", 10000.0)
    factor = float(factors.max())
    expected = llama3_divisors(theta, sizes.head_dim, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise BadGGUF(
            f"{file.path}: tensor '{ROPE_FACTORS}' holds rope factors of no published Llama 3 model.",
            hint="Use the original Hugging Face checkpoint with source.path or source.hub.",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def llama3_divisors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """Return what Llama 3.1 divides each rotary frequency by: float64 [head_dim / 2].

    1 for wavelengths under context / high, `factor` above context / low, and
    1 / ((1 - s) / factor + s) between, with s = (context / wavelength - low) / (high - low).
    """
    low, high, context = _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors

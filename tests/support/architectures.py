"""Facts about models as the legality check wants them, without a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def llama_linears(layers: int, hidden: int, intermediate: int, kv: int) -> dict[str, tuple[int, int]]:
    """The linears of a Llama decoder as (out, in)."""
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Facts:
    """SmolLM2-135M unless a test says otherwise."""

    architecture: str = "LlamaForCausalLM"
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    num_hidden_layers: int = 30
    vocab_size: int = 49152
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    dtype: str = "bfloat16"
    linears: Mapping[str, tuple[int, int]] = field(default_factory=lambda: llama_linears(30, 576, 1536, 192))


LLAMA_8B = Facts(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    linears=llama_linears(32, 4096, 14336, 1024) | {"lm_head": (128256, 4096)},
)

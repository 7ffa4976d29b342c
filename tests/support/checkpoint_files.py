"""Small real files for the checkpoint tests: safetensors byte by byte, and GGUF through its own writer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def safetensors_bytes(header: Mapping[str, object], data: bytes) -> bytes:
    """Return a safetensors file with exactly this header, right or wrong."""
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def write_tensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a valid float32 safetensors file of zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    path.write_bytes(safetensors_bytes(header, bytes(start)))


def write_checkpoint(directory: Path, shapes: Mapping[str, Sequence[int]], **config: object) -> Path:
    """Write a checkpoint directory with a config, one safetensors file and a small tokenizer."""
    from tests.support.checkpoints import tiny_tokenizer

    tiny_tokenizer(directory)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(values | config))
    write_tensors(directory / "model.safetensors", shapes)
    return directory


def byte_characters() -> dict[int, str]:
    """Return GPT-2's byte -> character table: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


class TinyGguf:
    """A GGUF Llama of one layer; change `metadata`, `tensors` or the vocabulary before `write`."""

    def __init__(self, *, hidden: int = 32, heads: int = 4, kv_heads: int = 2, intermediate: int = 32) -> None:
        self.architecture = "llama"
        self.metadata: dict[str, int | float | str | bool] = {
            "llama.block_count": 1,
            "llama.context_length": 64,
            "llama.embedding_length": hidden,
            "llama.feed_forward_length": intermediate,
            "llama.attention.head_count": heads,
            "llama.attention.head_count_kv": kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        }
        self.tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "1"]
        self.types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 5
        self.merges: list[str] | None = ["a b"]
        self.scores: list[float] | None = None
        random = np.random.default_rng(0)
        kv = hidden // heads * kv_heads
        shapes = {
            "token_embd.weight": (len(self.tokens), hidden),
            "output_norm.weight": (hidden,),
            "blk.0.attn_norm.weight": (hidden,),
            "blk.0.attn_q.weight": (hidden, hidden),
            "blk.0.attn_k.weight": (kv, hidden),
            "blk.0.attn_v.weight": (kv, hidden),
            "blk.0.attn_output.weight": (hidden, hidden),
            "blk.0.ffn_norm.weight": (hidden,),
            "blk.0.ffn_gate.weight": (intermediate, hidden),
            "blk.0.ffn_up.weight": (intermediate, hidden),
            "blk.0.ffn_down.weight": (hidden, intermediate),
        }
        self.tensors: dict[str, NDArray[np.float32] | NDArray[np.uint8] | NDArray[np.int8]] = {
            name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }
        self.packed: dict[str, GGMLQuantizationType] = {}

    def byte_vocabulary(self) -> None:
        """Use the three special tokens, all 256 bytes and 'ab' as the vocabulary."""
        self.tokens = [*self.tokens[:3], *byte_characters().values(), "ab"]
        self.types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(self.tokens) - 3)
        self.fit_embedding()

    def fit_embedding(self) -> None:
        """Give the embedding as many rows as there are tokens."""
        hidden = self.tensors["token_embd.weight"].shape[1]
        self.tensors["token_embd.weight"] = np.zeros((len(self.tokens), hidden), np.float32)

    def write(self, path: Path) -> Path:
        """Write the file with gguf.GGUFWriter."""
        writer = GGUFWriter(path, self.architecture)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        for key, value in self.metadata.items():
            add[type(value)](key, value)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor, raw_dtype=self.packed.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

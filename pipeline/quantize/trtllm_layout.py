"""The TensorRT-LLM checkpoint layout: where each Hugging Face module of a model lies, on which ranks.

One file per rank, rank = tensor rank + pipeline rank * tensor parallel size. Layers are counted from 0 on
every pipeline rank. q, k and v share one tensor; the activated branch of the MLP is called fc and the other
one gate; mixtures of experts stack their experts. Names and split rules are those of
NVIDIA/TensorRT-LLM docs/source/architecture/checkpoint.md and tensorrt_llm/models/{llama,qwen,gemma,phi3}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pipeline.config.schema import Format
from pipeline.errors import IntegrityError

# How tensor parallelism cuts a weight [out, in]: along out, along in, or not at all.
Split = Literal["column", "row", "none"]

FLOAT_FORMATS: frozenset[Format] = frozenset({"bf16", "fp16", "int8_wo", "int4_wo"})
QUANTIZED_FORMATS: frozenset[Format] = frozenset({"fp8", "int8_sq", "int4_awq", "w4a8_awq"})


@dataclass(frozen=True, kw_only=True)
class Part:
    """A Hugging Face module's place in the stored tensors of a layer (or of the whole model).

    Attributes:
        stored: module name in the file, after "transformer.layers.<i>.".
        split: how tensor parallelism cuts it.
        blocks: row blocks of the stored tensor that hold this module's rows, in the module's order; empty
            when the module is the whole tensor.
    """

    stored: str
    split: Split = "none"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """Architectures that share one layout.

    Attributes:
        architectures: Hugging Face class names.
        decoder: ModelOpt's name of the family; None where its exporter refuses to write the checkpoint unless
            TensorRT-LLM is installed.
        formats: what can be made here.
        parts: module name inside a layer -> place; "*" stands for an expert's number.
        row_blocks: stored module -> the blocks of its rows, in file order.
        norm_offset: what is added to a norm's weight when it is stored; 1 where the model multiplies by
            (1 + weight).
    """

    architectures: tuple[str, ...]
    decoder: str | None
    formats: frozenset[Format]
    parts: Mapping[str, Part]
    row_blocks: Mapping[str, tuple[str, ...]]
    norm_offset: float = 0.0


_ATTENTION: Mapping[str, Part] = {
    "self_attn.q_proj": Part(stored="attention.qkv", split="column", blocks=("q",)),
    "self_attn.k_proj": Part(stored="attention.qkv", split="column", blocks=("k",)),
    "self_attn.v_proj": Part(stored="attention.qkv", split="column", blocks=("v",)),
    "self_attn.o_proj": Part(stored="attention.dense", split="row"),
    "input_layernorm": Part(stored="input_layernorm"),
    "post_attention_layernorm": Part(stored="post_layernorm"),
}
_GATED_MLP: Mapping[str, Part] = {
    "mlp.gate_proj": Part(stored="mlp.fc", split="column", blocks=("gate",)),
    "mlp.up_proj": Part(stored="mlp.gate", split="column", blocks=("up",)),
    "mlp.down_proj": Part(stored="mlp.proj", split="row"),
}
_HEAD_NORMS: Mapping[str, Part] = {
    "self_attn.q_norm": Part(stored="attention.q_layernorm"),
    "self_attn.k_norm": Part(stored="attention.k_layernorm"),
}
_EXPERTS: Mapping[str, Part] = {
    "block_sparse_moe.gate": Part(stored="mlp.router"),
    "block_sparse_moe.experts.*.w1": Part(stored="mlp.fc", split="column", blocks=("gate",)),
    "block_sparse_moe.experts.*.w3": Part(stored="mlp.fc", split="column", blocks=("up",)),
    "block_sparse_moe.experts.*.w2": Part(stored="mlp.proj", split="row"),
}
_FUSED: Mapping[str, Part] = {
    "self_attn.qkv_proj": Part(stored="attention.qkv", split="column", blocks=("q", "k", "v")),
    "self_attn.o_proj": _ATTENTION["self_attn.o_proj"],
    "mlp.gate_up_proj": Part(stored="mlp.fc", split="column", blocks=("gate", "up")),
    "mlp.down_proj": _GATED_MLP["mlp.down_proj"],
    "input_layernorm": _ATTENTION["input_layernorm"],
    "post_attention_layernorm": _ATTENTION["post_attention_layernorm"],
}
_QKV: Mapping[str, tuple[str, ...]] = {"attention.qkv": ("q", "k", "v")}
_DENSE_ROWS = {**_QKV, "mlp.fc": ("gate",), "mlp.gate": ("up",)}
_SWAPPED_ROWS = {**_QKV, "mlp.fc": ("up", "gate")}  # with swiglu the activated half comes second
_TOP: Mapping[str, Part] = {
    "model.embed_tokens": Part(stored="transformer.vocab_embedding", split="column", blocks=("vocab",)),
    "model.norm": Part(stored="transformer.ln_f"),
    "lm_head": Part(stored="lm_head", split="column", blocks=("vocab",)),
}

FAMILIES: tuple[Family, ...] = (
    Family(
        architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        decoder="llama",
        formats=FLOAT_FORMATS | QUANTIZED_FORMATS,
        parts={**_ATTENTION, **_GATED_MLP},
        row_blocks=_DENSE_ROWS,
    ),
    Family(
        architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        decoder="qwen",
        formats=FLOAT_FORMATS | QUANTIZED_FORMATS,
        parts={**_ATTENTION, **_GATED_MLP, **_HEAD_NORMS},
        row_blocks=_DENSE_ROWS,
    ),
    Family(
        architectures=("GemmaForCausalLM",),
        decoder="gemma",
        formats=FLOAT_FORMATS | QUANTIZED_FORMATS,
        parts={**_ATTENTION, **_GATED_MLP},
        row_blocks=_DENSE_ROWS,
        norm_offset=1.0,
    ),
    Family(
        architectures=("MixtralForCausalLM",),
        decoder="llama",
        formats=FLOAT_FORMATS,
        parts={**_ATTENTION, **_EXPERTS},
        row_blocks=_SWAPPED_ROWS,
    ),
    Family(
        architectures=("Phi3ForCausalLM",),
        decoder=None,
        formats=FLOAT_FORMATS,
        parts=_FUSED,
        row_blocks=_SWAPPED_ROWS,
    ),
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")


def find_family(architecture: str) -> Family | None:
    """Return the layout of an architecture, None when it is not one of FAMILIES."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one Hugging Face module is stored.

    Attributes:
        stage: pipeline rank.
        stored: full module name in the files of that stage.
        part: its rules.
        expert: index into a stacked tensor.
    """

    stage: int
    stored: str
    part: Part
    expert: int | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one checkpoint: a family, its sizes and its ranks.

    Attributes:
        family: where modules lie.
        tp, pp: tensor and pipeline parallel size.
        layers: decoder layers of the whole model.
        kv_heads: key and value heads of the whole model.
        rows: block -> rows of it in the whole model; vocabulary without padding.
    """

    family: Family
    tp: int
    pp: int
    layers: int
    kv_heads: int
    rows: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layout:
        """Derive the layout from the config.json of a TensorRT-LLM checkpoint.

        Raises:
            IntegrityError: the architecture is unknown here, or a field is missing.
        """
        family = find_family(str(config.get("architecture")))
        if family is None:
            raise IntegrityError(f"the TensorRT-LLM layout of {config.get('architecture')!r} is not known here.")
        try:
            mapping = config["mapping"]
            head_size = config.get("head_size") or config["hidden_size"] // config["num_attention_heads"]
            kv_heads = config["num_key_value_heads"]
            query, key = config["num_attention_heads"] * head_size, kv_heads * head_size
            inner = config["intermediate_size"]
            rows = {"q": query, "k": key, "v": key, "gate": inner, "up": inner, "vocab": config["vocab_size"]}
            return cls(
                family=family,
                tp=mapping["tp_size"],
                pp=mapping["pp_size"],
                layers=config["num_hidden_layers"],
                kv_heads=kv_heads,
                rows=MappingProxyType(rows),
            )
        except KeyError as error:
            raise IntegrityError(f"config.json of the TensorRT-LLM checkpoint lacks {error}.") from error

    def place(self, module: str) -> Place | None:
        """Find a Hugging Face module; None when this layout has no such module."""
        if module in _TOP:
            stage = 0 if module == "model.embed_tokens" else self.pp - 1
            return Place(stage=stage, stored=_TOP[module].stored, part=_TOP[module])
        layer = _LAYER.fullmatch(module)
        if layer is None or int(layer[1]) >= self.layers:
            return None
        found = _EXPERT.search(layer[2])
        part = self.family.parts.get(_EXPERT.sub("*", layer[2]))
        if part is None:
            return None
        stage, index = divmod(int(layer[1]), self.layers // self.pp)
        stored = f"transformer.layers.{index}.{part.stored}"
        return Place(stage=stage, stored=stored, part=part, expert=int(found[1]) if found else None)

    def ranks(self, stage: int) -> range:
        """Ranks of a pipeline stage, in tensor order."""
        return range(stage * self.tp, (stage + 1) * self.tp)

    def copies(self, block: str) -> int:
        """How many neighbouring tensor ranks hold the same rows of a block: more than 1 only for few KV heads."""
        return max(1, self.tp // self.kv_heads) if block in {"k", "v"} else 1

    def rank_rows(self, block: str) -> int:
        """Rows of a block on one rank; the vocabulary is padded to a multiple of the ranks."""
        return math.ceil(self.rows[block] / (self.tp // self.copies(block)))

    def block_slice(self, part: Part, block: str) -> slice:
        """Where a block's rows are in the stored tensor of one rank."""
        start = 0
        for other in self.family.row_blocks.get(part.stored, part.blocks):
            if other == block:
                return slice(start, start + self.rank_rows(block))
            start += self.rank_rows(other)
        raise KeyError(block)

    def modules(self) -> Iterator[str]:
        """Every Hugging Face module name that the layout can hold in decoder layers; experts as "*"."""
        for index in range(self.layers):
            for part in self.family.parts:
                yield f"model.layers.{index}.{part}"

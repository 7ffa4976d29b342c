"""config.json of a TensorRT-LLM checkpoint, derived from the Hugging Face config.

ModelOpt writes this file through TensorRT-LLM when that is installed, and otherwise from what it sees in
the live model: then biases, Qwen's type, mixtures of experts and, with transformers 5, the rotary embedding
are missing or wrong, and TensorRT-LLM fills in defaults without a word. So it is written here instead, field
by field as the config classes of NVIDIA/TensorRT-LLM do it (tensorrt_llm/models/{llama,qwen,gemma,phi3}/config.py,
modeling_utils.py). Unknown top-level keys become attributes there; unknown keys inside `quantization` and
`mapping` are errors, so both hold known keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.formats import AWQ
from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import ConfigError

# NVIDIA/TensorRT-LLM tensorrt_llm/quantization/mode.py QuantAlgo.
ALGORITHMS: Mapping[str, str | None] = {
    "bf16": None,
    "fp16": None,
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
}
KV_ALGORITHMS: Mapping[str, str | None] = {"auto": None, "fp8": "FP8", "int8": "INT8"}
# Never quantized by TensorRT-LLM unless a list of one's own replaces this one, so ours contains it
# (QuantConfig.exclude_modules).
ALWAYS_EXCLUDED = (
    "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate",
)  # fmt: skip
# MoeConfig.ExpertScaleNormalizationMode.RENORMALIZE: the weights of the chosen experts sum to 1.
_RENORMALIZE = 1
# From this context length on, Phi-3 has one set of rotary factors for short and one for long texts.
_LONG_ROPE_FROM = 128_000
_VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Tensor and pipeline parallel size."""

    tensor: int = 1
    pipeline: int = 1


def padded_vocabulary(vocab_size: int, formats: Collection[Format]) -> int:
    """The vocabulary of the checkpoint: AWQ formats pad it to a multiple of 64 (ModelOpt), others do not."""
    if not set(AWQ).intersection(formats):
        return vocab_size
    return -(-vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def checkpoint_config(
    hf: Mapping[str, Any],
    quantization: QuantizationConfig,
    ranks: Ranks,
    *,
    dtype: str,
    excluded: Iterable[str] = (),
    formats: Collection[Format] = (),
    producer: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the config.json of a TensorRT-LLM checkpoint.

    Args:
        hf: the Hugging Face config with its defaults filled in.
        quantization: format, KV cache, group size, alpha.
        ranks: what the checkpoint is cut for.
        dtype: "bfloat16" or "float16".
        excluded: TensorRT-LLM names of layers that stay at 16 bit, besides the ones that always do.
        formats: what layers really have; without any, the main format. Of several, `layer_config` has the rest.
        producer: the tool that wrote the tensors.

    Raises:
        ConfigError: the architecture is not one whose config is known here.
    """
    architecture = str((hf.get("architectures") or [""])[0])
    if architecture not in _SPECIFIC:
        raise ConfigError(
            f"the TensorRT-LLM config of {architecture or 'a model without architectures'} is not known here; "
            f"known: {', '.join(sorted(_SPECIFIC))}",
            hint="Use engine.target: tensorrt_llm_llmapi, or one of these.",
        )
    heads = hf["num_attention_heads"]
    head_size = hf.get("head_dim") or hf["hidden_size"] // heads
    base, scaling = rotary(hf)
    kinds = tuple(dict.fromkeys(formats)) or (quantization.format,)
    config: dict[str, Any] = {
        "architecture": architecture,
        "dtype": dtype,
        "logits_dtype": "float16",  # as ModelOpt writes it for both 16-bit types
        "vocab_size": padded_vocabulary(hf["vocab_size"], kinds),
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_hidden_layers": hf["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "hidden_act": hf["hidden_act"],
        "norm_epsilon": hf["rms_norm_eps"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": int(head_size * (hf.get("partial_rotary_factor") or 1.0)),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attn_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "qk_layernorm": False,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        # lm_head.weight is always written, tied or not, so that the last pipeline rank has it.
        "share_embedding_table": False,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "mapping": {
            "world_size": ranks.tensor * ranks.pipeline,
            "tp_size": ranks.tensor,
            "pp_size": ranks.pipeline,
        },
        "quantization": mixed_section(quantization)
        if len(kinds) > 1
        else quantization_section(quantization.model_copy(update={"format": kinds[0]}), excluded),
    }
    config |= _SPECIFIC[architecture](hf)
    if "moe" in config:
        config["mapping"] |= {"moe_tp_size": ranks.tensor, "moe_ep_size": 1}
    return config | ({"producer": dict(producer)} if producer else {})


def quantization_section(quantization: QuantizationConfig, excluded: Iterable[str]) -> dict[str, Any]:
    """The `quantization` part: only keys that QuantConfig has, lists sorted."""
    section: dict[str, Any] = {
        "quant_algo": ALGORITHMS[quantization.format],
        "kv_cache_quant_algo": KV_ALGORITHMS[quantization.kv_cache],
        "exclude_modules": sorted({*ALWAYS_EXCLUDED, *excluded}),
    }
    section |= _groups(quantization.format, quantization)
    if quantization.format == "int8_sq":
        section["smoothquant_val"] = quantization.smoothquant_alpha
    return section


def mixed_section(quantization: QuantizationConfig) -> dict[str, Any]:
    """The `quantization` part where layers have several formats: only what is one for all."""
    return {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": KV_ALGORITHMS[quantization.kv_cache]}


def layer_config(quantization: QuantizationConfig, formats: Mapping[str, Format]) -> dict[str, Any]:
    """Write quant_cfg.json, which says how each layer of a MIXED_PRECISION checkpoint computes.

    Its fields are those of LayerQuantConfig and, per layer, of QuantConfig. A layer that is not listed is at 16 bit.

    Args:
        quantization: group size and KV cache.
        formats: stored name of each quantized layer -> format. Names count layers from 0 on every pipeline rank, and
            one file is for all ranks, so layers of one name must be of one format.
    """
    layers = {
        name: {"quant_algo": ALGORITHMS[form], **_groups(form, quantization)} for name, form in sorted(formats.items())
    }
    return mixed_section(quantization) | {"quantized_layers": layers}


def _groups(form: Format, quantization: QuantizationConfig) -> dict[str, Any]:
    if form not in AWQ:
        return {}
    return {"group_size": quantization.group_size, "has_zero_point": False, "pre_quant_scale": True}


def rotary(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The rotary base and the scaling dictionary; transformers 5 keeps both in `rope_parameters`.

    A scaling of type "default" is none.
    """
    parameters = hf.get("rope_parameters")
    if isinstance(parameters, Mapping):
        base = parameters.get("rope_theta", hf.get("rope_theta"))
        scaling: Any = {key: value for key, value in parameters.items() if key != "rope_theta"}
    else:
        base, scaling = hf.get("rope_theta"), hf.get("rope_scaling")
    plain = not scaling or scaling.get("rope_type", scaling.get("type")) == "default"
    return float(base or 10000.0), None if plain else dict(scaling)


def _llama(_hf: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _mixtral(hf: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": hf["num_local_experts"],
        "top_k": hf["num_experts_per_tok"],
        "normalization_mode": _RENORMALIZE,
    }
    return {"moe": moe, "hidden_act": "swiglu"}  # experts say explicitly that their activation is gated


def _qwen2(_hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qwen_type": "qwen2", "attn_bias": True}  # q, k and v always have a bias, which no field says


def _qwen3(_hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qwen_type": "qwen3", "qk_layernorm": True}


def _gemma(_hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"tie_word_embeddings": True}  # by the family's definition; configs leave the flag out


def _phi3(hf: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "hidden_act": "swiglu" if hf["hidden_act"] == "silu" else hf["hidden_act"],
        "rotary_pct": hf.get("partial_rotary_factor") or 1.0,
    }
    scaling = rotary(hf)[1]
    if hf["max_position_embeddings"] >= _LONG_ROPE_FROM and scaling:
        fields |= {
            "position_embedding_type": "long_rope",
            "original_max_position_embeddings": hf["original_max_position_embeddings"],
            "longrope_scaling_short_factors": scaling["short_factor"],
            "longrope_scaling_long_factors": scaling["long_factor"],
        }
    return fields


_SPECIFIC: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GemmaForCausalLM": _gemma,
    "Phi3ForCausalLM": _phi3,
}

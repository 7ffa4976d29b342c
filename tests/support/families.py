"""Tiny random checkpoints of every family that has a TensorRT-LLM layout here."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pipeline.config.schema import CalibrationConfig, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.quantize.formats import WantedCheckpoint
from tests.support.checkpoints import tiny_tokenizer
from tests.support.making import make_quantized

TEXT = "The capital of France is Paris {0} and the capital of Italy is Rome, said the quick brown fox {1} times."
# Sizes that differ from one another wherever the layout could mix them up; every one divides by 2 ranks.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_scaling": LLAMA3_ROPE},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@cache
def tiny_family(name: str, **changes: Any) -> SourceCheckpoint:
    """A random model of a family, with text.jsonl beside it.

    Args:
        name: key of FAMILIES.
        changes: fields of its config.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **FAMILIES[name], **changes})
    config.architectures = [f"{name}ForCausalLM"]
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(config.dtype or torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.1)
    directory = Path(mkdtemp()) / name
    model.save_pretrained(directory, safe_serialization=True)
    tiny_tokenizer(directory, config.vocab_size)
    rows = [json.dumps({"text": TEXT.format(number, number * number)}) for number in range(60)]
    (directory / "text.jsonl").write_text("\n".join(rows))
    return SourceCheckpoint(path=directory, digest=f"sha256:{name}")


def quantize_family(
    source: SourceCheckpoint, out: Path, *, tp: int = 1, pp: int = 1, **quantization: Any
) -> QuantizedCheckpoint:
    """Make the TensorRT-LLM checkpoint of a tiny model.

    Args:
        source: from `tiny_family`.
        out: where.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        quantization: fields of the config; groups are of 64 unless it says otherwise.
    """
    make_quantized(
        source,
        QuantizationConfig(**{"group_size": 64, **quantization}),
        CalibrationConfig(dataset=source.path / "text.jsonl", num_samples=8, max_seq_len=64),
        WantedCheckpoint(export="trtllm", tensor_parallel_size=tp, pipeline_parallel_size=pp),
        out,
    )
    return QuantizedCheckpoint(path=out, digest="sha256:quantized")


@cache
def _made(name: str, tp: int, pp: int, quantization: tuple[tuple[str, Any], ...]) -> Path:
    out = Path(mkdtemp()) / "quantized"
    quantize_family(tiny_family(name), out, tp=tp, pp=pp, **dict(quantization))
    return out


def copy_of(name: str, directory: Path, *, tp: int = 1, pp: int = 1, **quantization: Any) -> QuantizedCheckpoint:
    """Copy a checkpoint, made once per session, to a directory that a test may damage."""
    shutil.copytree(_made(name, tp, pp, tuple(sorted(quantization.items()))), directory)
    return QuantizedCheckpoint(path=directory, digest="sha256:quantized")


def held(source: SourceCheckpoint) -> VerifyConfig:
    """Verification on 128 tokens of the text beside a tiny model."""
    return VerifyConfig(dataset=source.path / "text.jsonl", num_tokens=128)

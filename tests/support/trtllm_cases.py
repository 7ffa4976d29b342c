"""Configs and decoders for the checks of the TensorRT-LLM targets, without files."""

from __future__ import annotations

from typing import Any

from pipeline.checkpoints.architecture import Architecture, Rope
from pipeline.config.schema import BuildConfig
from pipeline.host.probe import GpuProfile, HostProfile
from pipeline.targets.tensorrt_llm.preflight import preflight

GIB = 2**30


def decoder(**sizes: Any) -> Architecture:
    """A Llama decoder with these sizes (Llama-3.1-8B's otherwise), as checkpoints/architecture.py describes it."""
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope": Rope(theta=500000.0, scaling={"rope_type": "llama3", "factor": 8.0}),
        "dtype": "bfloat16",
        "eos_token_ids": (1,),
        "bos_token_id": None,
        "pad_token_id": None,
        "parameters": 0,
        **sizes,
    }
    values.setdefault("linears", _linears(values))
    return Architecture(**values)


def _linears(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    query = values["num_attention_heads"] * values["head_dim"]
    key = values["num_key_value_heads"] * values["head_dim"]
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(values["num_hidden_layers"])
    linears = {f"model.layers.{n}.{name}": shape for n in layers for name, shape in shapes.items()}
    head = {} if values["tie_word_embeddings"] else {"lm_head": (values["vocab_size"], hidden)}
    return linears | head


LLAMA_3_1_8B = decoder()
LLAMA_2_7B = decoder(
    intermediate_size=11008, num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
    rope=Rope(theta=10000.0, scaling={}),
)  # fmt: skip
LLAMA_3_3_70B = decoder(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
QWEN2_72B = decoder(
    architecture="Qwen2ForCausalLM", model_type="qwen2", hidden_size=8192, intermediate_size=29568,
    num_hidden_layers=80, num_attention_heads=64, vocab_size=152064, max_position_embeddings=32768,
    rope=Rope(theta=1000000.0, scaling={}),
)  # fmt: skip
QWEN3_32B = decoder(
    architecture="Qwen3ForCausalLM", model_type="qwen3", hidden_size=5120, intermediate_size=25600,
    num_hidden_layers=64, num_attention_heads=64, vocab_size=151936, max_position_embeddings=40960,
    rope=Rope(theta=1000000.0, scaling={}),
)  # fmt: skip


def gpu_config(**values: Any) -> BuildConfig:
    """A config for the engine path on an H100 with keys set by their path, '.' written as '__'."""
    document: dict[str, Any] = {
        "name": "a",
        "source": {"path": "m"},
        "engine": {"target": "tensorrt_llm", "gpu": "H100", "max_seq_len": 8192},
    }
    for path, value in values.items():
        *sections, name = path.split("__")
        section = document
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return BuildConfig.model_validate(document)


def said(
    row: str, architecture: Architecture = LLAMA_3_1_8B, host: HostProfile | None = None, /, **values: Any
) -> list[str]:
    """Findings of one row of the preflight as 'severity key: message hint [row]'; `host` is a machine."""
    host = values.pop("host", host)
    found = preflight(gpu_config(**values), architecture, host)
    return [f"{finding.severity} {finding}" for finding in found if getattr(finding, "id", "") == row]


def machine(
    *cards: GpuProfile, memory_gib: int = 512, available_gib: int | None = None, **versions: str
) -> HostProfile:
    """A machine with these GPUs, memory and packages."""
    return HostProfile(
        cpu_model="c", cpu_flags=(), usable_cores=8, memory_total_bytes=memory_gib * GIB,
        memory_available_bytes=(memory_gib if available_gib is None else available_gib) * GIB, gpus=cards,
        gpus_note="" if cards else "none", versions={name.replace("_", "-"): text for name, text in versions.items()},
    )  # fmt: skip


H100 = GpuProfile(name="NVIDIA H100 80GB HBM3", sm=90, memory_bytes=79 * GIB, driver="590.44.01")
A100 = GpuProfile(name="NVIDIA A100-SXM4-80GB", sm=80, memory_bytes=79 * GIB, driver="590.44.01")
OLD_DRIVER = GpuProfile(name="NVIDIA H100 80GB HBM3", sm=90, memory_bytes=79 * GIB, driver="575.57.08")

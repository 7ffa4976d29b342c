"""LoRA adapters: their rank and modules against the engine, and their size against the backend's caches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.legality import table
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, error, warning

# Names of modules that adapters of Hugging Face models change -> upstream's
# (NVIDIA/TensorRT-LLM tensorrt_llm/lora_helper.py, default mapping).
MODULES: Mapping[str, str] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
}
# Defaults of the backend (tensorrtllm_backend docs/lora.md@5419275).
MAX_ADAPTER_SIZE = 64
HOST_CACHE_BYTES = 2**30
ELEMENT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """adapter_config.json of one directory."""

    directory: str
    rank: int
    modules: tuple[str, ...]


def check(case: Case) -> Iterator[Finding]:
    """Yield what an adapter or the caches cannot do."""
    build = case.config.engine.build
    if not (build.lora_dir or build.lora_target_modules or build.lora_plugin not in (None, "disable")):
        return
    adapters = []
    for directory in build.lora_dir if build.lora_ckpt_source == "hf" else ():
        found = _read(directory)
        if isinstance(found, Finding):
            yield found
        else:
            adapters.append(found)
            yield from _fits(case, found)
    yield from _caches(case, adapters)


def _read(directory: str) -> Adapter | Finding:
    path, key = Path(directory) / "adapter_config.json", "engine.build.lora_dir"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Adapter(directory=directory, rank=int(document["r"]), modules=tuple(document["target_modules"]))
    except OSError as problem:
        message = f"{path} cannot be read here ({problem.strerror}), so its rank and modules are not checked."
        return warning("TL65", key, message, "Build where the adapter is, or correct the path.")
    except (ValueError, KeyError, TypeError):
        message = f"{path} is not the configuration of a LoRA adapter: 'r' or 'target_modules' is missing."
        return error("TL65", key, message, "Name the directory that PEFT wrote.")


def _fits(case: Case, adapter: Adapter) -> Iterator[Finding]:
    """An adapter beyond the rank and modules of the engine fails at run time (NVIDIA/TensorRT-LLM#1903)."""
    build = case.config.engine.build
    if adapter.rank > build.max_lora_rank:
        message = f"adapter {adapter.directory} has rank {adapter.rank}, and the engine takes {build.max_lora_rank}."
        yield error("TL65", "engine.build.max_lora_rank", message, f"Raise it to {adapter.rank}.")
    if build.lora_target_modules:
        wanted = {MODULES.get(name, name) for name in adapter.modules}
        missing = sorted(wanted - set(build.lora_target_modules))
        if missing:
            message = f"adapter {adapter.directory} changes {', '.join(missing)}, and the engine does not take these."
            yield error("TL65", "engine.build.lora_target_modules", message, f"Add {', '.join(missing)}.")


def _caches(case: Case, adapters: list[Adapter]) -> Iterator[Finding]:
    """An adapter that no cache holds is 'not found in cache' (NVIDIA/TensorRT-LLM#1552)."""
    serving, rank = case.config.serving.tensorrt_llm, case.config.engine.build.max_lora_rank
    largest = serving.lora_cache_max_adapter_size or MAX_ADAPTER_SIZE
    if largest < rank:
        message = f"the cache takes adapters of rank {largest}, and the engine is built for rank {rank}."
        yield error("TL64", "serving.tensorrt_llm.lora_cache_max_adapter_size", message, f"Set it to {rank}.")
    need = sum(_adapter_bytes(case, adapter) for adapter in adapters)
    room = serving.lora_cache_host_memory_bytes
    room = HOST_CACHE_BYTES if room is None else room
    if need > room:
        message = (
            f"{len(adapters)} adapters are {need} bytes on one rank, and the host cache has {room}; some are evicted."
        )
        yield warning(
            "TL64", "serving.tensorrt_llm.lora_cache_host_memory_bytes", message, f"Set it to {need} or more."
        )


def _adapter_bytes(case: Case, adapter: Adapter) -> int:
    """16-bit low-rank factors of one adapter on one tensor parallel rank: rank x (in + out) of every module.

    The axis that tensor parallelism splits is split here too.
    """
    tensor, total = case.config.engine.tensor_parallel_size, 0
    for name, (outer, inner) in case.model.linears.items():
        last = name.rpartition(".")[2]
        if last in adapter.modules:
            row = last in table().row_parallel.names
            total += adapter.rank * (outer // (1 if row else tensor) + inner // (tensor if row else 1)) * ELEMENT_BYTES
    return total

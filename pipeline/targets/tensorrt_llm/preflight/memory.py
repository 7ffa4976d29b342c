"""Whether the engine fits into its GPUs, and if not, the nearest single changes of the config that make it fit.

Each change is checked by counting the budget again and by every other check of the config, so that what is
offered can be built. The order is that of risk: speed of long prompts, more GPUs, shorter requests, the KV
cache's precision, the weights' precision, another GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.config.legality import gpus
from pipeline.config.schema import BuildConfig
from pipeline.targets.tensorrt_llm import budget
from pipeline.targets.tensorrt_llm.budget import Budget
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, error, warning
from pipeline.targets.tensorrt_llm.preflight.sizes import GPUS_PER_NODE
from pipeline.targets.tensorrt_llm.toolchains import is_model

FEWER_TOKENS = (8192, 4096, 2048, 1024)
NARROWER = ("fp8", "w4a8_awq", "int8_sq", "int4_awq")
OFFERED = 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """One key and the value that makes the engine fit, with the budget that it leads to."""

    key: str
    value: str | int
    budget: Budget

    def __str__(self) -> str:
        """As a person would write it, with the memory of the KV cache that it leaves."""
        pool = self.budget.kv_pool / budget.GIB
        variant = f" of {self.budget.memory_gb} GB" if self.key == "engine.gpu" else ""
        return f"{self.key}: {self.value}{variant} ({pool:.1f} GiB for KV, {self.budget.tokens} tokens)"


def check(case: Case, is_legal: Callable[[BuildConfig], bool]) -> Iterator[Finding]:
    """Yield what does not fit.

    Args:
        case: the config, its model and its machine.
        is_legal: whether nothing but memory speaks against a config that the original did not have.
    """
    memory = _memory_here(case)
    found = budget.budget(case.config, case.model, memory_bytes=memory)
    if not found.fits:
        yield _misfit(case, found, nearest(case, is_legal, memory))
        return
    smallest = min(gpus()[case.gpu].memory_gb)
    if found.memory_gb is not None and found.memory_gb > smallest:
        message = f"this needs the {found.memory_gb} GB variant; {smallest} GB are not enough."
        hint = f"Serve on {case.gpu} {found.memory_gb} GB."
        yield warning("TL46", "engine.gpu", message, hint)


def _misfit(case: Case, found: Budget, changes: Sequence[Change]) -> Finding:
    engine, gib = case.config.engine, budget.GIB
    offered = "; ".join(str(change) for change in changes[:OFFERED])
    hint = f"Nearest that fits: {offered}." if offered else "No single change fits; combine a narrower format and GPUs."
    card = f"{found.gpu} with {found.capacity / gib:.1f} GiB"
    if found.free <= 0:
        taken = ", ".join(f"{row.what} {row.n_bytes / gib:.1f}" for row in found.rows)
        message = f"weights and overhead take {found.used / gib:.1f} GiB of each {card} ({taken})."
        return error("TL46", "engine.gpu", message, hint)
    message = (
        f"the KV pool of each {card} holds {found.tokens} tokens ({found.kv_pool / gib:.1f} GiB), and one sequence of "
        f"max_seq_len {found.max_seq_len}{f' x {engine.max_beam_width} beams' if engine.max_beam_width > 1 else ''} "
        f"needs {found.tokens_per_sequence}."
    )
    return error("TL45", "engine.max_seq_len", message, hint)


def nearest(case: Case, is_legal: Callable[[BuildConfig], bool], memory_bytes: int | None = None) -> tuple[Change, ...]:
    """Return the single changes that make the engine fit, in order of least risk; one per kind of change.

    Args:
        case: a config that does not fit.
        is_legal: see `check`.
        memory_bytes: memory of the GPU at hand; None judges the variants sold.
    """
    changes = []
    for key, values in _candidates(case, memory_bytes):
        for value in values:
            config = changed(case.config, key, value)
            memory = None if key == "engine.gpu" else memory_bytes
            found = budget.budget(config, case.model, memory_bytes=memory)
            if found.fits and is_legal(config):
                changes.append(Change(key=key, value=value, budget=found))
                break
    return tuple(changes)


def changed(config: BuildConfig, key: str, value: object) -> BuildConfig:
    """A copy of the config with one key set, validated like a written one."""
    document = config.model_dump()
    *sections, name = key.split(".")
    section = document
    for part in sections:
        section = section[part]
    section[name] = value
    return BuildConfig.model_validate(document)


def _candidates(case: Case, memory_bytes: int | None) -> Iterator[tuple[str, Sequence[str | int]]]:
    """Keys in order of risk, each with its values, the smallest change first."""
    engine, quantization = case.config.engine, case.config.quantization
    yield "engine.max_num_tokens", [n for n in FEWER_TOKENS if engine.max_batch_size <= n < engine.max_num_tokens]
    others = engine.pipeline_parallel_size * engine.context_parallel_size
    wider = [n for n in (2, 4, 8) if engine.tensor_parallel_size < n and n * others <= GPUS_PER_NODE]
    yield "engine.tensor_parallel_size", wider
    found = budget.budget(case.config, case.model, memory_bytes=memory_bytes)
    block = engine.kv_cache.tokens_per_block
    length = found.tokens // engine.max_beam_width // block * block - engine.build.max_draft_len
    yield "engine.max_seq_len", [length] if length > 1 else []
    if quantization.kv_cache == "auto":
        yield "quantization.kv_cache", ["fp8", "int8"]
    narrower = [] if quantization.overrides else [form for form in NARROWER if form != quantization.format]
    yield "quantization.format", narrower
    own = max(gpus()[case.gpu].memory_gb)
    larger = [name for name, row in gpus().items() if max(row.memory_gb) > own]
    larger.sort(key=lambda name: max(gpus()[name].memory_gb))
    yield "engine.gpu", larger


def _memory_here(case: Case) -> int | None:
    """Memory of the smallest GPU of the config's model on this machine; None when there is none or it is unknown."""
    cards = case.host.gpus if case.host is not None else ()
    sizes = [card.memory_bytes for card in cards if is_model(card.name, case.gpu) and card.memory_bytes is not None]
    return min(sizes, default=None)

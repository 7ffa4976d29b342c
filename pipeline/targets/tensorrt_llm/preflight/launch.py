"""MPI ranks and GPUs of a running engine: counts and numbers that must agree with its parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, error

_GROUPS = re.compile(r"\d+(,\d+)*(;\d+(,\d+)*)*")


def check(case: Case) -> Iterator[Finding]:
    """Yield what does not agree; a group of ids belongs to one instance of the engine."""
    serving = case.config.serving.tensorrt_llm
    yield from _devices(case, serving.gpu_device_ids)
    yield from _participants(case, serving.participant_ids)


def _devices(case: Case, text: str | None) -> Iterator[Finding]:
    """One GPU per rank, each once (NVIDIA/TensorRT-LLM#2021; cpp/tensorrt_llm/runtime/worldConfig.cpp)."""
    key = "serving.tensorrt_llm.gpu_device_ids"
    groups = _groups(text)
    if text is not None and not groups:
        yield error("TL47", key, f"'{text}' is not a list of GPUs.", "Write '0,1', and ';' between instances.")
    wrong = [group for group in groups if len(group) != case.world_size or len(set(group)) != len(group)]
    if wrong:
        shown = ",".join(map(str, wrong[0]))
        message = f"'{shown}' is not {case.world_size} different GPUs, which one instance has as ranks (tp x pp x cp)."
        example = ",".join(map(str, range(case.world_size)))
        yield error("TL47", key, message, f"Write {case.world_size}, for example '{example}', or leave it empty.")


def _participants(case: Case, text: str | None) -> Iterator[Finding]:
    """Rank 0 is the orchestrator, and every rank has one id (NVIDIA/TensorRT-LLM#1608)."""
    key = "serving.tensorrt_llm.participant_ids"
    groups = _groups(text)
    example = ",".join(map(str, range(1, case.world_size + 1)))
    if text is not None and not groups:
        yield error(
            "TL50", key, f"'{text}' is not a list of MPI ranks.", f"Write '{example}', and ';' between instances."
        )
    ids = [number for group in groups for number in group]
    if 0 in ids:
        yield error("TL50", key, "rank 0 is the orchestrator and cannot take part.", f"Count from 1: '{example}'.")
    elif len(set(ids)) != len(ids) or any(len(group) != case.world_size for group in groups):
        message = f"'{text}' does not give each instance {case.world_size} ranks of its own (tp x pp x cp)."
        yield error("TL50", key, message, f"Write {case.world_size} per instance, for example '{example}'.")


def _groups(text: str | None) -> list[list[int]]:
    if text is None or not _GROUPS.fullmatch(text):
        return []
    return [[int(number) for number in group.split(",")] for group in text.split(";")]

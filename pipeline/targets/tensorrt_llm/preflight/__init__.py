"""Everything that can be known to fail before a GPU is touched: TensorRT-LLM's sharp edges as checks.

Most checks are rows of rules.toml; those that calculate are small functions beside it. coverage.toml says
which check covers which edge, and why an edge has none here. What config/legality.py judges is not judged
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from pipeline.config import legality
from pipeline.config import rules as config_rules
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem
from pipeline.host.probe import HostProfile
from pipeline.targets.tensorrt_llm.preflight import adapters, launch, machine, memory, model, rules, sizes
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, Model

__all__ = ["Finding", "Model", "preflight"]


def preflight(
    config: BuildConfig,
    architecture: Model,
    host: HostProfile | None = None,
    provenance: Mapping[str, str] = MappingProxyType({}),
) -> list[Problem]:
    """Judge a config of a TensorRT-LLM target.

    Args:
        config: a valid config; another target, or no engine.gpu, yields nothing.
        architecture: facts about the source.
        host: the machine that quantizes and, unless the build is deferred, compiles; None leaves it out.
        provenance: key path -> "file:line" (LoadedConfig.provenance), to say where a key was written.

    Returns:
        Findings with the number of the edge, errors first.
    """
    if config.engine.target == "openvino" or config.engine.gpu is None:
        return []
    case = Case(config=config, model=architecture, host=host)
    found = [*_without_memory(case)]
    before = _errors(case, found)
    found += memory.check(case, lambda other: not _errors(replace(case, config=other)) - before)
    placed = [_placed(finding, provenance) for finding in dict.fromkeys(found)]
    return sorted(placed, key=lambda finding: finding.severity != "error")


def _without_memory(case: Case) -> Iterator[Finding]:
    yield from machine.check(case)
    if case.config.engine.target == "tensorrt_llm":
        yield from model.check(case)
        yield from rules.check(case)
        yield from sizes.check(case)
        yield from launch.check(case)
        yield from adapters.check(case)


def _errors(case: Case, found: list[Finding] | None = None) -> set[str]:
    """Keys and rows of all errors but memory: what a change of the config must not add to."""
    found = list(_without_memory(case)) if found is None else found
    laws = [finding.keys[0] for finding in config_rules.check(case.config) if finding.severity == "error"]
    legal = [problem.where for problem in legality.check(case.config, case.model) if problem.severity == "error"]
    return {*laws, *legal, *(f"{finding.id} {finding.where}" for finding in found if finding.severity == "error")}


def _placed(finding: Finding, provenance: Mapping[str, str]) -> Finding:
    place = provenance.get(finding.where, "default")
    return finding if place == "default" else replace(finding, where=f"{place} {finding.where}")

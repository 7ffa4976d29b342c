"""Can this legal config be built at all? The table is legality.toml; this reads and applies it.

Rows combine target, format, KV cache, GPU, features, architecture and toolchain. Laws about sizes
(group size x layer shape, heads x tensor parallelism, lengths) are arithmetic and live in shapes.py.
Nothing here touches a device or reads weights: it runs before anything heavy starts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, Protocol

from pydantic import Field

from pipeline.config import shapes
from pipeline.config.formats import formats_of, layer_format
from pipeline.config.schema import BuildConfig, Format
from pipeline.config.section import Section
from pipeline.config.shapes import ArchitectureFacts
from pipeline.config.variants import variants
from pipeline.errors import Problem, Severity

__all__ = ["ArchitectureFacts", "Gpu", "HostFacts", "check", "gpus", "least_sm", "table"]

Fact = str | int | bool
# What a checkpoint that is passed on is not judged by: rows about them are about checkpoints made here.
_OF_OUR_FORMATS = ("format", "mixed", "kv_cache", "group_size", "awq")


class HostFacts(Protocol):
    """What the check wants to know about a machine."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Installed distributions and their versions."""
        ...


class Gpu(Section):
    """A GPU that an engine can be built for.

    Attributes:
        name: the config's word.
        sm: compute capability as an integer, 90 for Hopper.
        architecture: NVIDIA's name of the generation.
        memory_gb: memory of the variants sold under the name, in GB as marketed.
        source: where the facts were read.
    """

    name: str
    sm: int
    architecture: str
    memory_gb: tuple[int, ...]
    source: str


class Range(Section):
    """Bounds of a number, both exclusive."""

    above: int | None = None
    below: int | None = None


class Row(Section):
    """One row of the table: the conditions, all of which must hold, and where the fact was read."""

    when: Mapping[str, tuple[str | int, ...] | Range]
    reason: str
    source: str


class Verdict(Row):
    """A row that refuses or warns: the config key to blame, and what to write instead."""

    key: str
    instead: str


class Package(Row):
    """A package version that a combination needs: at least `from`, less than `below`."""

    package: str
    at_least: str | None = Field(default=None, alias="from")
    below: str | None = None


class Tried(Section):
    """The architectures that a target was really run with, and the verdict on others."""

    target: str
    names: tuple[str, ...]
    others: Literal["refused", "warning"]
    source: str


class Names(Section):
    """Last parts of module names that share a property."""

    names: frozenset[str]
    source: str


class Table(Section):
    """legality.toml."""

    allowed: tuple[Row, ...]
    passed_on: tuple[Row, ...]
    refused: tuple[Verdict, ...]
    warning: tuple[Verdict, ...]
    toolchain: tuple[Package, ...]
    architectures: tuple[Tried, ...]
    row_parallel: Names
    fused: tuple[Names, ...]


@cache
def table() -> Table:
    """Read legality.toml; a row without a source or with an unknown field does not load."""
    return Table.model_validate(_read("legality.toml"))


@cache
def gpus() -> Mapping[str, Gpu]:
    """Read gpus.toml: config word -> facts."""
    return MappingProxyType(
        {name: Gpu.model_validate({"name": name} | row) for name, row in _read("gpus.toml").items()}
    )


def check(
    config: BuildConfig,
    architecture: ArchitectureFacts | None,
    host: HostFacts | None = None,
    provenance: Mapping[str, str] = MappingProxyType({}),
    *,
    layout: str | None = None,
) -> list[Problem]:
    """Judge a config against table, model and machine.

    Args:
        config: a valid config.
        architecture: facts about the source; None judges only what needs none.
        host: versions on this machine; None leaves the toolchain out.
        provenance: key path -> "file:line" (LoadedConfig.provenance), to say where a key was written.
        layout: of a checkpoint made elsewhere that the target's runtime is to read as it is; its format is not judged.

    Returns:
        Every problem, errors first; an empty list means that nothing speaks against the build.
    """
    problems: list[Problem] = []
    for form in formats_of(config.quantization, () if architecture is None else architecture.linears):
        facts = _facts(config, form, architecture)
        if layout is not None:
            facts = {name: fact for name, fact in facts.items() if name not in _OF_OUR_FORMATS} | {"layout": layout}
        problems += _combinations(facts) if layout is None else [*_refusals(facts), *_passed_on(facts)]
        if architecture is not None:
            problems += _architecture(facts)
        if host is not None:
            problems += _toolchain(facts, host)
    if architecture is not None:
        problems += _shapes(config, architecture)
    if config.quantization.format == "auto":
        blamed = {"quantization.format"} | (set() if config.quantization.overrides else {"quantization.overrides"})
        problems = [
            replace(problem, where="quantization.auto.candidates") if problem.where in blamed else problem
            for problem in problems
        ]
    problems = [_placed(problem, provenance) for problem in dict.fromkeys(problems)]
    return sorted(problems, key=lambda problem: problem.severity != "error")


def _shapes(config: BuildConfig, architecture: ArchitectureFacts) -> list[Problem]:
    """Judge sizes; with format auto first what does not depend on the choice, then every candidate for every layer."""
    fused = tuple(row.names for row in table().fused)
    problems: list[Problem] = []
    for variant in dict.fromkeys((config, *variants(config))):
        problems += shapes.check(variant, architecture, table().row_parallel.names, fused)
        if any(problem.severity == "error" for problem in problems):
            break
    return problems


def least_sm(target: str, quantization: str, kv_cache: str) -> int | None:
    """Return the oldest GPU that a combination runs on: 0 where it needs none, None where it runs nowhere."""
    facts: dict[str, Fact] = {"target": target, "format": quantization, "kv_cache": kv_cache}
    if any(_matches(row, facts) for row in table().refused):
        return None
    limits = []
    for row in table().allowed:
        if all(_holds(wanted, facts.get(name)) for name, wanted in row.when.items() if name != "sm"):
            sm = row.when.get("sm")
            limits.append(sm.above + 1 if isinstance(sm, Range) and sm.above is not None else 0)
    return min(limits, default=None)


def _facts(config: BuildConfig, form: Format, architecture: ArchitectureFacts | None) -> dict[str, Fact]:
    """The facts of one of the config's formats."""
    engine, quantization = config.engine, config.quantization
    present = formats_of(quantization, () if architecture is None else architecture.linears)
    facts: dict[str, Fact] = {
        "target": engine.target,
        "format": form,
        "mixed": len(present) > 1,
        "with_fp8": "fp8" in present,
        "kv_cache": quantization.kv_cache,
        "group_size": quantization.group_size,
        "awq": quantization.awq,
        "dtype": engine.dtype,
        "sparsity": config.sparsity.method,
        "finetune": config.finetune.method,
        "enable_block_reuse": engine.kv_cache.enable_block_reuse,
        "enable_chunked_context": engine.enable_chunked_context,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "context_parallel_size": engine.context_parallel_size,
    }
    if engine.target != "openvino" and engine.gpu is not None:
        facts |= {"gpu": engine.gpu, "sm": gpus()[engine.gpu].sm}
    if architecture is not None:
        facts |= {"architecture": architecture.architecture, "source_dtype": architecture.dtype}
        few = architecture.num_key_value_heads < architecture.num_attention_heads
        facts["grouped_query"] = few and layer_format(quantization, "model.layers.0.self_attn.o_proj") == form
    return facts


def _refusals(facts: Mapping[str, Fact]) -> Iterator[Problem]:
    yield from (_judged(row, facts, "error") for row in table().refused if _matches(row, facts))
    yield from (_judged(row, facts, "warning") for row in table().warning if _matches(row, facts))


def readers_of(layout: str) -> list[str]:
    """Return the targets whose runtimes read a layout of another tool as it is, on some GPU."""
    rows = [row.when for row in table().passed_on if _holds(row.when["layout"], layout)]
    return sorted({str(target) for when in rows for target in when["target"]})


def _passed_on(facts: Mapping[str, Fact]) -> Iterator[Problem]:
    """Refuse a layout that the target's runtime does not read."""
    if any(_matches(row, facts) for row in table().passed_on):
        return
    others = sorted(set(readers_of(str(facts["layout"]))) - {facts["target"]})
    where = f"{facts['target']} on {facts['gpu']}" if "gpu" in facts else str(facts["target"])
    hint = f"It is read by {' and '.join(others)}; or name" if others else "Name"
    message = f"a checkpoint in the layout '{facts['layout']}' is not read by {where}."
    yield Problem(where="engine.target", message=message, hint=f"{hint} the 16-bit checkpoint it was made from.")


def _combinations(facts: Mapping[str, Fact]) -> Iterator[Problem]:
    refused = [row for row in table().refused if _matches(row, facts)]
    yield from _refusals(facts)
    if not refused and not any(_matches(row, facts) for row in table().allowed):
        where = f"{facts['target']} on {facts['gpu']}" if "gpu" in facts else str(facts["target"])
        message = f"{facts['format']} with kv_cache {facts['kv_cache']} is not known to work with {where}."
        yield Problem(where="quantization.format", message=message, hint="Pick another format or KV cache format.")


def _architecture(facts: Mapping[str, Fact]) -> Iterator[Problem]:
    """Judge an architecture that no row refuses by the list of what the target was run with."""
    name = facts["architecture"]
    if any("architecture" in row.when and _matches(row, facts) for row in table().refused):
        return
    for row in table().architectures:
        if row.target != facts["target"] or name in row.names:
            continue
        known = ", ".join(row.names)
        if row.others == "refused":
            message, hint = f"{name} is not built for {row.target}.", f"Architectures that are: {known}."
            yield Problem(where="engine.target", message=message, hint=hint)
        else:
            message = f"{name} was not run with {row.target} before (tried: {known})."
            hint = "The verify stage judges the result; read its report before you ship it."
            yield Problem(where="engine.target", message=message, hint=hint, severity="warning")


def _toolchain(facts: Mapping[str, Fact], host: HostFacts) -> Iterator[Problem]:
    for row in table().toolchain:
        version = host.versions.get(row.package)
        if version is None or not _matches(row, facts):
            continue
        too_old = row.at_least is not None and _release(version) < _release(row.at_least)
        too_new = row.below is not None and _release(version) >= _release(row.below)
        if too_old or too_new:
            limits = [f"{sign}{limit}" for sign, limit in ((">=", row.at_least), ("<", row.below)) if limit]
            message = (
                f"{row.package} {version} is installed, and this build needs {' and '.join(limits)}: {row.reason}."
            )
            hint = f"pip install '{row.package}{','.join(limits)}'."
            yield Problem(where="environment", message=message, hint=hint)


def _matches(row: Row, facts: Mapping[str, Fact]) -> bool:
    """Whether every condition of a row holds; one about an unknown fact does not."""
    return all(_holds(wanted, facts.get(name)) for name, wanted in row.when.items())


def _holds(wanted: tuple[str | int, ...] | Range, fact: Fact | None) -> bool:
    if not isinstance(wanted, Range):
        return fact in wanted
    if not isinstance(fact, int):
        return False
    return (wanted.above is None or fact > wanted.above) and (wanted.below is None or fact < wanted.below)


def _judged(row: Verdict, facts: Mapping[str, Fact], severity: Severity) -> Problem:
    message, hint = f"{row.reason.format_map(facts)}.", row.instead.format_map(facts)
    return Problem(where=row.key, message=message, hint=hint, severity=severity)


def _placed(problem: Problem, provenance: Mapping[str, str]) -> Problem:
    place = provenance.get(problem.where, "default")
    if place == "default":
        return problem
    return Problem(
        where=f"{place} {problem.where}", message=problem.message, hint=problem.hint, severity=problem.severity
    )


def _release(version: str) -> tuple[int, ...]:
    """The release numbers of a version; '2026.4.1-dev' -> (2026, 4, 1)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


@cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("pipeline.config").joinpath(name).read_text("utf-8"))

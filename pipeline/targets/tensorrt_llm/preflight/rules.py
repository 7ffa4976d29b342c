"""Checks that are rows of a table: rules.toml, read once and applied to the facts of a config."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from importlib import resources

from pydantic import Field

from pipeline.config.formats import formats_of
from pipeline.config.keys import leaves
from pipeline.config.section import Section
from pipeline.errors import Severity
from pipeline.targets.tensorrt_llm.choices import Case as EngineCase
from pipeline.targets.tensorrt_llm.choices import choose, context_attention
from pipeline.targets.tensorrt_llm.facts import QuantFacts
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding


class Condition(Section):
    """What a fact must be; every part that is given must hold. `none_of` is written `not` in the table."""

    above: float | None = None
    below: float | None = None
    set: bool | None = None
    none_of: tuple[bool | int | str, ...] = Field(default=(), alias="not")
    or_unset: bool = False


class Rule(Section):
    """One row of rules.toml."""

    name: str
    id: str
    severity: Severity
    key: str
    when: Mapping[str, tuple[bool | int | str, ...] | Condition]
    reason: str
    instead: str
    source: str


class Table(Section):
    """rules.toml."""

    rule: tuple[Rule, ...]


@cache
def rules() -> tuple[Rule, ...]:
    """Read rules.toml; a row with an unknown field does not load."""
    text = resources.files("pipeline.targets.tensorrt_llm.preflight").joinpath("rules.toml").read_text("utf-8")
    return Table.model_validate(tomllib.loads(text)).rule


def check(case: Case) -> Iterator[Finding]:
    """Yield what every row that matches says."""
    known = facts(case)
    words = {name: value for name, value in known.items() if "." not in name}
    for rule in rules():
        if all(_holds(wanted, known.get(name)) for name, wanted in rule.when.items()):
            yield Finding(
                id=rule.id,
                where=rule.key,
                message=f"{rule.reason.format_map(words)}.",
                hint=rule.instead,
                severity=rule.severity,
            )


def facts(case: Case) -> Mapping[str, object]:
    """Every config key by its path, and what follows from several of them."""
    config, engine, serving = case.config, case.config.engine, case.config.serving.tensorrt_llm
    quant = QuantFacts.of_config(config.quantization, case.model.linears, engine.dtype)
    formats = formats_of(config.quantization, case.model.linears)
    flags = {choice.what: choice.value for choice in choose(engine, quant, case.model)}
    options = engine.build.model_copy(update={"context_fmha": None, "use_paged_context_fmha": None})
    free = engine.model_copy(update={"build": options})
    (possible, _), _ = context_attention(EngineCase(engine=free, quant=quant, model=case.model))
    kept = flags["context_fmha"] == "enable" and flags["use_paged_context_fmha"] == "enable"
    chunked, reuse = serving.enable_chunked_context, serving.enable_kv_cache_reuse
    build = engine.build
    return {
        **{key.path: reduce(getattr, key.path.split("."), config) for key in leaves()},
        "format": formats[0] if len(formats) == 1 else "mixed",
        "kv_cache": config.quantization.kv_cache,
        "gpu": case.gpu,
        "sm": case.sm,
        "architecture": case.model.architecture,
        "lora": bool(build.lora_dir or build.lora_target_modules or build.lora_plugin not in (None, "disable")),
        "logits_dtype": flags["logits_dtype"],
        "reduce_fusion": flags["reduce_fusion"],
        "paged_possible": possible,
        "paged_context_fmha": possible and kept,
        "chunked_context": engine.enable_chunked_context if chunked is None else chunked,
        "block_reuse": engine.kv_cache.enable_block_reuse if reuse is None else reuse,
    }


def _holds(wanted: tuple[bool | int | str, ...] | Condition, fact: object) -> bool:
    if not isinstance(wanted, Condition):
        return any(type(fact) is type(value) and fact == value for value in wanted)
    written = fact not in (None, "", ())
    if wanted.set is not None:
        return wanted.set is written
    if wanted.none_of:
        return fact not in wanted.none_of and (written or wanted.or_unset)
    if not isinstance(fact, int | float):
        return False
    return (wanted.above is None or fact > wanted.above) and (wanted.below is None or fact < wanted.below)

"""budget.toml: what of a memory budget cannot be counted, with its sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from pipeline.config.section import Section


class Estimate(Section):
    """Factors or bytes by number of GPUs, and where they were read."""

    source: str
    dense: Mapping[int, float] = {}
    experts: Mapping[int, float] = {}
    bytes: Mapping[int, int] | int = 0


class Shares(Section):
    """Default shares of free memory."""

    kv_cache: float
    lora_cache: float
    source: str


class Shared(Section):
    """Architectures with a property."""

    architectures: frozenset[str]
    source: str


class Constants(Section):
    """budget.toml."""

    usable: Mapping[str, float | str]
    activation: Estimate
    communication: Estimate
    runtime: Estimate
    fraction: Shares
    shared_head: Shared


@cache
def constants() -> Constants:
    """Read budget.toml."""
    text = resources.files("pipeline.targets.tensorrt_llm").joinpath("budget.toml").read_text("utf-8")
    return Constants.model_validate(tomllib.loads(text))

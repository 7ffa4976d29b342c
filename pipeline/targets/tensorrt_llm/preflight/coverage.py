"""Which known edge of the engine path is covered by what: coverage.toml, for people and for a test."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

from pipeline.config.section import Section


class Edge(Section):
    """One edge.

    Attributes:
        row: its number; ids of checks are "TL" and this number.
        what: the edge in a few words.
        how: who meets it first.
        by: ids of checks, modules, or the reason why nothing is needed.
    """

    row: int
    what: str
    how: Literal["preflight", "legality", "schema", "elsewhere", "design", "gpu"]
    by: tuple[str, ...]


class Coverage(Section):
    """coverage.toml."""

    edge: tuple[Edge, ...]


@cache
def coverage() -> tuple[Edge, ...]:
    """Read coverage.toml, in the order of rows."""
    text = resources.files("pipeline.targets.tensorrt_llm.preflight").joinpath("coverage.toml").read_text("utf-8")
    return Coverage.model_validate(tomllib.loads(text)).edge

"""migrate.toml as types: what becomes of each parameter and each request input."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from pipeline.config.section import Section


class Carry(Section):
    """A parameter with a counterpart; the head of migrate.toml says what the fields mean."""

    model: str = "tensorrt_llm"
    key: str
    type: Literal["int", "float", "bool", "ints", "word"]
    words: Mapping[str, str] = Field(default_factory=dict)
    default: str | None = None
    config: str = ""
    yaml: str = ""
    source: str


class Drop(Section):
    """A parameter without one."""

    model: str = "tensorrt_llm"
    key: str
    harmless: frozenset[str] = frozenset()
    reason: str
    instead: str
    source: str


class Tensor(Section):
    """What becomes of request inputs of one meaning."""

    old: tuple[str, ...]
    new: str = ""
    reason: str = ""


class Table(Section):
    """migrate.toml."""

    carry: tuple[Carry, ...]
    drop: tuple[Drop, ...]
    tensor: tuple[Tensor, ...]
    input: Mapping[str, tuple[str, int]]
    output: Mapping[str, tuple[str, int]]
    quant_algo: Mapping[str, str]
    kv_cache_quant_algo: Mapping[str, str]
    replaced: Mapping[str, str]


@cache
def table() -> Table:
    """Read migrate.toml; a row without a source or with an unknown field does not load."""
    text = resources.files("pipeline.triton").joinpath("migrate.toml").read_text("utf-8")
    return Table.model_validate(tomllib.loads(text))


def value_of(row: Carry, text: str) -> Any:  # noqa: ANN401 - int, float, bool, list or str, as the row's type says
    """Read a parameter as the C++ backend does.

    Raises:
        ValueError: it is not of the row's type; the backend would go on with its default.
    """
    match row.type:
        case "int":
            return int(text)
        case "float":
            return float(text)
        case "ints":
            return [int(part) for part in text.split(",")]
        case "bool":
            words = {"true": True, "1": True, "false": False, "0": False}
            # True, true, TRUE and 1 (tensorrtllm_backend v0.19.0 utils.cc); nothing else.
            if text not in ("True", "true", "TRUE", "1", "False", "false", "FALSE", "0"):
                raise ValueError("not a boolean")
            return words[text.lower()]
        case "word":
            if text not in row.words:
                raise ValueError(f"not one of {', '.join(row.words)}")
            return row.words[text]

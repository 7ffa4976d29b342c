"""What the engine path knows about architectures: models.toml, read once and asked by name.

Sources are in the table. A family without a row is community-supported: nothing is known about its
precisions. The table lags behind upstream's examples, so a missing yes is a warning and not a law.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import Field

from pipeline.config.section import Section

# yes: the table says so; noted: the table does not, and a note tells more; no: the table has a gap there;
# unlisted: no row for the architecture.
Support = Literal["yes", "noted", "no", "unlisted"]


class Family(Section):
    """One row of upstream's table: the columns that say yes, and notes on columns that do not."""

    name: str
    architectures: tuple[str, ...]
    columns: frozenset[str]
    notes: Mapping[str, str] = Field(default_factory=dict)


class Models(Section):
    """models.toml.

    Attributes:
        columns: our format -> column; "source" apart.
        families: rows of the precision table.
        classes: Python class -> architectures that trtllm-build builds with it.
        unsettled: architectures that one of two stored versions of the map has.
        llm_api_only: architectures without an engine path.
        llm_api_seen: architectures that upstream shows on the LLM API.
    """

    columns: Mapping[str, str]
    families: tuple[Family, ...]
    classes: Mapping[str, tuple[str, ...]]
    unsettled: frozenset[str]
    llm_api_only: frozenset[str]
    llm_api_seen: frozenset[str]

    def family(self, architecture: str) -> Family | None:
        """The row of an architecture; None when upstream's table has none."""
        return next((family for family in self.families if architecture in family.architectures), None)

    def model_class(self, architecture: str) -> str | None:
        """The Python class that builds an architecture; None when MODEL_MAP does not have it (or not surely)."""
        return next((name for name, keys in self.classes.items() if architecture in keys), None)

    def support(self, architecture: str, form: str) -> tuple[Support, str]:
        """What upstream's table says about a format of an architecture, and the note if it has one.

        Args:
            architecture: Hugging Face class name.
            form: our format word; 16-bit formats are yes for every family.
        """
        family = self.family(architecture)
        column = self.columns.get(form)
        if family is None:
            return "unlisted", ""
        if column is None or column in family.columns:
            return "yes", ""
        note = family.notes.get(column, "")
        return ("noted" if note else "no"), note


@cache
def models() -> Models:
    """Read models.toml."""
    text = resources.files("pipeline.targets.tensorrt_llm").joinpath("models.toml").read_text("utf-8")
    data = tomllib.loads(text)
    return Models(
        columns={form: column for form, column in data["columns"].items() if form != "source"},
        families=data["family"],
        classes=data["model_map"]["classes"],
        unsettled=data["unsettled"]["architectures"],
        llm_api_only=data["llm_api_only"]["architectures"],
        llm_api_seen=data["llm_api_seen"]["architectures"],
    )

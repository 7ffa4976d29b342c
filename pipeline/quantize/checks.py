"""One finding of verification: a value beside its limit, or a broken rule, for one layer or the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Bound = Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named check and how it came out.

    Attributes:
        name: dotted, such as "weight.max_step_error".
        layer: module or tensor name; empty for the whole checkpoint.
        value: what was measured.
        limit: what is allowed; None reports the value without judging it.
        bound: whether `limit` is the largest or the smallest value allowed.
        detail: what is wrong, for a check that failed.
        cause: what would repair it, found by trying.
    """

    name: str
    layer: str = ""
    value: float
    limit: float | None
    bound: Bound = "max"
    detail: str = ""
    cause: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is within its limit; NaN never is."""
        if self.limit is None:
            return True
        return self.value <= self.limit if self.bound == "max" else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        """A JSON object; numbers keep six significant digits, so that a last-bit difference does not show."""
        entry: dict[str, Any] = {
            "name": self.name,
            "layer": self.layer,
            "value": rounded(self.value),
            "limit": self.limit,
            "bound": self.bound,
            "passed": self.passed,
        }
        return entry | {key: text for key, text in (("detail", self.detail), ("cause", self.cause)) if text}


def rounded(value: float) -> float | str:
    """Six significant digits; "inf" and "nan" as words, because JSON has none."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def rule(name: str, broken: Iterable[tuple[str, str, str]]) -> list[Check]:
    """Checks of a rule that may not be broken: one failure per (layer, detail, cause), or one pass."""
    failures = [
        Check(name=name, layer=layer, value=1, limit=0, detail=detail, cause=cause) for layer, detail, cause in broken
    ]
    return failures or [Check(name=name, value=0, limit=0)]

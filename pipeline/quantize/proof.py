"""What follows from a verification report: it is a proof, or it names the layers that refuse the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import Problem, VerificationError
from pipeline.quantize.checkpoint_reader import model_order

REPORT = "report.json"


def read_report(directory: Path) -> dict[str, Any]:
    """Return the report of a verification."""
    report: dict[str, Any] = json.loads((directory / REPORT).read_text("utf-8"))
    return report


def require_proven(directory: Path) -> None:
    """Read the report.json of a verification and refuse a checkpoint that failed a check.

    Raises:
        VerificationError: a check failed; lists each failed layer with its cause.
    """
    report = read_report(directory)
    if report["passed"]:
        return
    summary = report["summary"]
    raise VerificationError(
        f"the {report['format']} checkpoint does not compute what its source computes: "
        f"{summary['failed']} of {summary['checks']} checks failed",
        problems=_problems([check for check in report["checks"] if not check["passed"]]),
        hint=f"Every value is in {directory / REPORT}. Exclude the layer, or take a safer format.",
    )


def _problems(failed: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """One problem per layer, in model order: its failed checks and the first cause found."""
    by_layer: dict[str, list[Mapping[str, Any]]] = {}
    for check in failed:
        by_layer.setdefault(check["layer"], []).append(check)
    problems = []
    for layer in model_order(set(by_layer)):
        checks = by_layer[layer]
        words = [check.get("detail") or "{name} {value} (limit {limit})".format_map(check) for check in checks]
        cause = next((check["cause"] for check in checks if "cause" in check), "")
        problems.append(
            Problem(where=layer or "model", message="; ".join(words) + ".", hint=f"Cause: {cause}." if cause else "")
        )
    return problems

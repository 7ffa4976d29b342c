"""What people and scripts read: tables on stdout, or one JSON document on stdout with --json."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from pipeline.errors import TrtpipeError

ANSWERED = "pipeline.cli.output.answered"
KIB = 1024
GAP = "  "
LEAST_WIDTH = 24
"""Characters that a last column gets on the narrowest terminal."""


def emit_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document with sorted keys."""
    click.echo(json.dumps(document, indent=2, sort_keys=True, default=str))
    click.get_current_context().meta[ANSWERED] = True


def has_answered() -> bool:
    """Whether the running command has printed its document."""
    return ANSWERED in click.get_current_context().meta


def failure(error: TrtpipeError) -> dict[str, Any]:
    """Return the document of a command that failed before it had one."""
    return {
        "error": {
            "kind": type(error).__name__,
            "exit_code": error.exit_code,
            "message": error.message,
            "problems": [asdict(problem) for problem in error.problems],
            "hint": error.hint,
            "log": error.log_path,
        }
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows in columns; on a terminal the last column is wrapped to what the others leave of its width."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(room, LEAST_WIDTH))
    lines = [line for row in cells for line in _lines(row, widths)]
    lines.insert(1, GAP.join("─" * width for width in widths))
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield a row as one line, and one more for each further piece of its last cell."""
    pieces = textwrap.wrap(row[-1], widths[-1], break_long_words=False, break_on_hyphens=False) or [""]
    for number, piece in enumerate(pieces):
        first = row[:-1] if number == 0 else [""] * (len(row) - 1)
        yield GAP.join(cell.ljust(width) for cell, width in zip((*first, piece), widths, strict=True)).rstrip()


def size(n_bytes: float) -> str:
    """Format bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < KIB:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= KIB
    return f"{n_bytes:.1f} TiB"


def seconds(value: float) -> str:
    """Format a duration for a person."""
    minute = 60
    return f"{value:.1f} s" if value < minute else f"{int(value // minute)} min {value % minute:.0f} s"


def interval(measure: Mapping[str, Any]) -> str:
    """Write a measure of quality.json as "kl_nats 0.012 [0.0108, 0.0131], at most 0.05: pass"."""
    low, high = ("?" if measure[end] is None else f"{measure[end]:.3g}" for end in ("low", "high"))
    text = f"{measure['metric']} {measure['estimate']:.3g} [{low}, {high}]"
    if "limit" not in measure:
        return text
    words = {"max": "at most", "min": "at least"}[measure["bound"]]
    return f"{text}, {words} {measure['limit']:g}: {measure['verdict']}"

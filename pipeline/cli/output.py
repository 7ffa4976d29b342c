"""What people and scripts read: tables on stdout, or one JSON document on stdout with --json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

KIB = 1024


def emit_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document with sorted keys."""
    click.echo(json.dumps(document, indent=2, sort_keys=True, default=str))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows in columns; the last column is not padded."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


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

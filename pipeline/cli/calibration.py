"""calibration: the text that a build would calibrate on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline.cli import options, output


@click.command()
@options.config_argument
@options.json_option
def calibration(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what the calibration text of CONFIG is: counts, lengths, what is dropped, warnings. Builds nothing.

    Every text file of the config is checked, held text and tasks too. Exit code 3 when one is malformed or too small.
    """
    from pipeline.config.load import load
    from pipeline.core.digest import FileHasher
    from pipeline.examine import calibration_text, examine

    build = examine(load(config, overrides), FileHasher(None))
    build.require_possible()
    record = calibration_text(build)
    about_text = [problem for problem in build.warnings if "verify.dataset" in problem.where]
    if as_json:
        output.emit_json(record | {"held_text": [asdict(problem) for problem in about_text]})
        return
    click.echo(_table(record))
    for words in [*record["warnings"], *map(str, about_text)]:
        click.echo(f"warning: {words}")


def _table(record: dict[str, Any]) -> str:
    """One line a set, and what they are together."""
    rows = [
        (
            one["name"],
            f"{one['sequences']} of {record['max_seq_len']}",
            f"{one['documents_used']} of {one['documents']}",
            one["duplicates_dropped"] + one["duplicates_of_other_sets_dropped"],
            one["near_empty_dropped"],
            one["conversations"],
            " / ".join(str(one["document_tokens"][name]) for name in ("min", "p50", "p90", "max")),
            one["longer_than_a_row"],
        )
        for one in record["sets"]
    ]
    header = ("set", "sequences", "documents", "repeats", "near empty", "chats", "tokens min/p50/p90/max", "longer")
    total = f"{record['tokens']} tokens, {record['distinct_tokens']} distinct, {record['ids_sha256']}"
    return f"{output.table(header, rows)}\n{total}"

"""check, migrate: repositories that exist already, ours or anybody's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli import options, output

if TYPE_CHECKING:
    from pipeline.triton.migrate import Migration


@click.command()
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--mount", type=click.Path(path_type=Path), help="Where the repository lies inside the container.")
@options.json_option
def check(repository: Path, mount: Path | None, as_json: bool) -> None:
    """Validate any Triton model repository for an LLM: ours, hand-made, or filled by upstream's template tool.

    Prints every problem with file, parameter and what to write. Exit code 3 when there is an error.
    """
    from pipeline.errors import ConfigError
    from pipeline.triton.check import check as check_repository

    problems = check_repository(repository, mount=mount)
    errors = [problem for problem in problems if problem.severity == "error"]
    if as_json:
        output.emit_json({"repository": str(repository), "problems": [asdict(problem) for problem in problems]})
    if errors:
        raise ConfigError(f"{repository}: {len(errors)} error(s)", problems=problems)
    if not as_json:
        for problem in problems:
            click.echo(f"warning: {problem}")
        click.echo(f"{repository}: no errors")


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option("--engine-dir", type=click.Path(path_type=Path), help="The engine, when its path is a container's.")
@click.option("--source", type=click.Path(path_type=Path), help="16-bit checkpoint that the engine was made from.")
@click.option("--gpu", help="GPU that the new lane is for; default what the engine says, else H100.")
@click.option("--name", help="Name of the new build; default that of the old repository.")
@options.json_option
def migrate(
    old: Path,
    out: Path,
    engine_dir: Path | None,
    source: Path | None,
    gpu: str | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Turn an engine repository into the LLM API one that replaces it after TensorRT-LLM 1.2.

    Writes the build config and the repository, and lists what cannot carry over, each with the reason.
    """
    from pipeline.triton.migrate import migrate as migrate_repository

    migration = migrate_repository(old, out, engine_dir=engine_dir, source=source, gpu=gpu, name=name)
    if as_json:
        output.emit_json(asdict(migration))
    else:
        _print(migration)


def _print(migration: Migration) -> None:
    click.echo(migration.report.read_text(encoding="utf-8"))
    click.echo(f"config:     {migration.config}\nrepository: {migration.repository}\nreport:     {migration.report}")

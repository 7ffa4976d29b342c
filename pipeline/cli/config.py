"""config check, show, schema, init."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli import options, output


@click.group()
def config() -> None:
    """Check, show, start or describe a config file."""


@config.command()
@options.config_argument
@options.json_option
def check(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Validate CONFIG, find its source and judge whether it and its fallback can be built. Builds nothing.

    Every problem is listed at once, each with file:line, key and what to do. Exit code 3 when there is one.
    """
    from pipeline.config.load import load
    from pipeline.core.digest import FileHasher
    from pipeline.ladder import rungs

    build = rungs(load(config, overrides), FileHasher(None))[0].build
    if as_json:
        output.emit_json({"name": build.config.name, "warnings": [asdict(problem) for problem in build.warnings]})
        return
    for problem in build.warnings:
        click.echo(f"warning: {problem}")
    architecture = build.architecture
    click.echo(
        f"{config}: ok. {architecture.architecture}, {architecture.num_hidden_layers} layers, "
        f"{build.label} for {build.config.engine.target}"
    )


@config.command()
@options.config_argument
@options.json_option
def show(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the effective CONFIG and where each value comes from."""
    from pipeline.config.load import load, render

    loaded = load(config, overrides)
    if as_json:
        output.emit_json(
            {
                "config": loaded.config.model_dump(mode="json"),
                "provenance": dict(loaded.provenance),
                "fallback": [loaded.changes(step) for step in loaded.fallback],
            }
        )
    else:
        click.echo(render(loaded), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the config, for editors.

    \b
    trtpipe config schema > trtpipe.schema.json
    # first line of a config: # yaml-language-server: $schema=trtpipe.schema.json
    """
    from pipeline.config.load import json_schema

    output.emit_json(json_schema())


@config.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--source", required=True, help="Checkpoint directory, GGUF file or hub id.")
@click.option("--format", "format_", default="int4_awq", show_default=True, help="Quantization format.")
@click.option("--target", default="openvino", show_default=True, help="Engine target.")
def init(file: Path, source: str, format_: str, target: str) -> None:
    """Write a commented first config to FILE. Never overwrites."""
    from pipeline.config.load import init_template
    from pipeline.errors import ConfigError
    from pipeline.host.files import write_atomic

    if file.exists():
        raise ConfigError(f"{file} exists and is kept as it is", hint="Choose another name or remove it.")
    write_atomic(file, init_template(file.stem, _from(file.parent, source), format_, target).encode())
    click.echo(f"wrote {file}\nnext: trtpipe config check {file}")


def _from(directory: Path, source: str) -> str:
    """Return a path that was typed here as the config has to write it: relative to the config's own directory."""
    if directory == Path() or Path(source).is_absolute() or not Path(source).exists():
        return source
    return os.path.relpath(source, directory)

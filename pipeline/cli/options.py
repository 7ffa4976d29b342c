"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline.cli import output
from pipeline.errors import TrtpipeError

Command = Callable[..., Any]

STORE = Path(".trtpipe")


def config_argument(command: Command) -> Command:
    """The config file and its overrides."""
    command = click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        help="Override one key, for example engine.max_batch_size=8.",
    )(command)
    return click.argument("config", type=click.Path(path_type=Path, dir_okay=False))(command)


def store_option(command: Command) -> Command:
    """Where artifacts are kept."""
    return click.option(
        "--store",
        "store_root",
        type=click.Path(path_type=Path, file_okay=False),
        default=STORE,
        show_default=True,
        envvar="TRTPIPE_STORE",
        help="Artifact store; builds that share it share their work.",
    )(command)


def json_option(command: Command) -> Command:
    """Machine output: one document, also when the command fails."""

    @functools.wraps(command)
    def answering(*arguments: Any, as_json: bool, **options: Any) -> Any:
        try:
            return command(*arguments, as_json=as_json, **options)
        except TrtpipeError as error:
            if as_json and not output.has_answered():
                output.emit_json(output.failure(error))
            raise

    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(answering)


def url_option(command: Command) -> Command:
    """Which server to talk to."""
    return click.option(
        "--url", default="127.0.0.1:8001", show_default=True, metavar="HOST:PORT", help="gRPC address of the server."
    )(command)

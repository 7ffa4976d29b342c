"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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
    """Machine output."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(command)


def url_option(command: Command) -> Command:
    """Which server to talk to."""
    return click.option(
        "--url", default="127.0.0.1:8001", show_default=True, metavar="HOST:PORT", help="gRPC address of the server."
    )(command)

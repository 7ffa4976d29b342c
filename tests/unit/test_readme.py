"""What README.md claims, where no build is needed to see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipeline.cli.main import COMMANDS, root
from pipeline.config.load import load
from pipeline.errors import TrtpipeError
from tests.support import readme

pytestmark = pytest.mark.fast

CLICK_CODES = [0, 1, 2]


def _kinds(kind: type[TrtpipeError]) -> Iterator[type[TrtpipeError]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _kinds(sub)


@pytest.mark.parametrize("text", readme.blocks("yaml"))
def test_every_config_of_the_readme_loads(text: str, tmp_path: Path) -> None:
    """Its keys and values are those of the schema; a block without a name is one to add to the first config."""
    path = tmp_path / "my.yaml"
    if not text.startswith("name:"):
        (tmp_path / "first.yaml").write_text(readme.blocks("yaml")[0])
        text = f"extends: first.yaml\nname: added\n{text}"
    path.write_text(text)
    assert f"name: {load(path, ()).config.name}\n" in text


def test_the_exit_codes_are_those_of_the_errors() -> None:
    """Every code of the code base is in the table, and no other."""
    assert readme.exit_codes() == sorted([*CLICK_CODES, *(kind.exit_code for kind in _kinds(TrtpipeError))])


def test_every_command_that_the_readme_names_exists() -> None:
    """Also those in running text and in tables."""
    named = set(re.findall(r"`trtpipe (\w+)", readme.TEXT))
    assert len(named) > 8
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("target", [words[1] for words in readme.commands() if words[0] == "make"])
def test_make_targets_of_the_readme_run_what_exists(target: str) -> None:
    """Each recipe starts programs of the environment; its trtpipe commands parse and name files that are there.

    They are not run here: this is what `make test` runs, and `make demo` takes minutes.
    """
    lines = readme.recipe(target)
    assert lines
    for program, *arguments in lines:
        assert program.startswith(".venv/bin/")
        if program.endswith("trtpipe"):
            command = root.get_command(click.Context(root), arguments[0])
            assert command is not None
            assert command.make_context(arguments[0], arguments[1:]).params
            assert all((readme.ROOT / word).is_file() for word in arguments if word.endswith(".yaml"))

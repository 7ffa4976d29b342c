"""Every command line of README.md runs as it is written there, in one directory with a checkpoint of that name.

Only ports are added: the machine that runs the tests may use 8000 to 8002 itself. `make demo` and `make test` are
looked at in tests/unit/test_readme.py; this is what the second one runs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.support import readme
from tests.support.checkpoints import sure_llama
from tests.support.commands import Outcome, argv, environment, serving, trtpipe

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

COMMANDS = [words[1:] for words in readme.commands() if words[0] == "trtpipe"]
LINES = [" ".join(words) for words in COMMANDS]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """What each command line gave, run in the order of the README; the server runs until the last one."""
    directory = tmp_path_factory.mktemp("readme")
    sure_llama(directory / "my-checkpoint", max_position_embeddings=8192)
    # The config that `config init` writes is the first command's affair; a block without a name is an addition to it.
    for text in readme.blocks("yaml"):
        if (name := yaml.safe_load(text).get("name", "my")) != "my":
            (directory / f"{name}.yaml").write_text(text)
    done: dict[str, Outcome] = {}
    with ExitStack() as stack:
        for line, words in zip(LINES, COMMANDS, strict=True):
            match words[0]:
                case "serve":
                    _, server = stack.enter_context(serving(*words[1:], cwd=directory))
                    done[line] = Outcome(code=0, stdout=str(server), stderr="")
                case "generate" | "chat":
                    done[line] = _ask([*words, "--url", server["grpc"]], directory)
                case _:
                    done[line] = trtpipe(*words, cwd=directory, code=None)
    return done


def _ask(words: list[str], directory: Path) -> Outcome:
    done = subprocess.run(
        argv(*words),
        cwd=directory,
        env=environment(),
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_readme_succeeds(line: str, outcomes: Mapping[str, Outcome]) -> None:
    """It ends with 0 and says something."""
    outcome = outcomes[line]
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.strip()


def test_no_command_line_of_the_readme_is_left_out() -> None:
    """All but the two of make run here, each once, and the first build is among them."""
    assert len(set(LINES)) == len(LINES) == len(readme.commands()) - len(["make demo", "make test"])
    assert {"config", "plan", "build", "serve", "generate", "chat"} <= {words[0] for words in COMMANDS}

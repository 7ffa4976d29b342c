"""The command line before any work: help, misspelling, laziness."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipeline.cli.main import COMMANDS, root

pytestmark = pytest.mark.fast

HEAVY = ("torch", "transformers", "modelopt", "openvino", "tritonclient", "pydantic", "numpy", "rich", "yaml")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    """The help of each command opens and says what the command does."""
    result = CliRunner().invoke(root, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) > 4


def test_root_help_lists_every_command() -> None:
    """Nothing is hidden."""
    output = CliRunner().invoke(root, ["--help"]).output
    assert all(f"  {name}" in output for name in COMMANDS)


def test_help_loads_no_heavy_library() -> None:
    """`trtpipe --help` answers before any library of the stages is imported."""
    code = (
        "import sys, json\nfrom pipeline.cli.main import root\n"
        "try:\n    root.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(json.loads(done.stderr.splitlines()[-1]))


def test_a_misspelt_command_is_corrected() -> None:
    """The nearest command is named and the exit code is Click's."""
    result = CliRunner().invoke(root, ["bild"])
    assert result.exit_code == 2
    assert "Did you mean 'build'?" in result.output

"""What people and scripts read: tables, the one JSON document, what doctor says of the formats."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import output
from pipeline.cli.main import root
from pipeline.config.legality import least_sm
from pipeline.config.load import load
from tests.support.commands import argv, environment

pytestmark = pytest.mark.fast

ROWS = [("a", "one two three four five six seven eight nine ten"), ("bb", "short")]


def test_a_table_in_a_file_keeps_every_row_on_its_line() -> None:
    """Scripts and logs are not wrapped."""
    assert output.table(("key", "value"), ROWS).splitlines()[2:] == [f"a    {ROWS[0][1]}", "bb   short"]


def test_a_table_on_a_terminal_wraps_its_last_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider than the terminal, and no word is lost."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "32")
    lines = output.table(("key", "value"), ROWS).splitlines()
    assert max(map(len, lines)) <= 32
    assert "".join(line[5:] + " " for line in lines[2:-1]).split() == ROWS[0][1].split()
    assert [line[:5].strip() for line in lines[2:]] == ["a", "", "bb"]


def _on_a_terminal(*arguments: str, **variables: str) -> str:
    """Run a command whose output is a terminal of 60 columns, and return what the terminal got."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        argv(*arguments), stdout=slave, stderr=slave, env=environment() | {"COLUMNS": "60"} | variables
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                shown += (piece := os.read(master, 65536))
            except OSError:  # the other end is closed
                break
            if not piece:
                break
        process.wait()
    os.close(master)
    assert process.returncode == 0
    return shown.decode()


def test_doctor_fits_a_narrow_terminal_without_colours() -> None:
    """Prose columns are wrapped; nothing is sent that a plain terminal would show as rubbish."""
    shown = _on_a_terminal("doctor", NO_COLOR="1")
    machine = shown.replace("\r\n", "\n").split("\n\n")[0]
    assert max(map(len, machine.splitlines())) <= 60
    assert "\x1b" not in shown


def test_doctor_says_where_each_format_runs() -> None:
    """The table is that of the legality check."""
    document = json.loads(CliRunner().invoke(root, ["doctor", "--json"]).stdout)
    assert document["formats"]["fp8"]["tensorrt_llm"]["auto"] == least_sm("tensorrt_llm", "fp8", "auto") == 89
    assert document["formats"]["int4_awq"]["openvino"] == {"auto": 0, "int8": 0}
    assert document["formats"]["w4a8_awq"]["openvino"] == {}


def test_doctor_holds_the_machine_against_each_toolchain() -> None:
    """Both pinned releases are judged, by the table of images and drivers."""
    rows = json.loads(CliRunner().invoke(root, ["doctor", "--json"]).stdout)["toolchains"]
    assert [row["tensorrt_llm"] for row in rows] == ["1.2.1", "1.0.0"]
    assert rows[0]["image"].endswith(":26.05-trtllm-python-py3")
    assert [row["driver"] for row in rows] == ["R580 or newer", "R575 or newer"]
    assert all(row["verdict"] for row in rows)


def test_a_failure_with_json_is_a_document(tmp_path: Path) -> None:
    """Problems come one by one, with their places."""
    config = tmp_path / "a.yaml"
    config.write_text("name: a\nsorce: {}\n")
    error = json.loads(CliRunner().invoke(root, ["config", "show", str(config), "--json"]).stdout)["error"]
    assert error["exit_code"] == 3
    assert any("sorce" in problem["where"] for problem in error["problems"])


def test_init_writes_the_source_as_the_config_will_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that was typed in one directory is still right in a config of another."""
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    Path("configs").mkdir()
    result = CliRunner().invoke(root, ["config", "init", "configs/a.yaml", "--source", "./weights"])
    assert result.exit_code == 0, result.output
    found = load(Path("configs/a.yaml"), ()).config.source.path
    assert found is not None
    assert found.samefile("weights")

"""What a user sees of the calibration text, before and after a build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli.main import root
from tests.support.quantized import tiny_source

pytestmark = pytest.mark.heavy


def written(directory: Path, **sections: object) -> Path:
    """A config of the tiny model with two sets of text, three rows of the first for each of the second."""
    (directory / "other.txt").write_text("\n\n".join(f"{n} " + "Rome and Paris are far apart. " * 9 for n in range(40)))
    sets = [{"path": str(tiny_source().path / "text.jsonl"), "weight": 3}, {"path": "other.txt"}]
    config = {
        "name": "tiny",
        "source": {"path": str(tiny_source().path)},
        "quantization": {"format": "fp8"},
        "calibration": {"datasets": sets, "num_samples": 8, "max_seq_len": 64},
        "engine": {"max_seq_len": 128},
        "serving": {"default_max_tokens": 32},
        **sections,
    }
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_statistics_come_without_a_build_and_are_the_builds_own(tmp_path: Path) -> None:
    """The digest that the command shows is that of the rows that were fed."""
    config = written(tmp_path, verify={"dataset": str(tiny_source().path / "text.jsonl"), "max_kl": 100})
    shown = CliRunner().invoke(root, ["calibration", str(config), "--json"])
    record = json.loads(shown.output)
    assert [(one["name"], one["sequences"]) for one in record["sets"]] == [("text.jsonl", 6), ("other.txt", 2)]
    assert "100 of 100 documents of the held text" in record["held_text"][0]["message"]
    store = str(tmp_path / "store")
    built = CliRunner().invoke(root, ["quantize", str(config), "--store", store, "--json"])
    assert built.exit_code == 0, built.output
    (fed,) = {json.loads(file.read_text())["ids_sha256"] for file in Path(store).glob("**/calibration.json")}
    assert fed == record["ids_sha256"]


def test_people_see_a_table_and_the_warnings(tmp_path: Path) -> None:
    """One line a set."""
    output = CliRunner().invoke(root, ["calibration", str(written(tmp_path))]).output
    assert "text.jsonl  6 of 64" in output
    assert "other.txt   2 of 64" in output


def test_malformed_text_ends_every_command_before_anything_runs(tmp_path: Path) -> None:
    """The line is named, and nothing was stored."""
    config = written(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    for command in (["calibration"], ["config", "check"], ["plan"], ["build", "--store", str(tmp_path / "store")]):
        name = f"calibration.datasets=[{{path: {tmp_path / 'broken.jsonl'}}}]"
        done = CliRunner().invoke(root, [*command, str(config), "--set", name])
        assert type(done.exception).__name__ == "ConfigError"
        assert f"{tmp_path / 'broken.jsonl'}:2" in str(done.exception)
    assert not list((tmp_path / "store").glob("**/*.safetensors"))

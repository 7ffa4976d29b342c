"""Text files are judged with the config, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.schema import BuildConfig
from pipeline.quantize.text_check import check_texts

pytestmark = pytest.mark.fast

PROVENANCE = {
    "calibration.dataset": "a.yaml:4",
    "verify.dataset": "a.yaml:6",
    "quality.tasks": "a.yaml:8",
    "finetune.dataset": "a.yaml:9",
}


def problems(**sections: object) -> list[str]:
    """What is wrong, each with its severity."""
    config = BuildConfig.model_validate({"name": "a", "source": {"path": "model"}, **sections})
    return [f"{problem.severity} {problem}" for problem in check_texts(config, PROVENANCE)]


def rows(path: Path, *texts: str) -> Path:
    """Write a JSONL file."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def test_the_shipped_text_is_in_order() -> None:
    """A config that names no text has no problem."""
    assert problems() == []


@pytest.mark.parametrize(
    ("section", "key", "mark"),
    [
        ("calibration", "calibration.dataset", "a.yaml:4"),
        ("verify", "verify.dataset", "a.yaml:6"),
        ("finetune", "finetune.dataset", "a.yaml:9"),
    ],
)
def test_a_missing_text_is_an_error_at_the_key_that_names_it(tmp_path: Path, section: str, key: str, mark: str) -> None:
    """Where it is written, and what is not there."""
    (found,) = problems(**{section: {"dataset": tmp_path / "none.jsonl"}})
    assert found.startswith(f"error {mark} {key}: {tmp_path / 'none.jsonl'} does not exist.")


def test_malformed_rows_are_errors_at_their_lines(tmp_path: Path) -> None:
    """All of them, with the shape that a row has."""
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "good"}\n{"text": 3}\nnot json\n')
    found = problems(calibration={"dataset": path})
    assert [line.split(": ")[0] for line in found] == [f"error {path}:2", f"error {path}:3"]
    assert all("A row is" in line for line in found)


def test_an_empty_text_and_one_that_is_not_text_are_errors(tmp_path: Path) -> None:
    """Neither waits for quantize."""
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "holds no text" in problems(calibration={"dataset": tmp_path / "empty.txt"})[0]
    assert "is not UTF-8" in problems(verify={"dataset": tmp_path / "binary.txt"})[0]


def test_a_set_among_several_is_named_by_its_number(tmp_path: Path) -> None:
    """The config has one key for all of them."""
    good = rows(tmp_path / "good.jsonl", "one")
    sets = [{"path": good}, {"path": tmp_path / "none.jsonl"}]
    (found,) = problems(calibration={"datasets": sets})
    assert "calibration.datasets item 2" in found


def test_a_malformed_task_is_an_error_at_its_line(tmp_path: Path) -> None:
    """Questions are read as the gate will read them."""
    (tmp_path / "task.jsonl").write_text('{"prompt": "a"}\n')
    (found,) = problems(quality={"tasks": [tmp_path / "task.jsonl"], "min_task_score": 0.5})
    assert found.startswith(f"error {tmp_path / 'task.jsonl'}:1")


def test_held_text_that_is_calibrated_on_is_a_warning_with_numbers(tmp_path: Path) -> None:
    """The proof would be made on what the ranges were made from."""
    calibration = rows(tmp_path / "calibration.jsonl", "one", "Two words", "three")
    held = rows(tmp_path / "held.jsonl", "two  words", "four")
    (found,) = problems(calibration={"dataset": calibration}, verify={"dataset": held})
    assert found.startswith("warning a.yaml:6 verify.dataset: 1 of 2 documents of the held text are in")

"""A user's questions: what a file may hold, and what counts as right."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.quantize.tasks import read_task

pytestmark = pytest.mark.fast


def write(directory: Path, *rows: str) -> Path:
    """Write a task."""
    path = directory / "task.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_an_answer_may_stand_anywhere_unless_it_must_be_exact(tmp_path: Path) -> None:
    """Contains ignores case; exact ignores only the spaces at the ends."""
    loose, exact = read_task(
        write(
            tmp_path,
            '{"prompt": "France?", "answer": "Paris"}',
            '{"messages": [{"role": "user", "content": "France?"}], "answer": "Paris", "match": "exact"}',
        )
    )
    assert loose.is_right("It is PARIS, I think")
    assert not loose.is_right("Rome")
    assert exact.is_right(" Paris\n")
    assert not exact.is_right("It is Paris")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a row must be an object, not list"),
        ('{"prompt": "a"}', "answer must be a text"),
        ('{"answer": "a"}', "exactly one of text, prompt, messages"),
        ('{"prompt": "a", "answer": "b", "match": "regex"}', "contains or exact, not 'regex'"),
        ('{"prompt": "a", "answer": "b", "max_tokens": 0}', "max_tokens must be"),
        ('{"prompt": "a", "answer": "b", "weight": 1}', "unknown keys"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path: Path, row: str, message: str) -> None:
    """The second of two rows."""
    path = write(tmp_path, '{"prompt": "a", "answer": "b"}', row)
    with pytest.raises(ConfigError) as caught:
        read_task(path)
    assert caught.value.problems[0].where == f"{path}:2"
    assert message in caught.value.problems[0].message


def test_an_empty_task_is_refused(tmp_path: Path) -> None:
    """No question, no score."""
    with pytest.raises(ConfigError, match="holds no question"):
        read_task(write(tmp_path, ""))

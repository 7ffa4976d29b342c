"""A user's questions: what a file may hold, and what counts as right."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.quantize.tasks import next_words, read_task

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
        ('{"prompt": "a", "answer": "b", "match": "regex"}', "contains, exact or starts, not 'regex'"),
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


def test_an_answer_that_starts_the_text_is_a_whole_word(tmp_path: Path) -> None:
    """Spaces before it and its case do not matter; a longer word is another one."""
    (question,) = read_task(write(tmp_path, '{"prompt": "The", "answer": "Cat", "match": "starts"}'))
    assert question.is_right(" cat, which sat")
    assert question.is_right("Cat")
    assert not question.is_right("category")
    assert not question.is_right("a cat")


def test_next_words_asks_for_the_word_that_follows_its_prompt() -> None:
    """Spread evenly over the text, with context before each, and never for numbers or punctuation."""
    words = [f"word{chr(97 + number % 26)}" if number % 5 else str(number) for number in range(400)]
    text = " ".join(words)
    questions = next_words([text, "too short"], 20)
    assert len(questions) == 20
    for question in questions:
        assert f"{question.document.text} {question.answer}" in text
        assert len(question.document.text.split()) >= 20
        assert question.answer.isalpha()
        assert question.is_right(f" {question.answer}. And")
    places = [text.index(f"{question.document.text} {question.answer}") for question in questions]
    assert places == sorted(places)
    assert places[-1] > len(text) // 2
    assert next_words([text], 0) == []

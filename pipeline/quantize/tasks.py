"""A user's own questions, answered greedily by both models and marked right or wrong.

A task is a JSONL file; a row is {"prompt": "…", "answer": "…"} or {"messages": […], "answer": "…"}, with
`match`: contains (default; the answer occurs in the text, whatever the case), exact (the text is the
answer, spaces at the ends aside) or starts (the text begins with the answer as whole words, whatever the
case), and `max_tokens` (default 32) for the answer's length.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, Problem, Unreadable
from pipeline.quantize.checkpoint_reader import read_json
from pipeline.quantize.documents import Document, parse_row
from pipeline.quantize.text_encoder import TextEncoder

_MAX_TOKENS = 32
_LEAST_CONTEXT, _MOST_CONTEXT, _STRIDE = 20, 60, 7
_WORD_TOKENS = 8
_KEYS = {"prompt", "messages", "answer", "match", "max_tokens"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question with the answer that counts as right."""

    document: Document
    answer: str
    match: Literal["contains", "exact", "starts"] = "contains"
    max_tokens: int = _MAX_TOKENS

    def is_right(self, text: str) -> bool:
        """Mark a generated text."""
        if self.match == "exact":
            return text.strip() == self.answer.strip()
        if self.match == "starts":
            return re.match(rf"\s*{re.escape(self.answer)}(?!\w)", text, re.IGNORECASE) is not None
        return self.answer.lower() in text.lower()


def read_task(path: Path) -> list[Question]:
    """Read a task.

    Raises:
        ConfigError: the file is missing, empty, or rows are malformed; lists them by file:line.
        Unreadable: the file exists and cannot be read, or is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise ConfigError(f"the task {path} does not exist", hint="Check quality.tasks.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot read {path}: {error}") from error
    rows = [(number, _question(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    problems = [Problem(where=f"{path}:{number}", message=row) for number, row in rows if isinstance(row, str)]
    if problems or not rows:
        what = f"has {len(problems)} malformed rows" if problems else "holds no question"
        hint = 'A row is {"prompt": "…", "answer": "…"}; match (contains, exact or starts) and max_tokens may be added.'
        raise ConfigError(f"the task {path} {what}", problems=problems, hint=hint)
    return [row for _, row in rows if isinstance(row, Question)]


def task_digest(path: Path) -> str:
    """Return the sha256 of a task's file, by which answers to it are known to be answers to the same questions."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def next_words(texts: Sequence[str], count: int) -> list[Question]:
    """Make questions of running text: the right answer is the word that follows, `count` words at most.

    Prediction of a word from what stands before it, as in LAMBADA (Paperno et al. 2016, arXiv 1606.06031), with
    words spread evenly over the text instead of words chosen to be hard. Only words of letters are asked for.
    """
    found = []
    for text in texts:
        words = list(re.finditer(r"\S+", text))
        for number in range(_LEAST_CONTEXT, len(words), _STRIDE):
            word = re.match(r"[^\W\d_]{3,12}(?=\W*$)", words[number].group())
            if word is not None:
                begin, end = words[max(0, number - _MOST_CONTEXT)].start(), words[number - 1].end()
                document = Document(text=text[begin:end])
                found.append(Question(document=document, answer=word.group(), match="starts", max_tokens=_WORD_TOKENS))
    step = max(1.0, len(found) / count) if count else 1.0
    return [found[int(position * step)] for position in range(min(count, len(found)))]


def _question(line: str) -> Question | str:
    """Return the question, or what is wrong with the row."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}."
    wrong = _wrong(row)
    if wrong:
        return wrong
    document = parse_row(json.dumps({key: row[key] for key in ("prompt", "messages") if key in row}))
    if isinstance(document, str):
        return document
    return Question(document=document, **{key: row[key] for key in ("answer", "match", "max_tokens") if key in row})


def _wrong(row: object) -> str:
    """Say what is wrong with everything but the question itself; empty when nothing is."""
    if not isinstance(row, dict):
        return f"a row must be an object, not {type(row).__name__}."
    answer, match, max_tokens = row.get("answer"), row.get("match", "contains"), row.get("max_tokens", _MAX_TOKENS)
    faults = {
        f"unknown keys {sorted(row.keys() - _KEYS)}.": bool(row.keys() - _KEYS),
        "answer must be a text that is not empty.": not isinstance(answer, str) or not answer.strip(),
        f"match must be contains, exact or starts, not {match!r}.": match not in ("contains", "exact", "starts"),
        "max_tokens must be a whole number of at least 1.": type(max_tokens) is not int or max_tokens < 1,
    }
    return next((message for message, found in faults.items() if found), "")


def mark_answers(
    model: Any,  # noqa: ANN401 - torch is not imported at module level
    directory: Path,
    tasks: Mapping[str, Sequence[Question]],
    progress: Progress,
) -> dict[str, list[int]]:
    """Answer every question greedily: 1 for right, 0 for wrong, by task.

    Args:
        model: from `fake_quant.build_model`, resident.
        directory: the source checkpoint, for tokenizer and end-of-sequence ids.
        tasks: questions by the name of their task.
        progress: told of each answer.
    """
    encoder = TextEncoder(directory)
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    eos = encoder.eos_token_id if eos is None else eos
    marks: dict[str, list[int]] = {}
    for name, questions in tasks.items():
        with progress.track(f"answer {name}", len(questions), "questions") as advance:
            marks[name] = []
            for question in questions:
                marks[name].append(int(question.is_right(_answer(model, encoder, question, eos))))
                advance(1)
    return marks


def _answer(model: Any, encoder: TextEncoder, question: Question, eos: int | list[int] | None) -> str:  # noqa: ANN401
    import torch

    ids = torch.tensor([encoder.encode_question(question.document)])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=question.max_tokens,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return encoder.decode(out[0, ids.shape[1] :].tolist())

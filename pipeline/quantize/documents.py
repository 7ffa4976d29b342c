"""Text files: JSONL (one object a line with `text`, `prompt` or `messages`) or plain text, a document a paragraph.

Pure reading; whatever is wrong with a file is said by file:line before anything heavy runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError, Problem, Unreadable

SHIPPED_CALIBRATION = Path(__file__).parent / "data" / "calibration.jsonl"
SHIPPED_HELD = Path(__file__).parent / "data" / "held.jsonl"

_LISTED_PROBLEMS = 20

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text: either `text`, or a conversation that the chat template renders."""

    text: str = ""
    messages: tuple[Message, ...] = ()


def read_documents(path: Path, *, key: str = "calibration.dataset") -> list[Document]:
    """Read a JSONL or plain text file.

    Args:
        path: the file.
        key: the config's key that names it, for messages.

    Raises:
        ConfigError: the file is missing, empty, of a kind that is not text, or rows are malformed; lists them by
            file:line.
        Unreadable: the file exists and cannot be read, or is not UTF-8.
    """
    if path.suffix == ".parquet":
        raise ConfigError(
            f"{path} is a Parquet file, and {key} takes JSONL or plain text",
            hint='Write its text column to JSONL: one {"text": "…"} a line.',
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", hint=f"Check {key}.") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is not UTF-8 (byte {error.start})", hint="Convert it to UTF-8.") from error
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror}") from error
    if path.suffix in {".jsonl", ".json", ".ndjson"}:
        documents = _parse_jsonl(text, path)
    else:
        paragraphs = (paragraph.strip() for paragraph in text.replace("\r\n", "\n").split("\n\n"))
        documents = [Document(text=paragraph) for paragraph in paragraphs if paragraph]
    if not documents:
        raise ConfigError(f"{path} holds no text", hint=f"{key} takes JSONL rows with text, prompt or messages.")
    return documents


def common_documents(first: Sequence[Document], second: Sequence[Document]) -> int:
    """How many documents of `second` are in `first` too, whatever their case and spaces."""
    known = {_folded(document) for document in first}
    return sum(_folded(document) in known for document in second)


def _folded(document: Document) -> str:
    said = [document.text, *(message["content"] for message in document.messages)]
    return " ".join(" ".join(said).casefold().split())


def _parse_jsonl(text: str, path: Path) -> list[Document]:
    documents: list[Document] = []
    problems: list[Problem] = []
    # split("\n"), not splitlines(): JSON strings may hold U+2028 and friends unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        parsed = parse_row(line)
        if isinstance(parsed, Document):
            documents.append(parsed)
        else:
            problems.append(Problem(where=f"{path}:{number}", message=parsed))
    if problems:
        shown = problems[:_LISTED_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(Problem(where=str(path), message=f"and {len(problems) - len(shown)} more."))
        raise ConfigError(
            f"{len(problems)} malformed rows in {path}",
            problems=shown,
            hint='A row is {"text": "…"}, {"prompt": "…"} or {"messages": [{"role": "…", "content": "…"}]}.',
        )
    return documents


def parse_row(line: str) -> Document | str:
    """Return the document, or what is wrong with the row."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}."
    if not isinstance(row, dict):
        return f"a row must be an object, not {type(row).__name__}."
    found = [key for key in ("text", "prompt", "messages") if key in row]
    if len(found) != 1:
        return f"a row needs exactly one of text, prompt, messages; this one has {found or sorted(row)}."
    value = row[found[0]]
    if found[0] != "messages":
        return Document(text=value) if isinstance(value, str) else f"{found[0]} must be a string."
    well_formed = (
        isinstance(value, list)
        and value
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
    if not well_formed:
        return "messages must be a non-empty list of objects with string role and content."
    return Document(messages=tuple({"role": m["role"], "content": m["content"]} for m in value))


def identity(document: Document) -> str:
    """What two copies of a document share, whatever the spaces at their ends."""
    return json.dumps([document.text.strip(), [dict(message) for message in document.messages]], sort_keys=True)

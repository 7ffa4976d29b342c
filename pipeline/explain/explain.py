"""From a failure log to cause, evidence and next step; the knowledge is in symptoms.toml.

The log is read once, line by line: whatever its length, what is kept is the first line of each symptom
and the last few lines that look like errors. A line is explained by the first row that fits it, and the
result begins with the earliest cause: what merely follows from it (a kill, an MPI abort) and warnings
that only look like causes come after.
"""

from __future__ import annotations

import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import Unreadable

Kind = Literal["cause", "consequence", "harmless", "unknown"]
Stage = Literal["host", "quantize", "compile", "load", "request", "any"]

UNKNOWN = "unknown"
MAX_LINE_CHARS = 4096
MAX_ERROR_LINES = 5

_ORDER: tuple[Kind, ...] = ("cause", "consequence", "harmless", "unknown")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What an error looks like to a reader who knows nothing: logger levels, exceptions, plain words (lower case).
_ERROR_WORDS = (
    *("error", "exception", "fatal", "fail", "abort", "assert", "panic", "unable to", "cannot", "can't"),
    *("refused", "denied", "timed out", "not found", "no such", "[e]", "[f]"),
)
# "0 errors" and "no errors" are good news.
_ERROR_LIKE = re.compile(
    r"(?<!\b0 )(?<!\bno )((?<!\w)[a-z]*(error|exception)|fatal|fail(ed|ure|s)?|abort(ed)?|assert(ion)?|panic|unable to"
    r"|cannot|can't|refused|denied|timed out|not found|no such file)\b|(?<!\b0 )(?<!\bno )errors\b|\[[ef]\]"
)


class Symptom(BaseModel):
    """One row of symptoms.toml; the head of that file says what each field means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    also: tuple[str, ...] = ()
    stage: Stage
    kind: Literal["cause", "consequence", "harmless"] = "cause"
    contains: tuple[str, ...] = Field(min_length=1)
    pattern: re.Pattern[str] = re.compile("")
    cause: str
    next: str
    key: str = ""
    source: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What one symptom in a log means.

    Attributes:
        id: the row of the table; "unknown" when no row fits anything in the log.
        kind: cause; consequence of something else; harmless; or unknown.
        stage: where such a failure happens; "any" when it can happen everywhere.
        evidence: the first line that shows it, without colours and cut at MAX_LINE_CHARS.
        line_number: its number, from 1; 0 when the log shows nothing at all.
        cause: why, in one or two sentences.
        next_step: what to do.
        key: the config key to change; "" when it is none.
        source: where this was learnt.
        other_lines: for an unknown failure, the last lines that look like errors, as (number, text).
    """

    id: str
    kind: Kind
    stage: Stage
    evidence: str
    line_number: int
    cause: str
    next_step: str
    key: str = ""
    source: str = ""
    other_lines: tuple[tuple[int, str], ...] = ()


@cache
def symptoms() -> tuple[Symptom, ...]:
    """Read the table; a row without a source or with an unknown field does not load."""
    data = tomllib.loads(resources.files("pipeline.explain").joinpath("symptoms.toml").read_text("utf-8"))
    rows = (row | {"pattern": re.compile(row.get("pattern", ""), re.IGNORECASE)} for row in data["symptom"])
    return tuple(Symptom.model_validate(row) for row in rows)


def explain(lines: Iterable[str]) -> list[Explanation]:
    """Say what a log tells.

    Args:
        lines: the log from its beginning; read once and never held.

    Returns:
        Causes in the order of the log, then consequences, then harmless warnings. When there is no cause and no
        consequence, the first entry is "unknown" with the last lines that look like errors. Never empty.
    """
    found: dict[str, Explanation] = {}
    errors: deque[tuple[int, str]] = deque(maxlen=MAX_ERROR_LINES)
    number = 0
    for number, raw in enumerate(lines, start=1):
        line = _plain(raw)
        lowered = line.lower()
        explanation = _explain_line(line, lowered, number)
        if explanation is not None:
            found.setdefault(explanation.id, explanation)
        if (explanation is None or explanation.kind != "harmless") and _looks_like_error(lowered):
            errors.append((number, line))
    if all(explanation.kind == "harmless" for explanation in found.values()):
        found[UNKNOWN] = _unknown(tuple(errors), number)
        return [found.pop(UNKNOWN), *found.values()]
    return sorted(found.values(), key=lambda explanation: (_ORDER.index(explanation.kind), explanation.line_number))


def read_lines(path: Path) -> Iterator[str]:
    """Read a log lazily: bytes that are no UTF-8 become U+FFFD, and carriage returns of progress bars end a line.

    A line without an end is handed out in pieces of 64 KiB, so memory stays bounded whatever the file holds.

    Raises:
        Unreadable: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while piece := file.readline(2**16):
                yield piece
    except OSError as error:
        raise Unreadable(f"the log {path} cannot be read: {error.strerror}", hint="Name a log file.") from error


def _plain(raw: str) -> str:
    """The text of a line: no colours, no indent, not longer than MAX_LINE_CHARS."""
    line = raw[:MAX_LINE_CHARS].strip()
    return _ESCAPES.sub("", line) if "\x1b" in line else line


@cache
def _gates() -> tuple[tuple[str, tuple[Symptom, ...]], ...]:
    """Every text of `contains` with the rows that name it."""
    texts = dict.fromkeys(text for row in symptoms() for text in row.contains)
    return tuple((text, tuple(row for row in symptoms() if text in row.contains)) for text in texts)


def _explain_line(line: str, lowered: str, number: int) -> Explanation | None:
    # Most lines show nothing: plain substring search is several times cheaper than the patterns.
    named = {row.id for text, rows in _gates() if text in lowered for row in rows}
    if not named:
        return None
    for row in symptoms():
        match = row.pattern.search(line) if row.id in named else None
        if match is not None:
            return Explanation(
                id=row.id,
                kind=row.kind,
                stage=row.stage,
                evidence=line,
                line_number=number,
                cause=row.cause.format_map(match.groupdict()),
                next_step=row.next.format_map(match.groupdict()),
                key=row.key,
                source=row.source,
            )
    return None


def _looks_like_error(lowered: str) -> bool:
    return any(word in lowered for word in _ERROR_WORDS) and _ERROR_LIKE.search(lowered) is not None


def _unknown(errors: tuple[tuple[int, str], ...], n_lines: int) -> Explanation:
    number, evidence = errors[-1] if errors else (0, "")
    if errors:
        cause = "No known symptom. The last lines that look like errors follow; the first is often the cause."
        step = "Read the lines around them. If you find the cause, a row for symptoms.toml helps the next reader."
    else:
        cause = f"No known symptom, and none of the {n_lines} lines looks like an error."
        step = "Look for the exit code (137 is a kill for memory), for another log, or run again at a finer log level."
    return Explanation(
        id=UNKNOWN,
        kind="unknown",
        stage="any",
        evidence=evidence,
        line_number=number,
        cause=cause,
        next_step=step,
        other_lines=errors,
    )


def likely_cause(lines: Iterable[str]) -> str:
    """Cause and next step of the first known symptom as one text; "" when there is none, or only harmless ones."""
    first = explain(lines)[0]
    return "" if first.kind == "unknown" else f"{first.cause} {first.next_step}"

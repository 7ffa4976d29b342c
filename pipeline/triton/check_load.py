"""Reads a repository for `check`: each config.pbtxt with what is wrong in its text, and where its keys stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError, Problem
from pipeline.triton.engine_directory import in_repository
from pipeline.triton.model_config import ModelConfig, parse

_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
# What stands in for a placeholder, so that the rest of the file can be looked at: by the field before it.
_STAND_INS: Final = {"data_type": "TYPE_FP32", "decoupled": "true"}


@dataclass(frozen=True, kw_only=True)
class Finding(Problem):
    """A problem with its row in the list of sharp edges ("TL" and a number), or a word for what has no row."""

    id: str

    def __str__(self) -> str:
        """Close with the row."""
        return f"{super().__str__()} [{self.id}]"


def error(row: str, where: str, message: str, hint: str) -> Finding:
    """What will fail."""
    return Finding(id=row, where=where, message=message, hint=hint)


def warning(row: str, where: str, message: str, hint: str) -> Finding:
    """What works, but hardly as meant."""
    return Finding(id=row, where=where, message=message, hint=hint, severity="warning")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the repository.

    unfilled: variables of placeholders that stand in the grammar; their fields hold stand-ins.
    """

    name: str
    directory: Path
    text: str
    config: ModelConfig
    unfilled: frozenset[str] = frozenset()

    def parameter(self, key: str) -> str:
        """Value of a parameter; "" when it is absent or an unfilled placeholder, as the backend takes it."""
        if key not in self.config.parameters:
            return ""
        value: str = self.config.parameters[key].string_value
        return "" if _PLACEHOLDER.fullmatch(value) else value

    def place(self, key: str = "") -> str:
        """File, and the line where a parameter or tensor of that name stands."""
        line = next((n for n, text in enumerate(self.text.splitlines(), 1) if key and f'"{key}"' in text), None)
        return f"{self.name}/config.pbtxt" + (f":{line}" if line else "")

    @property
    def version_directory(self) -> Path:
        """The highest version, which Triton serves by default."""
        versions = [path for path in self.directory.iterdir() if path.is_dir() and path.name.isdigit()]
        return max(versions, key=lambda path: int(path.name), default=self.directory / "1")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """The models that could be parsed. mount: the repository as the server sees it."""

    directory: Path
    mount: str
    models: dict[str, Model] = field(default_factory=dict)

    def locate(self, model: Model, path: str) -> Path:
        """Where a path of a configuration lies here; a relative one starts at the version directory."""
        if not path.startswith("/"):
            return model.version_directory / path
        return in_repository(path, self.directory, self.mount)


def load(directory: Path, mount: str) -> tuple[Repository, list[Finding]]:
    """Parse every config.pbtxt; what is left of a template in the grammar is reported and stood in for."""
    repository = Repository(directory=directory, mount=mount)
    findings: list[Finding] = []
    for path in sorted(directory.glob("*/config.pbtxt")):
        name = path.parent.name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            findings.append(error("TL39", f"{name}/config.pbtxt", f"cannot be read: {problem}", "Copy it again."))
            continue
        filled, left = _without_placeholders(text, f"{name}/config.pbtxt")
        findings += left
        try:
            config = parse(filled, f"{name}/config.pbtxt")
        except ConfigError as problem:
            findings.append(error("TL39", f"{name}/config.pbtxt", problem.message, "Write a valid ModelConfig."))
            continue
        unfilled = frozenset(match[1] for finding in left for match in _PLACEHOLDER.finditer(finding.message))
        repository.models[name] = Model(name=name, directory=path.parent, text=filled, config=config, unfilled=unfilled)
    return repository, findings


def _without_placeholders(text: str, file: str) -> tuple[str, list[Finding]]:
    """Replace placeholders outside of strings (srv#8592, tensorrtllm_backend#250: they make the file unparsable)."""
    found: list[Finding] = []
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        code = "" if line.lstrip().startswith("#") else line
        spans = [match.span() for match in _STRING.finditer(code)]
        for match in reversed(list(_outside(code, spans))):
            field_name = re.search(r"(\w+)\s*:?\s*\[?\s*$", code[: match.start()])
            name = field_name[1] if field_name else ""
            message = f"'{match[0]}' was never filled, and the file cannot be parsed with it."
            found.append(error("TL39", f"{file}:{number}", message, _what_to_write(name, match[1])))
            code = code[: match.start()] + _STAND_INS.get(name, "1") + code[match.end() :]
        lines.append(code if spans or found else line)
    return "\n".join(lines) + "\n", found


def _outside(code: str, spans: list[tuple[int, int]]) -> Iterator[re.Match[str]]:
    for match in _PLACEHOLDER.finditer(code):
        if not any(start <= match.start() < end for start, end in spans):
            yield match


def _what_to_write(field_name: str, variable: str) -> str:
    if field_name == "data_type":
        return "Write a type, such as TYPE_FP32 (TYPE_FP16 where the engine has float16)."
    if field_name == "decoupled":
        return "Write true, which streaming needs."
    return f"Write a number for {variable}."

"""README.md as a user reads it: its commands and its configs, taken from the fenced blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The text of every fenced block in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every command line of the sh blocks as an argument list, in order."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def exit_codes() -> list[int]:
    """The codes of the table 'Exit codes'."""
    return [int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, flags=re.MULTILINE)]


def recipe(target: str) -> list[list[str]]:
    """The command lines of a target of the Makefile, its variables filled in."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(\w+) \??:?= (.+)$", makefile, flags=re.MULTILINE))
    found = re.search(rf"^{target}:.*\n((?:\t.*\n?)+)", makefile, flags=re.MULTILINE)
    assert found, f"the Makefile has no target {target}"
    lines = (re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], line) for line in found[1].splitlines())
    return [shlex.split(line) for line in lines]

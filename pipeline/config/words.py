"""Hints: the nearest name, other tools' words for our keys, and why a known word is not taken here."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

from pipeline.config.keys import KEYS, ROOT, Key, children, join, leaves

_BOOL_WORDS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}


@dataclass(frozen=True, kw_only=True)
class Word:
    """What another tool's word means here.

    Attributes:
        use: our key path or value; empty when there is none.
        why: the difference in meaning, or the reason why it is not taken.
        source: where the fact was read.
    """

    use: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The words of the field that are not ours: keys, and values by our key path."""

    keys: Mapping[str, Word]
    values: Mapping[str, Mapping[str, Word]]


@cache
def vocabulary() -> Vocabulary:
    """Read vocabulary.toml: rows of words that share a meaning, spread to one entry per word."""
    data = tomllib.loads(resources.files("pipeline.config").joinpath("vocabulary.toml").read_text("utf-8"))
    keys: dict[str, Word] = {}
    values: dict[str, dict[str, Word]] = {}
    for row in data["key"]:
        word = Word(use=row.get("use", ""), why=row.get("why", ""), source=row["source"])
        keys.update((plain(name), word) for name in row["words"])
    for row in data["value"]:
        word = Word(use=row.get("use", ""), why=row.get("why", ""), source=row["source"])
        values.setdefault(row["key"], {}).update((plain(name), word) for name in row["words"])
    return Vocabulary(keys=keys, values=values)


def plain(word: str) -> str:
    """Fold spelling that carries no meaning: case, and hyphens for underscores."""
    return word.strip().lower().replace("-", "_").replace(" ", "_")


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most likely meant, or None when nothing is close."""
    folded = {plain(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(plain(word), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def key_hint(section: Key, name: str) -> str:
    """What to write instead of the unknown key `name` of a section."""
    known = _known_word(section, name)
    if known:
        return known
    siblings = children(section.path)
    valid = f"Valid: {', '.join(siblings)}."
    guess = nearest(name, siblings)
    if guess is None:
        far = nearest(name, (key.name for key in KEYS.values()))
        guess = next((key.path for key in KEYS.values() if key.name == far), None)
    return f"Did you mean '{guess}'? {valid}" if guess else valid


def _known_word(section: Key, name: str) -> str:
    """The hint for a key of another section or another tool; "" when nobody knows it."""
    word = plain(name)
    if word == "extends":
        return "It stands at the top level of a file."
    elsewhere = [f"'{key.path}'" for key in KEYS.values() if key.name == word]
    if elsewhere and word not in children(section.path):
        return f"It belongs to another section: {' or '.join(elsewhere)}."
    foreign = vocabulary().keys.get(word)
    if foreign is None:
        return ""
    return (
        f"Here it is '{foreign.use}'{_because(foreign)}."
        if foreign.use
        else f"It is no setting here{_because(foreign)}."
    )


def path_hint(path: str) -> str:
    """What to write instead of a dotted path that the schema lacks, for `--set`."""
    known = ""
    for name in path.split("."):
        section = KEYS.get(known, ROOT)
        if known and section.section is None:
            return f"'{known}' takes {section.expectation()} and has no keys below it."
        if name not in children(known):
            whole = nearest(path, KEYS)
            return _known_word(section, name) or (f"Did you mean '{whole}'?" if whole else key_hint(section, name))
        known = join(known, name)
    return ""


def value_hint(key: Key, value: object) -> tuple[str, str]:
    """Why `value` is not taken by an enumeration ("" when nobody knows it), and what to write instead."""
    choices = [str(choice) for choice in key.choices]
    valid = f"Valid: {', '.join(choices)}."
    text = str(value)
    word = _foreign_value(key, text)
    if set(choices) == {"enable", "disable"} and text.lower() in _BOOL_WORDS | {"true": "", "false": ""}:
        on = _BOOL_WORDS.get(text.lower(), text.lower()) == "true"
        return "", f"Write {'enable' if on else 'disable'}, as trtllm-build does."
    if word is not None and not word.use:
        return word.why, valid
    if word is not None:
        return "", f"Here it is '{word.use}'{_because(word)}. {valid}"
    if int in key.types and isinstance(value, int):
        guess = min(choices, key=lambda choice: abs(int(choice) - value))
        return "", f"The nearest is {guess}. {valid}"
    near = nearest(text, choices)
    return "", f"Did you mean '{near}'? {valid}" if near else valid


def _foreign_value(key: Key, text: str) -> Word | None:
    """The entry for another tool's value; an entry with '*' stands for a family, such as versions."""
    known = vocabulary().values.get(key.path, {})
    families = (entry for entry in known if "*" in entry and fnmatchcase(plain(text), entry))
    return known.get(plain(text)) or next((known[entry] for entry in families), None)


def spelling_hint(key: Key, value: object) -> str:
    """How to write a value whose meaning can be guessed: units, quotes, yes/no, upper case."""
    hint = ""
    if bool in key.types:
        word = _BOOL_WORDS.get(str(value).lower())
        hint = f"Write {word}." if word else "Write true or false."
    elif set(key.types) & {int, float} and isinstance(value, str):
        hint = _number_hint(key, value.strip())
    elif key.types == (int,) and isinstance(value, float) and value.is_integer():
        hint = f"Write {value:.0f}."
    elif key.path == "name" and isinstance(value, str):
        slug = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("-._")
        guess = f"Did you mean '{slug}'? " if slug else ""
        hint = f"{guess}Use lower-case letters, digits, '.', '_' and '-', starting with a letter or digit."
    elif key.types == (str,) and isinstance(value, bool):
        hint = f"Quote it: {key.name}: '{str(value).lower()}'."
    return hint


def _number_hint(key: Key, text: str) -> str:
    number = re.match(r"[-+]?\d[\d_,]*(\.\d+)?", text)
    if number is None:
        return ""
    digits = re.sub(r"[_,]", "", number[0])
    if text.endswith("%"):
        return f"Write the share as a fraction: {float(digits) / 100:g}."
    if text[-1] in "kK":
        return f"Write the number in full: {float(digits) * 1000:.0f} or {float(digits) * 1024:.0f}."
    return f"Write the number alone: {key.name}: {digits}."


def section_hint(section: Key, text: str | None) -> str:
    """What to write when a section was given a single value."""
    if text is not None and section.path:
        namesakes = [key for key in leaves() if key.name == section.name]
        for key in [*children(section.path).values(), *namesakes]:
            if text in key.choices or plain(text) in vocabulary().values.get(key.path, {}):
                return f"Did you mean {key.path}: {text}?"
    names = ", ".join(children(section.path))
    return f"Keys: {names}."


def _because(word: Word) -> str:
    return f" ({word.why})" if word.why else ""

"""A tree of written values to the validated config, and a message for every value that is wrong.

Pydantic only finds what is wrong; the words come from the key (what it takes) and the vocabulary
(what the user probably meant), so that every message reads alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import ValidationError

from pipeline.config import rules, words
from pipeline.config.document import Branch, Leaf, broken_paths, find, nearest_mark
from pipeline.config.keys import KEYS, Key
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem


def validate(tree: Branch) -> tuple[BuildConfig | None, list[Problem]]:
    """Validate types and ranges, then the laws between those keys that are valid in themselves."""
    data = _plain(tree)
    problems: list[Problem] = []
    bad = broken_paths(tree)
    config = None
    try:
        config = BuildConfig.model_validate_json(json.dumps(data), strict=True)
        usable = config
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            names = [part for part in detail["loc"] if isinstance(part, str)]
            index = next((part for part in detail["loc"] if isinstance(part, int)), None)
            key = KEYS.get(".".join(names)) or KEYS[".".join(names[:-1])].item_keys[names[-1]]
            missing = detail["type"] == "missing"
            listed = names if key.path in KEYS else names[:-1]
            if ".".join(listed) not in bad:
                problems.append(_missing(tree, key, index) if missing else _wrong(tree, key, detail["input"], index))
            bad.add(".".join(listed))
            _drop(data, listed)
        usable = BuildConfig.model_validate_json(json.dumps({"name": "unnamed", "source": {}} | data), strict=True)
    problems += [
        Problem(
            where=f"{nearest_mark(tree, finding.keys[0])} {finding.keys[0]}",
            message=finding.message,
            hint=finding.hint,
            severity=finding.severity,
        )
        for finding in rules.check(usable)
        if not any(_touches(path, bad) for path in finding.keys)
    ]
    return config, problems


def _plain(tree: Branch) -> dict[str, object]:
    return {
        name: _plain(node) if isinstance(node, Branch) else node.value
        for name, node in tree.children.items()
        if isinstance(node, Branch) or not node.broken
    }


def _touches(path: str, bad: set[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in bad)


def _drop(data: dict[str, object], names: Sequence[str]) -> None:
    node: object = data
    for name in names[:-1]:
        node = node.get(name) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(names[-1], None)


def _missing(tree: Branch, key: Key, index: int | None) -> Problem:
    where = f"{_mark(tree, key, index)} {key.path}"
    return Problem(where=where, message="is required.", hint=f"Add '{key.name}': {key.description}")


def _mark(tree: Branch, key: Key, index: int | None) -> str:
    """The place of a value, or of the item of a list that it is, or is in."""
    node = find(tree, key.path if key.path in KEYS else key.path.rpartition(".")[0])
    if index is not None and isinstance(node, Leaf) and index < len(node.item_marks):
        return node.item_marks[index]
    return nearest_mark(tree, key.path)


def _wrong(tree: Branch, key: Key, value: object, index: int | None) -> Problem:
    """One value that its key does not take: what was written, why not, what to write."""
    where = f"{_mark(tree, key, index)} {key.path}"
    if value is None and index is not None:
        return Problem(where=where, message=f"item {index + 1} is empty.", hint="Remove it.")
    if value is None:
        default = "" if key.required else f" Remove the line for the default, {_shown(key.default)}."
        return Problem(where=where, message=f"is empty; it takes {key.expectation()}.", hint=default.strip())
    if isinstance(value, list):
        message = f"takes {_one(key)}, not a list."
        return Problem(where=where, message=message)
    hint = words.spelling_hint(key, value)
    if key.choices and (index is not None or key.types != (tuple,)):
        why, hint = words.value_hint(key, value)
        message = f"{_shown(value)} is refused: {why}." if why else f"{_shown(value)} is not a {key.noun}."
        return Problem(where=where, message=message, hint=hint)
    if key.types == (tuple,) and index is None and not key.item_keys:
        hint = f"Write {key.name}: [{json.dumps(value, ensure_ascii=False)}]."
    return Problem(where=where, message=f"{_shown(value)} is not {key.expectation()}.", hint=hint)


def _one(key: Key) -> str:
    return f"one {key.noun}" if key.choices else key.expectation()


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"'{value}'" if isinstance(value, str) else str(value)

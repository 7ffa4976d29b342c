"""YAML text to a tree of known keys, each with the place where it was written.

The schema guides the walk: an unknown key is reported and never entered, so aliases cannot blow the
tree up. Scalars follow the YAML 1.2 core rules (`yes`, `on`, `1:30` and `010` are not what YAML 1.1
makes of them, and `1e-3` is a number); only plain data types are allowed. Paths become absolute
here, relative to the file in which they are written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pipeline.config import words
from pipeline.config.keys import Key, Scalar, children, join
from pipeline.errors import Problem

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOLS = {"true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")


class _TagError(Exception):
    """A node carries a tag other than those of plain data."""


class _Loader(yaml.SafeLoader):
    """Scanner and composer of PyYAML with the scalar rules of the YAML 1.2 core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own class attribute, filled below)


for _kind, _pattern, _first in (
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern.pattern})$"), list(_first))


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A value as written.

    Attributes:
        value: the plain value; a list for a list key, of mappings where its items have keys.
        mark: "file:line" or "--set".
        item_marks: the place of each item of a list.
        broken: the value was reported as a problem and is not usable.
    """

    value: Scalar | list[Scalar] | list[dict[str, Scalar]]
    mark: str
    item_marks: tuple[str, ...] = ()
    broken: bool = False


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A section as written: its known keys in order."""

    mark: str
    children: dict[str, Branch | Leaf] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a text comes from.

    Attributes:
        label: what `file` in "file:line" shows; "--set" for an override, which has no lines.
        directory: what relative paths in the text are relative to; absolute.
    """

    label: str
    directory: Path

    def mark(self, node: yaml.Node) -> str:
        """The place of a node, for messages and provenance."""
        return self.label if self.label == "--set" else f"{self.label}:{node.start_mark.line + 1}"


def compose(text: str, origin: Origin, problems: list[Problem]) -> yaml.Node | None:
    """Parse one YAML document into nodes; a syntax error becomes a problem with line and column."""
    try:
        return yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin.label}:{mark.line + 1}:{mark.column + 1}" if mark else origin.label
        message = f"invalid YAML: {error.problem or error.context}"
        problems.append(Problem(where=where, message=f"{message}.", hint=_syntax_hint(text, mark)))
    except yaml.YAMLError as error:
        problems.append(Problem(where=origin.label, message=f"invalid YAML: {str(error).splitlines()[0]}."))
    except RecursionError:
        problems.append(Problem(where=origin.label, message="the YAML is nested too deeply to be a config."))
    return None


def _syntax_hint(text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "Indent with spaces; YAML does not allow tabs."
    if re.search(r"(?:^|[\s\[,])\*[.\w*]", line):
        return "Quote globs: an unquoted '*' starts a YAML alias, so write '*.mlp.down_proj' with its quotes."
    if re.search(r":\s[^'\"#]*:\s", line):
        return "Quote a text that contains ': '."
    return ""


def section(node: yaml.Node, key: Key, origin: Origin, problems: list[Problem], *, mark: str) -> Branch:
    """Read a mapping node as a section; every unknown or repeated key becomes a problem.

    `mark` is the place of the section's own key. An empty section (`engine:` with nothing below) sets nothing.
    """
    branch = Branch(mark=mark)
    if isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null":
        return branch
    where = f"{branch.mark} {key.path}".rstrip()
    if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
        hint = words.section_hint(key, node.value if isinstance(node, yaml.ScalarNode) else None)
        what = f"'{key.path}' is a section and takes keys" if key.path else "a config is a mapping of keys"
        problems.append(Problem(where=where, message=f"{what}, not {_describe(node)}.", hint=hint))
        return branch
    known = children(key.path)
    for name, value, place in _pairs(node, key, origin, problems):
        if name not in known:
            where = f"{place} {join(key.path, name)}"
            problems.append(Problem(where=where, message=f"unknown key '{name}'.", hint=words.key_hint(key, name)))
            continue
        branch.children[name] = read(value, known[name], origin, problems, mark=place)
    return branch


def _pairs(
    node: yaml.MappingNode, key: Key, origin: Origin, problems: list[Problem]
) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield (name, value node, place) of a mapping; names that are no text or repeat are problems."""
    first: dict[str, str] = {}
    for name_node, value in node.value:
        mark = origin.mark(name_node)
        if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != _TAG + "str":
            problems.append(Problem(where=f"{mark} {key.path}".rstrip(), message="a key must be a plain text."))
            continue
        name = name_node.value
        if name == "<<":
            hint = "Put the shared keys into a file and name it in 'extends'."
            problems.append(Problem(where=f"{mark} {key.path}".rstrip(), message="no merge key '<<' here.", hint=hint))
        elif name in first:
            message = f"'{name}' is written twice; first at {first[name]}."
            problems.append(
                Problem(where=f"{mark} {join(key.path, name)}", message=message, hint="Keep one of the two.")
            )
        else:
            first[name] = mark
            yield name, value, mark


def read(node: yaml.Node, key: Key, origin: Origin, problems: list[Problem], *, mark: str) -> Branch | Leaf:
    """Read what is written for a key; `mark` is the place of the key itself."""
    if key.section is not None:
        return section(node, key, origin, problems, mark=mark)
    before = len(problems)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq" and key.item_keys:
        mappings = [_mapping(item, key, origin, problems) for item in node.value]
        marks = tuple(origin.mark(item) for item in node.value)
        return Leaf(value=mappings, mark=mark, item_marks=marks, broken=len(problems) > before)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        items = [_scalar(item, key, origin, problems) for item in node.value]
        marks = tuple(origin.mark(item) for item in node.value)
        if key.items is Path:
            places = zip(items, marks, strict=True)
            items = [
                _path(item, key, origin, problems, place) if isinstance(item, str) else item for item, place in places
            ]
        return Leaf(value=items, mark=mark, item_marks=marks, broken=len(problems) > before)
    value = _scalar(node, key, origin, problems)
    if Path in key.types and isinstance(value, str):
        value = _path(value, key, origin, problems, mark)
    return Leaf(value=value, mark=mark, broken=len(problems) > before)


def _mapping(node: yaml.Node, key: Key, origin: Origin, problems: list[Problem]) -> dict[str, Scalar]:
    """Read one item of a list of mappings; every key of it takes one plain value."""
    known = key.item_keys
    if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
        hint = f"Write {{{', '.join(f'{name}: …' for name in known)}}} as an item."
        message = f"takes a mapping as an item, not {_describe(node)}."
        problems.append(Problem(where=f"{origin.mark(node)} {key.path}", message=message, hint=hint))
        return {}
    values: dict[str, Scalar] = {}
    for name, value, place in _pairs(node, key, origin, problems):
        if name in known:
            read_value = _scalar(value, known[name], origin, problems)
            if Path in known[name].types and isinstance(read_value, str):
                read_value = _path(read_value, known[name], origin, problems, place)
            values[name] = read_value
            continue
        message, hint = f"unknown key '{name}'.", f"Valid: {', '.join(known)}."
        problems.append(Problem(where=f"{place} {join(key.path, name)}", message=message, hint=hint))
    return values


def _scalar(node: yaml.Node, key: Key, origin: Origin, problems: list[Problem]) -> Scalar:
    where = f"{origin.mark(node)} {key.path}"
    if not isinstance(node, yaml.ScalarNode):
        expected = f"{key.item_name()} as items" if key.types == (tuple,) else key.expectation()
        problems.append(Problem(where=where, message=f"takes {expected}, not {_describe(node)}."))
        return None
    text, kind = str(node.value), node.tag.removeprefix(_TAG)
    if kind in ("int", "float") and not key.choices and set(key.types) & {str, Path, tuple}:
        kind = "str"  # A commit id of digits, or a name such as 1.5, is a text wherever a text is asked for.
    try:
        return _construct(text, kind)
    except (ValueError, KeyError):
        problems.append(Problem(where=where, message=f"{text[:40]!r} is not a YAML {kind}."))
    except _TagError:
        hint = "Write plain data without a tag."
        problems.append(Problem(where=where, message=f"the YAML tag '{node.tag}' is not allowed.", hint=hint))
    return None


def _construct(text: str, kind: str) -> Scalar:
    """Make the plain value of a scalar by the YAML 1.2 core rules; ValueError when it is none."""
    match kind:
        case "str":
            text.encode()  # An escaped lone surrogate is a ValueError here and not a crash later.
            return text
        case "null":
            return None
        case "bool":
            return _BOOLS[text.lower()]
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            raise _TagError


def _path(text: str, key: Key, origin: Origin, problems: list[Problem], mark: str) -> str:
    """Make a path absolute, relative to the file in which it is written; the environment is never read."""
    if text.startswith("~") or "$" in text:
        message = f"'{text}' depends on the environment, which never changes a build."
        hint = "Write the full path, or one relative to this file."
        problems.append(Problem(where=f"{mark} {key.path}", message=message, hint=hint))
    return os.path.normpath(origin.directory / text)


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"'{str(node.value)[:60]}'"


def find(tree: Branch, path: str) -> Branch | Leaf | None:
    """What is written for a key path, or None."""
    node: Branch | Leaf | None = tree
    for name in path.split("."):
        node = node.children.get(name) if isinstance(node, Branch) else None
    return node


def written_at(tree: Branch, path: str) -> str | None:
    """The place of a value, or None when it is not written."""
    node = find(tree, path)
    return node.mark if isinstance(node, Leaf) else None


def nearest_mark(tree: Branch, path: str) -> str:
    """The place of a key, or of the closest section above it that is written."""
    while path:
        node = find(tree, path)
        if node is not None:
            return node.mark
        path = path.rpartition(".")[0]
    return tree.mark


def broken_paths(tree: Branch, path: str = "") -> set[str]:
    """The key paths whose value was already reported and is not usable."""
    broken: set[str] = set()
    for name, node in tree.children.items():
        if isinstance(node, Branch):
            broken |= broken_paths(node, join(path, name))
        elif node.broken:
            broken.add(join(path, name))
    return broken

"""Every key of the schema by its dotted path, and what each one takes, in words.

The one place that looks inside pydantic's field objects: the loader, the hints and the renderer
read `KEYS` instead.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from pipeline.config.schema import BuildConfig
from pipeline.config.section import Section

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: where it is and what it takes.

    Attributes:
        path: dotted path; empty for the root of the config.
        section: the model of a nested mapping, None for a value.
        types: the Python types of a value, without None; empty for a section.
        items: the type of the items of a list; a section where each item is a mapping.
        choices: the allowed values of an enumeration, or of each item of a list of them, in schema order.
        nullable: whether `null` (nothing chosen) is a value.
        required: whether a config without it is incomplete.
        default: value when nothing is written; None for a section.
        noun: what an error message calls a value, for example "format".
        bounds: limits of a number, for example "of at least 1".
        description: one sentence for people.
    """

    path: str
    section: type[Section] | None = None
    types: tuple[type, ...] = ()
    items: type | None = None
    choices: tuple[str | int, ...] = ()
    nullable: bool = False
    required: bool = False
    default: object = None
    noun: str = ""
    bounds: str = ""
    description: str = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def expectation(self) -> str:
        """What the key takes, ready to follow "is not": 'a whole number of at least 1'."""
        if self.noun:
            return f"a list of {self.noun}s" if self.types == (tuple,) else f"a {self.noun}"
        kind = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            Path: "a path",
            tuple: f"a list of {self.item_name()}",
            str: "a text",
        }[self.types[0]]
        return f"{kind} {self.bounds}".strip()

    def item_name(self) -> str:
        """What the items of a list are, in words."""
        if self.item_keys:
            return f"items of {' and '.join(self.item_keys)}"
        return "paths" if self.items is Path else "texts"

    @property
    def item_keys(self) -> dict[str, Key]:
        """The keys of one item of a list of mappings, by name; empty for other lists."""
        if self.items is None or not issubclass(self.items, Section):
            return {}
        return {name: _key(join(self.path, name), field) for name, field in self.items.model_fields.items()}


def join(path: str, name: str) -> str:
    """The dotted path of `name` below `path`, which is empty for the root."""
    return f"{path}.{name}" if path else name


def children(path: str) -> dict[str, Key]:
    """The keys directly below a section, by name, in schema order."""
    section = ROOT.section if not path else KEYS[path].section
    if section is None:
        return {}
    return {name: KEYS[join(path, name)] for name in section.model_fields}


def leaves() -> Iterator[Key]:
    """Every key that takes a value, in schema order."""
    return (key for key in KEYS.values() if key.section is None)


def value_at(config: BuildConfig, path: str) -> object:
    """The value of a key."""
    return reduce(getattr, path.split("."), config)


def _bounds(field: FieldInfo) -> str:
    lower = upper = ""
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            lower = f"of at least {limit.ge}"
        elif isinstance(limit, annotated_types.Gt):
            lower = f"above {limit.gt}"
        elif isinstance(limit, annotated_types.Le):
            upper = f"at most {limit.le}"
        elif isinstance(limit, annotated_types.Lt):
            upper = f"below {limit.lt}"
    return " and ".join(part for part in (lower, upper) if part)


def _key(path: str, field: FieldInfo) -> Key:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Key(
            path=path,
            section=annotation,
            required=field.is_required(),
            description=(annotation.__doc__ or "").strip(),
        )
    members: tuple[Any, ...] = (annotation,)
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
    nullable = type(None) in members
    members = tuple(member for member in members if member is not type(None))
    choices = tuple(value for member in members if get_origin(member) is Literal for value in get_args(member))
    kinds = tuple({type(value): None for value in choices}) or tuple(get_origin(member) or member for member in members)
    item = next((get_args(member)[0] for member in members if get_origin(member) is tuple), None)
    if get_origin(item) is Literal:
        choices, item = get_args(item), str
    return Key(
        path=path,
        types=kinds,
        items=item,
        choices=choices,
        nullable=nullable,
        required=field.is_required(),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        noun=field.title or "",
        bounds=_bounds(field),
        description=field.description or "",
    )


def _walk(section: type[Section], path: str) -> Iterator[tuple[str, Key]]:
    for name, field in section.model_fields.items():
        key = _key(join(path, name), field)
        yield key.path, key
        if key.section is not None:
            yield from _walk(key.section, key.path)


ROOT = Key(path="", section=BuildConfig, required=True)
KEYS: Mapping[str, Key] = types.MappingProxyType(dict(_walk(BuildConfig, "")))

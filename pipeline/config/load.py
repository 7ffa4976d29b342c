"""YAML files and overrides to one validated config, with the place of every value.

Loading only reads the named files and what they extend: no environment, no network, no heavy
library. Every problem is collected and raised at once as one ConfigError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import yaml

from pipeline.config import fallback, words
from pipeline.config.document import Branch, Leaf, Origin, compose, read, section, written_at
from pipeline.config.keys import KEYS, ROOT, leaves, value_at
from pipeline.config.render import init_template, json_schema, render
from pipeline.config.schema import BuildConfig
from pipeline.config.validate import validate
from pipeline.errors import ConfigError, Problem

__all__ = ["LoadedConfig", "init_template", "json_schema", "load", "render"]

DEFAULT = "default"
OVERRIDE = "--set"


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A valid config and where it came from.

    Attributes:
        config: the effective config; every path in it is absolute.
        provenance: key path -> "file:line", "--set" or "default", for every value.
        files: the files read, parents first, the config itself last.
        warnings: settings that are legal and have no effect.
        fallback: the config with each step of its `fallback` laid over it, in order.
    """

    config: BuildConfig
    provenance: Mapping[str, str]
    files: tuple[Path, ...]
    warnings: tuple[Problem, ...] = ()
    fallback: tuple[LoadedConfig, ...] = ()

    def changes(self, step: LoadedConfig) -> dict[str, object]:
        """Key path -> value of everything in which a step of the fallback differs from this config."""
        values = {key.path: (value_at(self.config, key.path), value_at(step.config, key.path)) for key in leaves()}
        return {path: after for path, (before, after) in values.items() if before != after}


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a config, what it extends and the overrides, and validate the whole.

    Args:
        path: the YAML file.
        overrides: "key.path=value" strings; the value is YAML, relative paths in it start at the
            working directory. Later ones win, and all win over files.

    Raises:
        ConfigError: with every problem, each as "file:line key.path: what is wrong, what to write".
    """
    reader = _Reader(problems=[], files=[])
    tree = reader.read_file(path, chain=())
    if tree is not None:
        for override in overrides:
            parsed = _override(override, reader.problems)
            tree = _merge(tree, parsed) if parsed is not None else tree
    config = None
    warnings: list[Problem] = []
    # A file that could not be read would make its keys look missing, so the values wait for it.
    if tree is not None and not reader.incomplete:
        config, findings = validate(tree)
        reader.problems += [problem for problem in findings if problem.severity == "error"]
        warnings = [problem for problem in findings if problem.severity == "warning"]
    steps = [] if config is None or tree is None else reader.read_steps(config, tree)
    if config is None or tree is None or reader.problems:
        problems = _in_order(reader.problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{_label(path)} is not a valid config: {count}.", problems=problems)
    files = tuple(reader.files)
    return LoadedConfig(
        config=config,
        provenance=_provenance(tree),
        files=files,
        warnings=tuple(warnings),
        fallback=tuple(LoadedConfig(config=step, provenance=_provenance(laid), files=files) for step, laid in steps),
    )


def _provenance(tree: Branch) -> Mapping[str, str]:
    return MappingProxyType({key.path: written_at(tree, key.path) or DEFAULT for key in leaves()})


@dataclass
class _Reader:
    """Reads files depth first and merges them; collects problems instead of stopping at the first."""

    problems: list[Problem]
    files: list[Path]
    incomplete: bool = False
    steps: list[Branch] = field(default_factory=list)

    def read_steps(self, config: BuildConfig, tree: Branch) -> list[tuple[BuildConfig, Branch]]:
        """Lay each step of the fallback over the config and validate the whole; with the tree that it gives.

        Settings without effect are no news in a step: it inherits what other formats read.
        """
        read: list[tuple[BuildConfig, Branch]] = []
        for step in self.steps:
            laid = _merge(tree, step)
            stepped, findings = validate(laid)
            self.problems += [problem for problem in findings if problem.severity == "error"]
            if not self.problems and stepped in (config, *(earlier for earlier, _ in read)):
                message = "this step builds what an earlier one or the config itself builds."
                self.problems.append(Problem(where=f"{step.mark} {fallback.KEY}", message=message, hint="Remove it."))
            read += [] if stepped is None else [(stepped, laid)]
        return read

    def read_file(self, path: Path, chain: tuple[Path, ...], named_at: str = "") -> Branch | None:
        """Read a file and its parents; None when it could not be read.

        Args:
            path: the file.
            chain: the files on the way to it, from the config down, to find cycles.
            named_at: the place of the `extends` that names it; empty for the config itself.
        """
        name = _label(path)
        text = self._text(path, named_at or name)
        if text is None:
            return None
        origin = Origin(label=name, directory=path.parent.resolve())
        before = len(self.problems)
        node = compose(text, origin, self.problems)
        if node is None:
            self.incomplete = True
            if len(self.problems) == before:
                hint = "A config needs at least 'name' and 'source'; 'trtpipe config init' writes a first one."
                self.problems.append(Problem(where=name, message="the file is empty.", hint=hint))
            return None
        parents = self._parents(node, origin, (*chain, path.resolve()), path)
        steps = fallback.take(node, origin, self.problems)
        self.steps = self.steps if steps is None else steps
        tree = Branch(mark=f"{name}:1")
        for parent in parents:
            tree = _merge(tree, parent)
        tree = _merge(tree, section(node, ROOT, origin, self.problems, mark=f"{name}:1"))
        if path not in self.files:
            self.files.append(path)
        return tree

    def _text(self, path: Path, where: str) -> str | None:
        hint = ""
        try:
            return path.read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            reason = f"'{_label(path)}' does not exist."
            siblings = sorted(file.name for file in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
            near = words.nearest(path.name, siblings)
            if near is not None:
                hint = f"Did you mean '{_label(path.parent / near)}'?"
            elif not path.parent.is_dir():
                hint = f"There is no directory '{_label(path.parent)}'."
        except IsADirectoryError:
            reason = f"'{_label(path)}' is a directory, not a YAML file."
        except UnicodeDecodeError as error:
            reason = f"'{_label(path)}' is not UTF-8 text (byte {error.start})."
        except OSError as error:
            reason = f"'{_label(path)}' cannot be read: {error.strerror}."
        self.incomplete = True
        self.problems.append(Problem(where=where, message=reason, hint=hint))
        return None

    def _parents(self, node: yaml.Node, origin: Origin, chain: tuple[Path, ...], path: Path) -> list[Branch]:
        """Take `extends` out of the document and read the files that it names, in order."""
        if not isinstance(node, yaml.MappingNode):
            return []
        named = [pair for pair in node.value if pair[0].value == "extends"]
        node.value = [pair for pair in node.value if pair not in named]
        for again, _ in named[1:]:
            message = f"'extends' is written twice; first at {origin.mark(named[0][0])}."
            self.problems.append(
                Problem(where=f"{origin.mark(again)} extends", message=message, hint="Write one list.")
            )
        trees: list[Branch] = []
        for key_node, value in named[:1]:
            items = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for item in items:
                where = f"{origin.mark(item if items is not value else key_node)} extends"
                if not isinstance(item, yaml.ScalarNode) or not item.tag.endswith(":str"):
                    message = "'extends' takes a file or a list of files."
                    self.problems.append(Problem(where=where, message=message, hint="Write extends: base.yaml."))
                    self.incomplete = True
                    continue
                parent = path.parent / item.value
                if parent.resolve() in chain:
                    names = " -> ".join(f"'{_label(file)}'" for file in (*chain, parent.resolve()))
                    message = f"'extends' runs in a circle: {names}."
                    self.problems.append(Problem(where=where, message=message, hint="Remove one of the links."))
                    self.incomplete = True
                    continue
                tree = self.read_file(parent, chain, named_at=where)
                trees += [tree] if tree is not None else []
        return trees


def _override(text: str, problems: list[Problem]) -> Branch | None:
    """Parse one "key.path=value"; None when it is not usable."""
    path, equals, value = text.partition("=")
    path = path.strip()
    where = f"{OVERRIDE} {path}"
    key = KEYS.get(path)
    if not equals or not path:
        hint = "Write --set engine.max_batch_size=8."
        problems.append(Problem(where=where.strip(), message=f"'{text}' is not key=value.", hint=hint))
        return None
    if path.partition(".")[0] in ("extends", fallback.KEY):
        hint = "Write it into a file."
        problems.append(
            Problem(where=where, message=f"'{path.partition('.')[0]}' cannot be set from outside.", hint=hint)
        )
        return None
    if key is None:
        problems.append(Problem(where=where, message=f"unknown key '{path}'.", hint=words.path_hint(path)))
        return None
    origin = Origin(label=OVERRIDE, directory=Path.cwd())
    before = len(problems)
    node = compose(value if value.strip() else "null", origin, problems)
    if node is None:
        problems[before:] = [Problem(where=where, message=item.message, hint=item.hint) for item in problems[before:]]
        return None
    tree: Branch | Leaf = read(node, key, origin, problems, mark=OVERRIDE)
    for name in reversed(path.split(".")):
        tree = Branch(mark=OVERRIDE, children={name: tree})
    return tree if isinstance(tree, Branch) else None


def _merge(below: Branch, above: Branch) -> Branch:
    """Lay one tree over another: sections merge, values and lists replace."""
    merged = dict(below.children)
    for name, node in above.children.items():
        under = merged.get(name)
        merged[name] = _merge(under, node) if isinstance(under, Branch) and isinstance(node, Branch) else node
    return Branch(mark=above.mark, children=merged)


def _label(path: Path) -> str:
    """A path for people: relative to the working directory when inside it."""
    absolute = Path(os.path.normpath(Path.cwd() / path))
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def _in_order(problems: list[Problem]) -> list[Problem]:
    """Sort by file and line, without repeats, so that a reader walks each file once from the top."""

    def place(problem: Problem) -> tuple[str, int]:
        file, _, rest = problem.where.partition(":")
        digits = rest.split(" ")[0].split(":")[0]
        return file, int(digits) if digits.isdigit() else 0

    return sorted(dict.fromkeys(problems), key=place)

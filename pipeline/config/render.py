"""Configs as text: the effective config with provenance, the JSON Schema, and a commented first file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.config.fallback import FIXED, KEY
from pipeline.config.keys import KEYS, children
from pipeline.config.schema import BuildConfig
from pipeline.config.section import Section
from pipeline.config.words import value_hint
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.load import LoadedConfig

COMMENT_COLUMN = 60
_PLAIN = re.compile(r"[A-Za-z_./][\w./@+-]*")
# Words that some YAML version reads as something other than text.
_RESERVED = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null", ".", "..", ".inf", ".nan"))
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})")


def render(loaded: LoadedConfig) -> str:
    """The effective config as YAML, each value with the place it comes from; loads to an equal config."""
    lines = [
        (f"{'  ' * path.count('.')}{path.rpartition('.')[2]}:{text}", loaded.provenance.get(path, ""))
        for path, text in _lines(loaded.config, "")
    ]
    if loaded.fallback:
        lines.append((f"{KEY}:", ""))
    for step in loaded.fallback:
        changes = loaded.changes(step)
        lines.append((f"  - {_flow(changes)}", ", ".join(dict.fromkeys(step.provenance[path] for path in changes))))
    width = min(max(len(text) for text, _ in lines), COMMENT_COLUMN)
    return "".join(f"{text:<{width}}  # {place}\n" if place else f"{text}\n" for text, place in lines)


def _flow(changes: Mapping[str, object]) -> str:
    """Dotted paths and values as one nested mapping in YAML's flow style."""
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        *sections, name = path.split(".")
        reduce(lambda node, part: node.setdefault(part, {}), sections, tree)[name] = value

    def text(node: object) -> str:
        if isinstance(node, dict):
            return "{" + ", ".join(f"{name}: {text(value)}" for name, value in node.items()) + "}"
        return scalar(node)

    return text(tree)


def _lines(section: Section, path: str) -> Iterator[tuple[str, str]]:
    """Yield (key path, text behind the colon) of every key, in schema order."""
    values = dict(section)
    for name, key in children(path).items():
        value = values[name]
        if isinstance(value, Section):
            yield key.path, ""
            yield from _lines(value, key.path)
        else:
            yield key.path, f" {scalar(value)}"


def scalar(value: object) -> str:
    """A value as one line of YAML that every YAML version reads alike.

    Raises:
        TypeError: the value is none that a config holds.
    """
    if value is None:
        return "null"
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, float):
        # YAML 1.1 wants a dot in front of an exponent.
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, Section):
        return f"{{{', '.join(f'{name}: {scalar(item)}' for name, item in value)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(scalar(item) for item in value)}]"
    raise TypeError(f"a config holds no {type(value).__name__}")


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED and text.isascii():
        return text
    return str(yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True)).strip()


def json_schema() -> dict[str, object]:
    """The JSON Schema (draft 2020-12) of a config file, for editors and CI.

    A file that extends another may leave out what the other one brings.
    """
    schema: dict[str, object] = BuildConfig.model_json_schema()
    properties = schema.pop("properties")
    required = schema.pop("required")
    extends = {
        "description": "A file, or a list of files, that this one builds on; paths are relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    properties = properties if isinstance(properties, dict) else {}
    step = {name: part for name, part in properties.items() if name not in FIXED}
    fallback = {
        "description": "Steps to try in order when this config does not pass its gate; each is laid over it.",
        "type": "array",
        "items": {"type": "object", "properties": step, "additionalProperties": False},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "trtpipe build config",
        "properties": {"extends": extends, **properties, KEY: fallback},
        "anyOf": [{"required": required}, {"required": ["extends"]}],
    }


def init_template(name: str, source: str, format: str, target: str) -> str:  # noqa: A002 (the config's own word)
    """A commented first config that loads.

    Args:
        name: name of the build.
        source: a directory, a .gguf file, "owner/name@<commit>" of a hub, or "package:path/inside".
        format: quantization format.
        target: engine target; tensorrt_llm gets an H100 to start from.

    Raises:
        ConfigError: a hub id without its commit, or a format or target that does not exist.
    """
    for path, value in (("quantization.format", format), ("engine.target", target)):
        if value not in KEYS[path].choices:
            why, hint = value_hint(KEYS[path], value)
            message = f"'{value}' is refused: {why}." if why else f"'{value}' is not a {KEYS[path].noun}."
            raise ConfigError(message, hint=hint)
    dtype = "float16" if format == "fp16" else "bfloat16"
    gpu = ["  gpu: H100                   # an engine runs on one GPU model only"] if target != "openvino" else []
    group_size = {"int4_awq": 64, "auto": 64, "w4a8_awq": 128}.get(format, 0)
    group = [f"  group_size: {group_size:<15} # 32, 64 or 128; must divide every layer's input size"]
    lines = [
        f"# trtpipe build {name}.yaml   (every key: trtpipe config schema; effective values: trtpipe config show)",
        f"name: {scalar(name)}",
        "",
        "source:                       # exactly one of path, hub + revision, gguf, package + file",
        *_source_lines(source),
        "",
        "quantization:",
        f"  format: {format:<19} # {', '.join(str(choice) for choice in KEYS['quantization.format'].choices)}",
        *(group if group_size else []),
        *(_auto_lines(target) if format == "auto" else []),
        "  # kv_cache: int8            # half the KV memory; auto keeps 16 bit",
        "  # exclude: [lm_head, '*.mlp.down_proj']   # modules that stay at 16 bit",
        "  # overrides: [{layers: '*.mlp.down_proj', format: int8_wo}]   # layers of another format",
        "",
        "calibration:                  # text the quantizer looks at; the best is text like your traffic",
        "  # dataset: calibration.jsonl   # lines with text, prompt or messages; the default is a shipped sample",
        "  num_samples: 64             # sequences",
        "  max_seq_len: 512            # tokens per sequence",
        "",
        "engine:",
        f"  target: {target:<19} # openvino runs on a CPU, the others on a GPU",
        *gpu,
        f"  dtype: {dtype:<20} # everything that is not quantized",
        "  max_batch_size: 64          # sequences in flight",
        "  max_num_tokens: 2048        # tokens per iteration over all sequences",
        "  # max_seq_len: 4096         # prompt plus output; the default is the model's own",
        "  # kv_cache: {size_gib: 4}   # memory for KV blocks; the default grows as needed",
        "",
        "serving:",
        "  default_max_tokens: 256     # output length when a request names none",
    ]
    return "\n".join(lines) + "\n"


def _auto_lines(target: str) -> list[str]:
    wide = "int8_wo" if target == "openvino" else "fp8"
    return [
        "  auto:",
        "    effective_bits: 6         # bits per weight on average over the layers that are not excluded",
        f"    candidates: [int4_awq, {wide}]   # 16 bit always is one",
    ]


def _source_lines(source: str) -> list[str]:
    hub = _HUB.fullmatch(source)
    if hub is not None:
        return [f"  hub: {hub['id']}", f"  revision: {scalar(hub['revision'])}"]
    package, colon, file = source.partition(":")
    if colon:
        return [f"  package: {scalar(package)}", f"  file: {scalar(file)}"]
    if source.endswith(".gguf"):
        return [f"  gguf: {scalar(source)}"]
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@.*)?", source) and not Path(source).exists():
        hint = f"Write {source.partition('@')[0]}@<40 hex digits>, or ./{source} for a directory."
        raise ConfigError(f"the hub id '{source}' is not pinned to a commit.", hint=hint)
    return [f"  path: {scalar(source)}"]

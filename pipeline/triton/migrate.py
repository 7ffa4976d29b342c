"""From a repository of TensorRT-LLM engines to one of the LLM API, which goes on after TensorRT-LLM 1.2.

Written are a build config that loads, a model repository for upstream's llmapi model with config.pbtxt and model.yaml,
and a report of what went over and what could not. Either all of it is there or nothing. Upstream's code of the llmapi
model is not copied: it comes with the image that serves. The repository that `trtpipe build` makes of the config takes
the requests of the old one; upstream's model has other names, which the report lists.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from pipeline.config.keys import KEYS
from pipeline.config.load import load
from pipeline.config.render import scalar
from pipeline.errors import ConfigError, Problem
from pipeline.host.files import OWNER, OWNERSHIP_FILE, commit_directory, disk_errors
from pipeline.triton.migrate_old import CORE_MODEL, OldRepository, read_repository
from pipeline.triton.migrate_table import table
from pipeline.triton.migrate_translate import Carried, Draft, Lost, TensorChange, translate
from pipeline.triton.model_config import ModelConfig, render

REPOSITORY: Final = "model_repository"
REPORT: Final = "MIGRATION.md"
UPSTREAM_CODE: Final = "/app/all_models/llmapi/tensorrt_llm/1"
_COMMENT_COLUMN: Final = 60


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What was written and what it means.

    Attributes:
        out: the directory that holds everything below.
        config: the build config; `trtpipe build` makes the real repository from it.
        repository: a repository for upstream's llmapi model, complete but for its model.py.
        report: this summary as text.
        carried: settings that went over.
        lost: settings that did not, each with the reason.
        tensors: request inputs and their names in upstream's llmapi model.
        problems: what was odd in the old repository, and what was assumed.
    """

    out: Path
    config: Path
    repository: Path
    report: Path
    carried: tuple[Carried, ...]
    lost: tuple[Lost, ...]
    tensors: tuple[TensorChange, ...]
    problems: tuple[Problem, ...]


def migrate(
    old: Path,
    out: Path,
    *,
    engine_dir: Path | None = None,
    source: Path | None = None,
    gpu: str | None = None,
    name: str | None = None,
) -> Migration:
    """Write what replaces an engine repository.

    Args:
        old: the repository that Triton serves now; it is only read.
        out: directory to write; absent, empty, or written by trtpipe before.
        engine_dir: where the engine lies on this machine, when gpt_model_path names a place in a container.
        source: the Hugging Face checkpoint; None takes what tokenizer_dir says.
        gpu: the GPU that will serve, a word of the config.
        name: name of the new build; None takes the old directory's.

    Raises:
        ConfigError: there is no engine repository, or its values make no valid config.
        HostError: `out` holds somebody else's files.
    """
    repository = read_repository(old, engine_dir)
    name = name or _name(old)
    draft = translate(repository, name=name, source=source, gpu=gpu)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        with disk_errors(out.parent):
            _write(staging, name, repository, draft)
        _check(staging / f"{name}.yaml")
        commit_directory(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Migration(
        out=out,
        config=out / f"{name}.yaml",
        repository=out / REPOSITORY,
        report=out / REPORT,
        carried=tuple(draft.carried),
        lost=tuple(draft.lost),
        tensors=tuple(draft.tensors),
        problems=tuple(draft.problems),
    )


def _name(old: Path) -> str:
    plain = re.sub(r"[^a-z0-9._-]+", "-", old.resolve().name.lower()).lstrip("._-")
    return f"{plain or 'migrated'}-llmapi"


def _check(config: Path) -> None:
    try:
        load(config)
    except ConfigError as error:
        # Without the names of the staging directory, which is gone when somebody reads this.
        problems = [
            Problem(where=problem.where.partition(" ")[2], message=problem.message, hint=problem.hint)
            for problem in error.problems
        ]
        raise ConfigError(
            "the old repository's values make no valid config; nothing was written",
            problems=problems,
            hint="Correct them in the old repository's config.pbtxt, or name another engine directory.",
        ) from error


def _write(staging: Path, name: str, old: OldRepository, draft: Draft) -> None:
    version = staging / REPOSITORY / CORE_MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(render(_model_config(draft)), encoding="utf-8")
    (version / "model.yaml").write_text(_model_yaml(draft), encoding="utf-8")
    (staging / f"{name}.yaml").write_text(_config_yaml(draft), encoding="utf-8")
    (staging / REPORT).write_text("\n".join(_report(name, old, draft)) + "\n", encoding="utf-8")
    ownership = json.dumps({"made_by": OWNER, "migrated_from": old.path.name}, sort_keys=True)
    (staging / OWNERSHIP_FILE).write_text(ownership + "\n", encoding="utf-8")


def _model_config(draft: Draft) -> ModelConfig:
    """The llmapi model's config.pbtxt as a message."""
    from tritonclient.grpc import model_config_pb2

    config = model_config_pb2.ModelConfig(name=CORE_MODEL, backend="python")
    # The launcher switches auto-complete off, and with it what model.yaml says about streaming.
    config.model_transaction_policy.decoupled = draft.decoupled
    config.instance_group.add(count=draft.instances, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    for tensor, (kind, size) in table().input.items():
        config.input.add(
            name=tensor, data_type=model_config_pb2.DataType.Value(kind), dims=[size], optional=tensor != "text_input"
        )
    for tensor, (kind, size) in table().output.items():
        config.output.add(name=tensor, data_type=model_config_pb2.DataType.Value(kind), dims=[size])
    if draft.device_ids:
        config.parameters["gpu_device_ids"].string_value = draft.device_ids
    return config


def _model_yaml(draft: Draft) -> str:
    head = (
        "# Arguments of TensorRT-LLM's LLM(), read by upstream's model.py of the llmapi model.\n"
        f"# model.py and helpers.py: copy them beside this file from {UPSTREAM_CODE} of the serving image.\n"
    )
    return head + str(yaml.safe_dump(draft.yaml, sort_keys=True))


def _config_yaml(draft: Draft) -> str:
    """The build config in the schema's order, each value with where it came from."""
    lines = ["# Migrated from an engine repository; MIGRATION.md lists what could not go over."]
    opened: list[str] = []
    for path in (path for path in KEYS if path in draft.config):
        *sections, name = path.split(".")
        for depth, section in enumerate(sections):
            if opened[: depth + 1] != sections[: depth + 1]:
                opened = sections[: depth + 1]
                lines.append(f"{'  ' * depth}{section}:")
        opened = sections
        text = f"{'  ' * len(sections)}{name}: {scalar(draft.config[path])}"
        origin = draft.origin[path]
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {origin}" if origin else text)
    return "\n".join(lines) + "\n"


def _report(name: str, old: OldRepository, draft: Draft) -> Iterator[str]:
    version = f" of TensorRT-LLM {old.engine.version}" if old.engine is not None and old.engine.version else ""
    yield from (
        f"# Migration of `{old.path.name}` to the LLM API",
        "",
        f"The engine{version} cannot be loaded after TensorRT-LLM 1.2. What replaces it:",
        "",
        f"1. `{name}.yaml`: `trtpipe build {name}.yaml` makes the checkpoint and a repository for the same requests.",
        f"2. Or `{REPOSITORY}/`, the same settings for upstream's llmapi model: copy `model.py` and `helpers.py` from",
        f"   `{UPSTREAM_CODE}` of the serving image into `{REPOSITORY}/{CORE_MODEL}/1/`; they are not part of trtpipe.",
        "   Its clients send the inputs of the last table.",
        "",
        "Compare the answers of both servers before you switch.",
        "",
    )
    yield from _section(
        f"Look at these first ({len(draft.problems)})",
        ("where", "what", "do"),
        ((problem.where, problem.message, problem.hint) for problem in draft.problems),
    )
    yield from _section(
        f"Cannot go over ({len(draft.lost)})",
        ("setting", "was", "why", "instead"),
        ((each.where, each.old, each.reason, each.instead) for each in draft.lost),
    )
    yield from _section(
        f"Went over ({len(draft.carried)})",
        ("setting", "was", "config key", "model.yaml", "is"),
        ((each.where, each.old, each.config, each.yaml, _text(each.value)) for each in draft.carried),
    )
    yield from _section(
        "Request inputs of upstream's llmapi model",
        ("old", "new", "note"),
        ((each.old, each.new, each.reason) for each in draft.tensors),
    )


def _section(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') or '-' for cell in row)} |" for row in rows]
    yield f"## {title}"
    yield ""
    yield from (f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines) if lines else ("Nothing.",)
    yield ""


def _text(value: Any) -> str:  # noqa: ANN401 - whatever a parameter holds
    return json.dumps(value) if not isinstance(value, str) else value

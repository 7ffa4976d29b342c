"""Reads an existing repository of TensorRT-LLM engines, whoever wrote it, as far as it can be read.

A template's placeholder that nobody filled does not stop the reading: in a string it counts as "not set", in a place
where the grammar wants a number or a word its line is left out; each is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pipeline.errors import ConfigError, Problem
from pipeline.triton.model_config import ModelConfig, parse

CORE_MODEL: Final = "tensorrt_llm"
_PLACEHOLDER = re.compile(r"\$\{(\w*)\}?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"#.*")


@dataclass(frozen=True, kw_only=True)
class OldModel:
    """One model of the repository.

    Attributes:
        name: its directory.
        config: the message, without the lines that could not be read.
        parameters: parameter -> text, without those that are empty or an unfilled placeholder.
    """

    name: str
    config: ModelConfig
    parameters: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class OldEngine:
    """config.json of a built engine.

    Attributes:
        path: the directory.
        version: TensorRT-LLM that built it, "" when the file does not say.
        pretrained: pretrained_config.
        build: build_config.
        gpu: the GPU that engine.json beside it names; None when it is not there.
    """

    path: Path
    version: str
    pretrained: Mapping[str, Any]
    build: Mapping[str, Any]
    gpu: str | None

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization section; empty for 16 bit."""
        return _section(self.pretrained, "quantization")

    @property
    def mapping(self) -> Mapping[str, Any]:
        """The parallel mapping."""
        return _section(self.pretrained, "mapping")

    @property
    def plugins(self) -> Mapping[str, Any]:
        """plugin_config of the build."""
        return _section(self.build, "plugin_config")


@dataclass(frozen=True, kw_only=True)
class OldRepository:
    """What was found.

    Attributes:
        path: the repository.
        models: directory name -> model.
        core: the model with the engine.
        engine: its engine; None when it is not here.
        problems: everything that was odd on the way.
    """

    path: Path
    models: Mapping[str, OldModel]
    core: OldModel
    engine: OldEngine | None
    problems: tuple[Problem, ...] = field(default=())


def read_repository(path: Path, engine_dir: Path | None = None) -> OldRepository:
    """Read a repository.

    Args:
        path: the directory that Triton is given as --model-repository.
        engine_dir: where the engine lies here; None looks at gpt_model_path, and beside the repository.

    Raises:
        ConfigError: no model with an engine, one of the LLM API already, or a core model that cannot be parsed.
    """
    problems: list[Problem] = []
    models = {file.parent.name: file for file in sorted(path.glob("*/config.pbtxt"))}
    if not models:
        raise ConfigError(f"{path} holds no model (no */config.pbtxt)", hint="Name Triton's --model-repository.")
    read = {name: _read_model(name, file, problems) for name, file in models.items()}
    known = {name: model for name, model in read.items() if model is not None}
    core = _core(path, known, problems)
    engine = _engine(path, core, engine_dir, problems)
    return OldRepository(path=path, models=known, core=core, engine=engine, problems=tuple(problems))


def _read_model(name: str, file: Path, problems: list[Problem]) -> OldModel | None:
    where = f"{name}/config.pbtxt"
    lines = []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(
            Problem(where=where, message=f"cannot be read: {error}", hint="Migrate without it, or mend it.")
        )
        return None
    for number, line in enumerate(text.splitlines(), start=1):
        bare = _COMMENT.sub("", _STRING.sub('""', line))
        for placeholder in _PLACEHOLDER.finditer(_uncommented(line)):
            kind = "left out" if "${" in bare else "taken as not set"
            message = f"the placeholder {placeholder[0]} was never filled; {kind}"
            problems.append(Problem(where=f"{where}:{number}", message=message, severity="warning"))
        lines.append("" if "${" in bare else line)
    try:
        config = parse("\n".join(lines) + "\n", where)
    except ConfigError as error:
        problems.append(Problem(where=where, message=f"cannot be parsed: {error.message}", hint=error.hint))
        return None
    texts = {key: str(value.string_value).strip() for key, value in config.parameters.items()}
    return OldModel(
        name=name,
        config=config,
        parameters={key: text for key, text in texts.items() if text and not _PLACEHOLDER.search(text)},
    )


def _uncommented(line: str) -> str:
    """The line without a comment; a '#' inside a string is none."""
    masked = _STRING.sub(lambda match: "x" * len(match[0]), line)
    return line[: masked.index("#")] if "#" in masked else line


def _core(path: Path, models: Mapping[str, OldModel], problems: list[Problem]) -> OldModel:
    engines = [model for model in models.values() if _has_engine(model)]
    if not engines:
        if (path / CORE_MODEL / "1" / "model.yaml").is_file():
            hint = "Nothing is to be migrated; trtpipe check judges it."
            raise ConfigError(f"{path} is a repository of the LLM API already", hint=hint)
        reasons = [problem for problem in problems if problem.severity == "error"]
        raise ConfigError(
            f"{path} has no model with a TensorRT-LLM engine (backend tensorrtllm, or a parameter gpt_model_path)",
            problems=reasons,
            hint="Name the repository that the engine is served from.",
        )
    chosen = next((model for model in engines if model.name == CORE_MODEL), engines[0])
    if chosen.config.backend == "python" and (path / chosen.name / "1" / "engine" / "openvino_model.xml").is_file():
        hint = "Set engine.target: tensorrt_llm_llmapi in its build config and build again."
        raise ConfigError(f"{path} serves an OpenVINO model, not a TensorRT-LLM engine", hint=hint)
    for other in engines:
        if other is not chosen:
            message = f"a second engine; only '{chosen.name}' is migrated, one server holds one model of the LLM API"
            problems.append(Problem(where=other.name, message=message, hint="Migrate it from a repository of its own."))
    return chosen


def _has_engine(model: OldModel) -> bool:
    named = "gpt_model_path" in model.config.parameters and "gpt_model_type" in model.config.parameters
    return model.config.backend == "tensorrtllm" or named


def _engine(path: Path, core: OldModel, engine_dir: Path | None, problems: list[Problem]) -> OldEngine | None:
    where = f"{core.name} gpt_model_path"
    named = core.parameters.get("gpt_model_path", "")
    tried = [engine_dir] if engine_dir is not None else _places(path, core.name, named)
    found = next((place for place in tried if (place / "config.json").is_file()), None)
    if found is None:
        if engine_dir is not None:
            raise ConfigError(f"{engine_dir} has no config.json, so it is no engine", hint="Name the engine directory.")
        message = f"'{named}' is not here, so format, limits and parallel sizes of the engine are not known"
        problems.append(Problem(where=where, message=message, hint="Name the engine directory with --engine-dir."))
        return None
    try:
        document = json.loads((found / "config.json").read_text(encoding="utf-8"))
        pretrained, build = document["pretrained_config"], document["build_config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(
            Problem(
                where=str(found / "config.json"),
                message=f"is no config.json of trtllm-build ({type(error).__name__}: {error}); its facts are not used",
                hint="Compare with 'pretrained_config' and 'build_config' of a built engine.",
            )
        )
        return None
    return OldEngine(
        path=found, version=str(document.get("version", "")), pretrained=pretrained, build=build, gpu=_gpu(found)
    )


def _places(repository: Path, core: str, named: str) -> list[Path]:
    """Where an engine path of the container may lie here: as it is, in the model, or beside the repository."""
    version = repository / core / "1"
    parts = [part for part in PurePosixPath(named).parts if part != "/"]
    tails = [Path(*parts[n:]) for n in range(len(parts))]
    places = [Path(named), version / named] if named else []
    places += [root / tail for tail in tails for root in (version, repository, repository.parent)]
    return [*places, version, version / "engine"]


def _gpu(engine: Path) -> str | None:
    for place in (engine / "engine.json", engine.parent / "engine.json"):
        try:
            name = json.loads(place.read_text(encoding="utf-8"))["gpu"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return str(name) if name else None
    return None


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, dict) else {}

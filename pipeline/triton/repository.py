"""Emits the Triton model repository: templates of triton_repo/ merged with the engine's limits and the serving config.

The models that handle text are the same files for every target; what differs is the core model (`_CORES`). The result
is self-contained: engine and tokenizer files lie inside the models that read them. Paths in config.pbtxt are relative
to a model's version directory, but for TensorRT-LLM's own backend, which wants them absolute: they begin at the mount.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.deployment import ServingConfig
from pipeline.errors import ConfigError, IntegrityError
from pipeline.host.files import link_or_copy
from pipeline.triton import vllm_repository
from pipeline.triton.backend_parameters import CORE_MODEL, Decision
from pipeline.triton.core_model import CoreModel, Emission
from pipeline.triton.engine_core import EngineCore
from pipeline.triton.launch import MOUNT
from pipeline.triton.llmapi_core import LlmapiCore
from pipeline.triton.model_config import ModelConfig, find_problems, parse, render, set_parameter
from pipeline.triton.openvino_core import OpenvinoCore, copy_code
from pipeline.triton.queue_policy import set_queue_policy

ENTRY_MODEL = "tensorrt_llm_bls"
MODELS = ("preprocessing", CORE_MODEL, "postprocessing", "ensemble", ENTRY_MODEL)
_CORES: Mapping[str, CoreModel] = {
    "openvino": OpenvinoCore(),
    "tensorrt_llm": EngineCore(),
    "tensorrt_llm_llmapi": LlmapiCore(),
}
_SHARED = "_shared"
_TOKENIZER_DIR = "tokenizer"


def templates() -> Path:
    """The directory of the template models: beside the package in a checkout, inside it in an installed wheel.

    Raises:
        IntegrityError: neither exists; the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package.parent / "triton_repo", package / "triton_repo")
    for place in places:
        if (place / ENTRY_MODEL / "config.pbtxt").is_file():
            return place
    raise IntegrityError(
        f"the templates of the model repository are missing (looked in {places[0]} and {places[1]})",
        hint="Install trtpipe again.",
    )


def emit(engine_dir: Path, serving: ServingConfig, *, name: str, out: Path, mount: str = MOUNT) -> None:
    """Write a model repository.

    Args:
        engine_dir: an Engine artifact's directory; limits and end-of-sequence ids are read from its engine.json.
        serving: how Triton serves it.
        name: name of the build, for the README.
        out: an empty or absent directory.
        mount: the repository as the server will see it; only the GPU targets need to know.

    Raises:
        ConfigError: a serving value cannot be honoured, or the merged models do not fit together.
        IntegrityError: the engine directory is incomplete.
    """
    engine = _read_engine(engine_dir)
    source = templates()
    emission = Emission(engine_dir=engine_dir, engine=engine, serving=serving, name=name, mount=mount, templates=source)
    if engine["target"] == vllm_repository.TARGET:
        vllm_repository.emit_vllm(emission, out)
        return
    core = _CORES[engine["target"]]
    configs = {model: _template(source, model) for model in MODELS}
    _merge(configs, engine, serving)
    set_parameter(configs["postprocessing"], "whole_responses", str(core.whole_responses).lower())
    set_queue_policy(configs[CORE_MODEL], serving)
    decisions = core.configure(configs, emission)
    problems = find_problems(configs)
    if problems:
        raise ConfigError("the model repository does not fit together", problems=problems)
    for model, config in configs.items():
        version = out / model / "1"
        version.mkdir(parents=True)
        (out / model / "config.pbtxt").write_text(render(config), encoding="utf-8")
        if config.platform == "ensemble":
            # Triton wants a version directory; git and archives drop empty ones.
            (version / ".keep").touch()
        elif model != CORE_MODEL:
            copy_code(source / model / "1", version)
            copy_code(source / _SHARED, version / _SHARED)
            link_or_copy(engine_dir / "tokenizer", version / _TOKENIZER_DIR)
    core.write(emission, out)
    if core.packages:
        (out / "requirements.txt").write_text(_requirements(core, engine), encoding="utf-8")
    (out / "README.md").write_text(_readme(core.readme(emission), emission, decisions), encoding="utf-8")


def _read_engine(engine_dir: Path) -> dict[str, Any]:
    try:
        engine: dict[str, Any] = json.loads((engine_dir / "engine.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{engine_dir / 'engine.json'} cannot be read: {error}", hint="Compile again.") from error
    targets = (*_CORES, vllm_repository.TARGET)
    if engine["target"] not in targets:
        raise ConfigError(
            f"engine.target '{engine['target']}' has no model repository", hint=f"Use one of {', '.join(targets)}."
        )
    if not (engine_dir / "tokenizer" / "tokenizer.json").is_file():
        raise IntegrityError(f"{engine_dir} has no tokenizer/tokenizer.json", hint="Compile again.")
    return engine


def _template(source: Path, model: str) -> ModelConfig:
    path = source / model / "config.pbtxt"
    return parse(path.read_text(encoding="utf-8"), str(path))


def _merge(configs: Mapping[str, ModelConfig], engine: Mapping[str, Any], serving: ServingConfig) -> None:
    """Write limits and serving values into the models around the core; each template's head lists its own."""
    if serving.postprocessing_instance_count > 1:
        raise ConfigError(
            f"serving.postprocessing_instance_count {serving.postprocessing_instance_count}: several instances of "
            "postprocessing can overtake each other, so chunks of one stream would arrive in another order",
            hint="Leave it at 1; tensorrt_llm_bls scales by bls_instance_count.",
        )
    for config in configs.values():
        config.max_batch_size = engine["limits"]["max_batch_size"]
    counts = {
        "preprocessing": serving.preprocessing_instance_count,
        "postprocessing": serving.postprocessing_instance_count,
        ENTRY_MODEL: serving.bls_instance_count,
    }
    for model, count in counts.items():
        configs[model].instance_group[0].count = count
    set_parameter(configs[ENTRY_MODEL], "exclude_input_in_output", str(serving.exclude_input_in_output).lower())
    set_parameter(configs["preprocessing"], "default_max_tokens", str(serving.default_max_tokens))
    set_parameter(configs["preprocessing"], "add_special_tokens", str(serving.add_special_tokens).lower())
    for model in ("postprocessing", ENTRY_MODEL):
        set_parameter(configs[model], "skip_special_tokens", str(serving.skip_special_tokens).lower())
    for model in ("preprocessing", ENTRY_MODEL):
        set_parameter(configs[model], "eos_token_ids", ",".join(str(token) for token in engine["eos_token_ids"]))


def _requirements(core: CoreModel, engine: Mapping[str, Any]) -> str:
    """Pin what the models import, in the version that the engine was compiled with where it says so."""
    stated = engine.get("versions", {})
    pins = (f"{package}=={stated.get(package) or importlib.metadata.version(package)}" for package in core.packages)
    return "".join(f"{pin}\n" for pin in pins)


def _readme(start: str, emission: Emission, decisions: tuple[Decision, ...]) -> str:
    limits = emission.engine["limits"]
    text = f"""# Triton model repository `{emission.name}`

{start}
Ask `{ENTRY_MODEL}` over a gRPC stream, or `POST /v2/models/{ENTRY_MODEL}/generate_stream`:

    {{"text_input": "The capital of France is", "max_tokens": 16, "stream": true}}

`ensemble` answers the same requests as a static graph. Prefer `{ENTRY_MODEL}`: it stops when the client goes away,
tells `finish_reason`, and sees a stream as a whole.

| limit | value |
|---|---|
| sequences in flight (max_batch_size) | {limits["max_batch_size"]} |
| prompt + output tokens (max_seq_len) | {limits["max_seq_len"]} |
| tokens per iteration (max_num_tokens) | {limits["max_num_tokens"]} |
"""
    if decisions:
        rows = "".join(f"| `{each.key}` | `{each.text}` | {each.why} |\n" for each in decisions)
        text += (
            f"\nDecided here, because the config left it empty:\n\n| parameter | value | why |\n|---|---|---|\n{rows}"
        )
    return text

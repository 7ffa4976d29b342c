"""The models of a repository together: batch sizes, streaming, tensors, tokenizers, several engines."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from pipeline.triton.backend_parameters import CORE_MODEL
from pipeline.triton.check_load import Finding, Model, Repository, error, warning
from pipeline.triton.engine_directory import read_mapping, world_size
from pipeline.triton.launch import ENGINE_BACKEND
from pipeline.triton.model_config import find_wiring_problems, parse
from pipeline.triton.repository import templates

# Tensors of generation 0.19 -> their names from 1.0 on.
_RENAMED: Final = {"min_length": "min_tokens", "random_seed": "seed"}
_CHAIN: Final = ("preprocessing", CORE_MODEL, "postprocessing", "ensemble", "tensorrt_llm_bls")
_STREAMING: Final = (CORE_MODEL, "tensorrt_llm_bls")
_LOGITS: Final = ("context_logits", "generation_logits")


def check(repository: Repository, deployment: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what does not agree between models."""
    models = repository.models
    for model in models.values():
        if model.config.name and model.config.name != model.name:
            message = f"is named '{model.config.name}', and its directory is '{model.name}'."
            yield error("layout", model.place("name"), message, f'Write name: "{model.name}".')
    chain = [models[name] for name in _CHAIN if name in models]
    yield from _batch_sizes(chain)
    yield from _streaming(models)
    yield from _generation(models)
    yield from _logits(models)
    for problem in find_wiring_problems({name: model.config for name, model in models.items()}):
        yield error("TL63", f"{problem.where}/config.pbtxt", f"{problem.message}.", "Take all models from one source.")
    yield from _tokenizers(repository)
    yield from _engines(repository, deployment)
    yield from _llmapi(models)


def _batch_sizes(chain: list[Model]) -> Iterator[Finding]:
    """An ensemble hands its batch on (tensorrtllm_backend#228, #130)."""
    filled = [model for model in chain if "triton_max_batch_size" not in model.unfilled]
    sizes = {model.name: model.config.max_batch_size for model in filled}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        hint = f"Write {min(size for size in sizes.values() if size) if any(sizes.values()) else 1} in every model."
        yield error("TL63", "max_batch_size", f"differs: {shown}.", hint)
    for model in filled:
        if not model.config.max_batch_size and model.config.backend in (ENGINE_BACKEND, ""):
            yield error("TL63", model.place(), "max_batch_size is 0.", "Write the engine's max_batch_size.")


def _streaming(models: Mapping[str, Model]) -> Iterator[Finding]:
    flags = {
        name: models[name].config.model_transaction_policy.decoupled
        for name in _STREAMING
        if name in models and "decoupled_mode" not in models[name].unfilled
    }
    if len(set(flags.values())) > 1:
        shown = ", ".join(f"{name} {str(flag).lower()}" for name, flag in flags.items())
        yield error("TL59", "decoupled", f"differs: {shown}.", "Write decoupled: true in both.")
    elif flags and not any(flags.values()):
        message = "is false: streams and batches of more than one request are refused."
        yield warning("TL59", "decoupled", message, "Write decoupled: true in the core model and in BLS.")


@cache
def _contract() -> Mapping[str, frozenset[str]]:
    """Input names of every model of the contract (generation 1.0-1.2), from the templates."""
    return {
        path.parent.name: frozenset(tensor.name for tensor in parse(path.read_text("utf-8"), str(path)).input)
        for path in sorted(templates().glob("*/config.pbtxt"))
    }


def _generation(models: Mapping[str, Model]) -> Iterator[Finding]:
    """Tensor names changed with 1.0, and templates of two generations do not work together."""
    for name in (CORE_MODEL, "ensemble", "tensorrt_llm_bls"):
        if name not in models or (name == CORE_MODEL and models[name].config.backend != ENGINE_BACKEND):
            continue
        known = _contract()[name]
        for tensor in models[name].config.input:
            if tensor.name in known:
                continue
            place = models[name].place(tensor.name)
            if tensor.name in _RENAMED:
                message = f"input '{tensor.name}' is of generation 0.19."
                yield error(
                    "TL7", place, message, f"Since 1.0 it is {_RENAMED[tensor.name]}: take this image's templates."
                )
                continue
            nearest = difflib.get_close_matches(tensor.name, known, n=1)
            hint = f"Is it {nearest[0]}?" if nearest else "Take the templates of the serving image."
            yield warning("TL7", place, f"input '{tensor.name}' is none of the backend's.", hint)


def _logits(models: Mapping[str, Model]) -> Iterator[Finding]:
    """The text models pass the core's logits on, so the types are equal."""
    core = models.get(CORE_MODEL)
    if core is None or "logits_datatype" in core.unfilled:
        return
    types = {tensor.name: tensor.data_type for tensor in core.config.output}
    for name in ("ensemble", "tensorrt_llm_bls"):
        model = models.get(name)
        if model is None or "logits_datatype" in model.unfilled:
            continue
        for tensor in model.config.output:
            if tensor.name in _LOGITS and tensor.name in types and tensor.data_type != types[tensor.name]:
                message = f"'{tensor.name}' has another type than in {CORE_MODEL}."
                yield error("TL68", model.place(tensor.name), message, f"Write the type of {CORE_MODEL}.")


def _tokenizers(repository: Repository) -> Iterator[Finding]:
    for name in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        model = repository.models.get(name)
        path = model.parameter("tokenizer_dir") if model is not None else ""
        if model is None or not path:
            continue
        directory = repository.locate(model, path)
        if not directory.is_dir():
            message = f"tokenizer_dir '{path}' does not exist."
            yield error("TL41", model.place("tokenizer_dir"), message, "Mount it, or correct the path.")
            continue
        yield from _tokenizer(directory, model, _vocab_size(repository))


def _vocab_size(repository: Repository) -> int | None:
    core = repository.models.get(CORE_MODEL)
    if core is None:
        return None
    path = core.parameter("gpt_model_path")
    places = [core.version_directory / "engine.json"]
    if path:
        engine = repository.locate(core, path)
        places += [engine / "config.json", engine.parent / "checkpoint" / "config.json"]
    for place in places:
        try:
            document = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        size = document.get("limits", document.get("pretrained_config", document)).get("vocab_size")
        if size is not None:
            return int(size)
    return None


def _tokenizer(directory: Path, model: Model, vocab_size: int | None) -> Iterator[Finding]:
    """It loads, and no id of it is beyond the embedding (tensorrtllm_backend#62, #197)."""
    from tokenizers import Tokenizer

    place = model.place("tokenizer_dir")
    config = directory / "tokenizer_config.json"
    if config.is_file() and "auto_map" in config.read_text(encoding="utf-8", errors="replace"):
        message = "the tokenizer needs Python code of its checkpoint (auto_map)."
        yield warning("TL51", place, message, "Try it with the transformers of the serving image.")
    file = directory / "tokenizer.json"
    if not file.is_file():
        message = f"{directory} has no tokenizer.json, so nothing could be tried here."
        yield warning("TL51", place, message, "Try it with the transformers of the serving image.")
        return
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as problem:  # noqa: BLE001 - the library raises bare Exception for every cause
        yield error("TL51", str(file), f"does not load: {problem}", "Copy the tokenizer again.")
        return
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if vocab_size is not None and highest >= vocab_size:
        message = f"the tokenizer has id {highest}, and the engine's vocabulary is {vocab_size}."
        yield error("TL51", place, message, "Take the tokenizer of this engine's checkpoint.")


def _engines(repository: Repository, deployment: Mapping[str, Any]) -> Iterator[Finding]:
    """Several engines in one server, and the ranks they share (NVIDIA/TensorRT-LLM#423, #1608)."""
    engines = [model for model in repository.models.values() if model.config.backend == ENGINE_BACKEND]
    mode = deployment.get("launch_mode")
    if len(engines) > 1 and mode in (None, "leader"):
        names = ", ".join(model.name for model in engines)
        message = f"{names}: several engines do not fit into one server in leader mode."
        hint = "Start it in orchestrator mode (launch_triton_server.py --multi-model), or use a server for each."
        yield (error if mode else warning)("TL48", "repository", message, hint)
    taken: dict[int, str] = {}
    for model in engines:
        text = model.parameter("participant_ids")
        if not text:
            if mode == "orchestrator_no_spawn":
                message = "participant_ids is mandatory without spawning."
                yield error("TL50", model.place(), message, "Write the engine's MPI ranks, such as '1,2'.")
            continue
        yield from _participants(model, text, repository, taken)


def _participants(model: Model, text: str, repository: Repository, taken: dict[int, str]) -> Iterator[Finding]:
    place = model.place("participant_ids")
    groups = [[number.strip() for number in group.split(",")] for group in text.split(";")]
    if not all(number.isdigit() for group in groups for number in group):
        yield error("TL50", place, f"'{text}' is not a list of MPI ranks.", "Write '1,2', and ';' between instances.")
        return
    path = repository.locate(model, model.parameter("gpt_model_path"))
    ranks = world_size(read_mapping(path)) if (path / "config.json").is_file() else len(groups[0])
    for group in groups:
        ids = [int(number) for number in group]
        if 0 in ids:
            yield error("TL50", place, "rank 0 is the orchestrator and cannot take part.", "Count from 1.")
        if len(set(ids)) != ranks or len(ids) != ranks:
            message = f"'{','.join(group)}' is not {ranks} ranks, as many as the engine has."
            yield error("TL50", place, message, f"Write {','.join(str(n + 1) for n in range(ranks))}.")
        for number in set(ids) & taken.keys():
            message = f"rank {number} belongs to {taken[number]} already."
            yield error("TL50", place, message, "Give every engine instance ranks of its own.")
        taken |= dict.fromkeys(ids, model.name)


def _llmapi(models: Mapping[str, Model]) -> Iterator[Finding]:
    """`decoupled` in model.yaml alone is ignored where auto-complete is off."""
    for model in models.values():
        path = model.version_directory / "model.yaml"
        if model.config.backend != "python" or not path.is_file():
            continue
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as problem:
            yield error("TL55", str(path), f"is not YAML: {problem}", "Correct it.")
            continue
        triton = settings.get("triton_config", {}) if isinstance(settings, dict) else {}
        written = model.config.model_transaction_policy.decoupled
        if "decoupled" in triton and bool(triton["decoupled"]) != written:
            message = (
                f"decoupled is {str(written).lower()} here and {triton['decoupled']} in model.yaml, which is ignored"
            )
            hint = "Write the same in both: model_transaction_policy { decoupled: true }."
            yield error("TL55", model.place(), f"{message} with --disable-auto-complete-config.", hint)

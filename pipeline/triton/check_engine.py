"""Paths of a model and the engine behind them, against what the configuration claims.

Keys that the C++ runtime needs: NVIDIA/TensorRT-LLM cpp/tensorrt_llm/runtime/gptJsonConfig.cpp (0.16.0.dev).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.triton.backend_parameters import LOGITS_TYPES
from pipeline.triton.check_load import Finding, Model, Repository, error, warning
from pipeline.triton.engine_directory import world_size
from pipeline.triton.launch import ENGINE_BACKEND

_ENGINE_PATHS: Final = ("gpt_model_path", "encoder_model_path")
_PATHS: Final = ("lora_prefetch_dir", "xgrammar_tokenizer_info_path")
_LFS: Final = b"version https://git-lfs"
_REQUIRED: Final = {
    "pretrained_config": ("architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers", "mapping"),
    "build_config": ("max_batch_size", "max_beam_width", "max_input_len", "max_seq_len", "plugin_config"),
    "plugin_config": (
        "gpt_attention_plugin",
        "remove_input_padding",
        "paged_kv_cache",
        "tokens_per_block",
        "context_fmha",
        "use_paged_context_fmha",
        "lora_plugin",
    ),
}
_TRUE: Final = ("true", "True", "TRUE", "1")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine directory whose config.json could be read."""

    directory: Path
    pretrained: Mapping[str, Any]
    build: Mapping[str, Any]

    @property
    def plugins(self) -> Mapping[str, Any]:
        """plugin_config."""
        plugins: Mapping[str, Any] = self.build.get("plugin_config", {})
        return plugins


def check(model: Model, repository: Repository) -> Iterator[Finding]:
    """Yield what is wrong with the files of a model, and where configuration and engine disagree."""
    if model.config.backend != ENGINE_BACKEND:
        return
    for key in _PATHS:
        path = model.parameter(key)
        if path and not repository.locate(model, path).exists():
            yield error("TL41", model.place(key), _absent(path, repository), "Mount it, or correct the path.")
    for key in _ENGINE_PATHS:
        path = model.parameter(key)
        if path:
            yield from _check_path(model, repository, key, path)
    if not any(model.parameter(key) for key in _ENGINE_PATHS):
        message = "names no engine: gpt_model_path is empty."
        yield error("TL41", model.place(), message, "Write the engine's directory inside the container.")


def _absent(path: str, repository: Repository) -> str:
    inside = path.startswith(f"{repository.mount}/")
    return f"'{path}' does not exist" + (f" (looked in {repository.directory})." if inside else ".")


def _check_path(model: Model, repository: Repository, key: str, path: str) -> Iterator[Finding]:
    if not path.startswith("/"):
        message = f"'{path}' is relative, and the backend takes it from where the server was started."
        yield error("TL41", model.place(key), message, f"Write {repository.mount}/{model.name}/1/{path}.")
    directory = repository.locate(model, path)
    if (directory / "config.json").is_file():
        engine, findings = _read(directory)
        yield from findings
        if engine is not None:
            yield from _check_files(model, engine)
            yield from _check_kind(engine)
            yield from _check_claims(model, engine)
        return
    build = directory.parent / "build" / "build.sh"
    if not directory.exists() and build.is_file():
        message = f"the engine '{path}' is not built yet."
        yield warning("TL41", model.place(key), message, f"Run {build} on the GPU node before the server starts.")
    else:
        hint = "Correct the path, or mount the engine there on every node."
        yield error(
            "TL41", model.place(key), f"{_absent(path, repository)} No engine with a config.json is there.", hint
        )


def _read(directory: Path) -> tuple[Engine | None, list[Finding]]:
    file = directory / "config.json"
    content = file.read_bytes()
    if content.startswith(_LFS) or not content.strip():
        what = "a Git LFS pointer" if content else "empty"
        return None, [error("TL42", str(file), f"is {what}, not JSON.", "Copy the engine again, with its content.")]
    try:
        document = json.loads(content)
    except ValueError as problem:
        return None, [error("TL42", str(file), f"is not JSON: {problem}", "Copy the engine again.")]
    if not isinstance(document, dict):
        return None, [error("TL42", str(file), "holds no JSON object.", "Copy the engine again.")]
    if "version" not in document or "builder_config" in document:
        message = "has the layout of an ancient engine ('builder_config', no 'version')."
        return None, [error("TL4", str(file), message, "Build it again with the TensorRT-LLM of the serving image.")]
    parts = {name: document.get(name) or {} for name in ("pretrained_config", "build_config")}
    parts["plugin_config"] = parts["build_config"].get("plugin_config") or {}
    absent = [f"{part}.{key}" for part, keys in _REQUIRED.items() for key in keys if key not in parts[part]]
    found = []
    if absent:
        hint = "Build it again with the TensorRT-LLM of the serving image."
        found.append(error("TL4", str(file), f"lacks {', '.join(absent)}.", hint))
    found += _check_version(directory, str(document["version"]))
    engine = Engine(directory=directory, pretrained=parts["pretrained_config"], build=parts["build_config"])
    return engine, found


def _check_version(directory: Path, version: str) -> Iterator[Finding]:
    """Compare with what this repository was written for (engine.json beside the engine) and with its compile step."""
    facts = _json(directory.parent / "engine.json")
    pinned = facts.get("toolchain", {}).get("tensorrt_llm")
    if pinned is not None and pinned != version:
        message = f"TensorRT-LLM {version} built this, and the repository is for {pinned}."
        yield error("TL3", str(directory / "config.json"), message, "Build and serve with the same image.")
    manifest = _json(directory / "manifest.json")
    if "key" in facts and "key" in manifest and facts["key"] != manifest["key"]:
        message = "was built for another checkpoint or other options than this repository."
        yield error("TL3", str(directory / "manifest.json"), message, "Run build/build.sh again.")
    built, wanted = manifest.get("compute_capability"), facts.get("gpu", {}).get("sm")
    if built and wanted and built.replace(".", "").isdigit() and int(built.replace(".", "")) != wanted:
        message = f"was built on compute capability {built}, and the repository is for SM {wanted}."
        yield error("TL2", str(directory / "manifest.json"), message, "Build on the GPU that serves.")


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when it is not there or none."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _check_files(model: Model, engine: Engine) -> Iterator[Finding]:
    mapping = engine.pretrained.get("mapping", {})
    where = str(engine.directory / "config.json")
    sizes = [int(mapping.get(name) or 1) for name in ("tp_size", "pp_size", "cp_size")]
    ranks = world_size(mapping)
    if ranks != sizes[0] * sizes[1] * sizes[2]:
        message = f"world_size {ranks} is not tp {sizes[0]} x pp {sizes[1]} x cp {sizes[2]}."
        yield error("TL47", where, message, "Build the engine again.")
    files = {path.name: path for path in engine.directory.glob("rank*.engine")}
    wanted = {f"rank{rank}.engine" for rank in range(ranks)}
    if set(files) != wanted:
        message = (
            f"has {len(files)} rank files, and {ranks} ranks need {', '.join(sorted(wanted - set(files))) or 'less'}."
        )
        yield error("TL47", str(engine.directory), message, "Copy the whole engine directory.")
    for name in sorted(wanted & set(files)):
        with files[name].open("rb") as stream:
            head = stream.read(len(_LFS))
        if not head or head == _LFS:
            what = "a Git LFS pointer" if head else "empty"
            yield error("TL42", str(files[name]), f"is {what}.", "Copy the engine again, with its content.")
    groups = [group for group in model.parameter("gpu_device_ids").split(";") if group.strip()]
    for group in groups:
        gpus = [number.strip() for number in group.split(",")]
        if len(gpus) != ranks or len(set(gpus)) != len(gpus):
            message = f"'{group}' is not {ranks} different GPUs, one for each rank."
            hint = f"Write {','.join(str(number) for number in range(ranks))}, or remove it."
            yield error("TL47", model.place("gpu_device_ids"), message, hint)


def _check_kind(engine: Engine) -> Iterator[Finding]:
    """In-flight batching needs the attention plugin, packed input and a paged cache (NVIDIA/TensorRT-LLM#89)."""
    plugins, where = engine.plugins, str(engine.directory / "config.json")
    paged = plugins.get("paged_kv_cache", True) is not False
    kind = str(engine.build.get("kv_cache_type") or "PAGED").upper()
    wrong = {
        "gpt_attention_plugin": not plugins.get("gpt_attention_plugin", True),
        "remove_input_padding": plugins.get("remove_input_padding", True) is not True,
        f"kv_cache_type ({kind})": kind != "PAGED" or not paged,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            message = f"{name} is not what in-flight batching needs."
            yield error("TL56", where, message, "Build with gpt_attention_plugin, packed input and a paged KV cache.")
    if plugins.get("lora_plugin") and kind == "DISABLED":
        message = "has LoRA and no KV cache, which ends in a segmentation fault."
        yield error("TL66", where, message, "Build with a paged KV cache.")


def _check_claims(model: Model, engine: Engine) -> Iterator[Finding]:
    """What the configuration says against what the engine is."""
    limits = engine.build
    batch = limits.get("max_batch_size")
    if batch is not None and model.config.max_batch_size > batch and "triton_max_batch_size" not in model.unfilled:
        message = f"max_batch_size {model.config.max_batch_size} is more than the engine's {batch}."
        yield error("TL62", model.place(), message, f"Write {batch} in every model.")
    beams = limits.get("max_beam_width")
    asked = model.parameter("max_beam_width")
    if beams is not None and asked.isdigit() and int(asked) > beams:
        message = f"max_beam_width {asked} is more than the engine's {beams}."
        yield error("TL30", model.place("max_beam_width"), message, f"Write {beams}.")
    tokens, longest = model.parameter("max_tokens_in_paged_kv_cache"), limits.get("max_seq_len")
    if longest and tokens.isdigit() and int(tokens) < longest:
        message = f"{tokens} tokens of KV cache do not hold one sequence of max_seq_len {longest}."
        yield error("TL45", model.place("max_tokens_in_paged_kv_cache"), message, f"Write {longest} or more.")
    if not engine.plugins.get("use_paged_context_fmha", True):
        yield from _check_paged_attention(model)
    lora = [key for key in model.config.parameters if key.startswith("lora_") and model.parameter(key)]
    if lora and not engine.plugins.get("lora_plugin", True):
        message = f"'{lora[0]}' is about adapters, and the engine has no lora_plugin."
        yield warning("TL64", model.place(lora[0]), message, "Build with lora_plugin, or remove it.")
    yield from _check_logits(model, engine)


def _check_paged_attention(model: Model) -> Iterator[Finding]:
    """The model does not load with either of these (tensorrtllm_backend#271, #251, #323)."""
    hint = "Write false; or build with use_paged_context_fmha, where KV cache and weights allow it."
    reuse = model.parameter("enable_kv_cache_reuse")
    if reuse in _TRUE or not reuse:
        given = f"is {reuse}" if reuse else "is not written, so it is on"
        message = f"enable_kv_cache_reuse {given}, and the engine has no paged context FMHA."
        yield error("TL44", model.place("enable_kv_cache_reuse"), message, hint)
    if model.parameter("enable_chunked_context") in _TRUE:
        message = "enable_chunked_context is on, and the engine has no paged context FMHA."
        yield error("TL44", model.place("enable_chunked_context"), message, hint)


def _check_logits(model: Model, engine: Engine) -> Iterator[Finding]:
    from tritonclient.grpc.model_config_pb2 import DataType

    if "logits_datatype" in model.unfilled:
        return
    wanted = LOGITS_TYPES.get(str(engine.pretrained.get("logits_dtype", "float32")))
    for tensor in model.config.output:
        if tensor.name in ("context_logits", "generation_logits"):
            written = DataType.Name(tensor.data_type)
            if wanted is not None and written != wanted:
                message = f"'{tensor.name}' is {written}, and the engine's logits are {wanted}."
                yield error("TL68", model.place(tensor.name), message, f"Write {wanted} here, in ensemble and in BLS.")

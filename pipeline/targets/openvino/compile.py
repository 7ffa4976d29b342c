"""Quantized checkpoint in, OpenVINO engine out: read `compile_engine` top to bottom."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from pipeline.config.deployment import EngineConfig, TargetName
from pipeline.config.schema import Format
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import HostError, IntegrityError, Problem, ToolError
from pipeline.targets.openvino import graph
from pipeline.targets.openvino.choices import ModelFacts, Plan, choose, deviations
from pipeline.targets.openvino.weights import Checkpoint

NAME: Final[TargetName] = "openvino"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
PACKAGES = ("openvino", "openvino-genai", "optimum-intel", "transformers", "torch")
# Element type in the graph of each format's weights.
_CODE_OF: Mapping[Format, str] = {
    "fp8": "f8e4m3",
    "fp8_rowwise": "f8e4m3",
    "int8_sq": "i8",
    "int8_wo": "i8",
    "int4_awq": "i4",
    "int4_wo": "i4",
}


def compile_engine(quantized: QuantizedCheckpoint, engine: EngineConfig, *, out: Path, progress: Progress) -> None:
    """Compile the unified Hugging Face checkpoint in `quantized` and write an Engine directory to `out`.

    Raises:
        ConfigError: engine limits do not fit the model.
        HostError: OpenVINO or optimum-intel is not installed.
        IntegrityError: the checkpoint holds no hf/, or other layers than quantization.json lists.
        ToolError: the model has no OpenVINO export, or a quantized layer is not in the exported graph.
    """
    _require_packages()
    source = quantized.path / "hf"
    checkpoint = Checkpoint(source)
    made = json.loads((quantized.path / "quantization.json").read_text("utf-8"))
    layers = _quantized_layers(checkpoint, made["quantized_layers"])
    formats: dict[str, Format] = made.get("formats") or dict.fromkeys(layers, made["format"])
    present = tuple(dict.fromkeys(formats.values())) or (made["format"],)
    config = json.loads((source / "config.json").read_text("utf-8"))
    told = deviations(present, made["kv_cache"], dynamic=engine.dynamic_quantization)
    plan = choose(engine, present, made["kv_cache"], _facts(config))
    for choice in plan.choices:
        progress.note(f"{choice.what} = {choice.value}: {choice.why}")
    out.mkdir(parents=True, exist_ok=True)
    weights = _build_graph(checkpoint, layers, engine, out=out, progress=progress)
    _require_low_bit(weights, [formats[name] for name in layers])
    _write_side_files(source, config, out)
    counts = Counter(formats.values()) if made["format"] == "mixed" else {}
    _write_engine_json(out, plan, {"format": made["format"], **({"formats": counts} if counts else {})}, told, weights)


def _require_packages() -> None:
    missing = [name for name in PACKAGES if _version(name) is None]
    if missing:
        raise HostError(
            f"the openvino target needs {', '.join(missing)}, which is not installed",
            hint="Install the extra: pip install 'trtpipe[openvino,quantize]'.",
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _quantized_layers(checkpoint: Checkpoint, listed: Sequence[str]) -> tuple[str, ...]:
    """Return the quantized layers in the model's order; the list and the tensors have to agree."""
    present = set(checkpoint.quantized_layers)
    problems = [
        Problem(where=name, message="is listed as quantized and has no scales.")
        for name in listed
        if name not in present
    ]
    problems += [Problem(where=name, message="has scales and is not listed.") for name in sorted(present - set(listed))]
    if problems:
        raise IntegrityError(
            f"{checkpoint.directory}: quantization.json and the tensors disagree about {len(problems)} layers",
            problems=problems,
            hint="Rebuild the quantized checkpoint.",
        )
    return tuple(listed)


def _facts(config: Mapping[str, Any]) -> ModelFacts:
    heads = int(config["num_attention_heads"])
    return ModelFacts(
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=int(config["max_position_embeddings"]),
        num_hidden_layers=int(config["num_hidden_layers"]),
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
    )


def _build_graph(
    checkpoint: Checkpoint, layers: Sequence[str], engine: EngineConfig, *, out: Path, progress: Progress
) -> dict[str, dict[str, int]]:
    """Write openvino_model.xml and .bin and return, per element type, how many weights of how many bytes."""
    import openvino as ov

    with _scratch(out) as scratch:
        with progress.track("16-bit graph", 2, "steps") as advance:
            graph.write_plain_checkpoint(checkpoint, scratch / "plain", engine.dtype)
            advance(1)
            exported = graph.export_plain_graph(scratch / "plain", scratch / "export")
            advance(1)
        shutil.rmtree(scratch / "plain")
        model = ov.Core().read_model(exported)
        graph.insert_weights(model, checkpoint, layers, progress=progress)
        graph.name_canonically(model)
        # Guard: compress_to_fp16 would round the float32 scales.
        ov.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)
        weights = graph.count_weights(model)
        del model  # it maps files of the scratch directory
        gc.collect()
    return weights


@contextlib.contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=out, prefix=".scratch-") as name:
        yield Path(name)


def _require_low_bit(weights: Mapping[str, Mapping[str, int]], formats: Sequence[Format]) -> None:
    """Refuse a graph whose weights are not of the types that the layers' formats have."""
    for code, expected in Counter(_CODE_OF[form] for form in formats).items():
        # An int4 layer with zero points is u4 in the graph.
        codes = {code, "u4"} if code == "i4" else {code}
        found = sum(weights.get(kind, {}).get("tensors", 0) for kind in codes)
        if found != expected:
            names = " and ".join(sorted({form for form in formats if _CODE_OF[form] == code}))
            raise ToolError(
                f"the OpenVINO graph holds {found} {code} weights; {expected} layers are quantized to {names}",
                hint="Report this with the model's config.json.",
            )


def _write_side_files(source: Path, config: Mapping[str, Any], out: Path) -> None:
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    _write_json(out / "config.json", plain)
    generation = source / "generation_config.json"
    settings = json.loads(generation.read_text("utf-8")) if generation.is_file() else {}
    settings["eos_token_id"] = _eos_ids(settings, config)
    settings.pop("transformers_version", None)
    _write_json(out / "generation_config.json", settings)
    (out / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / "tokenizer" / name)


def _eos_ids(settings: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """Stop ids as a list: generation_config.json's, else config.json's."""
    declared = settings.get("eos_token_id")
    declared = config.get("eos_token_id") if declared is None else declared
    if declared is None:
        return []
    return [int(declared)] if isinstance(declared, int) else [int(token) for token in declared]


def _write_engine_json(
    out: Path,
    plan: Plan,
    made: Mapping[str, Any],
    told: Sequence[str],
    weights: Mapping[str, Mapping[str, int]],
) -> None:
    settings = json.loads((out / "generation_config.json").read_text("utf-8"))
    config = json.loads((out / "config.json").read_text("utf-8"))
    pad = settings.get("pad_token_id", config.get("pad_token_id"))
    _write_json(
        out / "engine.json",
        {
            "target": NAME,
            **made,
            "limits": plan.limits,
            "scheduler": plan.scheduler,
            "plugin_config": plan.plugin_config,
            "choices": plan.choices_as_json(),
            "deviations": list(told),
            "eos_token_ids": settings["eos_token_id"],
            "pad_token_id": pad,
            "weights": weights,
            "versions": {name: _version(name) for name in PACKAGES},
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def describe(engine_path: Path) -> dict[str, Any]:
    """Read an engine back: engine.json and the size of its graph.

    Raises:
        IntegrityError: the directory is no openvino engine, or its graph is missing.
    """
    document = engine_path / "engine.json"
    problems = [
        Problem(where=name, message="is missing.")
        for name in ("engine.json", "openvino_model.xml", "openvino_model.bin")
        if not (engine_path / name).is_file()
    ]
    if problems:
        raise IntegrityError(
            f"{engine_path} is not an openvino engine",
            problems=problems,
            hint="Build it with 'trtpipe compile CONFIG'.",
        )
    facts: dict[str, Any] = json.loads(document.read_text("utf-8"))
    sizes = Counter(
        {name: (engine_path / name).stat().st_size for name in ("openvino_model.xml", "openvino_model.bin")}
    )
    return facts | {"size_bytes": sizes.total()}

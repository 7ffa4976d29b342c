"""Laws between keys that need no facts about checkpoint or machine.

Each rule reads a typed config and yields findings; the first key of a finding is the one to blame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipeline.config.formats import AWQ, CODE_BITS, DTYPE_OF, INTEGER, SIXTEEN_BIT, UNQUANTIZED, formats_of, has_groups
from pipeline.config.keys import KEYS, leaves, value_at
from pipeline.config.schema import BuildConfig, FinetuneConfig
from pipeline.errors import Severity

_EVERYTHING = ("*", "**", "model*", "model.*", "*.*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found.

    Attributes:
        keys: the key paths that the rule read; the first one is to blame.
        message: what is wrong, with the values.
        hint: what to write.
        severity: an error, or a warning about a setting without effect.
    """

    keys: tuple[str, ...]
    message: str
    hint: str
    severity: Severity = "error"


def check(config: BuildConfig) -> Iterator[Finding]:
    """Yield everything that does not hold between the keys of a config."""
    yield from _source(config)
    yield from _revision(config)
    yield from _dtype(config)
    yield from _exclude(config)
    yield from _auto(config)
    yield from _limits(config)
    yield from _parallelism(config)
    yield from _calibration(config)
    yield from _quality(config)
    yield from _finetune(config)
    yield from _without_effect(config)


def _source(config: BuildConfig) -> Iterator[Finding]:
    source = config.source
    kinds = {"path": source.path, "hub": source.hub, "gguf": source.gguf, "package": source.package}
    written = [kind for kind, value in kinds.items() if value is not None]
    if not written:
        keys = ("source", *(f"source.{kind}" for kind in kinds))
        hint = "Write one of path (a directory), hub (an id), gguf (a file) or package with file."
        yield Finding(keys=keys, message="names no checkpoint.", hint=hint)
    if len(written) > 1:
        names = ", ".join(f"'{kind}'" for kind in written)
        hint = "Keep one; a key that comes from an extended file is taken back with null."
        keys = tuple(f"source.{kind}" for kind in reversed(written))
        yield Finding(keys=keys, message=f"more than one source is named: {names}.", hint=hint)
    if source.package is not None and source.file is None:
        message = "a package needs 'file', the checkpoint's path inside it."
        yield Finding(
            keys=("source.package", "source.file"), message=message, hint="Add file: module/model.gguf beside package."
        )
    if source.file is not None and source.package is None:
        message = f"'{source.file}' is a path inside a package, and no package is named."
        hint = "Add package, or write path or gguf for a file on disk."
        yield Finding(keys=("source.file", "source.package"), message=message, hint=hint)
    if source.file is not None and (PurePosixPath(source.file).is_absolute() or ".." in source.file.split("/")):
        message = f"'{source.file}' leaves the package."
        yield Finding(keys=("source.file",), message=message, hint="Write the path as the package's file list has it.")


def _revision(config: BuildConfig) -> Iterator[Finding]:
    source = config.source
    if source.hub is not None and not _HUB_ID.fullmatch(source.hub):
        hint = "Write owner/name."
        if source.hub.endswith(".gguf"):
            hint = "Write gguf for a GGUF file."
        elif source.hub.startswith(("http:", "https:")):
            hint = f"Write hub: {'/'.join(source.hub.split('/')[3:5])}."
        elif source.hub.startswith((".", "/", "~")):
            hint = "Write path for a directory."
        yield Finding(keys=("source.hub",), message=f"'{source.hub}' is not a hub id.", hint=hint)
    if source.revision is not None and source.hub is None:
        message = "a revision belongs to a hub id, and no hub id is named."
        yield Finding(keys=("source.revision", "source.hub"), message=message, hint="Remove it, or name 'hub'.")
    elif source.revision is not None and not _COMMIT.fullmatch(source.revision):
        message = f"'{source.revision}' is not a commit: a branch or tag can move, so a rebuild could differ."
        hint = "Write the 40 hex digits of the commit; the hub shows them under 'Files and versions'."
        yield Finding(keys=("source.revision",), message=message, hint=hint)
    elif source.hub is not None and source.revision is None:
        message = f"'{source.hub}' is not pinned, so a rebuild could take other weights."
        hint = "Add revision: the 40 hex digits of a commit; the hub shows them under 'Files and versions'."
        yield Finding(keys=("source.hub", "source.revision"), message=message, hint=hint)


def _calibration(config: BuildConfig) -> Iterator[Finding]:
    """The texts that observers see: one file, or several sets that each name one."""
    calibration = config.calibration
    key = "calibration.datasets"
    if calibration.dataset is not None and calibration.datasets:
        message = "the text is named twice, by 'dataset' and by 'datasets'."
        yield Finding(keys=(key, "calibration.dataset"), message=message, hint="Keep one; add the file as an item.")
    for number, one in enumerate(calibration.datasets, start=1):
        if (one.path is None) == (one.hub is None):
            hint = "Write path (a file), or hub, revision and file."
            yield Finding(keys=(key,), message=f"item {number} needs exactly one of path and hub.", hint=hint)
        elif one.hub is None and (one.revision or one.file):
            message = f"item {number} has a path; revision and file belong to a hub id."
            yield Finding(keys=(key,), message=message, hint="Remove them.")
        elif one.hub is not None and not _HUB_ID.fullmatch(one.hub):
            yield Finding(keys=(key,), message=f"item {number}: '{one.hub}' is not a hub id.", hint="Write owner/name.")
        elif one.hub is not None and (one.file is None or ".." in one.file.split("/")):
            message = f"item {number} needs 'file', the path of a JSONL or text file inside {one.hub}."
            yield Finding(keys=(key,), message=message, hint="The hub shows it under 'Files and versions'.")
        elif one.hub is not None and not _COMMIT.fullmatch(one.revision or ""):
            message = f"item {number}: {one.hub} is not pinned, so a rebuild could calibrate on other text."
            hint = "Add revision: the 40 hex digits of a commit; the hub shows them under 'Files and versions'."
            yield Finding(keys=(key,), message=message, hint=hint)


def _quality(config: BuildConfig) -> Iterator[Finding]:
    quality = config.quality
    limits = {"min_task_score": quality.min_task_score, "max_task_drop": quality.max_task_drop}
    for name, value in limits.items():
        if value is not None and not quality.tasks:
            message = f"{value:g} limits the user's tasks, and no task is named."
            keys = (f"quality.{name}", "quality.tasks")
            yield Finding(keys=keys, message=message, hint="Add tasks: [questions.jsonl], or remove it.")
    names = [path.name for path in quality.tasks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"two tasks are named '{name}', which would be one row of the result."
        yield Finding(keys=("quality.tasks",), message=message, hint="Rename one of the files.")


def _dtype(config: BuildConfig) -> Iterator[Finding]:
    form, dtype = config.quantization.format, config.engine.dtype
    wanted = DTYPE_OF.get(form)
    other = SIXTEEN_BIT[dtype]
    if wanted is not None and wanted != dtype:
        message = f"format {form} is {wanted}, and engine.dtype is {dtype}."
        hint = f"Set engine.dtype: {wanted}, or quantization.format: {other}."
        yield Finding(keys=("engine.dtype", "quantization.format"), message=message, hint=hint)
    if any(DTYPE_OF.get(override.format, dtype) != dtype for override in config.quantization.overrides):
        message = f"layers at 16 bit are of engine.dtype, which is {dtype}."
        hint = f"Write format: {other}, or change engine.dtype."
        yield Finding(keys=("quantization.overrides", "engine.dtype"), message=message, hint=hint)


def _exclude(config: BuildConfig) -> Iterator[Finding]:
    globs = {
        "quantization.exclude": config.quantization.exclude,
        "quantization.overrides": tuple(override.layers for override in config.quantization.overrides),
    }
    for pattern in config.quantization.exclude:
        if pattern in _EVERYTHING:
            message = f"'{pattern}' excludes every layer, so nothing is left to quantize."
            hint = "Name layers, for example '*.mlp.down_proj', or set format: bf16."
            yield Finding(keys=("quantization.exclude",), message=message, hint=hint)
    for path, patterns in globs.items():
        if any(not pattern.strip() for pattern in patterns):
            yield Finding(keys=(path,), message="an empty glob matches no module.", hint="Remove it.")
    for override in config.quantization.overrides:
        if override.layers in _EVERYTHING:
            message = f"'{override.layers}' names every layer, so quantization.format is of none."
            hint = f"Set quantization.format: {override.format}, and override the layers that differ."
            yield Finding(keys=("quantization.overrides",), message=message, hint=hint)


def _auto(config: BuildConfig) -> Iterator[Finding]:
    """Laws of automatic mixed precision; without it, its section has no effect."""
    quantization, auto = config.quantization, config.quantization.auto
    if quantization.format != "auto":
        for key in (key for key in leaves() if key.path.startswith("quantization.auto.")):
            if value_at(config, key.path) != key.default:
                message = f"has no effect with format {quantization.format}."
                keys = (key.path, "quantization.format")
                yield Finding(keys=keys, message=message, hint="Remove it, or set format: auto.", severity="warning")
        return
    yield from _budget(config)
    if config.engine.target == "vllm":
        message = "a choice for each layer is not written for vLLM."
        hint = "Name one format, and layers that stay at 16 bit in exclude; or set engine.target: tensorrt_llm_llmapi."
        yield Finding(keys=("quantization.format", "engine.target"), message=message, hint=hint)
    if config.engine.target == "tensorrt_llm" and config.engine.pipeline_parallel_size > 1:
        message = "auto decides layer by layer, and equal layers of all pipeline stages must have one format."
        hint = "Set pipeline_parallel_size: 1, or write down the choice of one stage as quantization.overrides."
        keys = ("engine.pipeline_parallel_size", "quantization.format")
        yield Finding(keys=keys, message=message, hint=hint)
    for name in sorted({name for name in auto.candidates if auto.candidates.count(name) > 1 or name in UNQUANTIZED}):
        message = "16 bit always is a candidate." if name in UNQUANTIZED else f"'{name}' is named twice."
        yield Finding(keys=("quantization.auto.candidates",), message=message, hint=f"Remove {name}.")
    wanted, drawn = auto.num_score_samples, config.calibration.num_samples
    if wanted is not None and wanted > drawn:
        message = f"{wanted} sequences are more than calibration.num_samples, {drawn}."
        keys = ("quantization.auto.num_score_samples", "calibration.num_samples")
        yield Finding(keys=keys, message=message, hint="Lower it, or raise calibration.num_samples.")


def _budget(config: BuildConfig) -> Iterator[Finding]:
    """Whether there is a budget, and candidates that it can pay for."""
    auto = config.quantization.auto
    budget, candidates = "quantization.auto.effective_bits", "quantization.auto.candidates"
    bits = {name: CODE_BITS[name] for name in auto.candidates if name not in UNQUANTIZED}
    if not bits:
        fitting = "[int4_awq, int8_wo]" if config.engine.target == "openvino" else "[int4_awq, fp8]"
        message, hint = "format auto needs formats to choose from.", f"Add candidates, for example {fitting}."
        yield Finding(keys=(candidates, "quantization.format"), message=message, hint=hint)
    if auto.effective_bits is None:
        message, hint = "format auto needs a budget, and none is written.", "Add effective_bits, for example 6."
        yield Finding(keys=(budget, "quantization.format"), message=message, hint=hint)
    elif bits and auto.effective_bits < min(bits.values()):
        narrowest = min(bits, key=bits.__getitem__)
        least = bits[narrowest]
        message = f"{auto.effective_bits:g} bits are less than the {least} of {narrowest}, the narrowest candidate."
        hint = f"Raise it to {least} or more, or add a narrower candidate."
        yield Finding(keys=(budget, candidates), message=message, hint=hint)


def _finetune(config: BuildConfig) -> Iterator[Finding]:
    training, form = config.finetune, config.quantization.format
    if training.method == "none":
        for name in FinetuneConfig.model_fields:
            if getattr(training, name) != KEYS[f"finetune.{name}"].default:
                message = "has no effect with finetune.method none."
                hint = "Add method: qad, or remove it."
                yield Finding(
                    keys=(f"finetune.{name}", "finetune.method"), message=message, hint=hint, severity="warning"
                )
        return
    if set(formats_of(config.quantization)) <= set(UNQUANTIZED) and config.sparsity.method == "none":
        message = f"nothing is rounded in format {form} and nothing is sparse, so there is nothing to train."
        hint = "Pick a format that rounds weights, or set sparsity.method; or remove finetune."
        yield Finding(keys=("finetune.method", "quantization.format"), message=message, hint=hint)
    if training.warmup_steps >= training.steps:
        message = f"{training.warmup_steps} steps of warm-up leave none of {training.steps} to train at the full rate."
        keys = ("finetune.warmup_steps", "finetune.steps")
        yield Finding(keys=keys, message=message, hint=f"Lower it, for example to {training.steps // 10}.")


def _limits(config: BuildConfig) -> Iterator[Finding]:
    engine, serving = config.engine, config.serving
    if engine.max_num_tokens < engine.max_batch_size:
        message = (
            f"{engine.max_num_tokens} tokens per iteration cannot hold one token of each of {engine.max_batch_size} "
            "sequences (engine.max_batch_size)."
        )
        hint = f"Raise it to {engine.max_batch_size} or more, or lower max_batch_size."
        yield Finding(keys=("engine.max_num_tokens", "engine.max_batch_size"), message=message, hint=hint)
    if engine.max_seq_len is None:
        return
    if not engine.enable_chunked_context and engine.max_num_tokens < engine.max_seq_len:
        # NVIDIA/TensorRT-LLM#2702: prompts above max_num_tokens are rejected at run time otherwise.
        message = (
            f"without chunked context a prompt must fit into one iteration: {engine.max_num_tokens} tokens "
            f"< max_seq_len {engine.max_seq_len}."
        )
        hint = f"Raise it to {engine.max_seq_len}, or set enable_chunked_context: true."
        keys = ("engine.max_num_tokens", "engine.max_seq_len", "engine.enable_chunked_context")
        yield Finding(keys=keys, message=message, hint=hint)
    if engine.target != "vllm" and serving.default_max_tokens >= engine.max_seq_len:
        message = (
            f"an answer of {serving.default_max_tokens} tokens leaves no room for a prompt: prompt plus output is at "
            f"most {engine.max_seq_len} (engine.max_seq_len)."
        )
        hint = f"Lower it, for example to {max(1, engine.max_seq_len // 4)}, or raise max_seq_len."
        yield Finding(keys=("serving.default_max_tokens", "engine.max_seq_len"), message=message, hint=hint)


def _parallelism(config: BuildConfig) -> Iterator[Finding]:
    if config.engine.target != "openvino" and config.engine.gpu is None:
        gpus = ", ".join(str(choice) for choice in KEYS["engine.gpu"].choices)
        message = "a TensorRT-LLM engine runs on one GPU model only, and none is named."
        if config.engine.target in ("tensorrt_llm_llmapi", "vllm"):
            message = "precision and memory depend on the GPU, and none is named."
        yield Finding(keys=("engine.gpu", "engine.target"), message=message, hint=f"Add gpu: one of {gpus}.")


def _without_effect(config: BuildConfig) -> Iterator[Finding]:
    """Warn about values that differ from their default and change nothing."""
    target, forms = config.engine.target, set(formats_of(config.quantization))
    form = " and ".join(formats_of(config.quantization))
    values = {
        "quantization.group_size": (
            config.quantization.group_size,
            not has_groups(config),
            f"format {form}" + (f" and target {target}" if "int4_wo" in forms else ""),
        ),
        "quantization.awq": (config.quantization.awq, not forms.intersection(AWQ), f"format {form}"),
        "quantization.smoothquant_alpha": (
            config.quantization.smoothquant_alpha,
            "int8_sq" not in forms,
            f"format {form}",
        ),
        "quantization.exclude": (config.quantization.exclude, forms <= set(UNQUANTIZED), f"format {form}"),
        "sparsity.exclude": (config.sparsity.exclude, config.sparsity.method == "none", "sparsity.method none"),
        "engine.gpu": (config.engine.gpu, target == "openvino", "target openvino, which runs on the CPU"),
        "engine.num_threads": (config.engine.num_threads, target != "openvino", f"target {target}"),
        "engine.dynamic_quantization": (
            config.engine.dynamic_quantization,
            target != "openvino" or not forms.intersection(INTEGER),
            f"target {target} and format {form}",
        ),
    }
    for path, (value, unused, by) in values.items():
        if unused and value != KEYS[path].default:
            message = f"has no effect with {by}."
            keys = (path, "engine.target" if path.startswith("engine") else "quantization.format")
            yield Finding(keys=keys, message=message, hint="Remove it.", severity="warning")
    for path in _of_other_targets(config):
        message = f"has no effect with target {target}."
        yield Finding(keys=(path, "engine.target"), message=message, hint="Remove it.", severity="warning")


LLMAPI_READS = ("serving.tensorrt_llm.guided_decoding_backend", "serving.tensorrt_llm.cancellation_check_period_ms")


def _of_other_targets(config: BuildConfig) -> Iterator[str]:
    """Keys that are written and belong to another target than the config's, in schema order."""
    of_engines = ("engine.build.", "serving.tensorrt_llm.", "serving.bls.")
    of_gpus = ("engine.toolchain", "engine.kv_cache.free_gpu_memory_fraction", "engine.kv_cache.host_memory_bytes")
    only_engines = ("engine.preset", "engine.opt_num_tokens", "engine.max_input_len", "engine.kv_cache.type")
    foreign = () if config.engine.target == "tensorrt_llm" else (*of_engines, *only_engines)
    if config.engine.target == "openvino":
        foreign = (*foreign, *of_gpus, "engine.max_beam_width", "engine.kv_cache.tokens_per_block")
    if config.engine.target == "vllm":
        foreign = (*foreign, "serving.", *of_gpus, "engine.max_beam_width", "engine.kv_cache.tokens_per_block")
    read_by_llmapi = LLMAPI_READS if config.engine.target == "tensorrt_llm_llmapi" else ()
    for key in leaves():
        written = key.path not in read_by_llmapi and value_at(config, key.path) != key.default
        if written and key.path.startswith(foreign or "\0"):
            yield key.path

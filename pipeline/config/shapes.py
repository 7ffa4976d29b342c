"""Arithmetic between a config and the sizes of a model: what divides what, and what fits into what.

Layers that fail alike are named once, with '*' for their number ("model.layers.*.mlp.down_proj").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from pipeline.config.formats import AWQ, FORMATS_OF_EXPERTS, UNQUANTIZED, covers, formats_of, is_grouped, layer_format
from pipeline.config.schema import BuildConfig, Format, QuantizationConfig
from pipeline.errors import Problem, Severity

GROUP_SIZES = (128, 64, 32)
# Tensor volume limit of TensorRT (NVIDIA/TensorRT-LLM#2422): tokens per iteration x hidden size.
MAX_TENSOR_VOLUME = 2**31 - 1
# trtllm-build warns above this (tensorrt_llm/_common.py check_max_num_tokens).
LARGE_NUM_TOKENS = 16384


class ArchitectureFacts(Protocol):
    """What the checks want to know about a model; checkpoints/architecture.py provides it."""

    @property
    def architecture(self) -> str: ...  # noqa: D102 (the names are those of config.json)
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def tie_word_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Name -> (out_features, in_features) of every linear that could be quantized."""
        ...


def check(
    config: BuildConfig,
    architecture: ArchitectureFacts,
    row_parallel: frozenset[str],
    fused: tuple[frozenset[str], ...],
) -> Iterator[Problem]:
    """Yield every size that does not fit.

    Args:
        config: a valid config.
        architecture: sizes of the source.
        row_parallel: last name parts of linears that tensor parallelism splits along their input.
        fused: groups of last name parts that must share one format.
    """
    yield from _lengths(config, architecture)
    if config.engine.target != "openvino":
        yield from _volumes(config, architecture)
        yield from _parallelism(config, architecture)
    if formats_of(config.quantization)[0] in UNQUANTIZED:
        return
    yield from _globs(config, architecture)
    formats = {name: layer_format(config.quantization, name) for name in architecture.linears}
    quantized = {name: size for name, size in architecture.linears.items() if formats[name] is not None}
    if architecture.linears and not quantized:
        hint = "Exclude fewer modules, or set quantization.format: bf16."
        yield _error("quantization.exclude", "no layer is left to quantize.", hint)
    yield from _heads_and_experts(config, architecture, quantized)
    yield from _fusion(config, formats, fused)
    yield from _split(config, quantized, row_parallel)
    yield from _stages(config, architecture, formats)
    grouped = {name: form for name, form in formats.items() if form and is_grouped(form, config.engine.target)}
    if grouped:
        yield from _groups(config, {name: quantized[name] for name in grouped}, row_parallel)


def split_by_overrides(
    quantization: QuantizationConfig, names: Iterable[str], fused: Iterable[frozenset[str]]
) -> dict[str, dict[str, Format | None]]:
    """Parent module -> layer -> format, where overrides give layers that must share one format several.

    Args:
        quantization: format, overrides and excludes.
        names: of every linear layer.
        fused: groups of last name parts that must share one format.
    """
    split: dict[str, dict[str, Format | None]] = {}
    for parent, members in _siblings(names, fused):
        chosen = {
            last: layer_format(quantization, f"{parent}.{last}")
            for last in members
            if not covers(quantization.exclude, f"{parent}.{last}")
        }
        if len(set(chosen.values())) > 1:
            split[parent] = chosen
    return split


def _siblings(names: Iterable[str], fused: Iterable[frozenset[str]]) -> list[tuple[str, list[str]]]:
    """Each module that contains fused layers, with their last name parts, once per group."""
    found: dict[tuple[str, frozenset[str]], list[str]] = {}
    groups = tuple(fused)
    for name in names:
        parent, _, last = name.rpartition(".")
        for group in groups:
            if last in group:
                found.setdefault((parent, group), []).append(last)
    return [(parent, members) for (parent, _), members in found.items()]


def _lengths(config: BuildConfig, architecture: ArchitectureFacts) -> Iterator[Problem]:
    engine, limit = config.engine, architecture.max_position_embeddings
    if engine.max_seq_len is not None and engine.max_seq_len > limit:
        message = f"{engine.max_seq_len} tokens are more than the model has positions (max_position_embeddings {limit})"
        yield _error("engine.max_seq_len", f"{message}.", f"Use {limit} or less.")
    if config.calibration.max_seq_len > limit:
        message = f"{config.calibration.max_seq_len} tokens are more than the model has positions ({limit})."
        yield _error("calibration.max_seq_len", message, f"Use {limit} or less.")
    if config.finetune.method != "none" and config.finetune.max_seq_len > limit:
        message = f"{config.finetune.max_seq_len} tokens are more than the model has positions ({limit})."
        yield _error("finetune.max_seq_len", message, f"Use {limit} or less.")
    longest = engine.max_seq_len or limit
    if engine.max_seq_len is None and not engine.enable_chunked_context and engine.max_num_tokens < limit:
        # NVIDIA/TensorRT-LLM#2702: prompts above max_num_tokens are rejected at run time otherwise.
        message = (
            f"without chunked context a prompt must fit into one iteration: {engine.max_num_tokens} tokens < the "
            f"model's {limit} positions."
        )
        hint = f"Raise it to {limit}, set engine.max_seq_len, or set enable_chunked_context: true."
        yield _error("engine.max_num_tokens", message, hint)
    if engine.max_seq_len is None and config.serving.default_max_tokens >= longest:
        message = f"an answer of {config.serving.default_max_tokens} tokens leaves no room for a prompt in {longest}."
        yield _error("serving.default_max_tokens", message, f"Lower it, for example to {max(1, longest // 4)}.")


def _volumes(config: BuildConfig, architecture: ArchitectureFacts) -> Iterator[Problem]:
    tokens, hidden = config.engine.max_num_tokens, architecture.hidden_size
    if tokens * hidden > MAX_TENSOR_VOLUME:
        message = f"{tokens} tokens x hidden size {hidden} pass TensorRT's limit of 2^31 elements of a tensor."
        yield _error("engine.max_num_tokens", message, f"Use {MAX_TENSOR_VOLUME // hidden} or less.")
    elif tokens > LARGE_NUM_TOKENS:
        message = f"{tokens} tokens per iteration take much activation memory and rarely help."
        yield _problem("engine.max_num_tokens", message, f"Start with {LARGE_NUM_TOKENS} or less.", "warning")


def _parallelism(config: BuildConfig, architecture: ArchitectureFacts) -> Iterator[Problem]:
    tensor, pipeline = config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size
    heads, kv_heads, layers = (
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        architecture.num_hidden_layers,
    )
    if heads % tensor:
        message = f"{tensor} does not divide {heads} attention heads."
        yield _error("engine.tensor_parallel_size", message, f"Use {_divisors(heads)}.")
    elif kv_heads % tensor and tensor % kv_heads:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        message = f"{kv_heads} key-value heads can neither be shared by {tensor} GPUs nor copied to them evenly."
        yield _error("engine.tensor_parallel_size", message, f"Use {_any_of(fitting)}.")
    elif tensor > kv_heads and "int8_sq" in formats_of(config.quantization):
        # ModelOpt 0.47.0: "Duplicating KV heads per-channel scales is not supported".
        message = f"int8_sq cannot copy {kv_heads} key-value heads to {tensor} GPUs, because its scales are per channel"
        fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
        yield _error("engine.tensor_parallel_size", f"{message}.", f"Use {_any_of(fitting)}, or format fp8.")
    if layers % pipeline:
        message = f"{pipeline} does not divide {layers} layers."
        yield _error("engine.pipeline_parallel_size", message, f"Use {_divisors(layers)}.")


def _globs(config: BuildConfig, architecture: ArchitectureFacts) -> Iterator[Problem]:
    names = [*architecture.linears, "lm_head"]  # a tied lm_head has no weight of its own, and may be named
    example = next(iter(architecture.linears), "lm_head")
    hint = f"Layers are named like '{example}'; '*' stands for any text."
    for glob in config.quantization.exclude:
        if not any(covers([glob], name) for name in names):
            yield _problem("quantization.exclude", f"'{glob}' matches no layer of this model.", hint, "warning")
    kept = config.quantization.exclude
    for override in config.quantization.overrides if architecture.linears else ():
        named = [name for name in names if covers([override.layers], name)]
        if not named:
            yield _error("quantization.overrides", f"'{override.layers}' matches no layer of this model.", hint)
        elif all(covers(kept, name) for name in named):
            message = f"every layer that '{override.layers}' matches is excluded, and stays at 16 bit."
            yield _error("quantization.overrides", message, "Remove it, or exclude fewer modules.")


def _heads_and_experts(
    config: BuildConfig, architecture: ArchitectureFacts, quantized: Mapping[str, tuple[int, int]]
) -> Iterator[Problem]:
    if not covers(config.quantization.exclude, "lm_head"):
        # TensorRT-LLM asserts that lm_head keeps its dtype; a tied head has no weight to quantize.
        tied = architecture.tie_word_embeddings
        reason = "it shares its weight with the embedding" if tied else "TensorRT-LLM keeps it at 16 bit"
        if tied or config.engine.target != "openvino":
            message = f"lm_head is not excluded, and {reason}."
            yield _error("quantization.exclude", message, "Add lm_head to the list.")
    experts = [name for name in quantized if ".experts." in name]
    taken = formats_of(config.quantization, experts) if experts else ()
    refused = ", ".join(form for form in taken if form not in FORMATS_OF_EXPERTS)
    if experts and config.quantization.format == "auto" and config.quantization.auto.method == "gradient":
        message = f"{len(experts)} expert layers: ModelOpt's gradient method gives them no score."
        yield _error("quantization.auto.method", message, "Set method: kl_div, or exclude '*.experts.*'.")
    elif refused:
        message = f"{len(experts)} expert layers: {refused} of mixtures of experts is not supported"
        hint = f"Set format: {' or '.join(FORMATS_OF_EXPERTS)}, or exclude '*.experts.*'."
        yield _error("quantization.format", f"{message}.", hint)
    elif experts and config.finetune.method != "none":
        message = f"{len(experts)} expert layers: training mixtures of experts is not supported"
        yield _error("finetune.method", f"{message}.", "Set finetune.method: none, or exclude '*.experts.*'.")
    elif experts and config.engine.target == "openvino":
        message = f"{len(experts)} expert layers: the openvino target does not compile quantized mixtures of experts"
        yield _error("quantization.format", f"{message}.", "Set format: bf16, or exclude '*.experts.*'.")


def _fusion(
    config: BuildConfig, formats: Mapping[str, Format | None], fused: tuple[frozenset[str], ...]
) -> Iterator[Problem]:
    divided: dict[str, int] = {}
    for chosen in split_by_overrides(config.quantization, formats, fused).values():
        words = ", ".join(f"{last} {form or 'at 16 bit'}" for last, form in chosen.items())
        divided[words] = divided.get(words, 0) + 1
    for words, count in divided.items():
        message = f"in {_layers(count)} {words}: they read one tensor and share one format."
        hint = "Name all of them in one glob, for example '*.self_attn.[qkv]_proj' or '*.mlp.*'."
        yield _error("quantization.overrides", message, hint)
    split: dict[tuple[str, str], int] = {}
    for parent, members in _siblings(formats, fused):
        kept = {last for last in members if covers(config.quantization.exclude, f"{parent}.{last}")}
        others = [last for last in sorted(set(members) - kept) if formats[f"{parent}.{last}"]]
        # An engine for the CPU multiplies by each layer alone; only a scale that is folded into their norm ties them.
        tied = config.engine.target != "openvino" or any(formats[f"{parent}.{last}"] in AWQ for last in others)
        if kept and others and tied:
            place = (", ".join(sorted(kept)), ", ".join(others))
            split[place] = split.get(place, 0) + 1
    for (names, rest), count in split.items():
        message = f"in {_layers(count)} {names} would stay at 16 bit while {rest} would not; they share one scale"
        yield _error("quantization.exclude", f"{message}.", "Exclude all of them, or none.")


def _split(
    config: BuildConfig, quantized: Mapping[str, tuple[int, int]], row_parallel: frozenset[str]
) -> Iterator[Problem]:
    """Whether tensor parallelism cuts every quantized layer into equal parts."""
    tensor = config.engine.tensor_parallel_size
    if tensor == 1 or config.engine.target == "openvino":
        return
    axes = {
        name: size[1] if name.rpartition(".")[2] in row_parallel else size[0]
        for name, size in quantized.items()
        if name.rpartition(".")[2] not in ("k_proj", "v_proj")  # heads are copied when there are too few
    }
    bad = {name: width for name, width in axes.items() if width % tensor}
    if bad:
        fitting = [n for n in range(1, tensor) if all(width % n == 0 for width in axes.values())]
        message = f"{tensor} does not divide the features of {_layers(len(bad))}: {_listed(bad)}."
        yield _error("engine.tensor_parallel_size", message, f"Use {_any_of(fitting)}.")


def _stages(
    config: BuildConfig, architecture: ArchitectureFacts, formats: Mapping[str, Format | None]
) -> Iterator[Problem]:
    """Whether equal layers of all pipeline stages have one format: one list of names is for all of them.

    exclude_modules and quant_cfg.json name layers as an engine does, from 0 on in every stage (a rank's own modules are
    looked up in it: NVIDIA/TensorRT-LLM tensorrt_llm/quantization/quantize.py).
    """
    stages, layers = config.engine.pipeline_parallel_size, architecture.num_hidden_layers
    if config.engine.target != "tensorrt_llm" or stages == 1 or layers % stages:
        return
    size = layers // stages
    places: dict[tuple[int, str], set[Format | None]] = {}
    for name, form in formats.items():
        found = re.search(r"\.(\d+)\.", name)
        if found:
            places.setdefault((int(found[1]) % size, name[found.end() :]), set()).add(form)
    unequal = [f"{kind} of layer {index}" for (index, kind), chosen in places.items() if len(chosen) > 1]
    if unequal:
        message = (
            f"a checkpoint counts layers from 0 in each of {stages} pipeline stages and lists their formats once, so "
            f"layers {size} apart must have one format; {unequal[0]} and {len(unequal) - 1} more do not."
        )
        key = "quantization.overrides" if config.quantization.overrides else "quantization.exclude"
        yield _error(key, message, "Name equal layers of every stage, or use one stage.")


def _groups(
    config: BuildConfig, quantized: Mapping[str, tuple[int, int]], row_parallel: frozenset[str]
) -> Iterator[Problem]:
    """Whether groups tile the input axis of each rank's part of every int4 layer; outputs pack in pairs."""
    size = config.quantization.group_size
    tensor = config.engine.tensor_parallel_size if config.engine.target != "openvino" else 1
    inputs = {
        name: width // tensor if name.rpartition(".")[2] in row_parallel else width
        for name, (_, width) in quantized.items()
    }
    bad = {name: width for name, width in inputs.items() if width % size}
    if bad:
        per_gpu = f" per GPU (tensor_parallel_size {tensor})" if tensor > 1 else ""
        usable = _group_sizes(config)
        fitting = [group for group in usable if all(width % group == 0 for width in inputs.values())]
        hint = (
            f"Set group_size: {fitting[0]}, the largest that fits every layer."
            if fitting
            else f"No group size of {_any_of(sorted(usable))} fits every layer: exclude these, or pick fp8 or int8_sq."
        )
        message = f"{size} does not divide the inputs{per_gpu} of {_layers(len(bad))}: {_listed(bad)}."
        yield _error("quantization.group_size", message, hint)
    odd = {name: rows for name, (rows, _) in quantized.items() if rows % 2}
    if odd:
        message = f"int4 packs two outputs into a byte, and these have an odd number: {_listed(odd)}."
        yield _error("quantization.format", message, "Exclude them, or pick fp8 or int8_sq.")


def _group_sizes(config: BuildConfig) -> tuple[int, ...]:
    """Group sizes that the target has kernels for, largest first (NVIDIA/TensorRT-LLM#1547, #988)."""
    if "w4a8_awq" in formats_of(config.quantization):
        return (128,)
    return GROUP_SIZES if config.engine.target == "openvino" else (128, 64)


def _listed(widths: Mapping[str, int]) -> str:
    """Layers with their width, those of one kind and width together: '576: model.layers.*.mlp.up_proj'."""
    kinds: dict[int, list[str]] = {}
    for name, width in widths.items():
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if kind not in kinds.setdefault(width, []):
            kinds[width].append(kind)
    return "; ".join(f"{width} in {', '.join(names)}" for width, names in kinds.items())


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _divisors(number: int) -> str:
    return _any_of([n for n in range(1, number + 1) if number % n == 0])


def _any_of(numbers: list[int]) -> str:
    *most, last = [str(number) for number in numbers]
    return f"{', '.join(most)} or {last}" if most else last


def _error(where: str, message: str, hint: str) -> Problem:
    return _problem(where, message, hint, "error")


def _problem(where: str, message: str, hint: str, severity: Severity) -> Problem:
    return Problem(where=where, message=message, hint=hint, severity=severity)

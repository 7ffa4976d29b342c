"""Arithmetic of an engine's shapes that config/shapes.py does not do: padding, volumes, limits of the server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pipeline.config.formats import AWQ, formats_of, layer_format
from pipeline.config.legality import table
from pipeline.config.shapes import MAX_TENSOR_VOLUME
from pipeline.targets.tensorrt_llm import budget
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, error, warning

GPUS_PER_NODE = 8


def check(case: Case) -> Iterator[Finding]:
    """Yield every size that does not fit."""
    yield from _padding(case)
    yield from _nodes(case)
    yield from _prompts(case)
    yield from _volumes(case)
    yield from _changed(case)
    yield from _server_limits(case)


def _padding(case: Case) -> Iterator[Finding]:
    """Group-wise layers are padded to a multiple by the build, and a checkpoint that is not padded mismatches.

    Both axes of every layer must be a multiple of max(64, group size) x tensor parallel size, 128 instead of
    64 for w4a8_awq (tensorrt_llm/quantization/layers.py@b171e87). What config/shapes.py says about the
    group size alone is not said again.
    """
    quantization, tensor = case.config.quantization, case.config.engine.tensor_parallel_size
    grouped = [form for form in formats_of(quantization) if form in AWQ]
    if not grouped or _group_misfit(case):
        return
    smallest = 128 if "w4a8_awq" in grouped else 64
    layers, unit = _fused_layers(case), max(smallest, quantization.group_size)
    bad = _misfits(layers, unit * tensor)
    if not bad:
        return
    groups = [group for group in (128, 64) if smallest <= group < unit and not _misfits(layers, group * tensor)]
    ranks = [n for n in range(1, tensor) if not _misfits(layers, unit * n)]
    hint = "Exclude these layers, or pick fp8 or int8_sq."
    if groups:
        hint = f"Set group_size: {groups[0]}."
    elif ranks:
        hint = f"Use tensor_parallel_size {ranks[-1]}, or pick fp8 or int8_sq."
    named = "; ".join(f"{outer} x {inner} in {names}" for (outer, inner), names in bad.items())
    message = (
        f"the build pads both sides of {' and '.join(grouped)} layers to multiples of {unit * tensor} "
        f"(tensor_parallel_size {tensor} x {unit}), and the checkpoint then has other shapes: {named}."
    )
    yield error("TL12", "quantization.group_size", message, hint)


def _fused_layers(case: Case) -> Mapping[str, tuple[int, int]]:
    """Dense layers in groups as the engine has them: q, k and v are one (KV heads copied when too few)."""
    model, tensor = case.model, case.config.engine.tensor_parallel_size
    layers: dict[str, tuple[int, int]] = {}
    for name, size in model.linears.items():
        parent, _, last = name.rpartition(".")
        if ".experts." in name or layer_format(case.config.quantization, name) not in AWQ:
            continue
        if last in ("q_proj", "k_proj", "v_proj"):
            heads = model.num_attention_heads + 2 * max(model.num_key_value_heads, tensor)
            layers[f"{parent}.qkv"] = (heads * model.head_dim, size[1])
        else:
            layers[name] = size
    return layers


def _misfits(layers: Mapping[str, tuple[int, int]], multiple: int) -> dict[tuple[int, int], str]:
    """Shapes with an axis that is no multiple, each with the kinds of layers that have it."""
    kinds: dict[tuple[int, int], dict[str, None]] = {}
    for name, size in layers.items():
        if any(axis % multiple for axis in size):
            kinds.setdefault(size, {})[re.sub(r"\.\d+(?=\.|$)", ".*", name)] = None
    return {size: ", ".join(names) for size, names in kinds.items()}


def _group_misfit(case: Case) -> bool:
    """Whether config/shapes.py already refuses the group size: it does not divide a rank's inputs."""
    engine, group = case.config.engine, case.config.quantization.group_size
    for name, (_, inner) in case.model.linears.items():
        if layer_format(case.config.quantization, name) not in AWQ:
            continue
        split = engine.tensor_parallel_size if name.rpartition(".")[2] in table().row_parallel.names else 1
        if (inner // split) % group:
            return True
    return False


def _nodes(case: Case) -> Iterator[Finding]:
    nodes = case.config.serving.tensorrt_llm.num_nodes or 1
    if case.world_size > nodes * GPUS_PER_NODE:
        message = f"{case.world_size} GPUs do not fit into {nodes} node(s) of {GPUS_PER_NODE}."
        hint = f"Set it to {-(-case.world_size // GPUS_PER_NODE)}, or use fewer GPUs."
        yield error("TL22", "serving.tensorrt_llm.num_nodes", message, hint)


def _prompts(case: Case) -> Iterator[Finding]:
    """Without chunked context a prompt must fit into one iteration (NVIDIA/TensorRT-LLM#2702, #2717, #6539)."""
    engine, chunked = case.config.engine, case.config.serving.tensorrt_llm.enable_chunked_context
    longest = engine.max_seq_len or case.model.max_position_embeddings
    if engine.enable_chunked_context and chunked is False and engine.max_num_tokens < longest:
        message = (
            f"without it prompts above {engine.max_num_tokens} tokens (engine.max_num_tokens) are rejected, and "
            f"max_seq_len is {longest}."
        )
        hint = f"Leave it empty, or raise engine.max_num_tokens to {longest}."
        yield error("TL28", "serving.tensorrt_llm.enable_chunked_context", message, hint)


def _volumes(case: Case) -> Iterator[Finding]:
    """No tensor may have 2^31 elements (NVIDIA/TensorRT-LLM#2422, #2204); tokens x hidden is in config/shapes.py."""
    engine, model = case.config.engine, case.model
    tokens = budget.max_num_tokens(case.config, model)
    build = engine.build
    if build.remove_input_padding == "disable" and tokens * model.hidden_size > MAX_TENSOR_VOLUME:
        message = f"with padded input {tokens} tokens x hidden size {model.hidden_size} pass 2^31 elements of a tensor."
        yield error("TL29", "engine.build.remove_input_padding", message, "Leave it empty, or lower max_batch_size.")
        return
    gathered = build.gather_context_logits or build.gather_all_token_logits
    if gathered and tokens * model.vocab_size > MAX_TENSOR_VOLUME:
        message = f"logits of {tokens} tokens x vocabulary {model.vocab_size} pass 2^31 elements of a tensor."
        hint = f"Use {MAX_TENSOR_VOLUME // model.vocab_size} or less, or do not gather context logits."
        yield error("TL29", "engine.max_num_tokens", message, hint)


def _changed(case: Case) -> Iterator[Finding]:
    """Sizes that the build changes without an error (tensorrt_llm/_common.py@b171e87, builder.py@008b2b8)."""
    engine, written = case.config.engine, case.config.engine.max_num_tokens
    real = budget.max_num_tokens(case.config, case.model)
    if real != written and engine.build.remove_input_padding != "disable":
        word = "raises" if real > written else "lowers"
        why = {
            "lowers": "max_batch_size x max_seq_len is less",
            "raises": "it must hold one KV block, and every sequence's draft tokens",
        }[word]
        yield warning(
            "TL33", "engine.max_num_tokens", f"the build {word} {written} to {real}: {why}.", f"Write {real}."
        )
    if engine.opt_num_tokens is not None and engine.opt_num_tokens > real:
        message = f"the build lowers {engine.opt_num_tokens} to max_num_tokens {real}."
        yield warning("TL33", "engine.opt_num_tokens", message, f"Use {real} or less.")


def _server_limits(case: Case) -> Iterator[Finding]:
    """What the server is told must be inside what the engine was built for."""
    engine, serving = case.config.engine, case.config.serving.tensorrt_llm
    if serving.max_beam_width is not None and serving.max_beam_width > engine.max_beam_width:
        message = f"{serving.max_beam_width} beams are more than the engine's {engine.max_beam_width}."
        hint = f"Use {engine.max_beam_width} or less, or raise engine.max_beam_width."
        yield error("TL30", "serving.tensorrt_llm.max_beam_width", message, hint)
    if serving.triton_max_batch_size is not None and serving.triton_max_batch_size > engine.max_batch_size:
        message = f"{serving.triton_max_batch_size} requests are more than the engine's {engine.max_batch_size}."
        hint = "Leave it empty, or raise engine.max_batch_size."
        yield error("TL62", "serving.tensorrt_llm.triton_max_batch_size", message, hint)

"""Static checks of a TensorRT-LLM checkpoint: every rank's names, dtypes and shapes, equal copies, the config.

What must be there is derived from the source's tensors and config, and from the rules of the layout; the
file's own claims are only compared with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.quantize.checkpoint_reader import SourceReader
from pipeline.quantize.checks import Check, rule
from pipeline.quantize.reference import PACKED, LinearFormat
from pipeline.quantize.structure import Broken, linear_modules, unlisted
from pipeline.quantize.trtllm_config import rotary
from pipeline.quantize.trtllm_layout import Layout, Place
from pipeline.quantize.trtllm_reader import TensorRTLLMReader

# NVIDIA/TensorRT-LLM QuantConfig and Mapping: other keys stop the build with a TypeError.
QUANTIZATION_KEYS = frozenset(
    {
        "quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe",
        "has_zero_point", "pre_quant_scale", "exclude_modules", "mamba_ssm_cache_dtype",
    }
)  # fmt: skip
LAYER_CONFIG_KEYS = frozenset({"quant_algo", "kv_cache_quant_algo", "quantized_layers"})  # LayerQuantConfig
MAPPING_KEYS = frozenset({"world_size", "tp_size", "pp_size", "cp_size", "gpus_per_node", "moe_tp_size", "moe_ep_size"})
_PADDING = 64  # AWQ formats pad the vocabulary to a multiple of it
_KV_SCALES = ("kv_cache_scaling_factor", "k_cache_scaling_factor", "v_cache_scaling_factor")
_STATIC_ACTIVATIONS = frozenset({"fp8", "int8_sq", "w4a8_awq"})


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One stored tensor on one rank.

    Attributes:
        where: Hugging Face modules that it holds.
        dtypes: allowed storage types.
        shape: on this rank.
        copied: every tensor rank of the stage holds the same values.
        optional: may be absent.
    """

    where: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    copied: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """One stored module: what it holds of the source, and its shape on a rank."""

    place: Place
    modules: tuple[str, ...]
    rows: int
    columns: int
    experts: int
    bias: bool
    format: LinearFormat


def check_trtllm_structure(source: SourceReader, reader: TensorRTLLMReader) -> list[Check]:
    """Check everything that needs no arithmetic (see the module's docstring)."""
    expected = {stage: expected_tensors(source, reader, stage) for stage in range(reader.layout.pp)}
    homeless = [name for name in source.tensors if reader.layout.place(name.rpartition(".")[0]) is None]
    checks = rule("structure.place", ((name, f"the layout has no place for {name}", "") for name in homeless))
    checks += rule("structure.present", _missing(expected, reader))
    checks += rule("structure.unexpected", _unexpected(expected, reader))
    checks += rule("structure.dtype", _wrong_dtype(expected, reader))
    checks += rule("structure.shape", _wrong_shape(expected, reader))
    checks += rule("structure.ranks", _unequal_ranks(expected, reader))
    checks += rule("structure.scales", _bad_scales(expected, reader))
    checks += rule("structure.excludes", _bad_excludes(source, reader))
    checks += rule("structure.config", _wrong_config(source, reader))
    return checks


def expected_tensors(source: SourceReader, reader: TensorRTLLMReader, stage: int) -> dict[str, Expected]:
    """Every tensor of each rank of a pipeline stage, for this source and the export's format."""
    plain = "BF16" if reader.dtype == "bfloat16" else "F16"
    expected: dict[str, Expected] = {}
    for stored in _stored_modules(source, reader, stage):
        expected |= _linear_tensors(stored, reader, plain)
    for name, info in source.tensors.items():
        module, _, parameter = name.rpartition(".")
        place = reader.layout.place(module)
        if place is None or place.stage != stage:
            continue
        if module == "model.embed_tokens":
            shape = (reader.layout.rank_rows("vocab"), info.shape[1])
            expected[f"{place.stored}.weight"] = Expected(where=(module,), dtypes=(plain,), shape=shape)
        elif len(info.shape) == 1 and module not in linear_modules(source):
            expected[f"{place.stored}.{parameter}"] = Expected(
                where=(module,), dtypes=(plain,), shape=info.shape, copied=True
            )
    if reader.kv_cache_algorithm:
        for hf, attention in _attention_modules(reader, stage):
            for suffix in _KV_SCALES:
                expected[f"{attention}.{suffix}"] = Expected(
                    where=(hf,), dtypes=("F32",), shape=(1,), copied=True, optional=suffix != _KV_SCALES[0]
                )
    return expected


def _attention_modules(reader: TensorRTLLMReader, stage: int) -> Iterator[tuple[str, str]]:
    per_stage = reader.layout.layers // reader.layout.pp
    for index in range(per_stage):
        yield f"model.layers.{stage * per_stage + index}.self_attn", f"transformer.layers.{index}.attention"


def _stored_modules(source: SourceReader, reader: TensorRTLLMReader, stage: int) -> Iterator[_Stored]:
    """The linear layers of a stage as they are stored; lm_head is always one, tied or not."""
    linears = linear_modules(source)
    if "lm_head" not in linears:
        linears["lm_head"] = source.tensors["model.embed_tokens.weight"].shape  # type: ignore[assignment]
    groups: dict[str, list[tuple[str, Place]]] = {}
    for module in linears:
        place = reader.layout.place(module)
        if place is not None and place.stage == stage:
            groups.setdefault(place.stored, []).append((module, place))
    layout = reader.layout
    for members in groups.values():
        module, place = members[0]
        out_features, in_features = linears[module]
        blocks = {block for _name, other in members for block in other.part.blocks}
        experts = {other.expert for _name, other in members} - {None}
        yield _Stored(
            place=place,
            modules=tuple(name for name, _place in members),
            rows=sum(layout.rank_rows(block) for block in blocks) if blocks else out_features,
            columns=in_features // layout.tp if place.part.split == "row" else in_features,
            experts=len(experts),
            bias=any(f"{name}.bias" in source.tensors for name, _place in members),
            format=reader.format_of(module),
        )


def _linear_tensors(stored: _Stored, reader: TensorRTLLMReader, plain: str) -> dict[str, Expected]:
    """The tensors of one stored linear layer on one rank."""
    rows, columns, split = stored.rows, stored.columns, stored.place.part.split
    whole = split == "none"

    def of(*dtypes: str, shape: tuple[int, ...], copied: bool = False) -> Expected:
        return Expected(where=stored.modules, dtypes=dtypes, shape=shape, copied=copied or whole)

    stack = (stored.experts,) if stored.experts else ()
    router = stored.place.part.stored == "mlp.router"
    tensors = {"weight": of(*(("F32",) if router else (plain,)), shape=(*stack, rows, columns))}
    if stored.bias:
        tensors["bias"] = of(plain, shape=(rows,), copied=split == "row")
    if stored.format != "float":
        groups = columns // (reader.declared.group_size_of(stored.place.stored) or columns)
        scalar = of("F32", shape=(1,), copied=True)
        smoothing = of(plain, shape=(columns,), copied=split == "column")
        match stored.format:
            case "fp8":
                tensors |= {"weight": of("F8_E4M3", shape=(rows, columns)), "weights_scaling_factor": scalar}
            case "int8_sq":
                tensors["weight"] = of("I8", shape=(rows, columns))
                tensors["weights_scaling_factor"] = of("F32", shape=(rows,), copied=split == "row")
                tensors["prequant_scaling_factor"] = smoothing
            case "int4_awq" | "w4a8_awq":
                tensors["weight"] = of("I8", shape=(rows // 2, columns))
                tensors["weights_scaling_factor"] = of("F32", shape=(rows, groups))
                tensors["prequant_scaling_factor"] = smoothing
            case "int8_wo" | "int4_wo" | "fp8_rowwise":
                pass  # 16-bit weights, which trtllm-build rounds; fp8_rowwise is not written in this layout
        if stored.format == "w4a8_awq":
            tensors["weights_scaling_factor_2"] = scalar
        if stored.format in _STATIC_ACTIVATIONS:
            tensors["activation_scaling_factor"] = scalar
    return {f"{stored.place.stored}.{suffix}": tensor for suffix, tensor in tensors.items()}


Tables = Mapping[int, Mapping[str, Expected]]


def _per_rank(expected: Tables, layout: Layout) -> Iterator[tuple[int, str, Expected]]:
    for stage, table in expected.items():
        for rank in layout.ranks(stage):
            for name, tensor in table.items():
                yield rank, name, tensor


def _missing(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    for rank, name, tensor in _per_rank(expected, reader.layout):
        if not tensor.optional and name not in reader.ranks[rank]:
            for where in tensor.where:
                yield where, f"rank {rank}: tensor {name} is missing", "missing tensor"


def _unexpected(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    for rank, tensors in enumerate(reader.ranks):
        for name in tensors:
            if name not in expected[rank // reader.layout.tp]:
                detail = f"rank {rank}: tensor {name} belongs to no layer of the source in this format"
                yield name.rpartition(".")[0], detail, ""


def _wrong_dtype(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    for rank, name, tensor in _per_rank(expected, reader.layout):
        info = reader.ranks[rank].get(name)
        if info is not None and info.dtype not in tensor.dtypes:
            wanted = " or ".join(tensor.dtypes)
            for where in tensor.where:
                yield where, f"rank {rank}: tensor {name} is {info.dtype}, {wanted} was expected", "wrong dtype"


def _wrong_shape(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    for rank, name, tensor in _per_rank(expected, reader.layout):
        info = reader.ranks[rank].get(name)
        if info is None or info.shape == tensor.shape:
            continue
        cause = "the tensor is transposed" if info.shape == tensor.shape[::-1] else ""
        for where in tensor.where:
            detail = f"rank {rank}: tensor {name} is {list(info.shape)}, {list(tensor.shape)} was expected"
            yield where, detail, cause


def _unequal_ranks(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    """Tensors that every tensor rank holds in full, and that differ; each engine would compute with its own."""
    for stage, table in expected.items():
        first, *others = reader.layout.ranks(stage)
        for name, tensor in table.items():
            if not tensor.copied or name not in reader.ranks[first]:
                continue
            values = reader.ranks[first].raw(name)
            for rank in others:
                if name in reader.ranks[rank] and not np.array_equal(values, reader.ranks[rank].raw(name)):
                    for where in tensor.where:
                        yield where, f"{name} differs between rank {first} and rank {rank}", "corrupted scale"
    yield from _unequal_heads(expected, reader)


def _unequal_heads(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    """Keys and values that several ranks share because there are fewer KV heads than ranks."""
    layout = reader.layout
    copies = layout.copies("k")
    if copies == 1:
        return
    for stage, table in expected.items():
        for name, tensor in table.items():
            if not name.endswith("attention.qkv.weight") or any(
                name not in reader.ranks[r] for r in layout.ranks(stage)
            ):
                continue
            pieces = [reader.ranks[rank].raw(name) for rank in layout.ranks(stage)]
            query, key = layout.rank_rows("q"), layout.rank_rows("k")
            start = len(pieces[0]) * query // (query + 2 * key)  # packed tensors have half the rows
            for rank, piece in enumerate(pieces):
                if not np.array_equal(piece[start:], pieces[rank - rank % copies][start:]):
                    for where in tensor.where:
                        yield where, f"{name}: ranks that share a KV head hold different keys or values", ""


def _bad_scales(expected: Tables, reader: TensorRTLLMReader) -> Broken:
    """Scales that are not finite and positive; FP8 KV scales below 1, which the exporter never writes."""
    least = 1.0 if reader.kv_cache_algorithm == "FP8" else 0.0
    for rank, name, tensor in _per_rank(expected, reader.layout):
        info = reader.ranks[rank].get(name)
        if info is None or "scaling_factor" not in name or info.dtype not in {"F32", "F16", "BF16"}:
            continue
        values = reader.ranks[rank].floats(name)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        detail = ""
        if bad.size:
            first = values.reshape(-1)[bad[0]]
            detail = f"{bad.size} of {values.size} values are not finite and positive (index {bad[0]}: {first})"
        elif name.endswith(_KV_SCALES) and float(values.min()) < least:
            detail = f"an FP8 KV scale is {float(values.min()):.4g}, at least 1 is written"
        if detail:
            for where in tensor.where:
                yield where, f"rank {rank}: {name}: {detail}", "corrupted scale"


def _bad_excludes(source: SourceReader, reader: TensorRTLLMReader) -> Broken:
    """Layers whose storage contradicts the config's lists, which is how the engine build decides what to load."""
    if reader.format == "float":
        return
    linears = linear_modules(source)
    for module in reader.quantized_modules():
        if module in linears and reader.format_of(module) == "float":
            yield module, *unlisted(mixed=reader.format == "mixed")
    places = [place for module in linears if (place := reader.layout.place(module)) is not None]
    for name in sorted(reader.declared.layers.keys() - {place.stored for place in places}):
        yield name, "quant_cfg.json lists it, and the layout has no such layer", ""


def _wrong_config(source: SourceReader, reader: TensorRTLLMReader) -> Broken:
    for field, wanted in _config_facts(source, reader).items():
        stored = reader.config.get(field)
        if stored != wanted:
            yield "", f"config.json: {field} is {stored!r}, the source says {wanted!r}", ""
    for section, known in (("quantization", QUANTIZATION_KEYS), ("mapping", MAPPING_KEYS)):
        for key in sorted(set(reader.config.get(section) or {}) - known):
            yield "", f"config.json: {section}.{key} is no field of it, and the engine build stops there", ""
    yield from _wrong_layer_config(reader)
    mapping = reader.config["mapping"]
    if mapping.get("world_size") != mapping["tp_size"] * mapping["pp_size"]:
        yield "", f"config.json: world_size {mapping.get('world_size')} is not tp_size times pp_size", ""


def _wrong_layer_config(reader: TensorRTLLMReader) -> Broken:
    """quant_cfg.json, of which the engine build takes known fields only, and which must agree with config.json."""
    for key in sorted(reader.layer_config.keys() - LAYER_CONFIG_KEYS):
        yield "", f"quant_cfg.json: {key} is no field of it, and the engine build stops there", ""
    for key in ("quant_algo", "kv_cache_quant_algo") if reader.layer_config else ():
        ours, theirs = reader.layer_config.get(key), reader.quantization.get(key)
        if ours != theirs:
            yield "", f"quant_cfg.json: {key} is {ours!r}, and {theirs!r} in config.json", ""
    for name, section in (reader.layer_config.get("quantized_layers") or {}).items():
        for key in sorted(section.keys() - QUANTIZATION_KEYS):
            yield name, f"quant_cfg.json: {key} is no field of a layer, and the engine build stops there", ""


def _config_facts(source: SourceReader, reader: TensorRTLLMReader) -> dict[str, Any]:
    """Field of config.json -> what it must be, read from the source's tensors where they tell."""
    hf = _complete_config(source)
    base, scaling = rotary(hf)
    heads = hf["num_attention_heads"]
    vocabulary = source.tensors["model.embed_tokens.weight"].shape[0]
    biased = {name.split(".", 3)[3] for name in source.tensors if name.endswith("_proj.bias")}
    # Both branches of the MLP in one tensor: the activation's name says that it is gated.
    gated = {"silu": "swiglu"} if "up" in reader.layout.family.row_blocks["mlp.fc"] else {}
    return {
        "architecture": hf["architectures"][0],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_hidden_layers": hf["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or hf["hidden_size"] // heads,
        "hidden_act": gated.get(hf["hidden_act"], hf["hidden_act"]),
        "norm_epsilon": hf["rms_norm_eps"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "vocab_size": -(-vocabulary // _PADDING) * _PADDING if _has_packed(reader) else vocabulary,
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attn_bias": any("self_attn" in name for name in biased),
        "mlp_bias": any("mlp" in name for name in biased),
        "qk_layernorm": any(name.endswith("q_norm.weight") for name in source.tensors),
    }


def _has_packed(reader: TensorRTLLMReader) -> bool:
    return reader.format in PACKED or any(form in PACKED for form, _ in reader.declared.layers.values())


def _complete_config(source: SourceReader) -> dict[str, Any]:
    """The source's config with the defaults of its class, which config.json may leave out."""
    from transformers import AutoConfig

    complete: dict[str, Any] = AutoConfig.from_pretrained(source.directory, local_files_only=True).to_dict()
    return complete

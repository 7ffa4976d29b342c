"""Static checks of a quantized checkpoint: names, shapes, dtypes, finite values, scales, excludes, config.

What must be there is derived from the source's tensors and the format's description, not from what the
export says about itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.quantize.checkpoint_reader import MIXED, SourceReader
from pipeline.quantize.checks import Check, rule
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.reference import PACKED, LinearFormat

Broken = Iterator[tuple[str, str, str]]

_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale", ".pre_quant_scale", ".k_scale", ".v_scale")
_STORED_AS: Mapping[str, str] = {"F8_E4M3": "fp8", "I8": "int8", "U8": "int4"}

# Fields of the source's config.json that the export must repeat; engines read them from there.
CONFIG_FIELDS = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "sliding_window",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a stored tensor must look like; `optional` ones may be absent."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False


def check_structure(source: SourceReader, reader: HuggingFaceReader) -> list[Check]:
    """Check everything that needs no arithmetic.

    Args:
        source: the source checkpoint.
        reader: the quantized one, in the unified Hugging Face layout.
    """
    expected = expected_tensors(source, reader)
    checks = rule("structure.excludes", _bad_excludes(source, reader))
    checks += rule("structure.present", _missing(expected, reader))
    checks += rule("structure.unexpected", _unexpected(expected, reader))
    checks += rule("structure.dtype", _wrong_dtype(expected, reader))
    checks += rule("structure.shape", _wrong_shape(expected, reader))
    checks += rule("structure.config", _wrong_config(source, reader))
    checks += rule("structure.scales", _bad_scales(reader))
    return checks


def linear_modules(source: SourceReader) -> dict[str, tuple[int, int]]:
    """Linear layers of a source checkpoint, name -> (out, in): its 2-D weights but the token embedding."""
    return {
        name.removesuffix(".weight"): (info.shape[0], info.shape[1])
        for name, info in source.tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2 and not name.endswith("embed_tokens.weight")  # noqa: PLR2004
    }


def expected_tensors(source: SourceReader, reader: HuggingFaceReader) -> dict[str, Expected]:
    """Every tensor of the unified Hugging Face layout for this source and the export's format."""
    linears = linear_modules(source)
    plain = "BF16" if reader.dtype == "bfloat16" else "F16"
    tied = source.config.get("tie_word_embeddings") is not False
    expected: dict[str, Expected] = {}
    for name, info in source.tensors.items():
        module = name.removesuffix(".weight")
        if module in linears and reader.format_of(module) != "float":
            expected |= _quantized_tensors(module, linears[module], plain, reader)
        else:
            optional = name == "lm_head.weight" and tied
            expected[name] = Expected(dtypes=(plain,), shape=info.shape, optional=optional)
    if reader.kv_cache_algorithm == "FP8":
        scalar = Expected(dtypes=("F32",), shape=())
        for module in linears:
            if module.endswith((".k_proj", ".v_proj")):
                expected[f"{module}.{module[-6]}_scale"] = scalar
    return expected


def _quantized_tensors(
    module: str, shape: tuple[int, int], plain: str, reader: HuggingFaceReader
) -> dict[str, Expected]:
    """The tensors of one quantized layer; `plain` is the dtype of what is not quantized."""
    rows, columns = shape
    scalar = Expected(dtypes=("F32",), shape=())
    form, group_size = reader.format_of(module), reader.declared.group_size_of(module)
    smoothing = Expected(dtypes=(plain,), shape=(columns,), optional=form in PACKED)
    groups = columns // (group_size or columns)
    grouped = {
        "weight": Expected(dtypes=("U8",), shape=(rows // 2, columns)),
        "weight_scale": Expected(dtypes=("F32",), shape=(rows, groups)),
    }
    per_row = {
        "weight": Expected(dtypes=("I8",), shape=shape),
        "weight_scale": Expected(dtypes=("F32",), shape=(rows,)),
    }
    per_format: Mapping[LinearFormat, dict[str, Expected]] = {
        "float": {},
        "fp8": {"weight": Expected(dtypes=("F8_E4M3",), shape=shape), "weight_scale": scalar, "input_scale": scalar},
        "fp8_rowwise": {**per_row, "weight": Expected(dtypes=("F8_E4M3",), shape=shape)},
        "int8_sq": {**per_row, "input_scale": scalar, "pre_quant_scale": smoothing},
        "int8_wo": per_row,
        "int4_awq": {**grouped, "pre_quant_scale": smoothing},
        "int4_wo": {
            **grouped,
            "weight_zero_point": Expected(dtypes=("I8",), shape=(rows, groups), optional=True),
            "weight_input_order": Expected(dtypes=("I32",), shape=(columns,), optional=True),
        },
        "w4a8_awq": {**grouped, "pre_quant_scale": smoothing, "weight_scale_2": scalar, "input_scale": scalar},
    }
    return {f"{module}.{suffix}": tensor for suffix, tensor in per_format[form].items()}


def _missing(expected: Mapping[str, Expected], reader: HuggingFaceReader) -> Broken:
    for name, tensor in expected.items():
        if not tensor.optional and name not in reader.tensors:
            yield name.rpartition(".")[0], f"tensor {name} is missing", "missing tensor"


def _unexpected(expected: Mapping[str, Expected], reader: HuggingFaceReader) -> Broken:
    for name in reader.tensors:
        if name not in expected:
            yield name.rpartition(".")[0], f"tensor {name} belongs to no layer of the source in this format", ""


def _wrong_dtype(expected: Mapping[str, Expected], reader: HuggingFaceReader) -> Broken:
    for name, tensor in expected.items():
        info = reader.tensors.get(name)
        if info is not None and info.dtype not in tensor.dtypes:
            wanted = " or ".join(tensor.dtypes)
            stored = _STORED_AS.get(info.dtype)
            cause = f"the weight is stored as {stored}" if stored and name.endswith(".weight") else "wrong dtype"
            yield name.rpartition(".")[0], f"tensor {name} is {info.dtype}, {wanted} was expected", cause


def _wrong_shape(expected: Mapping[str, Expected], reader: HuggingFaceReader) -> Broken:
    for name, tensor in expected.items():
        info = reader.tensors.get(name)
        if info is None or info.shape == tensor.shape:
            continue
        module, _, suffix = name.rpartition(".")
        cause = ""
        group_size = reader.declared.group_size_of(module)
        if suffix == "weight_scale" and group_size and len(info.shape) == len(tensor.shape) and info.shape[-1]:
            columns = tensor.shape[-1] * group_size
            cause = f"wrong group size: {group_size} is declared, the scales are for {columns // info.shape[-1]}"
        elif info.shape == tensor.shape[::-1]:
            cause = "the tensor is transposed"
        yield module, f"tensor {name} is {list(info.shape)}, {list(tensor.shape)} was expected", cause


def _bad_scales(reader: HuggingFaceReader) -> Broken:
    """Scales that are not finite and positive; a zero scale erases weights, a negative one is no scale."""
    for name, info in reader.tensors.items():
        if not name.endswith(_SCALES) or info.dtype not in {"F32", "F16", "BF16"}:
            continue
        values = reader.tensors.floats(name)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            first = values.reshape(-1)[bad[0]]
            detail = f"{name}: {bad.size} of {values.size} values are not finite and positive (index {bad[0]}: {first})"
            yield name.rpartition(".")[0], detail, "corrupted scale"


def _bad_excludes(source: SourceReader, reader: HuggingFaceReader) -> Broken:
    """Layers whose storage contradicts the config's lists, which is how an engine decides what to load."""
    if reader.format == "float":
        return
    linears = linear_modules(source)
    for module in reader.quantized_modules():
        if module in linears and reader.format_of(module) == "float":
            yield module, *unlisted(mixed=reader.format == "mixed")
    for module in reader.declared.layers:
        if module not in linears:
            yield module, "quantized_layers lists it, and the source has no such layer", ""


def unlisted(*, mixed: bool) -> tuple[str, str]:
    """What is wrong with a quantized layer that the config says is at 16 bit, and the likely cause."""
    if mixed:
        return f"the layer is quantized and quantized_layers of {MIXED} does not list it", "missing entry"
    return "the layer is quantized and the exclude list says that it is not", "exclude list too wide"


def _wrong_config(source: SourceReader, reader: HuggingFaceReader) -> Broken:
    for field in CONFIG_FIELDS:
        if field not in source.config:
            continue
        wanted, stored = source.config[field], reader.config.get(field)
        if wanted != stored:
            yield "", f"config.json: {field} is {stored!r}, the source says {wanted!r}", ""

"""From our weight-only checkpoints to compressed-tensors' pack-quantized layout, code for code.

    int8_wo    8 bits, one scale per output
    int4_wo    4 bits, one scale per group of inputs
    int4_awq   the same, with its pre-quant scales folded: p of down_proj into the rows of up_proj, p of o_proj into
               the rows of v_proj. A row's scales are multiplied, its codes stay: one float32 rounding per scale

down(act(gate) * up * p) = down(act(gate) * (p * up)), and attention mixes v over positions, never over channels, so
both are the same function. With fewer KV heads than heads one row of v_proj serves several inputs of o_proj, which
have scales of their own: that cannot be folded, and is refused.

Layout: pipeline/quantize/foreign/compressed_tensors.py. Every weight is decoded again by that reader, which shares no
code with this writer but the packing of words, and compared before the artifact is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, Problem, VerificationError
from pipeline.host.files import link_or_copy
from pipeline.quantize.export import copy_tokenizer, write_json
from pipeline.quantize.foreign.packing import pack_columns
from pipeline.quantize.foreign.reader import read_foreign
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.reference import QuantizedLinear
from pipeline.quantize.shards import write_shards
from pipeline.quantize.structure import linear_modules
from pipeline.quantize.tensor_files import FloatArray

if TYPE_CHECKING:
    import torch

REPACKED: Final = ("int8_wo", "int4_wo", "int4_awq")
_GROUP: Final = "group_0"
# Of a layer: the one in front of it whose outputs are its inputs, channel by channel.
_FED_BY: Final = {"down_proj": "up_proj", "o_proj": "v_proj"}
_RECORDS: Final = ("quantization.json", "calibration.json")
_ONE_ROUNDING: Final = 2.0**-23


def repack(quantized: QuantizedCheckpoint, *, out: Path, progress: Progress) -> None:
    """Write a QuantizedCheckpoint directory to `out` whose hf/ is a compressed-tensors checkpoint.

    Raises:
        ConfigError: a layer that the layout does not hold, or a pre-quant scale that cannot be folded; by name.
        VerificationError: what was written decodes to other weights than the checkpoint's.
        IntegrityError: the checkpoint is incomplete.
    """
    source = HuggingFaceReader(quantized.path / "hf")
    modules = source.quantized_modules()
    progress.note(
        f"repack {source.name} as compressed-tensors: codes and scales are copied, nothing is quantized again"
    )
    factors = _row_factors(source, modules)
    hf = out / "hf"
    hf.mkdir(parents=True)
    with progress.track("repack layers", len(modules), "layers") as advance:
        write_shards(hf, _tensors(source, frozenset(modules), factors, advance))
    write_json(hf / "config.json", _config(source, modules))
    copy_tokenizer(source.directory, hf)
    for name in _RECORDS:
        link_or_copy(quantized.path / name, out / name)
    _prove(source, hf, factors, progress)


def _row_factors(source: HuggingFaceReader, modules: tuple[str, ...]) -> Mapping[str, FloatArray]:
    """What the rows of a layer are multiplied by, because the layer behind it scales its inputs.

    Raises:
        ConfigError: an input scale that no layer in front can take.
    """
    factors, problems = {}, []
    for module in modules:
        smoothing = source.linear(module).pre_quant_scale
        if smoothing is None or bool((smoothing == 1).all()):
            continue
        parent, _, name = module.rpartition(".")
        feeding = f"{parent}.{_FED_BY.get(name, '')}"
        if feeding not in modules:
            problems.append(
                Problem(where=module, message="has a pre-quant scale, and no quantized layer in front takes it.")
            )
        elif source.linear(feeding).shape[0] != smoothing.size:
            message = f"scales {smoothing.size} inputs, and {feeding} has {source.linear(feeding).shape[0]} outputs."
            problems.append(Problem(where=module, message=message))
        elif source.linear(feeding).bias is not None:
            problems.append(Problem(where=module, message=f"{feeding} has a bias, which folding would round."))
        else:
            factors[feeding] = smoothing
    if problems:
        raise ConfigError(
            f"{len(problems)} pre-quant scales of {source.name} cannot be folded without quantizing again",
            problems=problems[:20],
            hint="Pick int4_wo, which has none, or a target that multiplies inputs: tensorrt_llm, tensorrt_llm_llmapi.",
        )
    return factors


def _folded(layer: QuantizedLinear, factor: FloatArray | None) -> QuantizedLinear:
    """The layer with its rows multiplied by `factor` and without an input scale."""
    if factor is None or layer.scale is None:
        return replace(layer, pre_quant_scale=None)
    return replace(layer, scale=layer.scale * factor[:, None], pre_quant_scale=None)


def _tensors(
    source: HuggingFaceReader,
    modules: frozenset[str],
    factors: Mapping[str, FloatArray],
    advance: Any,  # noqa: ANN401
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, layer by layer."""
    import torch

    dtype = getattr(torch, source.dtype)
    done = set()
    for name in source.tensors:
        module = name.rpartition(".")[0]
        if module not in modules:
            yield name, torch.from_numpy(np.array(source.tensor(name))).to(dtype)
        elif module not in done:
            done.add(module)
            layer = _folded(source.linear(module), factors.get(module))
            for part, tensor in _packed(layer).items():
                yield f"{module}.{part}", torch.from_numpy(np.ascontiguousarray(tensor))
            if layer.bias is not None:
                yield f"{module}.bias", torch.from_numpy(layer.bias).to(dtype)
            advance(1)


def _packed(layer: QuantizedLinear) -> dict[str, Any]:
    """A layer's tensors in pack-quantized form: codes raised by half their range, consecutive inputs in a word."""
    if layer.scale is None or layer.zero_point is not None or layer.input_order is not None:
        raise ConfigError("zero points and act-order are passed on as they came, never repacked")
    bits = 8 if layer.format == "int8_wo" else 4
    codes = (layer.levels() + 2 ** (bits - 1)).astype(np.uint8)
    rows, columns = layer.shape
    return {
        "weight_packed": pack_columns(codes, bits),
        "weight_scale": layer.scale.reshape(rows, -1),
        "weight_shape": np.array([rows, columns], np.int64),
    }


def _config(source: HuggingFaceReader, modules: tuple[str, ...]) -> dict[str, Any]:
    """config.json with the compressed-tensors description of the layers."""
    bits = 8 if source.format == "int8_wo" else 4
    per_row = source.group_size is None
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if per_row else "group",
        "group_size": source.group_size,
        "dynamic": False,
    }
    plain = sorted(set(linear_modules(source)) - set(modules) | {"lm_head"} - set(modules))
    described = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            _GROUP: {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": plain,
        "kv_cache_scheme": None,
    }
    return {key: value for key, value in source.config.items() if key != "quantization_config"} | {
        "quantization_config": described
    }


def _prove(source: HuggingFaceReader, hf: Path, factors: Mapping[str, FloatArray], progress: Progress) -> None:
    """Decode every layer with the reader of other tools' checkpoints and compare.

    Raises:
        VerificationError: a weight differs.
    """
    written = read_foreign(hf)
    problems = []
    with progress.track("decode layers again", len(source.quantized_modules()), "layers") as advance:
        for module in source.quantized_modules():
            wanted, found = source.linear(module).weight, written.foreign_linear(module).weight()
            if module in factors:
                exact = wanted.astype(np.float64) * factors[module].astype(np.float64)[:, None]
                same = bool(np.all(np.abs(found - exact) <= 2 * _ONE_ROUNDING * np.abs(exact)))
            else:
                same = np.array_equal(wanted, found)
            if not same:
                problems.append(Problem(where=module, message="decodes to other weights than the checkpoint's."))
            advance(1)
    if written.quantized_modules() != source.quantized_modules():
        problems.append(Problem(message="other layers are quantized than in the checkpoint."))
    if problems:
        raise VerificationError("the repacked checkpoint is not the one that was verified", problems=problems[:20])

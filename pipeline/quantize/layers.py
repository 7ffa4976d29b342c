"""Checks of a quantized checkpoint's numbers: every weight against the source, every layer on recorded rows.

Layers are read one at a time; nothing of the checkpoint stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pipeline.core.progress import Progress
from pipeline.quantize.checkpoint_reader import CheckpointReader, SourceReader
from pipeline.quantize.checks import Check, rule
from pipeline.quantize.diagnosis import Suspect, input_cause, step_errors, weight_cause
from pipeline.quantize.limits import Limits
from pipeline.quantize.numerics import norm, relative_l2, sqnr_db
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.reference import PACKED, SMOOTHED, QuantizedLinear
from pipeline.quantize.structure import linear_modules
from pipeline.quantize.tensor_files import FloatArray, TensorFiles

# Norm -> the layers that read its output, within a decoder layer of the Llama family. Their pre-quant
# scale may be multiplied into the norm's weight instead of being stored.
FOLDS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}

_TINY = float(np.finfo(np.float32).tiny)
_TIE = 1e-4  # of a rounding step; the float32 arithmetic in front of the rounding errs by less


def folded_scales(source: HuggingFaceReader, reader: CheckpointReader) -> dict[str, FloatArray]:
    """Pre-quant scales that live in norms: norm parameter name -> p float32 [in], where the norm changed.

    p = exported weight / source weight, and 1 where the source's is 0 (that input is always 0). Only
    the Hugging Face export of AWQ folds; elsewhere a changed norm is an error that `check_plain_tensors` reports.
    """
    if reader.format not in PACKED & SMOOTHED or not isinstance(reader, HuggingFaceReader):
        return {}
    scales: dict[str, FloatArray] = {}
    for name in source.tensors:
        if name.split(".")[-2] not in FOLDS or not name.endswith(".weight") or not reader.has_tensor(name):
            continue
        before, after = source.tensor(name), reader.tensor(name)
        if after.shape == before.shape and not np.array_equal(after, reader.rounded(name, before)):
            scales[name] = np.where(before == 0, 1, after / np.where(before == 0, 1, before)).astype(np.float32)
    return scales


def check_plain_tensors(
    source: SourceReader, reader: CheckpointReader, folded: Mapping[str, FloatArray], *, skip: frozenset[str]
) -> list[Check]:
    """Every tensor that is not quantized equals the source's after rounding to 16 bit, bit for bit.

    A norm that carries a pre-quant scale must carry a positive one, and its readers must be quantized. Layers
    in `skip` are broken already.
    """
    return rule("tensor.equal", _changed(source, reader, folded, skip))


def _changed(
    source: SourceReader, reader: CheckpointReader, folded: Mapping[str, FloatArray], skip: frozenset[str]
) -> Iterator[tuple[str, str, str]]:
    quantized = set(reader.quantized_modules())
    tied = () if "lm_head.weight" in source.tensors else ("lm_head.weight",)
    for name in (*source.tensors, *tied):
        module = name.rpartition(".")[0]
        if module in skip or (module in quantized and name.endswith(".weight")) or not reader.has_tensor(name):
            continue
        if name in folded:
            yield from _bad_fold(name, folded[name], quantized)
            continue
        wanted, stored = reader.rounded(name, source.tensor(name)), reader.tensor(name)
        if stored.shape != wanted.shape:
            stored = stored[: len(wanted)]  # TensorRT-LLM pads the vocabulary; other shapes are structure's to report
        if stored.shape == wanted.shape and not np.array_equal(stored, wanted):
            differ = int(np.count_nonzero(stored != wanted))
            cause = "corrupted tensor"
            if stored.ndim == 2 and stored.shape[0] == stored.shape[1] and np.array_equal(stored.T, wanted):  # noqa: PLR2004
                cause = "the tensor is transposed"
            detail = f"{name}: {differ} of {wanted.size} values differ from the source rounded to {reader.dtype}"
            yield module, detail, cause


def _bad_fold(name: str, p: FloatArray, quantized: set[str]) -> Iterator[tuple[str, str, str]]:
    """Problems of a norm that differs from the source's in a checkpoint where norms may carry p."""
    module = name.rpartition(".")[0]
    layer, _, norm_name = module.rpartition(".")
    readers = [f"{layer}.{reader}" for reader in FOLDS[norm_name]]
    if not (np.isfinite(p) & (p > 0)).all():
        yield module, f"{name}: its ratio to the source is not finite and positive everywhere", "corrupted tensor"
    for reader in readers:
        if reader not in quantized:
            yield module, f"{name} carries a pre-quant scale, and {reader}, which reads it, is not quantized", ""


def check_layers(
    source: HuggingFaceReader,
    reader: CheckpointReader,
    probes: TensorFiles | None,
    limits: Limits,
    folded: Mapping[str, FloatArray],
    *,
    skip: frozenset[str],
    progress: Progress,
) -> list[Check]:
    """Check each quantized layer's weight and, on its recorded rows, its output.

    Args:
        source: the source checkpoint, unrounded.
        reader: the quantized checkpoint.
        probes: `<module>.input` and `<module>.output`, see `probes`; None when nothing was recorded.
        limits: of the format.
        folded: from `folded_scales`.
        skip: layers whose structure is broken already.
        progress: told of each layer.
    """
    checks: list[Check] = []
    linears = linear_modules(source)
    modules = [name for name in reader.quantized_modules() if name in linears and name not in skip]
    with progress.track("verify layers", len(modules), "layers") as advance:
        for module in modules:
            stored, original = reader.linear(module), source.linear(module)
            layer = with_folded_scale(module, stored, folded)
            weight_checks = _check_weight(module, layer, original.weight, limits, folded=layer is not stored)
            checks += weight_checks
            if probes is not None:
                weight_is_right = all(check.passed for check in weight_checks)
                checks += _check_output(module, layer, original, probes, limits, explain=weight_is_right)
            advance(1)
    return checks


def with_folded_scale(module: str, layer: QuantizedLinear, folded: Mapping[str, FloatArray]) -> QuantizedLinear:
    """The layer with the pre-quant scale that its norm carries, so that it takes the source's inputs."""
    for norm_name, readers in FOLDS.items():
        for reader in readers:
            if module.endswith(f".{reader}") and layer.pre_quant_scale is None:
                p = folded.get(f"{module.removesuffix(reader)}{norm_name}.weight")
                return layer if p is None else replace(layer, pre_quant_scale=p)
    return layer


def _check_weight(
    module: str, layer: QuantizedLinear, source: FloatArray, limits: Limits, *, folded: bool
) -> list[Check]:
    suspect = Suspect(layer=layer, source=source, max_step_error=limits.max_step_error, max_clip=limits.max_clip)
    p = layer.pre_quant_scale
    error = norm((layer.weight if p is None else layer.weight * p) - source) / max(norm(source), _TINY)
    worst = float(step_errors(layer, suspect.target).max())
    step = Check(name="weight.max_step_error", layer=module, value=worst, limit=limits.max_step_error)
    whole = Check(name="weight.relative_l2", layer=module, value=error, limit=limits.max_weight_error)
    if not step.passed:
        outside = int(suspect.bad.sum())
        detail = f"{outside} of {source.size} weights are not the source's rounded to the nearest code"
        detail += " (their pre-quant scale is in the norm in front)" if folded else ""
        step = replace(step, detail=detail, cause=weight_cause(suspect))
    elif not whole.passed:
        whole = replace(whole, detail="the scales are too coarse for this weight", cause="wrong group size or scale")
    return [step, whole]


def tie_allowance(layer: QuantizedLinear, source: FloatArray, x: FloatArray) -> FloatArray:
    """How far outputs may move, [n, out], because a weight lies exactly between two codes.

    Either code is right there. ModelOpt's fake quantization multiplies by the reciprocal of the scale and its
    packing divides by the scale, so the two choose differently, and an outlier in x makes one step visible.
    """
    p = layer.pre_quant_scale
    tied = np.abs(step_errors(layer, source if p is None else source / p) - 0.5) < _TIE
    return np.asarray(np.abs(layer.quantized_input(x)) @ (tied * layer.step()).T)


def _check_output(
    module: str,
    layer: QuantizedLinear,
    original: QuantizedLinear,
    probes: TensorFiles,
    limits: Limits,
    *,
    explain: bool,
) -> list[Check]:
    if f"{module}.input" not in probes or f"{module}.output" not in probes:
        return rule("layer.recorded", [(module, "probes.safetensors has no recorded rows of this layer", "")])
    x, recorded = probes.floats(f"{module}.input"), probes.floats(f"{module}.output")
    y = layer.forward(x)
    to_fake_quant, to_source = relative_l2(y, recorded), relative_l2(y, original.forward(x))
    if explain and to_fake_quant > limits.max_fake_quant_error:
        beyond = np.maximum(np.abs(y - recorded) - tie_allowance(layer, original.weight, x), 0)
        to_fake_quant = norm(beyond) / max(norm(recorded), _TINY)
    fake = Check(name="layer.fake_quant_error", layer=module, value=to_fake_quant, limit=limits.max_fake_quant_error)
    if explain and not fake.passed:
        cause = input_cause(layer, x, recorded, limits.max_fake_quant_error)
        fake = replace(fake, detail="the stored layer does not compute what was calibrated", cause=cause)
    return [
        fake,
        Check(name="layer.source_error", layer=module, value=to_source, limit=limits.max_layer_error),
        Check(name="layer.source_sqnr_db", layer=module, value=sqnr_db(to_source), limit=None, bound="min"),
    ]

"""Checks of a quantized checkpoint's numbers: every weight against the source, every layer on recorded rows.

Files are mapped and read in blocks of rows, on all cores; nothing of the checkpoint stays in memory. What explains
a failure takes longer and is computed for layers that failed, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pipeline.core.progress import Progress
from pipeline.quantize.checkpoint_reader import CheckpointReader, SourceReader
from pipeline.quantize.checks import Check, rule
from pipeline.quantize.diagnosis import Suspect, input_cause, step_errors, weight_cause
from pipeline.quantize.limits import Limits
from pipeline.quantize.numerics import norm, relative_l2, sqnr_db
from pipeline.quantize.readers import HuggingFaceReader
from pipeline.quantize.reference import PACKED, SMOOTHED, LinearFormat, QuantizedLinear
from pipeline.quantize.side_by_side import in_order, row_blocks
from pipeline.quantize.structure import linear_modules
from pipeline.quantize.tensor_files import FloatArray, FloatRows, TensorFiles
from pipeline.quantize.weight_pass import Measured, measure

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
    if not isinstance(reader, HuggingFaceReader):
        return {}
    scales: dict[str, FloatArray] = {}
    for name in source.tensors:
        readers = norm_readers(name)
        if not any(reader.format_of(layer) in PACKED & SMOOTHED for layer in readers) or not reader.has_tensor(name):
            continue
        before, after = source.tensor(name), reader.tensor(name)
        if after.shape == before.shape and not np.array_equal(after, reader.rounded(name, before)):
            scales[name] = np.where(before == 0, 1, after / np.where(before == 0, 1, before)).astype(np.float32)
    return scales


def norm_readers(name: str) -> list[str]:
    """The layers that read the output of the norm whose weight is called `name`; none for other parameters."""
    module, _, parameter = name.rpartition(".")
    layer, _, norm_name = module.rpartition(".")
    return [f"{layer}.{reader}" for reader in FOLDS.get(norm_name, ())] if parameter == "weight" else []


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
    plain = [
        name
        for name in (*source.tensors, *tied)
        if not (name.endswith(".weight") and name.removesuffix(".weight") in quantized)
        and name.rpartition(".")[0] not in skip
        and reader.has_tensor(name)
    ]
    for name, finding in zip(plain, in_order(partial(_compare, source, reader, folded), plain), strict=True):
        if name in folded:
            yield from _bad_fold(name, folded[name], quantized)
        elif finding is not None:
            yield name.rpartition(".")[0], *finding


def _compare(
    source: SourceReader, reader: CheckpointReader, folded: Mapping[str, FloatArray], name: str
) -> tuple[str, str] | None:
    """What is wrong with a tensor that must be the source's, rounded, and the cause; None when it is."""
    if name in folded or _is_copy(source, reader, name):
        return None
    wanted, stored = reader.rounded(name, source.tensor(name)), reader.tensor(name)
    if stored.shape != wanted.shape:
        stored = stored[: len(wanted)]  # TensorRT-LLM pads the vocabulary; other shapes are structure's to report
    if stored.shape != wanted.shape or np.array_equal(stored, wanted):
        return None
    differ = int(np.count_nonzero(stored != wanted))
    cause = "corrupted tensor"
    if stored.ndim == 2 and stored.shape[0] == stored.shape[1] and np.array_equal(stored.T, wanted):  # noqa: PLR2004
        cause = "the tensor is transposed"
    return f"{name}: {differ} of {wanted.size} values differ from the source rounded to {reader.dtype}", cause


def _is_copy(source: SourceReader, reader: CheckpointReader, name: str) -> bool:
    """Whether a tensor is, bit for bit, the source's or what that rounds to; found out without widening all of it.

    False leaves it open: NaN is unequal to itself, and other layouts than the source's are compared as a whole.
    """
    if not isinstance(source, HuggingFaceReader) or not isinstance(reader, HuggingFaceReader):
        return False
    before, after = source.tensor_rows(name), reader.tensor_rows(name)
    if before.shape != after.shape or not before.shape:
        return False
    same_type = before.dtype == after.dtype
    for rows in row_blocks(before.shape):
        values = after.rows(rows)
        if same_type and np.array_equal(before.bits[rows], after.bits[rows]):
            equal = not np.isnan(values).any()
        else:
            equal = np.array_equal(reader.rounded(name, before.rows(rows)), values)
        if not equal:
            return False
    return True


def _bad_fold(name: str, p: FloatArray, quantized: set[str]) -> Iterator[tuple[str, str, str]]:
    """Problems of a norm that differs from the source's in a checkpoint where norms may carry p."""
    module = name.rpartition(".")[0]
    if not (np.isfinite(p) & (p > 0)).all():
        yield module, f"{name}: its ratio to the source is not finite and positive everywhere", "corrupted tensor"
    for reader in norm_readers(name):
        if reader not in quantized:
            yield module, f"{name} carries a pre-quant scale, and {reader}, which reads it, is not quantized", ""


def check_layers(
    source: HuggingFaceReader,
    reader: CheckpointReader,
    probes: TensorFiles | None,
    limits: Mapping[LinearFormat, Limits],
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
        limits: of each format.
        folded: from `folded_scales`.
        skip: layers whose structure is broken already.
        progress: told of each layer.
    """
    linears = linear_modules(source)
    modules = [name for name in reader.quantized_modules() if name in linears and name not in skip]

    def opened() -> Iterator[_Pair]:
        for module in modules:
            stored = reader.linear(module)
            layer = with_folded_scale(module, stored, folded)
            yield _Pair(
                module=module,
                layer=layer,
                folded=layer is not stored,
                source=source.tensor_rows(f"{module}.weight"),
                source_bias=source.tensor(f"{module}.bias") if source.has_tensor(f"{module}.bias") else None,
            )

    def check(pair: _Pair) -> list[Check]:
        return _check_layer(pair, source, probes, limits[pair.layer.format])

    checks: list[Check] = []
    with progress.track("verify layers", len(modules), "layers") as advance:
        for found in in_order(check, opened()):
            checks += found
            advance(1)
    return checks


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A stored layer, its pre-quant scale put back when a norm carries it (`folded`), and the source's weight."""

    module: str
    layer: QuantizedLinear
    folded: bool
    source: FloatRows
    source_bias: FloatArray | None


def _check_layer(pair: _Pair, source: HuggingFaceReader, probes: TensorFiles | None, limits: Limits) -> list[Check]:
    module, layer = pair.module, pair.layer
    recorded = probes is not None and f"{module}.input" in probes and f"{module}.output" in probes
    x = (
        probes.floats(f"{module}.input")
        if probes is not None and recorded
        else np.empty((0, layer.shape[1]), np.float32)
    )
    measured = measure(layer, pair.source, x, max_clip=limits.max_clip)
    checks = _check_weight(pair, measured, source, limits)
    if probes is None:
        return checks
    if not recorded:
        return checks + rule("layer.recorded", [(module, "probes.safetensors has no recorded rows of this layer", "")])
    weight_is_right = all(check.passed for check in checks)
    y = probes.floats(f"{module}.output")
    return checks + _check_output(pair, measured, (x, y), source, limits, explain=weight_is_right)


def with_folded_scale(module: str, layer: QuantizedLinear, folded: Mapping[str, FloatArray]) -> QuantizedLinear:
    """The layer with the pre-quant scale that its norm carries, so that it takes the source's inputs."""
    for norm_name, readers in FOLDS.items():
        for reader in readers:
            if module.endswith(f".{reader}") and layer.pre_quant_scale is None:
                p = folded.get(f"{module.removesuffix(reader)}{norm_name}.weight")
                return layer if p is None else replace(layer, pre_quant_scale=p)
    return layer


def _check_weight(pair: _Pair, measured: Measured, source: HuggingFaceReader, limits: Limits) -> list[Check]:
    module, layer = pair.module, pair.layer
    step = Check(name="weight.max_step_error", layer=module, value=measured.step_error, limit=limits.max_step_error)
    whole = Check(name="weight.relative_l2", layer=module, value=measured.weight_error, limit=limits.max_weight_error)
    if not step.passed:
        weight = source.linear(module).weight
        suspect = Suspect(layer=layer, source=weight, max_step_error=limits.max_step_error, max_clip=limits.max_clip)
        outside = int(suspect.bad.sum())
        detail = f"{outside} of {weight.size} weights are not the source's rounded to the nearest code"
        detail += " (their pre-quant scale is in the norm in front)" if pair.folded else ""
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
    pair: _Pair,
    measured: Measured,
    probe: tuple[FloatArray, FloatArray],
    source: HuggingFaceReader,
    limits: Limits,
    *,
    explain: bool,
) -> list[Check]:
    """Compare the layer's outputs for a probe's x with its recorded ones and with the source's."""
    module, layer, y, wanted = pair.module, pair.layer, measured.outputs, measured.source_outputs
    y = y if layer.bias is None else y + layer.bias
    wanted = wanted if pair.source_bias is None else wanted + pair.source_bias
    x, recorded = probe
    to_fake_quant, to_source = relative_l2(y, recorded), relative_l2(y, wanted)
    if explain and to_fake_quant > limits.max_fake_quant_error:
        beyond = np.maximum(np.abs(y - recorded) - tie_allowance(layer, source.linear(module).weight, x), 0)
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

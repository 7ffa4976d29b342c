"""Proof that a quantized checkpoint computes what its source computes; always on, before anything compiles it.

    structure   names, shapes, dtypes, finite positive scales, excludes, config     (structure)
    tensors     what is not quantized equals the source after 16-bit rounding       (layers)
    weights     every weight is the source's, rounded to the nearest code           (layers)
    layers      recorded inputs give what ModelOpt's fake quantization gave         (layers)
    end to end  KL divergence, top-1 agreement and perplexity on held text          (fake_quant)

Bit equality of whole-model logits is demanded of 16-bit checkpoints only. With quantized activations one
rounding flip grows over the layers: two correct implementations of the same formulas agree on nine of
ten top-1 tokens, so each layer is checked on its own recorded input instead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.formats import UNQUANTIZED
from pipeline.config.schema import VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.quantize.calibration import draw_rows
from pipeline.quantize.checkpoint_reader import CheckpointReader, SourceReader, model_order, read_json
from pipeline.quantize.checks import Check, rounded, rule
from pipeline.quantize.documents import SHIPPED_HELD, read_documents
from pipeline.quantize.fake_quant import build_model, compare_models
from pipeline.quantize.foreign.check import check_converted
from pipeline.quantize.foreign.passing import PassedOnReader, check_passed_on
from pipeline.quantize.foreign.reader import is_quantized, read_foreign
from pipeline.quantize.layers import check_layers, check_plain_tensors, folded_scales
from pipeline.quantize.limits import CLIPPED, LIMITS, Limits, limits_for, limits_of_mix
from pipeline.quantize.numerics import Distribution
from pipeline.quantize.proof import require_proven
from pipeline.quantize.readers import HuggingFaceReader, read_quantized
from pipeline.quantize.reference import LinearFormat
from pipeline.quantize.sparsity import check_sparsity, read_sparsity
from pipeline.quantize.structure import check_structure
from pipeline.quantize.tasks import mark_answers, read_task, task_digest
from pipeline.quantize.tensor_files import TensorFiles
from pipeline.quantize.text_encoder import TextEncoder
from pipeline.quantize.trtllm_reader import TensorRTLLMReader
from pipeline.quantize.trtllm_structure import check_trtllm_structure

SCHEMA_VERSION = 1
_SEQUENCE_LENGTH = 512
_WORST_LAYERS = 5
TRAINING = "training.json"  # what finetune writes beside the weights


def verify(
    source: SourceCheckpoint,
    quantized: QuantizedCheckpoint,
    limits: VerifyConfig,
    *,
    out: Path,
    progress: Progress,
    tasks: Sequence[Path] = (),
    original: SourceCheckpoint | None = None,
) -> None:
    """Check `quantized` against `source` and write report.json to `out`.

    Where `source` holds weights that a stage changed, `original` is the 16-bit model that the user has: tensors and
    layers are held to the former, text and tasks to the latter.

    Besides the checks, the report holds sums over blocks of text and each task's answers, right or wrong, of
    both models: what the quality gate makes its intervals of.

    Raises:
        VerificationError: a check failed (see `require_proven`). The report is written.
        IntegrityError: a file is missing, damaged or of a kind that cannot be read.
        ConfigError: the held text is unusable.
    """
    reader = _open(quantized.path)
    checks = static_checks(source, quantized, limits, progress=progress)
    baseline = limits.reference if is_quantized(source.path) else (original or source).path
    scored = None
    if all(check.passed for check in checks) and baseline is not None:
        scored = _score(baseline, reader, limits, tasks, progress)
        bounds = limits_of_mix(formats_in(reader), limits)
        checks += _check_end_to_end(scored.text, bounds, judged=_judged(source.path, limits))
        progress.note(_summary(reader, scored.text))
    if original is not None:
        progress.note("tensors and layers were held to the changed weights, text and tasks to the 16-bit source")
    if len(_judged(source.path, limits)) < len(_END_TO_END):
        progress.note("sparse: end to end only limits of the config count (verify.max_kl and the like, or quality)")
    not_run = _not_run(reader, scored_against=baseline)
    for words in not_run:
        progress.note(f"not run: {words}")
    _write_report(out / "report.json", reader, checks, scored, not_run, changed=_changes(source.path))
    require_proven(out)


def static_checks(
    source: SourceCheckpoint, quantized: QuantizedCheckpoint, limits: VerifyConfig, *, progress: Progress
) -> list[Check]:
    """Everything that needs no text: structure, every tensor, every weight, every layer on its recorded rows."""
    reader = _open(quantized.path)
    if is_quantized(source.path):
        return _check_converted(source, quantized, reader, progress)
    return _check_made_here(source, quantized, reader, limits, progress)


def _open(artifact: Path) -> CheckpointReader:
    """The reader of a checkpoint in one of our layouts, or in another tool's that was passed on as it is."""
    passed_on = read_json(artifact / "quantization.json").get("passed_on")
    return PassedOnReader(artifact) if passed_on else read_quantized(artifact)


def _check_made_here(
    source: SourceCheckpoint,
    quantized: QuantizedCheckpoint,
    reader: CheckpointReader,
    limits: VerifyConfig,
    progress: Progress,
) -> list[Check]:
    """Structure, then every tensor and layer against the source's numbers."""
    bounds = {form: limits_for(form, limits) for form in LIMITS}
    if read_json(quantized.path / "quantization.json").get("awq") in {"clip", "full"}:
        bounds["int4_awq"] = replace(bounds["int4_awq"], max_clip=CLIPPED)
    original = HuggingFaceReader(source.path)
    checks = _check_structure(original, reader) + _check_record(quantized.path, reader)
    broken = frozenset(check.layer for check in checks if not check.passed)
    folded = folded_scales(original, reader)
    checks += check_plain_tensors(original, reader, folded, skip=broken)
    probes = TensorFiles(quantized.path, "probes.safetensors") if reader.format != "float" else None
    checks += check_layers(original, reader, probes, bounds, folded, skip=broken, progress=progress)
    return checks + check_sparsity(source.path, reader, skip=broken)


def _check_converted(
    source: SourceCheckpoint, quantized: QuantizedCheckpoint, reader: CheckpointReader, progress: Progress
) -> list[Check]:
    """Structure, then every tensor and decoded weight against what the checkpoint made elsewhere stores."""
    original = read_foreign(source.path)
    if isinstance(reader, PassedOnReader):
        return _check_record(quantized.path, reader) + check_passed_on(original, reader, progress)
    checks = _check_structure(original, reader) + _check_record(quantized.path, reader)
    broken = frozenset(check.layer for check in checks if not check.passed)
    checks += check_plain_tensors(original, reader, {}, skip=broken)
    return checks + check_converted(original, reader, skip=broken, progress=progress)


def formats_in(reader: CheckpointReader) -> tuple[LinearFormat, ...]:
    """The formats of a checkpoint's quantized layers, sorted; float where none is quantized."""
    return tuple(sorted({reader.format_of(name) for name in reader.quantized_modules()})) or ("float",)


def _check_structure(original: SourceReader, reader: CheckpointReader) -> list[Check]:
    if isinstance(reader, TensorRTLLMReader):
        return check_trtllm_structure(original, reader)
    if isinstance(reader, HuggingFaceReader):
        return check_structure(original, reader)
    raise TypeError(f"no structure checks for {type(reader).__name__}")


def _check_record(directory: Path, reader: CheckpointReader) -> list[Check]:
    """quantization.json, which says what was asked for, agrees with what is stored."""
    return rule("structure.record", _unlike_record(read_json(directory / "quantization.json"), reader))


def _unlike_record(record: Mapping[str, Any], reader: CheckpointReader) -> Iterator[tuple[str, str, str]]:
    recorded, stored = set(record.get("quantized_layers", ())), set(reader.quantized_modules())
    for name in model_order(recorded - stored):
        yield name, "quantization.json says quantized, the tensors say 16 bit", "missing tensor"
    for name in model_order(stored - recorded):
        yield name, "the tensors say quantized, quantization.json does not", ""
    asked = str(record.get("kv_cache")).upper() if record.get("kv_cache_scales") else None
    if reader.kv_cache_algorithm != asked:
        yield "", f"the KV cache is {reader.kv_cache_algorithm or '16 bit'}, {asked or '16 bit'} was asked for", ""
    if reader.name != record.get("format"):
        yield "", f"the checkpoint is {reader.name}, {record.get('format')} was asked for", ""
    for name, asked_form in (record.get("formats") or {}).items():
        if name in stored and reader.format_of(name) != asked_form:
            yield name, f"the checkpoint says {reader.format_of(name)}, {asked_form} was asked for", "wrong entry"


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Both models on the same text and questions; `tasks`: name, and per question right (1) or wrong (0)."""

    text: Distribution
    sequences: int
    tasks: Sequence[Mapping[str, Any]]


def _score(
    source: Path, reader: CheckpointReader, limits: VerifyConfig, tasks: Sequence[Path], progress: Progress
) -> _Scores:
    """Run both models on held text; the source is rounded to 16 bit as the checkpoint's layout rounds it."""
    ids = held_ids(source, limits)
    config_directory = reader.directory if isinstance(reader, HuggingFaceReader | PassedOnReader) else source
    sides = (
        (source, HuggingFaceReader(source, rounding=reader.rounded)),
        (config_directory, reader),
    )
    baseline, tested = (build_model(directory, side, resident=False) for directory, side in sides)
    text = compare_models(baseline, tested, ids, progress)
    # Answers are generated token by token, so the layers stay in memory, of one model at a time.
    questions = {path.name: read_task(path) for path in tasks}
    marks = [
        mark_answers(build_model(directory, side, resident=True), source, questions, progress) if tasks else {}
        for directory, side in sides
    ]
    answers = [
        {
            "file": path.name,
            "sha256": task_digest(path),
            "source": marks[0][path.name],
            "quantized": marks[1][path.name],
        }
        for path in tasks
    ]
    return _Scores(text=text, sequences=len(ids), tasks=answers)


def held_ids(directory: Path, limits: VerifyConfig) -> npt.NDArray[np.int64]:
    """Tokenize the held text into equal sequences: int64 [sequences, length], about num_tokens in all.

    Raises:
        ConfigError: the text gives no usable document.
    """
    longest = read_json(directory / "config.json").get("max_position_embeddings", _SEQUENCE_LENGTH)
    length = min(_SEQUENCE_LENGTH, longest, limits.num_tokens)
    drawn = draw_rows(
        read_documents(limits.dataset or SHIPPED_HELD, key="verify.dataset"),
        TextEncoder(directory),
        num_samples=limits.num_tokens // length,
        max_seq_len=length,
        seed=0,
    )
    return np.array(drawn.rows, np.int64)


def _not_run(reader: CheckpointReader, *, scored_against: Path | None) -> list[str]:
    """What the built engine computes and these checks do not, in words for a user."""
    words = []
    if scored_against is None:
        words.append("end to end: the source is quantized already, and verify.reference names no 16-bit checkpoint")
    if reader.format == "float" and reader.name not in UNQUANTIZED:
        words.append(
            f"the rounding to {reader.name}: trtllm-build does it when it loads the 16-bit weights checked here"
        )
    if isinstance(reader, PassedOnReader):
        words.append(f"what the runtime makes of the {reader.method} files, which are passed on as they are")
    if reader.kv_cache_algorithm is not None:
        words.append(f"the {reader.kv_cache_algorithm} KV cache: its scales are checked, its effect on text is not")
    return words


_END_TO_END = ("max_kl", "min_top1_agreement", "max_perplexity_increase")


def _judged(source: Path, limits: VerifyConfig) -> frozenset[str]:
    """The end-to-end limits that hold: all, but of a sparse model those of the config alone.

    A format's own limits are of dense weights; how much zeros may cost is for the user to say.
    """
    dense = read_sparsity(source) is None
    return frozenset(name for name in _END_TO_END if dense or getattr(limits, name) is not None)


def _check_end_to_end(scored: Distribution, bounds: Limits, *, judged: frozenset[str]) -> list[Check]:
    """The limits on what a user of the model would notice; what is not `judged` is reported."""
    kl, agreement, increase = (getattr(bounds, name) if name in judged else None for name in _END_TO_END)
    return [
        Check(name="model.mean_kl_nats", value=scored.mean_kl, limit=kl),
        Check(name="model.top1_agreement", value=scored.top1_agreement, limit=agreement, bound="min"),
        Check(name="model.perplexity_increase", value=scored.perplexity_increase, limit=increase),
    ]


def _write_report(
    path: Path,
    reader: CheckpointReader,
    checks: Sequence[Check],
    scored: _Scores | None,
    not_run: Sequence[str],
    *,
    changed: Mapping[str, Any],
) -> None:
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "format": reader.name,
        "formats": _by_format(reader, checks),
        "group_size": reader.group_size,
        "passed": all(check.passed for check in checks),
        "summary": {
            "checks": len(checks),
            "failed": sum(not check.passed for check in checks),
            "quantized_layers": len(reader.quantized_modules()),
        },
        "end_to_end": None if scored is None else _end_to_end(scored.text),
        "blocks": None if scored is None else _blocks(scored),
        "tasks": [] if scored is None else list(scored.tasks),
        "not_run": list(not_run),
        "changed_weights": dict(changed),
        "worst_layers": _worst(checks),
        "checks": [check.to_json() for check in checks],
    }
    path.write_text(json.dumps(report, indent=2, sort_keys=True, allow_nan=False) + "\n", "utf-8")


def _changes(source: Path) -> Mapping[str, Any]:
    """What was done to the weights before they were quantized; the end-to-end scores include what it cost."""
    sparse, training = read_sparsity(source), source / TRAINING
    changed: dict[str, Any] = {}
    if sparse is not None:
        changed["sparsity"] = {key: sparse[key] for key in ("method", "pattern")}
    if training.is_file():
        record = read_json(training)
        changed["training"] = {"method": record["method"], "tokens": record["tokens"], **record["settings"]}
    return changed


def _by_format(reader: CheckpointReader, checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """Format -> how many layers have it, and the largest value of each measure among them."""
    table: dict[str, dict[str, Any]] = {}
    formats = {name: reader.format_of(name) for name in reader.quantized_modules()}
    for form in sorted(set(formats.values())):
        measured: dict[str, float] = {}
        for check in checks:
            if (
                formats.get(check.layer) == form
                and check.bound == "max"
                and check.name.startswith(("weight.", "layer."))
            ):
                measured[check.name] = max(check.value, measured.get(check.name, 0.0))
        values = {name: rounded(value) for name, value in sorted(measured.items())}
        table[form] = {"layers": sum(other == form for other in formats.values()), "largest": values}
    return table


def _blocks(scored: _Scores) -> dict[str, list[float | str]]:
    return {name: [rounded(value) for value in sums] for name, sums in scored.text.blocks(scored.sequences).items()}


def _end_to_end(scored: Distribution) -> Mapping[str, Any]:
    return {
        "tokens": scored.tokens,
        "mean_kl_nats": rounded(scored.mean_kl),
        "top1_agreement": rounded(scored.top1_agreement),
        "source_perplexity": rounded(scored.baseline_perplexity),
        "perplexity": rounded(scored.perplexity),
        "perplexity_increase": rounded(scored.perplexity_increase),
    }


def _worst(checks: Sequence[Check]) -> dict[str, list[dict[str, Any]]]:
    """Per measure, the layers that come closest to its limit."""
    names = sorted(
        {
            check.name
            for check in checks
            if check.layer and check.limit is not None and check.name.startswith(("weight.", "layer."))
        }
    )
    return {
        name: [
            {"layer": check.layer, "value": rounded(check.value)}
            for check in sorted((c for c in checks if c.name == name), key=lambda c: (-c.value, c.layer))[
                :_WORST_LAYERS
            ]
        ]
        for name in names
    }


def _summary(reader: CheckpointReader, scored: Distribution) -> str:
    counts = Counter(reader.format_of(name) for name in reader.quantized_modules())
    parts = ", ".join(f"{form} in {count}" for form, count in sorted(counts.items()))
    name = f"{reader.name} ({parts} layers)" if reader.format == "mixed" else reader.name
    return (
        f"{name}: perplexity {scored.perplexity:.4g} (source {scored.baseline_perplexity:.4g}, "
        f"{scored.perplexity_increase:+.1%}), KL {scored.mean_kl:.3g} nats, top-1 agreement {scored.top1_agreement:.1%}"
    )

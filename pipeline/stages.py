"""The product in one file: every stage of a build, in order, and what each depends on.

    BuildConfig ─ resolve ─▶ SourceCheckpoint ─ sparsify? ─▶ SourceCheckpoint ─ calibrate? ─▶ Calibration
    SourceCheckpoint, Calibration ─ finetune? ─▶ SourceCheckpoint ─ quantize ─▶ QuantizedCheckpoint
    QuantizedCheckpoint ─ verify ─▶ VerificationReport ─ gate? ─▶ QualityVerdict
    QuantizedCheckpoint ─ compile ─▶ Engine ─ emit ─▶ ModelRepository

With format auto, two steps come before calibrate: Sensitivities ◀─ score (whatever the budget), FormatChoice ◀─ choose.
For the target vllm, `repack` writes weight-only formats in the layout that vLLM reads before `compile` takes them.

`resolve` finds the checkpoint and refuses what cannot work, before anything heavy starts. Every other
stage is a `Step`: its params, inputs and tool versions make its key, and the store skips a step whose
key it has seen. So a rebuild that changes nothing is instant, a change of `serving` only emits again,
and a change of `quantization` starts at quantize.

Here is the order, and what each step reads; what a step does and what else is in its key is in `steps/`: making,
proving and deploying. The rooms (checkpoints, quantize, targets, triton) do not know each other; they meet there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.digest import FileHasher
from pipeline.core.stage import Step
from pipeline.examine import Build
from pipeline.quantize.formats import needs_text
from pipeline.steps import deploying, making, proving
from pipeline.steps.asked import export_layout, is_repacked

Source = str | SourceCheckpoint
"""The step that makes the source, or the source where it lies."""


def steps(
    build: Build, hasher: FileHasher, workspace: Path, choice: Mapping[str, Any] | None = None
) -> tuple[Step, ...]:
    """Return the steps of a build in order, each with what it reads: role -> name of an earlier step.

    Args:
        build: from `examine`.
        hasher: for the files that the config names.
        workspace: the store's directory, for what may be kept between builds but is no artifact.
        choice: which step of a ladder this build is and what was rejected before it, with numbers; the
            repository tells it.
    """
    config = build.config
    ordered: list[Step] = []
    source: Source = "import"
    if build.source.needs_import:
        ordered.append(making.import_source(build))
    else:
        source = SourceCheckpoint(path=build.source.location, digest=build.source.digest)

    if build.made is None:
        ordered += _quantized(build, source, hasher)
    else:
        ordered.append(making.convert(build, build.made, {"source": source}))
        ordered.append(proving.verify(build, {"source": source, "quantized": "convert"}, hasher))

    reports = {"choice": "choose"} if config.quantization.format == "auto" else {}
    if config.quality.limited or choice is not None:
        inputs = {"verification": "verify", "quantized": build.maker}
        ordered.append(proving.gate(build, inputs, choice or {}))
        reports["quality"] = "gate"

    served = build.maker
    if is_repacked(build):
        ordered.append(making.repack({"quantized": served}))
        served = "repack"
    ordered.append(deploying.compile_(build, {"quantized": served}, workspace))
    ordered.append(deploying.emit(build, {"engine": "compile", **reports}))
    return tuple(ordered)


def _quantized(build: Build, source: Source, hasher: FileHasher) -> Iterator[Step]:
    """From a 16-bit source to its proof; `weights` is what is quantized: the source, or what was made of it."""
    config, weights = build.config, source
    if config.sparsity.method != "none":
        yield making.sparsify(build, {"source": source}, hasher)
        weights = "sparsify"

    chosen = {}
    if config.quantization.format == "auto":
        yield making.score(build, {"source": weights}, hasher)
        yield making.choose(build, {"sensitivities": "score"})
        chosen = {"choice": "choose"}

    calibrated = {}
    if needs_text(config.quantization, export=export_layout(config)):
        yield making.calibrate(build, {"source": weights, **chosen}, hasher)
        calibrated = {"calibration": "calibrate"}

    if config.finetune.method != "none":
        yield making.finetune(build, {"source": weights, **chosen, **calibrated}, hasher)
        weights = "finetune"

    yield making.quantize(build, {"source": weights, **chosen, **calibrated})
    original = {} if weights == source else {"original": source}
    yield proving.verify(build, {"source": weights, "quantized": "quantize", **original}, hasher)

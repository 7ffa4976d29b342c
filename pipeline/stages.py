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

The rooms (checkpoints, quantize, targets, triton) do not know each other; they meet here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.checkpoints.resolve import resolve
from pipeline.config.rules import AWQ, UNQUANTIZED, formats_of, has_groups
from pipeline.config.schema import BuildConfig, CalibrationConfig, QuantizationConfig, SourceConfig
from pipeline.core.artifacts import (
    Artifact,
    Calibration,
    Engine,
    FormatChoice,
    ModelRepository,
    QualityVerdict,
    QuantizedCheckpoint,
    Sensitivities,
    SourceCheckpoint,
    VerificationReport,
)
from pipeline.core.digest import FileHasher, digest_tree
from pipeline.core.stage import Step, StepContext
from pipeline.errors import VerificationError
from pipeline.examine import Build
from pipeline.host.files import write_atomic
from pipeline.host.probe import probe, toolchain
from pipeline.measure.gate import judge
from pipeline.quantize.formats import WantedCheckpoint, needs_text, stores_kv_scales
from pipeline.targets.vllm.compile import VERSION

if TYPE_CHECKING:
    from pipeline.quantize.foreign.convert import Made

# What the openvino target reads of the engine section; the rest must not recompile it.
OPENVINO_READS = {
    "target",
    "dtype",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_context",
    "num_threads",
    "dynamic_quantization",
}
VLLM_READS = {
    "target",
    "gpu",
    "dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_context",
}
OPENVINO_READS_OF_KV_CACHE = {"size_gib", "enable_block_reuse"}
EXECUTION_ONLY = {"workers", "log_level", "input_timing_cache", "output_timing_cache"}

A = TypeVar("A", bound=Artifact)


def steps(
    build: Build, hasher: FileHasher, workspace: Path, choice: Mapping[str, Any] | None = None
) -> tuple[Step, ...]:
    """Return the steps of a build in order.

    Args:
        build: from `examine`.
        hasher: for the files that the config names.
        workspace: the store's directory, for what may be kept between builds but is no artifact.
        choice: which step of a ladder this build is and what was rejected before it, with numbers; the
            repository tells it.
    """
    gated = build.config.quality.limited or choice is not None
    checkpoint: str | SourceCheckpoint = "import"
    ordered = []
    if build.source.needs_import:
        ordered.append(_import(build))
    else:
        checkpoint = SourceCheckpoint(path=build.source.location, digest=build.source.digest)
    weights = checkpoint
    if build.config.sparsity.method != "none":
        ordered.append(_sparsify(build, checkpoint, hasher))
        weights = "sparsify"
    if build.config.quantization.format == "auto":
        ordered += [_score(build, weights, hasher), _choose(build)]
    calibrated = needs_text(build.config.quantization, export=_export(build.config))
    if build.made is None and calibrated:
        ordered.append(_calibrate(build, weights, hasher))
    if build.config.finetune.method != "none":
        ordered.append(_finetune(build, weights, hasher, calibrated=calibrated))
        weights = "finetune"
    ordered += [
        _quantize(build, weights, calibrated=calibrated)
        if build.made is None
        else _convert(build, build.made, checkpoint),
        _verify(build, checkpoint, weights, hasher),
        *([_gate(build, choice or {})] if gated else []),
        *([_repack(build)] if _is_repacked(build) else []),
        _compile(build, workspace),
        _emit(build, gated=gated),
    ]
    return tuple(ordered)


def _import(build: Build) -> Step:
    """Make a Hugging Face directory of a source that is none yet, such as a GGUF file."""

    def run(ctx: StepContext) -> None:
        build.source.write(ctx.out, ctx.progress)

    return Step(
        name="import",
        version=1,
        output=SourceCheckpoint,
        params=dict(build.source.identity),
        inputs={},
        toolchain=toolchain("gguf", "tokenizers"),
        run=run,
    )


def _sparsify(build: Build, checkpoint: str | SourceCheckpoint, hasher: FileHasher) -> Step:
    """Put two zeros into every four weights."""
    sparsity, calibration = build.config.sparsity, build.config.calibration
    text = _text_identity(calibration, hasher)

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.sparsify import sparsify

        sparsify(_source(ctx), sparsity, calibration, out=ctx.out, progress=ctx.progress)

    return Step(
        name="sparsify",
        version=1,
        output=SourceCheckpoint,
        params=sparsity.model_dump(mode="json") | {"calibration": text if sparsity.method == "sparsegpt" else None},
        inputs={"source": checkpoint},
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def _score(build: Build, checkpoint: str | SourceCheckpoint, hasher: FileHasher) -> Step:
    """Score what each candidate format costs each group of layers; the budget is no part of it."""
    config = build.config

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.score import score

        score(_source(ctx), config.quantization, config.calibration, out=ctx.out, progress=ctx.progress)

    quantization = _relevant_quantization(config)
    del quantization["kv_cache"], quantization["auto"]["effective_bits"]
    return Step(
        name="score",
        version=1,
        output=Sensitivities,
        params={"quantization": quantization, "calibration": _calibration_identity(config, hasher)},
        inputs={"source": checkpoint},
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def _choose(build: Build) -> Step:
    """Give each layer the format that the budget serves best."""
    effective_bits = build.config.quantization.auto.effective_bits or 0

    def run(ctx: StepContext) -> None:
        from pipeline.quantize import choice, sensitivities

        found = choice.Table(sensitivities.read(_input(ctx, "sensitivities", Sensitivities).path))
        choice.write(ctx.out, found.choose(effective_bits))

    return Step(
        name="choose",
        version=1,
        output=FormatChoice,
        params={"effective_bits": effective_bits},
        inputs={"sensitivities": "score"},
        toolchain=toolchain("numpy"),
        run=run,
    )


def _calibrate(build: Build, weights: str | SourceCheckpoint, hasher: FileHasher) -> Step:
    """Feed the text to the model, layer by layer; nothing of the target is in the result."""
    config = build.config
    kv_ranges = stores_kv_scales(config.quantization, export=_export(config))

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.calibrate import calibrate
        from pipeline.quantize.quantize import plan_formats

        quantization = _decided(ctx, config)
        calibrate(
            _source(ctx),
            quantization,
            config.calibration,
            # Guard: what this target cannot hold is refused now, not after hours of calibration.
            formats=plan_formats(_source(ctx), quantization, _wanted(config)),
            kv_ranges=kv_ranges,
            out=ctx.out,
            progress=ctx.progress,
            resume=ctx.resume,
        )

    quantization = _relevant_quantization(config)
    quantization.pop("auto", None)
    del quantization["kv_cache"]
    return Step(
        name="calibrate",
        version=1,
        output=Calibration,
        params={
            "quantization": quantization | {"kv_ranges": kv_ranges},
            "calibration": _calibration_identity(config, hasher),
        },
        inputs={"source": weights, **_choice(config)},
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def _finetune(build: Build, weights: str | SourceCheckpoint, hasher: FileHasher, *, calibrated: bool) -> Step:
    """Train the weights through their rounding, with the ranges that calibration found."""
    config, settings = build.config, build.config.finetune

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.finetune import finetune
        from pipeline.quantize.training.ranges import trained_layers

        calibration = _input(ctx, "calibration", Calibration) if calibrated else None
        layers = trained_layers(_source(ctx), _decided(ctx, config), calibration, _wanted(config))
        finetune(_source(ctx), layers, settings, out=ctx.out, resume=ctx.resume, progress=ctx.progress)

    return Step(
        name="finetune",
        version=1,
        output=SourceCheckpoint,
        params={
            # How often states are kept changes no byte of the result.
            "finetune": settings.model_dump(mode="json", exclude={"save_every"})
            | {"dataset": _file_identity(settings.dataset, hasher)},
            "export": _export(config),
            "dtype": _dtype(config),
            "group_size": _relevant_quantization(config).get("group_size"),
        },
        inputs={"source": weights, **_choice(config), **({"calibration": "calibrate"} if calibrated else {})},
        toolchain=toolchain("accelerate", "nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def _quantize(build: Build, weights: str | SourceCheckpoint, *, calibrated: bool) -> Step:
    """Quantize layer by layer with ModelOpt and write the checkpoint that the target reads."""
    config = build.config

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.quantize import quantize

        quantize(
            _source(ctx),
            _decided(ctx, config),
            _input(ctx, "calibration", Calibration) if calibrated else None,
            _wanted(config),
            out=ctx.out,
            progress=ctx.progress,
            resume=ctx.resume,
        )

    return Step(
        name="quantize",
        version=3,
        output=QuantizedCheckpoint,
        params={
            "export": _export(config),
            "dtype": _dtype(config),
            "quantization": {name: value for name, value in _relevant_quantization(config).items() if name != "auto"},
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "pipeline_parallel_size": config.engine.pipeline_parallel_size,
        },
        inputs={"source": weights, **_choice(config), **({"calibration": "calibrate"} if calibrated else {})},
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def _choice(config: BuildConfig) -> dict[str, str]:
    return {"choice": "choose"} if config.quantization.format == "auto" else {}


def _export(config: BuildConfig) -> Literal["hf", "trtllm"]:
    return "trtllm" if config.engine.target == "tensorrt_llm" else "hf"


def _wanted(config: BuildConfig) -> WantedCheckpoint:
    return WantedCheckpoint(
        export=_export(config),
        tensor_parallel_size=config.engine.tensor_parallel_size,
        pipeline_parallel_size=config.engine.pipeline_parallel_size,
        dtype=_dtype(config),
    )


def _decided(ctx: StepContext, config: BuildConfig) -> QuantizationConfig:
    """The quantization that the config asks for, with the formats that were chosen where it leaves them open."""
    from pipeline.quantize import choice

    if config.quantization.format != "auto":
        return config.quantization
    formats = choice.read_formats(_input(ctx, "choice", FormatChoice).path)
    return choice.decided(config.quantization, formats, "bf16" if config.engine.dtype == "bfloat16" else "fp16")


def _convert(build: Build, made: Made, checkpoint: str | SourceCheckpoint) -> Step:
    """Copy codes and scales that another tool made into the target's layout, or the files where it reads theirs."""
    kv_cache = build.config.quantization.kv_cache

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.foreign.convert import convert
        from pipeline.quantize.foreign.passing import pass_on

        if made.passed_on:
            pass_on(_source(ctx), made, out=ctx.out, progress=ctx.progress)
        else:
            convert(_source(ctx), made, kv_cache=kv_cache, out=ctx.out, progress=ctx.progress)

    return Step(
        name="convert",
        version=1,
        output=QuantizedCheckpoint,
        params={
            "format": made.format,
            "group_size": made.group_size,
            "dtype": made.dtype,
            "kv_cache": kv_cache,
        }
        | ({"layout": made.layout, "passed_on": True} if made.passed_on else {}),
        inputs={"source": checkpoint},
        toolchain=toolchain("torch"),
        run=run,
    )


def _verify(
    build: Build, checkpoint: str | SourceCheckpoint, weights: str | SourceCheckpoint, hasher: FileHasher
) -> Step:
    """Prove with an independent reader that the checkpoint computes what its source computes.

    Tensors and layers are held to `weights`, which were quantized; text and tasks to the source itself.
    """
    limits, quality = build.config.verify, build.config.quality
    changed = {} if weights == checkpoint else {"original": checkpoint}
    if quality.limited:
        limits = limits.model_copy(update={"num_tokens": max(limits.num_tokens, quality.num_tokens)})

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.verify import verify

        quantized = _input(ctx, "quantized", QuantizedCheckpoint)
        # A refusal is a result too: its report is kept, and `require` says it to whoever would go on.
        with suppress(VerificationError):
            verify(
                _source(ctx),
                quantized,
                limits,
                out=ctx.out,
                progress=ctx.progress,
                tasks=quality.tasks,
                original=_input(ctx, "original", SourceCheckpoint) if "original" in ctx.inputs else None,
            )

    def require(verification: Artifact) -> None:
        from pipeline.quantize.proof import require_proven

        require_proven(verification.path)

    return Step(
        name="verify",
        version=4,
        output=VerificationReport,
        params=limits.model_dump(mode="json")
        | {
            "dataset": _file_identity(limits.dataset, hasher),
            "reference": _reference_identity(limits.reference, hasher),
            "tasks": [[path.name, hasher.digest(path)] for path in quality.tasks],
        },
        inputs={"source": weights, "quantized": build.maker} | changed,
        toolchain=toolchain("torch", "transformers"),
        run=run,
        require=require,
    )


def _gate(build: Build, choice: Mapping[str, Any]) -> Step:
    """Judge what verify measured by the limits of `quality`; nothing is compiled that does not pass."""
    quality = build.config.quality
    told: dict[str, Any] = {"format": build.label, "rejected": [], **choice}

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.proof import read_report

        verdict = judge(read_report(_input(ctx, "verification", VerificationReport).path), quality)
        verdict.require_accepted()
        checkpoint = _input(ctx, "quantized", QuantizedCheckpoint)
        document = verdict.document() | told | {"checkpoint_bytes": checkpoint.weight_bytes}
        write_atomic(ctx.out / "quality.json", (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())

    return Step(
        name="gate",
        version=2,
        output=QualityVerdict,
        params={"quality": quality.model_dump(mode="json", exclude={"num_tokens", "tasks"}), "choice": told},
        inputs={"verification": "verify", "quantized": build.maker},
        toolchain={},
        run=run,
    )


def _is_repacked(build: Build) -> bool:
    """Whether the target reads the format in another layout than the one that is quantized and verified."""
    from pipeline.quantize.repack import REPACKED

    config = build.config
    return config.engine.target == "vllm" and build.made is None and config.quantization.format in REPACKED


def _repack(build: Build) -> Step:
    """Write the verified codes and scales in the layout that vLLM reads, and decode them again."""

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.repack import repack

        repack(_input(ctx, "quantized", QuantizedCheckpoint), out=ctx.out, progress=ctx.progress)

    return Step(
        name="repack",
        version=1,
        output=QuantizedCheckpoint,
        params={"layout": "compressed-tensors"},
        inputs={"quantized": build.maker},
        toolchain=toolchain("torch"),
        run=run,
    )


def _compile(build: Build, workspace: Path) -> Step:
    """Compile the checkpoint for the target machine, or prepare the compile for the node that has the GPU."""
    match build.config.engine.target:
        case "openvino":
            return _compile_openvino(build)
        case "tensorrt_llm":
            return _compile_tensorrt_llm(build, workspace)
        case "tensorrt_llm_llmapi":
            return _compile_llmapi(build)
        case "vllm":
            return _compile_vllm(build)


def _compile_openvino(build: Build) -> Step:
    """ModelOpt's integers and scales in an OpenVINO graph."""
    engine = build.config.engine

    def run(ctx: StepContext) -> None:
        from pipeline.targets.openvino import compile_engine

        compile_engine(_input(ctx, "quantized", QuantizedCheckpoint), engine, out=ctx.out, progress=ctx.progress)

    return Step(
        name="compile",
        version=1,
        output=Engine,
        params=engine.model_dump(mode="json", include=OPENVINO_READS)
        | {"kv_cache": engine.kv_cache.model_dump(mode="json", include=OPENVINO_READS_OF_KV_CACHE)},
        inputs={"quantized": build.maker},
        toolchain=toolchain("openvino", "openvino-genai", "optimum-intel", "nncf", "torch", "transformers"),
        run=run,
    )


def _compile_tensorrt_llm(build: Build, workspace: Path) -> Step:
    """trtllm-build here, in the pinned container, or on the GPU node later."""
    from pipeline.targets.tensorrt_llm.place import choose_place
    from pipeline.targets.tensorrt_llm.toolchains import find

    engine = build.config.engine
    host = probe()
    place = choose_place(engine, host, find(engine.toolchain, engine.build.image_tag))

    def run(ctx: StepContext) -> None:
        from pipeline.explain.explain import likely_cause
        from pipeline.targets.tensorrt_llm.build import compile_engine

        compile_engine(
            _input(ctx, "quantized", QuantizedCheckpoint),
            engine,
            architecture=build.architecture,
            out=ctx.out,
            progress=ctx.progress,
            host=host,
            explain=likely_cause,
            timing_caches=workspace / "timing-caches",
            log_directory=ctx.out / "log",
        )

    # An engine that waits for its GPU is another artifact than a built one; how many workers built it is not.
    options = engine.model_dump(mode="json", exclude={"build": EXECUTION_ONLY, "num_threads": True})
    return Step(
        name="compile",
        version=1,
        output=Engine,
        params=options | {"place": place.kind},
        inputs={"quantized": build.maker},
        toolchain={"tensorrt-llm": engine.toolchain},
        run=run,
    )


def _compile_llmapi(build: Build) -> Step:
    """No engine: the LLM API loads the checkpoint itself."""
    engine = build.config.engine

    def run(ctx: StepContext) -> None:
        from pipeline.targets.tensorrt_llm.llmapi import compile_engine

        compile_engine(
            _input(ctx, "quantized", QuantizedCheckpoint),
            engine,
            architecture=build.architecture,
            out=ctx.out,
            progress=ctx.progress,
        )

    return Step(
        name="compile",
        version=1,
        output=Engine,
        params=engine.model_dump(mode="json", exclude={"build": True, "num_threads": True}),
        inputs={"quantized": build.maker},
        toolchain={"tensorrt-llm": engine.toolchain},
        run=run,
    )


def _compile_vllm(build: Build) -> Step:
    """No engine: vLLM loads the checkpoint itself."""
    engine = build.config.engine

    def run(ctx: StepContext) -> None:
        from pipeline.targets.vllm.compile import compile_engine

        compile_engine(
            _input(ctx, "quantized", QuantizedCheckpoint),
            engine,
            architecture=build.architecture,
            out=ctx.out,
            progress=ctx.progress,
        )

    return Step(
        name="compile",
        version=1,
        output=Engine,
        params=engine.model_dump(mode="json", include=VLLM_READS)
        | {"kv_cache": engine.kv_cache.model_dump(mode="json", include=OPENVINO_READS_OF_KV_CACHE)},
        inputs={"quantized": "repack" if _is_repacked(build) else build.maker},
        toolchain={"vllm": VERSION},
        run=run,
    )


def _emit(build: Build, *, gated: bool) -> Step:
    """Write the Triton model repository around the engine."""
    config = build.config
    chosen = config.quantization.format == "auto"
    reports = ({"quality": "gate"} if gated else {}) | ({"choice": "choose"} if chosen else {})

    def run(ctx: StepContext) -> None:
        from pipeline.triton.repository import emit

        emit(_input(ctx, "engine", Engine).path, config.serving, name=config.name, out=ctx.out)
        if gated:
            shutil.copy(_input(ctx, "quality", QualityVerdict).path / "quality.json", ctx.out / "quality.json")
        if chosen:
            shutil.copy(_input(ctx, "choice", FormatChoice).path / "choice.json", ctx.out / "choice.json")

    from pipeline.triton.repository import templates

    return Step(
        name="emit",
        version=1,
        output=ModelRepository,
        params=config.serving.model_dump(mode="json") | {"name": config.name, "templates": digest_tree(templates())},
        inputs={"engine": "compile"} | reports,
        toolchain=toolchain("tokenizers", "openvino-genai"),
        run=run,
    )


def _input(ctx: StepContext, role: str, kind: type[A]) -> A:
    artifact = ctx.inputs[role]
    if not isinstance(artifact, kind):
        raise TypeError(f"{role} is {type(artifact).__name__}, expected {kind.__name__}")
    return artifact


def _source(ctx: StepContext) -> SourceCheckpoint:
    return _input(ctx, "source", SourceCheckpoint)


def _dtype(config: BuildConfig) -> Literal["bfloat16", "float16"]:
    """16-bit type of what is not quantized; an unquantized format names it itself."""
    if config.quantization.format in UNQUANTIZED:
        return "bfloat16" if config.quantization.format == "bf16" else "float16"
    return config.engine.dtype


def _relevant_quantization(config: BuildConfig) -> dict[str, Any]:
    """Return only what the format reads, so that an unused knob does not requantize."""
    quantization = config.quantization.model_dump(mode="json")
    if config.quantization.format != "auto":
        del quantization["auto"]
    if not has_groups(config):
        del quantization["group_size"]
    forms = formats_of(config.quantization)
    if not set(forms).intersection(AWQ):
        del quantization["awq"]
    if "int8_sq" not in forms:
        del quantization["smoothquant_alpha"]
    if not config.quantization.overrides:
        del quantization["overrides"]
    return quantization


def _calibration_identity(config: BuildConfig, hasher: FileHasher) -> Mapping[str, Any] | None:
    if formats_of(config.quantization)[0] in UNQUANTIZED and config.quantization.kv_cache == "auto":
        return None
    return _text_identity(config.calibration, hasher)


def _text_identity(calibration: CalibrationConfig, hasher: FileHasher) -> Mapping[str, Any]:
    """The section with the content of its files in place of where they lie."""
    sets = [
        {
            "text": _file_identity(one.path, hasher),
            "weight": one.weight,
            "name": one.file or (one.path and one.path.name),
        }
        for one in calibration.datasets
    ]
    # AWQ averages over passes, and a product may round otherwise in another batch, so the size of one counts.
    return calibration.model_dump(mode="json") | {
        "dataset": _file_identity(calibration.dataset, hasher),
        "datasets": sets,
        "batch_size": calibration.sequences_per_pass,
    }


def _reference_identity(directory: Path | None, hasher: FileHasher) -> str | None:
    return None if directory is None else resolve(SourceConfig(path=directory), hasher).digest


def _file_identity(path: Path | None, hasher: FileHasher) -> str | None:
    return None if path is None else hasher.digest(path)

"""The product in one file: every stage of a build, in order, and what each depends on.

    BuildConfig ─ resolve ─▶ SourceCheckpoint ─ quantize ─▶ QuantizedCheckpoint ─ verify ─▶ VerificationReport
                                                                  │                 gate ─▶ QualityVerdict
                                                               compile ─▶ Engine ─ emit ─▶ ModelRepository

`resolve` finds the checkpoint and refuses what cannot work, before anything heavy starts. Every other
stage is a `Step`: its params, inputs and tool versions make its key, and the store skips a step whose
key it has seen. So a rebuild that changes nothing is instant, a change of `serving` only emits again,
and a change of `quantization` starts at quantize.

The rooms (checkpoints, quantize, targets, triton) do not know each other; they meet here.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.checkpoints.architecture import Architecture
from pipeline.checkpoints.resolve import ResolvedSource, resolve
from pipeline.config import elsewhere, legality
from pipeline.config.load import LoadedConfig
from pipeline.config.rules import has_groups
from pipeline.config.schema import BuildConfig, SourceConfig
from pipeline.core.artifacts import (
    Artifact,
    Engine,
    ModelRepository,
    QualityVerdict,
    QuantizedCheckpoint,
    SourceCheckpoint,
    VerificationReport,
)
from pipeline.core.digest import FileHasher, digest_tree
from pipeline.core.stage import Step, StepContext
from pipeline.errors import ConfigError, Problem
from pipeline.host.files import commit_directory, disk_errors, link_or_copy, write_atomic
from pipeline.host.probe import HostProfile, probe, toolchain
from pipeline.measure.gate import judge

if TYPE_CHECKING:
    from pipeline.quantize.foreign.convert import Made

STAGES = ("import", "quantize", "convert", "verify", "gate", "compile", "emit")
UNQUANTIZED = ("bf16", "fp16")
LINKED_BYTES = 2**20
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
OPENVINO_READS_OF_KV_CACHE = {"size_gib", "enable_block_reuse"}
EXECUTION_ONLY = {"workers", "log_level", "input_timing_cache", "output_timing_cache"}

A = TypeVar("A", bound=Artifact)


@dataclass(frozen=True, kw_only=True)
class Build:
    """A config whose source was found, and everything that was found wrong or worth knowing before it runs.

    `made` says what a source is that another tool quantized; `config` has its format then.
    """

    config: BuildConfig
    source: ResolvedSource
    architecture: Architecture
    problems: tuple[Problem, ...]
    made: Made | None = None

    @property
    def maker(self) -> str:
        """Name of the stage that makes the quantized checkpoint."""
        return "quantize" if self.made is None else "convert"

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What does not stop the build."""
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    def require_possible(self) -> None:
        """Raise ConfigError with every problem that stops the build."""
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if errors:
            raise ConfigError(f"'{self.config.name}' cannot be built: {len(errors)} problem(s)", problems=errors)


def examine(loaded: LoadedConfig, hasher: FileHasher) -> Build:
    """Find the source and judge the build: format, target, GPU, shapes, tools; nothing heavy runs.

    Raises:
        IntegrityError: the source is missing, unsafe or broken.
    """
    source = resolve(loaded.config.source, hasher)
    made, misfits = _made_elsewhere(loaded, source)
    if made is not None:
        loaded = replace(loaded, config=elsewhere.adopt(loaded.config, made))
    config = loaded.config
    architecture = source.architecture()
    host = probe()
    problems = (
        *loaded.warnings,
        *source.problems,
        *misfits,
        *legality.check(config, architecture, host, loaded.provenance),
        *_preflight(loaded, architecture, host),
    )
    return Build(config=config, source=source, architecture=architecture, problems=problems, made=made)


def _made_elsewhere(loaded: LoadedConfig, source: ResolvedSource) -> tuple[Made | None, Sequence[Problem]]:
    """What a source is that was quantized elsewhere, and what the config asks for that it is not."""
    if source.quant_method is None:
        if loaded.config.verify.reference is None:
            return None, ()
        message = "a reference belongs to a source that is quantized already, and this one is not."
        hint = "Remove it: the source is the reference."
        return None, [Problem(where="verify.reference", message=message, hint=hint)]
    from pipeline.quantize.foreign.convert import identify

    made = identify(source.location)
    return made, tuple(elsewhere.check(loaded.config, made, loaded.provenance))


def _preflight(loaded: LoadedConfig, architecture: Architecture, host: HostProfile) -> Sequence[Problem]:
    """Everything that would only fail on the GPU node, after hours."""
    if loaded.config.engine.target == "openvino":
        return ()
    from pipeline.targets.tensorrt_llm.preflight import preflight

    return preflight(loaded.config, architecture, host, loaded.provenance)


def steps(
    build: Build, hasher: FileHasher, workspace: Path, rejected: Sequence[Mapping[str, Any]] = ()
) -> tuple[Step, ...]:
    """Return the steps of a build in order.

    Args:
        build: from `prepare`.
        hasher: for the files that the config names.
        workspace: the store's directory, for what may be kept between builds but is no artifact.
        rejected: what was tried before this build and did not pass, with numbers; the repository tells it.
    """
    gated = build.config.quality.limited or bool(rejected)
    checkpoint: str | SourceCheckpoint = "import"
    ordered = []
    if build.source.needs_import:
        ordered.append(_import(build))
    else:
        checkpoint = SourceCheckpoint(path=build.source.location, digest=build.source.digest)
    ordered += [
        _quantize(build, checkpoint, hasher) if build.made is None else _convert(build, build.made, checkpoint),
        _verify(build, checkpoint, hasher),
        *([_gate(build, rejected)] if gated else []),
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


def _quantize(build: Build, checkpoint: str | SourceCheckpoint, hasher: FileHasher) -> Step:
    """Calibrate and quantize with ModelOpt, then export for the target."""
    config = build.config
    export: Literal["hf", "trtllm"] = "trtllm" if config.engine.target == "tensorrt_llm" else "hf"

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.quantize import quantize

        quantize(
            _source(ctx),
            config.quantization,
            config.calibration,
            export=export,
            tensor_parallel_size=config.engine.tensor_parallel_size,
            pipeline_parallel_size=config.engine.pipeline_parallel_size,
            dtype=_dtype(config),
            out=ctx.out,
            progress=ctx.progress,
        )

    return Step(
        name="quantize",
        version=1,
        output=QuantizedCheckpoint,
        params={
            "export": export,
            "dtype": _dtype(config),
            "quantization": _relevant_quantization(config),
            "calibration": _calibration_identity(config, hasher),
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "pipeline_parallel_size": config.engine.pipeline_parallel_size,
        },
        inputs={"source": checkpoint},
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def _convert(build: Build, made: Made, checkpoint: str | SourceCheckpoint) -> Step:
    """Copy codes and scales that another tool made into the target's layout."""
    kv_cache = build.config.quantization.kv_cache

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.foreign.convert import convert

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
        },
        inputs={"source": checkpoint},
        toolchain=toolchain("torch"),
        run=run,
    )


def _verify(build: Build, checkpoint: str | SourceCheckpoint, hasher: FileHasher) -> Step:
    """Prove with an independent reader that the checkpoint computes what its source computes."""
    limits, quality = build.config.verify, build.config.quality
    if quality.limited:
        limits = limits.model_copy(update={"num_tokens": max(limits.num_tokens, quality.num_tokens)})

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.verify import verify

        quantized = _input(ctx, "quantized", QuantizedCheckpoint)
        verify(_source(ctx), quantized, limits, out=ctx.out, progress=ctx.progress, tasks=quality.tasks)

    return Step(
        name="verify",
        version=2,
        output=VerificationReport,
        params=limits.model_dump(mode="json")
        | {
            "dataset": _file_identity(limits.dataset, hasher),
            "reference": _reference_identity(limits.reference, hasher),
            "tasks": [[path.name, hasher.digest(path)] for path in quality.tasks],
        },
        inputs={"source": checkpoint, "quantized": build.maker},
        toolchain=toolchain("torch", "transformers"),
        run=run,
    )


def _gate(build: Build, rejected: Sequence[Mapping[str, Any]]) -> Step:
    """Judge what verify measured by the limits of `quality`; nothing is compiled that does not pass."""
    quality = build.config.quality

    def run(ctx: StepContext) -> None:
        verdict = judge(read_report(_input(ctx, "verification", VerificationReport)), quality)
        verdict.require_accepted()
        document = verdict.document() | {"format": build.config.quantization.format, "rejected": list(rejected)}
        write_atomic(ctx.out / "quality.json", (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())

    return Step(
        name="gate",
        version=1,
        output=QualityVerdict,
        params={
            "quality": quality.model_dump(mode="json", exclude={"num_tokens", "tasks"}),
            "format": build.config.quantization.format,
            "rejected": list(rejected),
        },
        inputs={"verification": "verify"},
        toolchain={},
        run=run,
    )


def read_report(verification: VerificationReport) -> dict[str, Any]:
    """Return report.json of a verification."""
    report: dict[str, Any] = json.loads((verification.path / "report.json").read_text("utf-8"))
    return report


def _compile(build: Build, workspace: Path) -> Step:
    """Compile the checkpoint for the target machine, or prepare the compile for the node that has the GPU."""
    match build.config.engine.target:
        case "openvino":
            return _compile_openvino(build)
        case "tensorrt_llm":
            return _compile_tensorrt_llm(build, workspace)
        case "tensorrt_llm_llmapi":
            return _compile_llmapi(build)


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


def deviations(config: BuildConfig) -> list[str]:
    """Say in words where the CPU engine computes something else than the GPU would."""
    if config.engine.target != "openvino":
        return []
    from pipeline.targets.openvino import deviations as of_format

    return of_format(
        config.quantization.format, config.quantization.kv_cache, dynamic=config.engine.dynamic_quantization
    )


def gpu_plan(build: Build) -> dict[str, Any]:
    """Return the memory budget of one GPU and the exact commands that will run there; empty for the CPU target."""
    config, engine = build.config, build.config.engine
    if engine.target == "openvino":
        return {}
    from pipeline.targets.tensorrt_llm.budget import budget

    fullest = budget(config, build.architecture)
    table = [{"what": row.what, "bytes": row.n_bytes, "how": row.how} for row in fullest.table()]
    document: dict[str, Any] = {"budget": fullest.document() | {"table": table}}
    if engine.target == "tensorrt_llm":
        from pipeline.targets.tensorrt_llm.command import build_argv
        from pipeline.targets.tensorrt_llm.facts import QuantFacts

        quant = QuantFacts.of_format(config.quantization.format, config.quantization.kv_cache, engine.dtype)
        argv = build_argv(
            engine, quant=quant, checkpoint_dir="checkpoint", engine_dir="engine", architecture=build.architecture
        )
        document["commands"] = [argv]
    return document


def _emit(build: Build, *, gated: bool) -> Step:
    """Write the Triton model repository around the engine."""
    config = build.config

    def run(ctx: StepContext) -> None:
        from pipeline.triton.repository import emit

        emit(_input(ctx, "engine", Engine).path, config.serving, name=config.name, out=ctx.out)
        if gated:
            shutil.copy(_input(ctx, "quality", QualityVerdict).path / "quality.json", ctx.out / "quality.json")

    from pipeline.triton.repository import templates

    return Step(
        name="emit",
        version=1,
        output=ModelRepository,
        params=config.serving.model_dump(mode="json") | {"name": config.name, "templates": digest_tree(templates())},
        inputs={"engine": "compile"} | ({"quality": "gate"} if gated else {}),
        toolchain=toolchain("tokenizers", "openvino-genai"),
        run=run,
    )


def publish(repository: Artifact, directory: Path) -> None:
    """Put a copy of a model repository where a server or a release will take it, in one step.

    What is large is hard-linked to the store where the file system allows it; what people edit
    (config.pbtxt, model.py) is copied, so that an edit never reaches the store.

    Raises:
        HostError: the directory holds something that trtpipe did not write.
        DiskFull: nothing was changed.
    """
    directory = directory.resolve()  # "." has no name to put a staging directory beside
    staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
    try:
        with disk_errors(directory.parent):
            for source in sorted(path for path in repository.path.rglob("*") if path.is_file()):
                target = staging / source.relative_to(repository.path)
                if source.stat().st_size >= LINKED_BYTES:
                    link_or_copy(source, target)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, target)
        commit_directory(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
    if not has_groups(config):
        del quantization["group_size"]
    if config.quantization.format not in ("int4_awq", "w4a8_awq"):
        del quantization["awq"]
    if config.quantization.format != "int8_sq":
        del quantization["smoothquant_alpha"]
    return quantization


def _calibration_identity(config: BuildConfig, hasher: FileHasher) -> Mapping[str, Any] | None:
    if config.quantization.format in UNQUANTIZED and config.quantization.kv_cache == "auto":
        return None
    calibration = config.calibration
    return calibration.model_dump(mode="json") | {"dataset": _file_identity(calibration.dataset, hasher)}


def _reference_identity(directory: Path | None, hasher: FileHasher) -> str | None:
    return None if directory is None else resolve(SourceConfig(path=directory), hasher).digest


def _file_identity(path: Path | None, hasher: FileHasher) -> str | None:
    return None if path is None else hasher.digest(path)

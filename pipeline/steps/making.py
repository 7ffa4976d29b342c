"""Steps that make a checkpoint: from the source to the weights, formats and ranges, and the quantized files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.core.artifacts import Calibration, FormatChoice, QuantizedCheckpoint, Sensitivities, SourceCheckpoint
from pipeline.core.digest import FileHasher
from pipeline.core.stage import Inputs, Step, StepContext
from pipeline.examine import Build
from pipeline.host.probe import toolchain
from pipeline.quantize.formats import stores_kv_scales
from pipeline.steps.asked import decided, export_layout, unquantized_dtype, wanted
from pipeline.steps.identity import calibration_identity, file_identity, relevant_quantization, text_identity

if TYPE_CHECKING:
    from pipeline.quantize.foreign.convert import Made


def import_source(build: Build) -> Step:
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


def sparsify(build: Build, inputs: Inputs, hasher: FileHasher) -> Step:
    """Put two zeros into every four weights."""
    sparsity, calibration = build.config.sparsity, build.config.calibration
    text = text_identity(calibration, hasher)

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.sparsify import sparsify

        sparsify(ctx.input("source", SourceCheckpoint), sparsity, calibration, out=ctx.out, progress=ctx.progress)

    return Step(
        name="sparsify",
        version=2,
        output=SourceCheckpoint,
        params=sparsity.model_dump(mode="json") | {"calibration": text if sparsity.method == "sparsegpt" else None},
        inputs=inputs,
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def score(build: Build, inputs: Inputs, hasher: FileHasher) -> Step:
    """Score what each candidate format costs each group of layers; the budget is no part of it."""
    config = build.config

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.score import score

        score(
            ctx.input("source", SourceCheckpoint),
            config.quantization,
            config.calibration,
            out=ctx.out,
            progress=ctx.progress,
        )

    quantization = relevant_quantization(config)
    del quantization["kv_cache"], quantization["auto"]["effective_bits"]
    return Step(
        name="score",
        version=2,
        output=Sensitivities,
        params={"quantization": quantization, "calibration": calibration_identity(config, hasher)},
        inputs=inputs,
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def choose(build: Build, inputs: Inputs) -> Step:
    """Give each layer the format that the budget serves best."""
    effective_bits = build.config.quantization.auto.effective_bits or 0

    def run(ctx: StepContext) -> None:
        from pipeline.quantize import choice, sensitivities

        found = choice.Table(sensitivities.read(ctx.input("sensitivities", Sensitivities).path))
        choice.write(ctx.out, found.choose(effective_bits))

    return Step(
        name="choose",
        version=1,
        output=FormatChoice,
        params={"effective_bits": effective_bits},
        inputs=inputs,
        toolchain=toolchain("numpy"),
        run=run,
    )


def calibrate(build: Build, inputs: Inputs, hasher: FileHasher) -> Step:
    """Feed the text to the model, layer by layer; nothing of the target is in the result."""
    config = build.config
    kv_ranges = stores_kv_scales(config.quantization, export=export_layout(config))

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.calibrate import calibrate
        from pipeline.quantize.quantize import plan_formats

        quantization = decided(ctx, config)
        calibrate(
            ctx.input("source", SourceCheckpoint),
            quantization,
            config.calibration,
            # Guard: what this target cannot hold is refused now, not after hours of calibration.
            formats=plan_formats(ctx.input("source", SourceCheckpoint), quantization, wanted(config)),
            kv_ranges=kv_ranges,
            out=ctx.out,
            progress=ctx.progress,
            resume=ctx.resume,
        )

    quantization = relevant_quantization(config)
    quantization.pop("auto", None)
    del quantization["kv_cache"]
    return Step(
        name="calibrate",
        version=2,
        output=Calibration,
        params={
            "quantization": quantization | {"kv_ranges": kv_ranges},
            "calibration": calibration_identity(config, hasher),
        },
        inputs=inputs,
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def finetune(build: Build, inputs: Inputs, hasher: FileHasher) -> Step:
    """Train the weights through their rounding, with the ranges that calibration found."""
    config, settings = build.config, build.config.finetune

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.finetune import finetune
        from pipeline.quantize.training.ranges import trained_layers

        calibration = ctx.input("calibration", Calibration) if "calibration" in ctx.inputs else None
        layers = trained_layers(
            ctx.input("source", SourceCheckpoint), decided(ctx, config), calibration, wanted(config)
        )
        finetune(
            ctx.input("source", SourceCheckpoint),
            layers,
            settings,
            out=ctx.out,
            resume=ctx.resume,
            progress=ctx.progress,
        )

    return Step(
        name="finetune",
        version=1,
        output=SourceCheckpoint,
        params={
            # How often states are kept changes no byte of the result.
            "finetune": settings.model_dump(mode="json", exclude={"save_every"})
            | {"dataset": file_identity(settings.dataset, hasher)},
            "export": export_layout(config),
            "dtype": unquantized_dtype(config),
            "group_size": relevant_quantization(config).get("group_size"),
        },
        inputs=inputs,
        toolchain=toolchain("accelerate", "nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def quantize(build: Build, inputs: Inputs) -> Step:
    """Quantize layer by layer with ModelOpt and write the checkpoint that the target reads."""
    config = build.config

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.quantize import quantize

        quantize(
            ctx.input("source", SourceCheckpoint),
            decided(ctx, config),
            ctx.input("calibration", Calibration) if "calibration" in ctx.inputs else None,
            wanted(config),
            out=ctx.out,
            progress=ctx.progress,
            resume=ctx.resume,
        )

    return Step(
        name="quantize",
        version=3,
        output=QuantizedCheckpoint,
        params={
            "export": export_layout(config),
            "dtype": unquantized_dtype(config),
            "quantization": {name: value for name, value in relevant_quantization(config).items() if name != "auto"},
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "pipeline_parallel_size": config.engine.pipeline_parallel_size,
        },
        inputs=inputs,
        toolchain=toolchain("nvidia-modelopt", "torch", "transformers", "tokenizers"),
        run=run,
    )


def convert(build: Build, made: Made, inputs: Inputs) -> Step:
    """Copy codes and scales that another tool made into the target's layout, or the files where it reads theirs."""
    kv_cache = build.config.quantization.kv_cache

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.foreign.convert import convert
        from pipeline.quantize.foreign.passing import pass_on

        if made.passed_on:
            pass_on(ctx.input("source", SourceCheckpoint), made, out=ctx.out, progress=ctx.progress)
        else:
            source, layout = ctx.input("source", SourceCheckpoint), wanted(build.config)
            convert(source, made, layout, kv_cache=kv_cache, out=ctx.out, progress=ctx.progress)

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
        | ({"layout": made.layout, "passed_on": True} if made.passed_on else {})
        | (asdict(wanted(build.config)) if export_layout(build.config) == "trtllm" else {}),
        inputs=inputs,
        toolchain=toolchain("torch"),
        run=run,
    )


def repack(inputs: Inputs) -> Step:
    """Write the verified codes and scales in the layout that vLLM reads, and decode them again."""

    def run(ctx: StepContext) -> None:
        from pipeline.quantize.repack import repack

        repack(ctx.input("quantized", QuantizedCheckpoint), out=ctx.out, progress=ctx.progress)

    return Step(
        name="repack",
        version=1,
        output=QuantizedCheckpoint,
        params={"layout": "compressed-tensors"},
        inputs=inputs,
        toolchain=toolchain("torch"),
        run=run,
    )

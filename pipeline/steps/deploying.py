"""Steps that make a deployment of the proven checkpoint: what the target loads, and Triton's repository around it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pipeline.checkpoints.architecture import Architecture
from pipeline.config.deployment import EngineConfig
from pipeline.core.artifacts import Engine, FormatChoice, ModelRepository, QualityVerdict, QuantizedCheckpoint
from pipeline.core.digest import JSON, digest_tree
from pipeline.core.progress import Progress
from pipeline.core.stage import Inputs, Step, StepContext
from pipeline.examine import Build
from pipeline.host.probe import probe, toolchain

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
# Of engine.kv_cache, by the two that page it themselves.
READS_OF_KV_CACHE = {"size_gib", "enable_block_reuse"}
EXECUTION_ONLY = {"workers", "log_level", "input_timing_cache", "output_timing_cache"}


class Compile(Protocol):
    """Writes an Engine directory."""

    def __call__(
        self,
        quantized: QuantizedCheckpoint,
        engine: EngineConfig,
        *,
        architecture: Architecture,
        out: Path,
        progress: Progress,
    ) -> None:
        """See `Engine`."""
        ...


def compile_(build: Build, inputs: Inputs, workspace: Path) -> Step:
    """Compile the checkpoint for the target machine, or prepare the compile for the node that has the GPU."""
    match build.config.engine.target:
        case "openvino":
            return _compile_openvino(build, inputs)
        case "tensorrt_llm":
            return _compile_tensorrt_llm(build, inputs, workspace)
        case "tensorrt_llm_llmapi":
            return _compile_llmapi(build, inputs)
        case "vllm":
            return _compile_vllm(build, inputs)


def _compile_openvino(build: Build, inputs: Inputs) -> Step:
    """ModelOpt's integers and scales in an OpenVINO graph."""
    engine = build.config.engine

    def run(ctx: StepContext) -> None:
        from pipeline.targets.openvino import compile_engine

        compile_engine(ctx.input("quantized", QuantizedCheckpoint), engine, out=ctx.out, progress=ctx.progress)

    return Step(
        name="compile",
        version=1,
        output=Engine,
        params=_read(engine, OPENVINO_READS),
        inputs=inputs,
        toolchain=toolchain("openvino", "openvino-genai", "optimum-intel", "nncf", "torch", "transformers"),
        run=run,
    )


def _compile_tensorrt_llm(build: Build, inputs: Inputs, workspace: Path) -> Step:
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
            ctx.input("quantized", QuantizedCheckpoint),
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
        inputs=inputs,
        toolchain={"tensorrt-llm": engine.toolchain},
        run=run,
    )


def _compile_llmapi(build: Build, inputs: Inputs) -> Step:
    """TensorRT-LLM's LLM API loads the checkpoint itself."""
    from pipeline.targets.tensorrt_llm.llmapi import compile_engine

    engine = build.config.engine
    params = engine.model_dump(mode="json", exclude={"build": True, "num_threads": True})
    return _loaded_by_runtime(build, inputs, compile_engine, params, {"tensorrt-llm": engine.toolchain})


def _compile_vllm(build: Build, inputs: Inputs) -> Step:
    """VLLM loads the checkpoint itself."""
    from pipeline.targets.vllm.compile import VERSION, compile_engine

    return _loaded_by_runtime(build, inputs, compile_engine, _read(build.config.engine, VLLM_READS), {"vllm": VERSION})


def _loaded_by_runtime(
    build: Build, inputs: Inputs, compile_engine: Compile, params: Mapping[str, JSON], toolchain: Mapping[str, str]
) -> Step:
    """No engine: the checkpoint beside the arguments of what loads it."""

    def run(ctx: StepContext) -> None:
        compile_engine(
            ctx.input("quantized", QuantizedCheckpoint),
            build.config.engine,
            architecture=build.architecture,
            out=ctx.out,
            progress=ctx.progress,
        )

    return Step(name="compile", version=1, output=Engine, params=params, inputs=inputs, toolchain=toolchain, run=run)


def _read(engine: EngineConfig, fields: set[str]) -> dict[str, JSON]:
    """What a target reads of the engine section, as JSON."""
    kv_cache = engine.kv_cache.model_dump(mode="json", include=READS_OF_KV_CACHE)
    return {**engine.model_dump(mode="json", include=fields), "kv_cache": kv_cache}


def emit(build: Build, inputs: Inputs) -> Step:
    """Write the Triton model repository around the engine."""
    config = build.config

    def run(ctx: StepContext) -> None:
        from pipeline.triton.repository import emit

        emit(ctx.input("engine", Engine).path, config.serving, name=config.name, out=ctx.out)
        if "quality" in ctx.inputs:
            shutil.copy(ctx.input("quality", QualityVerdict).path / "quality.json", ctx.out / "quality.json")
        if "choice" in ctx.inputs:
            shutil.copy(ctx.input("choice", FormatChoice).path / "choice.json", ctx.out / "choice.json")

    from pipeline.triton.repository import templates

    return Step(
        name="emit",
        version=1,
        output=ModelRepository,
        params=config.serving.model_dump(mode="json") | {"name": config.name, "templates": digest_tree(templates())},
        inputs=inputs,
        toolchain=toolchain("tokenizers", "openvino-genai"),
        run=run,
    )

"""The command line of trtllm-build: a pure function of the config, the checkpoint's facts and four paths."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.deployment import EngineConfig
from pipeline.targets.tensorrt_llm.choices import choose
from pipeline.targets.tensorrt_llm.facts import ModelFacts, QuantFacts

PROGRAM = "trtllm-build"


def build_argv(
    engine: EngineConfig,
    *,
    quant: QuantFacts,
    checkpoint_dir: str,
    engine_dir: str,
    architecture: ModelFacts,
) -> tuple[str, ...]:
    """Return program and arguments.

    Timing caches and files that the config names are added by `with_files`, because their paths depend on
    where the build runs.

    Raises:
        ConfigError: engine.gpu is not set.
    """
    argv = [PROGRAM, "--checkpoint_dir", checkpoint_dir, "--output_dir", engine_dir]
    for choice in choose(engine, quant, architecture):
        argv.append(f"--{choice.what}")
        if choice.value is not None:
            argv.append(str(choice.value))
    for name in ("lora_dir", "lora_target_modules"):
        values = getattr(engine.build, name)
        argv += [f"--{name}", *values] if values else []
    return tuple(argv)


def with_files(
    argv: tuple[str, ...], engine: EngineConfig, *, input_cache: str | None, output_cache: str
) -> tuple[str, ...]:
    """Add the paths: timing caches (a missing input cache is left out), custom model, network dump."""
    return (*argv, *_files(engine, input_cache, output_cache))


def _files(engine: EngineConfig, input_cache: str | None, output_cache: str) -> Iterator[str]:
    build = engine.build
    if input_cache is not None:
        yield from ("--input_timing_cache", input_cache)
    yield from ("--output_timing_cache", output_cache)
    if build.model_cls_file is not None and build.model_cls_name is not None:
        yield from ("--model_cls_file", str(build.model_cls_file), "--model_cls_name", build.model_cls_name)
    if build.visualize_network is not None:
        yield from ("--visualize_network", str(build.visualize_network))

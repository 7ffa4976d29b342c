"""What a shipped deployment config leads to, from the architecture file of its model and without a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config import legality
from pipeline.config.load import LoadedConfig, load
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem
from pipeline.targets.tensorrt_llm.budget import budget
from pipeline.targets.tensorrt_llm.command import build_argv
from pipeline.targets.tensorrt_llm.facts import QuantFacts
from pipeline.targets.tensorrt_llm.llmapi import llm_args
from pipeline.targets.tensorrt_llm.preflight import preflight
from pipeline.targets.tensorrt_llm.toolchains import find
from tests.support.model_facts import model_facts

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "tests" / "golden" / "plans"
CONFIGS = tuple(
    path
    for path in sorted((ROOT / "build_configs").glob("[!_]*/*.yaml"))
    if path.parent.name in {facts.stem for facts in (ROOT / "tests" / "support" / "model_facts").glob("*.json")}
)


def name_of(path: Path) -> str:
    """Name of a config in test output and of its golden file."""
    return f"{path.parent.name}--{path.stem}"


def findings(loaded: LoadedConfig, model: str) -> list[Problem]:
    """Everything that load, legality table and preflight say about a config, with the keys as they are called."""
    architecture = model_facts(model).architecture
    return [*loaded.warnings, *legality.check(loaded.config, architecture), *preflight(loaded.config, architecture)]


def plan(path: Path) -> dict[str, Any]:
    """The plan of a config: the external command or the arguments at load, the image, findings, and memory."""
    loaded = load(path)
    config, model = loaded.config, path.parent.name
    architecture = model_facts(model).architecture
    return {
        "config": str(path.relative_to(ROOT)),
        "image": find(config.engine.toolchain, config.engine.build.image_tag).image,
        **_engine(config, model),
        "findings": [f"{problem.severity}: {problem}" for problem in findings(loaded, model)],
        "memory": asdict(budget(config, architecture)),
    }


def _engine(config: BuildConfig, model: str) -> dict[str, Any]:
    architecture = model_facts(model).architecture
    quant = QuantFacts.of_format(config.quantization.format, config.quantization.kv_cache, config.engine.dtype)
    if config.engine.target == "tensorrt_llm":
        argv = build_argv(
            config.engine, quant=quant, checkpoint_dir="CHECKPOINT", engine_dir="ENGINE", architecture=architecture
        )
        return {"command": list(argv)}
    quantization = {"quant_algo": quant.quant_algo, "kv_cache_quant_algo": quant.kv_cache_quant_algo}
    return {"llm_args": llm_args(config.engine, quantization, architecture.max_position_embeddings)}

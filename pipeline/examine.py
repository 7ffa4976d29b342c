"""Everything a build can be judged by before it runs: the source, the combination, the memory, the commands.

`examine` is the first thing that every command does with a config. It opens headers, never weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.architecture import Architecture
from pipeline.checkpoints.hub import locate_data_file
from pipeline.checkpoints.resolve import ResolvedSource, resolve
from pipeline.config import elsewhere, legality
from pipeline.config.formats import format_label, formats_of
from pipeline.config.load import LoadedConfig
from pipeline.config.schema import BuildConfig
from pipeline.config.variants import planned, variants
from pipeline.core.digest import FileHasher
from pipeline.errors import ConfigError, Problem
from pipeline.host.probe import HostProfile, probe

if TYPE_CHECKING:
    from pipeline.quantize.foreign.convert import Made

# TensorRT executes these products itself, so it can choose sparse kernels; the others are plugins with dense ones.
SPARSE_KERNELS = ("bf16", "fp16", "fp8")


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
    def label(self) -> str:
        """What a person calls the formats of this build."""
        return format_label(self.config.quantization)

    @property
    def maker(self) -> str:
        """Name of the stage that makes the quantized checkpoint."""
        return "quantize" if self.made is None else "convert"

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What does not stop the build."""
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    @property
    def can_be_judged(self) -> bool:
        """Whether verify will have something to compare with, if the gate asks for a comparison."""
        return self.made is None or self.config.verify.reference is not None or not self.config.quality.limited

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
    loaded = replace(loaded, config=with_sparse_kernels(_with_texts_here(loaded.config)))
    layout = made.layout if made is not None and made.passed_on else None
    config = loaded.config
    architecture = source.architecture()
    host = probe()
    problems = (
        *loaded.warnings,
        *source.problems,
        *misfits,
        *legality.check(config, architecture, host, loaded.provenance, layout=layout),
        *_preflight(loaded, architecture, host),
        *_texts(loaded),
    )
    return Build(config=config, source=source, architecture=architecture, problems=problems, made=made)


def with_sparse_kernels(config: BuildConfig) -> BuildConfig:
    """Let trtllm-build look for sparse kernels where the weights are sparse and the format has such kernels."""
    has_kernels = any(form in SPARSE_KERNELS for form in formats_of(config.quantization))
    takes = config.engine.target == "tensorrt_llm" and has_kernels
    if config.sparsity.method == "none" or not takes:
        return config
    options = config.engine.build.model_copy(update={"weight_sparsity": True})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"build": options})})


def _with_texts_here(config: BuildConfig) -> BuildConfig:
    """The config with a path for each calibration set of the hub.

    Raises:
        SourceNotFound: a set is neither in the hub's cache nor reachable.
    """
    calibration = config.calibration
    located = tuple(
        one.model_copy(update={"path": locate_data_file(one.hub, one.file, one.revision)})
        if one.hub and one.file and one.revision
        else one
        for one in calibration.datasets
    )
    return config.model_copy(update={"calibration": calibration.model_copy(update={"datasets": located})})


def _texts(loaded: LoadedConfig) -> Sequence[Problem]:
    """Malformed or missing text, which would only fail in the middle of a build."""
    from pipeline.quantize.text_check import check_texts

    return tuple(check_texts(loaded.config, loaded.provenance))


def _made_elsewhere(loaded: LoadedConfig, source: ResolvedSource) -> tuple[Made | None, Sequence[Problem]]:
    """What a source is that was quantized elsewhere, and what the config asks for that it is not."""
    if source.quant_method is None:
        if loaded.config.verify.reference is None:
            return None, ()
        message = "a reference belongs to a source that is quantized already, and this one is not."
        hint = "Remove it: the source is the reference."
        return None, [Problem(where="verify.reference", message=message, hint=hint)]
    from pipeline.quantize.foreign.convert import identify
    from pipeline.quantize.foreign.passing import recognise

    target = loaded.config.engine.target
    layout = elsewhere.CONVERTED.get(target)
    made = recognise(source.location) if layout is None else identify(source.location, export=layout)
    return made, tuple(elsewhere.check(loaded.config, made, loaded.provenance))


def _preflight(loaded: LoadedConfig, architecture: Architecture, host: HostProfile) -> Sequence[Problem]:
    """Everything that would only fail on the GPU node, after hours."""
    if loaded.config.engine.target in ("openvino", "vllm"):
        return ()
    from pipeline.targets.tensorrt_llm.preflight import preflight

    return tuple(
        dict.fromkeys(
            problem
            for variant in variants(loaded.config)
            for problem in preflight(variant, architecture, host, loaded.provenance)
        )
    )


def calibration_text(build: Build) -> dict[str, Any]:
    """Draw the rows that calibration would feed; returns their record and `warnings`, in words.

    Raises:
        ConfigError: too little text.
    """
    from pipeline.quantize.calibration import sample, text_sets, warnings

    calibration = build.config.calibration
    with tempfile.TemporaryDirectory() as directory:
        build.source.write_tokenizer(Path(directory))
        rows = sample(
            text_sets(calibration),
            Path(directory),
            num_samples=calibration.num_samples,
            max_seq_len=calibration.max_seq_len,
            seed=calibration.seed,
        )
    return {**rows.record, "warnings": warnings(rows.record)}


def deviations(config: BuildConfig) -> list[str]:
    """Say in words where an engine computes something else than was proven, or than another target would."""
    if config.engine.target == "vllm":
        from pipeline.targets.vllm.compile import deviations as of_vllm

        return of_vllm(config.quantization.format, config.engine.dtype, kv_cache=config.quantization.kv_cache)
    if config.engine.target != "openvino":
        return []
    from pipeline.targets.openvino import deviations as of_format

    return of_format(
        formats_of(config.quantization), config.quantization.kv_cache, dynamic=config.engine.dynamic_quantization
    )


def gpu_plan(build: Build) -> dict[str, Any]:
    """Return the memory budget of one GPU and the exact commands that will run there; empty for the CPU target."""
    config, engine = planned(build.config), build.config.engine
    if engine.target in ("openvino", "vllm"):
        return {}
    from pipeline.targets.tensorrt_llm.budget import budget

    fullest = budget(config, build.architecture)
    table = [{"what": row.what, "bytes": row.n_bytes, "how": row.how} for row in fullest.table()]
    document: dict[str, Any] = {"budget": fullest.document() | {"table": table}}
    if engine.target == "tensorrt_llm":
        from pipeline.targets.tensorrt_llm.command import build_argv
        from pipeline.targets.tensorrt_llm.facts import QuantFacts

        quant = QuantFacts.of_config(config.quantization, build.architecture.linears, engine.dtype)
        argv = build_argv(
            engine, quant=quant, checkpoint_dir="checkpoint", engine_dir="engine", architecture=build.architecture
        )
        document["commands"] = [argv]
    return document

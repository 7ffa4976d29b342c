"""TensorRT-LLM checkpoint in, engine out, or a compile step for the GPU node: read `compile_engine` top to bottom."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pipeline.config.deployment import EngineConfig, TargetName
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.digest import digest_json
from pipeline.core.progress import Progress
from pipeline.errors import HostError, IntegrityError, Problem
from pipeline.host.files import link_or_copy
from pipeline.host.probe import GpuProfile, HostProfile, probe
from pipeline.targets.tensorrt_llm import deferred
from pipeline.targets.tensorrt_llm.choices import Case, Choice, choose
from pipeline.targets.tensorrt_llm.command import build_argv, with_files
from pipeline.targets.tensorrt_llm.engine_files import copy_tokenizer, read_json, write_json
from pipeline.targets.tensorrt_llm.facts import ModelFacts, QuantFacts
from pipeline.targets.tensorrt_llm.place import Place, choose_place
from pipeline.targets.tensorrt_llm.readback import Expected, Ranks, Reset, compare, expect
from pipeline.targets.tensorrt_llm.run import Explain, Run
from pipeline.targets.tensorrt_llm.toolchains import Toolchain, find

NAME: Final[TargetName] = "tensorrt_llm"


class SourceFacts(ModelFacts, Protocol):
    """Facts about the source model that engine.json carries on."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...  # noqa: D102 (the names are those of config.json)
    @property
    def pad_token_id(self) -> int | None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class _Model:
    """ModelFacts whose architecture is the checkpoint's, which trtllm-build goes by."""

    architecture: str
    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One build: everything that follows from config and checkpoint, before anything runs."""

    engine: EngineConfig
    source: SourceFacts
    model: _Model
    quant: QuantFacts
    quantization: Mapping[str, Any]
    checkpoint: Path
    ranks: Ranks
    sm: int
    toolchain: Toolchain
    choices: tuple[Choice, ...]
    expected: Expected
    key: str

    @property
    def image(self) -> str:
        return self.engine.build.image or self.toolchain.image

    def argv(self, checkpoint_dir: str, engine_dir: str) -> tuple[str, ...]:
        return build_argv(
            self.engine,
            quant=self.quant,
            checkpoint_dir=checkpoint_dir,
            engine_dir=engine_dir,
            architecture=self.model,
        )


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What came out: the engine's config.json, options that were reset, and the GPU that built it."""

    config: Mapping[str, Any]
    resets: tuple[Reset, ...]
    gpu: GpuProfile | None


def compile_engine(
    quantized: QuantizedCheckpoint,
    engine: EngineConfig,
    *,
    architecture: SourceFacts,
    out: Path,
    progress: Progress,
    host: HostProfile | None = None,
    explain: Explain = lambda _lines: "",
    timing_caches: Path | None = None,
    log_directory: Path | None = None,
) -> None:
    """Compile trtllm/ of `quantized` and write an Engine directory to `out`, built or deferred.

    Args:
        quantized: an artifact with trtllm/.
        engine: limits, options and where to build.
        architecture: the source model.
        out: an existing or new directory.
        progress: told of every choice, the place, the phases and every option that was reset.
        host: this machine; None looks.
        explain: turns the last lines of a failed build into a likely cause, "" when none is known.
        timing_caches: directory of timing caches that are kept between builds; None keeps none.
        log_directory: where log and reproduce script go; None is out/build. Name one that outlives a failure.

    Raises:
        ConfigError: the toolchain is none that builds engines.
        HostError: the place that the config names is not possible here.
        IntegrityError: the checkpoint does not fit the config, or the engine is incomplete.
        ToolError: trtllm-build failed; nothing of its output stays.
    """
    host = host or probe()
    work = _prepare(quantized, engine, architecture)
    place = choose_place(engine, host, work.toolchain)
    progress.note(f"{place.kind} build: {place.why}")
    for choice in work.choices:
        progress.note(f"{choice.what} = {'on' if choice.value is None else choice.value}: {choice.why}")
    out.mkdir(parents=True, exist_ok=True)
    built = None
    if place.kind == "deferred":
        _note_resets(work.expected.resets, "the build will make it", progress)
        _defer(work, out)
    else:
        built = _build(
            work,
            place,
            host,
            out=out,
            progress=progress,
            explain=explain,
            timing_caches=timing_caches,
            log_directory=log_directory,
        )
        _note_resets(built.resets, "the build made it", progress)
    copy_tokenizer(work.checkpoint, out)
    write_json(out / "engine.json", _engine_json(work, built))


def _prepare(quantized: QuantizedCheckpoint, engine: EngineConfig, source: SourceFacts) -> _Work:
    checkpoint = quantized.path / "trtllm"
    config = read_json(checkpoint / "config.json")
    ranks = Ranks(
        tensor=engine.tensor_parallel_size, pipeline=engine.pipeline_parallel_size, context=engine.context_parallel_size
    )
    _require_ranks(checkpoint, config, ranks)
    toolchain = find(engine.toolchain, engine.build.image_tag)
    quant = QuantFacts.of_checkpoint(config)
    model = _Model(
        architecture=str(config["architecture"]),
        vocab_size=source.vocab_size,
        max_position_embeddings=source.max_position_embeddings,
    )
    sm = Case(engine=engine, quant=quant, model=model).sm
    choices = choose(engine, quant, model)
    lasting = [[choice.what, choice.value] for choice in choices if choice.what not in ("workers", "log_level")]
    identity = {"checkpoint": quantized.digest, "flags": lasting, "tensorrt_llm": toolchain.tensorrt_llm}
    return _Work(
        engine=engine,
        source=source,
        model=model,
        quant=quant,
        quantization=config.get("quantization") or {},
        checkpoint=checkpoint,
        ranks=ranks,
        sm=sm,
        toolchain=toolchain,
        choices=choices,
        expected=expect(choices, quant=quant, architecture=model.architecture, sm=sm, ranks=ranks),
        key=digest_json({**identity, "image": engine.build.image or toolchain.tag, "gpu": engine.gpu}),
    )


def _require_ranks(checkpoint: Path, config: Mapping[str, Any], ranks: Ranks) -> None:
    """Ranks of one context share a file; a rank without a file is a bare assert in trtllm-build."""
    mapping = config.get("mapping") or {}
    problems = [
        Problem(
            where=f"mapping.{name}", message=f"is {mapping.get(name, 1)} in the checkpoint and {wanted} in the config."
        )
        for name, wanted in (("tp_size", ranks.tensor), ("pp_size", ranks.pipeline))
        if mapping.get(name, 1) != wanted
    ]
    problems += [
        Problem(where=f"rank{rank}.safetensors", message="is missing.")
        for rank in range(ranks.tensor * ranks.pipeline)
        if not (checkpoint / f"rank{rank}.safetensors").is_file()
    ]
    if problems:
        raise IntegrityError(
            f"{checkpoint} does not fit the config", problems=problems, hint="Build the quantized checkpoint again."
        )


def _defer(work: _Work, out: Path) -> None:
    for path in sorted(work.checkpoint.iterdir()):
        if path.suffix == ".safetensors" or path.name in ("config.json", "quant_cfg.json"):
            link_or_copy(path, out / "checkpoint" / path.name)
    argv = work.argv(deferred.CHECKPOINT, deferred.ENGINE)
    job = deferred.Job(
        key=work.key,
        argv=with_files(argv, work.engine, input_cache=None, output_cache=deferred.OUTPUT_CACHE),
        world_size=work.ranks.world_size,
        gpu=str(work.engine.gpu),
        sm=work.sm,
        workers=work.engine.build.workers,
        toolchain=work.toolchain,
        image=work.image,
    )
    deferred.write(job, out / "build")


def _build(
    work: _Work,
    place: Place,
    host: HostProfile,
    *,
    out: Path,
    progress: Progress,
    explain: Explain,
    timing_caches: Path | None,
    log_directory: Path | None,
) -> _Built:
    """Run trtllm-build into a directory beside its destination, check what came out, put it in place."""
    staging = out / ".engine.building"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        run = Run(
            place=place,
            image=work.image,
            engine=work.engine,
            argv=work.argv,
            checkpoint=work.checkpoint,
            output=staging,
            cache=_timing_cache(work, host, timing_caches or staging / ".timing"),
            log_path=(log_directory or out / "build") / "trtllm-build.log",
        )
        version = run.start(progress, explain, ranks=work.ranks.world_size)
        shutil.rmtree(staging / ".timing", ignore_errors=True)
        built = _read_back(work, staging, version, host)
        gpu = {"gpu": built.gpu.name, "sm": built.gpu.sm, "driver": built.gpu.driver} if built.gpu else {}
        manifest = {"key": work.key, "image": work.image if place.kind == "container" else "", **gpu}
        write_json(staging / "manifest.json", manifest | {"tensorrt_llm": built.config.get("version")})
        staging.rename(out / "engine")
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return built


def _timing_cache(work: _Work, host: HostProfile, directory: Path) -> Path:
    """Return the cache of this image, GPU and driver; a cache of others is rejected by TensorRT."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = [work.toolchain.tag, *((host.gpus[0].name, host.gpus[0].driver) if host.gpus else ("unknown-gpu",))]
    return directory / f"{re.sub(r'[^A-Za-z0-9.]+', '-', '-'.join(parts))}.cache"


def _read_back(work: _Work, directory: Path, version: str, host: HostProfile) -> _Built:
    if work.engine.build.dry_run:
        raise HostError("engine.build.dry_run builds no engine", hint="Remove it to get one; the log tells the rest.")
    missing = [name for name in ("config.json", *_rank_files(work)) if not (directory / name).is_file()]
    if missing:
        raise IntegrityError(
            f"trtllm-build ended well and did not write {', '.join(missing)}", hint="Look into the build log."
        )
    config = read_json(directory / "config.json")
    made_by = str(config.get("version") or version)
    if made_by != work.toolchain.tensorrt_llm:
        raise IntegrityError(
            f"TensorRT-LLM {made_by} built the engine, and the config pins {work.toolchain.tensorrt_llm}",
            hint=f"Build in {work.image}, or set engine.toolchain.",
        )
    resets = compare(work.choices, work.expected, config, work.quant.dtype)
    return _Built(config=config, resets=resets, gpu=host.gpus[0] if host.gpus else None)


def _rank_files(work: _Work) -> Iterator[str]:
    return (f"rank{rank}.engine" for rank in range(work.ranks.world_size))


def _note_resets(resets: Sequence[Reset], how: str, progress: Progress) -> None:
    for reset in resets:
        progress.note(f"{reset.option} was asked to be {reset.asked}; {how} {reset.becomes}: {reset.why}")


def _engine_json(work: _Work, built: _Built | None) -> dict[str, Any]:
    engine, source = work.engine, work.source
    config = built.config["build_config"] if built else work.expected.build_config
    limits = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "max_beam_width")
    gpu: dict[str, Any] = {"name": engine.gpu, "sm": work.sm}
    if built is not None and built.gpu is not None:
        gpu = {"name": built.gpu.name, "sm": built.gpu.sm, "driver": built.gpu.driver}
    return {
        "target": NAME,
        "state": "deferred" if built is None else "built",
        "key": work.key,
        "limits": {name: config[name] for name in limits} | {"vocab_size": source.vocab_size},
        "world_size": work.ranks.world_size,
        "tp": work.ranks.tensor,
        "pp": work.ranks.pipeline,
        "cp": work.ranks.context,
        "build_config": config,
        "resets": [asdict(reset) for reset in (built.resets if built else work.expected.resets)],
        "quantization": dict(work.quantization),
        "dtype": work.quant.dtype,
        "logits_dtype": next(choice.value for choice in work.choices if choice.what == "logits_dtype"),
        "kv_cache": runtime_kv_cache(engine),
        "enable_chunked_context": engine.enable_chunked_context,
        "preset": engine.preset,
        "eos_token_ids": list(source.eos_token_ids),
        "pad_token_id": source.pad_token_id,
        "architecture": work.model.architecture,
        "toolchain": toolchain_json(work.toolchain, work.image),
        "gpu": gpu,
        "command": list(work.argv("checkpoint", "engine")),
        "choices": [asdict(choice) for choice in work.choices],
    }


def runtime_kv_cache(engine: EngineConfig) -> dict[str, Any]:
    """Return what the server has to be told about the KV cache; None leaves it to the backend."""
    kv_cache = engine.kv_cache
    return {
        "enable_block_reuse": kv_cache.enable_block_reuse,
        "free_gpu_memory_fraction": kv_cache.free_gpu_memory_fraction,
        "host_memory_bytes": kv_cache.host_memory_bytes,
        "size_gib": kv_cache.size_gib,
    }


def toolchain_json(toolchain: Toolchain, image: str) -> dict[str, str]:
    """Return the toolchain as engine.json has it."""
    names = ("tensorrt_llm", "tensorrt", "cuda", "driver", "digest")
    return {name: getattr(toolchain, name) for name in names} | {"image": image}
